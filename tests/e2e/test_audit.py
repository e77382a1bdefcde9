"""The samples that workers really used, through kills and resizes. The workers' notes alone prove which."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import PATIENCE_S, Agent, Cluster

AUDITED = str(Path(__file__).parent / "programs" / "audited.py")
AUDIT = ("--audit",)
EVERY = {"audit_every": 5}
STOPPED = 143  # the exit code of an agent


def workers_of(agent: Agent) -> list[int]:
    """Return the workers that have entered a round and are not known to have ended."""
    pids = {int(line.split()[-1]) for line in agent.out if "entered" in line}
    return sorted(pid for pid in pids if os.path.exists(f"/proc/{pid}"))


def step_of(*agents: Agent) -> int:
    said = [line.split() for agent in agents for line in tuple(agent.out)]
    return max((int(words[-1]) for words in said if "step" in words), default=0)


def go_on(cluster: Cluster, *agents: Agent, last: int = 1000) -> None:
    """Wait until some more steps are committed, if the training has more."""
    goal = min(step_of(*agents) + 4, last)
    cluster.until(lambda: step_of(*agents) >= goal, f"step {goal}")


@pytest.mark.parametrize("seed", [1])
def test_each_sample_is_used_once_through_kills_and_resizes(cluster: Cluster, seed: int) -> None:
    """The samples are drawn at random, and loading processes fetch ahead."""
    chance = random.Random(seed)
    epochs = 8
    cluster.limits = (1, 3)
    program = (AUDITED, str(epochs), "1", "0.05")
    cluster.policy |= EVERY
    [a] = cluster.start("a", slots=2, options=AUDIT, program=program)
    [b] = cluster.start("b", slots=1, options=AUDIT, program=program)
    cluster.until(lambda: step_of(a) and step_of(b), "both train")
    for act in ("kill", "scale", "kill"):
        if act == "kill":
            if step_of(a, b) > 50:  # on a busy machine: a kill at the very end may cost all that was trained
                break
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(chance.choice(workers_of(chance.choice([a, b]))), signal.SIGKILL)
        else:
            cluster.command("scale", cluster.job, f"--max={chance.randint(1, 2)}")
        go_on(cluster, a, b, last=56)
        so_far = cluster.command("audit", cluster.job, etcd=False)
        assert so_far.code == 0, so_far
    assert (a.end(), b.end()) == (0, 0)

    said = cluster.command("audit", cluster.job, etcd=False)
    assert said.code == 0, said
    rounds, *found, verdict = said.out.splitlines()
    assert rounds.startswith("steps 1 to 56, in ") and not rounds.startswith("steps 1 to 56, in 1 round of")
    assert found == [f"epoch {epoch}: 103 of 103 samples used" for epoch in range(epochs)]
    assert verdict == "proved: each sample was used once"

    [one, *_] = (cluster.folder / "state").glob("elasticd/logs/*/audit")
    alone = cluster.command("audit", str(one), etcd=False)
    assert alone.code == 1 and "there is no note of the samples of rank" in alone.out, (
        "half of the notes prove nothing"
    )
    for folder in cluster.tmp.glob("pymp-*"):
        # shared memory of multiprocessing: processes still loaded for workers that were killed
        shutil.rmtree(folder)


def test_a_run_that_takes_other_samples_than_it_should_is_found_out(cluster: Cluster) -> None:
    """The dataset fetches sample 1 when it is asked for sample 0."""
    cluster.limits = (1, 1)
    program = (AUDITED, "2", "0", "0")
    cluster.policy |= EVERY
    (a,) = cluster.start("a", options=AUDIT, program=program, env={"E2E_BREAK": "take another"})
    assert a.end() == 0
    said = cluster.command("audit", cluster.job, etcd=False)
    assert said.code == 1
    assert said.out.splitlines()[1:] == [
        "epoch 0: 103 of 103 samples used",
        "epoch 1: 103 of 103 samples used",
        "epoch 0: sample 1 too often and sample 0 too rarely",
        "epoch 1: sample 1 too often and sample 0 too rarely",
        "not proved",
    ]
    compared = cluster.command("audit", cluster.job, "--against", cluster.job, etcd=False)
    assert compared.code == 1 and "14 losses and 3 digests of weights are in both, and equal" in compared.out


@pytest.mark.slow
def test_learning_rates_follow_a_batch_that_grows_with_the_world_and_nothing_is_used_twice(
    cluster: Cluster,
) -> None:
    cluster.limits = (1, 1)
    program = (AUDITED, "1000", "0", "0.02", "grows")
    cluster.policy |= EVERY
    (a,) = cluster.start("a", slots=2, options=AUDIT, program=program)
    for size, times in ((1, 1), (2, 2), (1, 2)):
        if times > 1:
            assert cluster.command("scale", cluster.job, f"--max={size}").code == 0
        entered = cluster.until_said(a, "worker.entered", batch=16 * size, times=times)
        assert entered["rates_times"] == float(size), "the log says what rates are multiplied by"
        go_on(cluster, a)
    a.signal(signal.SIGTERM)
    assert a.end() == STOPPED, a.said()

    used = {line[line.index("rate") :] for line in a.out if "rate" in line}
    assert used == {"rate 1.000 in 1", "rate 2.000 in 2"}
    said = cluster.command("audit", cluster.job, etcd=False)
    assert said.code == 0, said
    first, *found, verdict = said.out.splitlines()
    assert first.endswith("in 3 rounds of 1 to 2 workers")
    assert found[:-1] == [f"epoch {epoch}: 103 of 103 samples used" for epoch in range(len(found) - 1)]
    assert verdict == "proved: each sample was used once"


@pytest.mark.slow
def test_what_a_crashed_run_has_committed_is_proved_and_compared_with_an_undisturbed_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    """All processes of the run are killed at once. The losses of the other run are wrong after the eighth
    step."""
    cluster.limits = (2, 2)
    program = (AUDITED, "40", "0", "0.02", "consistent")
    cluster.policy |= EVERY
    (a,) = cluster.start("a", slots=2, options=(*AUDIT, "--fresh-start"), program=program)
    cluster.until(lambda: step_of(a) >= 16, "they train")
    for pid in [*workers_of(a), a.pid]:
        os.kill(pid, signal.SIGKILL)
    assert a.end() == -signal.SIGKILL
    last = step_of(a)

    said = cluster.command("audit", cluster.job, etcd=False)
    assert said.code == 0, said
    rounds, *found, verdict = said.out.splitlines()
    committed = int(rounds.removeprefix("steps 1 to ").split(",")[0])
    assert last <= committed <= last + 2, "what was said before and what may have been committed since"
    epochs, rest = divmod(committed, 7)  # the steps of an epoch
    expected = [f"epoch {epoch}: 103 of 103 samples used" for epoch in range(epochs)]
    assert found == [
        *expected,
        *([f"epoch {epochs}: {16 * rest} of 103 samples used, so far"] if rest else []),
    ]
    assert verdict == "proved: each sample was used once"

    notes = {"ELASTICD_AUDIT_FOLDER": str(tmp_path / "alone" / "audit"), "ELASTICD_AUDIT_EVERY": "5"}
    alone = subprocess.run(
        [sys.executable, AUDITED, "2", "0", "0", "consistent"],
        env=cluster.environment() | notes | {"E2E_DRIFT": "8"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert alone.returncode == 0, alone.stderr
    compared = cluster.command("audit", cluster.job, "--against", str(tmp_path / "alone"), etcd=False)
    assert compared.code == 1
    assert compared.out.splitlines()[-1].startswith("the first difference is the loss of step 9: ")
