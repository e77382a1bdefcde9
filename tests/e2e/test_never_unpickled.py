"""Pickles that strangers put into etcd or into a round's store are never executed."""

from __future__ import annotations

import base64
import os
import pickle
from datetime import timedelta
from pathlib import Path

from elasticd.etcd.blocking_client import Client
from elasticd.etcd.names import job_prefix
from tests.e2e.harness import Cluster


class Bomb:
    """A pickle that makes a file when it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self._crater = crater

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._crater),)


def bombs(crater: Path) -> list[bytes]:
    raw = pickle.dumps(Bomb(crater))
    return [raw, base64.b64encode(raw)]  # torch's c10d back end expects base64


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(bombs(tmp_path / "crater")[0])  # the test unpickles it itself
    assert (tmp_path / "crater").exists()


def test_pickles_in_etcd_do_nothing(cluster: Cluster, tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    cluster.limits = (1, 2)
    (a,) = cluster.start("a")
    first = cluster.world(1)
    with Client(cluster.access) as client:
        for i, bomb in enumerate(bombs(crater)):
            for key in ("nodes", "reports", "stalls", "other"):
                client.swap_raw(job_prefix(cluster.job) + f"{key}/evil{i}".encode(), bomb, 0)
    cluster.goes_on(first)
    (b,) = cluster.start("b")
    second = cluster.world(2, after=first)
    second.players[0].tell("exit", code=5)
    cluster.world(2, after=second)
    assert cluster.command("status", cluster.job).code == 0
    cluster.finishes(a, b)
    assert not crater.exists()


def test_pickles_in_a_rounds_store_do_nothing(cluster: Cluster, tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    crater = tmp_path / "crater"
    cluster.limits = (2, 2)
    a, b = cluster.start("a", "b")
    first = cluster.world(2)
    env = first.players[0].env
    store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=timedelta(seconds=60))
    # The keys where stock torch keeps its rendezvous' state, and where its agents read each other's records.
    for bomb in bombs(crater):
        for key in (
            f"torch.rendezvous.{cluster.job}",
            "torchelastic/role_info/0",
            "torchelastic/assigned_ranks/0",
            "/none/torchelastic/role_info/0",
            "torchelastic/agent/terminal_state",
        ):
            store.set(key, bomb)
    cluster.goes_on(first)
    first.players[0].tell("exit", code=5)
    second = cluster.world(2, after=first)
    assert second.players[0].env["MASTER_PORT"] != env["MASTER_PORT"], "each round has a store of its own"
    cluster.finishes(a, b)
    assert not crater.exists()


def test_a_spec_that_is_a_pickle_is_refused_in_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    with Client(cluster.access) as client:
        client.swap_raw(job_prefix(cluster.job) + b"spec", bombs(crater)[0], 0)
    (a,) = cluster.start("a")
    assert a.end() == 2
    assert len(a.text) == 1 and "spec" in a.screen
    assert not crater.exists()
