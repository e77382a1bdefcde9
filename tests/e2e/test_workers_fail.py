"""What happens when workers fail, and which failures the restart budget is charged for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from elasticd.core.facts import Cause, Phase
from tests.e2e.harness import Cluster
from tests.e2e.stage import Player, Script


def test_a_killed_worker_is_replaced_and_the_job_finishes_with_0(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    os.kill(first.players[1].pid, signal.SIGKILL)
    second = cluster.world(2, after=first)
    assert second.nodes == first.nodes, "survivors keep their order"
    assert (first.restarts, second.restarts) == (0, 1)
    cluster.goes_on(second)
    cluster.finishes(a, b)
    assert "finished" in a.screen and "1 restart" in a.screen


def test_an_unharmed_job_is_one_round_and_every_agent_ends_with_0(cluster: Cluster) -> None:
    cluster.limits = (4, 4)
    cluster.direct(lambda player: Script(steps=3))
    agents = cluster.start("a", "b", slots=2)
    assert [agent.end() for agent in agents] == [0, 0]
    assert {(p.round, p.step) for p in cluster.stage.players} == {(1, 3)}
    assert all("4 workers" in agent.screen for agent in agents)
    assert cluster.round.phase is Phase.ENDED


def test_what_a_killed_worker_left_running_is_gone_before_its_place_is_taken(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a")
    first = cluster.world(1)
    orphan = cluster.orphan_of(first.players[0])
    os.kill(first.players[0].pid, signal.SIGKILL)
    cluster.world(1, after=first)
    cluster.until_gone([orphan])
    cluster.finishes(a)


def test_a_script_that_always_raises_ends_the_job_with_1_and_every_screen_says_where(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.limits = (2, 2)

    def direct(player: Player) -> Script:
        wrong = {"do": "raise", "text": "the loss is not a number"}
        return Script(orders=(wrong,) if player.node == "b" else ())

    cluster.direct(direct)
    logs = tmp_path / "logs"
    agents = cluster.start("a", "b", options=["--max-restarts=2", f"--log-dir={logs}", "--redirects=3"])
    assert [agent.end() for agent in agents] == [1, 1]
    assert sorted({p.round for p in cluster.stage.players}) == [1, 2, 3], "two restarts were allowed"
    (rank,) = {p.rank for p in cluster.stage.players if p.node == "b"}
    for agent in agents:
        assert f"rank {rank} (slot 0 on b)" in agent.screen
        assert "RuntimeError: the loss is not a number" in agent.screen
        assert "in go_wrong" in agent.screen, "the traceback says where"
        assert "budget is spent" in agent.screen
        assert str(logs) in agent.screen
    place = next(w for w in agents[0].screen.split() if w.startswith(str(logs)))
    texts = [p.read_text() for p in ([Path(place)] if Path(place).is_file() else Path(place).iterdir())]
    assert any("the loss is not a number" in text for text in texts), "and its log is there"


def test_without_restarts_the_first_failure_ends_the_job(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    agents = cluster.start("a", "b", options=["--max-restarts=0"])
    world = cluster.world(2)
    world.players[0].tell("exit", code=7)
    assert [agent.end() for agent in agents] == [1, 1]
    assert {p.round for p in cluster.stage.players} == {world.round}
    for agent in agents:
        assert "exit code 7" in agent.screen and "no restarts are allowed" in agent.screen


def test_failures_before_any_step_are_futile_and_end_the_job_early(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    cluster.policy["futile_max"] = 2
    (a,) = cluster.start("a", program=["false"], options=["--no-python"])
    assert a.end() == 1
    assert "2 failures in a row without a single step" in a.screen


def test_a_slot_that_always_fails_alone_is_left_out_and_the_others_go_on(cluster: Cluster) -> None:
    cluster.limits = (2, 3)

    def direct(player: Player) -> Script:
        bad = player.node == "b" and player.slot == 1
        return Script(orders=({"do": "exit", "code": 9},) if bad else ())

    cluster.direct(direct)
    cluster.policy |= {"quarantine_after": 2, "quarantine_s": 1000}
    (a,) = cluster.start("a")
    cluster.until_said(a, "job.waiting")  # if b were first, too few workers would remain without its slot 1
    (b,) = cluster.start("b", slots=2)
    cluster.until_anyone_said("slot.quarantined", slot=1)
    world = cluster.world(2)
    assert [(p.node, p.slot) for p in world.players] in ([("a", 0), ("b", 0)], [("b", 0), ("a", 0)])
    assert world.restarts == 2
    (quarantine,) = cluster.budget.quarantines
    assert (quarantine.node, quarantine.slot) == ("b", 1)
    cluster.goes_on(world)
    cluster.finishes(a, b)


def test_a_quarantined_slot_is_taken_back_when_its_time_is_over(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    failures = iter([True, True])

    def direct(player: Player) -> Script:
        bad = player.slot == 1 and next(failures, False)
        return Script(orders=({"do": "exit", "code": 9},) if bad else ())

    cluster.direct(direct)
    cluster.policy |= {"quarantine_after": 2, "quarantine_s": 2}
    (a,) = cluster.start("a", slots=2)
    cluster.until_said(a, "slot.quarantined", slot=1)
    alone = cluster.until_said(a, "round.formed", world_size=1)
    both = cluster.world(2, after=alone["round"])
    assert cluster.round.cause is Cause.GREW and both.restarts == 2
    cluster.finishes(a)
