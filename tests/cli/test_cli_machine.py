"""What a machine offers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elasticd.cli.machine import (
    Machine,
    _cgroup_cores,
    default_node_name,
    is_local_address,
    visible,
)
from elasticd.etcd.access import routed_address
from elasticd.etcd.names import check_name


@pytest.mark.parametrize(
    ("told", "present", "seen"),
    [
        (None, 8, 8),
        ("", 8, 0),
        ("0,1", 8, 2),
        ("0, 3", 8, 2),
        ("-1", 8, 0),
        ("0,-1,1", 8, 1),
        ("0,9,1", 8, 1),
        ("GPU-8932f937,GPU-1", 8, 2),
        ("MIG-1", 1, 1),
        ("NoDevFiles", 8, 0),
        ("0", 0, 0),
        ("GPU-1", 0, 0),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(told: str | None, present: int, seen: int) -> None:
    assert visible(told, present) == seen


def test_there_is_at_least_one_core() -> None:
    machine = Machine({})
    assert 1 <= machine.cores() <= machine.affinity_cores()


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 2), ("400000 100000", 4), ("?", None)]
)
def test_a_containers_quota_is_rounded_up(text: str, cores: int | None, tmp_path: Path) -> None:
    assert _cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert _cgroup_cores(tmp_path) == cores


def test_the_hosts_name_can_be_a_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/b", "host.domain", "-", "ünï", ""):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        check_name(default_node_name(), "node")


def test_the_address_is_the_one_that_routes_to_etcd() -> None:
    assert routed_address([("127.0.0.1", 2379)]) == "127.0.0.1"
    assert routed_address([("no-such-host.invalid", 2379)]) is None


def test_only_an_address_of_this_machine_is_ours() -> None:
    assert is_local_address("127.0.0.1")
    assert is_local_address("a-name-that-may-resolve-later")
    assert not is_local_address("192.0.2.1")  # reserved for documentation
