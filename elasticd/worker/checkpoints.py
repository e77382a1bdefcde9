"""Checkpoints of a training. ``save`` costs one copy of this rank's part; all else runs in the background.

::

    checkpoints = worker.Checkpoints("/shared/run1")
    state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}
    step = checkpoints.load(state) or 0
    ...
    checkpoints.save(state, step)
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticd.channel.codec import ChannelClosed
from elasticd.checkpoint.client.collectives import RankGroup, rank_group
from elasticd.checkpoint.client.gpu_copy import GpuCopier
from elasticd.checkpoint.client.objects import pickled
from elasticd.checkpoint.client.resuming import Kept, NoCheckpoint, Resuming
from elasticd.checkpoint.client.saver_connection import SaverConnection, Terms
from elasticd.checkpoint.client.schedule import Schedule, parse_cadence
from elasticd.checkpoint.client.staging import CopyPlan, shape_of, share_out_together
from elasticd.checkpoint.client.state_dict import Flat, Misfit, flatten, require_names
from elasticd.checkpoint.newest.retention import Keep
from elasticd.checkpoint.protocol import (
    AwaitSaves,
    BufferCopied,
    BufferFree,
    MissSave,
    PlanShard,
    SaveCommitted,
    SaveFailed,
    SaverToWorker,
    SaveShard,
    SaveWritten,
    SkipSave,
    memory_file,
)
from elasticd.checkpoint.storage import store_at
from elasticd.core.age import Age
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.facts import Resume
from elasticd.core.page_layout import Fatal, Use
from elasticd.worker.agent_link import agentpage
from elasticd.worker.report import any_nan, not_finite, policy
from elasticd.worker.values.numbers import whole_number

__all__ = ["Checkpoints", "CommittedSave", "NoCheckpoint"]

_log = logging.getLogger(__name__)
_UNDER_WAY_MAX: Final = 4  # the most saves that are not committed yet; more would fill the disk
_COPY_S: Final = 10.0  # how long to wait for a copy from a GPU, which may hang
_NOTHING_WHOLE: Final = 5  # the exit code of a job that finds no whole checkpoint


@dataclass(frozen=True, slots=True)
class CommittedSave:
    """A committed save. ``took_s``: the seconds from the handover to the commit. ``size``: bytes of all
    ranks."""

    name: str
    step: int
    took_s: float
    size: int


@contextlib.contextmanager
def _ends_the_job() -> Iterator[None]:
    """End the job with an error of the block that each restart would raise again, unless the script catches
    the error. With ``--resume=required`` the job ends in any case if no checkpoint is whole."""
    try:
        yield
    except Misfit as misfit:
        wrong = ValueError(str(misfit))
        agentpage.end_job_if_uncaught(wrong, Fatal.BAD_DATA)
        raise wrong from None
    except NoCheckpoint as error:
        if os.environ.get("ELASTICD_RESUME") == Resume.REQUIRED:
            agentpage.end_job(str(error), Fatal.NO_CHECKPOINT)
            _log.error("%s", error)
            raise SystemExit(_NOTHING_WHOLE) from error
        if error.lasting:
            agentpage.end_job_if_uncaught(error, Fatal.NO_CHECKPOINT)
        raise


class Checkpoints:
    """The checkpoints below a folder that all ranks can write to. All ranks save and load together.

    ``path``: a folder, or an address of fsspec's such as ``s3://bucket/run1``; by default the agent's
    ``--checkpoints``. All ranks call ``save`` and ``load`` at the same steps, and again after each change of
    world. ``last``: how many of the newest checkpoints to keep; ``every``: also keep one checkpoint
    for each span of this many steps. ``when``: the cadence of ``save_if_due``: ``100`` (steps), ``90s``,
    ``10m``, ``1h``, or ``auto`` (from the cost of a save and the job's failures). By default it is the
    agent's ``--checkpoint-every``, or each step.

    ``skipped``: how many saves were skipped because the disk had not caught up. ``failed``: how many failed,
    and ``last_error`` says why. ``newest``: the newest checkpoint that this rank knows to be committed.

    ``tier``: where the last ``load`` found the state: this node's ``memory``, another node's memory as well
    (``peer``), or ``disk``; empty if there was none. ``overwrote``: whether the last ``load`` read anything
    into the state, even if it then failed.

    Raises ValueError without a path, or if the path is a file.
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
                "no folder for checkpoints is given: give a path, or run elasticd with --checkpoints"
            )
        agentpage.uses(Use.CHECKPOINTS)
        self._store = store_at(where)
        if Path(self._store.url).is_file():
            with _ends_the_job():
                raise Misfit(f"{where} is a file: give a folder for the checkpoints")
        self._schedule = Schedule(parse_cadence(when or os.environ.get("ELASTICD_CHECKPOINT_EVERY") or "1"))
        self._keep = Keep(whole_number(last, "last"), whole_number(every, "every"))
        self._line = SaverConnection(self._take, self._lost)
        self._gpu = GpuCopier()
        self._terms = Terms("", 0, copies=False)
        self._in_step = self._in_parts = False
        self._ranks: RankGroup | None = None
        self._plan: CopyPlan | None = None
        self._blobs: dict[str, bytes] = {}  # the objects, pickled, of the last save
        self._plans = 0
        self._seq = 0
        self._pending: set[str] = set()  # names of saves that are neither committed nor failed
        self.skipped = 0
        self.failed = 0
        self.last_error = ""
        self.newest: CommittedSave | None = None
        self.tier = ""
        self.overwrote = False

    @agentpage.held_up()
    @_ends_the_job()
    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """Copy this rank's part of the state, to be written while training goes on.

        Return False if the save was skipped because the disk has not caught up. ``step``: the number of steps
        that ``state`` includes.

        Tensors (unless sharded) and objects of one name must be the same on all ranks, and one rank writes
        each of them. Buffers of modules may differ: the first rank that has them writes them. A value that
        differs between ranks needs a name for each rank, such as ``f"random{rank}"``.

        Raises ValueError if the ranks differ in the step, or in the shape or type of a tensor. Raises
        TypeError for a state without names, or an object that could not be loaded again, and NotFinite for
        NaN if the job runs with ``--on-nonfinite=rollback``. An error of the disk raises nothing: see
        ``failed``.
        """
        require_names(state)
        step = whole_number(step, "step")
        if not 0 <= step < 1 << 63:
            raise ValueError(f"step is {step}: give the number of steps, from 0 on")
        ranks = self._in_this_world()
        began = time.monotonic()
        flat = flatten(state)
        if policy() == "rollback" and any_nan(flat.tensors.values()):
            not_finite("the state to save contains NaN")  # no worker may go back to a state with NaN
        self._line.listen()
        plan = self._plan
        shape = shape_of(flat)
        blobs = self._blobs = pickled(flat.objects, self._blobs)
        same = plan is not None and plan.suits(shape, blobs)
        free = (plan is None or not same or plan.free) and len(self._pending) < _UNDER_WAY_MAX
        answer = ranks.begin_minimum([self._line.is_open, same, free, step, -step])
        # Copy before the other ranks have answered: the copy is most likely needed.
        try:
            why = self._fill(state, flat, blobs) if self._line.is_open and same and free else None
        except Exception:
            answer()  # the script may go on, and other ranks may wait for this call
            raise
        agreed = answer()
        if agreed[3] != -agreed[4]:
            raise ValueError(
                f"rank {ranks.rank} saves step {step}, and other ranks save steps {agreed[3]} to "
                f"{-agreed[4]}: decide by a value that is the same on all ranks, such as due(step)"
            )
        if not agreed[0]:
            self._plan = None
            self._pending.clear()
            self._terms = self._line.open(ranks, self._store, self._keep)
            self._seq = 0  # part of the checkpoint's name; a new worker counts from 0
        if agreed[0] and not agreed[2]:
            self.skipped += 1
            self._line.try_send(SkipSave(step))
            return False
        if not (agreed[0] and agreed[1]):
            self._make_plan(ranks, state, flat, blobs)
            why = None
        self._seq += 1
        self._hand_over(self._fill(state, flat, blobs) if why is None else why, step, began)
        return True

    @_ends_the_job()
    def try_out(self, state: Mapping[str, Any]) -> None:
        """Raise the error that ``save`` would raise for this state, if any. Nothing is copied or saved."""
        flat = flatten(state)
        share_out_together(self._in_this_world(), state, flat, pickled(flat.objects, {}))

    def due(self, step: int) -> bool:
        """Whether this step is to be saved, by the cadence ``when``. All ranks must call this at each step,
        and get the same answer. Raises as collectives do."""
        return self._schedule.due(step, self._in_this_world())

    def save_if_due(self, state: Mapping[str, Any], step: int) -> bool:
        """Call ``save`` if this step is ``due``."""
        return self.due(step) and self.save(state, step)

    def keep_in_step(self) -> None:
        """Promise that saves and loads happen only between steps, while no rank uses other collectives."""
        self._in_step = True

    def keep_parts(self) -> None:
        """Allow loads into modules that have only a part of the saved parameters: other ranks have the
        rest."""
        self._in_parts = True

    @agentpage.held_up()
    def wait(self, timeout_s: float = 600.0) -> bool:
        """Wait until this rank's saves are committed or have failed, and their copies on another node are
        complete or have failed.

        Return False after the timeout. If rank 0 is on another node, wait until this node's files are
        durable. ``--checkpoint-rate`` does not apply meanwhile.
        """
        if self._is_waited_for():
            self._line.try_send(AwaitSaves(on=True))
            self._line.listen_while(self._is_waited_for, timeout_s)
            self._line.try_send(AwaitSaves(on=False))
        return not self._is_waited_for()

    @agentpage.reports_loaded_step
    @_ends_the_job()
    def load(self, state: dict[str, Any], *, required: bool = False, beyond: Age | None = None) -> int | None:
        """Fill ``state`` from the newest whole checkpoint. Return its step, or None if there is no
        checkpoint.

        Under an agent, this is the last state that former workers handed over, if it is still whole in
        memory. The memory may be this node's, or other nodes' where they hold copies. Otherwise it is the
        newest checkpoint committed to disk.

        Tensors are filled in place. A damaged checkpoint is reported by name, and the one before is taken.
        Raises NoCheckpoint if ``required`` and none is whole, or if there are checkpoints but none is whole.
        Raises ValueError if the checkpoint is whole but does not fit ``state``. ``beyond``: take
        only a checkpoint newer than this age, because a worker has a state of this age.
        """
        require_names(state)
        self.tier, self.overwrote = "", False
        resuming = Resuming(self._store, self._in_this_world(), state, whole=not self._in_parts)
        try:
            return resuming.load(required=required, beyond=beyond)
        finally:
            self.tier, self.overwrote = resuming.tier, resuming.overwrote

    def newest_kept(self) -> Kept | None:
        """Return the state that ``load`` would load, unless it turns out to be damaged. All ranks call this
        together and get the same answer. None if there is no such state, or if no rank can tell."""
        return Resuming(self._store, self._in_this_world(), {}).newest()

    def load_plain(self, state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
        """Fill ``state`` from a checkpoint that plain ``torch.distributed.checkpoint`` wrote.

        The checkpoint has no checksums, so damage may go unnoticed. Unpickling is restricted. Raises
        BadCheckpoint, and ValueError if the checkpoint does not fit ``state``.
        """
        from elasticd.checkpoint.client.plain_dcp import load_plain

        require_names(state)
        load_plain(Path(folder), state, self._in_this_world())

    def close(self) -> None:
        """Stop. Saves that were handed over are still written and committed."""
        if self._plan is not None and self._plan.copy_done is not None:
            futures.wait([self._plan.copy_done], _COPY_S)
        self._line.close()
        self._plan, self._ranks = None, None

    def _in_this_world(self) -> RankGroup:
        if self._ranks is None or self._ranks.over:
            self.close()
            self._pending.clear()
            self._ranks = rank_group(in_step=self._in_step)
            self._schedule.begin()
        return self._ranks

    def _is_waited_for(self) -> bool:
        return bool(self._pending) or (self._plan is not None and self._plan.copying)

    def _make_plan(
        self, ranks: RankGroup, state: Mapping[str, Any], flat: Flat, blobs: Mapping[str, bytes]
    ) -> None:
        """Decide which rank writes which part, on all ranks together, and send the plan to the saver."""
        self._plans += 1
        self._line.wait_until_sent(_COPY_S)  # the saver knows one plan, and the message is of the last one
        self._plan, shares = CopyPlan.agree(ranks, self._plans, state, flat, blobs, self._gpu)
        file = memory_file(shares)
        try:
            self._line.send(PlanShard(self._plan.number, self._plan.shard.size), file)
        finally:
            os.close(file)

    def _fill(self, state: Mapping[str, Any], flat: Flat, blobs: Mapping[str, bytes]) -> str:
        assert self._plan is not None
        return self._plan.fill(state, flat, blobs, self._line.send)

    def _hand_over(self, why: str, step: int, began: float) -> None:
        """Hand the filled buffer over to the saver, or tell the saver ``why`` it was not filled."""
        plan = self._plan
        assert plan is not None
        name = folder_name(step, self._terms.round, self._terms.token, self._seq)
        if not self._line.is_open:  # the saver was lost during the copy
            self._fail(step, self._line.why)
            return
        self._pending.add(name)
        if why:
            self._line.send(MissSave(name, step, why))
            return
        number = plan.handed_over(copied=self._terms.copies)
        self._schedule.cost_s = time.monotonic() - began
        message = SaveShard(plan.number, number, step, name, time.time(), self._schedule.cost_s)
        if plan.copy_done is None:
            self._line.send(message)
            return

        def spoilt(why: str) -> MissSave:
            plan.buffers[number].busy = plan.buffers[number].copying = False
            return MissSave(name, step, why)

        self._line.send_when_copied(plan.copy_done, message, spoilt)

    # ------------------------------------------------------------ what the saver says

    def _take(self, message: SaverToWorker) -> None:
        match message:
            case BufferFree(number, buffer) if self._plan is not None and number == self._plan.number:
                self._plan.buffers[buffer].busy = False
            case BufferCopied(number, buffer) if self._plan is not None and number == self._plan.number:
                self._plan.buffers[buffer].copying = False
            case SaveCommitted(name, step, took_s, size):
                self._pending.discard(name)
                self.newest = CommittedSave(name, step, took_s, size)
                self._schedule.durable_s = took_s
            case SaveWritten(name):
                self._pending.discard(name)
            case SaveFailed(name, step, why):
                self._pending.discard(name)
                self._fail(step, why)

    def _fail(self, step: int, why: str) -> None:
        self.failed += 1
        self.last_error = f"the checkpoint of step {step} was not saved: {why}"
        if self._ranks is not None and self._ranks.rank == 0:
            _log.warning("%s", self.last_error)

    def _lost(self, error: ChannelClosed) -> None:
        if self._pending:
            self.failed += len(self._pending)
            self.last_error = f"the saver has ended, and saves that it had not committed are lost: {error}"
            self._pending.clear()
