"""The loop that ties a node together: events into the core, its actions out to the edges."""
