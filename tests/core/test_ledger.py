import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.core.facts import NodeLedger, SlotTime
from elasticd.core.ledger import (
    ABSENT_MAX_S,
    Account,
    AtWork,
    Kind,
    Ledger,
    Seen,
    keep_every_s,
)

T0 = 1_000.0


def account(*sights: tuple[float, Seen], end: float | None = None) -> dict[Kind, float]:
    """Return where the time since T0 went. The times of the looks count from T0."""
    one = Account(T0)
    for at, what in sights:
        one = one.see(what, T0 + at)
    if end is not None:
        one = one.close(T0 + end)
    return {kind: pytest.approx(seconds) for kind, seconds in one.spent.items() if seconds}


def work(round: int, step: int = 0, at: float = 0.0, first: float = 0.0, **more: object) -> AtWork:
    return AtWork(round, step, T0 + at if step else 0.0, T0 + first if first else 0.0, **more)  # type: ignore[arg-type]


def test_a_worker_starts_until_its_first_step_and_trains_until_its_last() -> None:
    assert account(
        (2, work(1)), (9, work(1, 30, at=8.5, first=5)), (20, work(1, 90, at=19)), (20, Kind.IDLE)
    ) == {Kind.RENDEZVOUS: 2, Kind.RESTARTING: 3, Kind.PRODUCTIVE: 15}


def test_what_a_worker_did_after_its_last_step_is_lost_if_it_fails_and_its_end_if_not() -> None:
    before = ((0, work(1)), (5, work(1, 1, at=5)), (9, work(1, 5, at=9)))
    assert account(*before, (12, Kind.RESTARTING)) == {Kind.RESTARTING: 8, Kind.PRODUCTIVE: 4}
    assert account(*before, (12, Kind.IDLE)) == {Kind.RESTARTING: 5, Kind.PRODUCTIVE: 7}


def test_a_step_under_way_is_in_no_kind_yet_and_may_turn_out_hung() -> None:
    before = ((0, work(1)), (5, work(1, 1, at=5)), (60, work(1, 1, at=5)))
    assert account(*before) == {Kind.RESTARTING: 5}
    assert account(*before, (65, Kind.HUNG), (70, Kind.HUNG)) == {Kind.RESTARTING: 5, Kind.HUNG: 65}
    assert account(*before, (66, work(1, 2, at=65))) == {Kind.RESTARTING: 5, Kind.PRODUCTIVE: 60}


def test_the_next_worker_does_not_inherit_the_steps_of_the_last() -> None:
    assert account(
        (0, work(1)), (5, work(1, 50, at=5, first=1)), (8, work(2)), (10, work(2, 3, at=10, first=9)), end=10
    ) == {Kind.RESTARTING: 1 + 3 + 1, Kind.PRODUCTIVE: 4 + 1}


def test_steps_that_had_been_made_before_are_replayed_until_the_first_new_one() -> None:
    first = ((0, work(1, base=0)), (100, work(1, 100, at=100, first=1, base=0)), (100, Kind.RESTARTING))
    again = ((100, work(2, base=80)), (131, work(2, 31, at=131, first=101, base=80)))
    # Steps 82 to 111 followed the first step. Steps up to 100 were known before: 19 of 30.
    assert account(*first, *again) == {
        Kind.RESTARTING: 2,
        Kind.PRODUCTIVE: 99 + 30 * 11 / 30,
        Kind.REPLAYED: 30 * 19 / 30,
    }


def test_a_checkpoint_takes_its_time_from_the_steps_it_held_up() -> None:
    assert account(
        (0, work(1)), (10, work(1, 10, at=10, first=1)), (20, work(1, 20, at=20, held_up_s=2.5))
    ) == {Kind.RESTARTING: 1, Kind.PRODUCTIVE: 16.5, Kind.CHECKPOINT: 2.5}


def test_a_clock_that_goes_back_takes_nothing_back() -> None:
    assert account((10, Kind.WAITING), (5, Kind.IDLE), (20, Kind.IDLE)) == {
        Kind.RENDEZVOUS: 10,
        Kind.IDLE: 10,
    }


# ---------------------------------------------------------------- all time is accounted for

_seconds = st.floats(0, 500, allow_nan=False)
_at_work = st.builds(
    lambda round, step, ago, begun, base, held: AtWork(
        round, step, T0 + ago, T0 + begun, base if base >= 0 else None, held
    ),
    st.integers(1, 4),
    st.integers(0, 50),
    st.floats(-100, 5000),
    st.floats(-100, 5000),
    st.integers(-1, 60),
    _seconds,
)
_sights = st.lists(st.tuples(_seconds, st.one_of(st.sampled_from(Kind), _at_work)), max_size=30)


@given(_sights, _seconds)
def test_every_second_is_in_exactly_one_kind(sights: list[tuple[float, Seen]], rest: float) -> None:
    now, one = T0, Account(T0)
    for after, what in sights:
        before = one
        now += after
        one = one.see(what, now)
        assert all(one.spent.get(k, 0.0) >= before.spent.get(k, 0.0) for k in Kind), "it only grows"
        assert one.total_s == pytest.approx(one.told_until - T0)
        assert one.told_until <= now
        assert isinstance(what, AtWork) or one.told_until == now
    one = one.close(now + rest)
    assert one.total_s == pytest.approx(now + rest - T0)


@given(_sights, _sights, st.floats(0, ABSENT_MAX_S - 1), _seconds)
def test_an_agent_that_is_started_again_accounts_for_the_time_it_was_away(
    before: list[tuple[float, Seen]], after: list[tuple[float, Seen]], gap_s: float, resumed_after: float
) -> None:
    now, ledger = T0, Ledger().see({0: Kind.RENDEZVOUS}, T0)
    for s, what in before:
        now += s
        ledger = ledger.see({0: what}, now)
    kept = ledger.record("a", now)
    now += gap_s
    ledger = Ledger().see({0: Kind.RENDEZVOUS}, now)
    for s, what in after:
        now += s
        ledger = ledger.see({0: what}, now)
    ledger = ledger.resume(kept).close(now + resumed_after)
    assert ledger.slots[0].total_s == pytest.approx(now + resumed_after - T0, abs=0.1)


LOOK_S = 1.0  # between two looks


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(LOOK_S, 400), st.floats(0, 60)), min_size=1, max_size=4),
    st.floats(0.2, 20),
)
def test_an_agent_that_is_killed_loses_a_hundredth_of_its_time_or_a_second_and_the_step_under_way(
    lives: list[tuple[float, float]], step_s: float
) -> None:
    now, kept, trained_s, lost_most_s = T0, None, 0.0, 0.0
    for number, (life_s, gap_s) in enumerate(lives, 1):
        began_at, due, resumed = now, now, False
        ledger = Ledger().see({0: Kind.RENDEZVOUS}, now)
        for look in range(1, int(life_s / LOOK_S) + 1):
            now = began_at + look * LOOK_S
            step = int((now - began_at) / step_s)
            at = AtWork(number, step, began_at + step * step_s, began_at + step_s if step else 0.0)
            ledger = ledger.see({0: at}, now)
            if kept is not None and not resumed:
                ledger = ledger.resume(kept)
            resumed = True
            if now >= due:
                due = now + keep_every_s(now - began_at)
                kept = ledger.record("a", now)
        trained_s += max(0, int(life_s / step_s) - 1) * step_s
        lost_most_s += max(life_s / 100, 1.0) + 2 * LOOK_S + step_s  # until the first look, and between two
        now = began_at + life_s + gap_s
    assert kept is not None
    (account,) = Ledger().see({0: Kind.RENDEZVOUS}, now).resume(kept).slots.values()
    assert account.total_s == pytest.approx(now - T0, abs=0.1)
    assert trained_s - lost_most_s <= account.spent[Kind.PRODUCTIVE] <= trained_s + 0.1


def test_a_node_that_was_away_for_long_was_not_there() -> None:
    kept = NodeLedger("a", T0, (SlotTime(0, {"productive": 50.0}, furthest=9),))
    began_at = T0 + ABSENT_MAX_S + 1
    ledger = Ledger().see({0: Kind.RENDEZVOUS}, began_at).resume(kept)
    assert ledger.slots[0].total_s == 50.0
    assert ledger.slots[0].furthest == 9


def test_a_slot_that_comes_after_its_agent_was_away_until_it_came() -> None:
    """The world was scaled up while the agent was away, and etcd reported that late."""
    kept = NodeLedger("a", T0, (SlotTime(0, {"idle": 50.0}), SlotTime(1, {"idle": 50.0})))
    ledger = Ledger().see({0: Kind.IDLE}, T0 + 10).see({0: Kind.IDLE, 1: Kind.IDLE}, T0 + 12)
    ledger = ledger.resume(kept).close(T0 + 15)
    assert [account.total_s for account in ledger.slots.values()] == [65.0, 65.0]


def test_what_an_earlier_agent_has_kept_is_no_increase_of_this_ones_own_time() -> None:
    kept = NodeLedger("a", T0, (SlotTime(0, {"productive": 36_000.0}, furthest=9, untold_s=2.0),))
    began_at = T0 + 10.0
    ledger = Ledger().see({0: Kind.RENDEZVOUS}, began_at).see({0: Kind.WAITING}, began_at + 3.0)
    before = ledger.slots[0].own
    ledger = ledger.resume(kept)
    own = ledger.slots[0].own
    assert sum(own.values()) == sum(before.values()) == 3.0 and own[Kind.RENDEZVOUS] == 3.0
    assert ledger.spent["productive"] == 36_000.0 and ledger.spent["restarting"] == 12.0
    assert sum(ledger.close(began_at + 5.0).slots[0].own.values()) == 5.0
