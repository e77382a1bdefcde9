"""Everything that elasticd shows to people and programs: log events, the live view, metrics, pages and
reports.

The package turns the core's facts and reasons into words. It never talks to etcd or to processes.
"""
