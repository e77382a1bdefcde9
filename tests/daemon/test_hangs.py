"""When the agent looks, and when it thinks again. The workers are real processes, their steps and
the time are the test's."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.core.agent.state import Crew
from elasticd.core.facts import Cause, Hang, Member, Phase, Round
from elasticd.core.hang import Doing, Look, Patience, Verdict, Why
from elasticd.core.ports import Changes, Entry, Put
from elasticd.core.reasons import WorkersHung
from elasticd.daemon.hangs import ANSWERS_S, Hangs
from elasticd.procs.page import LAYOUT, MAGIC, PAGE_BYTES, TIMES, Page
from elasticd.procs.workers import Watched

STEP_S = 0.1


class Sleeper:
    """A process that has, as far as its page says, made these steps."""

    def __init__(self, slot: int, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        self.page = Page(folder / f"slot{slot}")
        self.watched = Watched(slot, slot, self.process.pid, self.page, 0)
        self.times: list[float] = []

    def steps(self, *times: float) -> None:
        self.times += times
        ring = [0] * 256
        for n, at in enumerate(self.times, 1):
            ring[n & 255] = int(at * 1e9)
        rest = (0,) * (LAYOUT.size // 8 - 6)  # of no interest here
        last_ns = int(self.times[-1] * 1e9)
        head = LAYOUT.pack(MAGIC, 1, self.process.pid, len(self.times), last_ns, 3, *rest)
        data = head.ljust(PAGE_BYTES - TIMES.size, b"\0") + TIMES.pack(*ring)
        self.page.path.write_bytes(data)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.page.close()


class Setup:
    """A node with two workers, nothing but its own clock. ``others``: nodes of one worker each, which
    are only in the round; ``put`` is what was written to etcd for them to read."""

    def __init__(self, folder: Path, patience: Patience, others: int = 0) -> None:
        self.now = 100.0
        self.said: list[WorkersHung] = []
        self.condemned: list[tuple[int, str, float]] = []
        self.folder = folder
        self.workers = [Sleeper(0, folder), Sleeper(1, folder)]
        member = Member("a", "i", (0, 1), 0)
        more = tuple(Member(f"other-{n}", "i", (0,), 2 + n) for n in range(others))
        round = Round(1, Phase.LIVE, (member, *more), "s:1", Cause.START, 0.0)
        self.put: list[Any] = []
        self.watching: dict[str, Any] = {}
        self.state = SimpleNamespace(
            crew=Crew(round, member, False, frozenset({0, 1})),
            me=SimpleNamespace(node="a", incarnation="i", key="nodes/a"),
            leads=None, own=SimpleNamespace(fact=round, created=1), silent=None, round=round,
            outlived=False,
        )  # fmt: skip
        self.hangs = Hangs(
            patience,
            SimpleNamespace(state=self.state, view=None),  # type: ignore[arg-type]
            SimpleNamespace(watch=self.watch, transact=self.transact),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            lambda: folder / "run",
            self.said.append,  # type: ignore[arg-type]
            lambda: self.now,
        )

    def watch(self, key: str, seen: Any) -> None:
        self.watching[key] = seen

    def transact(self, guards: Any, writes: Any, answered: Any) -> None:
        self.put += [(write.fact, self.now) for write in writes if isinstance(write, Put)]

    def hear(self, hang: Hang) -> None:
        """The leader has written this."""
        self.watching["hang"](Changes((Entry("hang", hang, 1, 1),)))

    def watched(self) -> tuple[Watched, ...]:
        return tuple(w.watched for w in self.workers)

    def condemn(self, slot: int, pid: int, why: str) -> None:
        self.condemned.append((slot, why, self.now))

    def train(self, seconds: float) -> None:
        """Both make a step every tenth of a second; the agent looks when it wants to."""
        until = self.now + seconds
        due = self.now
        while self.now < until:
            for worker in self.workers:
                worker.steps(self.now)
            if self.now >= due:
                due = self.hangs.routine(self.now)
            self.now += STEP_S

    def next_round(self) -> None:
        """The same processes, in another world."""
        self.state.crew = replace(self.state.crew, round=replace(self.state.crew.round, number=2))
        for worker in self.workers:
            worker.watched = replace(worker.watched, steps_before=len(worker.times))
        self.hangs.routine(self.now)

    def stand_still(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and not self.condemned:
            due = self.hangs.routine(self.now)
            if self.hangs._looking is not None or self.hangs._judged is not None:
                time.sleep(0.01)  # what is under way takes real time
                self.hangs._due = self.now
            else:
                self.now = due

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def made() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def setup(tmp_path: Path, made: list[Any]) -> Setup:
    made.append(Setup(tmp_path, Patience()))
    return made[-1]  # type: ignore[no-any-return]


def stop(worker: Sleeper) -> None:
    worker.process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def test_a_stopped_worker_is_condemned_after_ten_steps_and_the_evidence_is_there_before(setup: Setup) -> None:
    setup.train(10.0)
    stop(setup.workers[1])
    last = setup.now - STEP_S
    setup.stand_still(30.0)
    ((slot, why, at),) = setup.condemned
    assert slot == 1 and why.startswith("hung: rank 1 on node a is stopped (SIGSTOP)")
    assert 0.99 < at - last < 1.5
    (said,) = setup.said
    assert said.verdict.why is Why.STOPPED
    assert (Path(said.evidence) / "conclusion.txt").exists()


def test_evidence_that_a_full_disk_does_not_hold_is_nowhere_to_be_seen(setup: Setup) -> None:
    evidence = setup.folder / "run" / "hang-of-round-1"
    evidence.mkdir(parents=True)
    (evidence / "conclusion.txt").symlink_to("/dev/full")
    setup.train(10.0)
    stop(setup.workers[1])
    setup.stand_still(30.0)
    ((_, why, _),) = setup.condemned
    (said,) = setup.said
    assert not said.evidence and "(see" not in why


def test_only_who_is_stopped_is_judged_before_the_first_step(setup: Setup) -> None:
    setup.stand_still(1000.0)
    assert not setup.condemned
    stopped = setup.now
    stop(setup.workers[1])
    setup.stand_still(30.0)
    ((slot, why, at),) = setup.condemned
    assert slot == 1 and "is stopped (SIGSTOP)" in why
    assert 9.0 < at - stopped < 13.0, "not for how long it has taken to begin"


def test_who_is_stopped_after_it_stood_still_is_condemned_for_the_time_since(setup: Setup) -> None:
    setup.train(10.0)
    setup.stand_still(20.0)  # in an evaluation, say
    stopped = setup.now
    stop(setup.workers[1])
    setup.stand_still(30.0)
    ((slot, _, at),) = setup.condemned
    assert slot == 1 and 0.49 < at - stopped < 3.0


def test_one_stopped_before_its_first_step_is_judged_by_the_steps_of_earlier_rounds(setup: Setup) -> None:
    setup.train(10.0)
    setup.next_round()
    stop(setup.workers[1])
    began = setup.now
    setup.stand_still(30.0)
    ((slot, why, at),) = setup.condemned
    assert slot == 1 and "is stopped (SIGSTOP)" in why
    assert 0.99 < at - began < 3.0


def test_one_that_only_takes_long_to_its_first_step_is_not_judged(setup: Setup) -> None:
    setup.train(10.0)
    setup.next_round()
    setup.stand_still(1000.0)
    assert not setup.condemned


def test_one_that_is_stopped_while_it_is_to_leave_the_round_is_condemned(setup: Setup) -> None:
    setup.train(10.0)
    setup.state.crew = replace(setup.state.crew, stopping=True, parting=True)
    setup.stand_still(30.0)
    assert not setup.condemned, "it may be in a long step"
    stop(setup.workers[1])
    setup.stand_still(30.0)
    assert [slot for slot, _, _ in setup.condemned] == [1]


@pytest.mark.parametrize(
    ("how", "is_judged"),
    [
        ({}, True),
        ({"stopping": True, "parting": True, "planned": True}, True),
        ({"stopping": True, "parting": True}, True),
        ({"stopping": True, "parting": True, "broken": True}, True),
        ({"broken": True}, False),  # it waits to be told to leave
        ({"stopping": True}, False),
        ({"stopping": True, "parting": True, "killed": True}, False),
        ({"fenced": True}, False),
        ({"alive": frozenset()}, False),
    ],
)
def test_workers_are_judged_in_their_round_and_on_their_way_out_of_it_if_they_keep_their_process(
    setup: Setup, how: dict[str, Any], is_judged: bool
) -> None:
    setup.train(10.0)
    setup.state.crew = replace(setup.state.crew, **how)
    stop(setup.workers[1])
    setup.stand_still(30.0)
    assert [slot for slot, _, _ in setup.condemned] == ([1] if is_judged else [])


def test_how_long_leaving_may_take_is_learned_from_the_steps(setup: Setup) -> None:
    assert setup.hangs.leaving_s() < 60.0
    for at in (0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0):
        setup.now = 1000.0 + at
        for worker in setup.workers:
            worker.steps(setup.now)
        setup.hangs.routine(setup.now)
    assert setup.hangs.leaving_s() >= 200.0


def test_what_happened_while_the_agent_itself_was_stopped_counts_for_nothing(setup: Setup) -> None:
    setup.train(10.0)
    stop(setup.workers[1])
    setup.now += 500.0
    woken = setup.now
    setup.hangs.routine(setup.now)
    assert setup.hangs._looking is None
    setup.stand_still(30.0)
    assert [at for _, _, at in setup.condemned] >= [woken + 0.99]


def test_one_that_goes_on_while_the_evidence_is_written_is_let_live(setup: Setup) -> None:
    setup.train(10.0)
    stop(setup.workers[1])
    while setup.hangs._judged is None:
        due = setup.hangs.routine(setup.now)
        setup.now = setup.now if setup.hangs._looking or setup.hangs._judged else due
        setup.hangs._due = setup.now
    setup.workers[1].process.send_signal(signal.SIGCONT)
    setup.train(5.0)
    assert not setup.condemned and not setup.said


def test_a_world_that_is_being_stopped_is_not_judged(setup: Setup) -> None:
    setup.train(10.0)
    stop(setup.workers[1])
    setup.state.crew = replace(setup.state.crew, stopping=True)
    setup.stand_still(1000.0)
    assert not setup.condemned


def test_two_asleep_that_nobody_waits_for_get_until_the_ceiling(tmp_path: Path, made: list[Any]) -> None:
    """They have no stacks to show, being no Python."""
    made.append(Setup(tmp_path, Patience(floor_s=0.1, ceiling_s=60.0)))
    setup: Setup = made[-1]
    setup.train(10.0)
    setup.stand_still(1000.0)
    assert not setup.condemned, "who does not say where it is, is not judged without one who waits for it"


def test_who_was_killed_at_a_place_gets_twice_the_time_there_the_next_time(setup: Setup) -> None:
    setup.train(10.0)
    look = Look("a", 1, 1, setup.hangs._still.workers[1].steps, 60.0, Doing.ASLEEP, "job.py:7")
    verdict = Verdict(Why.ASLEEP, (look,))
    last = setup.hangs._still.workers[1].last_at
    assert not setup.hangs._too_soon(verdict, last + 60)
    setup.hangs._killed[Why.ASLEEP, "job.py:7"] = 60.0
    assert setup.hangs._too_soon(verdict, last + 119)
    assert not setup.hangs._too_soon(verdict, last + 121)
    assert not setup.hangs._too_soon(replace(verdict, why=Why.STOPPED), last + 1)
    elsewhere = replace(look, place="job.py:8")
    assert not setup.hangs._too_soon(replace(verdict, guilty=(elsewhere,)), last + 60)


def test_of_several_nodes_the_others_are_told_and_waited_for_but_not_for_long(
    tmp_path: Path, made: list[Any]
) -> None:
    made.append(Setup(tmp_path, Patience(), others=1))
    setup: Setup = made[-1]
    setup.train(10.0)
    stop(setup.workers[1])
    last = setup.now - STEP_S
    setup.stand_still(30.0)
    ((slot, why, at),) = setup.condemned
    ((stall, told_at), *_) = setup.put
    assert [(look.slot, look.doing) for look in stall.looks][1] == (1, Doing.STOPPED)
    assert 0.99 < told_at - last < 1.5 and ANSWERS_S <= at - told_at < ANSWERS_S + 0.5
    assert slot == 1 and why.startswith("hung: rank 1 on node a is stopped (SIGSTOP)")


def test_once_all_have_told_the_stopped_one_is_condemned_with_what_the_others_do(
    tmp_path: Path, made: list[Any]
) -> None:
    made.append(Setup(tmp_path, Patience(), others=1))
    setup: Setup = made[-1]
    setup.train(10.0)
    stop(setup.workers[1])
    while not setup.put:
        setup.stand_still(0.1)
    ((stall, told_at),) = setup.put
    guilty = stall.looks[1]
    setup.hear(Hang(1, Verdict(Why.STOPPED, (guilty,)), asks=True))
    setup.stand_still(0.5)
    assert not setup.condemned, "a question is no verdict"
    setup.hear(Hang(1, Verdict(Why.STOPPED, (guilty,), 2, "all_reduce", "job.py:7")))
    setup.stand_still(30.0)
    ((slot, why, at),) = setup.condemned
    assert slot == 1 and "; the other 2 wait for it in all_reduce" in why and at - told_at < 1.0


def test_who_is_asked_looks_and_tells_though_nobody_here_hangs(tmp_path: Path, made: list[Any]) -> None:
    made.append(Setup(tmp_path, Patience(), others=1))
    setup: Setup = made[-1]
    setup.train(10.0)
    setup.stand_still(2.0)
    assert not setup.put, "they are asleep for less long than a sleeping one may be"
    there = Look("other-0", 0, 2, 100, 2.0, Doing.STOPPED, "job.py:7")
    setup.hear(Hang(1, Verdict(Why.STOPPED, (there,)), asks=True))
    setup.stand_still(1.0)
    ((stall, _),) = setup.put
    assert [look.rank for look in stall.looks] == [0, 1]
    setup.hear(Hang(1, Verdict(Why.STOPPED, (there,), 2)))
    setup.stand_still(1.0)
    (said,) = setup.said
    assert said.verdict.guilty == (there,) and not setup.condemned
    assert {f.name for f in Path(said.evidence).iterdir()} >= {"conclusion.txt", "rank-0.txt", "rank-1.txt"}


def test_whose_time_has_not_come_hangs_at_no_node_and_a_verdict_is_of_one_stall_only(
    tmp_path: Path, made: list[Any]
) -> None:
    made.append(Setup(tmp_path, Patience(), others=1))
    setup: Setup = made[-1]
    there = Look("other-0", 0, 2, 100, 60.0, Doing.ASLEEP, "job.py:7")
    setup.train(10.0)
    setup.stand_still(60.0)
    setup.hear(Hang(1, Verdict(Why.ASLEEP, (there,), 2)))
    setup.stand_still(2.0)
    assert [said.round for said in setup.said] == [1]
    setup.next_round()
    setup.train(10.0)
    setup.stand_still(60.0)
    setup.hear(Hang(2, Verdict(Why.ASLEEP, (there,), 2)))
    setup.stand_still(20.0)
    setup.train(10.0)
    setup.put.clear()
    setup.stand_still(450.0)
    assert [said.round for said in setup.said] == [1], "it has gone on since"
    assert setup.put, "and is asked about anew"
    setup.hear(Hang(2, Verdict(Why.ASLEEP, (there,), 2)))
    setup.stand_still(2.0)
    assert [said.round for said in setup.said] == [1, 2]
