"""A busy machine is not taken for a partition."""

from __future__ import annotations

import socket

from elasticd.etcd.reachability import reachable


def test_a_listening_host_is_reached_even_with_no_time_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        assert reachable((endpoint,), timeout_s=0.0) == {endpoint}
