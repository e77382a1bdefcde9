"""The configurations and jobs that an agent refuses, with one sentence, and leaving nothing behind."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd import __version__
from elasticd.core.facts import Outcome, Round
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.names import job_prefix
from tests.e2e.harness import PLAYER, Agent, Cluster
from tests.e2e.stage import Script

AUDITED = str(Path(__file__).parent / "programs" / "audited.py")
MakeCluster = Callable[[str | None], Cluster]


def refused(agent: Agent) -> str:
    """Return the one sentence of an agent that ended with exit code 2."""
    assert agent.end() == 2, agent.said()
    assert len(agent.text) == 1, f"not one sentence:\n{agent.screen}"
    assert agent.screen.startswith("elasticd: ")
    return agent.screen


def test_a_name_that_another_living_agent_has_is_refused(cluster: Cluster) -> None:
    cluster.pace["--node-ttl"] = "2"
    (a,) = cluster.start("a")
    world = cluster.world(1)
    (impostor,) = cluster.start("a")
    assert "already called a" in refused(impostor)
    cluster.goes_on(world)
    cluster.finishes(a)


def test_a_restarted_agent_need_not_wait_for_the_lease_of_its_killed_self(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    cluster.pace["--node-ttl"] = "600"
    (a,) = cluster.start("a")
    first = cluster.world(1)
    a.kill()
    (a,) = cluster.start("a")
    cluster.world(1, after=first)
    cluster.finishes(a)


def test_other_limits_than_the_job_has_are_refused(cluster: Cluster) -> None:
    cluster.limits = (1, 4)
    (a,) = cluster.start("a")
    world = cluster.world(1)
    cluster.limits = (1, 5)
    (b,) = cluster.start("b")
    sentence = refused(b)
    assert "--min 1 --max 4" in sentence and "--min 1 --max 5" in sentence
    cluster.goes_on(world)
    cluster.finishes(a)


def test_another_script_than_the_jobs_is_refused(cluster: Cluster) -> None:
    (a,) = cluster.start("a")
    world = cluster.world(1)
    other = cluster.folder / "player.py"
    shutil.copy(PLAYER, other)
    other.write_text(other.read_text() + "\n# not the same\n")
    (b,) = cluster.start("b", program=[str(other)])
    assert "another script" in refused(b)
    cluster.goes_on(world)
    cluster.finishes(a)


def as_version(cluster: Cluster, version: str) -> dict[str, str]:
    """Return an environment in which elasticd has this version."""
    folder = cluster.folder / f"elasticd {version}"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import elasticd\nelasticd.__version__ = {version!r}\n")
    return {"PYTHONPATH": str(folder)}


def test_a_node_with_another_version_of_elasticd_is_refused(cluster: Cluster) -> None:
    (a,) = cluster.start("a")
    world = cluster.world(1)
    (b,) = cluster.start("b", env=as_version(cluster, "77.0"))
    assert f"runs with elasticd {__version__}, and this node has elasticd 77.0: install" in refused(b)
    cluster.goes_on(world)
    cluster.finishes(a)
    assert len(cluster.stage.players) == 1, "no worker of the refused node was started"


def test_a_job_without_nodes_goes_on_with_another_version_of_elasticd(cluster: Cluster) -> None:
    (a,) = cluster.start("a")
    first = cluster.world(1)
    a.kill()
    (a,) = cluster.start("a", env=as_version(cluster, "77.0"))
    world = cluster.world(1, after=first)
    (b,) = cluster.start("b")
    assert f"runs with elasticd 77.0, and this node has elasticd {__version__}: install" in refused(b)
    cluster.goes_on(world)
    cluster.finishes(a)


def test_a_copy_of_the_same_script_elsewhere_is_welcome(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    copy = cluster.folder / "copy.py"
    shutil.copy(PLAYER, copy)
    (a,) = cluster.start("a")
    (b,) = cluster.start("b", program=[str(copy)])
    cluster.world(2)
    cluster.finishes(a, b)


def test_a_job_without_nodes_takes_new_limits(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a")
    first = cluster.world(1)
    a.kill()
    cluster.limits = (2, 2)
    (a,) = cluster.start("a", slots=2)
    cluster.world(2, after=first)
    cluster.finishes(a)


def test_a_finished_job_that_is_started_again_says_so_and_trains_again_once_it_is_forgotten(
    cluster: Cluster,
) -> None:
    cluster.limits = (2, 2)
    first = cluster.start("a", "b")
    world = cluster.world(2)
    alive = cluster.command("forget", cluster.job)
    assert alive.code == 2 and "is alive, with 2 nodes (a and b)" in alive.sentence
    cluster.goes_on(world)
    cluster.finishes(*first)
    workers = len(cluster.stage.players)
    for again in cluster.start("a", "b"):  # several agents at the same time, each on its own
        assert again.end() == 7
        assert "nothing was done" in again.screen and "elasticd forget" in again.screen
    assert len(cluster.stage.players) == workers
    assert cluster.round.outcome is Outcome.SUCCEEDED

    forgotten = cluster.command("forget", cluster.job)
    assert forgotten.code == 0, forgotten
    with Client(cluster.access) as client:
        assert cluster.job not in client.jobs()
    assert "no job named" in cluster.command("forget", cluster.job).sentence
    cluster.direct(lambda player: Script())
    a, b, late = cluster.start("a", "b", "late")
    assert cluster.world(2).round == 1
    cluster.until(lambda: all(cluster.told(agent.name) for agent in (a, b, late)), "all nodes take part")
    cluster.finishes(a, b, late)


def test_a_job_whose_nodes_were_all_killed_can_be_forgotten_once_their_leases_have_run_out(
    cluster: Cluster,
) -> None:
    a, b = cluster.start("a", "b")
    cluster.world(2)
    for agent in (a, b):
        agent.kill()
    while (said := cluster.command("forget", cluster.job)).code:
        assert "until its lease expires" in said.sentence
    assert cluster.fact("round", Round) is None


def test_an_etcd_that_is_not_there_is_one_sentence(clusters: MakeCluster) -> None:
    with socket.socket() as taken:  # the port is bound, but no process listens
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        (a,) = clusters(f"http://{endpoint}").start("a")
        assert f"nothing listens at {endpoint}" in refused(a)


@pytest.mark.parametrize("scheme", ["https", "ftp"])
def test_the_wrong_scheme_for_etcd_is_one_sentence(
    clusters: MakeCluster, shared_etcd: str, scheme: str
) -> None:
    cluster = clusters(shared_etcd.replace("http", scheme))
    (a,) = cluster.start("a")
    assert scheme in refused(a)


@pytest.mark.slow
def test_something_else_in_etcds_place_is_one_sentence(clusters: MakeCluster) -> None:
    # a server that accepts connections and never answers
    with socket.create_server(("127.0.0.1", 0)) as mute:
        cluster = clusters(f"http://127.0.0.1:{mute.getsockname()[1]}")
        (a,) = cluster.start("a")
        assert "etcd" in refused(a)


def test_a_spec_written_by_a_newer_version_is_refused_and_left_alone(cluster: Cluster) -> None:
    key, newer = job_prefix(cluster.job) + b"spec", b'{"v":99,"limits":"who knows"}'
    with Client(cluster.access) as client:
        client.swap_raw(key, newer, 0)
        (a,) = cluster.start("a")
        assert "newer" in refused(a)
        (kept,) = client.list_raw(key).items
        assert kept.value == newer


def test_a_standalone_run_of_a_name_that_runs_already_is_refused(
    clusters: MakeCluster, tmp_path: Path
) -> None:
    cluster = clusters(None)
    (a,) = cluster.start("a")
    world = cluster.world(1)
    (b,) = cluster.start("b")
    assert cluster.job in refused(b)
    cluster.goes_on(world)
    cluster.finishes(a)


@pytest.mark.slow
def test_a_job_whose_dataset_has_changed_is_refused_in_one_sentence_at_once(
    clusters: MakeCluster, tmp_path: Path
) -> None:
    """Each run has another etcd. The runs have only the folder of checkpoints in common."""
    options = (f"--checkpoints={tmp_path / 'kept'}", "--checkpoint-every=2")
    program = (AUDITED, "2", "0", "0")
    ended = []
    for samples in ("103", "102"):
        cluster = clusters(None)
        cluster.job = "changed"
        cluster.limits = (1, 1)
        (a,) = cluster.start("a", options=options, program=program, env={"E2E_SAMPLES": samples})
        ended.append(a.end())
    assert ended == [0, 2], a.said()
    assert len(a.find("workers.started")) == 1, "another try would find the same"
    (said,) = a.find("job.ended")
    assert (said["outcome"], said["level"]) == ("refused", "error")
    assert said["why"].startswith("samples in an epoch: 102 now, and 103 when the training was")
    assert a.text[-1] == f"elasticd: {said['why']}."
