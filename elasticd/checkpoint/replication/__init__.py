"""Copies of shards in other nodes' memory: the copies, and the protocol between the savers of nodes."""
