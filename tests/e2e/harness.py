"""Several agents of one job on this machine, with nothing simulated: ``elasticd run``, etcd, signals. Tests
wait for lines of the agents' JSON log, for messages of the workers (to the stage), and for changes in etcd.
Each of these wakes the wait, so no test polls."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from elasticd import torchparts
from elasticd.checkpoint.replication.wire import PeerGone
from elasticd.core.facts import (
    Budget,
    Fact,
    Leadership,
    NodeLedger,
    NodeTelemetry,
    Round,
    Spec,
    Summary,
)
from elasticd.daemon.leader_link.telemetry_follower import ask_leader
from elasticd.etcd.access import EtcdAccess, parse_endpoints
from elasticd.etcd.blocking_client import Client
from elasticd.procs.linux import descendants
from elasticd.procs.vitals import thread_report
from tests import forkserver
from tests.e2e.stage import Player, Script, Stage, overlaps

T = TypeVar("T")

ELASTICD = str(Path(sys.executable).with_name("elasticd"))
PLAYER = str(Path(__file__).parent / "programs" / "player.py")
FAKE_TORCH = str(Path(__file__).parents[1] / "procs" / "programs" / "faketorch")
PATIENCE_S = 120.0  # a machine may be busy; no test waits longer than it must
MARK = "ELASTICD_E2E_MARK"

# Short times, so that tests end soon. The lease is long enough for a busy machine.
PACE = {
    "--grow-cooldown": "0.1",
    "--join-timeout": "120",
    "--shutdown-timeout": "30",
    "--node-ttl": "3",
}
POLICY = {"settle_s": 0.3, "broken_s": 1}


@dataclass(frozen=True)
class World:
    """A round in which all workers train. Workers are in rank order."""

    round: int
    players: tuple[Player, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """the node of each rank"""
        return tuple(p.node for p in self.players)

    @property
    def restarts(self) -> int:
        return self.players[0].restarts

    def on(self, node: str) -> tuple[Player, ...]:
        return tuple(p for p in self.players if p.node == node)

    def tell(self, do: str, **fields: Any) -> None:
        for player in self.players:
            player.tell(do, **fields)


class Agent:
    """One ``elasticd run``. Lines of its stderr that are JSON objects are events, others are text."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: dict[str, str],
        cwd: Path,
        news: threading.Condition,
        *,
        fork: bool = True,
    ) -> None:
        self.name = name
        self.events: list[dict[str, Any]] = []
        self.text: list[str] = []
        self.out: list[str] = []
        self._news = news
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self.process = _begin(argv, env, cwd, theirs_out, theirs_err, fork=fork)
        os.close(theirs_out)
        os.close(theirs_err)
        self._readers = [
            threading.Thread(target=self._read, args=(out, self._heard_out), daemon=True),
            threading.Thread(target=self._read, args=(err, self._heard_err), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __repr__(self) -> str:
        return f"<agent {self.name}, pid {self.process.pid}, exit code {self.process.poll()}>"

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the agent alone."""
        self.process.kill()
        self.process.wait()

    def end(self, patience_s: float = PATIENCE_S) -> int:
        """Wait until the agent has ended by itself and all its output was read. Return the agent's
        exit code."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            said = f"{self.said()}\n{_what_runs(self.pid)}"
            raise AssertionError(f"{self} did not end; it said:\n{said}") from None
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return self.process.returncode

    @property
    def screen(self) -> str:
        """Return what the agent printed to stderr for people, without its log."""
        return "\n".join(self.text)

    def find(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of this name that have these fields."""
        return [
            e
            for e in tuple(self.events)
            if e["event"] == event and all(e.get(k) == v for k, v in fields.items())
        ]

    def said(self, most: int = 60) -> str:
        events = [" ".join(f"{k}={v}" for k, v in e.items() if k not in ("job", "node")) for e in self.events]
        return "\n".join([*events[-most:], *self.text[-most:]])

    def _read(self, fd: int, heard: Callable[[str], None]) -> None:
        with open(fd, errors="replace") as stream:
            for line in stream:
                with self._news:
                    heard(line.rstrip("\n"))
                    self._news.notify_all()

    def _heard_out(self, line: str) -> None:
        self.out.append(line)

    def _heard_err(self, line: str) -> None:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                self.events.append(event)
                return
        self.text.append(line)


@dataclass(frozen=True)
class Said:
    """The output and the exit code of a short command."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """Return its error message, which is one line."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, f"not one sentence:\n{self.err}"
        return lines[0]


class Cluster:
    """The agents of one job. ``etcd`` is its URL; None: each agent runs standalone."""

    def __init__(self, folder: Path, etcd: str | None, *, job: str = "") -> None:
        self.folder = folder
        self.etcd = etcd
        self.job = job or f"job-{uuid.uuid4().hex[:8]}"
        self.agents: list[Agent] = []
        self.mark = uuid.uuid4().hex
        self.news = threading.Condition()
        self.stage = Stage(self.news)
        self.limits = (1, 8)
        self.pace = dict(PACE)
        self.policy = dict[str, float](POLICY)
        # A short path: multiprocessing makes sockets in this folder, whose paths may have 107 characters.
        self.tmp = Path(tempfile.mkdtemp(prefix="e2e-"))
        for place in ("run", "state"):
            (folder / place).mkdir(mode=0o700)

    # ------------------------------------------------------------ starting

    def start(
        self,
        *names: str,
        slots: int = 1,
        options: Sequence[str] = (),
        program: Sequence[str] = (PLAYER,),
        env: dict[str, str] | None = None,
    ) -> list[Agent]:
        """Start an agent for each name. An agent with an empty name chooses its own."""
        return [self._start(name, slots, options, program, env or {}) for name in names]

    def _start(
        self, name: str, slots: int, options: Sequence[str], program: Sequence[str], env: dict[str, str]
    ) -> Agent:
        low, high = self.limits
        argv = [ELASTICD, "run", f"--min={low}", f"--max={high}", f"--slots={slots}"]
        argv += [f"--node={name}"] if name else []
        argv += [f"--job={self.job}", "--log-format=json", "--plain", *self.etcd_options]
        argv += [part for option in self.pace.items() for part in option]
        argv += [f"--policy={self._policy_file()}"]
        argv += [*options, *program]
        # these variables have no effect on a fork
        fork = not any(variable.startswith(("LD_", "PYTHONPATH")) for variable in env)
        agent = Agent(name, argv, self.environment(name) | env, self.folder, self.news, fork=fork)
        self.agents.append(agent)
        return agent

    def _policy_file(self) -> Path:
        """Write a policy file for one agent: the next agent may have another policy."""
        file = self.folder / f"policy{len(self.agents)}.toml"
        file.write_text("".join(f"{name} = {value}\n" for name, value in self.policy.items()))
        return file

    @property
    def etcd_options(self) -> list[str]:
        return [f"--etcd={self.etcd}"] if self.etcd else []

    def environment(self, node: str = "") -> dict[str, str]:
        """Return a user's environment, with folders of its own, and a mark that all processes of this test
        inherit."""
        ours = ("PET_", "ELASTICD_", "TORCH", "OMP_", "PYTEST_", "ETCD", "E2E_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        return kept | {
            MARK: self.mark,
            "TMPDIR": str(self.tmp),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),  # else torch leaves a cache in TMPDIR
            "OMP_NUM_THREADS": "1",
            "E2E_NODE": node,
            "E2E_STAGE": self.stage.name,
            "E2E_FAKE_TORCH": FAKE_TORCH,
        }

    def command(self, *argv: str, etcd: bool = True) -> Said:
        """Run another ``elasticd`` command to its end."""
        where = self.etcd_options if etcd else []
        name, *rest = argv
        done = forkserver.run(
            [ELASTICD, name, *where, *rest], env=self.environment(), cwd=self.folder, timeout_s=PATIENCE_S
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def direct(self, direct: Callable[[Player], Script]) -> None:
        """Choose how workers behave that start from now on."""
        with self.news:
            self.stage.direct = direct

    # ------------------------------------------------------------ waiting

    def until(self, holds: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
        """Wait until the function returns a true value. Return this value."""
        with self.news:
            found: T | None = None

            def check() -> bool:
                nonlocal found
                found = holds()
                return bool(found)

            if not self.news.wait_for(check, patience_s):
                raise AssertionError(f"not within {patience_s:g} s: {what}\n{self.state()}")
        assert found is not None
        return found

    def until_said(self, agent: Agent, event: str, *, times: int = 1, **fields: Any) -> dict[str, Any]:
        """Wait for events in the agent's log. Return the last of them."""

        def said() -> list[dict[str, Any]]:
            assert agent.process.poll() is None or agent.find(event, **fields), (
                f"{agent} is gone\n{agent.said()}"
            )
            found = agent.find(event, **fields)
            return found if len(found) >= times else []

        return self.until(said, f"{agent.name} says {event} {fields}")[times - 1]

    def until_anyone_said(self, event: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event in the log of the agent that leads."""
        found = self.until(
            lambda: [e for a in self.agents for e in a.find(event, **fields)],
            f"an agent says {event} {fields}",
        )
        return found[0]

    def world(self, size: int, *, after: World | int = 0, steps: int = 2) -> World:
        """Wait for a later round of this size in which every worker has made some steps."""
        last = after.round if isinstance(after, World) else after

        def formed() -> World | None:
            newest = max((p.round for p in self.stage.players), default=0)
            here = sorted(
                (p for p in self.stage.players if p.round == newest and not p.gone), key=lambda p: p.rank
            )
            if newest <= last or [p.rank for p in here] != list(range(size)):
                return None
            if any(p.world != size or p.step < steps for p in here):
                return None
            return World(newest, tuple(here))

        return self.until(formed, f"{size} workers train in a round after {last}")  # type: ignore[return-value]

    def goes_on(self, world: World, steps: int = 10) -> None:
        """Wait until every worker of this world has made some more steps."""
        goals = [(p, p.step + steps) for p in world.players]
        self.until(
            lambda: all(p.step >= goal for p, goal in goals), f"round {world.round} goes on by {steps} steps"
        )

    def until_gone(self, pids: Iterable[int | Player]) -> None:
        """Wait until these processes have ended."""
        for one in pids:
            if isinstance(one, Player):
                await_end(one.pidfd, repr(one))
                continue
            try:
                fd = os.pidfd_open(one)
            except ProcessLookupError:
                continue
            try:
                await_end(fd, f"process {one}")
            finally:
                os.close(fd)

    def orphan_of(self, player: Player) -> int:
        """Have a worker leave a grandchild in another session behind. Return the grandchild's pid."""
        player.tell("leave_orphan")
        pid: int = self.until(lambda: player.did("orphan"), f"{player} left an orphan")[0]["pid"]
        return pid

    def kill_keeper(self, agent: Agent) -> None:
        """SIGKILL the warden of an agent."""
        (warden,) = (c for c in psutil.Process(agent.pid).children() if c.name() == "elasticd-warden")
        warden.kill()

    def finish(self) -> None:
        """Let all workers finish, also those that start later."""
        with self.news:
            self.stage.direct = lambda player: Script(steps=0)
            for player in self.stage.players:
                player.tell("finish")

    def finishes(self, *agents: Agent) -> None:
        """Let the job finish. All these agents must end with 0."""
        self.finish()
        for agent in agents:
            assert agent.end() == 0, f"{agent} said:\n{agent.said()}"

    # ------------------------------------------------------------ the records in etcd

    @property
    def access(self) -> EtcdAccess:
        assert self.etcd is not None
        return parse_endpoints(self.etcd)

    def fact(self, key: str, of: type[T]) -> T | None:
        """Return the fact at a key of the job; None if there is none."""
        with Client(self.access) as client:
            entry = client.get(self.job, key)
        fact: Fact | None = entry.fact if entry else None
        assert fact is None or isinstance(fact, of)
        return fact

    def ledger(self, node: str) -> NodeLedger | None:
        """Return the ledger of the node that the leader wrote last."""
        summary = self.fact("summary", Summary)
        nodes = summary.nodes if summary is not None else ()
        return next((told.ledger for told in nodes if told.node == node), None)

    def told(self, node: str) -> NodeTelemetry | None:
        """Return what the leader knows of the node."""
        leader = self.fact("leader", Leadership)
        with contextlib.suppress(PeerGone):
            return ask_leader(leader).nodes.get(node) if leader is not None else None
        return None

    @property
    def round(self) -> Round:
        found = self.fact("round", Round)
        assert found is not None
        return found

    @property
    def budget(self) -> Budget:
        return self.fact("budget", Budget) or Budget()

    @property
    def spec(self) -> Spec:
        found = self.fact("spec", Spec)
        assert found is not None
        return found

    # ------------------------------------------------------------ the end

    def state(self) -> str:
        """Return all that is known of the job, to find out why a test failed."""
        players = "\n".join(f"  {p!r} {[m['is'] for m in p.heard]}" for p in self.stage.players[-20:])
        agents = "\n".join(f"--- {agent!r}\n{agent.said()}" for agent in self.agents)
        return f"workers:\n{players}\n{agents}"

    def close(self, *, check: bool = True) -> None:
        """Kill all processes that still run, as a power cut would. Check that nothing is left, and that no
        two worlds trained at once."""
        try:
            for agent in self.agents:
                if agent.process.poll() is None:
                    agent.signal(signal.SIGKILL)
                    agent.signal(signal.SIGCONT)
                    agent.process.wait()
            if check:
                assert_nothing_left(self)
                assert not (found := overlaps(self.stage.players)), f"two worlds at once: {found}"
        finally:
            for pid in marked(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for agent in self.agents:
                for reader in agent._readers:
                    reader.join(PATIENCE_S)
            self.stage.close()
            shutil.rmtree(self.tmp, ignore_errors=True)


def _begin(
    argv: Sequence[str], env: dict[str, str], cwd: Path, out: int, err: int, *, fork: bool
) -> subprocess.Popen[bytes] | forkserver.Forked:
    if fork:
        return forkserver.Forked(argv, env=env, cwd=cwd, stdout=out, stderr=err)
    return subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
    )


def await_end(pidfd: int, who: str) -> None:
    assert select.select([pidfd], [], [], PATIENCE_S)[0], f"{who} is still there"


def marked(mark: str) -> list[int]:
    """Return the processes that have this mark in their environment; zombies have none."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def assert_nothing_left(cluster: Cluster) -> None:
    """The agents have ended. Wait until nothing of them is left: no process (and so no port, since only
    processes hold ports), no shared memory, no file but logs."""
    deadline = time.monotonic() + PATIENCE_S
    while left := marked(cluster.mark):
        assert time.monotonic() < deadline, f"still there: {[_describe(pid) for pid in left]}"
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(left[0])
            select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(fd)
    pages = {Path(p.env["ELASTICD_PAGE"]).parent for p in cluster.stage.players}
    remains = [str(path) for path in pages if path.exists()]
    remains += [str(path) for path in cluster.tmp.iterdir() if not _is_of_an_older_torch(path)]
    remains += [str(path) for path in (cluster.folder / "run").rglob("*") if path.is_file()]
    assert not remains, f"left behind: {remains}"


def _is_of_an_older_torch(path: Path) -> bool:
    """Whether this is a folder that torch before 2.13 makes when it is imported, and removes at its exit. A
    process that is killed leaves the folder behind."""
    if torchparts.release(torchparts.installed()) >= (2, 13) or not path.is_dir():
        return False
    return all(inside.name.startswith(("_remote_module", "__pycache__")) for inside in path.iterdir())


def _what_runs(agent: int) -> str:
    """Return the processes below the agent, the places where their threads wait, and their native stacks if
    gdb is installed."""
    told = []
    for pid in descendants(agent):
        told += [_describe(pid), thread_report(pid)]
        if shutil.which("gdb"):
            argv = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all backtrace 40"]
            gdb = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            told.append(gdb.stdout)
    return "\n".join(told)


def _describe(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        words = "gone meanwhile"
    return f"{pid}: {words[:200]}"


def plain(text: str) -> str:
    """Return the text without the control sequences of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
