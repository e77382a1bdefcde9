"""The committed checkpoints, in etcd. The file beside the checkpoints is a copy, for readers without etcd."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from elasticd.checkpoint.format.manifest import BadCheckpoint
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.newest.retention import Commit, CommitRefused, Keep, commit
from elasticd.checkpoint.storage import BadStore, CheckpointStore, error_text, store_at
from elasticd.checkpoint.storage.reading import is_finished
from elasticd.core.facts import Checkpoint, Round, Saved
from elasticd.core.ports import Answer, Applied, Entry, NoAnswer, Put, Unchanged
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.errors import BadRecord, StoreError, StoreUnavailable

_KEY: Final = "checkpoint"
_AGAIN_S: Final = 0.5
PATIENCE_S: Final = 600.0  # how long a commit waits while etcd is away


class EtcdPointer:
    """The checkpoints committed in ``store``, in etcd's key ``checkpoint``.

    A commit is one transaction, guarded by the round: workers cannot commit a save that they begin after a
    newer round began. A checkpoint handed over before that (``in_time``) is committed, unless a newer round
    has committed: in place, a round forms faster than a disk writes. A commit waits while etcd is away. A
    commit is refused if another job has committed to the same folder since.
    """

    def __init__(
        self,
        access: EtcdAccess,
        job: str,
        store: CheckpointStore,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client = Client(access)
        self._job = job
        self._url = store.url
        self._file = FilePointer(store, say)
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def read(self, *, own: bool = False) -> Checkpoint:
        try:
            known = self._own(self._client.get(self._job, _KEY))
        except BadRecord as error:
            if own:
                raise BadCheckpoint(f"{error}") from error
            return self._file.read()
        except StoreError as error:
            if own:  # the file may name checkpoints of other jobs
                raise TimeoutError(f"reading etcd failed: {error}") from error
            return self._file.read()
        return known or (Checkpoint(self._url) if own else self._file.read())

    def witness(self, fence: int) -> bool:
        deadline = self._clock() + self._patience_s
        while self._clock() < deadline and not self._closed:
            try:
                return self._number(self._client.get(self._job, "round")) == fence
            except StoreUnavailable:
                self._sleep(_AGAIN_S)
            except StoreError:  # ``commit`` reports the error
                break
        return False

    def commit(self, new: Saved, keep: Keep, fence: int, *, in_time: bool = False) -> Commit:
        """Make ``new`` the newest checkpoint. Raise CommitRefused or BadCheckpoint if it is not committed,
        and TimeoutError or OSError if the outcome is unknown."""
        deadline = self._clock() + self._patience_s
        taken = False
        while True:
            why = "etcd has not confirmed the commit"
            try:
                made = self._try(new, keep, fence, in_time)
                if isinstance(made, Commit):
                    return self._copied(made)
                taken = taken or isinstance(made, NoAnswer)
            except StoreUnavailable as error:
                why = f"etcd is unavailable: {error}"
            except StoreError as error:
                raise _lost(taken, f"etcd refuses the commit: {error}") from error
            if self._clock() >= deadline:
                raise _lost(taken, why)
            self._sleep(_AGAIN_S)

    def settle(self, made: Checkpoint | None = None) -> Checkpoint:
        """Copy etcd's record to the file, and return the record. etcd is read under the file's lock, since
        another world of the job may have committed. ``made``: the record to write if etcd's names another
        folder by now. Raise CommitRefused, BadCheckpoint, OSError."""

        def etcds(files: Checkpoint) -> Checkpoint:
            # The file is read before etcd, so that etcd has every commit that the file names.
            named = self._file.newest()
            own = self._own(self._client.get(self._job, _KEY))
            if own is None:
                return made or files
            self._require_alone(named, own)
            return own

        try:
            return self._file.update(etcds)
        except StoreError as error:
            raise TimeoutError(f"reading etcd failed: {error}") from error

    def _copied(self, made: Commit) -> Commit:
        try:
            return replace(made, checkpoint=self.settle(made.checkpoint))
        except (CommitRefused, BadCheckpoint, OSError) as error:
            return replace(made, unsettled=error_text(error))

    def _try(self, new: Saved, keep: Keep, fence: int, in_time: bool) -> Commit | Answer:
        """Try to commit once. Return the commit, or etcd's answer if the transaction was not applied."""
        named = self._file.newest()  # read before etcd, as in ``settle``
        round_, there = self._client.get(self._job, "round"), self._client.get(self._job, _KEY)
        known = self._own(there) or self._file.before(new)
        if new in known.saved:  # an earlier try succeeded without an answer
            return Commit(known)
        self._require_alone(named, known)
        number = self._number(round_)
        if number != fence and not in_time:
            raise CommitRefused(f"step {new.step} was saved in round {fence}, and now it is round {number}")
        made = commit(known, new, keep)
        guards = (
            Unchanged("round", round_.revision if round_ else 0),
            Unchanged(_KEY, there.revision if there else 0),
        )
        answer = self._client.transact(self._job, guards, (Put(_KEY, made.checkpoint),))
        return made if isinstance(answer, Applied) else answer

    def _require_alone(self, named: Saved | None, known: Checkpoint) -> None:
        """Raise CommitRefused if the newest checkpoint in the file is another job's. ``named``: this
        checkpoint, read before etcd's record ``known``."""
        if named is None or named.name in {saved.name for saved in known.saved}:
            return
        if known.newest is None or (named.round, named.step) > (known.newest.round, known.newest.step):
            raise CommitRefused(
                f"another job has committed step {named.step} to {self._url} since this one did; "
                "give each job a folder of its own"
            )

    @staticmethod
    def _number(entry: Entry | None) -> int:
        return entry.fact.number if entry and isinstance(entry.fact, Round) else 0

    def _own(self, entry: Entry | None) -> Checkpoint | None:
        """Return the job's record; None if etcd has none, or one of another folder."""
        fact = entry.fact if entry else None
        return fact if isinstance(fact, Checkpoint) and fact.path == self._url else None


def _lost(taken: bool, why: str) -> Exception:
    """Return the error of a failed commit. ``taken``: etcd may have applied an earlier try."""
    return TimeoutError(f"{why}; the commit may have succeeded") if taken else CommitRefused(why)


def settle(access: EtcdAccess, job: str, say: Callable[[str], None] = lambda _: None) -> None:
    """Copy etcd's record to the file, in case a saver died between the two writes. ``say`` gets a sentence if
    another run has committed to the same folder since."""
    with contextlib.suppress(StoreError, BadCheckpoint, BadStore, OSError, ValueError):
        with Client(access) as client:
            there = client.get(job, _KEY)
        known = there.fact if there is not None else None
        if not isinstance(known, Checkpoint) or known.newest is None:
            return
        store = store_at(known.path)
        # Otherwise the newest checkpoint is no longer in the folder.
        if not is_finished(store, known.newest.name):
            return
        with contextlib.closing(EtcdPointer(access, job, store)) as pointer:
            try:
                pointer.settle()
            except CommitRefused as refused:
                say(
                    f"this job resumes from its own step {known.newest.step} and can save no more there: "
                    f"{refused}, or go on from the other's step: end this job, call `elasticd forget {job}`, "
                    "and start the job again"
                )
