"""etcd for those who ask once and wait: the command line, and the rendezvous of plain torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from elasticd.core.ports import (
    Answer,
    Applied,
    Delete,
    Entry,
    Guard,
    Listing,
    Put,
    Refused,
    StillThere,
    Unknown,
    Write,
)
from elasticd.etcd import kv, records
from elasticd.etcd._client3 import rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.connection import Connection
from elasticd.etcd.diagnose import diagnose
from elasticd.etcd.errors import BadRecord, LeaseGone, StoreUnavailable
from elasticd.etcd.kv import KeyValue, Range
from elasticd.etcd.names import ROOT, check_name, job_prefix


@dataclass(frozen=True, slots=True)
class Status:
    """What an etcd says about itself. ``leader``: whether this member leads its cluster."""

    version: str
    leader: bool


def _job_name(name: bytes) -> list[str]:
    """The name as text, if it is one that a job can have."""
    try:
        text = name.decode()
        check_name(text, "job")
    except ValueError:
        return []
    return [text]


class Client:
    """Calls that block until etcd has answered, with timeouts, raising StoreError. Has no threads
    of its own; use it as a context manager, or close it."""

    def __init__(self, access: EtcdAccess) -> None:
        self.access = access
        self._connection = Connection(access)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    # ---- is it there?

    def status(self) -> Status:
        """Ask the endpoint in use how it is. Needs no permission."""
        response = self._connection.call("status", rpc.StatusRequest(), idempotent=True)
        return Status(
            version=response.version,
            leader=response.leader == response.header.member_id,
        )

    def check(self, key: bytes = ROOT) -> Status:
        """That there is an etcd which lets us read ``key`` (a role may be limited to what is below a job's
        prefix) and has a quorum. Raises the error that says best what is wrong: WrongEndpoint, StoreRefused,
        StoreUnavailable."""
        try:
            self._connection.call("status", rpc.StatusRequest(), tries=1)
        except StoreUnavailable as error:
            if (found := diagnose(self.access)) is not None:
                raise found from error
        status = self.status()
        self.get_raw(key)
        return status

    def full(self) -> bool:
        """Whether a member has raised the alarm for space: no writes until it is disarmed."""
        response = self._connection.call("alarm", rpc.AlarmRequest(), idempotent=True)  # lists them
        return any(raised.alarm == rpc.NOSPACE for raised in response.alarms)

    def members(self) -> dict[str, tuple[str, ...]]:
        """The members of the cluster by name, and the URLs at which they serve clients."""
        response = self._connection.call("members", rpc.MemberListRequest(), idempotent=True)
        return {member.name: tuple(member.clientURLs) for member in response.members}

    # ---- facts

    def jobs(self) -> list[str]:
        """The names of all jobs that have keys, in order."""
        names: list[str] = []
        key = ROOT
        end = kv.prefix_end(ROOT)
        while True:
            request = rpc.RangeRequest(key=key, range_end=end, limit=1, keys_only=True)
            response = self._connection.call("range", request, idempotent=True)
            if not response.kvs:
                return names
            name, slash, _ = response.kvs[0].key.removeprefix(ROOT).partition(b"/")
            if slash:
                names += _job_name(name)
                key = kv.prefix_end(ROOT + name + b"/")
            else:  # somebody else's key among ours
                key = response.kvs[0].key + b"\0"

    def has(self, job: str) -> bool:
        """Whether the job has keys."""
        request = kv.range_request(job_prefix(job), prefix=True, limit=1, keys_only=True)
        return bool(self._connection.call("range", request, idempotent=True).kvs)

    def get(self, job: str, key: str) -> Entry | None:
        """The fact under a key of the job, or None. Raises BadRecord or NewerRecord too."""
        item = self.get_raw(job_prefix(job) + key.encode())
        if item is None or item.value is None:
            return None
        return Entry(key, records.decode(key, item.value), item.revision, item.created)

    def list(self, job: str, prefix: str = "") -> tuple[Listing, tuple[BadRecord, ...]]:
        """All facts of the job under a prefix at one moment, and the values that are none."""
        root = job_prefix(job)
        found = self.list_raw(root + prefix.encode())
        entries: list[Entry] = []
        bad: list[BadRecord] = []
        for item in found.items:
            key = item.key.removeprefix(root).decode(errors="replace")
            try:
                fact = records.decode(key, item.value or b"")
            except BadRecord as error:
                bad.append(error)
            else:
                if fact is not None:
                    entries.append(Entry(key, fact, item.revision, item.created))
        return Listing(tuple(entries), found.revision), tuple(bad)

    def transact(
        self, job: str, guards: tuple[Guard, ...], writes: tuple[Write, ...], *, lease: int = 0
    ) -> Answer:
        """Apply the writes if the guards hold. Leased puts go on ``lease``; if that is gone, the
        answer is Refused. Unknown only where the writes may have happened; else errors raise."""
        root = job_prefix(job)
        compares = [
            kv.if_created(root + g.key.encode(), g.created)
            if isinstance(g, StillThere)
            else kv.if_unchanged(root + g.key.encode(), g.revision)
            for g in guards
        ]
        operations = []
        for write in writes:
            key = root + write.key.encode()
            match write:
                case Put():
                    value = records.encode(write.key, write.fact)
                    operations.append(kv.put_op(key, value, lease if write.leased else 0))
                case Delete():
                    operations.append(kv.delete_op(key, prefix=write.prefix))
        try:
            response = self._connection.call("txn", kv.txn_request(compares, operations))
        except LeaseGone:
            return Refused()
        except StoreUnavailable as error:
            if error.sent:
                return Unknown(str(error))
            raise
        return Applied(response.header.revision) if response.succeeded else Refused()

    # ---- leases

    def grant(self, ttl_s: int) -> tuple[int, float]:
        """A lease: its id, and the seconds etcd really gives (never less than about two)."""
        response = self._connection.call("grant", rpc.LeaseGrantRequest(TTL=ttl_s))
        return response.ID, float(response.TTL)

    def revoke(self, lease: int) -> None:
        """Give a lease back; its keys vanish. One that is gone already is no error."""
        try:
            self._connection.call("revoke", rpc.LeaseRevokeRequest(ID=lease))
        except LeaseGone:
            pass

    # ---- plain bytes

    def get_raw(self, key: bytes) -> KeyValue | None:
        """The key as it is, whoever wrote it."""
        response = self._connection.call("range", kv.range_request(key), idempotent=True)
        items = kv.range_result(response).items
        return items[0] if items else None

    def list_raw(self, prefix: bytes) -> Range:
        """All keys that start with ``prefix``, at one moment."""
        response = self._connection.call("range", kv.range_request(prefix, prefix=True), idempotent=True)
        return kv.range_result(response)

    def swap_raw(self, key: bytes, value: bytes, revision: int, *, lease: int = 0) -> int | None:
        """Put if the key's mod_revision is still this (0: does not exist). The new one, or None.

        Raises StoreUnavailable; where its ``sent`` is true, the value may be there or come yet.
        """
        request = kv.txn_request([kv.if_unchanged(key, revision)], [kv.put_op(key, value, lease)])
        response = self._connection.call("txn", request)
        return int(response.header.revision) if response.succeeded else None

    def delete_raw(self, key: bytes, *, prefix: bool = False) -> None:
        """Delete a key, or all that start with it; also where etcd is full."""
        self._connection.call("delete", kv.delete_op(key, prefix=prefix).request_delete_range)

    def compact(self, revision: int) -> None:
        """Forget all history before a revision."""
        self._connection.call("compact", rpc.CompactionRequest(revision=revision))
