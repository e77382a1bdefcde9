"""The status of a job in lines of text. Pure."""

from __future__ import annotations

from elasticd.telemetry import describe
from elasticd.telemetry.status import JobStatus, Note, SlotState, SlotStatus

_FULL = "etcd is full: nothing is replaced or resized until there is room"


def lines(s: JobStatus) -> list[str]:
    """Return a headline, what the job waits for, what went wrong, and a line for each slot."""
    limits = f" ({describe.sizes(s.limits)})" if s.limits else ""
    head = f"{s.job}: round {s.round} {s.phase}"
    if s.since is not None and not s.ended:
        head += f" for {describe.span(s.at - s.since)}"
    head += f", world {s.world_size}{limits}"
    if s.step is not None:
        head += f", {describe.step(s.step, s.step_told)}"
    if s.steps_per_s is not None:
        head += f", {s.steps_per_s:.2f} steps/s"
    told = [head]
    if s.etcd_full:
        told.append(f"  etcd      {_FULL.removeprefix('etcd ')} (see the log)")
    if s.script:
        told.append(f"  script    {s.script}")
    if s.budget_left is not None:
        told.append(f"  restarts  {s.restarts}, {s.budget_left} left")
    if s.time and (spent := describe.spent(s.time)):
        told.append(f"  goodput   {spent}")
    if s.checkpoint:
        told.append(f"  saved     {s.checkpoint.text}")
    told += [f"  lags      {describe.laggard(one)}" for one in s.stragglers]
    if s.leader:
        told.append(f"  leader    {s.leader}")
    if s.waiting:
        told.append(f"  waiting   {s.waiting.removeprefix('waiting ')}")
    if s.outcome:
        told.append(f"  outcome   {s.outcome}" + (f": {s.why}" if s.why else ""))
    elif s.stopping:
        told.append("  stopping  somebody asked for it with `elasticd stop`")
    if f := s.last_failure:
        told.append(f"  failed    {describe.span(s.at - f.at)} ago: {f.text}")
        if f.log:
            told.append(f"  its log   {f.log} (on {f.node})")
    for node in s.nodes:
        where = f" at {node.address}" if node.address else ""
        told.append(f"  {node.node}{where}: {node.state}, {describe.count(len(node.slots), 'slot')}")
        if node.own_bytes or node.replica_bytes:
            told.append(
                f"    memory  {describe.size(node.own_bytes)} of its checkpoints, "
                f"{describe.size(node.replica_bytes)} of other nodes'"
            )
        told += [f"    {_slot(slot, s.at)}" for slot in node.slots]
    if not s.nodes and not s.ended:
        told.append("  no node has joined")
    return told


def notes(s: JobStatus) -> tuple[Note, ...]:
    """Return notes that take the place of an agent's events where the status was read from etcd, sorted by
    time."""
    told = []
    if s.time and (spent := describe.spent(s.time)):
        told.append(Note(s.at, spent))
    if s.checkpoint:
        told.append(Note(s.checkpoint.at, s.checkpoint.text))
    if s.last_failure:
        told.append(Note(s.last_failure.at, s.last_failure.text))
    if s.etcd_full:
        told.append(Note(s.at, _FULL))
    if s.stragglers:
        told.append(Note(s.at, "; ".join(map(describe.laggard, s.stragglers))))
    return tuple(sorted(told, key=lambda note: note.at))


def _slot(slot: SlotStatus, now: float) -> str:
    text = f"slot {slot.slot}  "
    if slot.rank is not None:
        text += f"rank {slot.rank}  "
    text += slot.state
    if slot.quarantined_until is not None:
        text += f" for another {describe.span(slot.quarantined_until - now)}"
    if slot.until_gone is not None:
        text += f", {describe.awaits(slot.until_gone)}"
    if slot.step is not None:
        text += f"  step {slot.step}"
    if slot.steps_per_s is not None:
        text += f"  {slot.steps_per_s:.2f}/s"
    if slot.pid and slot.state in (SlotState.STARTING, SlotState.RUNNING, SlotState.STOPPING):
        text += f"  pid {slot.pid}"
    if slot.shard_bytes:
        text += (
            f"  {describe.size(slot.shard_bytes)} of the model, {describe.size(slot.copies_bytes)} of copies"
        )
    return text
