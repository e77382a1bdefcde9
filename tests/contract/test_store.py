"""The promises of core.ports.Store, which the real and the simulated store keep."""

from __future__ import annotations

import time
from typing import Any

from elasticd.core.facts import Budget, Leadership, Report
from elasticd.core.ports import (
    Applied,
    Changes,
    Delete,
    Entry,
    LeaseExpired,
    LeaseHeld,
    Listing,
    NoAnswer,
    Put,
    Refused,
    StillThere,
    StoreSilent,
    Unchanged,
    Write,
)

from .conftest import PATIENCE_S, Harness, Inbox


def budget(total: int) -> Put:
    return Put("budget", Budget(total=total))


def report(node: str) -> Put:
    return Put(f"reports/{node}", Report(node, "i", 1))


def leader(agent: str) -> Put:
    return Put("leader", Leadership(agent, "i"), leased=True)


def apply(harness: Harness, agent: str, *writes: Write, guards: tuple[Any, ...] = ()) -> Any:
    """Send a transaction. Return the answer."""
    answers = harness.inbox()
    harness.store(agent).transact(guards, writes, answers)
    harness.until(lambda: answers)
    return answers[0]


def apply_once_back(harness: Harness, agent: str, *writes: Write) -> None:
    """Send the transaction again until it is applied: an etcd that comes back may leave the first requests
    unanswered."""
    deadline = time.monotonic() + PATIENCE_S
    while not isinstance(answer := apply(harness, agent, *writes), Applied):
        assert isinstance(answer, NoAnswer) and time.monotonic() < deadline, answer


def follow(harness: Harness, agent: str, key: str = "", prefix: bool = True) -> Inbox:
    """Watch, and wait for the first listing."""
    seen = harness.inbox()
    harness.store(agent).watch(key, seen, prefix=prefix)
    harness.until(lambda: seen)
    return seen


def hold(harness: Harness, agent: str) -> Inbox:
    """Take a lease, and wait until it is held."""
    news = harness.inbox()
    harness.store(agent).hold_lease(news)
    harness.until(lambda: any(isinstance(n, LeaseHeld) for n in news))
    return news


def entries(seen: Inbox) -> list[Entry]:
    return [entry for what in seen for entry in what.entries]


def state(seen: Inbox) -> dict[str, Any]:
    """Return the keys and facts that a reader of this news knows."""
    known: dict[str, Any] = {}
    for what in seen:
        if isinstance(what, Listing):
            known.clear()
        for entry in what.entries:
            known[entry.key] = entry.fact
    return {key: fact for key, fact in known.items() if fact is not None}


def totals(seen: Inbox) -> list[int]:
    return [e.fact.total for e in entries(seen) if isinstance(e.fact, Budget)]


def assert_never_older_after_newer(seen: Inbox) -> None:
    newest: dict[str, int] = {}
    for what in seen:
        revisions = [entry.revision for entry in what.entries]
        if isinstance(what, Changes):
            assert revisions == sorted(revisions)
        for entry in what.entries:
            assert entry.revision >= newest.get(entry.key, 0)
            newest[entry.key] = entry.revision


def test_a_watch_lists_what_is_there_first(harness: Harness) -> None:
    applied = apply(harness, "a", budget(1))
    seen = follow(harness, "b")
    assert isinstance(seen[0], Listing)
    assert seen[0].revision >= applied.revision
    assert seen[0].entries == (Entry("budget", Budget(total=1), applied.revision, applied.revision),)


def test_a_watch_of_a_missing_key_lists_nothing_and_then_reports_the_key(harness: Harness) -> None:
    seen = follow(harness, "a", "budget", prefix=False)
    assert seen[0].entries == ()
    applied = apply(harness, "b", budget(1))
    harness.until(lambda: len(seen) > 1)
    assert seen[1] == Changes((Entry("budget", Budget(total=1), applied.revision, applied.revision),))


def test_a_watch_of_one_key_does_not_tell_of_its_namesakes(harness: Harness) -> None:
    seen = follow(harness, "a", "reports/n", prefix=False)
    apply(harness, "b", report("n1"))
    apply(harness, "b", report("n"))
    harness.until(lambda: len(seen) > 1)
    assert [e.key for e in entries(seen)] == ["reports/n"]


def test_a_deletion_is_told_with_its_own_revision(harness: Harness) -> None:
    seen = follow(harness, "a")
    apply(harness, "b", budget(1))
    deleted = apply(harness, "b", Delete("budget"))
    harness.until(lambda: len(entries(seen)) == 2)
    assert entries(seen)[1] == Entry("budget", None, deleted.revision, 0)


def test_a_key_that_was_changed_meanwhile_refuses(harness: Harness) -> None:
    first = apply(harness, "a", budget(1))
    assert isinstance(apply(harness, "b", budget(2)), Applied)
    assert apply(harness, "a", budget(3), guards=(Unchanged("budget", first.revision),)) == Refused()
    assert state(follow(harness, "a")) == {"budget": Budget(total=2)}


def test_a_refused_transaction_writes_nothing_at_all(harness: Harness) -> None:
    apply(harness, "a", budget(1))
    refused = apply(
        harness,
        "a",
        report("n"),
        Delete("budget"),
        guards=(Unchanged("reports/n", 0), Unchanged("budget", 0)),
    )
    assert refused == Refused()
    assert state(follow(harness, "a")) == {"budget": Budget(total=1)}


def test_only_one_of_many_creates_an_absent_key(harness: Harness) -> None:
    agents = [f"agent{i}" for i in range(4)]
    for agent in agents:
        hold(harness, agent)
    answers = harness.inbox()
    for agent in agents:
        harness.store(agent).transact((Unchanged("leader", 0),), (leader(agent),), answers)
    harness.until(lambda: len(answers) == len(agents))
    assert sorted(type(a).__name__ for a in answers) == ["Applied", "Refused", "Refused", "Refused"]


def test_a_key_that_went_and_came_back_is_not_still_there(harness: Harness) -> None:
    created = apply(harness, "a", budget(1)).revision
    still = StillThere("budget", created)
    assert isinstance(apply(harness, "a", budget(2), guards=(still,)), Applied)
    apply(harness, "b", Delete("budget"))
    assert apply(harness, "a", report("n"), guards=(still,)) == Refused()
    apply(harness, "b", budget(2))
    assert apply(harness, "a", report("n"), guards=(still,)) == Refused()


def test_all_writes_of_a_transaction_are_seen_together_at_one_revision(harness: Harness) -> None:
    apply(harness, "a", report("n1"), report("n2"))
    seen = follow(harness, "b")
    applied = apply(harness, "a", budget(1), report("n3"), Delete("reports/n1"))
    harness.until(lambda: len(seen) > 1)
    assert {(e.key, e.revision) for e in seen[1].entries} == {
        ("budget", applied.revision),
        ("reports/n3", applied.revision),
        ("reports/n1", applied.revision),
    }


def test_deleting_a_prefix_deletes_what_is_below_it_and_no_more(harness: Harness) -> None:
    apply(harness, "a", report("n1"), report("n2"), budget(1))
    apply(harness, "a", Delete("reports/", prefix=True))
    assert state(follow(harness, "a")) == {"budget": Budget(total=1)}


def test_transactions_of_an_agent_are_seen_in_the_order_they_were_asked_for(harness: Harness) -> None:
    if type(harness).__name__ == "SimulatedHarness":
        import pytest

        pytest.skip("the simulated network may let requests overtake each other")
    seen = follow(harness, "b")
    answers = harness.inbox()
    for total in range(1, 51):
        harness.store("a").transact((), (budget(total),), answers)
    harness.until(lambda: len(answers) == 50 and len(totals(seen)) == 50)
    assert totals(seen) == list(range(1, 51))


def test_watches_tell_every_change_once_in_order_of_revision(harness: Harness) -> None:
    seen = follow(harness, "w")
    answers = harness.inbox()
    for n in range(60):
        harness.store(f"agent{n % 3}").transact((), (budget(n),), answers)
    harness.until(lambda: len(answers) == 60 and len(totals(seen)) >= 60)
    assert sorted(totals(seen)) == list(range(60))
    revisions = [e.revision for e in entries(seen)]
    assert revisions == sorted(set(revisions))


def test_an_ended_watch_tells_nothing_more(harness: Harness) -> None:
    ended, other = harness.inbox(), follow(harness, "a")
    end = harness.store("a").watch("", ended, prefix=True)
    harness.until(lambda: ended)
    end()
    apply(harness, "b", budget(1))
    harness.until(lambda: totals(other) == [1])
    assert totals(ended) == []


def test_leased_keys_vanish_when_their_agent_leaves(harness: Harness) -> None:
    seen = follow(harness, "b")
    hold(harness, "a")
    apply(harness, "a", leader("a"), budget(1))
    harness.until(lambda: state(seen).keys() == {"leader", "budget"})
    harness.close("a")
    harness.until(lambda: state(seen).keys() == {"budget"})


def test_an_agent_that_lost_its_lease_hears_of_it_and_gets_another(harness: Harness) -> None:
    seen = follow(harness, "b")
    news = hold(harness, "a")
    apply(harness, "a", leader("a"), budget(1))
    harness.until(lambda: "leader" in state(seen))
    harness.expire("a")
    harness.until(lambda: any(isinstance(n, LeaseExpired) for n in news) and isinstance(news[-1], LeaseHeld))
    harness.until(lambda: state(seen).keys() == {"budget"})
    assert isinstance(apply(harness, "a", leader("a"), guards=(Unchanged("leader", 0),)), Applied)


def test_a_held_lease_outlives_its_time_to_live_many_times(harness: Harness) -> None:
    news = hold(harness, "a")
    apply(harness, "a", leader("a"))
    harness.until(lambda: sum(isinstance(n, LeaseHeld) for n in news) >= 8)
    assert not any(isinstance(n, LeaseExpired) for n in news)
    untils = [n.until for n in news if isinstance(n, LeaseHeld)]
    assert untils == sorted(untils)
    assert "leader" in state(follow(harness, "b"))


def test_every_transaction_is_answered_once_while_etcd_is_away(harness: Harness) -> None:
    follow(harness, "a")
    harness.outage()
    answers = harness.inbox()
    for total in range(3):
        harness.store("a").transact((), (budget(total),), answers)
    harness.until(lambda: len(answers) == 3)
    assert all(isinstance(answer, NoAnswer) for answer in answers)
    harness.restore()
    answers.clear()
    apply_once_back(harness, "a", budget(9))
    assert answers == []


def test_every_transaction_is_answered_once_while_etcd_hangs(harness: Harness) -> None:
    apply(harness, "a", budget(0))
    harness.hang()
    answers = harness.inbox()
    for total in range(1, 3):
        harness.store("a").transact((), (budget(total),), answers)
    harness.until(lambda: len(answers) == 2)
    assert all(isinstance(answer, NoAnswer) for answer in answers)
    harness.restore()
    apply_once_back(harness, "a", budget(9))
    assert len(answers) == 2


def test_a_watch_survives_etcd_being_killed_and_misses_nothing(harness: Harness) -> None:
    seen = follow(harness, "a")
    for outage in range(3):
        harness.outage()
        harness.restore()
        apply_once_back(harness, "b", budget(outage))
        harness.until(lambda: state(seen).get("budget") == Budget(total=outage))  # noqa: B023
    assert_never_older_after_newer(seen)


def test_a_watch_begun_while_etcd_is_away_lists_once_it_is_back(harness: Harness) -> None:
    apply(harness, "a", budget(1))
    harness.outage()
    seen = harness.inbox()
    harness.store("a").watch("", seen, prefix=True)
    unanswered = harness.inbox()
    harness.store("a").transact((), (budget(2),), unanswered)
    harness.until(lambda: unanswered)
    assert seen == []
    harness.restore()
    harness.until(lambda: state(seen) == {"budget": Budget(total=1)})


def test_silence_is_told_with_its_beginning_and_ends_with_the_lease_held(harness: Harness) -> None:
    news = hold(harness, "a")
    apply(harness, "a", leader("a"))
    harness.outage()
    harness.until(lambda: isinstance(news[-1], StoreSilent))
    last_held = [n for n in news if isinstance(n, LeaseHeld)][-1]
    assert news[-1].since <= last_held.until
    harness.restore()
    harness.until(lambda: isinstance(news[-1], LeaseHeld))
