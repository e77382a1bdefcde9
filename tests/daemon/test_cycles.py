"""How often an agent looks for reference cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from elasticd.daemon import cycles


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds, callbacks = gc.get_threshold(), [*gc.callbacks]
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks[:] = callbacks
    gc.unfreeze()


class Fact:
    pass


def test_objects_that_took_long_to_look_at_are_left_out_of_later_looks_and_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cycles, "LONG_S", 0.0)
    cycles.look_rarely()
    fact = Fact()
    gc.collect()
    assert not any(one is fact for one in gc.get_objects())
    known = weakref.ref(fact)
    del fact
    assert known() is None, "nothing refers to the fact"


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_objects_are_not_left_out_after_a_short_look(
    monkeypatch: pytest.MonkeyPatch, generation: int
) -> None:
    monkeypatch.setattr(cycles, "LONG_S", 60.0 if generation == 2 else 0.0)
    cycles.look_rarely()
    fact = Fact()
    gc.collect(generation)
    assert any(one is fact for one in gc.get_objects())


def test_what_was_imported_is_left_out() -> None:
    cycles.look_rarely()
    assert not any(one is Fact for one in gc.get_objects())


def test_an_agent_that_begins_a_second_job_does_not_count_looks_twice() -> None:
    cycles.look_rarely()
    registered = len(gc.callbacks)
    cycles.look_rarely()
    assert len(gc.callbacks) == registered


def test_python_looks_for_no_cycles_during_a_decision_and_does_so_again_afterwards() -> None:
    def decide() -> None:
        with cycles.not_now():
            looked.append(gc.isenabled())
            raise ZeroDivisionError

    looked: list[bool] = []
    with pytest.raises(ZeroDivisionError):
        decide()
    assert looked == [False] and gc.isenabled()
