"""Programs that run in the workers' Python to find out what it can do. Each prints one JSON object."""
