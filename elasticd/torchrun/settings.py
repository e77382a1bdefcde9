"""The rendezvous parameters that torchrun was given, checked and completed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous import RendezvousParameters

from elasticd.etcd.access import EtcdAccess, parse_endpoints
from elasticd.torchrun.decide import Rules

_LEASE_FLOOR_S = 2.0  # the shortest lease that etcd grants, in seconds
_TORCHRUN_FILLS_IN_S = 900.0  # torchrun adds timeout=900 to every --rdzv-conf without a timeout

_KEYS = {
    # torch's names
    "join_timeout": "seconds to wait for enough nodes; 600",
    "last_call_timeout": "seconds each round below the maximum waits for more nodes; none",
    "close_timeout": "seconds that closing may take; 30",
    "keep_alive_interval": "seconds between keep-alives; ttl is this times keep_alive_max_attempt",
    "keep_alive_max_attempt": "keep-alives that may fail before the node counts as lost; 3",
    "heartbeat_timeout": "seconds one request to etcd may take; 2",
    "read_timeout": "seconds without a response of etcd or the round's store before joining fails; 60",
    "timeout": "what older back ends call join_timeout",
    "protocol": "http or https",
    "cacert": "file of the authority that signed etcd's certificate",
    "cert": "file of the client certificate",
    "key": "file of the client certificate's key",
    "ca_cert": "the same as cacert",
    "ssl_cert": "the same as cert",
    "ssl_cert_key": "the same as key",
    # elasticd's names
    "ttl": "whole seconds after which a node that is silent counts as lost; 5",
    "settle_s": "seconds new nodes wait for more before a round below the maximum forms; 1",
    "closed_s": "seconds for which a finished job's id stays closed; 7200",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """One node's settings for a rendezvous; times in seconds.

    ``address``: where other nodes reach this node, if the user gave it. ``silence_s``: how long etcd may be
    silent before a join fails; a world that trains continues without etcd.
    """

    run_id: str
    access: EtcdAccess
    rules: Rules
    address: str | None
    ttl_s: float = 5.0
    join_timeout_s: float = 600.0
    close_timeout_s: float = 30.0
    silence_s: float = 60.0
    closed_s: float = 7200.0


def settings_from(params: RendezvousParameters) -> Settings:
    """Return the settings. Raises ValueError with one sentence for a person."""
    unknown = sorted(set(params.config) - set(_KEYS))
    if unknown:
        raise ValueError(
            f"the rendezvous back end {params.backend} does not know the --rdzv-conf key"
            f"{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; it knows {', '.join(_KEYS)}"
        )
    run_id = str(params.run_id or "")
    if run_id in ("", "none"):
        raise ValueError(
            "give the job an id of its own with --rdzv-id: jobs that share an etcd and torchrun's default "
            "id, 'none', would join each other"
        )
    if not params.endpoint:
        raise ValueError("give the address of etcd with --rdzv-endpoint, such as host:2379")

    timeout_s = _seconds(params, "timeout")
    patience_s = 600.0 if timeout_s in (None, _TORCHRUN_FILLS_IN_S) else timeout_s
    return Settings(
        run_id=run_id,
        access=_access(params, _or(_seconds(params, "heartbeat_timeout"), 2.0)),
        rules=Rules(
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            settle_s=_or(_seconds(params, "settle_s", zero=True), 1.0),
            last_call_s=_seconds(params, "last_call_timeout"),
        ),
        address=params.local_addr,
        ttl_s=_ttl(params),
        join_timeout_s=_or(_seconds(params, "join_timeout"), _or(patience_s, 600.0)),
        close_timeout_s=_or(_seconds(params, "close_timeout"), 30.0),
        silence_s=_or(_seconds(params, "read_timeout"), 60.0),
        closed_s=_or(_seconds(params, "closed_s"), 7200.0),
    )


def _ttl(params: RendezvousParameters) -> float:
    """Return elasticd's ``ttl``, or torch's equivalent: interval times attempts. The lease is renewed three
    times per ttl."""
    ttl_s = _seconds(params, "ttl")
    interval_s = _seconds(params, "keep_alive_interval")
    attempts = _seconds(params, "keep_alive_max_attempt")
    if ttl_s is None:
        ttl_s = 5.0 if interval_s is None and attempts is None else _or(interval_s, 5.0) * _or(attempts, 3.0)
    elif interval_s is not None or attempts is not None:
        raise ValueError("--rdzv-conf gives ttl and keep_alive_*; give one, as the other follows from it")
    if ttl_s < _LEASE_FLOOR_S:
        raise ValueError(f"--rdzv-conf sets a ttl of {ttl_s:g} s, but etcd's leases last at least 2 s")
    return ttl_s


def _access(params: RendezvousParameters, timeout_s: float) -> EtcdAccess:
    def either(name: str, other: str) -> str | None:
        if name in params.config and other in params.config:
            raise ValueError(f"--rdzv-conf gives both {name} and {other}, which are the same")
        value = params.get(name, params.get(other))
        return None if value is None else str(value)

    endpoint = params.endpoint
    protocol = params.get("protocol")
    if protocol is not None:
        protocol = str(protocol).strip().lower()
        if protocol not in ("http", "https"):
            raise ValueError(f"--rdzv-conf protocol is {protocol!r}; give http or https")
        endpoint = ",".join(e if "://" in e else f"{protocol}://{e.strip()}" for e in endpoint.split(","))
    return parse_endpoints(
        endpoint,
        cacert=either("cacert", "ca_cert"),
        cert=either("cert", "ssl_cert"),
        key=either("key", "ssl_cert_key"),
        timeout_s=timeout_s,
    )


def _seconds(params: RendezvousParameters, name: str, *, zero: bool = False) -> float | None:
    value = params.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"--rdzv-conf {name} is {value!r}; give a number") from None
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"--rdzv-conf {name} is {value}; give a number above 0")
    return number


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
