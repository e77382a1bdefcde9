"""Facts and reasons in words: sentences for people, and named events with fields for the log."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Literal, assert_never

from elasticd.core import reasons as r
from elasticd.core.facts import Cause, Exit, Failure, Laggard, Limits, Outcome
from elasticd.core.hang.judging import Look, Verdict, Why
from elasticd.core.leader.lagging import named
from elasticd.core.ledger import Kind
from elasticd.core.page_layout import Use
from elasticd.telemetry.goodput import goodput, wanted

# ---------------------------------------------------------------- small words

_CAUSES: dict[Cause, str] = {
    Cause.START: "the job started",
    Cause.WORKER_FAILED: "a worker failed",
    Cause.WORKER_HUNG: "a worker hung",
    Cause.NODE_LOST: "a node was lost",
    Cause.WORLD_BROKEN: "workers lost each other",
    Cause.NODE_FAULT: "a node was at fault",
    Cause.NODE_DRAINED: "a node was drained",
    Cause.SLOT_DRAINED: "a slot was drained",
    Cause.GREW: "there was room to grow",
    Cause.SCALED: "the limits were changed",
    Cause.STOPPED: "the job was stopped",
}

_SIGNAL_HINTS: dict[str, str] = {
    "SIGKILL": "perhaps out of memory: see `dmesg`",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "often a full /dev/shm",
    "SIGABRT": "native code gave up: a failed assertion, or NCCL's watchdog",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "an instruction this CPU does not have",
    "SIGTERM": "another process asked the worker to end",
    "SIGXCPU": "over its CPU time limit",
    "SIGXFSZ": "over its file size limit",
}


def cause(cause: Cause) -> str:
    """Return the cause of a round's begin or end, as a clause such as "a node was lost"."""
    return _CAUSES[cause]


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, and "signal 99" for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(code: int, *, hung: bool = False) -> str:
    """Return the end of a process in words. ``code``: its exit status, or minus the signal that killed it.
    ``hung``: elasticd killed the process because it hung."""
    if code == 0:
        return "ended well"
    if hung:
        return "was killed by elasticd"
    if code < 0:
        return f"was killed by {_with_hint(signal_name(-code))}"
    if code == 127:
        return "could not be started (exit code 127)"
    if 128 < code < 128 + signal.NSIG and not signal_name(code - 128).startswith("signal"):
        return f"ended with exit code {code}, a shell's word for {_with_hint(signal_name(code - 128))}"
    return f"ended with exit code {code}"


def _with_hint(name: str) -> str:
    hint = _SIGNAL_HINTS.get(name)
    return f"{name} ({hint})" if hint else name


def worker(node: str, exit: Exit) -> str:
    """Return the worker in words, such as "rank 3 (slot 1 on node-b)"."""
    return f"rank {exit.rank} (slot {exit.slot} on {node})"


def failure(failure: Failure) -> str:
    """Return the worker that failed, and its end, in a clause without a full stop."""
    said = f": {first_line(failure.exit.message)}" if failure.exit.message.strip() else ""
    return f"{worker(failure.node, failure.exit)} {ending(failure.exit.code, hung=failure.exit.hung)}{said}"


def first_line(text: str) -> str:
    """Return the first line that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def count(n: int, noun: str) -> str:
    """Return the number and the noun: "1 worker", "2 workers"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def sizes(limits: Limits) -> str:
    """Return the sizes that a world may have: "2..8", "2..8 in units of 2", or "2, 4, 8"."""
    if limits.sizes:
        return ", ".join(str(size) for size in limits.sizes if limits.min <= size <= limits.max)
    return f"{limits.min}..{limits.max}" + (f" in units of {limits.unit}" if limits.unit > 1 else "")


def listing(names: Sequence[str], most: int = 5, more: int = 0) -> str:
    """Return the names as "a, b and c". Beyond ``most`` names, only the number of the rest is given.
    ``more``: how many there are beside ``names``."""
    if len(names) + more > most:
        return f"{', '.join(names[:most])} and {len(names[most:]) + more} more"
    if len(names) > 1:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return "".join(names)


def step(number: int, tells: bool) -> str:
    """Return the job's step in words. ``tells``: the script reports its own step number; otherwise steps are
    counted in this round."""
    return f"step {number}" if tells else f"step {number} of this round"


def span(seconds: float) -> str:
    """Return a length of time in at most two units: "45 s", "3 min 20 s", "2 h 5 min", "1 d 2 h"."""
    s = max(0, round(seconds))
    for unit, length, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if s >= length:
            rest = s % length // part
            return f"{s // length} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{s} s"


def size(count: float) -> str:
    """Return a number of bytes in three digits: "512 B", "64 MB", "1.2 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


KINDS: dict[Kind, str] = {
    Kind.PRODUCTIVE: "productive",
    Kind.REPLAYED: "repeating lost steps",
    Kind.CHECKPOINT: "held up by checkpoints",
    Kind.RENDEZVOUS: "forming worlds",
    Kind.RESTARTING: "starting and losing workers",
    Kind.WAITING: "waiting for workers",
    Kind.HUNG: "hung",
    Kind.IDLE: "idle: the job needed no worker",
}


def spent(seconds: Mapping[str, float]) -> str:
    """Return the use of the time of all slots, by kind: "93.1 % productive of 2 h 5 min of worker time; lost:
    3 min starting and losing workers, 20 s forming worlds".

    Without a step: "no step was seen in 2 h 5 min of worker time; of that 20 s forming worlds". Empty if no
    time was spent.
    """
    wanted_s = wanted(seconds)
    if wanted_s <= 0:
        return ""
    share = goodput(seconds)
    if share is None:
        head, then = f"no step was seen in {span(wanted_s)} of worker time", "of that"
    else:
        head, then = f"{share:.1%} productive of {span(wanted_s)} of worker time".replace("%", " %"), "lost:"
    not_lost = {Kind.PRODUCTIVE, Kind.IDLE, *([Kind.RESTARTING] if share is None else [])}
    others = [(seconds.get(kind, 0.0), text) for kind, text in KINDS.items() if kind not in not_lost]
    lost = sorted(others, reverse=True)
    parts = [f"{span(s)} {text}" for s, text in lost if round(s)]
    return f"{head}; {then} {', '.join(parts)}" if parts else head


# ---------------------------------------------------------------- reasons


def waiting(wait: r.Wait, now: float) -> str:
    """Return the reason for which the job waits, in a sentence. ``now``: seconds since the epoch."""
    match wait:
        case r.BelowMinimum(have, need, until, unit):
            if have >= need:
                return (
                    f"waiting for more workers: {have} make too few whole units of {unit}{_left(until, now)}"
                )
            missing = count(need - have, "more worker")
            return f"waiting for {missing}: {have} of at least {need}{_left(until, now)}"
        case r.BelowMemory(have, 0, state, each, _, until):
            part = size(-(-state // have))
            return (
                f"waiting for workers with more memory: each of {have} needs {part} for its part of the "
                f"state, and has {size(each)}{_left(until, now)}"
            )
        case r.BelowMemory(have, need, state, each, most, until):
            there = f"and {have} {'is' if have == 1 else 'are'} there"
            there = f"but at most {most} may take part" if need > most else there
            return (
                f"waiting for memory: {need} workers of {size(each)} are needed to hold {size(state)} of "
                f"state, {there}{_left(until, now)}"
            )
        case r.Settling(have, most, until):
            return f"{count(have, 'worker')} of at most {most} are here; others may follow{_left(until, now)}"
        case r.AwaitingRelease(nodes, more):
            return f"waiting for {listing(nodes, more=more)} to stop the last round's workers"
        case r.AwaitingHeirs(nodes, until):
            return (
                f"{listing(nodes)} has the only copy of the training's state, and stays until others are "
                f"ready to take it{_left(until, now)}"
            )
        case r.AwaitingCheckpoint(until):
            return f"waiting for the script's next checkpoint before the world is resized{_left(until, now)}"
        case r.AwaitingReturn(nodes, until, more):
            return f"waiting for {listing(nodes, more=more)} to come back{_left(until, now)}"
        case r.CoolingDown(have, could_have, until):
            return f"could grow from {have} to {count(could_have, 'worker')}{_in(until, now)}"
        case _:
            assert_never(wait)


def _left(until: float, now: float) -> str:
    return f", for another {span(until - now)}" if until < float("inf") else ""


def _in(until: float, now: float) -> str:
    return f", in {span(until - now)}" if round(until - now) > 0 else ", in a moment"


def sentence(reason: r.Reason, now: float) -> str:
    """Return a decision and its reason, in a sentence without a full stop."""
    if isinstance(reason, r.Wait):
        return waiting(reason, now)
    match reason:
        case r.RoundFormed(number, world_size, nodes, why):
            return (
                f"round {number} formed with {count(world_size, 'worker')} "
                f"on {count(nodes, 'node')}: {cause(why)}"
            )
        case r.RoundClosing(number, why, nodes, failed):
            # The log of the worker's node, and the FailureCharged event, say how the worker failed.
            whose = worker(failed.node, failed.exit) if failed else listing(nodes)
            who = f" ({whose})" if whose else ""
            return f"round {number} ends: {cause(why)}{who}"
        case r.FailureCharged(failed, spent, allowed):
            left = f"{spent} of {allowed} restarts spent" if spent <= allowed else "no restart is left"
            return f"{failure(failed)}; {left}"
        case r.SlotQuarantined(node, slot, until):
            return f"slot {slot} on {node} keeps failing alone and is left out for {span(until - now)}"
        case r.SlotDrained(node, slot, until, faults):
            return f"slot {slot} on {node} is left out for {span(until - now)}: {left_out(faults)}"
        case r.WorkerStraggling(node, slot, rank, ratio):
            return f"rank {rank} (slot {slot} on {node}) takes {_longer(ratio)} for a step than its peers"
        case r.WorkerKeepsUp(node, slot, rank):
            return f"rank {rank} (slot {slot} on {node}) keeps up with its peers again"
        case r.SlotBad(node, slot, rank, why):
            return f"the GPU of rank {rank} (slot {slot} on {node}) is unreliable: {why}"
        case r.GpuStrained(node, slot, rank, why):
            return f"the GPU of rank {rank} (slot {slot} on {node}) is strained: {why}"
        case r.GpuRelieved(node, slot, rank):
            return f"the GPU of rank {rank} (slot {slot} on {node}) is no longer strained"
        case r.JobEnded(outcome, why):
            return f"the job {ended(outcome)}" + (f": {why}" if why else "")
        case r.WorkersStarted(number, ranks, world_size):
            return f"started {ranks_in_words(ranks)} of {world_size} for round {number}"
        case r.WorkersStopping(number, why, grace_s):
            return f"stopping the workers of round {number} within {span(grace_s)}: {cause(why)}"
        case r.WorkersLeaving(number, why, planned):
            when = "at their next commit" if planned else "at once"
            return f"the workers leave round {number} {when}: {cause(why)}"
        case r.StandbysStarted(slots):
            return f"started {count(len(slots), 'worker')} to wait for a round"
        case r.StartHeldBack(slots, pid):
            whose = "slot" if len(slots) == 1 else "slots"
            return f"the start in {whose} {listing([str(s) for s in slots])} {awaits(pid)}"
        case r.ProcessLingers(slot, pid, for_s):
            ago = f"process {pid} of slot {slot}, which ended {span(for_s)} ago"
            return f"the kernel has not taken down {ago}: {_what_to_do(reason)}"
        case r.ScriptCheckpointed(_, slot, path):
            return f"the worker in slot {slot} has written a checkpoint" + (f", {path}" if path else "")
        case r.StandbyReady(slot):
            return f"the worker in slot {slot} is ready for a round"
        case r.StandbyFailed(slot, code, message, until):
            said = f": {first_line(message)}" if message.strip() else ""
            again = f"another one starts{_in(until, now)}"
            return f"the standby worker of slot {slot} {ending(code)}{said}; {again}"
        case r.WorkerEnded(_, slot, rank, code, message, hung):
            if hung:  # a WorkersHung event has just named the place
                return f"rank {rank} (slot {slot}) was killed by elasticd, because it hung"
            said = f": {first_line(message)}" if message.strip() else ""
            return f"rank {rank} (slot {slot}) {ending(code)}{said}"
        case r.WorkersHung(number, verdict, evidence):
            seen = f"; the evidence is in {evidence}" if evidence else ""
            return f"round {number} hangs: {hang(verdict)}{seen}"
        case r.VerdictDropped(number, verdict, late_s):
            return (
                f"round {number} seemed to hang: {hang(verdict)}; this agent was {span(late_s)} late to act, "
                "so it kills no worker, and judges its workers again"
            )
        case r.OptionWithoutEffect(option, wants):
            return f"{option} has no effect: it is for scripts that use {_FOR[wants]}, and this one does not"
        case r.BatchesChanged(before, size):
            return (
                f"the world went from {before} to {size} workers, and with it the batches: a script that "
                "counts its data in batches (epoch = step // len(loader)) repeats some samples and skips "
                "others from here on; count the samples that were used, as for worker.rest_of_epoch; see "
                "docs/samples.md"
            )
        case r.TrainingBeganAgain(furthest):
            return (
                f"the script had made {furthest:,} steps and begins again with an optimizer that has made "
                "none: have it load its newest snapshot, with the optimizer, when it starts; see "
                "docs/samples.md (for transformers' Trainer: docs/frameworks.md)"
            )
        case r.Expelled(running, newest):
            return f"round {newest} formed without this node; its workers of round {running} are killed"
        case r.LeaseLost(ttl_s, late_s):
            if late_s > ttl_s / 4:
                why = (
                    f"because its agent sent a renewal {late_s:.1f} s late: this machine is short of CPU or "
                    "memory, or was suspended"
                )
            else:
                why = "although its agent sent the renewals on time: etcd or the network was too slow"
            more = f"the node registers again (a --node-ttl above {ttl_s:g} s tolerates longer delays)"
            return f"this node's lease ran out, {why}; {more}"
        case r.StoreAway(cut_off, until):
            if not cut_off:
                return "etcd does not answer; the workers go on"
            stop = f"; the workers stop{_in(until, now)} unless etcd answers" if until is not None else ""
            return f"this node is cut off from etcd{stop}"
        case r.StoreBack(away_s):
            return f"etcd is back after {span(away_s)}"
        case r.StoreFull(why):
            return (
                f"{why}; the workers go on, but meanwhile no worker is replaced, and no node joins or leaves"
            )
        case r.StoreHasRoom(full_s):
            return f"etcd takes writes again, after {span(full_s)} without room"
        case r.Draining(number):
            return f"leaving the job: {_asker(number)} asked for it"
        case r.LeadsNow():
            return "this node leads the job now"
        case r.NameTaken(until):
            return f"another agent has this node's name; waiting for its lease to run out{_left(until, now)}"
        case r.PolicyDiffers(names):
            options = listing([n.removesuffix("_s").replace("_", "-") for n in names])
            return f"the job keeps its policy: the values given here for {options} are ignored"
        case _:
            assert_never(reason)


def terminal_line(reason: r.Reason, now: float) -> str:
    """Return what a terminal shows of a decision; empty if the next lines say as much."""
    if isinstance(reason, r.WorkersStarted) or (isinstance(reason, r.RoundClosing) and reason.cause.charged):
        return ""
    return sentence(reason, now)


def worker_line(event: str, fields: Mapping[str, object]) -> str:
    """Return the line that a terminal shows for an event of the node's workers or of their zygote. Empty if
    the reader need not know, or if the next lines say the same."""
    match event, fields:
        case "worker.entered", {"batch": batch, "rates_times": times, "round": number}:
            return f"round {number}: the global batch is {batch} now, and learning rates are times {times}"
        case "worker.entered" | "worker.done" | "zygote.ready" | "zygote.left_out" | "zygote.ended", _:
            return ""
        case "worker.broken", {"slot": slot, "why": why, "fails": True}:
            return f"the run function of slot {slot} has ended early: {why}"
        case "worker.broken", {"slot": slot, "why": why}:
            return f"the worker of slot {slot} has lost the others: {why}"
        case "worker.unlinked", {"slot": slot, "why": why}:
            return f"the worker of slot {slot} cannot be told anything any more: {why}"
        case "zygote.given_up", {"why": why}:
            return f"workers start without imported modules, since the zygote is of no use: {why}"
    return event


def laggard(one: Laggard) -> str:
    """Return the worker that lags behind, or has a bad or a strained GPU, in a clause without a full stop."""
    return sentence(named(one), 0.0)


def left_out(faults: Sequence[Laggard]) -> str:
    """Return why a slot is left out, in clauses without a full stop."""
    return "; ".join(map(_fault, faults)) or "it keeps failing alone"


def _fault(one: Laggard) -> str:
    if not one.why:
        return f"its worker took {_longer(one.ratio)} for a step than its peers"
    return f"its GPU is {'strained' if one.strained else 'unreliable'}: {one.why}"


def _longer(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} % longer"


def draining(asked: bool) -> str:
    """Return why a node leaves the job, in a clause without a full stop. ``asked``: by the operator."""
    return f"{_asker(0) if asked else 'a signal'} asked for it"


def _asker(signal_number: int) -> str:
    return signal_name(signal_number) if signal_number else "`elasticd drain`"


def ended(outcome: Outcome) -> str:
    """Return the end of a job, as a verb such as "finished" or "failed"."""
    match outcome:
        case Outcome.SUCCEEDED:
            return "finished"
        case Outcome.FAILED:
            return "failed"
        case Outcome.SHORT:
            return "gave up waiting for workers"
        case Outcome.STOPPED:
            return "was stopped"
        case Outcome.DIVERGED | Outcome.NOWHERE | Outcome.REFUSED:
            return "stopped itself"
        case _:
            assert_never(outcome)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0 and 2" or "ranks 0 to 3"."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listing([str(n) for n in ranks], most=8)}"


# ---------------------------------------------------------------- hangs


def hang(verdict: Verdict) -> str:
    """Return the ranks that hang, and their places, in a clause such as "rank 3 on node b is in job.py:88,
    data loading; the other 7 wait for it in all_reduce"."""
    if verdict.why is Why.DEADLOCK:
        return _deadlock(verdict)
    who = "; ".join(_culprit(verdict.why, look) for look in verdict.guilty[:3])
    if len(verdict.guilty) > 3:
        who += f"; and {len(verdict.guilty) - 3 + verdict.more} more ranks likewise"
    return f"{who}{_others(verdict)}"


def _culprit(why: Why, look: Look) -> str:
    who = f"rank {look.rank} on node {look.node}"
    where = f" in {look.place}" if look.place else ""
    what = f", {look.what}" if look.what else ""
    match why:
        case Why.STOPPED:
            return f"{who} is stopped (SIGSTOP){where}"
        case Why.ASLEEP:
            return f"{who} is{where}{what}"
        case Why.BUSY:
            return f"{who} has been busy for {span(look.still_s)}{where}{what}"
        case Why.APART:
            return f"{who} waits in {look.what or 'a collective'} at {look.place}"
        case _:
            return f"{who} makes no step, and its stack is unknown"


def _others(verdict: Verdict) -> str:
    if not verdict.others:
        return ""
    subject = "the other one waits" if verdict.others == 1 else f"the other {verdict.others} wait"
    for_whom = " for it" if len(verdict.guilty) == 1 else " for them"
    if verdict.why is Why.APART:
        return f", but {subject} in {verdict.others_what} at {verdict.others_place}"
    return f"; {subject}{for_whom}" + (f" in {verdict.others_what}" if verdict.others_what else "")


def _deadlock(verdict: Verdict) -> str:
    places: dict[str, list[str]] = {}
    for look in verdict.guilty:
        places.setdefault(f"{look.what or 'a collective'} at {look.place}", []).append(str(look.rank))
    if len(verdict.guilty) == 1:
        (place,) = places
        return f"rank {verdict.guilty[0].rank} on node {verdict.guilty[0].node} waits in {place} for nobody"
    who = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {listing(ranks)} in {place}" for place, ranks in places.items()
    )
    return f"all {len(verdict.guilty) + verdict.more} ranks wait for each other: {who}"


# ---------------------------------------------------------------- events

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A reason as a log event: a dotted name, a level, and flat fields."""

    name: str
    level: Level
    fields: dict[str, object] = field(default_factory=dict)


_FOR = {
    Use.STATE: "worker.State",
    Use.CHECKPOINTS: "worker.State with --checkpoints, or worker.Checkpoints",
    Use.DATA: "worker.Data",
}
EVENTS: dict[type, tuple[str, Level]] = {
    r.BelowMinimum: ("job.waiting", "warning"),
    r.BelowMemory: ("job.waiting", "warning"),
    r.Settling: ("job.settling", "info"),
    r.AwaitingRelease: ("round.awaiting_release", "info"),
    r.AwaitingHeirs: ("round.awaiting_heirs", "info"),
    r.AwaitingCheckpoint: ("round.awaiting_checkpoint", "info"),
    r.AwaitingReturn: ("round.awaiting_return", "warning"),
    r.CoolingDown: ("round.cooling_down", "info"),
    r.RoundFormed: ("round.formed", "info"),
    r.RoundClosing: ("round.closing", "info"),
    r.FailureCharged: ("failure.charged", "warning"),
    r.SlotQuarantined: ("slot.quarantined", "warning"),
    r.SlotDrained: ("slot.drained", "warning"),
    r.WorkerStraggling: ("worker.straggling", "warning"),
    r.WorkerKeepsUp: ("worker.keeps_up", "info"),
    r.SlotBad: ("slot.bad", "warning"),
    r.GpuStrained: ("gpu.strained", "warning"),
    r.GpuRelieved: ("gpu.relieved", "info"),
    r.JobEnded: ("job.ended", "info"),
    r.WorkersStarted: ("workers.started", "info"),
    r.WorkersStopping: ("workers.stopping", "info"),
    r.WorkersLeaving: ("workers.leaving", "info"),
    r.StandbysStarted: ("standbys.started", "info"),
    r.StartHeldBack: ("worker.held_back", "info"),
    r.ProcessLingers: ("worker.lingers", "warning"),
    r.ScriptCheckpointed: ("checkpoint.told", "info"),
    r.StandbyReady: ("standby.ready", "info"),
    r.StandbyFailed: ("standby.failed", "warning"),
    r.WorkerEnded: ("worker.ended", "info"),
    r.WorkersHung: ("workers.hung", "warning"),
    r.VerdictDropped: ("hang.dropped", "warning"),
    r.OptionWithoutEffect: ("option.without_effect", "warning"),
    r.BatchesChanged: ("data.batches_changed", "warning"),
    r.TrainingBeganAgain: ("training.began_again", "warning"),
    r.Expelled: ("node.expelled", "warning"),
    r.LeaseLost: ("lease.lost", "warning"),
    r.StoreAway: ("etcd.away", "warning"),
    r.StoreBack: ("etcd.back", "info"),
    r.StoreFull: ("etcd.full", "error"),
    r.StoreHasRoom: ("etcd.has_room", "info"),
    r.Draining: ("node.draining", "info"),
    r.LeadsNow: ("leader.elected", "info"),
    r.NameTaken: ("node.name_taken", "warning"),
    r.PolicyDiffers: ("policy.differs", "warning"),
}


def awaits(pid: int) -> str:
    """Return the state of a slot whose worker starts once this process is gone, as a verb."""
    return f"waits for process {pid} to be taken down by the kernel"


def _what_to_do(lingering: r.ProcessLingers) -> str:
    pid, waits_s = lingering.pid, lingering.waits_s
    if waits_s:
        return (
            f"new workers wait up to {span(waits_s)} more for its memory and its device; if it does not end, "
            f"see /proc/{pid}/stack, and `dmesg` for errors of a driver or a disk"
        )
    return (
        "new workers no longer wait for it, and may find its memory or its device taken; if they fail, run "
        "`elasticd drain` for this node, and restart the machine"
    )


def event(reason: r.Reason) -> LogEvent:
    """Return the reason as a log event. Nested facts become flat fields (``node``, ``slot``, ``rank``)."""
    name, level = EVENTS[type(reason)]
    if isinstance(reason, r.WorkerEnded) and reason.code != 0:
        level = "warning"
    if isinstance(reason, r.JobEnded) and reason.outcome not in (Outcome.SUCCEEDED, Outcome.STOPPED):
        level = "error"
    # The leader charges the failure right after it closes the round; that event has the long message.
    said_later = isinstance(reason, r.RoundClosing) and reason.cause.charged
    flat: dict[str, object] = {}
    for f in fields(reason):
        value: object = getattr(reason, f.name)
        if isinstance(reason, r.Draining):
            flat["asked_by"] = _asker(reason.signal).strip("`")
        elif isinstance(reason, r.SlotDrained) and f.name == "faults":
            flat["why"] = left_out(reason.faults)
        elif isinstance(value, Failure):
            flat |= {
                "failed_node": value.node,
                "slot": value.exit.slot,
                "rank": value.exit.rank,
                "code": value.exit.code,
                "message": "" if said_later else first_line(value.exit.message),
                "log": value.exit.log,
            }
        elif isinstance(value, Verdict):
            flat |= {
                "why": str(value.why),
                "ranks": [look.rank for look in value.guilty],
                "nodes": [look.node for look in value.guilty],
                "slots": [look.slot for look in value.guilty],
                "conclusion": hang(value),
            }
        elif isinstance(value, tuple):
            flat[f.name] = list(value)
        elif f.name == "until" and isinstance(value, float):
            flat["until"] = datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds")
        elif f.name == "noticed_at" and isinstance(value, float):
            flat["noticed_at"] = datetime.fromtimestamp(value, UTC).isoformat() if value else None
        elif isinstance(value, float):
            flat[f.name] = round(value, 3)
        elif f.name not in ("hung", "more") or value:
            flat["round" if f.name == "number" else f.name] = value
    if isinstance(reason, r.ProcessLingers):
        flat["advice"] = _what_to_do(reason)
    return LogEvent(name, level, {k: v for k, v in flat.items() if v not in (None, "", [])})
