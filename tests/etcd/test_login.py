"""User names and passwords, and tokens that do not outlive a restart of etcd."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.core.facts import Budget
from elasticd.core.ports import LeaseHeld, Put
from elasticd.etcd import kv
from elasticd.etcd._client3 import grpc, rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.connection import Connection
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.errors import StoreError, StoreRefused
from elasticd.etcd.roles import Roles, all_below
from elasticd.etcd.store import EtcdStore
from tests import forkserver

from .cluster import Cluster, GuardedEtcd, Member, await_serving
from .conftest import Heard, write

PATIENCE_S = 240.0
PASSWORD = os.urandom(8).hex()  # random: another run of the tests may use the same names at the same time


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """An etcd with passwords for root and for guest, who may not read elasticd's keys."""
    with Cluster(tmp_path_factory.mktemp("locked"), 1) as cluster:
        with grpc.insecure_channel(cluster.endpoints[0]) as channel:
            auth = rpc.AuthStub(channel)
            auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"), timeout=10)
            auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="s3cret"), timeout=10)
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=10)
            auth.UserAdd(rpc.AuthUserAddRequest(name="guest", password="guest"), timeout=10)
            auth.AuthEnable(rpc.AuthEnableRequest(), timeout=10)
        yield cluster.members[0]


def as_user(etcd: Member | Embedded, name: str | None, password: str | None) -> EtcdAccess:
    return EtcdAccess((etcd.endpoint,), username=name, password=password)


def test_all_requests_that_need_a_login_share_one(locked: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, answers, methods = Connection(as_user(locked, "root", "s3cret")), Heard(), list[str]()
    start = Connection._start

    def counted(self: Connection, index: int, method: str, *more: Any) -> None:
        methods.append(method)
        start(self, index, method, *more)

    monkeypatch.setattr(Connection, "_start", counted)
    with contextlib.closing(connection):
        for _ in range(5):
            connection.start("range", kv.range_request(b"x"), timeout_s=30.0, done=answers)
        answers.until(lambda: len(answers) == 5)
    assert not any(isinstance(answer, StoreError) for answer in answers)
    assert methods == ["authenticate", *["range"] * 5]


def test_a_wrong_password_is_refused_without_being_shown(locked: Member) -> None:
    with (
        Client(as_user(locked, "root", "wr0ng")) as client,
        pytest.raises(StoreRefused, match="does not accept this user name and password") as error,
    ):
        client.check()
    assert "wr0ng" not in str(error.value)


def test_a_missing_password_is_a_clear_error(locked: Member) -> None:
    with (
        Client(as_user(locked, None, None)) as client,
        pytest.raises(StoreRefused, match="asks for a user name and password"),
    ):
        client.check()


def test_a_password_for_an_etcd_without_authentication_is_a_clear_error(etcd: Embedded) -> None:
    with (
        Client(as_user(etcd, "root", "s3cret")) as client,
        pytest.raises(StoreRefused, match="has no logins enabled"),
    ):
        client.check()


def test_a_denied_watch_is_told_rather_than_silent(
    locked: Member, heard: Heard, open_store: Callable[..., EtcdStore]
) -> None:
    store = open_store(as_user(locked, "guest", "guest"), problems=heard)
    store.watch("", lambda _: None, prefix=True)
    heard.until(lambda: heard)
    assert isinstance(heard[0], StoreRefused)
    assert "denies access: permission denied" in str(heard[0])


def test_an_etcd_that_forgot_our_login_is_logged_into_again(
    locked: Member, heard: Heard, open_store: Callable[..., EtcdStore]
) -> None:
    store = open_store(as_user(locked, "root", "s3cret"), 2)
    news = Heard()
    store.hold_lease(news)
    store.watch("", heard, prefix=True)
    write(store, 0)
    heard.until(lambda: heard)
    news.until(lambda: any(isinstance(n, LeaseHeld) for n in news))
    for connection in store._link._connections:
        assert connection._tokens
        connection._tokens = {0: "forgotten.1"}
    locked.kill()  # the watch must be requested again, too
    locked.start()
    await_serving(as_user(locked, "root", "s3cret"))
    again = len(news)
    write(store, 1)
    heard.until(lambda: any(e.fact == Budget(total=1) for what in heard for e in what.entries))
    news.until(lambda: any(isinstance(n, LeaseHeld) for n in news[again:]))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedEtcd]:
    """An etcd with root and two users that may read and write below /elasticd/a/ and nowhere else: ``a`` logs
    in by a certificate, ``p`` by a password."""
    with GuardedEtcd(tmp_path_factory.mktemp("guarded")) as etcd:
        etcd.require_login()
        with Roles(etcd.known_as("root")) as roles:
            roles.add_role("a")
            for prefix in ("/elasticd/a/", "/elasticd.torchrun/a/"):
                roles.add_permission("a", all_below(prefix))
            for name, password in (("a", None), ("p", PASSWORD)):
                roles.add_user(name, password)
                roles.grant(name, "a")
        yield etcd


@pytest.fixture
def shared(guarded: GuardedEtcd) -> tuple[EtcdAccess, EtcdAccess]:
    """An access to an etcd without keys, as root and as ``a``."""
    root = guarded.known_as("root")
    with Client(root) as client:
        client.delete_raw(b"/", prefix=True)
    return root, guarded.known_as("a")


class ShellJob:
    """Nodes of the job ``a``. The workers write down their environment and the size of their world. All
    commands get their secrets from the environment."""

    def __init__(self, access: EtcdAccess, folder: Path) -> None:
        self._told = folder / "told"
        os.mkfifo(self._told)
        self._hears = os.fdopen(os.open(self._told, os.O_RDWR), "rb")
        self._login = [f"--etcd={access.url}", f"--etcd-cacert={access.cacert}"]
        token = folder / "token"
        token.write_text("t0ken")
        secrets = {
            "ELASTICD_ETCD_CERT": str(access.cert),
            "ELASTICD_ETCD_KEY": str(access.key),
            "ELASTICD_ETCD_PASSWORD": "s3cret",
            "ELASTICD_HTTP_CERT": str(access.cert),
            "ELASTICD_HTTP_KEY": str(access.key),
            "ELASTICD_HTTP_TOKEN_FILE": str(token),
        }
        self.secrets = ("ELASTICD_ETCD_", "s3cret", str(access.key), str(token))
        self._env = os.environ | secrets | {"XDG_STATE_HOME": str(folder / "state"), "TERM": "xterm"}
        self._folder = folder
        self._nodes: list[forkserver.Forked] = []

    def command(self, *argv: str) -> list[str]:
        return [str(Path(sys.executable).with_name("elasticd")), argv[0], *self._login, *argv[1:]]

    def node(self, name: str) -> forkserver.Forked:
        script = f"env > {self._folder / name}.env; echo $WORLD_SIZE > {self._told}; exec sleep 600"
        limits = ["--min=1", "--max=1", "--slots=1", "--grow-cooldown=0", "--http=off"]
        argv = ["run", "--job=a", f"--node={name}", *limits, "--no-python", "sh", "-c", script]
        with (self._folder / f"{name}.log").open("w") as log:
            files = {"stdout": log.fileno(), "stderr": log.fileno()}
            node = forkserver.Forked(self.command(*argv), env=self._env, cwd=self._folder, **files)
        self._nodes.append(node)
        return node

    def trains_with(self, size: int) -> None:
        """A world of this size has started, on this many nodes."""
        for _ in range(size):
            while int(self._hears.readline()) != size:
                pass

    def says(self, *argv: str) -> tuple[int, str]:
        done = forkserver.run(self.command(*argv), env=self._env, cwd=self._folder, timeout_s=PATIENCE_S)
        return done.returncode, done.stdout + done.stderr

    def screen(self, *argv: str, wanted: tuple[str, ...]) -> None:
        """Run a command on a terminal. Press Ctrl-C once the command has drawn all wanted texts. The command
        starts with that signal ignored, like a background command of a script."""
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, 120))
        command = ["env", "--ignore-signal=INT", *self.command(*argv)]
        process = subprocess.Popen(command, env=self._env, stdout=slave, stderr=slave)
        os.close(slave)
        drawn = b""
        try:
            while not all(text.encode() in drawn for text in wanted):
                drawn += os.read(master, 65536)  # raises OSError once the command has ended
            process.send_signal(signal.SIGINT)
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    os.read(master, 65536)
        finally:
            process.kill()
            process.wait()
            os.close(master)
        assert process.returncode in (0, 130)

    def close(self) -> None:
        for node in self._nodes:
            node.kill()
            node.wait()
        self._hears.close()


def test_within_a_role_of_one_job_two_nodes_run_and_are_steered_and_no_other_job_is_seen(
    shared: tuple[EtcdAccess, EtcdAccess], tmp_path: Path
) -> None:
    job = ShellJob(shared[1], tmp_path)
    try:
        x, y = job.node("node-x"), job.node("node-y")
        job.trains_with(1)
        code, said = job.says("status", "a", "--json")
        assert (code, json.loads(said)["world_size"]) == (0, 1), said
        assert job.says("scale", "a", "--max=2") == (0, "a may have 1 to 2 workers.\n")
        job.trains_with(2)
        job.screen("top", "a", wanted=("node-x", "node-y"))
        code, said = job.says("doctor", "--job=a", "--json")
        assert code in (0, 1) and "etcd 3." in said and "denies access" not in said, said
        assert job.says("drain", "node-y", "--job=a") == (0, "node-y is asked to leave a.\n")
        assert y.wait(PATIENCE_S) == 143
        job.trains_with(1)
        again = job.node("node-y")
        job.trains_with(2)
        assert job.says("stop", "a")[0] == 0
        assert (x.wait(PATIENCE_S), again.wait(PATIENCE_S)) == (143, 143)
        with Client(shared[0]) as client:
            client.transact("b", (), (Put("budget", Budget()),))
            assert set(client.jobs()) == {"a", "b"}
        code, said = job.says("forget", "a")
        assert code == 0 and "is forgotten" in said, said
        code, said = job.says("status", "a")
        assert code == 2 and "no job named a" in said, said
    finally:
        job.close()
    environment = (tmp_path / "node-x.env").read_text()
    assert "ELASTICD_ROUND" in environment
    for secret in job.secrets:
        assert secret not in environment, "only the agent has it"
    for argv in (("ls",), ("status", "b"), ("stop", "b")):
        code, said = job.says(*argv)
        assert code == 2 and "denies access" in said and len(said.splitlines()) == 1, (argv, said)
    code, said = job.says("run", "--job=b", "--min=1", "--max=1", "--http=off", "--no-python", "true")
    assert code == 2 and "denies access" in said.splitlines()[-1] and "Traceback" not in said, said
    code, said = job.says("drain", "node-x")
    assert code == 2 and "this user may not list jobs; give the name of a job" in said


def test_plain_torchrun_runs_within_a_role_of_its_own(
    shared: tuple[EtcdAccess, EtcdAccess], tmp_path: Path
) -> None:
    a = shared[1]
    conf = f"protocol=https,cacert={a.cacert},cert={a.cert},key={a.key}"
    torchrun = ["torchrun", "--rdzv-backend=etcd-v3"]
    torchrun += [f"--rdzv-endpoint={a.endpoints[0]}", f"--rdzv-conf={conf}", "--nnodes=1"]
    torchrun += [f"--log-dir={tmp_path}"]
    for run_id, code in (("a", 0), ("b", 1)):
        command = [*torchrun, f"--rdzv-id={run_id}", "--no-python", "true"]
        where = {"env": os.environ, "cwd": tmp_path, "entry": forkserver.TORCHRUN}
        done = forkserver.run(command, **where, timeout_s=PATIENCE_S)
        assert done.returncode == code, done.stderr
    assert "permission denied" in done.stderr


# Starts a saver. Looks for the password in the environment and memory of every process that it may read.
# It gets the password backwards, so that it does not find its own copy.
_THIEF = """
import os, re, sys
import torch
from elasticd import worker

checkpoints = worker.Checkpoints(sys.argv[1])
checkpoints.save({"w": torch.zeros(2)}, 1)
assert checkpoints.wait(), checkpoints.last_error
secret = sys.argv[2].encode()[::-1]
seen, found = set(), []
for pid in filter(str.isdecimal, os.listdir("/proc")):
    if int(pid) == os.getpid():
        continue
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\\0", b" ").decode(errors="replace")
        if "elasticd" not in command:
            continue
        for name in ("saver", "run"):
            if re.search(rf"elasticd.daemon.(node_)?{name}|elasticd {name} ", command):
                seen.add(name)
        with open(f"/proc/{pid}/environ", "rb") as file:
            if secret in file.read():
                found.append(f"environment of {command}")
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in maps:
                start, end = (int(n, 16) for n in line.split()[0].split("-"))
                if line.split()[1].startswith("rw"):
                    memory.seek(start)
                    if secret in memory.read(end - start):
                        found.append(f"memory of {command}")
                        break
    except OSError:
        continue
print("seen", *sorted(seen))
print("found", *found, sep="\\n")
"""


@pytest.mark.parametrize("way", ["environment", pytest.param("file", marks=pytest.mark.slow)])
def test_a_worker_cannot_read_the_password_of_its_agent_or_its_saver(
    shared: tuple[EtcdAccess, EtcdAccess], tmp_path: Path, way: str
) -> None:
    a = shared[1]
    script = tmp_path / "thief.py"
    script.write_text(_THIEF)
    options = [f"--etcd={a.url}", f"--etcd-cacert={a.cacert}", "--etcd-user=p"]
    options += [f"--etcd-cert={a.cert}", f"--etcd-key={a.key}"]  # a login by password takes precedence
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    piped = b""
    if way == "environment":
        env["ELASTICD_ETCD_PASSWORD"] = PASSWORD
    else:  # standard input, which a script cannot read a second time
        options += ["--etcd-password-file=/dev/stdin"]
        piped = f"{PASSWORD}\n".encode()
    # As in a container: root may read the memory of all processes, unless this right is taken away.
    tame = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*tame, str(Path(sys.executable).with_name("elasticd")), "run", *options]
    command += [
        "--job=a",
        "--min=1",
        "--max=1",
        "--http=off",
        str(script),
        str(tmp_path / "saved"),
        PASSWORD[::-1],
    ]
    done = subprocess.run(command, env=env, input=piped, capture_output=True, timeout=PATIENCE_S)
    said = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert "seen run saver" in said, said
    assert said.rstrip().endswith("found"), said
    assert PASSWORD.encode() not in done.stderr
