"""The warnings about a script that behaves otherwise than its users may expect. Each is given once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd.core.advice import FAR, SEEN_AFTER, Advice, advise
from elasticd.core.facts import Limits, Member, Policy, Resume
from elasticd.core.page_layout import PageContents, Use
from elasticd.core.reasons import BatchesChanged, OptionWithoutEffect, Reason, TrainingBeganAgain
from elasticd.daemon.config import Command, CommandKind, RunConfig

PLAIN = RunConfig("j", "a", "127.0.0.1", Limits(1, 4), 4, Command(CommandKind.SCRIPT, "job.py", ()), "")


@dataclass
class Life:
    """One job, as seen by the agent with rank 0 or by another agent."""

    config: RunConfig = PLAIN
    base_rank: int = 0

    def __post_init__(self) -> None:
        self.advice = Advice(self.config.for_the_library)

    def sees(self, round: int, size: int, *told: PageContents) -> list[Reason]:
        """Return what is said now."""
        crew = SimpleNamespace(
            round=SimpleNamespace(number=round, world_size=size),
            member=Member("a", "1", (0,), self.base_rank),
        )
        self.advice, said = advise(self.advice, cast(Any, crew), told)
        return list(said)


@pytest.mark.parametrize(
    ("config", "option", "wants"),
    [
        (replace(PLAIN, env={"ELASTICD_CHECKPOINTS": "/x"}), "--checkpoints", Use.CHECKPOINTS),
        (replace(PLAIN, env={"ELASTICD_CHECKPOINT_EVERY": "9"}), "--checkpoint-every", Use.CHECKPOINTS),
        (replace(PLAIN, checkpoint_rate=9), "--checkpoint-rate", Use.CHECKPOINTS),
        (replace(PLAIN, replicate=1), "--replicate", Use.CHECKPOINTS),
        (replace(PLAIN, policy=Policy(resume=Resume.REQUIRED)), "--resume", Use.CHECKPOINTS),
        (replace(PLAIN, audit=100), "--audit", Use.DATA),
        (replace(PLAIN, spares=1), "--spares", Use.STATE),
        (replace(PLAIN, memory=9), "--memory", Use.STATE),
    ],
)
def test_an_option_that_the_script_does_not_use_is_named_once_it_has_made_steps(
    config: RunConfig, option: str, wants: Use
) -> None:
    assert PLAIN.for_the_library == ()
    for used in Use:
        life = Life(config)
        first = PageContents(pid=1, steps=SEEN_AFTER - 1, uses=used)
        assert life.sees(1, 1, first) == []
        expected = [] if used is wants else [OptionWithoutEffect(option, wants)]
        assert life.sees(1, 1, replace(first, steps=SEEN_AFTER)) == expected
        assert life.sees(1, 1, replace(first, steps=SEEN_AFTER + 9)) == []


def test_one_worker_that_uses_it_is_enough() -> None:
    life = Life(replace(PLAIN, audit=1))
    assert life.sees(1, 2, PageContents(pid=1, steps=9), PageContents(pid=2, steps=9, uses=Use.DATA)) == []


@pytest.mark.parametrize(
    ("uses", "says"),
    [(Use(0), 1), (Use.STATE, 1), (Use.DATA, 0), (Use.CHECKPOINTED, 0), (Use.PLACE, 0)],
)
def test_the_first_resize_alone_is_told_and_not_to_scripts_that_bear_it(uses: Use, says: int) -> None:
    life = Life()
    assert life.sees(1, 4, PageContents(pid=1, steps=9, uses=uses)) == []
    assert life.sees(2, 4, PageContents(pid=2, steps=9, uses=uses)) == []
    assert (
        life.sees(3, 3, PageContents(pid=3, steps=0, uses=uses)) == []
    )  # not before the script has shown what it uses
    assert life.sees(3, 3, PageContents(pid=3, steps=1, uses=uses)) == [BatchesChanged(4, 3)] * says
    assert life.sees(4, 4, PageContents(pid=4, steps=9, uses=uses)) == []


def test_a_script_that_told_of_a_snapshot_in_an_earlier_round_is_not_warned_before_its_next_one() -> None:
    life = Life()
    assert life.sees(1, 2, PageContents(pid=1, steps=9, uses=Use.CHECKPOINTED)) == []
    assert life.sees(2, 1, PageContents(pid=2, steps=1)) == []


def test_a_restart_from_the_start_is_told_once() -> None:
    life = Life()
    assert life.sees(1, 1, PageContents(pid=1, steps=FAR + 5, made=0)) == []
    assert life.sees(2, 1, PageContents(pid=2, steps=1, made=0)) == [TrainingBeganAgain(FAR + 5)]
    assert life.sees(3, 1, PageContents(pid=3, steps=1, made=0)) == []


@pytest.mark.parametrize(
    ("far", "made", "uses"),
    [
        (FAR - 1, 0, Use(0)),  # the script had hardly begun
        (FAR + 5, FAR, Use(0)),  # resumed
        (FAR + 5, None, Use(0)),  # an optimizer that does not count steps: nobody knows
        (FAR + 5, 0, Use.STATE),  # the worker takes the state over from a survivor
    ],
)
def test_a_restart_that_continues_gets_no_advice(far: int, made: int | None, uses: Use) -> None:
    life = Life()
    assert life.sees(1, 1, PageContents(pid=1, steps=far, made=0)) == []
    assert life.sees(2, 1, PageContents(pid=2, steps=1, made=made, uses=uses)) == []


def test_of_several_agents_one_speaks() -> None:
    life = Life(replace(PLAIN, audit=1), base_rank=2)
    assert life.sees(1, 4, PageContents(pid=1, steps=99, made=0)) == []
    assert life.sees(2, 3, PageContents(pid=2, steps=99, made=0)) == []
