"""The errors of etcd, grouped by the action that the caller must take. No gRPC error leaves this package."""

from __future__ import annotations


class StoreError(Exception):
    """Base class of all errors of ``elasticd.etcd``. The message is one sentence for a person."""


class StoreUnavailable(StoreError):
    """etcd did not respond, or could not serve the request. Retry.

    ``sent`` is False if the request certainly had no effect.
    """

    def __init__(self, why: str, *, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent


class NoSpace(StoreUnavailable):
    """etcd has used up its space quota: it responds, but takes no writes until space is freed. Deletions
    outside transactions and keep-alives still work."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"etcd at {endpoint} is full and takes no more writes: compact and defragment it, then disarm "
            "its alarm (etcdctl compact, defrag, alarm disarm), or raise its --quota-backend-bytes",
            sent=False,
        )


class StoreRefused(StoreError):
    """etcd rejects the request: credentials, certificates, permissions. Fix the input."""


class TokenExpired(StoreRefused):
    """etcd no longer knows the token of a login (etcd restarted), or users or roles have changed since it was
    issued. Log in again."""


class NoLogins(StoreRefused):
    """Authentication is not enabled in etcd."""


class NoSuchName(StoreRefused):
    """There is no user or role of this name."""


class WrongEndpoint(StoreError):
    """The server at the address is not the intended etcd: wrong scheme or wrong port. Fix the input."""


class LeaseGone(StoreError):
    """The lease of a leased write no longer exists. Nothing was written."""


class Compacted(StoreError):
    """The requested revision is no longer kept. List again."""


class HistoryLost(StoreError):
    """etcd is at an older revision than one seen before: its data was wiped or restored."""


class BadRecord(StoreError):
    """A value in etcd does not fit its key. ``key`` names the key."""

    def __init__(self, key: str, why: str) -> None:
        shown = key if key.isprintable() else repr(key)
        super().__init__(f"the value of {shown} in etcd is not usable: {why}")
        self.key = key


class NewerRecord(BadRecord):
    """A newer elasticd wrote the value. Upgrade this one."""

    def __init__(self, key: str, version: int, known: int) -> None:
        super().__init__(
            key,
            f"it has version {version}, and this elasticd knows up to {known}; "
            "it was written by a newer elasticd, so upgrade this one",
        )
        self.version = version
