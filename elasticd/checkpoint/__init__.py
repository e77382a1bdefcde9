"""Checkpoints.

* ``format``: the files of a checkpoint.
* ``storage``: where checkpoints are kept, and the verified reading of them.
* ``newest``: the record of committed checkpoints.
* ``replication``: copies of shards in other nodes' memory.
* ``client``: the code that runs in a worker. No other part imports torch when it is imported.
* ``server``: the saver process, which only moves bytes.
* ``protocol``, ``shared_memory`` and ``huge_pages``: shared by a worker and the saver of its node.

The package knows nothing of the agent or of etcd.
"""
