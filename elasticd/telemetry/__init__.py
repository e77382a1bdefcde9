"""What people and machines are told: log events, the live view, the last screen.

Turns the core's facts and reasons into words. Never talks to etcd, processes or the disk.
"""
