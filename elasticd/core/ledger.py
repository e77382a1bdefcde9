"""The ledger: every second of every slot has exactly one kind. Pure.

A slot is observed at intervals. Without a worker at work, the observation tells the kind. With a worker at
work, the kind is known only later. The time before a worker's first step was spent on starting, the time
between steps on training, and the time after its last step on restarting.

    seen:   idle | worker ---- step 1 ---- step 5 ---- worker ends | waiting
    kinds:  idle | restarting | productive | restarting            | waiting

If the worker ends well, the time after its last step is productive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elasticd.core.facts import NodeLedger, SlotTime

ABSENT_MAX_S = 300.0  # the longest absence of an agent that counts as a restart of the agent
KEPT_SHARE = 0.01  # if an agent is killed, the kind of at most this share of its time is lost
KEPT_FIRST_S, KEPT_MOST_S = 1.0, 30.0  # the shortest and the longest time between two records


class Kind(StrEnum):
    PRODUCTIVE = "productive"  # steps made for the first time
    REPLAYED = "replayed"  # steps that were lost, and made again
    CHECKPOINT = "checkpoint"  # training was held up by a checkpoint
    RENDEZVOUS = "rendezvous"  # the worker was ready, and waited for the next world
    RESTARTING = "restarting"  # from a worker's last step to its end, and from its start to its first
    WAITING = "waiting"  # too few workers for a world
    HUNG = "hung"  # from the last step of a worker that hangs
    IDLE = "idle"  # the job wants no worker in this slot now


@dataclass(frozen=True, slots=True)
class AtWork:
    """A worker at work in a round.

    ``step``: steps made in this round; the first at ``first_at``, the last at ``at`` (seconds since the
    epoch; 0 if unknown). ``base``: the job's step at which the worker began; without it (None) no step counts
    as replayed. ``held_up_s``: the total time for which checkpoints held up training.
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
    """The account of one slot. ``spent``: all time before ``told_until`` (seconds since the epoch), by kind.
    ``furthest``: the job's last step known to have been made in this slot. ``carried``: the part of ``spent``
    from before this agent's start."""

    told_until: float
    spent: Mapping[Kind, float] = field(default_factory=dict)
    seen: Seen = Kind.RENDEZVOUS
    furthest: int = 0
    carried: Mapping[Kind, float] = field(default_factory=dict)

    def see(self, what: Seen, now: float) -> Account:
        """Return the account after an observation at ``now``. A ``now`` that goes backwards counts as no
        time."""
        now = max(now, self.told_until)
        before = self.seen
        if isinstance(before, Kind):
            told = self._tell(before, now)
            return told if what is before else told._noting(what)._stepped(before, what, now)
        if isinstance(what, AtWork) and what.round == before.round:
            return self._stepped(before, what, now)
        if what is Kind.IDLE:
            rest = Kind.PRODUCTIVE  # the worker ended well: after its last step, the script ran to its end
        else:
            rest = Kind.HUNG if what is Kind.HUNG else Kind.RESTARTING
        return self._tell(rest, now)._noting(what)._stepped(before, what, now)

    def close(self, now: float) -> Account:
        """Return the account with all time up to ``now``, when no further observation follows."""
        return self.see(Kind.RENDEZVOUS if isinstance(self.seen, AtWork) else self.seen, now)

    @property
    def total_s(self) -> float:
        return sum(self.spent.values())

    @property
    def own(self) -> dict[Kind, float]:
        """The time spent during this agent's life, for counters that begin with the agent."""
        return {kind: seconds - self.carried.get(kind, 0.0) for kind, seconds in self.spent.items()}

    def _tell(self, kind: Kind, until: float) -> Account:
        length_s = until - self.told_until
        if length_s <= 0:
            return self
        spent = {**self.spent, kind: self.spent.get(kind, 0.0) + length_s}
        # Not ``replace``, which takes three times as long: an agent does this for each slot in each look.
        return Account(until, spent, self.seen, self.furthest, self.carried)

    def _noting(self, what: Seen) -> Account:
        return Account(self.told_until, self.spent, what, self.furthest, self.carried)

    def _stepped(self, before: Seen, what: Seen, now: float) -> Account:
        """Account for the time of the steps since ``before``, up to the last step."""
        if not isinstance(what, AtWork):
            return self
        same = isinstance(before, AtWork) and before.round == what.round
        last = before if isinstance(before, AtWork) and same else AtWork(what.round)
        if what.step <= last.step:
            return self if what == self.seen else self._noting(what)
        account = self
        done = last.step
        if done == 0:
            account = account._tell(Kind.RESTARTING, min(what.first_at or what.at, what.at, now))
            done = 1
        return account._train(done, last, what, min(what.at, now))._noting(what)

    def _train(self, done: int, last: AtWork, what: AtWork, until: float) -> Account:
        """Account for the steps after ``done``: replayed up to the furthest step, then productive."""
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
        account = account._tell(Kind.PRODUCTIVE, until)
        return account if furthest == account.furthest else replace(account, furthest=furthest)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The accounts of one node's slots."""

    slots: Mapping[int, Account] = field(default_factory=dict)

    def see(self, seen: Mapping[int, Seen], now: float) -> Ledger:
        """Return the ledger after these observations. The account of a new slot begins now."""
        accounts = dict(self.slots)
        for slot, what in seen.items():
            account = accounts.get(slot) or Account(
                now, seen=what if isinstance(what, Kind) else Kind.RESTARTING
            )
            accounts[slot] = account.see(what, now)
        return Ledger(accounts)

    @property
    def spent(self) -> dict[str, float]:
        """The seconds of all slots together, with an entry for every kind."""
        sums = dict.fromkeys(map(str, Kind), 0.0)
        for account in self.slots.values():
            for kind, seconds in account.spent.items():
                sums[kind] += seconds
        return sums

    def close(self, now: float) -> Ledger:
        return Ledger({slot: account.close(now) for slot, account in self.slots.items()})

    def record(self, node: str, now: float, run: int = 0) -> NodeLedger:
        """Return the record for the leader, with seconds rounded to milliseconds to keep the record short."""
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

    def resume(self, kept: NodeLedger) -> Ledger:
        """Return this ledger as the continuation of an earlier agent's record.

        The time after that agent's last known step counts as restarting. So does the agent's absence, up to
        ``ABSENT_MAX_S``: after a longer absence, the node itself was absent.
        """
        accounts = dict(self.slots)
        for time in kept.slots:
            account = accounts.get(time.slot)
            if account is None:
                continue
            began_at = account.told_until - account.total_s  # the first observation of the slot
            gap_s = max(0.0, began_at - kept.at)
            carried = {kind: time.spent.get(kind, 0.0) for kind in Kind}
            carried[Kind.RESTARTING] += time.untold_s + (gap_s if gap_s <= ABSENT_MAX_S else 0.0)
            spent = {kind: carried[kind] + account.spent.get(kind, 0.0) for kind in Kind}
            furthest = max(account.furthest, time.furthest)
            accounts[time.slot] = replace(account, spent=spent, furthest=furthest, carried=carried)
        return Ledger(accounts)


def totals(records: Iterable[NodeLedger]) -> dict[str, float]:
    """Return the seconds of all slots of all records together, with an entry for every kind."""
    sums = dict.fromkeys(map(str, Kind), 0.0)
    for record in records:
        for time in record.slots:
            for kind, seconds in time.spent.items():
                if kind in sums:  # a newer elasticd may tell of further kinds
                    sums[kind] += seconds
    return sums


def keep_every_s(lived_s: float) -> float:
    """Return how often to tell the leader the record, for an agent of this age. Time that is not told when
    the agent is killed counts as restarting."""
    return min(max(KEPT_SHARE * lived_s, KEPT_FIRST_S), KEPT_MOST_S)
