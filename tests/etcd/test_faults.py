"""Faults of etcd and of the network that the simulated store does not have."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.core.facts import Budget, Leadership, Report
from elasticd.core.ports import (
    Applied,
    Delete,
    LeaseExpired,
    LeaseHeld,
    Listing,
    NoAnswer,
    Put,
    Refused,
    StoreSilent,
)
from elasticd.etcd import connection, kv, watcher
from elasticd.etcd._client3 import rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.connection import Connection
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.errors import BadRecord, NewerRecord, StoreError, StoreUnavailable
from elasticd.etcd.store import EtcdLink, EtcdStore

from .cluster import Cluster, await_serving, compact, freeze
from .conftest import Heard, Proxy, write

Open = Callable[..., EtcdStore]


def budgets(heard: Heard) -> list[int]:
    return [e.fact.total for what in heard for e in what.entries if isinstance(e.fact, Budget)]


def test_a_garbage_value_is_told_and_skipped_and_ends_no_watch(
    etcd: Embedded, heard: Heard, open_store: Open
) -> None:
    problems = Heard()
    store = open_store(etcd.access, problems=problems)
    with Client(etcd.access) as client:
        client.swap_raw(b"/elasticd/job/nodes/bad", b"\x80\x04 a pickle", 0)
        store.watch("", heard, prefix=True)
        heard.until(lambda: heard)
        assert heard[0].entries == ()
        client.swap_raw(b"/elasticd/job/spec", b'{"v":99}', 0)
        client.swap_raw(b"/elasticd/job/nodes/\xff\xfe", b"junk", 0)
        client.swap_raw(b"/elasticd/job/somebody-elses", b"of some other time", 0)
    write(store, 1)
    heard.until(lambda: budgets(heard) == [1])
    assert [(type(p), p.key) for p in problems] == [
        (BadRecord, "nodes/bad"),
        (NewerRecord, "spec"),
        (BadRecord, "nodes/\ufffd\ufffd"),
    ]


def test_a_call_back_that_raises_ends_nothing(etcd: Embedded, heard: Heard, open_store: Open) -> None:
    store = open_store(etcd.access, 2)

    def fail(what: Any) -> None:
        heard(what)
        raise RuntimeError("a bug of the caller")

    store.watch("", fail, prefix=True)
    store.hold_lease(fail)
    store.transact((), (Put("budget", Budget(total=1)),), fail)
    store.transact((), (Put("budget", Budget(total=2)),), fail)
    heard.until(lambda: sum(isinstance(w, Applied) for w in heard) == 2)
    heard.until(lambda: sum(isinstance(w, LeaseHeld) for w in heard) >= 4)
    write(store, 3)
    heard.until(lambda: any(getattr(e, "fact", None) == Budget(total=3) for w in heard for e in _entries(w)))


def _entries(what: Any) -> tuple[Any, ...]:
    return getattr(what, "entries", ())


def test_a_watch_that_fell_behind_a_compaction_lists_again(
    etcd: Embedded, proxy: Proxy, heard: Heard, open_store: Open
) -> None:
    near, far = open_store(etcd.access), open_store(EtcdAccess((proxy.endpoint,)))
    far.watch("", heard, prefix=True)
    heard.until(lambda: heard)
    proxy.mute()
    proxy.hang_up()
    for total in range(1, 6):
        write(near, total)
    compact(etcd.access)
    proxy.pass_on()
    heard.until(lambda: budgets(heard)[-1:] == [5])
    write(near, 6)
    heard.until(lambda: budgets(heard)[-1:] == [6])
    assert [type(what) for what in heard].count(Listing) == 2
    assert budgets(heard) == [5, 6]


def test_where_a_thread_cannot_start_once_the_lease_is_renewed_and_the_watch_goes_on(
    etcd: Embedded, heard: Heard, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC starts a thread for a request. At a limit of processes there may be none for a moment."""
    start, refused = threading.Thread.start, set[str]()

    def at_a_limit(self: threading.Thread) -> None:
        asks = threading.current_thread().name
        if asks in ("etcd-lease", "etcd-watch") and asks not in refused:
            refused.add(asks)
            raise RuntimeError("can't start new thread")
        start(self)

    store = open_store(etcd.access, 2)
    store.hold_lease(heard)
    heard.until(lambda: len(heard) >= 2)
    monkeypatch.setattr(threading.Thread, "start", at_a_limit)
    store.watch("", heard, prefix=True)
    heard.until(lambda: refused == {"etcd-lease", "etcd-watch"})
    seen = len(heard)
    heard.until(lambda: sum(isinstance(what, LeaseHeld) for what in heard[seen:]) >= 2)
    write(store, 1)
    heard.until(lambda: budgets([what for what in heard if hasattr(what, "entries")]) == [1])


def test_what_is_watched_is_listed_again_once_a_lease_has_ended(
    etcd: Embedded, heard: Heard, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd may have been wiped, and may have as many revisions again."""
    leases, store = Heard(), open_store(etcd.access, 2)
    store.hold_lease(leases)
    store.watch("", heard, prefix=True)
    leases.until(lambda: leases)
    heard.until(lambda: heard)
    with Client(etcd.access) as client:
        client._connection.call("revoke", rpc.LeaseRevokeRequest(ID=store._lease.id))
    leases.until(lambda: any(isinstance(news, LeaseExpired) for news in leases))
    heard.until(lambda: [type(what) for what in heard].count(Listing) == 2)
    write(store, 1)
    heard.until(lambda: budgets(heard) == [1])


def test_a_watch_gone_mute_is_noticed_and_made_anew(
    etcd: Embedded, proxy: Proxy, heard: Heard, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "QUIET_S", 0.2)
    monkeypatch.setattr(watcher, "ANSWER_S", 0.5)
    kept = [(name, value) for name, value in connection._OPTIONS if "keepalive" not in name]
    monkeypatch.setattr(connection, "_OPTIONS", kept)  # the test must notice the silence before gRPC does
    near = open_store(etcd.access)
    # The first endpoint goes mute. The other one serves.
    far = open_store(EtcdAccess((proxy.endpoint, etcd.endpoint)))
    far.watch("", heard, prefix=True)
    heard.until(lambda: heard)
    proxy.mute()
    write(near, 1)
    heard.until(lambda: budgets(heard) == [1])


def test_a_quiet_watch_is_not_taken_for_a_mute_one(
    etcd: Embedded, heard: Heard, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Semaphore(0)
    monkeypatch.setattr(watcher, "QUIET_S", 0.05)

    def progress_request() -> dict[str, Any]:
        asked.release()
        return {}

    broken: list[StoreError] = []
    monkeypatch.setattr(watcher.rpc, "WatchProgressRequest", progress_request)
    monkeypatch.setattr(watcher.Watcher, "_broken", lambda self, error: broken.append(error))
    store = open_store(etcd.access)
    store.watch("", heard, prefix=True)
    for _ in range(5):
        assert asked.acquire(timeout=60)
    write(store, 1)
    heard.until(lambda: budgets(heard) == [1])
    assert broken == []


def test_a_lease_is_held_from_before_it_was_asked_for(
    etcd: Embedded, heard: Heard, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    start = Connection.start

    def slow(self: Connection, *args: Any, done: Any, **kwargs: Any) -> None:
        def late(result: Any) -> None:
            now[0] += 1.5
            done(result)

        start(self, *args, done=late, **kwargs)

    monkeypatch.setattr(Connection, "start", slow)
    store = open_store(etcd.access, 5, clock=lambda: now[0])
    store.hold_lease(heard)
    heard.until(lambda: heard)
    assert heard[0] == LeaseHeld(1000.0 + 5.0)


def test_a_transaction_that_hangs_holds_up_no_keep_alive(
    etcd: Embedded, heard: Heard, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(etcd.access, 2)
    let_go = threading.Event()
    call = Connection.call

    def slow(self: Connection, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "txn":
            let_go.wait()
        return call(self, method, *args, **kwargs)

    monkeypatch.setattr(Connection, "call", slow)
    answers = Heard()
    store.transact((), (Put("budget", Budget()),), answers)
    store.hold_lease(heard)
    heard.until(lambda: sum(isinstance(n, LeaseHeld) for n in heard) >= 6)  # twice the lease's duration
    assert not any(isinstance(n, LeaseExpired | StoreSilent) for n in heard)
    assert answers == []
    let_go.set()
    answers.until(lambda: answers)
    assert isinstance(answers[0], Applied)


def test_an_answer_that_blocks_holds_up_no_keep_alive(etcd: Embedded, heard: Heard, open_store: Open) -> None:
    store = open_store(etcd.access, 2)
    let_go, blocked = threading.Event(), threading.Event()

    def block(_: Any) -> None:
        blocked.set()
        let_go.wait()

    store.hold_lease(heard)
    store.watch("", block, prefix=True)
    store.transact((), (Put("budget", Budget()),), block)
    assert blocked.wait(60)
    already = len(heard)
    heard.until(lambda: sum(isinstance(n, LeaseHeld) for n in heard[already:]) >= 6)
    let_go.set()
    assert not any(isinstance(n, LeaseExpired | StoreSilent) for n in heard)


def test_a_lease_that_runs_out_behind_a_mute_network_is_told_once_it_is_back(
    etcd: Embedded, proxy: Proxy, heard: Heard, open_store: Open
) -> None:
    near, far = open_store(etcd.access), open_store(EtcdAccess((proxy.endpoint,)), 2)
    seen, answers = Heard(), Heard()
    near.watch("leader", seen)
    far.hold_lease(heard)
    far.transact((), (Put("leader", Leadership("far", "i"), leased=True),), answers)
    answers.until(lambda: answers)
    assert isinstance(answers[0], Applied)
    proxy.mute()
    heard.until(lambda: isinstance(heard[-1], StoreSilent))
    seen.until(lambda: seen[-1].entries and seen[-1].entries[0].fact is None)
    proxy.pass_on()
    heard.until(lambda: isinstance(heard[-1], LeaseHeld) and any(isinstance(n, LeaseExpired) for n in heard))


def test_a_lease_revoked_unnoticed_refuses_a_leased_put(
    etcd: Embedded, heard: Heard, open_store: Open
) -> None:
    store = open_store(etcd.access, 60)
    store.hold_lease(heard)
    heard.until(lambda: heard)
    assert store._lease is not None
    with Client(etcd.access) as client:
        client.revoke(store._lease.id)
    answers = Heard()
    store.transact((), (Put("leader", Leadership("a", "i"), leased=True),), answers)
    answers.until(lambda: answers)
    assert answers == [Refused()]
    heard.until(
        lambda: [type(n) for n in heard[-2:]] == [LeaseExpired, LeaseHeld]
    )  # long before a renewal was due


def test_silence_of_a_stopped_etcd_is_not_being_cut_off(
    etcd: Embedded, heard: Heard, open_store: Open
) -> None:
    store = open_store(etcd.access, 2)
    store.hold_lease(heard)
    heard.until(lambda: heard)
    freeze(etcd.pid)
    heard.until(lambda: isinstance(heard[-1], StoreSilent))
    assert heard[-1].cut_off is False
    assert heard[-1].since < next(n.until for n in reversed(heard) if isinstance(n, LeaseHeld))
    os.kill(etcd.pid, signal.SIGCONT)


def test_silence_when_most_hosts_are_out_of_reach_is_being_cut_off(
    etcd: Embedded, deaf: str, heard: Heard, open_store: Open
) -> None:
    access = EtcdAccess((etcd.endpoint, deaf, deaf.replace("127.0.0.1", "localhost")))
    store = open_store(access, 2)
    store.hold_lease(heard)
    heard.until(lambda: any(isinstance(n, LeaseHeld) for n in heard))
    freeze(etcd.pid)
    heard.until(lambda: isinstance(heard[-1], StoreSilent))
    assert heard[-1].cut_off is True
    os.kill(etcd.pid, signal.SIGCONT)
    heard.until(lambda: isinstance(heard[-1], LeaseHeld))


def test_closing_while_etcd_is_away_takes_a_few_seconds_and_answers_everything(
    etcd: Embedded, heard: Heard
) -> None:
    before = threading.active_count()
    store = EtcdStore(EtcdAccess((etcd.endpoint,), timeout_s=1.0), "job", 2)
    news = Heard()
    store.hold_lease(news)
    news.until(lambda: news)
    store.watch("", lambda _: None, prefix=True)
    freeze(etcd.pid)
    for total in range(20):
        store.transact((), (Put("budget", Budget(total=total)),), heard)
    store.close()
    assert len(heard) == 20
    assert all(isinstance(answer, NoAnswer) for answer in heard)
    store.transact((), (Put("budget", Budget()),), heard)
    assert len(heard) == 21
    assert not [t.name for t in threading.enumerate() if t.name.startswith("etcd-")]
    assert threading.active_count() <= before + 1  # gRPC may still end a thread of its own


def test_many_stores_share_one_link(etcd: Embedded, heard: Heard) -> None:
    link = EtcdLink(etcd.access)
    try:
        stores = [EtcdStore(link, "job", 5) for _ in range(50)]
        threads = threading.active_count()
        for n, store in enumerate(stores):
            store.hold_lease(lambda _: None)
            store.watch("", heard, prefix=True)
            store.transact((), (Put(f"reports/n{n}", _report(n)),), lambda _: None)
        heard.until(lambda: sum(len(what.entries) for what in heard) == 50 * 50)
        assert threading.active_count() <= threads + 12
        for store in stores:
            store.close()
    finally:
        link.close()


def _report(n: int) -> Report:
    return Report(f"n{n}", "i", 1)


def test_writes_that_etcd_could_never_apply_are_a_bug_of_the_caller(etcd: Embedded, open_store: Open) -> None:
    store = open_store(etcd.access)
    put = Put("budget", Budget())
    for writes in (
        (put, put),
        (put, Delete("budget")),
        (Put("reports/n1", _report(1)), Delete("reports/", True)),
    ):
        with pytest.raises(ValueError, match="a transaction cannot put"):
            store.transact((), writes, lambda _: None)
    with pytest.raises(ValueError, match="does not hold"):
        store.transact((), (Put("spec", Budget()),), lambda _: None)


# ---------------------------------------------------------------- three members


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, 3) as built:
        yield built


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_losing_the_member_in_use_or_the_leader_loses_neither_lease_nor_watch(
    how: signal.Signals, cluster: Cluster, heard: Heard, open_store: Open
) -> None:
    leader = cluster.leader()
    # The leader comes first, so that the member in use and the leader are lost at once.
    endpoints = sorted(cluster.endpoints, key=lambda endpoint: endpoint != leader.endpoint)
    store = open_store(EtcdAccess(tuple(endpoints), timeout_s=1.0), 20)
    news = Heard()
    store.hold_lease(news)
    store.watch("", heard, prefix=True)
    news.until(lambda: news)
    write(store, 1)
    heard.until(lambda: budgets(heard) == [1])
    leader.signal(how)
    write(store, 2)
    heard.until(lambda: budgets(heard)[-1:] == [2])
    held = len(news)
    news.until(lambda: any(isinstance(n, LeaseHeld) for n in news[held:]))
    assert not any(isinstance(n, LeaseExpired) for n in news)
    assert not any(n.cut_off for n in news if isinstance(n, StoreSilent))


def test_a_member_without_a_leader_applies_nothing_and_returns_an_error(cluster: Cluster) -> None:
    await_serving(EtcdAccess(cluster.endpoints[:1]))  # a quorum of other members may have started first
    for member in cluster.members[1:]:
        member.kill()
    calls = Connection(EtcdAccess(cluster.endpoints[:1], timeout_s=1.0))
    sent, number = True, 0
    while sent:  # until the member gives its leader up, a write may yet be applied
        number += 1
        with pytest.raises(StoreUnavailable) as failed:
            calls.call("txn", kv.txn_request((), [kv.put_op(b"/%d" % number, b"")]))
        sent = failed.value.sent
    assert "knows no leader" in str(failed.value)
    calls.close()
    for member in cluster.members[1:]:
        member.start()
    await_serving(EtcdAccess(cluster.endpoints))
    with Client(EtcdAccess(cluster.endpoints)) as client:
        assert client.get_raw(b"/%d" % number) is None


def test_a_member_without_a_quorum_is_left_for_those_with_one(
    cluster: Cluster, heard: Heard, open_store: Open
) -> None:
    store = open_store(EtcdAccess(cluster.endpoints, timeout_s=1.0), 20)
    store.watch("", heard, prefix=True)
    write(store, 1)
    heard.until(lambda: budgets(heard) == [1])
    lost = cluster.members[1:]
    for member in lost:
        member.signal(signal.SIGSTOP)
    answers = Heard()
    store.transact((), (Put("budget", Budget(total=2)),), answers)
    answers.until(lambda: answers)
    assert isinstance(answers[0], NoAnswer)
    for member in lost:
        member.signal(signal.SIGCONT)
    write(store, 3)
    # The write without an answer may still be applied, even after this one.
    heard.until(lambda: 3 in budgets(heard))
