"""The processes of one node: start them, notice their end, and leave none behind.

``warden`` is a small process that is the parent of all workers. ``warden_client`` is the agent's end of its
channel. ``workers`` implements the core's ``Procs``. ``output`` carries the workers' output. ``page`` reads
their heartbeats. ``environment`` has the variables that workers get. ``errorfile`` says why a worker failed.
Linux only.
"""
