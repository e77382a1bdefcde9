"""Checkpoints of a training: ``save`` costs one copy of what this rank writes, and nothing else waits.

::

    checkpoints = worker.Checkpoints("/shared/run1")
    state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}
    step = checkpoints.load(state) or 0
    ...
    checkpoints.save(state, step)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticd.checkpoint.store import store_at
from elasticd.core.age import Age
from elasticd.core.cadence import parse
from elasticd.core.page import Use
from elasticd.core.retention import Keep
from elasticd.worker import told
from elasticd.worker.resuming import Kept, NoCheckpoint, Resuming
from elasticd.worker.saving import Committed, Saving
from elasticd.worker.schedule import Schedule
from elasticd.worker.together import Together

__all__ = ["Checkpoints", "Committed", "NoCheckpoint"]


class Checkpoints:
    """The checkpoints below a folder that all ranks can write to, made and read by all ranks together.

    ``path`` may be an address of fsspec's, such as ``s3://bucket/run1``, or be left to the agent's
    ``--checkpoints``. All ranks call ``save`` and ``load`` at the same steps, after each change of world
    anew. ``last``: keep so many of the newest; ``every``: and the first of each so many steps. ``when``:
    what ``save_if_due`` goes by, ``100`` (steps), ``90s``, ``10m``, ``1h`` or ``auto`` (by what saving
    costs and how often the job fails); else the agent's ``--checkpoint-every``, else each step.

    ``tier``: where the last ``load`` took the state from: this node's ``memory``, also a ``peer``'s, or
    ``disk``; empty if it found none. ``overwrote``: whether it has read anything into the state, whole or
    not, as is known also where it raised.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        last: int = 3,
        every: int = 0,
        when: str | None = None,
    ) -> None:
        where = path or os.environ.get("ELASTICD_CHECKPOINTS")
        if not where:
            raise ValueError(
                "nothing says where checkpoints are to be: give a path or run with --checkpoints"
            )
        told.uses(Use.CHECKPOINTS)
        self._store = store_at(where)
        self._schedule = Schedule(parse(when or os.environ.get("ELASTICD_CHECKPOINT_EVERY") or "1"))
        self._saving = Saving(self._store, Keep(last, every), self._schedule)
        self._in_step = False
        self._together: Together | None = None
        self.tier = ""
        self.overwrote = False

    @property
    def skipped(self) -> int:
        """Saves that were left out as the disk had not caught up."""
        return self._saving.skipped

    @property
    def failed(self) -> int:
        """Saves that came to nothing; ``last_error`` says why."""
        return self._saving.failed

    @property
    def last_error(self) -> str:
        return self._saving.last_error

    @property
    def newest(self) -> Committed | None:
        """What was last seen to be committed."""
        return self._saving.newest

    @told.holds_up
    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """Take a copy of this rank's part, to be written while training goes on. False: left out,
        since the disk has not caught up. ``step``: how many steps ``state`` has behind it.

        Tensors of one name (unless they are sharded), and objects of one name, are taken for the same on all
        ranks: each is written once, by whichever rank; buffers of modules by the first rank that has them.
        What differs from rank to rank needs a name of its rank's own, such as ``f"random{rank}"``.

        Raises ValueError where ranks differ in the step, or in the shape or type of a tensor, TypeError for
        objects that could not be loaded again, NotFinite for NaN if the job is run with
        ``--on-nonfinite=rollback``. Whatever happens to the disk raises nothing: see ``failed``.
        """
        self._in_this_world()
        return self._saving.save(state, step)

    def try_out(self, state: Mapping[str, Any]) -> None:
        """Raises what ``save`` would of such a state; nothing is copied or saved."""
        self._in_this_world()
        self._saving.try_out(state)

    def due(self, step: int) -> bool:
        """Whether this step is to be saved, by ``when``: the same answer on all ranks, who all ask with
        each step. Raises as collectives do."""
        return self._schedule.due(step, self._in_this_world())

    def save_if_due(self, state: Mapping[str, Any], step: int) -> bool:
        """``save`` if this step is ``due``."""
        return self.due(step) and self.save(state, step)

    def keep_in_step(self) -> None:
        """Between steps only will there be saves and loads, while no rank sends anything else."""
        self._in_step = True

    @told.holds_up
    def wait(self, timeout_s: float = 600.0) -> bool:
        """Until what this rank handed over is committed or has failed, and where another node is to hold a
        copy, it has it or cannot; False after the timeout. Where the first rank is on another node: until
        what is on this node is durable. Meanwhile ``--checkpoint-rate`` does not count."""
        return self._saving.wait(timeout_s)

    @told.goes_on
    def load(self, state: dict[str, Any], *, required: bool = False, beyond: Age | None = None) -> int | None:
        """Fill ``state`` from the newest checkpoint that is whole; its step, or None if there is none.

        Under an agent that is what workers that are gone had handed over last, if all of it is still
        in the memory of this node, or of other nodes where they hold copies; else the newest that was
        committed to disk.

        Tensors are filled in place. A damaged checkpoint is reported by name, and the one before
        it taken. Raises NoCheckpoint if ``required`` and none is whole, or if there are some and
        none of them is; ValueError where the checkpoint is whole and not of such a state.

        ``beyond``: leave out what is not further than a state of that age, which somebody has. Then none
        is required.
        """
        self.tier, self.overwrote = "", False
        resuming = Resuming(self._store, self._in_this_world(), state)
        try:
            return resuming.load(required=required, beyond=beyond)
        finally:
            self.tier, self.overwrote = resuming.tier, resuming.overwrote

    def newest_kept(self) -> Kept | None:
        """What ``load`` would fill a state from, if it proves whole. All ranks ask together, and get the same
        answer; None also where nobody can tell."""
        return Resuming(self._store, self._in_this_world(), {}).newest()

    def load_plain(self, state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
        """Fill ``state`` from one checkpoint that plain ``torch.distributed.checkpoint`` wrote. It has
        no checksums, so damage may go unnoticed; what its pickles may do is restricted.

        Raises BadCheckpoint, and ValueError where it is not of such a state."""
        from elasticd.worker.plaindcp import load_plain

        load_plain(Path(folder), state, self._in_this_world())

    def close(self) -> None:
        """Leave; what was handed over is still written and committed."""
        self._saving.close()
        self._together = None

    def _in_this_world(self) -> Together:
        if self._together is None or self._together.over:
            self.close()
            self._together = Together(in_step=self._in_step)
            self._saving.begin(self._together)
            self._schedule.begin()
        return self._together
