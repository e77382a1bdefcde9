"""Pure decisions: frozen events in, actions and reasons out.

The package imports the standard library only, and uses no clock, randomness, threads, sockets, files or logs.
Time is an argument, in seconds since the epoch, and never goes backwards. The daemon and the simulator
(``tests/sim``) run the same code.
"""
