"""Programs that the workers' own Python runs to say what it can do; each prints one JSON object."""
