"""The invariants of an agent hold whatever events it gets, in whatever order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.core.agent_messages import (
    CheckProcess,
    CountOtherNodes,
    LeaseChanged,
    LeaveJob,
    OtherNodesCounted,
    PortReserved,
    ProcessGone,
    RenewStore,
    Signalled,
    StartWorkers,
    StopWorkers,
    Tag,
    Tick,
    Transact,
    WardenLost,
)
from elasticd.core.facts import Cause, Drained, Exit, Node, Outcome, Phase
from elasticd.core.ports import (
    Answer,
    Applied,
    LeaseExpired,
    LeaseHeld,
    LeaseNews,
    NoAnswer,
    Put,
    Refused,
    StoreSilent,
)
from tests.core.build import life, node, round, spec
from tests.core.by_hand import OTHER_LEADER, Agent

EVENTS = {
    "spec": 2,
    "round": 8,
    "leader": 2,
    "own": 3,
    "others": 1,
    "answer": 10,
    "lease": 4,
    "exit": 8,
    "port": 4,
    "signal": 1,
    "gone": 1,
    "warden": 1,
    "time": 4,
}
WEIGHTED = [kind for kind, weight in EVENTS.items() for _ in range(weight)]


class Watched(Agent):
    """An agent, beside a model of what runs on its node and what it has requested."""

    def __init__(self) -> None:
        super().__init__(spec(1, 4))
        self.running: dict[int, int] = {}  # slot: round
        self.under_way: set[Tag] = set()
        self.reserved = True  # whether a port listens for the next store
        self.left = False
        self.number = 0

    def check(self, released_before: int) -> None:
        assert not self.left or not self.did, "it has left"
        for action in self.did:
            match action:
                case Transact(tag, guards, writes):
                    assert tag not in self.under_way, "one write of a kind at a time"
                    assert guards and writes
                    assert self.state.etcd.silent is None
                    self.under_way.add(tag)
                    self._check_record(tag, action)
                case StartWorkers(its_round, member):
                    assert not self.running, "two crews"
                    assert self.state.registered and self.state.released.round < its_round.number
                    assert its_round.phase is Phase.LIVE and member in its_round.members
                    assert self.reserved or not member.hosts_store, "the port serves an earlier round"
                    self.running = dict.fromkeys(member.slots, its_round.number)
                    self.reserved = not member.hosts_store
                case StopWorkers(signal, grace_s):
                    assert self.running and signal > 0 and grace_s >= 0
                case RenewStore():
                    assert not self.reserved, "nothing uses the port that is reserved"
                case LeaveJob():
                    assert not self.running, "orphans"
                    assert not self.left
                    self.left = True
                case _:
                    pass
        assert self.state.released.round >= released_before, "what was released cannot run again"
        assert self.wake_at is None or self.wake_at > self.now, "it would spin"
        assert not self.state.gone or self.left

    def _check_record(self, tag: Tag, action: Transact) -> None:
        (put, *_) = action.writes
        if tag is Tag.NODE and isinstance(put, Put) and isinstance(put.fact, Node):
            assert put.leased
            assert self.reserved, "another round would get the port of this one"
            assert all(number > put.fact.released for number in self.running.values())


Told = tuple[str, int, int]
BEGINNING: list[Told] = [
    ("spec", 5, 0),
    ("round", 0, 0),
    ("leader", 1, 0),
    ("own", 0, 0),
    ("lease", 0, 0),
    ("answer", 0, 0),
]  # the agent's workers run after this


@st.composite
def lives(draw: st.DrawFn) -> list[Told]:
    kinds = draw(st.lists(st.sampled_from(WEIGHTED), max_size=60))
    return [(kind, draw(st.integers(0, 11)), draw(st.integers(0, 11))) for kind in kinds]


def tell(one: Watched, kind: str, a: int, b: int) -> None:
    """Give the agent one event that is possible now, or none. The numbers choose the event. Rounds only go
    forward, as in etcd."""
    one.did = ()
    match kind:
        case "spec":
            stop_or_drain = replace(spec(1, 4), drain=(Drained("a", life("a")),) if a == 0 else ())
            one.sees("spec", None if a == 1 else spec(1, 4, script="other.py") if a == 2 else stop_or_drain)
        case "round":
            sizes = [{"a": 2, "b": 1}, {"b": 1, "a": 1}, {"b": 2}, {"a": 2}][a % 4]
            old = one.state.round
            choice = [Phase.LIVE, Phase.LIVE, Phase.CLOSING, Phase.WAITING, Phase.ENDED, Phase.LIVE][b % 6]
            if b == 10:
                one.sees("round", None)
            elif choice is Phase.LIVE or old is None:
                one.number += 1
                one.sees("round", round(one.number, sizes, port=one.state.store_port + (b == 11)))
            elif choice is Phase.CLOSING:
                one.sees("round", replace(old, phase=choice, closing=Cause.GREW, planned=a > 5))
            elif choice is Phase.WAITING:
                one.sees("round", replace(old, phase=choice))
            elif a < 3:
                one.sees("round", replace(old, phase=choice, outcome=[*Outcome][a]))
        case "leader":
            one.sees("leader", OTHER_LEADER if a % 2 else None)
        case "own":
            there = one.state.seen.get("nodes/a")
            if a < 4 or there is None:
                one.sees("nodes/a", None)
            elif a == 4:
                one.sees("nodes/a", node("a", life_number=0))
            else:
                one.sees("nodes/a", there.fact, created=there.created)
        case "others":
            one.told(OtherNodesCounted(a % 2))
        case "answer" if one.under_way:
            tag = sorted(one.under_way)[a % len(one.under_way)]
            one.under_way.discard(tag)
            one.revision += 1
            applied = Applied(one.revision)
            answers: list[Answer] = [applied, applied, Refused(), NoAnswer("late")]
            one.answered(tag, answers[b % 4])
        case "lease":
            silence = StoreSilent(one.now, cut_off=b % 2 == 0)
            news: list[LeaseNews] = [LeaseHeld(one.now + 5), LeaseHeld(one.now + 5), LeaseExpired(), silence]
            one.told(LeaseChanged(news[a % 4]))
        case "exit" if one.running:
            slot = sorted(one.running)[a % len(one.running)]
            number = one.running.pop(slot)
            one.exits(number, Exit(slot, slot, [0, 1, -9][b % 3], one.now, fenced=b > 9), steps=a)
        case "port" if one.state.renewing_store:
            one.reserved = True
            one.told(PortReserved(one.state.store_port + 1))
        case "signal":
            one.told(Signalled([15, 2][a % 2]))
        case "gone":
            one.told(ProcessGone(life("a", a % 2)))
        case "warden":
            one.running = {}
            one.told(WardenLost())
        case _:
            one.at(one.now + [0.0, 0.1, 1.0, 6.0, 700.0][a % 5])


@settings(max_examples=400)
@given(lives(), st.booleans())
def test_an_agent_keeps_its_invariants_under_any_events(events: list[Told], well_begun: bool) -> None:
    one = Watched()
    beginning = BEGINNING if well_begun else []
    for kind, a, b in beginning + events:
        before = one.state.released.round
        tell(one, kind, a, b)
        one.check(before)
        one.told(Tick())  # nothing has happened, so there is little to do
        assert (
            not one.all_of(CountOtherNodes) and not one.all_of(CheckProcess) and not one.all_of(StopWorkers)
        )
        one.check(one.state.released.round)


@settings(max_examples=200)
@given(lives())
def test_an_agent_told_twice_to_go_leaves_as_soon_as_its_workers_are_gone(
    events: list[Told],
) -> None:
    one = Watched()
    for kind, a, b in events:
        before = one.state.released.round
        tell(one, kind, a, b)
        one.check(before)
    for _ in range(2):
        before = one.state.released.round
        one.told(Signalled(15))
        one.check(before)
    while one.running:
        before = one.state.released.round
        tell(one, "exit", 0, 2)
        one.check(before)
    assert one.left
