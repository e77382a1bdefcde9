"""The promises of every store: the disk, a foldered file system of fsspec, a store in memory, and S3."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from botocore.exceptions import ClientError

from elasticd.checkpoint.format.manifest import BLOCK, block_digest
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.newest.retention import CommitRefused, Keep
from elasticd.checkpoint.storage import BadStore, CheckpointStore, disk, remote, store_at
from elasticd.checkpoint.storage.disk import Disk, write_file
from elasticd.checkpoint.storage.remote import Remote
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.facts import Saved
from tests.checkpoint.conftest import store_of
from tests.checkpoint.s3server import SECRET, S3Server, everything, parts, serving

BIG = bytes(range(256)) * (12 << 12)  # 12 MiB: two parts on S3


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with serving() as server:
        yield server


@pytest.fixture(params=["disk", "foldered", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return store_at(f"s3://bucket/{tmp_path.name}/run")
    return store_of(request.param, tmp_path)


def test_a_written_file_is_read_back_with_its_checksums(store):
    file = store.write("step/a", memoryview(BIG))
    store.sync("step")
    assert (file.name, file.size) == ("a", len(BIG))
    assert file.digests == [block_digest(BIG[at : at + BLOCK]) for at in range(0, len(BIG), BLOCK)]
    store.write("step/empty", memoryview(b""))
    assert store.sizes("step") == {"a": len(BIG), "empty": 0}
    assert sorted(store.files("step")) == ["a", "empty"]
    assert store.names() == ["step"]
    opened = store.open("step/a")
    into = bytearray(100_000)
    assert opened.read_into(memoryview(into), 5_000_001) == len(into)
    assert into == BIG[5_000_001 : 5_000_001 + len(into)]
    opened.close()


@pytest.mark.parametrize("at", [0, 1, 512], ids=["of whole pages", "of none", "between"])
def test_a_file_past_the_cache_is_the_same_wherever_its_content_lies_in_memory(
    at: int, tmp_path: Path
) -> None:
    with mmap.mmap(-1, at + 2 * BLOCK + 12_345) as memory:
        memory[:] = random.Random(at).randbytes(len(memory))
        with memoryview(memory) as view, view[at:] as content:
            file = write_file(tmp_path / "a", content)
            assert (tmp_path / "a").read_bytes() == content
            assert file.digests == [block_digest(content[i : i + BLOCK]) for i in range(0, file.size, BLOCK)]


def test_a_file_is_written_where_the_cache_cannot_be_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "it cannot")
        return fcntl.fcntl(fd, command, flags)

    monkeypatch.setattr(
        disk, "fcntl", SimpleNamespace(fcntl=refuse, F_GETFL=fcntl.F_GETFL, F_SETFL=fcntl.F_SETFL)
    )
    write_file(tmp_path / "a", memoryview(BIG))
    assert (tmp_path / "a").read_bytes() == BIG


def test_what_is_replaced_reads_as_the_new_one(store):
    for content in (b"old", b"and new"):
        store.replace("pointer", content)
        assert store.read("pointer") == content
    assert store.names() == ["pointer"]


def test_a_missing_file_raises_file_not_found(store):
    store.replace("other", b"")
    with pytest.raises(FileNotFoundError):
        store.read("pointer")
    with pytest.raises(FileNotFoundError):
        store.read("step/a")
    with pytest.raises(FileNotFoundError):
        store.open("step/a").read_into(memoryview(bytearray(1)), 0)


def test_a_folder_is_removed_with_all_in_it_and_nothing_else(store):
    for name in ("step-1/a", "step-1/b", "step-10/a"):
        store.write(name, memoryview(b"x"))
    store.remove("step-1")
    store.remove("never there")
    assert store.names() == ["step-10"]
    store.write("step-10/b", memoryview(b"x"))
    store.remove("step-10/a")
    assert store.sizes("step-10") == {"b": 1}


def test_one_at_a_time_has_the_lock(store):
    with store.locked(".lock"):
        pass
    with store.locked(".lock"):
        pass


# ------------------------------------------------------------ S3 alone


def saved(step: int, round_: int) -> Saved:
    return Saved(folder_name(step, round_, "0000000a", step), step, round_, 1, 1.0, 1, "")


def test_concurrent_commits_to_s3_do_not_undo_each_other(s3, tmp_path):
    where = f"s3://bucket/{tmp_path.name}/fenced"
    writers = [FilePointer(Remote.at(where)) for _ in range(4)]  # as on four machines

    def commit(n: int) -> list[int]:
        made = []
        for step in range(n, 40, len(writers)):
            with suppress(CommitRefused):  # another writer has committed a later step
                writers[n].commit(saved(step, 1), Keep(last=100))
                made.append(step)
        return made

    with ThreadPoolExecutor(len(writers)) as pool:
        made = [step for steps in pool.map(commit, range(len(writers))) for step in steps]
    assert [s.step for s in writers[0].read().saved] == sorted(made) and 39 in made


def test_a_world_of_an_older_round_cannot_commit_to_s3_over_a_later_one_that_it_has_not_seen(
    s3, tmp_path, monkeypatch
):
    where = f"s3://bucket/{tmp_path.name}/fenced"
    old, new = (FilePointer(Remote.at(where)) for _ in range(2))
    old.commit(saved(1, 1), Keep())
    real = Remote.look

    def overtaken(self: Remote, name: str) -> tuple[bytes, str | None]:
        seen = real(self, name)
        monkeypatch.setattr(Remote, "look", real)
        new.commit(saved(2, 2), Keep())
        return seen

    monkeypatch.setattr(Remote, "look", overtaken)
    with pytest.raises(CommitRefused, match="round 2 has committed since"):
        old.commit(saved(9, 1), Keep())
    assert [s.step for s in new.read().saved] == [1, 2]


def test_a_server_that_knows_no_conditions_is_written_to_without(s3, bucket, monkeypatch):
    real = bucket._fs.pipe_file

    def old(path: str, content: bytes, **condition: str) -> None:
        if condition:
            refused = ClientError({"Error": {"Code": "NotImplemented"}}, "PutObject")
            raise OSError(errno.ENOSYS, "it is not implemented") from refused
        real(path, content)

    monkeypatch.setattr(bucket._fs, "pipe_file", old)
    said: list[str] = []
    FilePointer(bucket, said.append).commit(saved(1, 1), Keep())
    assert "does not notice two commits at the same time" in said[0]
    assert FilePointer(bucket).commit(saved(2, 1), Keep()).checkpoint == FilePointer(bucket).read()


def test_where_two_commits_at_one_moment_are_not_told_apart_that_is_said_once(store):
    said: list[str] = []
    pointer = FilePointer(store, said.append)
    for step in (1, 2):
        pointer.commit(saved(step, 1), Keep())
    warning = (
        f"{store.url} does not notice two commits at the same time: let only one job at a time save there"
    )
    assert [sentence.startswith(warning) for sentence in said] == [True] * (not store.fenced)
    assert store.fenced == (isinstance(store, Disk) or store.url.startswith("s3:"))


@pytest.fixture
def bucket(s3, tmp_path) -> Iterator[CheckpointStore]:
    yield store_at(f"s3://bucket/{tmp_path.name}")
    s3.mends()


def uploads(bucket: CheckpointStore) -> list[str]:
    """Return the uploads that were begun in parts and are not finished."""
    begun = boto3.client("s3").list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    return [u["Key"] for u in begun if u["Key"].startswith(bucket.url.removeprefix("s3://bucket/"))]


@pytest.mark.parametrize("how", ["500", "drop"])
def test_a_part_that_fails_is_sent_again(s3, bucket, how):
    fault = s3.fails(how, parts, bad=1)
    bucket.write("step/a", memoryview(BIG))
    assert fault.hits > 2
    assert bucket.read("step/a") == BIG


def test_an_upload_that_fails_leaves_no_file_and_nothing_to_be_paid_for(s3, bucket):
    s3.fails("500", parts, fine=1)
    with pytest.raises(OSError, match="internal error") as failed:
        bucket.write("step/a", memoryview(BIG))
    assert failed.value.errno == errno.EIO and str(failed.value.filename) == f"{bucket.url}/step/a"
    s3.mends()
    assert bucket.names() == []
    assert not uploads(bucket)


def test_unfinished_uploads_are_found_and_removed(s3, bucket):
    client = boto3.client("s3")
    folder = bucket.url.removeprefix("s3://bucket/")
    for key in (f"{folder}/step-1/a", f"{folder}/step-10/a", f"{folder}-others/x"):
        client.create_multipart_upload(Bucket="bucket", Key=key)
    assert bucket.names() == ["step-1", "step-10"]
    bucket.remove("step-1")
    assert bucket.names() == ["step-10"]
    bucket.remove("step-10")
    assert uploads(bucket) == [f"{folder}-others/x"]


def test_a_file_that_is_shorter_there_than_here_is_an_error(s3, bucket, monkeypatch):
    monkeypatch.setattr(bucket._fs, "info", lambda _: {"size": 5})
    with pytest.raises(OSError, match="5 of 8 bytes arrived"):
        bucket.write("step/a", memoryview(b"12345678"))


def test_no_bucket_and_no_right_are_told_apart_from_no_server(s3, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        store_at("s3://no-such-bucket/run").write("step/a", memoryview(b"x"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODY")
    with pytest.raises(PermissionError, match="does not exist in our records"):
        store_at("s3://bucket/other").write("step/a", memoryview(b"x"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(PermissionError, match="credentials") as refused:
        store_at("s3://bucket/third").write("step/a", memoryview(b"x"))
    assert SECRET not in repr(refused.getrepr(style="long"))


def test_a_server_that_hangs_up_on_everything_is_an_error_in_the_end(s3, bucket, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3.fails("drop", everything)
    with pytest.raises(OSError, match="closed") as failed:
        Remote.at(bucket.url).read("committed.json")
    assert failed.value.errno == errno.EIO


# ------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense://bucket/x", "not an address for checkpoints"),
        ("simplecache::s3://bucket/x", "names several stores"),
        (f"s3://KEY:{SECRET}@bucket/x", "holds a secret"),
        ("/checkpoints/\udcff", "is not UTF-8"),
        ("/checkpoints/\0", "holds a NUL byte"),
    ],
)
def test_an_invalid_address_is_refused_in_one_sentence(address, why):
    with pytest.raises(BadStore, match=why) as refused:
        store_at(address)
    assert not set(SECRET.split("/")) & set(re.split(r"[/:@ ]", str(refused.value)))


def test_a_package_that_is_missing_is_named(monkeypatch):
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(remote.fsspec, "url_to_fs", missing)
    with pytest.raises(BadStore, match=r"pip install 'elasticd\[s3\]'"):
        Remote.at("s3://bucket/x")


def test_a_library_that_connects_at_once_may_fail_in_its_own_way(monkeypatch):
    class AuthenticationException(Exception):
        pass

    def fails(*_: object, **__: object) -> None:
        raise AuthenticationException("Authentication failed.")

    monkeypatch.setattr(remote.fsspec, "url_to_fs", fails)
    with pytest.raises(BadStore, match="is not an address for checkpoints: Authentication failed"):
        Remote.at("sftp://host/x")


def test_a_file_system_without_locks_takes_checkpoints_without(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    name = folder_name(1, 1, "0000000a", 1)
    FilePointer(Disk(tmp_path)).commit(Saved(name, 1, 1, 1, 1.0, 10, "d"), Keep())
    assert [saved.step for saved in FilePointer(Disk(tmp_path)).read().saved] == [1]


def test_a_file_url_is_the_disk(tmp_path):
    assert store_at(f"file://{tmp_path}").url == str(tmp_path) == store_at(tmp_path).url
