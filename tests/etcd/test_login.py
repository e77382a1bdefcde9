"""User names and passwords, and tokens that do not outlive a restart of etcd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message_factory

from elasticd.core.facts import Budget
from elasticd.core.ports import Applied, Held, Put
from elasticd.etcd._client3 import grpc, rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.client import Client
from elasticd.etcd.connection import _credentials
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.errors import StoreRefused
from elasticd.etcd.kv import prefix_end
from elasticd.etcd.store import EtcdStore

from .cluster import Authority, Cluster, Member, await_serving
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


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[EtcdAccess, EtcdAccess]]:
    """An etcd with TLS and logins, as root and as ``a``, who may do what it likes below /elasticd/a/ and
    nothing else."""
    authority = Authority(tmp_path, "authority")
    server, server_key = authority.issue("server", "127.0.0.1")
    flags = ("--client-cert-auth", f"--trusted-ca-file={authority.cert}")
    flags += (f"--cert-file={server}", f"--key-file={server_key}")
    cluster = Cluster(tmp_path, 1, flags=flags, tls=True)

    def known_as(name: str) -> EtcdAccess:
        cert, key = authority.issue(name)
        return EtcdAccess(
            cluster.endpoints, tls=True, cacert=authority.cert, cert=cert, key=key, timeout_s=5.0
        )

    root, a = known_as("root"), known_as("a")
    try:
        cluster.start(root)
        with grpc.secure_channel(cluster.endpoints[0], _credentials(root)) as channel:
            auth = rpc.AuthStub(channel)
            for name in ("root", "a"):
                auth.RoleAdd(rpc.AuthRoleAddRequest(name=name), timeout=10)
                auth.UserAdd(rpc.AuthUserAddRequest(name=name, password="unused"), timeout=10)
                auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=name), timeout=10)
            allowed = permission(b"/elasticd/a/")
            auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="a", perm=allowed), timeout=10)
            auth.AuthEnable(rpc.AuthEnableRequest(), timeout=10)
        yield root, a
    finally:
        cluster.stop()


def permission(prefix: bytes) -> Any:
    kind = rpc.AuthRoleGrantPermissionRequest.DESCRIPTOR.fields_by_name["perm"].message_type
    made = message_factory.GetMessageClass(kind)(key=prefix, range_end=prefix_end(prefix))
    made.permType = kind.fields_by_name["permType"].enum_type.values_by_name["READWRITE"].number
    return made


def test_within_a_role_of_one_job_that_job_runs_and_is_steered_and_no_other_is_seen(
    shared: tuple[EtcdAccess, EtcdAccess], tmp_path: Path
) -> None:
    root, a = shared
    options = [f"--etcd={a.url}", f"--etcd-cacert={a.cacert}"]
    token = tmp_path / "token"
    token.write_text("t0ken")
    secrets = {
        "ELASTICD_ETCD_CERT": str(a.cert),
        "ELASTICD_ETCD_KEY": str(a.key),
        "ELASTICD_HTTP_CERT": str(a.cert),
        "ELASTICD_HTTP_KEY": str(a.key),
        "ELASTICD_HTTP_TOKEN_FILE": str(token),
    }
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "ELASTICD_ETCD_PASSWORD": "s3cret"}
    go_on = tmp_path / "go_on"
    os.mkfifo(go_on)

    def elasticd(*argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("elasticd")), argv[0], *options, *argv[1:]],
            env=os.environ | secrets | state,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def said(*argv: str) -> tuple[int, str, str]:
        process = elasticd(*argv)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    script = f"env; echo started > {go_on}; exec sleep 600"
    job = elasticd("run", "--job=a", "--min=1", "--max=1", "--http=off", "--no-python", "sh", "-c", script)
    try:
        assert go_on.read_text() == "started\n"
        code, out, err = said("status", "a", "--json")
        assert (code, json.loads(out)["world_size"]) == (0, 1), err
        assert said("stop", "a")[0] == 0
        out, err = job.communicate(timeout=240)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 143, err
    assert "ELASTICD_ROUND" in out
    for secret in ("ELASTICD_ETCD_", "s3cret", str(a.key), str(token)):
        assert secret not in out, "of the agent alone"
    with Client(root) as client:
        client.transact("b", (), (Put("budget", Budget()),))
        assert set(client.jobs()) == {"a", "b"}
    for argv in (("ls",), ("status", "b"), ("stop", "b")):
        code, out, err = said(*argv)
        assert code == 2 and "denies access" in err and len(err.splitlines()) == 1, (argv, out, err)
