"""The channels between the processes of one machine: agent, warden, zygote, workers and saver.

A channel is a Unix socket, and a packet on the socket is one message with its open files. Messages are frozen
dataclasses, declared in the modules ``*_messages``. ``codec`` turns messages into bytes and back, and checks
every field. ``framing`` sends and receives.

Standard library only. The warden must start in milliseconds, and must work where an installed package is
broken. The zygote loads these files by path, before the first line of the user's script. A package imported
there could be another version than the script asks for.
"""
