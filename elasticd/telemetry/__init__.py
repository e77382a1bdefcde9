"""What elasticd tells people and machines: log events, the live view, metrics, pages and reports.

The package turns the core's facts and reasons into words. It never talks to etcd or to processes.
"""
