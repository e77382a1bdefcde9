"""etcd v3, made dependable: reconnecting watches, leases that are kept, timeouts, typed errors."""
