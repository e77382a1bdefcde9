"""The connections over which agents tell the leader their telemetry, and over which commands and live views
ask for all of it: authenticated TCP with sealed frames (``checkpoint.replication.wire``).

The key ``leader`` in etcd says where the leader listens, and has the secret that each caller must prove to
know. So a client that may read the job's keys may send telemetry and ask for it. Messages are JSON of
declared types, validated as records of etcd are.
"""
