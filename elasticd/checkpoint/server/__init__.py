"""The saver process: it writes, commits and replicates the shards that the workers of its node hand over."""
