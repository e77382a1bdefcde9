"""Workers that keep their process lose no committed step, whatever happens to other workers."""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from elasticd.core.facts import Cause, Node
from tests.e2e.harness import Agent, Cluster
from tests.e2e.stage import Player, Script
from tests.e2e.test_scrape import Scraped, eventually, scrape

RESIDENT = str(Path(__file__).parent / "programs" / "resident.py")
UNCOMMITTED = str(Path(__file__).parent / "programs" / "uncommitted.py")


class Residents:
    """The workers of a job, known by their commits."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        cluster.direct(lambda player: Script())

    def start(self, *names: str, slots: int, options: tuple[str, ...] = (), **env: str) -> list[Agent]:
        return self.cluster.start(*names, slots=slots, options=options, program=(RESIDENT,), env=env)

    def world(self, size: int, *, after: int = 0) -> tuple[int, list[Player]]:
        """Wait for a later round in which this many workers have committed some steps. Return its number and
        its workers in rank order."""

        def formed() -> tuple[int, list[Player]] | None:
            found: dict[int, dict[int, Player]] = defaultdict(dict)
            for player in self.cluster.stage.players:
                last = [m for m in player.did("committed")[-1:] if m["world"] == size and m["round"] > after]
                for m in last:
                    if (
                        not player.gone
                        and len([c for c in player.did("committed") if c["round"] == m["round"]]) > 2
                    ):
                        found[m["round"]][m["rank"]] = player
            for number, ranks in found.items():
                if sorted(ranks) == list(range(size)):
                    return number, [ranks[rank] for rank in range(size)]
            return None

        return self.cluster.until(formed, f"{size} workers train in a round after {after}")  # type: ignore[return-value]

    def finish(self, *agents: Agent) -> None:
        """Have all workers stop after the same step. Check that each step until then was committed once by
        each worker, with the same loss in the whole world."""
        with self.cluster.news:
            players = self.cluster.stage.players
            last = max(m["step"] for p in players for m in p.did("committed")[-1:]) + 30
            order = {"do": "stop_after", "step": last}
            self.cluster.stage.direct = lambda player: Script(orders=(order,))
            for player in players:
                player.tell("stop_after", step=last)
        for agent in agents:
            assert agent.end() == 0, f"{agent} said:\n{agent.said()}"
        self.check(last)

    def check(self, last: int) -> None:
        made: dict[int, list[dict[str, object]]] = defaultdict(list)
        for player in self.cluster.stage.players:
            steps = [m["step"] for m in player.did("committed")]
            assert len(set(steps)) == len(steps), f"{player} made a step twice"
            for m in player.did("committed"):
                made[m["step"]].append(m)
        assert sorted(made) == list(range(last + 1)), "every step was made"
        for step, by in made.items():
            assert len({(m["round"], m["loss"]) for m in by}) == 1, f"step {step} was made in two ways: {by}"


@pytest.fixture
def residents(cluster: Cluster) -> Residents:
    return Residents(cluster)


def are_measured_as_they_say(agent: Agent, workers: list[Player]) -> None:
    """The metrics that an agent serves are what its workers have committed and reported, at most a second
    ago."""
    least = {w: w.did("committed")[-1]["step"] for w in workers}

    def caught_up() -> Scraped | None:
        seen = scrape(agent)
        return seen if all((seen("committed_step", slot=w.slot) or 0) > least[w] for w in workers) else None

    seen = eventually(caught_up)
    for worker in workers:
        last = worker.did("committed")[-1]
        assert seen("worker_rank", slot=worker.slot) == last["rank"]
        committed, twice = seen("committed_step", slot=worker.slot), seen("user_value", slot=worker.slot)
        assert committed is not None and committed <= last["step"] + 2, (
            "it counts the first, and tells it first"
        )
        assert twice is not None and abs(twice / 2 - committed) <= 2
        assert (seen("loss", slot=worker.slot) or 0) > 0
        assert (seen("samples_total", slot=worker.slot) or 0) % 16 == 0


@pytest.mark.slow
def test_cpu_time_is_counted_once_where_a_process_goes_on_from_round_to_round(residents: Residents) -> None:
    residents.cluster.limits = (2, 2)
    (a,) = residents.start("a", slots=2)
    round, workers = residents.world(2)
    stays = workers[1]

    def counted(more_than: float) -> float:
        return eventually(
            lambda: (
                c if (c := scrape(a)("worker_cpu_seconds_total", slot=stays.slot) or 0) > more_than else 0.0
            )
        )

    seen_s = counted(0.0)
    for _ in range(2):
        os.kill(next(w for w in workers if w is not stays).pid, signal.SIGKILL)
        round, workers = residents.world(2, after=round)
        assert stays in workers
        seen_s = counted(seen_s)
        times = psutil.Process(stays.pid).cpu_times()
        assert seen_s <= times.user + times.system + times.children_user + times.children_system + 0.1
    residents.finish(a)


def test_survivors_of_killed_workers_and_of_an_exception_keep_their_process_and_every_step(
    residents: Residents,
) -> None:
    residents.cluster.limits = (2, 3)
    (a,) = residents.start("a", slots=3)
    first, before = residents.world(3)
    for player in before[:2]:  # rank 0 dies like any other rank
        os.kill(player.pid, signal.SIGKILL)
    second, after = residents.world(3, after=first)
    assert before[2].pid in {p.pid for p in after}
    after[1].tell("go_wrong", text="the loss is not a number")
    _, last = residents.world(3, after=second)
    assert {p.pid for p in last} > {after[0].pid, after[2].pid}
    are_measured_as_they_say(a, last)
    residents.finish(a)
    killed, raised = a.find("failure.charged")
    assert killed["code"] == -signal.SIGKILL
    assert sorted(e["rank"] for e in a.find("worker.ended", round=first)) == [0, 1], "each death is told"
    assert "the loss is not a number" in raised["message"]
    logs = residents.cluster.command("logs", residents.cluster.job, etcd=False)
    printed = re.findall(r"^this is process (\d+)$", logs.out, re.MULTILINE)
    assert sorted(map(int, printed)) == sorted(p.pid for p in last), "those that were there last"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["ab", "a"])
def test_a_unit_that_lost_a_worker_is_left_out_until_it_is_whole_again(
    nodes: str, residents: Residents
) -> None:
    residents.cluster.limits = (2, 4)
    agents = residents.start(*nodes, slots=4 // len(nodes), options=("--unit", "2"))
    first, before = residents.world(4)
    meshes = [w.did("meshed")[-1] for w in before]
    assert [m["unit"] for m in meshes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m["replicate"] for m in meshes] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    os.kill(before[1].pid, signal.SIGKILL)
    _, after = residents.world(4, after=first)
    assert {w.pid for w in after} > {w.pid for w in before} - {before[1].pid}
    worlds = [[m["world"] for m in w.did("committed") if m["round"] == first + 1] for w in before]
    assert not worlds[0], "the rest of the lost unit waits"
    assert set(worlds[2]) == set(worlds[3]) == {2}, "the other unit goes on, and is not divided"
    assert {m["world"] for w in (*before, *after) for m in w.did("committed")} == {2, 4}
    residents.finish(*agents)


@pytest.mark.slow
def test_survivors_of_a_killed_worker_do_not_wait_long_for_one_that_sleeps(residents: Residents) -> None:
    residents.cluster.limits = (2, 3)
    residents.cluster.policy |= {
        "hang_floor_s": 0.5,
        "part_s": 3600,
    }  # five seconds to leave, and thirty in a round
    (a,) = residents.start("a", slots=3)
    first, before = residents.world(3)
    before[1].tell("sleep", seconds=3600)
    residents.cluster.until(lambda: before[1].did("sleeping"), "one sleeps")
    os.kill(before[2].pid, signal.SIGKILL)
    residents.cluster.until_said(a, "workers.hung")
    _, after = residents.world(3, after=first)
    assert before[0].pid in {p.pid for p in after}
    residents.finish(a)
    (hung,) = a.find("workers.hung")
    assert (hung["why"], hung["ranks"], hung["round"]) == ("asleep", [1], first)
    (charged,) = a.find("failure.charged")
    assert charged["code"] == -signal.SIGKILL and charged["rank"] == 2, "no fault of the one that slept"


@pytest.mark.slow
def test_survivors_that_are_all_in_code_of_their_own_for_long_keep_their_process(
    residents: Residents,
) -> None:
    residents.cluster.limits = (2, 3)
    residents.cluster.policy["part_s"] = 0.01
    (a,) = residents.start("a", slots=3)
    first, before = residents.world(3)
    for player in before:
        player.tell("dwell")
    residents.cluster.until(lambda: all(p.did("dwelling") for p in before), "all are in code of their own")
    os.kill(before[0].pid, signal.SIGKILL)
    residents.cluster.until_said(a, "workers.leaving")
    residents.cluster.until_said(a, "standby.ready")  # the replacement has started
    for player in before[1:]:
        player.tell("go_on")
    _, after = residents.world(3, after=first)
    assert {p.pid for p in after} > {p.pid for p in before[1:]}
    residents.finish(a)


@pytest.mark.slow
def test_workers_that_lose_each_other_go_on_in_their_process_at_no_charge(residents: Residents) -> None:
    residents.cluster.limits = (2, 2)
    a, b = residents.start("a", "b", slots=1, NEWS_S="0.2")
    first, before = residents.world(2)
    before[1].tell("lose_the_others")
    _, after = residents.world(2, after=first)
    assert after == before
    residents.finish(a, b)
    leader = a if a.find("leader.elected") else b
    assert leader.find("round.closing", cause=Cause.WORLD_BROKEN) and residents.cluster.round.restarts == 0


@pytest.mark.slow
def test_an_exception_is_charged_though_its_process_never_ends_and_the_others_go_on(
    residents: Residents,
) -> None:
    residents.cluster.limits = (2, 3)
    (a,) = residents.start("a", slots=3, NEWS_S="0.2")
    first, before = residents.world(3)
    before[1].tell("never_end")
    before[1].tell("go_wrong", text="the loss is not a number")
    _, after = residents.world(3, after=first)
    assert {p.pid for p in after} > {before[0].pid, before[2].pid}
    residents.finish(a)
    (charged,) = a.find("failure.charged")
    assert (charged["rank"], charged["code"]) == (1, -signal.SIGKILL)
    assert "the loss is not a number" in charged["message"]


@pytest.mark.slow
def test_a_worker_that_swallows_even_the_end_of_its_world_is_killed_and_costs_the_others_nothing(
    residents: Residents,
) -> None:
    residents.cluster.limits = (2, 3)
    residents.cluster.policy["part_s"] = 3
    (a,) = residents.start("a", slots=3)
    first, before = residents.world(3)
    before[0].tell("swallow_everything")
    residents.cluster.until(lambda: before[0].did("deaf"), "one has heard it, the last that it hears")
    os.kill(before[2].pid, signal.SIGKILL)
    residents.cluster.until(lambda: before[0].did("swallowed"), "one goes on whatever it is told")
    _, after = residents.world(3, after=first)
    assert before[1] in after
    residents.cluster.until(lambda: before[0].gone, "it is killed")
    residents.finish(a)


@pytest.mark.slow
def test_failures_that_get_no_step_committed_end_the_job_early(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    cluster.policy["futile_max"] = 2
    options = ["--max-restarts=100"]
    (a,) = cluster.start("a", slots=2, program=[UNCOMMITTED], options=options)
    assert a.end() == 1
    assert "2 failures in a row without a single committed step" in a.screen
    assert len(a.find("failure.charged")) == 2


def test_a_spare_takes_the_place_of_a_killed_worker_at_once(residents: Residents) -> None:
    residents.cluster.limits = (2, 2)
    (a,) = residents.start("a", slots=2, options=("--spares=1",))
    first, before = residents.world(2)
    residents.cluster.until_said(a, "standby.ready")
    os.kill(before[1].pid, signal.SIGKILL)
    second, after = residents.world(2, after=first)
    assert second == first + 1 and after[0].pid == before[0].pid
    residents.finish(a)


def test_nodes_that_leave_join_or_are_lost_and_scaling_restart_no_worker_elsewhere(
    residents: Residents,
) -> None:
    residents.cluster.limits = (1, 4)
    a, b = residents.start("a", "b", slots=1)
    first, before = residents.world(2)
    b.signal(signal.SIGTERM)
    alone, rest = residents.world(1, after=first)
    assert b.end() == 128 + signal.SIGTERM
    (c,) = residents.start("c", slots=2)
    three, grown = residents.world(3, after=alone)
    stayed = next(p for p in before if p.node == "a")
    assert rest == [stayed] and stayed in grown
    assert not a.find("worker.ended")

    scale = ("scale", residents.cluster.job, "--min=1")
    assert residents.cluster.command(*scale, "--max=2").code == 0
    two, kept = residents.world(2, after=three)
    assert set(kept) < set(grown)
    assert residents.cluster.command(*scale, "--max=3").code == 0
    three, again = residents.world(3, after=two)
    assert set(kept) < set(again)

    assert a.find("leader.elected")
    a.kill()
    _, rest = residents.world(2, after=three)
    assert rest == [p for p in again if p.node == "c"]
    assert c.find("round.formed")[-1]["cause"] == Cause.NODE_LOST
    residents.finish(c)
    assert residents.cluster.round.restarts == 0


@pytest.mark.slow
def test_a_sharded_job_waits_for_workers_with_the_memory_that_its_state_needs(residents: Residents) -> None:
    """Each worker has memory for a third of the state and of its copies: ``--memory`` says so."""
    residents.cluster.limits = (1, 3)
    a, b, c = residents.start("a", "b", "c", slots=1, options=("--memory=6300",), REDUNDANCY="1")
    first, before = residents.world(3)
    c.kill()
    waits = residents.cluster.until_anyone_said("job.waiting")
    assert (waits["have"], waits["need"], waits["each"]) == (2, 3, 6300)
    assert 2 * 6300 < waits["state"] <= 3 * 6300
    status = residents.cluster.command("status", residents.cluster.job).out
    assert "for memory: 3 workers of 6.3 kB are needed to hold 18.7 kB of state, and 2 are there" in status
    (d,) = residents.start("d", slots=1, options=("--memory=6300",), REDUNDANCY="1")
    _, after = residents.world(3, after=first)
    assert {p for p in before if p.node != "c"} < set(after)
    residents.finish(a, b, d)
    assert residents.cluster.round.restarts == 0


@pytest.mark.slow
def test_a_sharded_job_that_is_scaled_down_by_more_workers_than_there_are_copies_loses_no_step(
    residents: Residents,
) -> None:
    residents.cluster.limits = (1, 4)
    (a,) = residents.start("a", slots=4, REDUNDANCY="0")
    first, before = residents.world(4)
    assert residents.cluster.command("scale", residents.cluster.job, "--max=1").code == 0
    _, after = residents.world(1, after=first)
    assert after[0] in before
    residents.finish(a)
    assert residents.cluster.round.restarts == 0


@pytest.mark.slow
def test_a_sharded_job_moves_from_its_only_node_of_several_workers_and_loses_no_step(
    residents: Residents,
) -> None:
    residents.cluster.limits = (2, 2)
    (a,) = residents.start("a", slots=2, REDUNDANCY="0")
    first, before = residents.world(2)
    (b,) = residents.start("b", slots=2, options=("--spares=2",), REDUNDANCY="0")
    residents.cluster.until_said(b, "standby.ready", times=2)
    a.signal(signal.SIGTERM)
    _, after = residents.world(2, after=first)
    assert {p.node for p in before} == {"a"} and {p.node for p in after} == {"b"}
    assert a.end() == 128 + signal.SIGTERM
    residents.finish(b)
    assert residents.cluster.round.restarts == 0


@pytest.mark.slow
def test_a_drained_node_of_several_workers_hands_over_all_its_shards(residents: Residents) -> None:
    residents.cluster.limits = (2, 4)
    a, b = residents.start("a", "b", slots=2, REDUNDANCY="0")
    first, before = residents.world(4)
    b.signal(signal.SIGTERM)
    _, after = residents.world(2, after=first)
    assert set(after) == {p for p in before if p.node == "a"}
    assert b.end() == 128 + signal.SIGTERM
    residents.finish(a)
    assert residents.cluster.round.restarts == 0


@pytest.mark.slow
def test_a_job_of_one_worker_moves_to_another_node_and_loses_no_step(residents: Residents) -> None:
    """The other node has no worker yet when the first node is asked to leave, since the job has one worker
    only."""
    residents.cluster.limits = (1, 1)
    (a,) = residents.start("a", slots=1)
    first, before = residents.world(1)
    (b,) = residents.start("b", slots=1)
    residents.cluster.until(lambda: residents.cluster.fact("nodes/b", Node), "b is there")
    a.signal(signal.SIGTERM)
    _, (after,) = residents.world(1, after=first)
    assert before[0].node == "a" and after.node == "b"
    assert a.end() == 128 + signal.SIGTERM
    residents.finish(b)
    assert residents.cluster.round.restarts == 0


@pytest.mark.slow
def test_a_node_that_is_lost_costs_the_others_no_step(residents: Residents) -> None:
    residents.cluster.limits = (1, 4)
    a, b = residents.start("a", "b", slots=2)
    first, before = residents.world(4)
    leader = next(agent for agent in (a, b) if agent.find("leader.elected"))
    other = b if leader is a else a
    leader.kill()
    _, rest = residents.world(2, after=first)
    assert rest == [p for p in before if p.node == other.name]
    assert other.find("round.formed")[-1]["cause"] == Cause.NODE_LOST
    residents.finish(other)
