"""A dependable etcd v3 client: watches that reconnect, leases that are renewed, timeouts, and typed
errors."""
