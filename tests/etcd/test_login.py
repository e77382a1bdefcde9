"""User names and passwords, and tokens that do not outlive a restart of etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.core.facts import Budget
from elasticd.core.ports import Applied, Held, Put
from elasticd.etcd._client3 import grpc, rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.client import Client
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.errors import StoreRefused
from elasticd.etcd.store import EtcdStore

from .cluster import Cluster, Member, await_serving
from .conftest import Heard


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Member]:
    """Wants a password: root's, or that of guest, who may not read elasticd's keys."""
    cluster = Cluster(tmp_path, 1)
    try:
        cluster.start()
        with grpc.insecure_channel(cluster.endpoints[0]) as channel:
            auth = rpc.AuthStub(channel)
            auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"), timeout=10)
            auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="s3cret"), timeout=10)
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=10)
            auth.UserAdd(rpc.AuthUserAddRequest(name="guest", password="guest"), timeout=10)
            auth.AuthEnable(rpc.AuthEnableRequest(), timeout=10)
        yield cluster.members[0]
    finally:
        cluster.stop()


def as_user(etcd: Member | Embedded, name: str | None, password: str | None) -> EtcdAccess:
    return EtcdAccess((etcd.endpoint,), username=name, password=password)


def test_a_wrong_password_is_refused_without_being_shown(locked: Member) -> None:
    with (
        Client(as_user(locked, "root", "wr0ng")) as client,
        pytest.raises(StoreRefused, match="does not accept this user name and password") as error,
    ):
        client.check()
    assert "wr0ng" not in str(error.value)


def test_no_password_where_one_is_wanted_says_so(locked: Member) -> None:
    with (
        Client(as_user(locked, None, None)) as client,
        pytest.raises(StoreRefused, match="asks for a user name and password"),
    ):
        client.check()


def test_a_password_where_none_is_wanted_says_so(etcd: Embedded) -> None:
    with (
        Client(as_user(etcd, "root", "s3cret")) as client,
        pytest.raises(StoreRefused, match="has no logins enabled"),
    ):
        client.check()


def test_a_denied_watch_is_told_rather_than_silent(locked: Member, heard: Heard) -> None:
    store = EtcdStore(as_user(locked, "guest", "guest"), "job", problems=heard)
    try:
        store.watch("", lambda _: None, prefix=True)
        heard.until(lambda: heard)
        assert isinstance(heard[0], StoreRefused)
        assert "denies access: permission denied" in str(heard[0])
    finally:
        store.close()


def test_an_etcd_that_forgot_our_login_is_logged_into_again(locked: Member, heard: Heard) -> None:
    store = EtcdStore(as_user(locked, "root", "s3cret"), "job", 2)
    news, answers = Heard(), Heard()
    try:
        store.hold_lease(news)
        store.watch("", heard, prefix=True)
        store.transact((), (Put("budget", Budget()),), answers)
        heard.until(lambda: heard)
        news.until(lambda: news)
        answers.until(lambda: answers)
        for connection in store._link._connections:
            assert connection._tokens
            connection._tokens = {0: "forgotten.1"}
        locked.kill()  # so that the watch, too, has to be asked for again
        locked.start()
        await_serving(as_user(locked, "root", "s3cret"))
        again = len(news)
        for _ in range(30):
            answers.clear()
            store.transact((), (Put("budget", Budget(total=1)),), answers)
            answers.until(lambda: answers)
            if isinstance(answers[0], Applied):
                break
        heard.until(lambda: any(e.fact == Budget(total=1) for what in heard for e in what.entries))
        news.until(lambda: any(isinstance(n, Held) for n in news[again:]))
    finally:
        store.close()
