"""Checkpoints on disk: the format, the saver that writes checkpoints, and the verified reading of them.

The package knows nothing of the agent or of etcd. Only the code that makes or fills tensors imports torch, so
that the saver, which only moves bytes, stays small.
"""
