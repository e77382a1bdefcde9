from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.etcd import registry
from elasticd.etcd.registry import find, register, registry_folder, standalone_runs, unregister


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def data(runtime: Path, name: str = "elasticd-etcd-x") -> Path:
    folder = runtime / name
    folder.mkdir()
    return folder


def test_a_run_whose_name_takes_many_bytes_is_found(runtime: Path) -> None:
    name = "\u8a13\u7df4" * 30
    register(name, "127.0.0.1:1", 7, 5.0, data(runtime))
    assert find(name) is not None and [run.job for run in standalone_runs()] == [name]
    unregister(name, runtime / "elasticd-etcd-x")
    assert find(name) is None


def test_a_registered_run_is_found_and_an_ended_one_is_not(runtime: Path) -> None:
    folder = data(runtime)
    register("train", "127.0.0.1:1", 7, 5.0, folder)
    found = find("train")
    assert found is not None
    assert (found.endpoint, found.pid, found.access.endpoints) == ("127.0.0.1:1", 7, ("127.0.0.1:1",))
    unregister("train", folder)
    assert standalone_runs() == []
    assert folder.exists()


def test_a_run_whose_etcd_was_restarted_is_found_where_it_is_now(runtime: Path) -> None:
    folder = data(runtime)
    register("train", "127.0.0.1:1", 7, 5.0, folder)
    register("train", "127.0.0.1:1", 8, 5.0, folder)
    assert [run.pid for run in standalone_runs()] == [8]


def test_a_second_run_of_the_same_name_is_refused(runtime: Path) -> None:
    register("train", "127.0.0.1:1", 7, 5.0, data(runtime))
    with pytest.raises(FileExistsError, match="'train' is running on this machine already"):
        register("train", "127.0.0.1:2", 8, 6.0, data(runtime, "elasticd-etcd-y"))


def test_what_a_killed_run_left_is_removed(runtime: Path, other: subprocess.Popen[bytes]) -> None:
    folder = data(runtime)
    register("train", "127.0.0.1:1", 7, 5.0, folder, owner=other.pid)
    assert find("train") is not None
    other.kill()
    other.wait()
    assert find("train") is None
    assert not folder.exists()
    assert list(registry_folder().iterdir()) == []


def test_a_reused_process_number_is_not_the_run(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_start_of", lambda pid: 1)
        register("train", "127.0.0.1:1", 7, 5.0, data(runtime))
    assert find("train") is None


def test_a_run_in_another_container_is_let_be(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = data(runtime)
    register("train", "127.0.0.1:1", 7, 5.0, folder)
    with monkeypatch.context() as there:  # as in a container that sees no process of this one
        there.setattr(registry, "_namespace", lambda: 1)
        there.setattr(registry, "_start_of", lambda pid: 0)
        assert standalone_runs() == []
        register("train", "127.0.0.1:2", 7, 5.0, data(runtime, "elasticd-etcd-y"))
    assert [run.endpoint for run in standalone_runs()] == ["127.0.0.1:1"]
    assert folder.exists()


def test_nothing_but_data_folders_of_ours_is_ever_removed(
    runtime: Path, other: subprocess.Popen[bytes]
) -> None:
    precious = data(runtime, "precious")
    link = runtime / "elasticd-etcd-link"
    link.symlink_to(precious)
    register("a", "127.0.0.1:1", 7, 5.0, precious, owner=other.pid)
    register("b", "127.0.0.1:1", 7, 5.0, link, owner=other.pid)
    other.kill()
    other.wait()
    assert standalone_runs() == []
    assert precious.exists()


def test_files_that_are_not_ours_are_passed_over(runtime: Path) -> None:
    register("train", "127.0.0.1:1", 7, 5.0, data(runtime))
    (registry_folder() / "junk.json").write_bytes(b"\x80\x04 not json")
    assert [run.job for run in standalone_runs()] == ["train"]


def test_a_folder_that_others_may_enter_is_refused(runtime: Path) -> None:
    folder = registry_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="only you may enter"):
        standalone_runs()


def test_a_link_in_the_place_of_the_folder_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "elasticd").symlink_to(runtime / "elsewhere")
    with pytest.raises(PermissionError, match="only you may enter"):
        registry_folder()


def test_without_a_runtime_folder_it_is_in_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert registry_folder() == tmp_path / f"elasticd-{os.getuid()}"


@pytest.mark.parametrize("job", ["", "a/b", "..\n", " a"])
def test_a_bad_job_name_is_refused(job: str, runtime: Path) -> None:
    with pytest.raises(ValueError, match="name"):
        register(job, "127.0.0.1:1", 7, 5.0, data(runtime))
