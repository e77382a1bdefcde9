"""The checkpoints of a State: committed steps are saved to disk, and to memory that outlives the workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from elasticd.core.age import Age
from elasticd.worker.agent_link import agentpage
from elasticd.worker.values import randomness
from elasticd.worker.values.contents import EpochProgress
from elasticd.worker.world.group import World, or_over

if TYPE_CHECKING:
    from elasticd.worker.checkpoints import Checkpoints

_log = logging.getLogger(__name__)
_OURS: Final = "elasticd"  # the checkpoint's entry for elasticd's own data
_ABSENT: Final = object()  # stands for a value that the checkpoint does not have
GOING_S_MAX: Final = 45.0  # for the last checkpoint when all workers leave; the agent kills them after 60 s


@dataclass(slots=True)
class Parts:
    """The parts of a State, by name. ``things``: modules, optimizers, and objects with ``state_dict``.
    ``plain``: plain data. ``seeds``: digests of this worker's initial random states. ``random``: the present
    random states. ``progress``: the progress of the epochs, which is also one of ``things``."""

    things: Mapping[str, Any]
    plain: dict[str, Any]
    seeds: Mapping[str, int]
    step: int = 0
    random: Mapping[str, Any] = field(default_factory=dict)
    progress: EpochProgress = field(default_factory=EpochProgress)

    @property
    def point(self) -> tuple[int, int]:
        """The step, and the number of commits without a step: together they change with each commit."""
        return self.step, self.progress.marks


class CommitCheckpoints:
    """A State's use of ``checkpoints``: all ranks of a world together, at commits."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        checkpoints.keep_in_step()
        agentpage.has_checkpoints()
        self._save_first = False
        self._tried = 0  # the last world in which a save was tried out at the first commit
        self._newest = (0, (-1, 0))  # the world and the point of the last save or resume

    def save_first_commit(self) -> None:
        """Save at the world's first commit even if no save is due: survivors of the last world may have the
        only copy of the state. Call this on all ranks of a world, or on none."""
        self._save_first = True

    def leave(self) -> None:
        """Leave the world, so that the saver offers this worker's shards to others however long this worker
        waits for its next world."""
        self.checkpoints.close()

    def after_commit(self, parts: Parts, world: World | None, ends: bool) -> None:
        """Save a committed step if a save is due. ``ends``: the world ends with this commit. Raises
        WorldChanged if the world ends otherwise."""
        if ends:
            assert world is not None
            if world.nobody_stays():  # workers that stay have the state, and need no save
                by = time.monotonic() + GOING_S_MAX
                self._save(parts, world, must=True)
                self.checkpoints.wait(max(0.0, by - time.monotonic()))
        else:
            with or_over(world):
                due = self.checkpoints.due(parts.step)
            if due or self._save_first:
                self._save(parts, world)
            elif self._tried != (number := world.number if world else 1):
                with or_over(world):
                    self.checkpoints.try_out(self._state_of(parts))
                self._tried = number
            self._save_first = False

    def finished(self, parts: Parts, world: World | None) -> None:
        """Save the state at the end of the training. Raises WorldChanged if the world ends meanwhile."""
        if parts.step > 0:
            while not self._save(parts, world, must=True):
                if dist.get_rank() == 0:
                    _log.warning("step %d is saved once the saves before it are durable", parts.step)

    def has_newer(self, age: Age, world: World) -> bool:
        """Whether a newer state than this age was kept. Raises WorldChanged if the world ends meanwhile."""
        with or_over(world):
            kept = self.checkpoints.newest_kept()
        return kept is not None and age.is_behind(kept.round, kept.step)

    def resume(
        self, parts: Parts, world: World, *, has_restore: bool, beyond: Age | None = None
    ) -> Parts | None:
        """Fill ``parts.things`` from the newest state in memory or on disk, and return the other parts.

        Return None if there is no checkpoint, or if none is whole and the script has a ``restore`` function
        (``has_restore``). Raises NoCheckpoint if none is whole and there is no ``restore``. Raises
        WorldChanged if the world ends meanwhile. ``beyond``: load only a state newer than this age.
        """
        from elasticd.worker.checkpoints import NoCheckpoint

        state = {**parts.things, **dict.fromkeys(parts.plain, _ABSENT), _OURS: _ABSENT}
        step, none_whole = None, None
        with or_over(world):  # NoCheckpoint is a RuntimeError, which would count as the end of the world
            try:
                step = self.checkpoints.load(state, beyond=beyond)
            except NoCheckpoint as error:
                none_whole = error
        if none_whole is not None:
            if not has_restore:
                raise none_whole
            _log.warning("%s; the script's restore() is called instead", none_whole)
        if step is None:
            return None
        self._newest = (world.number, (step, parts.progress.marks))
        plain = {name: now if state[name] is _ABSENT else state[name] for name, now in parts.plain.items()}
        ours = state[_OURS] if isinstance(state[_OURS], dict) else {}
        random = _alike(parts.seeds, ours.get("random", {}), ours.get("seeds", {}))
        return Parts(parts.things, plain, parts.seeds, step, random, parts.progress)

    def _save(self, parts: Parts, world: World | None, *, must: bool = False) -> bool:
        """Save. Return whether the saver accepted the save, the same on all ranks. ``must``: wait a while for
        the disk rather than skip the save."""
        this = (world.number if world else 1, parts.point)
        if must and self._newest == this:
            return True
        with or_over(world):
            if must:
                self.checkpoints.wait(GOING_S_MAX)
            taken = self.checkpoints.save(self._state_of(parts), parts.step)
            if taken:
                self._newest = this
            return taken

    @staticmethod
    def _state_of(parts: Parts) -> dict[str, Any]:
        rank = str(dist.get_rank())
        ours = {"random": {rank: parts.random}, "seeds": {rank: dict(parts.seeds)}}
        return {**parts.things, **parts.plain, _OURS: ours}


def _alike(
    seeds: Mapping[str, int], random: Mapping[str, Any], began: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Return the random states for this rank. If the checkpoint has states of this rank, return them.
    Otherwise return rank 0's state of each source that had the same seed on both ranks, and the present state
    of the other sources."""
    mine = random.get(str(dist.get_rank()))
    if mine is not None:
        return randomness.note() | dict(mine)
    first, firsts = random.get("0", {}), began.get("0", {})
    return randomness.note() | {
        name: its for name, its in first.items() if firsts.get(name) == seeds.get(name)
    }
