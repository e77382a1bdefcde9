"""Each node's shards are also in another node's memory, so the loss of a node needs no read from the disk."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import random
import select
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elasticd.checkpoint import protocol
from elasticd.checkpoint.client.memory_tier import HolderLost, SaverQueries
from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.protocol import (
    BufferFree,
    OpenWorld,
    PlanShard,
    SaveShard,
    ShareBuffer,
    memory_file,
)
from elasticd.checkpoint.replication import peers
from elasticd.checkpoint.replication.peers import PeerSaver
from elasticd.checkpoint.replication.replicas import Label, Replica
from elasticd.checkpoint.replication.wire import PeerGone, Seals, Wire
from elasticd.checkpoint.server import replicating
from elasticd.checkpoint.server.replicating import Replication
from elasticd.checkpoint.shared_memory import Memory
from elasticd.checkpoint.storage import store_at
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.facts import SaverAddress
from elasticd.daemon.node_saver import etcd_peers
from tests.channel.starved import Accepts, descriptors
from tests.checkpoint.faults import Helper, held_by, served


class Nodes:
    """Savers that hold copies for each other, and the worlds that save with them."""

    def __init__(self, folder: Path, savers: Helper, worlds: Helper) -> None:
        self.path = folder / "run"
        self.peers = folder / "peers"
        self.peers.mkdir()
        self.folder = folder
        self.savers, self.worlds = savers, worlds
        self.names: dict[str, str] = {}
        self.pids: dict[str, int] = {}
        self._numbers = itertools.count()

    def start(self, *nodes: str, **options: Any) -> None:
        for node in nodes:
            name, pid = self.savers.saver(linger_s=None, node=node, peers=str(self.peers), **options)
            self.names[node], self.pids[node] = name, pid

    def lose(self, node: str) -> None:
        pidfd = os.pidfd_open(self.pids[node])
        os.kill(self.pids[node], signal.SIGKILL)
        select.select([pidfd], [], [], 60.0)
        os.close(pidfd)

    def begin(self, *nodes: str, saves: int, kind: str = "replicated") -> None:
        store = self.folder / f"store{next(self._numbers)}"
        order = {
            "size": len(nodes),
            "path": str(self.path),
            "store": str(store),
            "kind": kind,
            "saves": saves,
        }
        for rank, node in enumerate(nodes):
            self.worlds.ask(rank=rank, saver=self.names[node], node=node, **order)

    def run(self, *nodes: str, saves: int, kind: str = "replicated") -> list[tuple[int, str]]:
        """Run a world with a rank on each of these nodes to its end. Return the step and the tier from
        which each rank resumed."""
        self.begin(*nodes, saves=saves, kind=kind)
        first = len(self.worlds.said)
        for _ in nodes:
            self.worlds.until("ended")
        said = [line.split() for line in self.worlds.said[first:]]
        resumed = {int(w[1]): (int(w[2]), w[3]) for w in said if w[0] == "resumed"}
        return [resumed[rank] for rank in range(len(nodes))]

    def burn_the_disk(self) -> None:
        for saved in FilePointer(store_at(self.path)).read().saved:
            shutil.rmtree(
                self.path / saved.name, ignore_errors=True
            )  # the saver may remove it at the same time

    def holder(self, node: str) -> SaverAddress:
        return msgspec.json.decode((self.peers / node).read_bytes(), type=SaverAddress)


@pytest.fixture
def nodes(tmp_path: Path, forker: Helper, worlds: Helper) -> Nodes:
    return Nodes(tmp_path, forker, worlds)


@pytest.mark.parametrize("kind", [pytest.param("replicated", marks=pytest.mark.slow), "sharded"])
def test_a_world_of_any_size_after_a_lost_node_reads_nothing_from_disk(nodes, kind):
    nodes.start("a", "b", "c")
    assert nodes.run("a", "a", "b", "c", saves=2, kind=kind) == [(0, "nothing")] * 4
    nodes.burn_the_disk()
    nodes.lose("a")
    assert nodes.run("b", "c", "c", saves=1, kind=kind) == [(2, "peer")] * 3
    nodes.burn_the_disk()
    nodes.start("d")  # a node without a shard in memory
    assert nodes.run("d", "b", saves=1, kind=kind) == [(3, "peer")] * 2


def test_workers_that_all_restart_read_this_node_s_memory_and_its_neighbours(nodes):
    nodes.start("a", "b")
    nodes.run("a", "b", saves=2)
    nodes.burn_the_disk()
    assert {tier for _, tier in nodes.run("a", "b", saves=1)} == {"memory"}, "each node holds all shards"


def test_two_lost_nodes_of_two_cost_what_is_not_on_disk(nodes):
    nodes.start("a", "b")
    nodes.run("a", "b", saves=2)
    nodes.lose("a")
    nodes.lose("b")
    nodes.start("c")
    assert nodes.run("c", saves=1) == [(2, "disk")]


def test_memory_for_others_is_two_shards_each_and_old_worlds_are_forgotten(nodes):
    nodes.start("a", "b")
    nodes.run("a", "b", saves=1)
    one = held_by(nodes.pids["a"])
    nodes.run("a", "b", saves=5)
    assert held_by(nodes.pids["a"]) <= 2.1 * one  # two steps of its own shard and of b's
    nodes.run("b", saves=3)
    assert held_by(nodes.pids["b"]) <= 2.1 * one


def test_strangers_are_told_nothing_and_damage_on_the_way_is_noticed(nodes):
    nodes.start("a", "b")
    nodes.run("a", "b", saves=1)
    holder = nodes.holder("a")
    with pytest.raises(PeerGone):
        PeerSaver(replace(holder, secret="guessed"))
    with PeerSaver(holder) as peer:  # with the secret
        [offer] = peer.offers(str(nodes.path))
        assert offer.step == 1 and 1 in offer.ranks
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(200)):
        with socket.create_connection((holder.host, holder.port)) as stranger:
            answer = b""
            with suppress(OSError):  # the saver may close the connection at any of these calls
                stranger.sendall(nonsense)
                stranger.shutdown(socket.SHUT_WR)
                while some := stranger.recv(4096):
                    answer += some
            assert len(answer) <= 32  # the saver's random bytes, and no more
    with PeerSaver(holder) as peer, pytest.raises(PeerGone):
        peer.index(str(nodes.path), "../../etc/passwd")
    assert {tier for _, tier in nodes.run("a", "b", saves=1)} == {"memory"}, "it serves on"


class Alone:
    """A saver without other savers."""

    def find(self, node: str) -> SaverAddress:
        raise PeerGone(node)

    def others(self) -> list[SaverAddress]:
        return []


def test_idle_connections_of_strangers_do_not_block_other_clients(monkeypatch):
    monkeypatch.setattr("elasticd.checkpoint.server.replicating._STRANGERS_MAX", 8)
    here, me = etcd_peers.listen("a", "127.0.0.1")
    with served(replication=Replication(me, here, Alone())), ExitStack() as lines:
        strangers = [lines.enter_context(socket.create_connection((me.host, me.port))) for _ in range(140)]
        with PeerSaver(me) as peer:
            assert peer.offers("/anywhere") == []
        for stranger in strangers[:-8]:
            stranger.settimeout(60.0)
            with suppress(ConnectionResetError):
                while stranger.recv(64):
                    pass  # the saver's random bytes, until the end of the connection


def test_a_caller_without_a_descriptor_for_it_is_served_later_and_costs_little_meanwhile(monkeypatch):
    here, me = etcd_peers.listen("a", "127.0.0.1")
    with served(replication=Replication(me, here, Alone())), socket.socket() as caller:
        accepts = Accepts(monkeypatch)
        with descriptors(0):
            caller.connect((me.host, me.port))
            assert accepts.time_of(21) > 0.19
        with PeerSaver(me) as peer:
            assert peer.offers("/anywhere") == []


def test_a_caller_that_waits_for_its_turn_is_kept_from_timing_out(monkeypatch):
    monkeypatch.setattr("elasticd.checkpoint.server.replicating._CALLERS_MAX", 1)
    monkeypatch.setattr("elasticd.checkpoint.server.replicating.SILENCE_S", 0.04)
    here, me = etcd_peers.listen("a", "127.0.0.1")
    with served(replication=Replication(me, here, Alone())), ThreadPoolExecutor(1) as thread:
        first = PeerSaver(me)
        assert first.offers("/anywhere") == []  # the connection stays open
        with Wire.connect(me.host, me.port, me.secret) as second:
            second.send_message({"do": "offers", "path": "/anywhere"})
            assert [second.receive_message() for _ in range(3)] == [{"wait": True}] * 3
        third = thread.submit(lambda: PeerSaver(me).offers("/anywhere"))
        first.close()
        assert third.result(60.0) == []


def stored(me: SaverAddress, step: int, size: int = 1000) -> None:
    label = Label("/run", folder_name(step, 1, "0000000a", step), 1, step, 1, 0)
    with PeerSaver(me) as peer:
        peer.store_replica(label, b"{}", memoryview(bytes(size)))


def test_a_node_with_room_for_two_copies_of_a_shard_always_has_the_newest_two(monkeypatch):
    here, me = etcd_peers.listen("a", "127.0.0.1")
    replication = Replication(me, here, Alone())
    held = replication._replicas
    monkeypatch.setattr(replicating, "available", lambda: 2500 - sum(its.memory.size for its in held))
    with served(replication=replication):
        for step in range(1, 6):
            stored(me, step)
        with PeerSaver(me) as peer:
            assert sorted(offer.step for offer in peer.offers("/run")) == [4, 5]


def test_a_caller_is_kept_from_timing_out_while_memory_is_made_for_its_shard(monkeypatch):
    """The kernel clears memory at about a gigabyte in a second."""
    here, me = etcd_peers.listen("a", "127.0.0.1")
    replication, waits = Replication(me, here, Alone()), threading.Semaphore(0)
    make, send = Memory.make, Wire.send_message

    def sends(self: Wire, message: dict[str, Any]) -> None:
        send(self, message)
        if message == {"wait": True}:
            waits.release()

    def slowly(size: int) -> Memory:
        for _ in range(3):
            assert waits.acquire(timeout=60.0)
        return make(size)

    monkeypatch.setattr(peers, "SILENCE_S", 0.04)
    monkeypatch.setattr(Wire, "send_message", sends)
    monkeypatch.setattr(Memory, "make", slowly)
    with served(replication=replication):
        stored(me, 1)
        with PeerSaver(me) as peer:
            assert [offer.step for offer in peer.offers("/run")] == [1]


def test_a_caller_for_whom_there_is_no_thread_is_served_later_and_ends_no_saver(monkeypatch):
    here, me = etcd_peers.listen("a", "127.0.0.1")
    start, refused = threading.Thread.start, []

    def at_a_limit(self: threading.Thread) -> None:
        if self.name == "peer" and not refused:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", at_a_limit)
    with served(replication=Replication(me, here, Alone())):
        with pytest.raises(PeerGone):
            PeerSaver(me)
        with PeerSaver(me) as peer:
            assert peer.offers("/run") == []


class Pushed(Replication):
    """Copies nothing, and tells which shards it was to copy."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ranks: queue.SimpleQueue[int] = queue.SimpleQueue()

    def push(self, node: str, label: Label, layout: Layout, memory: Memory, then: Any) -> None:
        self.ranks.put(label.rank)
        self.jobs.run(self._senders, lambda: None, lambda _: then(""))


def test_shards_are_copied_to_the_other_node_also_when_the_disk_has_failed_one_already(tmp_path):
    here, me = etcd_peers.listen("a", "127.0.0.1")
    name, pushed = folder_name(7, 1, "0000000a", 1), Pushed(me, here, Alone())
    (tmp_path / name).mkdir()
    (tmp_path / name / "__0_0.distcp").touch()  # rank 0's shard cannot be written
    with served(replication=pushed) as saver, ExitStack() as lines:
        for rank in (0, 1):
            line = lines.enter_context(closing(protocol.connect(saver)))
            where = str(tmp_path), "0000000a", rank, 3, 1, 1, (0, 1)
            line.send(OpenWorld(*where, holder="b", last=3, every=0))
            layout, memory = memory_file(b""), Memory.make(64)
            line.send(PlanShard(1, 64), (layout,))
            line.send(ShareBuffer(1, 0), (memory.fd,))
            os.close(layout)
            line.send(SaveShard(1, 0, 7, name, at=1.0))
            assert pushed.ranks.get(timeout=60.0) == rank
            while not isinstance(protocol.answer(line)[0], BufferFree):
                pass


def test_what_thousands_of_nodes_hold_is_told_to_a_worker_that_takes_its_time(tmp_path: Path) -> None:
    path, memory = str(tmp_path), Memory.make(1)
    here, me = etcd_peers.listen("a", "127.0.0.1")
    replication = Replication(me, here, Alone())
    for n in range(3000):
        label = Label(path, folder_name(1, 1, "0000000a", n), 1, 1, 3000, n)
        replication._replicas.keep(Replica(label, Layout(b""), memory))
    with served(replication=replication) as name:
        queries = SaverQueries(name, path)
        assert {offer.name for offer in queries.survey()} == {
            folder_name(1, 1, "0000000a", n) for n in range(3000)
        }
        queries.close()


class Many(Alone):
    """A job of so many nodes that no worker may list their savers."""

    def find(self, node: str) -> SaverAddress:
        if node == "lost":
            raise PeerGone(node)
        return SaverAddress(node, "127.0.0.1", 1, "secret")

    def others(self) -> list[SaverAddress]:
        raise AssertionError("all addresses are listed")


def test_a_worker_asks_only_for_the_addresses_of_nodes_that_it_reads_from(tmp_path: Path) -> None:
    here, me = etcd_peers.listen("a", "127.0.0.1")
    with served(replication=Replication(me, here, Many())) as name:
        queries = SaverQueries(name, str(tmp_path))
        assert queries._savers({"b", "c"}).keys() == {"b", "c"}
        with pytest.raises(HolderLost, match="lost: the address of its saver is not known"):
            queries._savers({"b", "lost"})
        queries.close()


BITS = 300


def test_no_bit_flipped_between_two_nodes_is_taken():
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    weights = chance.randbytes(20_000)
    for _ in range(BITS):
        ours, theirs = socket.socketpair()
        seals = Seals("secret", b"a", b"b", server=False), Seals("secret", b"b", b"a", server=True)
        with Wire(ours, seals[0]) as sender, Wire(theirs, seals[1]) as receiver:
            sender.send_data(memoryview(weights))
            raw = bytearray(theirs.recv(1 << 16))
            bit = chance.randrange(8 * len(raw))
            raw[bit // 8] ^= 1 << bit % 8
            ours.sendall(raw)
            with pytest.raises(PeerGone):
                receiver.receive_data(memoryview(bytearray(len(weights))))


def test_a_shard_that_its_node_cannot_write_fails_the_checkpoint_on_all_nodes(nodes):
    nodes.start("a")
    nodes.start("b", fail=["fsync", 0, 1, errno.EIO])
    nodes.begin("a", "b", saves=0)
    failed = nodes.savers.until("step 1 was not saved as")
    assert "the shard of rank 1 could not be written" in " ".join(failed)
    nodes.savers.until("committed step ")
    assert 1 not in [s.step for s in FilePointer(store_at(nodes.path)).read().saved]


@pytest.mark.slow
def test_a_shard_of_one_rank_from_another_save_is_noticed(nodes):
    nodes.start("a", "b")
    nodes.run("a", "b", saves=2)
    one, two = (nodes.path / saved.name / "__1_0.distcp" for saved in FilePointer(nodes.path).read().saved)
    shutil.copy(one, two)
    for node in ("a", "b"):
        nodes.lose(node)
    nodes.start("c", "d")
    assert nodes.run("c", "d", saves=1) == [(1, "disk")] * 2
