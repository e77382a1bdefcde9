"""Checkpoints of a training. ``save`` costs one copy of this rank's part; all else runs in the background.

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

from elasticd.checkpoint.client.collectives import Together
from elasticd.checkpoint.client.resuming import Kept, NoCheckpoint, Resuming
from elasticd.checkpoint.client.saving import CommittedSave, Saving
from elasticd.checkpoint.client.schedule import Schedule, parse_cadence
from elasticd.checkpoint.commit.retention import Keep
from elasticd.checkpoint.store import store_at
from elasticd.core.age import Age
from elasticd.core.page_layout import Use
from elasticd.worker.agent import agentpage

__all__ = ["Checkpoints", "CommittedSave", "NoCheckpoint"]


class Checkpoints:
    """The checkpoints below a folder that all ranks can write to. All ranks save and load together.

    ``path``: a folder, or an address of fsspec's such as ``s3://bucket/run1``; by default the agent's
    ``--checkpoints``. All ranks call ``save`` and ``load`` at the same steps, and again after each change of
    world. ``last``: how many of the newest checkpoints to keep; ``every``: keep also the first checkpoint of
    each so many steps. ``when``: the cadence of ``save_if_due``: ``100`` (steps), ``90s``, ``10m``, ``1h``,
    or ``auto`` (from the cost of a save and the job's failures). By default it is the agent's
    ``--checkpoint-every``, or each step.

    ``tier``: where the last ``load`` found the state: this node's ``memory``, another node's memory as well
    (``peer``), or ``disk``; empty if there was none. ``overwrote``: whether the last ``load`` read anything
    into the state, even if it then failed.
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
        agentpage.uses(Use.CHECKPOINTS)
        self._store = store_at(where)
        self._schedule = Schedule(parse_cadence(when or os.environ.get("ELASTICD_CHECKPOINT_EVERY") or "1"))
        self._saving = Saving(self._store, Keep(last, every), self._schedule)
        self._in_step = False
        self._together: Together | None = None
        self.tier = ""
        self.overwrote = False

    @property
    def skipped(self) -> int:
        """The number of saves that were skipped because the disk had not caught up."""
        return self._saving.skipped

    @property
    def failed(self) -> int:
        """The number of saves that failed; ``last_error`` says why."""
        return self._saving.failed

    @property
    def last_error(self) -> str:
        return self._saving.last_error

    @property
    def newest(self) -> CommittedSave | None:
        """The newest checkpoint that this rank knows to be committed."""
        return self._saving.newest

    @agentpage.held_up()
    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """Copy this rank's part of the state, to be written while training goes on.

        Return False if the save was skipped because the disk has not caught up. ``step``: the number of steps
        that ``state`` includes.

        Tensors (unless sharded) and objects of one name must be the same on all ranks, and one rank writes
        each of them. Buffers of modules may differ: the first rank that has them writes them. A value that
        differs between ranks needs a name for each rank, such as ``f"random{rank}"``.

        Raises ValueError if the ranks differ in the step, or in the shape or type of a tensor. Raises
        TypeError for an object that could not be loaded again, and NotFinite for NaN if the job runs with
        ``--on-nonfinite=rollback``. An error of the disk raises nothing: see ``failed``.
        """
        self._in_this_world()
        return self._saving.save(state, step)

    def try_out(self, state: Mapping[str, Any]) -> None:
        """Raise what ``save`` would raise for this state. Nothing is copied or saved."""
        self._in_this_world()
        self._saving.try_out(state)

    def due(self, step: int) -> bool:
        """Whether this step is to be saved, by ``when``. All ranks must ask with each step, and get the same
        answer. Raises as collectives do."""
        return self._schedule.due(step, self._in_this_world())

    def save_if_due(self, state: Mapping[str, Any], step: int) -> bool:
        """Call ``save`` if this step is ``due``."""
        return self.due(step) and self.save(state, step)

    def keep_in_step(self) -> None:
        """Promise that saves and loads happen only between steps, while no rank uses other collectives."""
        self._in_step = True

    @agentpage.held_up()
    def wait(self, timeout_s: float = 600.0) -> bool:
        """Wait until this rank's saves are committed or have failed, and their copies on another node are
        complete or have failed.

        Return False after the timeout. If rank 0 is on another node, wait until this node's files are
        durable. ``--checkpoint-rate`` does not apply meanwhile.
        """
        return self._saving.wait(timeout_s)

    @agentpage.goes_on
    def load(self, state: dict[str, Any], *, required: bool = False, beyond: Age | None = None) -> int | None:
        """Fill ``state`` from the newest whole checkpoint. Return its step, or None if there is no
        checkpoint.

        Under an agent, this is the last state that former workers handed over, if it is still whole in
        memory. The memory may be this node's, or other nodes' where they hold copies. Otherwise it is the
        newest checkpoint committed to disk.

        Tensors are filled in place. A damaged checkpoint is reported by name, and the one before is taken.
        Raises NoCheckpoint if ``required`` and none is whole, or if there are checkpoints but none is whole.
        Raises ValueError if the checkpoint is whole but does not fit ``state``. ``beyond``: ignore
        checkpoints that are not newer than this age, which another worker has; none is then required.
        """
        self.tier, self.overwrote = "", False
        resuming = Resuming(self._store, self._in_this_world(), state)
        try:
            return resuming.load(required=required, beyond=beyond)
        finally:
            self.tier, self.overwrote = resuming.tier, resuming.overwrote

    def newest_kept(self) -> Kept | None:
        """Return the state that ``load`` would take, unless it proves damaged. All ranks ask together and get
        the same answer. None also where no rank can tell."""
        return Resuming(self._store, self._in_this_world(), {}).newest()

    def load_plain(self, state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
        """Fill ``state`` from a checkpoint that plain ``torch.distributed.checkpoint`` wrote.

        The checkpoint has no checksums, so damage may go unnoticed. Unpickling is restricted. Raises
        BadCheckpoint, and ValueError if the checkpoint does not fit ``state``.
        """
        from elasticd.checkpoint.client.plain_dcp import load_plain

        load_plain(Path(folder), state, self._in_this_world())

    def close(self) -> None:
        """Stop. Saves that were handed over are still written and committed."""
        self._saving.close()
        self._together = None

    def _in_this_world(self) -> Together:
        if self._together is None or self._together.over:
            self.close()
            self._together = Together(in_step=self._in_step)
            self._saving.begin(self._together)
            self._schedule.begin()
        return self._together
