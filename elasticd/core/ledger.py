"""Where the time went: every second of every slot in exactly one kind. Pure.

What a slot does is seen from time to time: either it has no worker at work, and the time is of the
kind that says why; or a worker is at work, and then time is only told once it is known what it was
spent on. Up to a worker's first step it was spent on starting it; between steps on training; and what
follows its last step is lost, unless it ends well.

    seen:    idle | worker ----- step 1 ----- step 5 ----------- gone | waiting |
    kinds:   idle | restarting | productive | productive? lost: | ... | waiting |
                                              restarting
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elasticd.core.facts import NodeLedger, SlotTime

ABSENT_MAX_S = 300.0  # an agent away for longer was not restarted: its node was not there
KEPT_SHARE = 0.01  # of an agent's time, that is not told as what it was if it is killed
KEPT_FIRST_S, KEPT_MOST_S = 1.0, 30.0


class Kind(StrEnum):
    PRODUCTIVE = "productive"  # steps that were made for the first time
    REPLAYED = "replayed"  # steps that had been made before, and were lost
    CHECKPOINT = "checkpoint"  # held up by a checkpoint
    RENDEZVOUS = "rendezvous"  # ready, while the next world forms
    RESTARTING = "restarting"  # from a worker's last step to its end, and from its start to its first
    WAITING = "waiting"  # too few workers are there for a world
    HUNG = "hung"  # from the last step of a worker that is judged hung
    IDLE = "idle"  # nobody wants a worker here now


@dataclass(frozen=True, slots=True)
class AtWork:
    """A worker in its slot, of this round.

    ``step``: steps made in this round, the last of them at ``at`` and the first at ``first_at`` (seconds
    since the epoch; 0 where not known). ``base``: the number of the job's step after which it began, or
    None where nobody knows that; then no step counts as replayed. ``held_up_s``: for how long in all
    checkpoints have kept it from training.
    """

    round: int
    step: int = 0
    at: float = 0.0
    first_at: float = 0.0
    base: int | None = None
    held_up_s: float = 0.0


Seen = Kind | AtWork


@dataclass(frozen=True, slots=True)
class Account:
    """The time of one slot. ``told_until``: seconds since the epoch; all before it is in ``spent``.
    ``furthest``: the job's last step that is known to have been made here. ``carried``: what of ``spent`` was
    before this agent, by kind."""

    told_until: float
    spent: Mapping[Kind, float] = field(default_factory=dict)
    seen: Seen = Kind.RENDEZVOUS
    furthest: int = 0
    carried: Mapping[Kind, float] = field(default_factory=dict)

    def see(self, what: Seen, now: float) -> Account:
        """The account once the slot has been seen at ``now``. Time that goes back is as if it stood."""
        now = max(now, self.told_until)
        before = self.seen
        if isinstance(before, Kind):
            return replace(self._tell(before, now), seen=what)._stepped(before, what, now)
        if isinstance(what, AtWork) and what.round == before.round:
            return self._stepped(before, what, now)
        if what is Kind.IDLE:
            rest = Kind.PRODUCTIVE  # it ended well: what came after the last step was the script's end
        else:
            rest = Kind.HUNG if what is Kind.HUNG else Kind.RESTARTING
        return replace(self._tell(rest, now), seen=what)._stepped(before, what, now)

    def close(self, now: float) -> Account:
        """Tell all the time up to now, as the slot will not be seen again."""
        return self.see(Kind.RENDEZVOUS if isinstance(self.seen, AtWork) else self.seen, now)

    @property
    def total_s(self) -> float:
        return sum(self.spent.values())

    @property
    def own(self) -> dict[Kind, float]:
        """What was spent in the life of this agent, as a counter that begins with it must say."""
        return {kind: seconds - self.carried.get(kind, 0.0) for kind, seconds in self.spent.items()}

    def _tell(self, kind: Kind, until: float) -> Account:
        length_s = until - self.told_until
        if length_s <= 0:
            return self
        spent = {**self.spent, kind: self.spent.get(kind, 0.0) + length_s}
        return replace(self, told_until=until, spent=spent)

    def _stepped(self, before: Seen, what: Seen, now: float) -> Account:
        """Tell the time of the steps that ``what`` has made since ``before``, up to the last."""
        if not isinstance(what, AtWork):
            return self
        same = isinstance(before, AtWork) and before.round == what.round
        last = before if isinstance(before, AtWork) and same else AtWork(what.round)
        if what.step <= last.step:
            return replace(self, seen=what)
        account = self
        done = last.step
        if done == 0:
            account = account._tell(Kind.RESTARTING, min(what.first_at or what.at, what.at, now))
            done = 1
        return replace(account._train(done, last, what, min(what.at, now)), seen=what)

    def _train(self, done: int, last: AtWork, what: AtWork, until: float) -> Account:
        """The steps after ``done``: replayed up to the furthest, then productive."""
        account, furthest = self, self.furthest
        held_up_s = min(max(0.0, what.held_up_s - last.held_up_s), max(0.0, until - account.told_until))
        account = account._tell(Kind.CHECKPOINT, account.told_until + held_up_s)
        if what.base is not None:
            steps = what.step - done
            again = min(max(0, furthest - (what.base + done)), steps)
            if steps:
                length_s = max(0.0, until - account.told_until)
                account = account._tell(Kind.REPLAYED, account.told_until + length_s * again / steps)
            furthest = max(furthest, what.base + what.step)
        return replace(account._tell(Kind.PRODUCTIVE, until), furthest=furthest)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The accounts of one node's slots."""

    slots: Mapping[int, Account] = field(default_factory=dict)

    def see(self, seen: Mapping[int, Seen], now: float) -> Ledger:
        """A slot that was not known before is accounted for from now on."""
        accounts = dict(self.slots)
        for slot, what in seen.items():
            account = accounts.get(slot) or Account(
                now, seen=what if isinstance(what, Kind) else Kind.RESTARTING
            )
            accounts[slot] = account.see(what, now)
        return Ledger(accounts)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of all slots together by kind, every kind there is."""
        sums = dict.fromkeys(map(str, Kind), 0.0)
        for account in self.slots.values():
            for kind, seconds in account.spent.items():
                sums[kind] += seconds
        return sums

    def close(self, now: float) -> Ledger:
        return Ledger({slot: account.close(now) for slot, account in self.slots.items()})

    def record(self, node: str, now: float, run: int = 0) -> NodeLedger:
        """What to keep in etcd. To the millisecond, as that is enough and much shorter."""
        up_to_now = {slot: account.see(account.seen, now) for slot, account in self.slots.items()}
        times = tuple(
            SlotTime(
                slot,
                {str(kind): round(seconds, 3) for kind, seconds in sorted(account.spent.items())},
                account.furthest,
                round(max(0.0, now - account.told_until), 3),
            )
            for slot, account in sorted(up_to_now.items())
        )
        return NodeLedger(node, now, times, run)

    def resume(self, kept: NodeLedger, began_at: float) -> Ledger:
        """This ledger, begun at ``began_at``, as the continuation of what an earlier agent of this node
        has kept. What came after the last step it knew of is lost, as after any worker's; and that the
        agent was away too, unless for so long that its node was."""
        accounts = dict(self.slots)
        gap_s = max(0.0, began_at - kept.at)
        for time in kept.slots:
            account = accounts.get(time.slot)
            if account is None:
                continue
            carried = {kind: time.spent.get(kind, 0.0) for kind in Kind}
            carried[Kind.RESTARTING] += time.untold_s + (gap_s if gap_s <= ABSENT_MAX_S else 0.0)
            spent = {kind: carried[kind] + account.spent.get(kind, 0.0) for kind in Kind}
            furthest = max(account.furthest, time.furthest)
            accounts[time.slot] = replace(account, spent=spent, furthest=furthest, carried=carried)
        return Ledger(accounts)


def keep_every_s(lived_s: float) -> float:
    """How often an agent that has lived for so long keeps its record: what it has not kept when it is
    killed is told as restarting, whatever it was."""
    return min(max(KEPT_SHARE * lived_s, KEPT_FIRST_S), KEPT_MOST_S)


def totals(records: Iterable[NodeLedger]) -> dict[str, float]:
    """Seconds of all slots together by kind, every kind there is."""
    sums = dict.fromkeys(map(str, Kind), 0.0)
    for record in records:
        for time in record.slots:
            for kind, seconds in time.spent.items():
                if kind in sums:  # a newer elasticd may know more of them
                    sums[kind] += seconds
    return sums


def wanted(spent: Mapping[str, float]) -> float:
    """The seconds in which work was wanted."""
    return sum(seconds for kind, seconds in spent.items() if kind != Kind.IDLE)


def goodput(spent: Mapping[str, float]) -> float | None:
    """The share of the time that was productive, of that in which work was wanted. None where no step was
    seen, as of scripts without an optimizer: then nobody can tell."""
    trained_s = sum(spent.get(kind, 0.0) for kind in (Kind.PRODUCTIVE, Kind.REPLAYED, Kind.CHECKPOINT))
    return spent.get(Kind.PRODUCTIVE, 0.0) / wanted(spent) if trained_s > 0 else None
