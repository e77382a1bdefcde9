"""The saver process: it writes, commits and replicates what the workers of its node hand over."""
