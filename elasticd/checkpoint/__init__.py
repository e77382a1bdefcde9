"""Checkpoints on disk: the format, the saver that writes it, and reading it back, verified.

Knows nothing of the agent or of etcd. Imports torch only where tensors are made or filled, so that
the saver, which only moves bytes, stays small.
"""
