from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from elasticd.core.facts import Budget
from elasticd.core.ports import Applied, Put
from elasticd.etcd import embedded
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.embedded import Embedded, Version, fault_of, find_etcd, spawn_child, version_of
from elasticd.etcd.errors import StoreUnavailable

PATIENCE_S = 60
NOBODY = 65534


@pytest.fixture
def etcd() -> Iterator[Embedded]:
    with Embedded() as server:
        yield server


def test_the_embedded_etcd_serves_on_a_socket_in_a_private_folder_and_on_no_port(etcd: Embedded) -> None:
    assert etcd.endpoint.startswith(f"unix:{etcd.folder}/")
    assert stat.S_IMODE(etcd.folder.stat().st_mode) == 0o700
    with Client(etcd.access) as client:
        assert client.check().version
    process = psutil.Process(etcd.pid)
    assert process.net_connections("inet") == []
    sockets = {Path(one.laddr).name for one in process.net_connections("unix") if one.laddr}
    assert {path.name for path in etcd.folder.iterdir() if path.is_socket()} <= sockets


CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_cannot_connect(etcd: Embedded) -> None:
    sockets = sorted(str(path) for path in etcd.folder.iterdir() if path.is_socket())
    assert len(sockets) == 2, "for clients and for peers"

    def connecting_as(uid: int) -> list[str]:
        argv = [sys.executable, "-I", "-c", CONNECT, str(uid), *sockets]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()

    assert connecting_as(0) == ["connected"] * 2
    assert connecting_as(NOBODY) == ["PermissionError"] * 2


@pytest.mark.parametrize("name", ["l" * 120, "with blanks"])
def test_where_temporary_files_have_a_path_that_no_socket_can_have_it_serves_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    with Embedded() as server, Client(server.access) as client:
        assert client.check().version
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    assert not server.folder.exists()
    assert list((tmp_path / name).iterdir()) == []


def test_what_tidies_up_temporary_files_sees_that_the_folder_is_in_use(etcd: Embedded) -> None:
    folder = os.open(etcd.folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    etcd.stop()
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)


def test_nothing_is_left_after_stop(etcd: Embedded) -> None:
    etcd.stop()
    assert not etcd.alive
    assert not etcd.folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(etcd.pid, 0)
    etcd.stop()


def test_started_again_after_a_kill_it_is_where_it_was_with_what_it_had(etcd: Embedded) -> None:
    endpoint = etcd.endpoint
    with Client(etcd.access) as client:
        assert isinstance(client.transact("job", (), (Put("budget", Budget(total=3)),)), Applied)
        # etcd before 3.5.5 answers a write, and then puts the write into its log (etcd#14370). The first
        # write is in the log before the second is answered.
        assert isinstance(client.transact("job", (), (Put("budget", Budget(total=3)),)), Applied)
        os.kill(etcd.pid, signal.SIGKILL)
        while etcd.alive:
            os.sched_yield()
        etcd.start()
        assert etcd.endpoint == endpoint
        entry = client.get("job", "budget")
        assert entry is not None
        assert entry.fact == Budget(total=3)


def test_one_whose_folder_was_tidied_away_serves_again_where_it_was_with_nothing(etcd: Embedded) -> None:
    endpoint = etcd.endpoint
    with Client(etcd.access) as client:
        client.transact("job", (), (Put("budget", Budget(total=3)),))
        shutil.rmtree(etcd.folder)
        os.kill(etcd.pid, signal.SIGKILL)
        while etcd.alive:
            os.sched_yield()
        etcd.start()
        assert etcd.endpoint == endpoint
        assert client.get("job", "budget") is None
    etcd.stop()
    assert not etcd.folder.exists()


def test_one_whose_folder_has_become_another_user_s_is_not_started_there(
    etcd: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = etcd.pid
    etcd.stop(remove=False)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreUnavailable, match="belongs to another user now"):
        etcd.start()
    assert etcd.pid == pid and not etcd.alive


def test_a_stopped_one_is_ended_all_the_same(etcd: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_S", 0.2)
    os.kill(etcd.pid, signal.SIGSTOP)
    etcd.stop()
    assert not etcd.alive


def test_two_at_once_do_not_meet(etcd: Embedded) -> None:
    with Embedded() as other, Client(etcd.access) as one, Client(other.access) as two:
        one.transact("job", (), (Put("budget", Budget()),))
        assert one.jobs() == ["job"]
        assert two.jobs() == []


def test_variables_of_etcd_in_our_environment_do_not_configure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_NAME", "other")
    monkeypatch.setenv("ETCD_QUOTA_BACKEND_BYTES", "nonsense")
    server = Embedded()
    try:
        server.start()
    finally:
        server.stop()


def test_an_etcd_that_ends_while_starting_says_why(tmp_path: Path) -> None:
    def spawn(argv: Sequence[str], env: Mapping[str, str], log: Path) -> int:
        return spawn_child([*argv, "--no-such-flag"], env, log)

    server = Embedded(spawn)
    try:
        with pytest.raises(StoreUnavailable, match="ended"):
            server.start()
    finally:
        server.stop()


FULL_DISK = 'mkdir -p "$D" && mount -t tmpfs -o size=1m tmpfs "$D" && exec "$@"'
NO_MEMORY = 'ulimit -v 300000 && exec "$@"'


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        pytest.param(("unshare", "-rm", "sh", "-c", FULL_DISK), "no space left on device", id="disk-full"),
        pytest.param(("sh", "-c", NO_MEMORY), "fatal error: .*memory", id="no-memory"),
    ],
)
def test_an_etcd_that_panics_says_why_and_shows_no_stack(before: tuple[str, ...], cause: str) -> None:
    if before[0] == "unshare" and subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("nothing may be mounted here")
    first = [shutil.which(before[0]) or before[0], *before[1:], "sh"]
    server = Embedded(lambda argv, env, log: spawn_child([*first, *argv], {**env, "D": data}, log))
    data = str(server.folder / "data")
    try:
        with pytest.raises(StoreUnavailable, match=f"ended while it started: .*{cause}") as met:
            server.start()
    finally:
        server.stop()
    assert ".go:" not in str(met.value) and "goroutine" not in str(met.value)


STARTER = """
import sys, threading, time
from elasticd.etcd.embedded import Embedded
server = Embedded()
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
print(server.pid, server.folder, flush=True)
sys.stdin.read()
print(server.alive, flush=True)
server.stop()
"""


@pytest.mark.parametrize("way", ["killed", "told"])
def test_the_embedded_etcd_ends_with_the_process_that_started_it_and_not_with_the_thread(way: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    pid, folder = owner.stdout.readline().split()
    etcd = os.pidfd_open(int(pid))
    try:
        if way == "killed":
            owner.kill()
        owner.stdin.close()
        said = owner.stdout.read()
        assert select.select([etcd], [], [], PATIENCE_S)[0], "it lives on"
        owner.wait(PATIENCE_S)
        assert said == ("" if way == "killed" else "True\n"), "alive, though the thread is long gone"
        assert Path(folder).exists() == (way == "killed")
    finally:
        os.close(etcd)
        owner.kill()
        owner.stdout.close()
        owner.wait()
        shutil.rmtree(folder, ignore_errors=True)


def binary(folder: Path, version: str) -> Path:
    folder.mkdir()
    path = folder / "etcd"
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    path.chmod(0o755)
    return path


def test_a_sound_etcd_on_path_is_preferred(tmp_path: Path) -> None:
    path = binary(tmp_path / "bin", "3.5.21")
    assert find_etcd(str(path.parent)) == path


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.2", "3.3.9"])
def test_an_etcd_on_path_that_may_lose_data_is_passed_over(version: str, tmp_path: Path) -> None:
    path = binary(tmp_path / "bin", version)
    found = find_etcd(str(path.parent))
    assert found != path
    assert version_of(found) is not None


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ((3, 4, 20), "etcd 3.4.20 may lose its last write when it is killed"),
        ((3, 4, 21), ""),
        ((3, 5, 1), "etcd 3.5.1 may damage its data when it is killed under load"),
        ((3, 5, 4), "etcd 3.5.4 may lose its last write when it is killed"),
        ((3, 5, 5), ""),
        (None, ""),
    ],
)
def test_the_known_fault_of_an_etcd_version_is_said(version: Version | None, fault: str) -> None:
    assert fault_of(version) == fault


def test_something_else_called_etcd_is_passed_over(tmp_path: Path) -> None:
    path = binary(tmp_path / "bin", "none")
    assert version_of(path) is None
    assert find_etcd(str(path.parent)) != path


def test_no_etcd_anywhere_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=re.escape("install one, or use --etcd")):
        find_etcd(str(tmp_path))
