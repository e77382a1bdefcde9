"""Which checkpoints are kept, and which may be committed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.checkpoint.newest.retention import CommitRefused, Keep, commit, kept
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.facts import Checkpoint, Saved


def saved(step: int, round: int = 1, token: str = "0000000a", save: int = 1) -> Saved:
    return Saved(folder_name(step, round, token, save), step, round, 4, 0.0, 100, "d")


@given(
    st.lists(st.integers(0, 500), unique=True, max_size=30).map(sorted), st.integers(1, 5), st.integers(0, 50)
)
def test_the_newest_is_always_kept_and_order_stays(steps, last, every):
    every_one = [saved(s) for s in steps]
    stay = kept(every_one, Keep(last, every))
    assert list(stay) == [s for s in every_one if s in stay]
    assert list(stay[-last:])[-1:] == every_one[-1:]
    assert set(every_one[-last:]) <= set(stay)


@given(st.lists(st.integers(0, 500), unique=True, min_size=1, max_size=30).map(sorted), st.integers(1, 50))
def test_one_of_each_stretch_stays_for_good(steps, every):
    stay: tuple[Saved, ...] = ()
    known = Checkpoint("p")
    for step in steps:  # retention is applied after each commit
        known = commit(known, saved(step), Keep(1, every)).checkpoint
        stay = known.saved
    assert {s.step // every for s in stay} == {s // every for s in steps}


def test_keep_last_drops_the_oldest():
    known = Checkpoint("p", (saved(1), saved(2), saved(3)))
    made = commit(known, saved(4), Keep(3))
    assert [s.step for s in made.checkpoint.saved] == [2, 3, 4]


def test_an_older_round_cannot_commit():
    known = Checkpoint("p", (saved(10, round=3),))
    with pytest.raises(CommitRefused, match="round 2, and round 3 has committed since"):
        commit(known, saved(99, round=2), Keep())


def test_a_later_round_may_have_gone_back():
    known = Checkpoint("p", (saved(10, round=3),))
    newest = commit(known, saved(8, round=4), Keep()).checkpoint.newest
    assert newest is not None and newest.step == 8


def test_the_workers_of_a_world_may_save_a_step_again_as_after_an_evaluation():
    known = Checkpoint("p", (saved(10, save=9),))
    newest = commit(known, saved(10, save=10), Keep()).checkpoint.newest
    assert newest == saved(10, save=10)
    for older in saved(10, save=8), saved(9, save=10), saved(10, token="0000000b", save=10):
        with pytest.raises(CommitRefused, match="not newer than step 10"):
            commit(known, older, Keep())


@pytest.mark.parametrize("step", [9, 10])
def test_within_a_round_steps_only_grow(step):
    with pytest.raises(CommitRefused, match="not newer than step 10"):
        commit(Checkpoint("p", (saved(10),)), saved(step), Keep())


@pytest.mark.parametrize(("last", "every"), [(0, 0), (-1, 0), (1, -1)])
def test_a_retention_policy_that_keeps_no_checkpoint_is_refused(last, every):
    with pytest.raises(ValueError, match="keep"):
        Keep(last, every)
