"""A blocking client of etcd, for the command line and for the rendezvous of plain torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from elasticd.core.ports import Answer, Applied, Entry, Guard, Listing, NoAnswer, Refused, Write
from elasticd.etcd import job_keys, kv
from elasticd.etcd._client3 import rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.connection import Connection
from elasticd.etcd.diagnose import diagnose
from elasticd.etcd.errors import BadRecord, LeaseGone, StoreUnavailable
from elasticd.etcd.kv import KeyValue, Range
from elasticd.etcd.names import ROOT, check_name, job_prefix


@dataclass(frozen=True, slots=True)
class Status:
    """The status that an etcd member reports. ``leader``: whether this member leads its cluster."""

    version: str
    leader: bool


def _job_name(name: bytes) -> list[str]:
    """Return the name as text, in a list that is empty if no job can have this name."""
    try:
        text = name.decode()
        check_name(text, "job")
    except ValueError:
        return []
    return [text]


class Client:
    """Calls that block until etcd responds or a timeout passes. They raise StoreError. The client has no
    threads of its own; use it as a context manager, or close it."""

    def __init__(self, access: EtcdAccess) -> None:
        self.access = access
        self._connection = Connection(access)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    # ---- the state of etcd

    def status(self) -> Status:
        """Return the status of the endpoint in use. Needs no permission."""
        response = self._connection.call("status", rpc.StatusRequest(), idempotent=True)
        return Status(
            version=response.version,
            leader=response.leader == response.header.member_id,
        )

    def check(self, key: bytes = ROOT) -> Status:
        """Check that etcd has a quorum and lets this user read ``key`` (a role may be limited to a job's
        prefix), and return the status. Raises the error that names the fault best: WrongEndpoint,
        StoreRefused, StoreUnavailable."""
        try:
            self._connection.call("status", rpc.StatusRequest(), tries=1)
        except StoreUnavailable as error:
            if (found := diagnose(self.access)) is not None:
                raise found from error
        status = self.status()
        self.get_raw(key)
        return status

    def full(self) -> bool:
        """Return whether a member has raised the space alarm: etcd takes no writes until the alarm is
        disarmed."""
        # An empty request lists the alarms.
        response = self._connection.call("alarm", rpc.AlarmRequest(), idempotent=True)
        return any(raised.alarm == rpc.NOSPACE for raised in response.alarms)

    # ---- facts

    def jobs(self) -> list[str]:
        """Return the names of all jobs that have keys, sorted."""
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
            else:  # elasticd did not write this key
                key = response.kvs[0].key + b"\0"

    def has(self, job: str) -> bool:
        """Return whether the job has keys."""
        request = kv.range_request(job_prefix(job), prefix=True, limit=1, keys_only=True)
        return bool(self._connection.call("range", request, idempotent=True).kvs)

    def get(self, job: str, key: str) -> Entry | None:
        """Return the fact under a key of the job, or None. Also raises BadRecord or NewerRecord."""
        root = job_prefix(job)
        item = self.get_raw(root + key.encode())
        return None if item is None else job_keys.entry(root, item)

    def list(self, job: str, prefix: str = "") -> tuple[Listing, tuple[BadRecord, ...]]:
        """Return all facts of the job under a prefix at one revision, and errors for the values that are not
        facts."""
        root = job_prefix(job)
        found = self.list_raw(root + prefix.encode())
        entries: list[Entry] = []
        bad: list[BadRecord] = []
        for item in found.items:
            try:
                entry = job_keys.entry(root, item)
            except BadRecord as error:
                bad.append(error)
            else:
                if entry is not None:
                    entries.append(entry)
        return Listing(tuple(entries), found.revision), tuple(bad)

    def transact(
        self, job: str, guards: tuple[Guard, ...], writes: tuple[Write, ...], *, lease: int = 0
    ) -> Answer:
        """Apply the writes if the guards hold. Leased puts use ``lease``; if the lease has ended, return
        Refused. Return NoAnswer if the writes may have happened; all other errors raise."""
        request = job_keys.transaction(job_prefix(job), guards, writes, lease)
        try:
            response = self._connection.call("txn", request)
        except LeaseGone:
            return Refused()
        except StoreUnavailable as error:
            if error.sent:
                return NoAnswer(str(error))
            raise
        return Applied(response.header.revision) if response.succeeded else Refused()

    # ---- leases

    def grant(self, ttl_s: int) -> tuple[int, float]:
        """Create a lease. Return its id, and the seconds that etcd grants (at least about two)."""
        response = self._connection.call("grant", rpc.LeaseGrantRequest(TTL=ttl_s))
        return response.ID, float(response.TTL)

    def revoke(self, lease: int) -> None:
        """Revoke a lease, which deletes its keys. A lease that has ended is ignored."""
        try:
            self._connection.call("revoke", rpc.LeaseRevokeRequest(ID=lease))
        except LeaseGone:
            pass

    # ---- plain bytes

    def get_raw(self, key: bytes) -> KeyValue | None:
        """Return a key's raw value; None if there is no such key."""
        response = self._connection.call("range", kv.range_request(key), idempotent=True)
        items = kv.range_result(response).items
        return items[0] if items else None

    def list_raw(self, prefix: bytes) -> Range:
        """Return all keys with the prefix, at one revision."""
        response = self._connection.call("range", kv.range_request(prefix, prefix=True), idempotent=True)
        return kv.range_result(response)

    def swap_raw(self, key: bytes, value: bytes, revision: int, *, lease: int = 0) -> int | None:
        """Put the value if the key's mod_revision is ``revision`` (0: the key does not exist). Return the new
        revision; None if the key has changed.

        Raises StoreUnavailable; if its ``sent`` is true, the value may have been written, or may still be.
        """
        request = kv.txn_request([kv.if_unchanged(key, revision)], [kv.put_op(key, value, lease)])
        response = self._connection.call("txn", request)
        return int(response.header.revision) if response.succeeded else None

    def delete_raw(self, key: bytes, *, prefix: bool = False) -> None:
        """Delete a key, or all keys with the prefix. Works even if etcd is full."""
        self._connection.call("delete", kv.delete_op(key, prefix=prefix).request_delete_range)
