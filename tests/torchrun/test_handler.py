"""Torch's contract for a rendezvous handler, kept on a real etcd."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torchrun_harness import PATIENCE_S, Nodes, until

from elasticd.etcd.blocking_client import Client
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.errors import StoreRefused
from elasticd.torchrun import create
from elasticd.torchrun.rendezvous_records import prefix_of
from tests.etcd.cluster import EtcdOnPorts


def test_all_nodes_get_one_world_and_one_store(nodes: Nodes) -> None:
    three = [nodes.new(3, 3) for _ in range(3)]
    infos = nodes.joined(*three)
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert {info.world_size for info in infos} == {3}
    assert len({(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}) == 1
    infos[0].store.set("key", "value")
    assert [info.store.get("key") for info in infos] == [b"value"] * 3
    assert [handler.num_nodes_waiting() for handler in three] == [0, 0, 0]


def test_the_handler_has_torch_s_names_for_its_back_end_and_run(nodes: Nodes, run_id: str) -> None:
    handler = nodes.new()
    assert handler.get_backend() == "etcd-v3"
    assert handler.get_run_id() == run_id
    assert handler.use_agent_store


def test_each_round_has_a_fresh_store(nodes: Nodes) -> None:
    handler = nodes.new()
    [first] = nodes.joined(handler)
    first.store.set("key", "stale")
    [second] = nodes.joined(handler)
    assert not second.store.check(["key"])


def test_the_store_listens_on_the_nodes_address_alone(nodes: Nodes) -> None:
    [info] = nodes.joined(nodes.new())
    where = info.bootstrap_store_info
    assert where is not None
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert [a.ip for a in listening if a.port == where.master_port] == [where.master_addr] == ["127.0.0.1"]


def test_workers_may_host_their_own_store(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = nodes.new()
    [info] = nodes.joined(handler)
    assert not handler.use_agent_store
    where = info.bootstrap_store_info
    assert where is not None
    used = {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    assert where.master_port not in used


def test_a_newcomer_is_seen_and_joins_with_the_survivors_in_their_places(nodes: Nodes) -> None:
    old = [nodes.new(2, 3) for _ in range(2)]
    ranks = [info.rank for info in nodes.joined(*old)]
    [newcomer] = nodes.join(nodes.new(2, 3))
    for handler in old:
        until(lambda handler=handler: handler.num_nodes_waiting() == 1, handler)
    infos = nodes.joined(*old)
    assert [info.rank for info in infos] == ranks
    assert newcomer.result(PATIENCE_S).rank == 2


def test_a_lost_node_is_seen_by_its_lease_and_the_others_go_on(nodes: Nodes) -> None:
    three = [nodes.new(2, 3) for _ in range(3)]
    by_rank = {handler: info.rank for handler, info in zip(three, nodes.fill(*three), strict=True)}
    first, *rest = sorted(three, key=lambda handler: by_rank[handler])
    lose(first)
    for handler in rest:
        until(lambda handler=handler: handler.num_nodes_waiting() > 0, handler)
    infos = nodes.joined(*rest)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]


def lose(handler: object) -> None:
    """Act as if the node's machine were unplugged: nothing is released, and no keep-alive is sent."""
    handler._membership._link.close()  # type: ignore[attr-defined]


def test_a_node_beyond_the_maximum_is_spare_and_takes_the_place_of_a_lost_one(nodes: Nodes) -> None:
    pair = [nodes.new(1, 2) for _ in range(2)]
    nodes.fill(*pair)
    spare = nodes.new(1, 2, join_timeout=6)  # a spare node does not use up its patience
    [waiting] = nodes.join(spare)
    with pytest.raises(TimeoutError):
        waiting.result(6.5)
    assert pair[0].num_nodes_waiting() == 0
    lose(pair[1])
    until(lambda: pair[0].num_nodes_waiting() > 0, pair[0])
    [info] = nodes.joined(pair[0])
    assert (info.world_size, waiting.result(PATIENCE_S).rank) == (2, 1)


def test_a_spare_node_exits_gracefully_when_the_job_is_over(nodes: Nodes) -> None:
    member = nodes.new()
    nodes.joined(member)
    [spare] = nodes.join(nodes.new())
    until(lambda: len(member._membership._nodes) == 2, member)
    assert member.shutdown()
    with pytest.raises((RendezvousGracefulExitError, RendezvousClosedError)):
        spare.result(PATIENCE_S)


def test_too_few_nodes_time_out_and_leave_nothing_behind(nodes: Nodes, etcd: Embedded, run_id: str) -> None:
    with pytest.raises(RendezvousTimeoutError, match="for 2 nodes; there are 1"):
        nodes.joined(nodes.new(2, 2, join_timeout=1))
    with Client(etcd.access) as client:
        assert client.list_raw(prefix_of(run_id).encode()).items == ()


def test_a_node_that_timed_out_does_not_close_the_rendezvous_for_the_others(nodes: Nodes) -> None:
    lonely = nodes.new(2, 2, join_timeout=1)
    with pytest.raises(RendezvousTimeoutError):
        nodes.joined(lonely)
    assert lonely.shutdown()
    pair = [nodes.new(2, 2) for _ in range(2)]
    assert {info.world_size for info in nodes.joined(*pair)} == {2}


def test_all_nodes_see_the_close_and_no_node_joins_afterwards(nodes: Nodes) -> None:
    first, second = nodes.new(2, 2), nodes.new(2, 2)
    nodes.joined(first, second)
    assert not second.is_closed()
    first.set_closed()
    assert first.is_closed() and second.is_closed()
    first.set_closed()  # a second call does no harm
    until(lambda: second.num_nodes_waiting() == 0 and second._ended, second)
    for handler in (second, nodes.new(1, 2)):
        with pytest.raises(RendezvousClosedError, match="another job needs another --rdzv-id"):
            nodes.joined(handler)


def test_a_member_that_shuts_down_closes_and_the_others_may_end_in_peace(nodes: Nodes) -> None:
    first, second = nodes.new(2, 2), nodes.new(2, 2)
    nodes.joined(first, second)
    assert first.shutdown()
    until(lambda: len(second._membership._nodes) == 1, second)
    assert second.num_nodes_waiting() == 0
    assert second.is_closed()
    assert second.shutdown()
    assert second.shutdown()  # a second call does no harm


def test_a_member_whose_job_failed_stops_the_others_and_then_the_id_is_free_again(nodes: Nodes) -> None:
    first, second = nodes.new(2, 2), nodes.new(2, 2)
    nodes.joined(first, second)
    with pytest.raises(ArithmeticError):  # noqa: PT012
        try:
            raise ArithmeticError("the workers failed")
        finally:
            first.shutdown()  # as torch's launcher does
    until(lambda: second.num_nodes_waiting() == 1, second)
    with pytest.raises(RendezvousClosedError, match="its workers failed"):
        nodes.joined(second)
    again = [nodes.new(2, 2) for _ in range(2)]
    assert {info.world_size for info in nodes.joined(*again)} == {2}


def test_a_node_that_etcd_refuses_at_the_end_says_so_and_its_job_s_result_stands(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler = nodes.new(1, 1)
    nodes.joined(handler)
    refused = StoreRefused("etcd: permission denied")

    def get_state() -> None:
        raise RendezvousConnectionError(str(refused))

    monkeypatch.setattr(handler._membership.backend, "get_state", get_state)
    handler._membership.failed(refused)
    assert not handler.shutdown()
    assert "could not be closed: etcd: permission denied" in caplog.text


def test_a_superseded_node_cannot_close_the_new_world(nodes: Nodes) -> None:
    first, second = nodes.new(1, 2), nodes.new(1, 2)
    nodes.fill(first, second)
    first._membership._link.leases.close()  # the lease runs out while the node looks away
    until(lambda: second.num_nodes_waiting() > 0, second)
    nodes.joined(second)
    first.shutdown()
    assert not second.is_closed()
    assert second.num_nodes_waiting() == 0


def test_a_node_whose_lease_ran_out_is_told_to_join_again(nodes: Nodes) -> None:
    handler = nodes.new()
    nodes.joined(handler)
    handler._membership._link.calls.call("revoke", revoke_request(handler._membership._lease.id))
    until(lambda: handler.num_nodes_waiting() > 0, handler)
    assert nodes.joined(handler)[0].world_size == 1


def revoke_request(lease: int) -> object:
    from elasticd.etcd._client3 import rpc

    return rpc.LeaseRevokeRequest(ID=lease)


def test_a_blocking_store_call_does_not_hold_up_the_keep_alive(nodes: Nodes) -> None:
    handler = nodes.new(ttl=2, read_timeout=3)
    [info] = nodes.joined(handler)
    membership = handler._membership
    lease = membership._lease.id
    with pytest.raises(DistStoreError):
        info.store.get("never")  # waits for the store's 3 s, longer than a lease
    assert handler.num_nodes_waiting() == 0
    assert membership._lease.id == lease


def test_a_member_lost_while_a_round_begins_is_not_waited_for(nodes: Nodes) -> None:
    first, second = nodes.new(1, 2, settle_s=1), nodes.new(1, 2, settle_s=1)

    def unplugged(*_: object) -> None:
        lose(second)
        raise OSError("its machine is gone")

    second._enter = unplugged  # type: ignore[assignment, method-assign]
    info = nodes.join(first, second)[0].result(PATIENCE_S)
    assert (info.rank, info.world_size) == (0, 1)


def test_a_world_outlives_a_restart_of_etcd(run_id: str) -> None:
    server = EtcdOnPorts()
    nodes = Nodes(server.start().endpoints[0], run_id)
    try:
        handler = nodes.new(ttl=5)
        nodes.joined(handler)
        membership = handler._membership
        server.stop(remove=False)
        assert handler.num_nodes_waiting() == 0
        server.start()
        before = membership._revision
        with Client(server.access) as client:
            client.swap_raw(prefix_of(run_id).encode() + b"ping", b"", 0)
        until(lambda: membership._revision > before, handler)
        assert handler.num_nodes_waiting() == 0
        assert nodes.joined(handler)[0].world_size == 1
    finally:
        nodes.close()
        server.stop()


def test_etcd_that_is_not_there_is_a_connection_error(run_id: str) -> None:
    handler = create(RendezvousParameters("etcd-v3", "127.0.0.1:1", run_id, 1, 1, read_timeout=1))
    with pytest.raises(RendezvousConnectionError, match="nothing listens at 127.0.0.1:1"):
        handler.next_rendezvous()
    assert handler.shutdown()


class Hostile:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("key", ["round", "nodes/evil"])
def test_nothing_from_etcd_is_unpickled(
    nodes: Nodes, etcd: Embedded, run_id: str, tmp_path: Path, key: str
) -> None:
    with Client(etcd.access) as client:
        client.swap_raw((prefix_of(run_id) + key).encode(), pickle.dumps(Hostile(tmp_path / "mark")), 0)
    with pytest.raises(RendezvousStateError):
        nodes.joined(nodes.new())
    assert not (tmp_path / "mark").exists()


def test_a_loopback_address_does_not_join_others(nodes: Nodes, etcd: Embedded) -> None:
    member = nodes.new(1, 2)
    nodes.joined(member)
    stranger = create(
        RendezvousParameters("etcd-v3", etcd.endpoint, member.get_run_id(), 1, 2, local_addr="0.0.0.0")
    )
    with pytest.raises(RendezvousConnectionError, match="give --local-addr"):
        stranger.next_rendezvous()
    assert member.num_nodes_waiting() == 0
