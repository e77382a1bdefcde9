"""A State whose model is sharded (FSDP2): the copies of shards that a commit makes, and the layout of the
model for each world."""
