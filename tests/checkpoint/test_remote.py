"""Saves to an S3 server that fails, drops connections, delays and disappears. No checkpoint is torn, the user
gets one sentence, and the job continues."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import boto3
import pytest

from elasticd.checkpoint.format.layout import Layout, encode_shares
from elasticd.checkpoint.format.manifest import File, shard_name
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.newest.retention import Keep
from elasticd.checkpoint.server.committing import Committing
from elasticd.checkpoint.server.shards import PendingSave, SavingWorld
from elasticd.checkpoint.storage import store_at
from elasticd.core.checkpoint_names import folder_name, parse_folder
from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.faults import Helper, check, filled
from tests.checkpoint.s3server import PART, SECRET, S3Server, everything, parts, serving, writes

ELEMENTS = 3 << 19  # 12 MiB: a file in two parts


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def forker(server: S3Server) -> Iterator[Helper]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("S3_PART", str(PART))
        with Helper("forker.py") as helper:
            yield helper


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    yield server
    server.mends()


@pytest.fixture
def where(tmp_path) -> str:
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def checkpoints(forker: Helper, where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpoints]:
    name, _ = forker.saver()
    monkeypatch.setenv("ELASTICD_SAVER", name)
    made = Checkpoints(where, last=2)
    yield made
    made.close()


def save(checkpoints: Checkpoints, step: int) -> bool:
    """Save a step. Return whether it was committed."""
    assert checkpoints.save(filled(step, ELEMENTS), step) and checkpoints.wait(90.0)
    return checkpoints.newest is not None and checkpoints.newest.step == step


def resumed(where: str) -> int:
    """Return the step from which a new process would continue. Its whole state must be of that step."""
    state, reader = filled(0, ELEMENTS), Checkpoints(where)
    step = reader.load(state) or 0
    reader.close()
    assert reader.tier in ("", "disk")
    check(state, step)
    return step


def test_the_store_holds_the_kept_checkpoints_and_nothing_else(s3, checkpoints, where):
    for step in (1, 2, 3):
        assert save(checkpoints, step)
    assert resumed(where) == 3
    names = [s.name for s in FilePointer(where).read().saved]
    assert store_at(where).names() == sorted(["committed.json", *names]) and len(names) == 2


@pytest.mark.parametrize(
    "how",
    [
        "flipped",
        pytest.param("truncated", marks=pytest.mark.slow),
        pytest.param("missing", marks=pytest.mark.slow),
    ],
)
def test_an_object_that_is_not_as_it_was_is_named_and_the_one_before_taken(
    s3, checkpoints, where, how, caplog
):
    assert save(checkpoints, 1) and save(checkpoints, 2)
    shard = f"{FilePointer(where).read().saved[-1].name}/__0_0.distcp"
    client, key = boto3.client("s3"), f"{where.removeprefix('s3://bucket/')}/{shard}"
    body = bytearray(client.get_object(Bucket="bucket", Key=key)["Body"].read())
    if how == "missing":
        client.delete_object(Bucket="bucket", Key=key)
    else:
        body[len(body) // 2] ^= 1
        client.put_object(Bucket="bucket", Key=key, Body=bytes(body[: -1 if how == "truncated" else None]))
    assert resumed(where) == 1
    assert f"resuming from step 1, because {shard} is" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_bit_that_is_flipped_on_the_way_from_the_store_is_loaded(s3, checkpoints, where):
    assert save(checkpoints, 1) and save(checkpoints, 2)
    newest = FilePointer(where).read().saved[-1].name
    tries, reads, found = 60, 3, []
    for _ in range(tries):
        fault = s3.fails(
            "flip",
            lambda method, url: method == "GET" and f"{newest}/__0_0" in url,
            fine=random.randrange(reads),
            bad=1,
        )
        found.append(resumed(where))
        assert fault.hits and found[-1] == (1 if fault.hits > fault.fine else 2)
        s3.mends()
    assert found.count(1) > tries // 2


@pytest.mark.parametrize("how", ["500", "drop"])
def test_an_upload_that_fails_for_good_costs_one_checkpoint_and_no_other(s3, checkpoints, where, how):
    assert save(checkpoints, 1)
    s3.fails(how, parts, fine=1)
    assert not save(checkpoints, 2) and checkpoints.failed == 1
    assert "the checkpoint of step 2 was not saved: the shard of rank 0 could not be written" in (
        sentence := checkpoints.last_error
    )
    assert "\n" not in sentence and SECRET not in sentence
    s3.mends()
    assert resumed(where) == 1
    assert save(checkpoints, 3) and checkpoints.failed == 1
    assert resumed(where) == 3
    assert all("step-0000000002" not in name for name in store_at(where).names())


def test_a_store_that_is_away_when_it_is_to_commit_costs_one_checkpoint(s3, checkpoints, where):
    assert save(checkpoints, 1)
    s3.fails(
        "500", lambda method, url: writes(method, url) and url.endswith(("elasticd.json?", "committed.json?"))
    )
    assert not save(checkpoints, 2) and "it could not be committed" in checkpoints.last_error
    s3.mends()
    assert resumed(where) == 1
    assert save(checkpoints, 3) and resumed(where) == 3


class Committed:
    """Whether a request comes after one that wrote the pointer."""

    def __init__(self, then: Callable[[str, str], bool]) -> None:
        self._then = then
        self._written = False

    def __call__(self, method: str, url: str) -> bool:
        if method == "PUT" and url.endswith("committed.json?"):
            self._written = True
            return False
        return self._written and self._then(method, url)


def test_a_store_that_cannot_be_listed_once_it_is_committed_costs_no_checkpoint(
    s3, forker, where, monkeypatch
):
    monkeypatch.setenv("ELASTICD_SAVER", forker.saver()[0])
    checkpoints = Checkpoints(where, last=1)
    assert save(checkpoints, 1)
    fault = s3.fails("500", Committed(lambda method, url: method == "GET" and "list-type" in url))
    assert save(checkpoints, 2) and not checkpoints.failed
    assert fault.hits
    s3.mends()
    assert resumed(where) == 2
    assert save(checkpoints, 3) and not checkpoints.failed
    checkpoints.close()
    forker.until("committed step 3 ")
    monkeypatch.delenv("ELASTICD_SAVER")
    assert resumed(where) == 3
    assert [parse_folder(n).step for n in store_at(where).names() if parse_folder(n)] == [3]


@pytest.mark.slow
def test_a_pointer_that_was_written_and_not_answered_for_keeps_its_checkpoint(s3, forker, where, monkeypatch):
    monkeypatch.setenv("ELASTICD_SAVER", forker.saver()[0])
    checkpoints = Checkpoints(where, last=1)
    assert save(checkpoints, 1)
    pointer = "committed.json?"
    unread = s3.fails("500", Committed(lambda method, url: method in ("GET", "HEAD") and pointer in url))
    mute = s3.fails("mute", lambda method, url: method == "PUT" and pointer in url, bad=1)
    assert not save(checkpoints, 2) and checkpoints.failed == 1
    assert mute.hits and unread.hits
    s3.mends()
    assert resumed(where) == 2
    assert save(checkpoints, 3)
    checkpoints.close()
    forker.until("committed step 3 ")
    monkeypatch.delenv("ELASTICD_SAVER")
    assert resumed(where) == 3


def test_a_slow_store_has_saves_skipped_and_counted_while_training_goes_on(s3, checkpoints, where):
    gate = s3.holds(parts)
    assert [checkpoints.save(filled(n, ELEMENTS), n) for n in range(1, 6)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert checkpoints.skipped == 3
    gate.set()
    assert checkpoints.wait(90.0) and not checkpoints.failed
    assert resumed(where) == 2


def test_a_saver_killed_while_it_uploads_leaves_what_was_committed(s3, forker, where, monkeypatch):
    # A save is seven writing requests: the begin of the parts, two parts, their end, the metadata, the
    # manifest
    # and the pointer.
    committed = 0
    for step, requests in enumerate((1, 2, 5, 6), 1):
        name, pid = forker.saver()
        monkeypatch.setenv("ELASTICD_SAVER", name)
        checkpoints = Checkpoints(where, last=2)
        s3.holds(writes, fine=requests)
        assert checkpoints.save(filled(step, ELEMENTS), step)
        assert s3.stuck.wait(90.0)
        os.kill(pid, signal.SIGKILL)
        checkpoints.wait(90.0)
        s3.mends()
        checkpoints.close()
        monkeypatch.delenv("ELASTICD_SAVER")
        found = resumed(where)
        assert found in (committed, step), "a committed checkpoint was lost"
        committed = found
    name, _ = forker.saver()
    monkeypatch.setenv("ELASTICD_SAVER", name)
    last = Checkpoints(where, last=2)
    assert save(last, 10)
    last.close()
    kept = {s.name for s in FilePointer(where).read().saved}
    left = {n for n in store_at(where).names() if parse_folder(n)}
    assert left == kept, "leftovers stay"


def test_what_other_nodes_have_written_is_asked_for_once_a_node(s3, where):
    nodes, slots = 6, 32
    store, name = store_at(where), folder_name(5, 1, "0000000a", 1)
    committing = Committing(FilePointer)

    def node(n: int) -> tuple[SavingWorld, PendingSave]:
        ranks = range(n * slots, (n + 1) * slots)
        world = SavingWorld(store, "0000000a", 1, 1, nodes * slots, frozenset(ranks), Keep(3))
        save = PendingSave(name, 5, 1.0, time.monotonic(), Layout(encode_shares([], [], [])))
        save.files = {rank: File(shard_name(rank), 1, ["0" * 16]) for rank in ranks}
        return world, save

    for n in range(1, nodes):
        committing.hand_in(*node(n))
    asked = s3.fails("500", everything, fine=1_000_000)
    committing.commit(*node(0))
    assert asked.hits < 2 * nodes + 25  # the library makes two requests to read a file
    assert set(store.sizes(name)) == {".metadata", "elasticd.json"}, "and nothing of it stays"
