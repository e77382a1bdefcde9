"""Fill a state from the newest whole checkpoint: from the nodes' memory, else from disk."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Final, NamedTuple

import msgspec

from elasticd.checkpoint.client.collectives import RankGroup
from elasticd.checkpoint.client.load_plan import Target
from elasticd.checkpoint.client.memory_tier import CommittedUnknown, HolderLost, SaverQueries
from elasticd.checkpoint.client.saver_connection import saver_name
from elasticd.checkpoint.client.state_dict import Flat, Misfit, restore
from elasticd.checkpoint.format.manifest import BadCheckpoint, Unreadable
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.replication.replicas import WholeState, newest_whole
from elasticd.checkpoint.storage import CheckpointStore
from elasticd.checkpoint.storage.reading import decode_committed, fill, read_manifest, require_files
from elasticd.core.age import Age
from elasticd.core.checkpoint_names import age_of
from elasticd.core.facts import Checkpoint, Resume, Saved

_log = logging.getLogger(__name__)


class NoCheckpoint(RuntimeError):
    """No checkpoint is whole, although one was committed or required. The message says what is wrong with
    each checkpoint. ``lasting``: a restart would not find a whole one either."""

    def __init__(self, why: str, *, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class _Attempt(msgspec.Struct, frozen=True):
    """What one rank reports after it has read a state. ``fault``: why the state cannot be used; ``may_pass``:
    whether the fault may be temporary; ``node``: the node that lost the state, if it is that node alone.
    ``misfit``: why the checkpoint does not fit the rank's state. ``tier``: where the rank read from."""

    fault: str = ""
    may_pass: bool = False
    node: str = ""
    misfit: str = ""
    tier: str = ""


# Made before any thread starts: see ``format.manifest``.
_ATTEMPTS: Final = msgspec.json.Decoder(_Attempt)


class Kept(NamedTuple):
    """The round and step of a state that is kept in memory or on disk."""

    round: int
    step: int


class Resuming:
    """Resume one ``state``, on all ranks together. ``tier``: where the state came from: "memory", "peer" or
    "disk". ``overwrote``: whether anything was read into the state, even if the load then failed. ``whole``:
    each rank has the whole of each module, or its shards."""

    def __init__(
        self, store: CheckpointStore, ranks: RankGroup, state: dict[str, Any], *, whole: bool = True
    ) -> None:
        self._store, self._ranks, self._state, self._whole = store, ranks, state, whole
        self._file = FilePointer(store, _log.warning)
        self._queries = SaverQueries(saver_name(), store.url)
        self.tier = ""
        self.overwrote = False

    def newest(self) -> Kept | None:
        """Return the state that ``Checkpoints.newest_kept`` returns."""
        with contextlib.closing(self._queries):
            choice, there = self._survey()
        its = choice or there.newest
        said = self._ranks.from_first(msgspec.json.encode(Kept(its.round, its.step) if its else None))
        return msgspec.json.decode(said, type=Kept | None)

    def load(self, *, required: bool, beyond: Age | None = None) -> int | None:
        """See ``Checkpoints.load``."""
        with contextlib.closing(self._queries):
            recalled, half = self._recall(beyond)
            return self._load(half, required, beyond) if recalled is None else recalled

    def _load(self, half: str, required: bool, beyond: Age | None) -> int | None:
        """Load from disk. ``half``: why the state is partly filled from memory; empty otherwise."""
        ranks = self._ranks
        wrong: dict[str, str] = {}  # the fault of each checkpoint, by its name
        passes = bool(half)  # whether the errors may be temporary
        while True:
            # Read again each time: a saver may have committed something in between.
            there, unreadable, may_pass = self._committed()
            passes = passes or may_pass
            saved = next((s for s in reversed(there.saved) if s.name not in wrong and _is(s, beyond)), None)
            if unreadable or saved is None:
                break
            attempts = self._agree(saved.name, *self._read(saved))
            faults = [attempt.fault for attempt in attempts if attempt.fault]
            passes = passes or any(attempt.may_pass for attempt in attempts)
            if not faults:
                self.tier = "disk"
                if ranks.rank == 0:
                    for name in wrong.keys() & {s.name for s in there.saved}:
                        _log.warning("resuming from step %d, because %s", saved.step, wrong[name])
                return saved.step
            wrong[saved.name] = faults[0]
        faulty = (s.name for s in reversed(there.saved) if s.name in wrong)
        whys = [unreadable] if unreadable else [wrong[name] for name in faulty]
        if half:
            whys.append(f"the state in memory was lost while it was read: {half}")
        if beyond is not None:
            if ranks.rank == 0:
                why = "; ".join(whys) or "none is left"
                said = "continuing from step %d, because no later checkpoint is whole: %s"
                _log.warning(said, beyond.step, why)
            return None
        resume = os.environ.get("ELASTICD_RESUME", Resume.AUTO)
        demanded = resume == Resume.REQUIRED
        if whys or required or demanded:
            why = "; ".join(whys) or f"none was ever committed in {self._store.url}"
            sentence = f"no checkpoint is whole: {why}"
            if demanded and not whys:
                sentence += "; to train from the start, leave out --resume=required"
            elif wrong and not (unreadable or required or resume == Resume.NEVER):
                sentence += "; to train from the start, give --resume=never"
            raise NoCheckpoint(sentence, lasting=not passes)
        return None

    def _committed(self) -> tuple[Checkpoint, str, bool]:
        """Return the committed checkpoints, or the error in their record, and whether the error may be
        temporary. Rank 0 reads the record for all ranks."""
        url = self._store.url
        found, fault, may_pass = Checkpoint(url), "", False
        if self._ranks.rank == 0:
            try:
                never = os.environ.get("ELASTICD_RESUME") == Resume.NEVER
                found = self._queries.committed(own=never) or self._file.read()
            except BadCheckpoint as error:
                fault, may_pass = str(error), isinstance(error, Unreadable)
            except CommittedUnknown as error:
                fault, may_pass = str(error), True
            except OSError as error:
                may_pass = True
                fault = f"{error.filename or url} cannot be read: {error.strerror or error}"
        said = self._ranks.from_first(msgspec.json.encode((found, fault, may_pass)))
        return msgspec.json.decode(said, type=tuple[Checkpoint, str, bool])

    def _read(self, saved: Saved) -> tuple[Flat, _Attempt]:
        """Read a checkpoint from disk. Return its data, which are empty if the attempt has failed.

        Rank 0 reads the manifest and looks for the files, for all ranks: many ranks are many readers of many
        files."""
        raw, manifest, found = b"", None, _Attempt()
        if self._ranks.rank == 0:
            try:
                raw = read_manifest(self._store, saved.name)
                manifest = decode_committed(raw, saved)
                require_files(self._store, manifest)
            except BadCheckpoint as error:
                found = _failed(error)
        found = _ATTEMPTS.decode(self._ranks.from_first(msgspec.json.encode(found)))
        if found.fault:
            return Flat(), found
        raw = self._ranks.from_first(raw)
        try:
            if manifest is None:
                manifest = decode_committed(raw, saved)
            self.overwrote = True
            target = Target.of(saved.name, self._state, manifest.index, whole=self._whole)
            readers = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            fill(self._store, manifest, target.ranges, readers=readers)
            return target.finish(), _Attempt()
        except BadCheckpoint as error:
            return Flat(), _failed(error)
        except ValueError as error:
            return Flat(), _Attempt(misfit=str(error))

    def _survey(self) -> tuple[WholeState | None, Checkpoint]:
        """Return the newest whole state in memory, as rank 0 sees it, unless a newer one was committed; and
        the committed checkpoints."""
        self._ranks.minimum([0])  # all ranks have closed their connections of earlier worlds
        offered = self._queries.survey() if self._ranks.rank == 0 else []
        # Read after the memory: a state that has left the memory meanwhile is committed.
        there, _, _ = self._committed()
        least = age_of(there.newest.name) if there.newest else (0, 0)
        return newest_whole(offered, least), there

    def _recall(self, beyond: Age | None) -> tuple[int | None, str]:
        """Fill the state from the nodes' memory, if it has a whole state that is no older than the newest
        commit.

        Return the step. Otherwise return None, and the reason if the state is partly filled.
        """
        ranks = self._ranks
        lost = ""
        choice, _ = self._survey()
        if choice is not None and not _is(choice, beyond):
            choice = None
        while True:
            index = b""
            if ranks.rank == 0:
                choice, index, lost = _with_index(self._queries, choice, lost)
            choice = msgspec.json.decode(
                ranks.from_first(msgspec.json.encode(choice)), type=WholeState | None
            )
            if choice is None:
                return None, lost
            index = ranks.from_first(index)
            self.overwrote = True
            attempts = self._agree(
                choice.name, *_from_memory(self._queries, choice, index, self._state, whole=self._whole)
            )
            loss = next((attempt for attempt in attempts if attempt.fault), None)
            if loss is None:
                self.tier = max(attempt.tier for attempt in attempts)
                if ranks.rank == 0:
                    where = "memory" if self.tier == "memory" else "memory, in part on other nodes"
                    _log.info("resuming from step %d in %s", choice.step, where)
                return choice.step, ""
            lost = loss.fault
            choice = choice.without(loss.node) if loss.node else None

    def _agree(self, name: str, flat: Flat, attempt: _Attempt) -> list[_Attempt]:
        """Exchange the attempts of all ranks to read the state ``name``. If all have succeeded, give the data
        to the state. Raises Misfit if the checkpoint does not fit the state of one of the ranks."""
        attempts = [_ATTEMPTS.decode(raw) for raw in self._ranks.gather(msgspec.json.encode(attempt))]
        misfit = next((each.misfit for each in attempts if each.misfit), "")
        try:
            if not misfit and not any(each.fault for each in attempts):
                restore(self._state, flat)
        except ValueError as error:
            misfit = str(error)
        if misfit:
            raise Misfit(
                f"{misfit}: build the state that {name} was saved from, or start anew with checkpoints in "
                f"another folder than {self._store.url}"
            )
        return attempts


def _is(kept: WholeState | Saved, beyond: Age | None) -> bool:
    return beyond is None or beyond.is_behind(kept.round, kept.step)


def _failed(error: BadCheckpoint) -> _Attempt:
    return _Attempt(fault=str(error), may_pass=isinstance(error, Unreadable))


def _with_index(
    queries: SaverQueries, choice: WholeState | None, lost: str
) -> tuple[WholeState | None, bytes, str]:
    """Return the state as held by nodes that have its index, with the index, and why it was lost elsewhere.

    The state is None if no node has its index. ``lost``: why the state was lost so far.
    """
    while choice is not None:
        try:
            return choice, queries.index(choice), lost
        except HolderLost as error:
            lost = str(error)
            choice = choice.without(error.node) if error.node else None
    return None, b"", lost


def _from_memory(
    queries: SaverQueries, choice: WholeState, index: bytes, state: dict[str, Any], *, whole: bool
) -> tuple[Flat, _Attempt]:
    """Read a state from memory. ``index``: of the state, encoded. Return its data, which are empty if the
    attempt has failed."""
    try:
        recalled = queries.recall(choice, index)
    except HolderLost as error:
        return Flat(), _Attempt(fault=str(error), node=error.node)
    try:
        target = Target.of(choice.name, state, recalled.index, whole=whole)
        recalled.fill(target.ranges)
        return target.finish(), _Attempt(tier="peer" if recalled.read - {""} else "memory")
    except HolderLost as error:
        return Flat(), _Attempt(fault=str(error), node=error.node)
    except BadCheckpoint as error:
        return Flat(), _Attempt(fault=str(error))
    except ValueError as error:
        return Flat(), _Attempt(misfit=str(error))
    finally:
        recalled.close()
