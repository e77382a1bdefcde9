"""Hand states over to the saver, on all ranks together, at the cost of one copy."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from elasticd.channel.codec import ChannelClosed
from elasticd.checkpoint.client.collectives import Together
from elasticd.checkpoint.client.gpu_copy import GpuCopier
from elasticd.checkpoint.client.objects import pickled
from elasticd.checkpoint.client.save_plan import RankContent, Shard, TensorPart, lay_out
from elasticd.checkpoint.client.saver_connection import SaverLine, Terms
from elasticd.checkpoint.client.schedule import Schedule
from elasticd.checkpoint.client.staging import CopyPlan, shape_of
from elasticd.checkpoint.client.state_dict import Flat, buffers_of, flatten
from elasticd.checkpoint.client.tensors import local_of, require_dense
from elasticd.checkpoint.commit.retention import Keep
from elasticd.checkpoint.format.frames import room_for
from elasticd.checkpoint.format.manifest import Index, encode_index
from elasticd.checkpoint.protocol import (
    AwaitSaves,
    BufferCopied,
    BufferFree,
    MissSave,
    Paper,
    PlanShard,
    SaveCommitted,
    SaveFailed,
    SaverToWorker,
    SaveShard,
    SaveWritten,
    SkipSave,
)
from elasticd.checkpoint.store import CheckpointStore
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.page_layout import Fatal
from elasticd.worker.agent import agentpage
from elasticd.worker.report import any_nan, not_finite, policy

_log = logging.getLogger(__name__)
_UNDER_WAY_MAX: Final = 4  # saves that are not committed yet: slow commits fill the disk
_LANDS_S: Final = 10.0  # for a copy from a GPU, whose earlier work may hang


@dataclass(frozen=True, slots=True)
class CommittedSave:
    """A committed save. ``took_s``: from the handover until it was durable. ``size``: bytes of all ranks."""

    name: str
    step: int
    took_s: float
    size: int


class Saving:
    """The saves of one ``Checkpoints``, in one world after the other, and their results. ``schedule`` is told
    the cost of a save."""

    def __init__(self, store: CheckpointStore, keep: Keep, schedule: Schedule) -> None:
        self._store, self._keep, self._schedule = store, keep, schedule
        self._line = SaverLine(self._take, self._lost)
        self._gpu = GpuCopier()
        self._terms = Terms("", 0, copies=False)
        self._together: Together | None = None
        self._plan: CopyPlan | None = None
        self._blobs: dict[str, bytes] = {}  # the objects, pickled, of the last save
        self._plans = 0
        self._seq = 0
        self.pending: set[str] = set()  # names of saves that are neither committed nor failed
        self.skipped = 0
        self.failed = 0
        self.last_error = ""
        self.newest: CommittedSave | None = None

    def begin(self, together: Together) -> None:
        """Forget the pending saves, and make ready to save in a new world."""
        self.close()
        self.pending.clear()
        self._together = together

    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """See ``Checkpoints.save``."""
        began = time.monotonic()
        together = self._together
        assert together is not None
        flat = flatten(state)
        if policy() == "rollback" and any_nan(flat.tensors.values()):
            not_finite("what is to be saved holds NaN")  # no worker may go back to a state with NaN
        self._line.listen()
        plan = self._plan
        shape = shape_of(flat)
        blobs = self._blobs = pickled(flat.objects, self._blobs)
        same = plan is not None and plan.suits(shape, blobs)
        free = (plan is None or not same or plan.free) and len(self.pending) < _UNDER_WAY_MAX
        answer = together.ask_least([self._line.is_open, same, free, step, -step])
        # Copy already: the copy is most likely needed, and the others' answers take time.
        why = self._fill(state, flat, blobs) if self._line.is_open and same and free else None
        agreed = answer()
        if agreed[3] != -agreed[4]:
            raise ValueError(
                f"rank {together.rank} saves step {step}, but others of its world save "
                f"steps {agreed[3]} to {-agreed[4]}: have all of them save the same step, or none, by what "
                "they know alike, such as due(step)"
            )
        if not agreed[0]:
            self._plan = None
            self.pending.clear()
            self._terms = self._line.open(together, self._store, self._keep)
            self._seq = 0  # it makes names differ; newcomers count from the start
        if agreed[0] and not agreed[2]:
            self.skipped += 1
            self._line.mention(SkipSave(step))
            return False
        if not (agreed[0] and agreed[1]):
            self._make_plan(together, state, flat, shape, blobs)
            why = None
        self._seq += 1
        self._hand_over(self._fill(state, flat, blobs) if why is None else why, step, began)
        return True

    def try_out(self, state: Mapping[str, Any]) -> None:
        """See ``Checkpoints.try_out``."""
        assert self._together is not None
        flat = flatten(state)
        _lay_out(self._together, state, flat, _rooms(pickled(flat.objects, {})))

    def wait(self, timeout_s: float) -> bool:
        """See ``Checkpoints.wait``."""
        if self._is_waited_for():
            self._line.mention(AwaitSaves(on=True))
            self._line.listen_while(self._is_waited_for, timeout_s)
            self._line.mention(AwaitSaves(on=False))
        return not self._is_waited_for()

    def close(self) -> None:
        """Stop. Saves that were handed over are still written and committed."""
        if self._plan is not None and self._plan.landed is not None:
            futures.wait([self._plan.landed], _LANDS_S)
        self._line.close()
        self._plan, self._together = None, None

    def _is_waited_for(self) -> bool:
        return bool(self.pending) or (self._plan is not None and self._plan.copying)

    def _make_plan(
        self,
        together: Together,
        state: Mapping[str, Any],
        flat: Flat,
        shape: tuple[Any, ...],
        blobs: Mapping[str, bytes],
    ) -> None:
        """Decide who writes what, on all ranks together, and reserve memory for it."""
        rooms = _rooms(blobs)
        shards, index = _lay_out(together, state, flat, rooms)
        self._plans += 1
        self._plan = CopyPlan(self._plans, shape, shards[together.rank], rooms, self._gpu)
        metadata = b""
        if together.rank == 0:
            from elasticd.checkpoint.format import metadata as dcp

            metadata = dcp.made_of(index)
        paper = Paper(encode_index(index), metadata).file()
        try:
            self._line.say(PlanShard(self._plans, self._plan.shard.size), paper)
        finally:
            os.close(paper)

    def _fill(self, state: Mapping[str, Any], flat: Flat, blobs: Mapping[str, bytes]) -> str:
        assert self._plan is not None
        return self._plan.fill(state, flat, blobs, self._line.say)

    def _hand_over(self, why: str, step: int, began: float) -> None:
        """Hand the filled buffer over, or tell the saver ``why`` it was not filled."""
        plan = self._plan
        assert plan is not None
        name = folder_name(step, self._terms.round, self._terms.token, self._seq)
        if not self._line.is_open:  # lost during the copy, before this save was pending
            self._fail(step, self._line.why)
            return
        self.pending.add(name)
        if why:
            self._line.say(MissSave(name, step, why))
            return
        number = plan.handed_over(copied=self._terms.copies)
        self._schedule.cost_s = time.monotonic() - began
        message = SaveShard(plan.number, number, step, name, time.time(), self._schedule.cost_s)
        if plan.landed is None:
            self._line.say(message)
            return

        def spoilt(why: str) -> MissSave:
            plan.buffers[number].busy = plan.buffers[number].copying = False
            return MissSave(name, step, why)

        self._line.say_when(plan.landed, message, spoilt)

    # ------------------------------------------------------------ what the saver says

    def _take(self, message: SaverToWorker) -> None:
        match message:
            case BufferFree(number, buffer) if self._plan is not None and number == self._plan.number:
                self._plan.buffers[buffer].busy = False
            case BufferCopied(number, buffer) if self._plan is not None and number == self._plan.number:
                self._plan.buffers[buffer].copying = False
            case SaveCommitted(name, step, took_s, size):
                self.pending.discard(name)
                self.newest = CommittedSave(name, step, took_s, size)
                self._schedule.durable_s = took_s
            case SaveWritten(name):
                self.pending.discard(name)
            case SaveFailed(name, step, why):
                self.pending.discard(name)
                self._fail(step, why)

    def _fail(self, step: int, why: str) -> None:
        self.failed += 1
        self.last_error = f"the checkpoint of step {step} was not saved: {why}"
        if self._together is not None and self._together.rank == 0:
            _log.warning("%s", self.last_error)

    def _lost(self, error: ChannelClosed) -> None:
        if self.pending:
            self.failed += len(self.pending)
            self.last_error = f"the saver is gone, and with it what it had not committed: {error}"
            self.pending.clear()


def _rooms(blobs: Mapping[str, bytes]) -> dict[str, int]:
    return {key: room_for(raw) for key, raw in blobs.items()}


def _lay_out(
    together: Together, state: Mapping[str, Any], flat: Flat, rooms: Mapping[str, int]
) -> tuple[list[Shard], Index]:
    """Lay out the shards, on all ranks together. Raises ValueError, the same on all."""
    mine = RankContent(tuple(_parts_of(flat)), rooms, flat.paths, tuple(buffers_of(state)))
    said = together.gather(msgspec.json.encode(mine))
    try:
        return lay_out([msgspec.json.decode(raw, type=RankContent) for raw in said])
    except ValueError as error:
        agentpage.end_job_if_uncaught(error, Fatal.BAD_DATA)
        raise


def _parts_of(flat: Flat) -> Iterator[TensorPart]:
    """Yield this rank's part of each tensor: the whole tensor, or its shard."""
    for key, tensor in flat.tensors.items():
        require_dense(tensor, key)
        local, offsets = local_of(tensor)
        if local.numel() or not tensor.numel():
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield TensorPart(key, dtype, tensor.itemsize, tuple(tensor.shape), offsets, tuple(local.shape))
