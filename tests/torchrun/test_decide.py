"""The decisions of a rendezvous, on made-up views."""

from __future__ import annotations

import random

import pytest

from elasticd.torchrun.decide import (
    EnterRound,
    Form,
    Register,
    Rejected,
    RendezvousView,
    Rules,
    Seen,
    Unreachable,
    Wait,
    changes_pending,
    decide,
    lost_members,
)
from elasticd.torchrun.rendezvous_records import NodeRecord, RendezvousClosed, RendezvousRound, Seat

ADDRESS = "10.0.0.1"
NOW = 100.0


def seen(
    created: int,
    after: int = 0,
    since: float = 0.0,
    address: str = ADDRESS,
    port: int = 1,
) -> Seen:
    return Seen(NodeRecord(after=after, address=address, port=port), created, since)


def round_of(number: int, *nodes: str, closed: RendezvousClosed | None = None) -> RendezvousRound:
    return RendezvousRound(number, tuple(Seat(n, ADDRESS, 1) for n in nodes), closed=closed)


def rules(low: int, high: int, last_call_s: float | None = None) -> Rules:
    return Rules(low, high, settle_s=1.0, last_call_s=last_call_s)


def formed(verdict: object) -> tuple[int, list[str]]:
    assert isinstance(verdict, Form), verdict
    return verdict.round.number, [s.node for s in verdict.round.seats]


def test_a_node_unknown_to_etcd_registers_first() -> None:
    assert decide("a", ADDRESS, RendezvousView(None, {}), rules(1, 1), NOW) == Register()


def test_the_first_round_forms_at_once_when_all_nodes_are_there() -> None:
    view = RendezvousView(None, {"b": seen(2, since=NOW), "a": seen(1, since=NOW)})
    assert formed(decide("a", ADDRESS, view, rules(1, 2), NOW)) == (1, ["a", "b"])


def test_only_the_oldest_node_forms() -> None:
    view = RendezvousView(None, {"a": seen(1), "b": seen(2)})
    assert isinstance(decide("b", ADDRESS, view, rules(1, 2), NOW), Wait)


def test_below_the_minimum_it_waits_without_end() -> None:
    verdict = decide("a", ADDRESS, RendezvousView(None, {"a": seen(1)}), rules(2, 2), NOW)
    assert isinstance(verdict, Wait) and verdict.until is None


def test_newcomers_are_given_company_for_a_moment() -> None:
    view = RendezvousView(None, {"a": seen(1, since=NOW - 5), "b": seen(2, since=NOW - 0.25)})
    verdict = decide("a", ADDRESS, view, rules(1, 3), NOW)
    assert isinstance(verdict, Wait) and verdict.until == NOW + 0.75
    assert formed(decide("a", ADDRESS, view, rules(1, 3), NOW + 1)) == (1, ["a", "b"])


def test_a_last_call_is_waited_for_only_if_it_was_asked_for() -> None:
    view = RendezvousView(None, {"a": seen(1, since=NOW - 20), "b": seen(2, since=NOW - 10)})
    assert formed(decide("a", ADDRESS, view, rules(2, 3), NOW)) == (1, ["a", "b"])
    verdict = decide("a", ADDRESS, view, rules(2, 3, last_call_s=30), NOW)
    assert isinstance(verdict, Wait) and verdict.until == NOW + 20


def test_survivors_form_at_once_and_keep_their_order() -> None:
    nodes = {"a": seen(9, after=4, since=NOW), "c": seen(3, after=4, since=NOW)}
    view = RendezvousView(round_of(4, "a", "b", "c"), nodes)
    assert formed(decide("c", ADDRESS, view, rules(1, 3), NOW)) == (5, ["a", "c"])


def test_a_member_that_lives_is_waited_for() -> None:
    view = RendezvousView(round_of(4, "a", "b"), {"a": seen(1, after=4), "b": seen(2, after=3)})
    verdict = decide("a", ADDRESS, view, rules(1, 2), NOW)
    assert isinstance(verdict, Wait) and "b" in verdict.why and not verdict.redundant


def test_newcomers_come_after_survivors_and_the_oldest_first() -> None:
    nodes = {n: seen(c, after=1) for n, c in {"b": 4, "x": 2, "y": 1, "z": 3}.items()}
    view = RendezvousView(round_of(1, "a", "b"), nodes)
    assert formed(decide("y", ADDRESS, view, rules(1, 3), NOW)) == (2, ["b", "y", "x"])


def test_a_member_of_a_newer_round_enters_it() -> None:
    view = RendezvousView(round_of(5, "b", "a"), {"a": seen(1, after=4), "b": seen(2, after=4)})
    verdict = decide("a", ADDRESS, view, rules(1, 2), NOW)
    assert isinstance(verdict, EnterRound) and (verdict.round.number, verdict.rank) == (5, 1)


def test_a_node_that_does_not_fit_is_redundant_and_becomes_eligible_when_a_member_is_lost() -> None:
    nodes = {"a": seen(1), "b": seen(2), "c": seen(3, after=1)}
    verdict = decide("c", ADDRESS, RendezvousView(round_of(1, "a", "b"), nodes), rules(1, 2), NOW)
    assert isinstance(verdict, Wait) and verdict.redundant
    del nodes["b"]
    verdict = decide("c", ADDRESS, RendezvousView(round_of(1, "a", "b"), nodes), rules(1, 2), NOW)
    assert isinstance(verdict, Wait) and not verdict.redundant


def test_no_node_joins_a_closed_rendezvous() -> None:
    closed = round_of(3, "a", closed=RendezvousClosed("a", 0.0))
    assert decide("b", ADDRESS, RendezvousView(closed, {}), rules(1, 2), NOW) == Rejected(closed)


def test_a_failed_attempt_refuses_while_its_nodes_live_and_is_forgotten_afterwards() -> None:
    closed = round_of(3, "a", "b", closed=RendezvousClosed("a", 0.0, failed=True))
    nodes = {"b": seen(1, after=3), "c": seen(2, after=3)}
    assert decide("c", ADDRESS, RendezvousView(closed, nodes), rules(1, 2), NOW) == Rejected(closed)
    del nodes["b"]
    assert formed(decide("c", ADDRESS, RendezvousView(closed, nodes), rules(1, 2), NOW)) == (
        4,
        ["c"],
    )


def test_a_node_that_others_cannot_reach_is_told_before_it_disturbs_them() -> None:
    view = RendezvousView(round_of(1, "a"), {"a": seen(1)})
    assert decide("b", "127.0.0.1", view, rules(1, 2), NOW) == Unreachable("a", ADDRESS)
    assert changes_pending("a", 1, view, rules(1, 2)) == 0


@pytest.mark.parametrize(
    ("what", "nodes", "pending"),
    [
        ("all is well", {"a": seen(1), "b": seen(2)}, 0),
        ("a member is lost", {"a": seen(1)}, 1),
        ("a member waits for the next round", {"a": seen(1), "b": seen(2, after=1)}, 1),
        ("a newcomer fits", {"a": seen(1), "b": seen(2), "c": seen(3, after=1)}, 1),
        (
            "of two newcomers one fits",
            {"a": seen(1), "b": seen(2), "c": seen(3), "d": seen(4)},
            1,
        ),
        (
            "a lost member makes room for another",
            {"a": seen(1), "c": seen(3), "d": seen(4)},
            3,
        ),
        ("its own lease is gone", {"b": seen(2)}, 1),
    ],
)
def test_changes_of_membership_are_seen(what: str, nodes: dict[str, Seen], pending: int) -> None:
    assert changes_pending("a", 1, RendezvousView(round_of(1, "a", "b"), nodes), rules(1, 3)) == pending


def test_a_superseded_member_must_go_even_if_the_new_world_is_full() -> None:
    view = RendezvousView(round_of(2, "b", "c"), {"a": seen(1), "b": seen(2), "c": seen(3)})
    assert changes_pending("a", 1, view, rules(1, 2)) == 1


def test_a_finished_job_lets_the_others_end_and_a_failed_one_does_not() -> None:
    finished = RendezvousView(round_of(1, "a", "b", closed=RendezvousClosed("b", 0.0)), {"a": seen(1)})
    failed = RendezvousView(
        round_of(1, "a", "b", closed=RendezvousClosed("b", 0.0, failed=True)), {"a": seen(1)}
    )
    assert changes_pending("a", 1, finished, rules(1, 2)) == 0
    assert changes_pending("a", 1, failed, rules(1, 2)) == 1


def test_a_member_that_went_on_to_another_round_never_arrives_in_this_one() -> None:
    view = RendezvousView(round_of(2, "a", "b", "c"), {"a": seen(1, after=1), "b": seen(2, after=2)})
    assert lost_members(round_of(2, "a", "b", "c"), view) == ["b", "c"]


class Rehearsal:
    """Nodes that come, leave, join again, and act on views that may be old, with one etcd that decides."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rules = rules(self.rng.randint(1, 3), self.rng.randint(3, 5))
        self.names = [f"n{i}" for i in range(6)]
        self.nodes: dict[str, Seen] = {}
        self.round: RendezvousRound | None = None
        self.revision = 1
        self.round_revision = 0
        self.joining: set[str] = set()
        self.inside: dict[str, int] = {}
        self.wrote: dict[str, int] = {}  # a node never looks at a view that is older than its own last write
        self.history: list[tuple[int, int, RendezvousView]] = []
        self.now = 0.0

    def look(self, name: str, age: int = 0) -> tuple[int, RendezvousView]:
        self.history.append(
            (self.revision, self.round_revision, RendezvousView(self.round, dict(self.nodes)))
        )
        revision, round_revision, view = self.history[max(-1 - age, -len(self.history))]
        if revision < self.wrote.get(name, 0):
            _, round_revision, view = self.history[-1]
        return round_revision, view

    def put(self, name: str, view: RendezvousView) -> None:
        self.revision += 1
        self.wrote[name] = self.revision
        after = max(self.inside.get(name, 0), view.round.number if view.round else 0)
        created = self.nodes[name].created if name in self.nodes else self.revision
        self.nodes[name] = seen(created, after=after, since=self.now)

    def lose(self, name: str) -> None:
        """Let the node's lease run out. The node joins again under another name."""
        self.revision += 1
        self.nodes.pop(name, None)
        self.joining.discard(name)
        self.inside.pop(name, None)
        self.names.remove(name)
        self.names.append(f"n{self.revision}")

    def act(self, name: str, age: int = 0) -> None:
        round_revision, view = self.look(name, age)
        if name not in self.joining:
            if name not in self.inside or changes_pending(name, self.inside[name], view, self.rules):
                self.joining.add(name)
                if name in self.nodes:
                    self.put(name, view)
            return
        match decide(name, ADDRESS, view, self.rules, self.now):
            case Register():
                self.put(name, view)
            case EnterRound(round_):
                self.joining.discard(name)
                self.inside[name] = round_.number
            case Form(round_) if round_revision == self.round_revision and name in self.nodes:
                self.form(round_)
            case _:
                pass

    def form(self, round_: RendezvousRound) -> None:
        last = self.round.number if self.round else 0
        assert round_.number == last + 1
        assert self.rules.min_nodes <= len(round_.seats) <= self.rules.max_nodes
        assert len({s.node for s in round_.seats}) == len(round_.seats)
        training = [n for n, at in self.inside.items() if at == last and n not in self.joining]
        assert not training, f"the live world of round {last} was replaced under {training}"
        self.revision += 1
        self.round, self.round_revision = round_, self.revision


@pytest.mark.parametrize("seed", range(200))
def test_no_world_is_replaced_while_it_trains_and_the_largest_forms_once_faults_cease(
    seed: int,
) -> None:
    it = Rehearsal(seed)
    for _ in range(400):
        it.now += 0.3
        name = it.rng.choice(it.names)
        if it.rng.random() < 0.08:
            it.lose(name)
        else:
            it.act(name, age=it.rng.randint(0, 3) if it.rng.random() < 0.3 else 0)
    for _ in range(30):  # faults cease
        it.now += 1.0
        for name in list(it.names):
            it.act(name)
    assert it.round is not None
    members = {s.node for s in it.round.seats}
    assert len(members) == it.rules.max_nodes
    assert all(it.inside.get(n) == it.round.number and n not in it.joining for n in members)
