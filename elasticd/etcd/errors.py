"""What can go wrong with etcd, named by whose fault it is. No gRPC error leaves this package."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of ``elasticd.etcd``. Its text is one sentence for a person."""


class StoreUnavailable(StoreError):
    """etcd did not answer, or could not serve. Retry.

    ``sent`` is False where it is certain that the request had no effect.
    """

    def __init__(self, why: str, *, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent


class NoSpace(StoreUnavailable):
    """etcd has used up its quota of space: it answers, and takes no more writes until somebody makes room.
    Deletions outside transactions and keep-alives still work."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"etcd at {endpoint} is full and takes no more writes: compact and defragment it, then disarm "
            "its alarm (etcdctl compact, defrag, alarm disarm), or raise its --quota-backend-bytes",
            sent=False,
        )


class StoreRefused(StoreError):
    """etcd answers, and says no: credentials, certificates, permissions. Fix the input."""


class TokenExpired(StoreRefused):
    """The token of a password login is no longer known (etcd restarted), or users or roles have changed since
    it was looked at. Log in again."""


class NoLogins(StoreRefused):
    """etcd asks nobody who they are."""


class NoSuchName(StoreRefused):
    """There is no user, or no role, of this name."""


class WrongEndpoint(StoreError):
    """What listens there is not the etcd that was meant: wrong scheme, wrong port. Fix the input."""


class LeaseGone(StoreError):
    """The lease of a leased write no longer exists; nothing was written."""


class Compacted(StoreError):
    """The revision asked for is no longer kept. List again."""


class HistoryLost(StoreError):
    """etcd is at an older revision than it has already shown us: it was wiped or restored."""


class BadRecord(StoreError):
    """A value in etcd that is not what its key promises. ``key`` names it."""

    def __init__(self, key: str, why: str) -> None:
        shown = key if key.isprintable() else repr(key)
        super().__init__(f"the value of {shown} in etcd is not usable: {why}")
        self.key = key


class NewerRecord(BadRecord):
    """A value written by a newer elasticd. Upgrade this one."""

    def __init__(self, key: str, version: int, known: int) -> None:
        super().__init__(
            key,
            f"it has version {version}, and this elasticd knows up to {known}; "
            "it was written by a newer elasticd, so upgrade this one",
        )
        self.version = version
