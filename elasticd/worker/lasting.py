"""A state's checkpoints: what is committed, in memory that outlives the workers and on disk."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from elasticd.core.age import Age
from elasticd.worker import chance, told
from elasticd.worker.epochs import Progress
from elasticd.worker.world import World

if TYPE_CHECKING:
    from elasticd.worker.checkpoint import Checkpoints

_log = logging.getLogger(__name__)
_OURS: Final = "elasticd"  # the name under which a checkpoint has what no object of the script's has
GOING_S_MAX: Final = 45.0  # for the last checkpoint of those who all go; the agent kills them after 60 s


@dataclass(slots=True)
class Parts:
    """What a State consists of, by name. ``things``: modules, optimizers, and what has ``state_dict``;
    ``plain``: data. ``seeds``: what this worker's random numbers began with. ``progress``: of the epochs, and
    one of the things."""

    things: Mapping[str, Any]
    plain: dict[str, Any]
    seeds: Mapping[str, int]
    step: int = 0
    random: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    @property
    def point(self) -> tuple[int, int]:
        """Of the training: after each commit another."""
        return self.step, self.progress.marks


class Lasting:
    """``checkpoints``, as a State uses them: all ranks of a world together, at its commits."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        checkpoints.keep_in_step()
        told.has_checkpoints()
        self._outlived = False
        self._tried = 0  # the world in whose first commit a state that was not due was tried out
        self._newest = (0, (-1, 0))  # the world and the point that was handed over, or resumed from, last

    @property
    def tier(self) -> str:
        """Where the last ``resume`` found the state."""
        return self._checkpoints.tier

    @property
    def overwrote(self) -> bool:
        """Whether the last ``resume`` has read anything into the state, whole or not."""
        return self._checkpoints.overwrote

    def outlived(self) -> None:
        """Workers that outlived the last world have what training goes on from, and perhaps nobody else: its
        first commit is saved, due or not. Said to all ranks of a world, or to none."""
        self._outlived = True

    def passed(self, parts: Parts, world: World | None, ends: bool) -> None:
        """A step is committed; with it the world may end. Raises WorldChanged if it ends otherwise."""
        if ends:
            assert world is not None
            if world.nobody_stays():  # else those who do have it, and it need not be written
                by = time.monotonic() + GOING_S_MAX
                self._save(parts, world, must=True)
                self._checkpoints.wait(max(0.0, by - time.monotonic()))
        else:
            with _in(world):
                due = self._checkpoints.due(parts.step)
            if due or self._outlived:
                self._save(parts, world)
            elif self._tried != (number := world.number if world else 1):
                with _in(world):
                    self._checkpoints.try_out(self._state_of(parts))
                self._tried = number
            self._outlived = False

    def finished(self, parts: Parts, world: World | None) -> None:
        """Training is at its end. Raises WorldChanged if the world ends otherwise meanwhile."""
        if parts.step > 0:
            while not self._save(parts, world, must=True):
                if dist.get_rank() == 0:
                    _log.warning("step %d is saved once those before it are durable", parts.step)

    def has_beyond(self, age: Age, world: World) -> bool:
        """Whether a later world came further than that, and what it made was kept. Raises WorldChanged if the
        world ends meanwhile."""
        with world.or_over():
            kept = self._checkpoints.newest_kept()
        return kept is not None and age.is_behind(kept.round, kept.step)

    def resume(
        self, parts: Parts, world: World, *, else_asks: bool, beyond: Age | None = None
    ) -> Parts | None:
        """Fill ``parts.things`` from the nearest memory or disk that has the newest state; the rest is
        in what is returned. None: there is no checkpoint, or there are some and none is whole, but there
        is somebody else to ask. Raises NoCheckpoint if there is not, WorldChanged if the world ends
        meanwhile. ``beyond``: only from what is further than this, which somebody has."""
        from elasticd.worker.checkpoint import NoCheckpoint

        state = {**parts.things, **dict.fromkeys(parts.plain, _ABSENT), _OURS: _ABSENT}
        step, none_whole = None, None
        with world.or_over():  # a RuntimeError in there means that it is over, but for this one
            try:
                step = self._checkpoints.load(state, beyond=beyond)
            except NoCheckpoint as error:
                none_whole = error
        if none_whole is not None:
            if not else_asks:
                raise none_whole
            _log.warning("%s; the script's restore() is asked instead", none_whole)
        if step is None:
            return None
        self._newest = (world.number, (step, parts.progress.marks))
        plain = {name: now if state[name] is _ABSENT else state[name] for name, now in parts.plain.items()}
        ours = state[_OURS] if isinstance(state[_OURS], dict) else {}
        random = _alike(parts.seeds, ours.get("random", {}), ours.get("seeds", {}))
        return Parts(parts.things, plain, parts.seeds, step, random, parts.progress)

    def _save(self, parts: Parts, world: World | None, *, must: bool = False) -> bool:
        """Whether it is taken, which is the same on all ranks. ``must``: wait for the disk, for a while,
        rather than leave it out."""
        this = (world.number if world else 1, parts.point)
        if must and self._newest == this:
            return True
        with _in(world):
            if must:
                self._checkpoints.wait(GOING_S_MAX)
            taken = self._checkpoints.save(self._state_of(parts), parts.step)
            if taken:
                self._newest = this
            return taken

    @staticmethod
    def _state_of(parts: Parts) -> dict[str, Any]:
        rank = str(dist.get_rank())
        ours = {"random": {rank: parts.random}, "seeds": {rank: dict(parts.seeds)}}
        return {**parts.things, **parts.plain, _OURS: ours}


class _Absent:
    """Stands for what a checkpoint may have."""


_ABSENT: Final = _Absent()


def _in(world: World | None) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if world is None else world.or_over()


def _alike(
    seeds: Mapping[str, int], random: Mapping[str, Any], began: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Where this rank's random numbers go on: where they were, or, of a rank that was not there, where
    the first rank's were if they began as ours did. Else they stay as they are."""
    mine = random.get(str(dist.get_rank()))
    if mine is not None:
        return chance.note() | dict(mine)
    first, firsts = random.get("0", {}), began.get("0", {})
    return chance.note() | {name: its for name, its in first.items() if firsts.get(name) == seeds.get(name)}
