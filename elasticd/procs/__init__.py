"""The processes of one node: starting them, seeing them end, and leaving none behind.

``warden`` is a small process of its own that is the parent of all workers; ``keeper`` is the
agent's end of it; ``workers`` is the core's ``Procs`` on top. ``output`` carries what workers
print, ``page`` reads their heartbeats, ``errorfile`` says why one failed. Linux only.
"""
