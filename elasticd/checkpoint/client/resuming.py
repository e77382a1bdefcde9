"""Fill a state from the newest whole checkpoint: from the nodes' memory, else from disk."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, NamedTuple

import msgspec

from elasticd.checkpoint.client.collectives import RankGroup
from elasticd.checkpoint.client.load_plan import Target
from elasticd.checkpoint.client.memory_tier import CommittedUnknown, HolderLost, SaverQueries
from elasticd.checkpoint.client.saver_connection import saver_name
from elasticd.checkpoint.client.state_dict import Flat, Misfit, restore
from elasticd.checkpoint.commit.pointer import FilePointer
from elasticd.checkpoint.format.manifest import BadCheckpoint, Unreadable
from elasticd.checkpoint.replication.replicas import WholeState, newest_whole
from elasticd.checkpoint.store import CheckpointStore
from elasticd.checkpoint.store.reading import fill, open_manifest
from elasticd.core.age import Age
from elasticd.core.facts import Checkpoint, Resume, Saved

_log = logging.getLogger(__name__)


class NoCheckpoint(RuntimeError):
    """No checkpoint is whole, although one was committed or required. The message says what is wrong with
    each checkpoint. ``lasting``: a restart would not find a whole one either."""

    def __init__(self, why: str, *, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class Kept(NamedTuple):
    """The round and step of a state that is kept in memory or on disk."""

    round: int
    step: int


class Resuming:
    """Resume one ``state``, on all ranks together. ``tier``: where the state came from: "memory", "peer" or
    "disk". ``overwrote``: whether anything was read into the state, even if the load then failed."""

    def __init__(self, store: CheckpointStore, ranks: RankGroup, state: dict[str, Any]) -> None:
        self._store, self._ranks, self._state = store, ranks, state
        self._file = FilePointer(store, _log.warning)
        self._queries = SaverQueries(saver_name(), store.url)
        self.tier = ""
        self.overwrote = False

    def newest(self) -> Kept | None:
        """Return the state that ``Checkpoints.newest_kept`` returns."""
        with contextlib.closing(self._queries):
            choice, there = self._survey()
        its = choice or there.newest
        said = self._ranks.gather(msgspec.json.encode(Kept(its.round, its.step) if its else None))
        return msgspec.json.decode(said[0], type=Kept | None)

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
            there, complaint, may_pass = self._committed()
            passes = passes or may_pass
            saved = next((s for s in reversed(there.saved) if s.name not in wrong and _is(s, beyond)), None)
            if complaint or saved is None:
                break
            flat, why, may_pass, misfit = self._read(saved)
            mine = msgspec.json.encode((why, may_pass, misfit))
            said = [msgspec.json.decode(raw) for raw in ranks.gather(mine)]
            self._require_fit(saved.name, [misfit for _, _, misfit in said])
            whys = [why for why, _, _ in said if why]
            passes = passes or any(may_pass for _, may_pass, _ in said)
            if not whys:
                self._restore(saved.name, flat)
                self.tier = "disk"
                if ranks.rank == 0:
                    for name in wrong.keys() & {s.name for s in there.saved}:
                        _log.warning("resuming from step %d, because %s", saved.step, wrong[name])
                return saved.step
            wrong[saved.name] = whys[0]
        whole = (
            [complaint] if complaint else [wrong[s.name] for s in reversed(there.saved) if s.name in wrong]
        )
        if half:
            whole.append(f"the state in memory was lost while it was read: {half}")
        if beyond is not None:
            if ranks.rank == 0:
                why = "; ".join(whole) or "none is left"
                _log.warning(
                    "continuing from step %d, because no later checkpoint is whole: %s",
                    beyond.step,
                    why,
                )
            return None
        resume = os.environ.get("ELASTICD_RESUME", Resume.AUTO)
        demanded = resume == Resume.REQUIRED
        if whole or required or demanded:
            why = "; ".join(whole) or f"none was ever committed in {self._store.url}"
            sentence = f"no checkpoint is whole: {why}"
            if demanded and not whole:
                sentence += "; to train from the start, leave out --resume=required"
            elif wrong and not (complaint or required or resume == Resume.NEVER):
                sentence += "; to train from the start, give --resume=never"
            raise NoCheckpoint(sentence, lasting=not passes)
        return None

    def _committed(self) -> tuple[Checkpoint, str, bool]:
        """Return the committed checkpoints, or the error in their record, and whether the error may be
        temporary. Rank 0 reads the record for all ranks."""
        url = self._store.url
        found, complaint, may_pass = Checkpoint(url), "", False
        if self._ranks.rank == 0:
            try:
                never = os.environ.get("ELASTICD_RESUME") == Resume.NEVER
                found = self._queries.committed(own=never) or self._file.read()
            except BadCheckpoint as error:
                complaint, may_pass = str(error), isinstance(error, Unreadable)
            except CommittedUnknown as error:
                complaint, may_pass = str(error), True
            except OSError as error:
                may_pass = True
                complaint = f"{error.filename or url} cannot be read: {error.strerror or error}"
        said = self._ranks.gather(msgspec.json.encode((found, complaint, may_pass)))[0]
        return msgspec.json.decode(said, type=tuple[Checkpoint, str, bool])

    def _read(self, saved: Saved) -> tuple[Flat, str, bool, str]:
        """Return the checkpoint's data; or its fault, and whether the fault may be temporary; or why the
        checkpoint does not fit the state."""
        try:
            manifest = open_manifest(self._store, saved)
            self.overwrote = True
            target = Target.of(saved.name, self._state, manifest.index)
            readers = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            fill(self._store, manifest, target.ranges, readers=readers)
            return target.finish(), "", False, ""
        except BadCheckpoint as error:
            return Flat(), str(error), isinstance(error, Unreadable), ""
        except ValueError as error:
            return Flat(), "", False, str(error)

    def _survey(self) -> tuple[WholeState | None, Checkpoint]:
        """Return the newest whole state in memory, as rank 0 sees it, unless a newer one was committed; and
        the committed checkpoints."""
        offered = self._queries.survey() if self._ranks.rank == 0 else []
        there, _, _ = (
            self._committed()
        )  # read after the memory: a state that has left the memory meanwhile is committed
        least = (there.newest.round, there.newest.step) if there.newest else (0, 0)
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
            said = ranks.gather(msgspec.json.encode(choice))[0]
            choice = msgspec.json.decode(said, type=WholeState | None)
            if choice is None:
                return None, lost
            self.overwrote = True
            flat, tier, gone, misfit = _from_memory(self._queries, choice, self._state)
            mine = msgspec.json.encode((tier, gone, misfit))
            heard = [msgspec.json.decode(raw) for raw in ranks.gather(mine)]
            self._require_fit(choice.name, [misfit for _, _, misfit in heard])
            losses = [gone for _, gone, _ in heard if gone]
            if not losses:
                self._restore(choice.name, flat)
                self.tier = max(tier for tier, _, _ in heard)
                if ranks.rank == 0:
                    where = "memory" if self.tier == "memory" else "memory, in part on other nodes"
                    _log.info("resuming from step %d in %s", choice.step, where)
                return choice.step, ""
            [node, lost] = losses[0]
            choice = choice.without(node) if node else None  # without a name, the state is lost on all nodes

    def _restore(self, name: str, flat: Flat) -> None:
        try:
            restore(self._state, flat)
        except ValueError as error:
            self._require_fit(name, [str(error)])

    def _require_fit(self, name: str, misfits: list[str]) -> None:
        """Raise Misfit if the checkpoint does not fit the state of one of the ranks."""
        for misfit in filter(None, misfits):
            raise Misfit(
                f"{misfit}: build the state that {name} was saved from, or start anew with checkpoints in "
                f"another folder than {self._store.url}"
            )


def _is(kept: WholeState | Saved, beyond: Age | None) -> bool:
    return beyond is None or beyond.is_behind(kept.round, kept.step)


def _from_memory(
    queries: SaverQueries, choice: WholeState, state: dict[str, Any]
) -> tuple[Flat, str, tuple[str, str] | None, str]:
    """Return the data and the tier of a state in memory; or which node lost it ("": none in particular) and
    why; or why it does not fit the state."""
    try:
        recalled = queries.recall(choice)
    except HolderLost as error:
        return Flat(), "", (error.node, str(error)), ""
    try:
        target = Target.of(choice.name, state, recalled.index)
        recalled.fill(target.ranges)
        return target.finish(), "peer" if recalled.read - {""} else "memory", None, ""
    except HolderLost as error:
        return Flat(), "", (error.node, str(error)), ""
    except BadCheckpoint as error:
        return Flat(), "", ("", str(error)), ""
    except ValueError as error:
        return Flat(), "", None, str(error)
    finally:
        recalled.close()
