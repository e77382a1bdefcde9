"""The manifests in action: their command lines, environment, probes and grace periods, in pods with addresses
of their own on one machine, with three real etcds and TLS. Training continues through all of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.cluster import Cluster
from tests.k8s.manifests import K8S, ROOT, build, of_kind
from tests.k8s.network import why_not
from tests.k8s.pod import Pod, trained
from tests.k8s.test_guide import claim_of_the_guide, commands

SMALL = (
    "--data=/opt/elasticd/elasticd --layers=1 --heads=2 --width=32 --context=32 --global-batch=8 --sample=0"
)
SMALL += " --snapshot-every=10 --log-every=10"


def kustomization(overlay: str, arguments: list[str], volumes: list[Any]) -> dict[str, Any]:
    """Return what a user writes to run something else. It is small here, and does not wait before it
    grows."""
    count = {"parallelism": 2, "completions": 2} if overlay != "pool" else {"replicas": 2}
    env = {"SLOTS": 1, "MIN": 1, "MAX": 4, "GROW_COOLDOWN": 1}
    container = {
        "name": "elasticd",
        "args": arguments,
        "env": [{"name": f"ELASTICD_{name}", "value": str(value)} for name, value in env.items()],
    }
    patch = {
        "apiVersion": "apps/v1" if overlay == "pool" else "batch/v1",
        "kind": "StatefulSet" if overlay == "pool" else "Job",
        "metadata": {"name": "train", "namespace": "elasticd"},
        "spec": {**count, "template": {"spec": {"containers": [container], "volumes": volumes}}},
    }
    return {"resources": [overlay], "patches": [{"patch": yaml.safe_dump(patch)}]}


class Rehearsal:
    def __init__(
        self, folder: Path, overlay: str, arguments: list[str], volumes: list[Any], *, own_names: bool
    ) -> None:
        mine = folder / "overlay"
        mine.mkdir()
        made = kustomization(overlay, arguments, volumes)
        base = K8S / "base" if overlay == "base" else K8S / "overlays" / overlay
        made["resources"] = [os.path.relpath(base, mine)]
        (mine / "kustomization.yaml").write_text(yaml.safe_dump(made))
        objects = build(str(mine))
        etcd = next(s for s in of_kind(objects, "StatefulSet") if s["metadata"]["name"] == "etcd")
        members = [f"etcd-{i}.etcd" for i in range(etcd["spec"]["replicas"])]
        secrets = certificates(folder / "secrets", members)
        self.cluster = Cluster(folder / "cluster", objects, secrets, own_names=own_names)

    # ------------------------------------------------------------ what the test sees

    @property
    def step(self) -> int:
        """Return the newest step that any worker has reported."""
        return max((s for line in self.cluster.lines("train") if (s := trained(line)) is not None), default=0)

    def world(self, among: list[Pod]) -> tuple[int, int]:
        """Return the round and the size of the world for which these pods last started workers."""
        told = [e for one in among for e in one.events("workers.started")]
        return max(((e["round"], e["world_size"]) for e in told), default=(0, 0))

    @property
    def round(self) -> int:
        return self.world(self.cluster.all)[0]

    def trains_with(self, size: int, among: list[Pod] | None = None, *, after: int = 0) -> None:
        """Wait for a world of this size, in a later round, that makes steps."""
        cluster = self.cluster

        def formed() -> bool:
            round, workers = self.world(among or cluster.of("train"))
            return round > after and workers == size

        cluster.until(formed, f"a world of {size}, after round {after}")
        self.goes_on(among)

    def goes_on(self, among: list[Pod] | None = None) -> None:
        """Wait for further steps, by workers of these pods if any are named."""

        def steps() -> list[int]:
            lines = [line for one in among for line in one.lines] if among else self.cluster.lines("train")
            return [s for line in lines if line.startswith("step ") and (s := trained(line)) is not None]

        seen, newest = len(steps()), self.step
        self.cluster.until(
            lambda: len(new := steps()[seen:]) > 1 and max(new) > newest, f"steps past {newest}"
        )

    def gone(self, one: Pod) -> int:
        self.cluster.until(lambda: one.code is not None, f"{one} ends")
        assert one.code is not None
        return one.code

    def not_interrupted(self, round: int) -> None:
        """Check that the world is still that of this round."""
        why = ("round.closing", "lease.lost", "etcd.away", "etcd.back", "etcd.complaint", "leader.elected")
        told = [(str(one), e) for one in self.cluster.of("train") for what in why for e in one.events(what)]
        assert self.round == round, "\n".join(map(str, told))

    def never_went_back(self, by: int = 0) -> None:
        """Check that each world resumed from the last step of the worlds before it, or at most ``by`` steps
        earlier."""
        done = 0
        for line in self.cluster.lines("train"):
            if line.startswith("resumed after step "):
                assert (trained(line) or 0) >= done - by, line
            done = max(done, trained(line) or 0)


def certificates(folder: Path, members: list[str]) -> dict[str, Path]:
    """Make the Secrets as k8s/README.md says, each as a folder."""
    secrets = {}
    for words in commands():
        if words[0] == "deploy/certs.sh":
            script = [ROOT / words[0], *words[1:3], folder / words[3], *members]
            subprocess.run(script, check=True, capture_output=True, timeout=60)
        if words[3:6] == ["create", "secret", "generic"] and all("=certs/" in word for word in words[7:]):
            secret = secrets[words[6]] = folder / words[6]
            secret.mkdir()
            for source in words[7:]:
                key, _, file = source.removeprefix("--from-file=").partition("=")
                shutil.copy(folder / file, secret / key)
    return secrets


@pytest.fixture
def steps() -> int:
    return 1_000_000  # more steps than there is time for


@pytest.fixture
def arguments(steps: int) -> list[str]:
    return ["/opt/elasticd/workers/train_gpt.py", *SMALL.split(), f"--steps={steps}"]


@pytest.fixture
def of() -> str:
    return "base"


@pytest.fixture
def volumes() -> list[Any]:
    """Return the folders that stand in for the volumes of the manifests."""
    return []


@pytest.fixture
def own_names() -> bool:
    """Whether a pod's own name resolves in the pod itself."""
    return True


@pytest.fixture
def rehearsal(
    tmp_path: Path, of: str, arguments: list[str], volumes: list[Any], own_names: bool
) -> Iterator[Rehearsal]:
    (tmp_path / "tried").mkdir()
    if reason := why_not(tmp_path / "tried"):
        pytest.skip(reason)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o001)  # pods run as another user
    made = Rehearsal(tmp_path, of, arguments, volumes, own_names=own_names)
    try:
        yield made
    finally:
        made.cluster.close()


SNAPSHOT_EVERY = 10  # the steps that a crash may cost


@pytest.mark.slow
@pytest.mark.parametrize("own_names", [False], ids=["of_names_that_do_not_resolve"])
def test_training_goes_on_while_pods_come_and_go(rehearsal: Rehearsal) -> None:
    cluster = rehearsal.cluster
    rehearsal.trains_with(2)
    cluster.until(lambda: all(one.ready for one in cluster.here()), "all pods are ready")

    cluster.scale("train", 3)
    rehearsal.trains_with(3)

    leaving, round = cluster.of("train")[1], rehearsal.round
    cluster.evict(leaving)
    assert rehearsal.gone(leaving) == 143
    rehearsal.trains_with(3, after=round)
    rehearsal.never_went_back()  # a change that is announced costs no step

    deleted, round = cluster.of("train")[0], rehearsal.round
    cluster.delete(deleted)
    assert rehearsal.gone(deleted) == 143
    rehearsal.trains_with(3, after=round)
    rehearsal.never_went_back()
    assert {e["node"] for one in cluster.of("train") for e in one.events("agent.started")} == {
        "train-0",
        "train-1",
        "train-2",
    }, "who comes under an index that was there before is that node"

    lost, round = cluster.of("train")[0], rehearsal.round
    cluster.lose(lost)
    assert rehearsal.gone(lost) == 137
    rehearsal.trains_with(3, after=round)

    scaled_away, round = cluster.of("train")[2], rehearsal.round
    cluster.scale("train", 2)
    assert rehearsal.gone(scaled_away) == 143
    rehearsal.trains_with(2, after=round)
    rehearsal.never_went_back(by=SNAPSHOT_EVERY)
    assert not cluster.controllers["train"].failed and not cluster.controllers["train"].counted


@pytest.mark.slow
def test_a_pod_that_is_cut_off_costs_the_others_nothing_and_comes_back(rehearsal: Rehearsal) -> None:
    cluster = rehearsal.cluster
    cluster.scale("train", 3)
    rehearsal.trains_with(3)
    alone, *others = cluster.of("train")
    assert alone.workers()
    cluster.network.cut(alone.pid)
    rehearsal.trains_with(2, others)
    assert not alone.workers(), "they were to end before others took their place"
    round = rehearsal.round
    cluster.network.heal(alone.pid)
    rehearsal.trains_with(3, after=round)
    assert cluster.of("train") == [alone, *others], "no pod was replaced"
    rehearsal.never_went_back(by=SNAPSHOT_EVERY)


@pytest.mark.slow
def test_training_goes_on_while_etcd_is_rolled_and_a_member_is_lost_for_good(rehearsal: Rehearsal) -> None:
    cluster, etcd = rehearsal.cluster, rehearsal.cluster.controllers["etcd"]
    rehearsal.trains_with(2)
    round = rehearsal.round

    cluster.until(lambda: etcd.settled, "etcd is ready")
    old = cluster.of("etcd")
    etcd.restart()
    for one in reversed(old):
        assert rehearsal.gone(one) in (0, 143)
        rehearsal.goes_on()
    cluster.until(lambda: etcd.settled, "etcd is ready again")
    rehearsal.goes_on()
    rehearsal.not_interrupted(round)

    lost = cluster.of("etcd")[1]
    etcd.held.add(1)
    cluster.lose(lost)
    rehearsal.gone(lost)
    cluster.forget(lost)
    rehearsal.goes_on()
    # k8s/README.md says what to do then. A cluster accepts no new member until the others have been
    # together for a few seconds.
    well = cluster.of("etcd")[0]
    listed = well.execute("etcdctl", "member", "list").stdout
    (dead,) = [line.split(",")[0] for line in listed.splitlines() if "etcd-1" in line]
    assert well.execute("etcdctl", "member", "remove", dead).returncode == 0
    add = ("etcdctl", "member", "add", "etcd-1", "--peer-urls=https://etcd-1.etcd:2380")
    cluster.until(lambda: well.execute(*add).returncode == 0, "a new member is taken")
    etcd.set_env("INITIAL_CLUSTER_STATE", "existing")  # this restarts the other members, too
    etcd.held.clear()
    cluster.until(lambda: etcd.settled, "etcd is ready with its new member")
    rehearsal.goes_on()
    rehearsal.not_interrupted(round)

    cluster.scale("train", 3)  # and a new pod finds its way
    rehearsal.trains_with(3)
    rehearsal.never_went_back(by=SNAPSHOT_EVERY)


@pytest.mark.slow
def test_pods_that_start_while_etcd_is_away_wait_for_it(rehearsal: Rehearsal) -> None:
    cluster = rehearsal.cluster
    cluster.scale("etcd", 0)
    cluster.until(lambda: len(cluster.of("train")) == 2, "the job's pods are there")
    for one in cluster.of("train"):
        cluster.until(lambda one=one: bool(one.events("etcd.away")), "it has noticed")  # type: ignore[misc]
    cluster.scale("etcd", 3)
    rehearsal.trains_with(2)
    assert cluster.controllers["train"].started == 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1500])
def test_a_job_that_is_done_ends_on_all_pods_and_says_so(rehearsal: Rehearsal, steps: int) -> None:
    cluster, job = rehearsal.cluster, rehearsal.cluster.controllers["train"]
    rehearsal.trains_with(2)
    one, other = cluster.of("train")
    shown = one.execute("elasticd", "status")
    assert shown.returncode == 0 and "train-1" in shown.stdout, shown
    examined = one.execute("elasticd", "doctor")
    assert examined.returncode == 0, examined.stdout
    # Once a pod has ended with 0 the Job is complete, and Kubernetes ends the other pods.
    assert {rehearsal.gone(one), rehearsal.gone(other)} <= {0, 143}
    assert job.succeeded and not job.failed
    first = min((one, other), key=lambda pod: pod.code or 0)
    assert "finished" in first.last_words
    cluster.until(lambda: cluster.of("train") == [], "no pod is left")
    assert rehearsal.step == steps
    assert job.started == 2, "none was started again"


@pytest.mark.slow
def test_a_pod_more_than_the_job_may_have_is_ready_and_takes_the_place_of_one_that_is_lost(
    rehearsal: Rehearsal,
) -> None:
    cluster, job = rehearsal.cluster, rehearsal.cluster.controllers["train"]
    cluster.scale("train", 5)
    rehearsal.trains_with(4)  # ELASTICD_MAX
    cluster.until(lambda: len(cluster.of("train")) == 5 and all(one.ready for one in cluster.here()), "ready")
    spare, *training = sorted(cluster.of("train"), key=lambda one: len(one.events("workers.started")))
    assert not spare.workers() and all(one.workers() for one in training)
    lost, round = training[0], rehearsal.round
    job.held.add(lost.index)  # there is no machine for another pod
    cluster.lose(lost)
    rehearsal.trains_with(4, after=round)
    assert spare.workers(), "it waited for this"
    rehearsal.never_went_back(by=SNAPSHOT_EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("volumes", [claim_of_the_guide()], ids=["on_a_claim"])
def test_a_job_that_was_deleted_goes_on_where_it_was_when_it_is_applied_again(rehearsal: Rehearsal) -> None:
    cluster = rehearsal.cluster
    rehearsal.trains_with(2)
    cluster.scale("train", 0)  # all its pods are told at once
    cluster.until(lambda: cluster.of("train") == [], "all are gone")
    assert {one.code for one in cluster.all if one.made.name == "train"} == {143}
    done, round = rehearsal.step, rehearsal.round
    assert done > 0
    cluster.scale("train", 2)
    rehearsal.trains_with(2, after=round)
    rehearsal.never_went_back()
    resumed = [trained(line) or 0 for line in cluster.lines("train") if line.startswith("resumed after ")]
    assert max(resumed, default=0) >= done


NO_DATA = ["/opt/elasticd/workers/train_gpt.py", "--data=/no/such/data"]
NO_SCRIPT = ["/opt/elasticd/workers/no_such_script.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (NO_DATA, 1, ["First to fail in its last round: rank", "cannot read /no/such/data"]),
        (NO_SCRIPT, 2, ["no_such_script.py"]),
    ],
    ids=["the_script_fails", "there_is_no_script"],
)
def test_a_job_that_cannot_come_right_is_given_up_and_its_pods_say_why(
    rehearsal: Rehearsal, code: int, words: list[str]
) -> None:
    cluster, job = rehearsal.cluster, rehearsal.cluster.controllers["train"]
    cluster.until(lambda: bool(job.failed), "the Job has failed")
    assert job.failed.endswith(f"ended with {code}")
    cluster.until(lambda: cluster.of("train") == [], "no pod is left")
    ended = [one for one in cluster.all if one.made.name == "train"]
    assert len(ended) == 2, "none was started again"
    assert {one.code for one in ended} <= {code, 143}
    for one in ended:
        if one.code == code:
            assert all(word in one.last_words for word in words), one.last_words


@pytest.mark.slow
@pytest.mark.parametrize("of", ["cpu-dev", "pool", "monitoring"])
def test_the_other_overlays_train_and_replace_lost_pods(rehearsal: Rehearsal) -> None:
    cluster = rehearsal.cluster
    rehearsal.trains_with(2)
    cluster.until(lambda: all(one.ready for one in cluster.here()), "all pods are ready")
    lost, round = cluster.of("train")[1], rehearsal.round
    cluster.lose(lost)
    assert rehearsal.gone(lost) == 137
    rehearsal.trains_with(2, after=round)
    assert {e["node"] for one in cluster.of("train") for e in one.events("agent.started")} == {
        "train-0",
        "train-1",
    }
    rehearsal.never_went_back(by=SNAPSHOT_EVERY)
