"""Pure decisions: frozen events in, actions and reasons out.

Standard library only; no clock, randomness, threads, sockets, files or logs. Time is an argument,
in seconds since the epoch, and never goes backwards. The same code runs in the daemon and in the
simulator of ``tests/sim``.
"""
