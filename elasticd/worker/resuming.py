"""Filling a state from the newest checkpoint that is whole: in the nodes' memory, else on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from elasticd.checkpoint.manifest import BadCheckpoint
from elasticd.checkpoint.pointer import FilePointer
from elasticd.checkpoint.reading import fill, open_manifest
from elasticd.checkpoint.store import Store
from elasticd.core.age import Age
from elasticd.core.facts import Checkpoint, Resume, Saved
from elasticd.core.page import Fatal
from elasticd.core.replicas import Choice, newest_whole
from elasticd.worker import told
from elasticd.worker.collect import Flat, restore
from elasticd.worker.recall import HolderLost, Memories, known
from elasticd.worker.saverline import saver_name
from elasticd.worker.target import Target
from elasticd.worker.together import Together

_log = logging.getLogger(__name__)
_NOTHING_WHOLE: Final = 5  # the exit code, as the job's will be


class NoCheckpoint(RuntimeError):
    """None is whole, and one was required. The message says what is wrong with each."""


class Kept(NamedTuple):
    """Of a state that is kept in memory or on disk."""

    round: int
    step: int


class Resuming:
    """Of one ``state``, by all ranks together. ``tier``: where it came from, once it did. ``overwrote``:
    whether anything was read into it, whole or not."""

    def __init__(self, store: Store, together: Together, state: dict[str, Any]) -> None:
        self._store, self._together, self._state = store, together, state
        self._file = FilePointer(store, _log.warning)
        self.tier = ""
        self.overwrote = False

    def newest(self) -> Kept | None:
        """See ``Checkpoints.newest_kept``."""
        memories = Memories(saver_name(), self._store.url)
        try:
            choice, there = self._survey(memories)
        finally:
            memories.close()
        its = choice or there.newest
        said = self._together.gather(msgspec.json.encode(Kept(its.round, its.step) if its else None))
        return msgspec.json.decode(said[0], type=Kept | None)

    def load(self, *, required: bool, beyond: Age | None = None) -> int | None:
        """See ``Checkpoints.load``."""
        recalled, half = self._recall(beyond)
        if recalled is not None:
            return recalled
        together = self._together
        wrong: dict[str, str] = {}  # by name, what is
        while True:
            # Read anew each time: what a saver still had to do may have come in between.
            there, complaint = self._committed()
            saved = next((s for s in reversed(there.saved) if s.name not in wrong and _is(s, beyond)), None)
            if complaint or saved is None:
                break
            flat, why, misfit = self._read(saved)
            said = [msgspec.json.decode(raw) for raw in together.gather(msgspec.json.encode((why, misfit)))]
            if misfits := [m for _, m in said if m]:
                raise ValueError(misfits[0])
            whys = [w for w, _ in said if w]
            if not whys:
                restore(self._state, flat)
                self.tier = "disk"
                if together.rank == 0:
                    for name in wrong.keys() & {s.name for s in there.saved}:
                        _log.warning("step %d is resumed from, since %s", saved.step, wrong[name])
                return saved.step
            wrong[saved.name] = whys[0]
        whole = (
            [complaint] if complaint else [wrong[s.name] for s in reversed(there.saved) if s.name in wrong]
        )
        if half:
            whole.append(f"what was in memory was lost while it was read: {half}")
        if beyond is not None:
            if together.rank == 0:
                why = "; ".join(whole) or "it is gone"
                _log.warning(
                    "step %d is gone on from, since what was kept of later ones is not whole: %s",
                    beyond.step,
                    why,
                )
            return None
        resume = os.environ.get("ELASTICD_RESUME", Resume.AUTO)
        demanded = resume == Resume.REQUIRED
        if whole or required or demanded:
            why = "; ".join(whole) or f"none was ever committed in {self._store.url}"
            sentence = f"no checkpoint is whole: {why}"
            if demanded:
                _end_the_job(sentence)
            if wrong and not (complaint or required or resume == Resume.NEVER):
                sentence += "; to train from the start, give --resume=never"
            raise NoCheckpoint(sentence)
        return None

    def _committed(self) -> tuple[Checkpoint, str]:
        """As rank 0 sees it, and what is wrong with it: all ranks go by the same."""
        url = self._store.url
        found, complaint = Checkpoint(url), ""
        if self._together.rank == 0:
            try:
                never = os.environ.get("ELASTICD_RESUME") == Resume.NEVER
                found = known(saver_name(), url, own=never) or self._file.read()
            except BadCheckpoint as error:
                complaint = str(error)
            except OSError as error:
                complaint = f"{error.filename or url} cannot be read: {error.strerror or error}"
        said = self._together.gather(msgspec.json.encode((found, complaint)))[0]
        return msgspec.json.decode(said, type=tuple[Checkpoint, str])

    def _read(self, saved: Saved) -> tuple[Flat, str, str]:
        """What it holds; else what is wrong with it, or why it is not of such a state."""
        try:
            manifest = open_manifest(self._store, saved)
            self.overwrote = True
            target = Target.of(saved.name, self._state, manifest.index)
            readers = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            fill(self._store, manifest, target.wishes, readers=readers)
            return target.finish(), "", ""
        except BadCheckpoint as error:
            return Flat(), str(error), ""
        except ValueError as error:
            return Flat(), "", str(error)

    def _survey(self, memories: Memories) -> tuple[Choice | None, Checkpoint]:
        """The newest state that is whole in memory, unless a newer one was committed, as rank 0 sees it; and
        what was committed."""
        offered = memories.survey() if self._together.rank == 0 else []
        there, _ = self._committed()  # after that: what is gone from memory since, is there now
        least = (there.newest.round, there.newest.step) if there.newest else (0, 0)
        return newest_whole(offered, least), there

    def _recall(self, beyond: Age | None) -> tuple[int | None, str]:
        """Fill the state from memory, if the whole of one that is no older than what was committed is in
        that of the job's nodes; its step. Else None, and, where it has been filled in part, why."""
        together = self._together
        memories = Memories(saver_name(), self._store.url)
        lost = ""
        try:
            choice, _ = self._survey(memories)
            if choice is not None and not _is(choice, beyond):
                choice = None
            while True:
                said = together.gather(msgspec.json.encode(choice))[0]
                choice = msgspec.json.decode(said, type=Choice | None)
                if choice is None:
                    return None, lost
                self.overwrote = True
                flat, tier, gone, misfit = _from_memory(memories, choice, self._state)
                mine = msgspec.json.encode((tier, gone, misfit))
                heard = [msgspec.json.decode(raw) for raw in together.gather(mine)]
                if misfits := [misfit for _, _, misfit in heard if misfit]:
                    raise ValueError(misfits[0])
                losses = [gone for _, gone, _ in heard if gone]
                if not losses:
                    restore(self._state, flat)
                    self.tier = max(tier for tier, _, _ in heard)
                    if together.rank == 0:
                        where = "memory" if self.tier == "memory" else "memory, some of it other nodes'"
                        _log.info("step %d is resumed from %s", choice.step, where)
                    return choice.step, ""
                [node, lost] = losses[0]
                choice = choice.without(node) if node else None  # else it is of no use wherever it is
        finally:
            memories.close()


def _is(kept: Choice | Saved, beyond: Age | None) -> bool:
    return beyond is None or beyond.is_behind(kept.round, kept.step)


def _from_memory(
    memories: Memories, choice: Choice, state: dict[str, Any]
) -> tuple[Flat, str, tuple[str, str] | None, str]:
    """What it holds and whose memory that was; else which node lost it (none in particular: ""), and why,
    or why it is not of such a state."""
    try:
        recalled = memories.recall(choice)
    except HolderLost as error:
        return Flat(), "", (error.node, str(error)), ""
    try:
        target = Target.of(choice.name, state, recalled.index)
        recalled.fill(target.wishes)
        return target.finish(), "peer" if recalled.read - {""} else "memory", None, ""
    except HolderLost as error:
        return Flat(), "", (error.node, str(error)), ""
    except BadCheckpoint as error:
        return Flat(), "", ("", str(error)), ""
    except ValueError as error:
        return Flat(), "", None, str(error)
    finally:
        recalled.close()


def _end_the_job(sentence: str) -> NoReturn:
    """``--resume=required``: another try would find nothing either."""
    told.fatal(Fatal.NO_CHECKPOINT)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w") as out:
            json.dump({"message": {"message": sentence, "extraInfo": extra}}, out)
    _log.error("%s", sentence)
    raise SystemExit(_NOTHING_WHOLE)
