"""Runs a job, injects the faults of its plan, watches the job, and judges it. Shared with other tests: the
bridge is tests/k8s/network.py, the etcds are tests/etcd/cluster.py, and the promises of a supervisor are
in tests/chaos/oracles.py, as they are in tests/sim/invariants.py for the simulator."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from elasticd.core.facts import Budget, Checkpoint, Leadership, Saved
from elasticd.etcd import embedded
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.errors import StoreError
from tests.chaos import oracles
from tests.chaos.oracles import Line, Whole, whole_steps
from tests.chaos.patience import Machine, slowness
from tests.chaos.places import Agent, Host, Node, environment_of
from tests.chaos.schedule import MEMBERS, Episode, Fault, Kind, Plan, charges
from tests.etcd.cluster import Cluster
from tests.k8s.network import UNDER_US, Network

ELASTICD: Final = str(Path(sys.executable).with_name("elasticd"))
PROGRAMS: Final = Path(__file__).parent / "programs"
SAMPLES: Final = {
    Kind.SCRIPT: 192,
    Kind.PLAIN: 205,
    Kind.CONSISTENT: 205,
}  # the samples of an epoch, as in the programs
LOOK_S: Final = 0.1
STEP_S: Final = 0.05
DISK_BYTES: Final = 64 << 20  # of checkpoints
MEMORY_BYTES: Final = 4 << 30  # the most bytes of what a job leaves behind
TTL_S: Final = 5.0
QUOTA_BYTES: Final = 16 << 20
ETCD_FLAGS: Final = (
    f"--quota-backend-bytes={QUOTA_BYTES}",
    "--auto-compaction-mode=revision",
    "--auto-compaction-retention=1000",
    "--heartbeat-interval=200",
    "--election-timeout=2000",
)
# The time within which training must continue once all faults are mended: the timers of the agents, several
# times over, and this many times the time that the first world took to form on this machine.
TIMERS_S: Final = 60.0
TIMES_FORMING: Final = 10
GIVES_UP_S: Final = 3600.0  # of wall-clock time; on such a slow machine the test says nothing about elasticd
PACE: Final = {
    "--grow-cooldown": "1",
    "--join-timeout": "36000",
    "--shutdown-timeout": "10",
    "--etcd-wait": "600",
    "--max-restarts": "1000000",
    "--http": "off",
}
POLICY: Final = """\
etcd_grace_s = 36000
settle_s = 0.3
broken_s = 1
part_s = 10
quarantine_after = 0
futile_max = 0
"""
LEFT_ON_REQUEST: Final = 143


class Broken(AssertionError):
    """A rule was broken."""


class Ledgers:
    """What the workers of a job have written, as far as the files have been read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[Line] = []
        self._read: dict[Path, int] = {}

    def read(self) -> list[Line]:
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.lines += oracles.parse(whole.decode())
        return self.lines


class Watch:
    """Watches which checkpoint etcd names as the newest. Its step may never go back, except after damage
    on the disk, which ``forgive`` announces. ``floors``: when each step was first seen to be durable."""

    def __init__(self, access: EtcdAccess, job: str) -> None:
        self.floors: list[tuple[float, int]] = []
        self.broken: list[str] = []
        self.newest: Saved | None = None
        self._highest = 0
        self._damaged: set[str] = set()
        self._access, self._job = access, job
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        with Client(self._access) as client:
            while not self._over.wait(0.5):
                try:
                    entry = client.get(self._job, "checkpoint")
                except StoreError:
                    continue
                fact = entry.fact if entry else None
                self.newest = fact.newest if isinstance(fact, Checkpoint) else None
                if self.newest is not None and self.newest.name in self._damaged:
                    continue
                step, highest = self.newest.step if self.newest else 0, self._highest
                if step < highest:
                    self.broken.append(
                        f"step {highest} was committed in etcd, and later {step} was the newest"
                    )
                if step > highest:
                    self.floors.append((time.time(), step))
                self._highest = step

    def forgive(self, step: int) -> None:
        """Allow the newest checkpoint to go back, because the test has damaged it."""
        assert self.newest is not None
        self._damaged.add(self.newest.name)
        self.floors = [floor for floor in self.floors if floor[1] < step]
        self._highest = 0

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)


class Nemesis:
    """One job from its start to its end. ``say``: called with a line for each thing that happens. ``kept``:
    the folder of the job's ledgers and logs afterwards, if the job has failed or ``keep`` is true.

    The job's folder is in memory, so that other programs that write to the disk do not disturb the job.
    """

    def __init__(self, plan: Plan, seed: int, say: Callable[[str], None], *, keep: bool = False) -> None:
        self.plan, self.say, self.keep = plan, say, keep
        self.job = f"chaos-{seed}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
        self._policy = self.folder / "policy.toml"
        self.kept: Path | None = None
        self.slowness = slowness(os.getloadavg()[0], os.cpu_count() or 1)
        self.began = time.monotonic()
        self.ledgers = Ledgers(self.folder / "ledger")
        self.done: Counter[str] = Counter()
        self.hurt_s: list[float] = []  # for each mending: how long the job took to train again
        self._agents: dict[str, Agent] = {}
        self._all: list[Agent] = []
        self._down: dict[str, float] = {}  # until when a node has no agent
        self._lost: Counter[tuple[int, str]] = Counter()
        self._busy: list[subprocess.Popen[bytes]] = []
        self._commands: list[subprocess.Popen[bytes]] = []
        self._thawed: list[tuple[float, str]] = []
        self._missed: list[Fault] = []
        self._pending: list[Callable[[], bool]] = []  # the faults of an episode that are yet to come
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ending = False
        self._forming_s = 0.0
        self._size = plan.size

    # ------------------------------------------------------------ its nodes

    def __enter__(self) -> Nemesis:
        with contextlib.ExitStack() as undo:
            undo.callback(self.folder.rmdir)
            _mount(self.folder, MEMORY_BYTES)
            undo.callback(subprocess.run, ["umount", "--recursive", "--lazy", str(self.folder)])
            for name in ("ledger", "snapshots", "etcd", "agents", "checkpoints", "reference/ledger"):
                (self.folder / name).mkdir(parents=True)
            self._policy.write_text(POLICY)
            _mount(self.folder / "checkpoints", DISK_BYTES)
            self.network = Network()
            undo.callback(self.network.close)
            self.network.enter()
            self.hosts: list[Host] = []
            for _ in range(MEMBERS):
                self.hosts.append(Host(self.network))
                undo.callback(self.hosts[-1].close)
            self.etcd = Cluster(
                self.folder / "etcd",
                MEMBERS,
                flags=ETCD_FLAGS,
                hosts=[(host.address, host.inside) for host in self.hosts],
            )
            undo.callback(self.etcd.stop)
            self.etcd.start()
            self.access = EtcdAccess(self.etcd.endpoints)
            self.watch = Watch(self.access, self.job)
            undo.callback(self.watch.close)
            self.nodes: dict[str, Node] = {}
            self.machine = Machine(self._pids)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._undo:
            if self.keep or error[0] is Broken:
                self.kept = self.folder.with_name(f"{self.folder.name}-kept")
                shutil.copytree(self.folder, self.kept, ignore=shutil.ignore_patterns("own", "filling"))
            for process in (*self._busy, *self._commands):
                process.kill()
                process.wait()
            for agent in self._all:
                agent.close()
            for node in self.nodes.values():
                node.close()

    def _name(self, number: int) -> str:
        return f"n{number % self.plan.nodes}"

    def _begin(self, name: str) -> None:
        """Start an agent on the node. Start the node first, if it has crashed."""
        if name not in self.nodes:
            ahead = self.plan.ahead_s if name == self._name(self.plan.nodes - 1) else 0
            self.nodes[name] = Node(name, self.network, self.folder / "own" / name, ahead)
        node, plan = self.nodes[name], self.plan
        argv = [ELASTICD, "run", f"--min={plan.least}", f"--max={plan.size}"]
        argv += [f"--slots={plan.slots - plan.spares}"]
        argv += [
            f"--node={name}",
            f"--address={node.address}",
            f"--job={self.job}",
            f"--etcd={self._endpoints}",
        ]
        argv += ["--log-format=json", "--plain", "--redirects=3", f"--log-dir={self.folder / 'logs' / name}"]
        argv += [part for option in PACE.items() for part in option]
        argv += [f"--policy={self._policy}"]
        argv += [f"--node-ttl={TTL_S * self.slowness:.0f}"]
        argv += ["--fresh-start"] if plan.fresh else []
        if plan.kind is Kind.SCRIPT:
            argv += [str(PROGRAMS / "script.py")]
        else:
            argv += [f"--checkpoints={self.folder / 'checkpoints'}", "--checkpoint-every=10"]
            argv += [f"--spares={plan.spares}", f"--replicate={int(plan.replicate)}"]
            argv += [str(PROGRAMS / "resident.py"), plan.kind.value]
        own = {
            "CHAOS_NODE": name,
            "XDG_RUNTIME_DIR": str(node.folder / "run"),
            "TMPDIR": str(node.folder / "tmp"),
            "XDG_STATE_HOME": str(self.folder / "state" / name),
        }
        said = self.folder / "agents" / f"{name}-{sum(a.node.name == name for a in self._all)}"
        self._agents[name] = Agent.start(node, argv, self._environment(own), self.folder, said)
        self._all.append(self._agents[name])

    @property
    def _endpoints(self) -> str:
        return ",".join(f"http://{endpoint}" for endpoint in self.etcd.endpoints)

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        ours = ("PET_", "ELASTICD_", "TORCH", "OMP_", "PYTEST_", "ETCD", "E2E_", "CHAOS_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        mine = {"CHAOS_FOLDER": str(self.folder), "CHAOS_STEP_S": str(STEP_S), "OMP_NUM_THREADS": "1"}
        return kept | mine | {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")} | more

    def _pids(self) -> list[int]:
        etcds = [m.process.pid for m in self.etcd.members if m.process is not None]
        return etcds + [pid for node in self.nodes.values() for pid in node.processes()]

    # ------------------------------------------------------------ the whole job

    def run(self, until: float) -> None:
        """Run the job. ``until``: the time (``time.monotonic``) after which no episode but the first begins.
        Raises Broken."""
        plan = self.plan
        for number in range(plan.nodes - plan.late):
            self._begin(self._name(number))
        self._size = (plan.nodes - plan.late) * (plan.slots - plan.spares)
        began_s = self.machine.look()
        self._await(lambda: self._trains(0), "a first step", None)
        self._forming_s = self.machine.look() - began_s
        self._tell(f"trains; the job had {self._forming_s:.1f} s for that")
        self._size = plan.size
        for number, episode in enumerate(plan.episodes):
            if number and time.monotonic() > until:
                self._tell(f"no time is left for episodes {number} to {len(plan.episodes) - 1}")
                break
            self._play(number, episode)
        self._end()

    def _play(self, number: int, episode: Episode) -> None:
        mark = len(self.ledgers.read())
        self._await(
            lambda: len(whole_steps(self.ledgers.read()[mark:])) >= episode.after,
            f"{episode.after} steps while all is well",
        )
        charged = self._budget()
        self._missed, self._pending = [], []
        began = time.monotonic()
        if number == 0 and self.plan.late:
            for late in range(self.plan.nodes - self.plan.late, self.plan.nodes):
                self._at(began, partial(self._begin, self._name(late)))
        for fault in episode.faults:
            self._at(began + fault.at_s, partial(self._inject, fault))
        while self._agenda:
            self._tend()
            if self._agenda[0][0] <= time.monotonic():
                heapq.heappop(self._agenda)[2]()
            else:
                time.sleep(min(LOOK_S, max(0.0, self._agenda[0][0] - time.monotonic())))
        self._await(lambda: all(settled() for settled in self._pending), "what was asked for is done")
        mark, mended_s = len(self.ledgers.read()), self.machine.look()
        self._await(lambda: self._trains(mark), f"training goes on with {self._size} workers")
        self.hurt_s.append(self.machine.look() - mended_s)
        last = [line for line in self.ledgers.lines if line.what == "entered"][-1]
        took = f"{self.hurt_s[-1]:.1f} s after all was mended"
        self._tell(f"episode {number}: goes on {took}, in round {last.round} from step {last.step}")
        least, most = charges(episode.faults)
        self._check(
            oracles.wrong_charge(self._budget() - charged, 0 if self._missed else least, most),
            self._judged(),
        )

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), do))

    def _end(self) -> None:
        self._ending = True
        (self.folder / "stop").touch()
        self._await(
            lambda: all(agent.code is not None for agent in self._agents.values()),
            "the job ends when told to",
        )
        codes = {name: agent.code for name, agent in self._agents.items()}
        if set(codes.values()) != {0}:
            raise Broken(f"the job ended with the exit codes {codes}")
        self._await(lambda: not self._left(), f"nothing is left: {self._left()}")
        lines = self.ledgers.read()
        if not any(line.what == "ended" for line in lines):
            raise Broken("the job ended with exit code 0, and no worker has come to its end")
        expected = self._reference(max(line.step for line in lines))
        self._check(
            self._judged(),
            oracles.judge(
                lines, expected, thawed=self._thawed, same_weights=self.plan.kind is Kind.CONSISTENT
            ),
            oracles.not_each_once(expected, SAMPLES[self.plan.kind]),
        )

    def _left(self) -> list[str]:
        return [f"{name}: {what}" for name, node in self.nodes.items() for what in node.left()]

    def _reference(self, steps: int) -> oracles.Reference:
        folder = self.folder / "reference"
        (folder / "snapshots").mkdir(exist_ok=True)
        alone = {"CHAOS_FOLDER": str(folder), "CHAOS_UNTIL": str(steps), "CHAOS_STEP_S": "0"}
        script = ["script.py"] if self.plan.kind is Kind.SCRIPT else ["resident.py", self.plan.kind.value]
        subprocess.run(
            [*UNDER_US, sys.executable, str(PROGRAMS / script[0]), *script[1:]],
            env=self._environment(alone | {"PYTHONPATH": str(PROGRAMS.parents[2])}),
            check=True,
        )
        return oracles.reference(Ledgers(folder / "ledger").read())

    # ------------------------------------------------------------ judging

    def _judged(self) -> list[str]:
        lines = self.ledgers.read()
        found = oracles.judge(lines, thawed=self._thawed)
        if self.plan.kind is Kind.SCRIPT:
            floors = [(line.at, line.step) for line in lines if line.what == "saved"]
        else:
            floors = self.watch.floors
        found += oracles.resumed_too_early(lines, floors)
        for agent in self._all:
            found += oracles.tracebacks(agent.err.read_text(errors="replace"))
        return found + self.watch.broken

    def _check(self, *found: Iterator[str] | list[str]) -> None:
        if broken := [sentence for sentences in found for sentence in sentences]:
            raise Broken("\n".join(dict.fromkeys(broken[:20])))

    def _budget(self) -> int:
        """Return how many failures were charged so far. etcd may need a moment to answer."""
        found: Budget | None = None

        def read() -> bool:
            nonlocal found
            try:
                with Client(self.access) as client:
                    entry = client.get(self.job, "budget")
            except StoreError:
                return False
            found = entry.fact if entry and isinstance(entry.fact, Budget) else Budget()
            return True

        self._await(read, "etcd answers")
        assert found is not None
        return found.total

    def _trains(self, mark: int) -> bool:
        """Whether a world of the expected size has made a whole step since then."""
        lines = self.ledgers.read()
        since = lines[mark - 1].at if mark else 0.0
        made: list[Whole] = whole_steps(lines[mark:])
        return any(step.world == self._size and step.began > since for step in made)

    # ------------------------------------------------------------ waiting

    def _await(self, holds: Callable[[], bool], what: str, times: int | None = TIMES_FORMING) -> None:
        """Wait for the condition. ``times``: the limit, as a multiple of the time that the first world took
        to form; None: no limit."""
        began, began_s = time.monotonic(), self.machine.look()
        timers_s = TIMERS_S * self.slowness
        allowed_s = float("inf") if times is None else timers_s + times * self._forming_s
        while not holds():
            self._tend()
            had_s = self.machine.look() - began_s
            if had_s > allowed_s:
                raise Broken(f"not within {allowed_s:.0f} s that the job had for it: {what}\n{self._state()}")
            if time.monotonic() - began > GIVES_UP_S:
                raise Broken(f"not within {GIVES_UP_S:.0f} s, of which the job had {had_s:.0f} s: {what}")
            time.sleep(LOOK_S)

    def _tend(self) -> None:
        """Act as a platform does: start an ended agent again, unless its exit code forbids that."""
        self._commands = [command for command in self._commands if command.poll() is None]
        for name, agent in list(self._agents.items()):
            code = agent.code
            if code is None:
                continue
            if self._ending:
                if code in (0, LEFT_ON_REQUEST) or agent.hurt:
                    continue
                raise Broken(f"the agent of {name} ended with {code} while the job was to end: {agent.err}")
            expected = agent.hurt or (agent.drained and code == LEFT_ON_REQUEST)
            if not expected:
                raise Broken(f"the agent of {name} ended with {code} by itself: see {agent.err}")
            if time.monotonic() >= self._down.get(name, 0.0):
                self._begin(name)

    def _state(self) -> str:
        newest = max((line.round for line in self.ledgers.read()), default=0)
        here = [
            f"{line.node}.{line.slot} {line.what} {line.step}"
            for line in self.ledgers.lines
            if line.round == newest
        ]
        told = [f"newest round in the ledgers {newest}: {'; '.join(here[-12:])}"]
        for name, agent in self._agents.items():
            said = [
                " ".join(f"{k}={v}" for k, v in e.items() if k not in ("job", "node", "level"))
                for e in agent.events
            ]
            told += [f"--- {name}, exit code {agent.code}: {agent.err}", *said[-12:]]
        return "\n".join(told)

    def _tell(self, what: str) -> None:
        self.say(f"{time.monotonic() - self.began:7.1f}  {what}")

    # ------------------------------------------------------------ faults

    def _inject(self, fault: Fault) -> None:
        mend = self._do(fault)
        if mend is None:
            self._missed.append(fault)
            self._tell(f"  missed: {fault}")
            return
        self._tell(f"  {fault}")
        self.done[fault.kind] += 1
        if fault.for_s:

            def mended() -> None:
                mend()
                self._tell(f"  mended: {fault.kind}")

            self._at(time.monotonic() + fault.for_s * self.slowness, mended)

    def _do(self, fault: Fault) -> Callable[[], None] | None:
        """Inject the fault, and return what mends it. Return None where the fault has no target."""
        family, _, what = fault.kind.partition(".")
        name = self._name(fault.node)
        if family == "leader":
            name = self._leader() or name
        if family == "worker":
            return self._hurt_worker(what, name, fault)
        if family in ("agent", "leader", "warden", "saver", "zygote"):
            return self._hurt_process(family, what, name, fault)
        if family == "blackout":
            return self._blackout(what)
        if family == "split":
            return self._split(name)
        acts: dict[str, Callable[[], Callable[[], None] | None]] = {
            "node.crash": partial(self._crash, name, fault.for_s),
            "node.kill": partial(self._kill_all, name, fault.for_s),
            "node.freeze": partial(self._freeze, name),
            "link.down": partial(self._unplug, name),
            "link.oneway": partial(self._deafen, name, True),
            "link.slow": partial(self._slow, name),
            "etcd.unheard": partial(self._deafen, name, False),
            "etcd.mute": partial(self._mute, name),
            "member.kill": partial(self._kill_etcd, [fault.node]),
            "member.stop": partial(self._stop_etcd, [fault.node]),
            "etcd.kill": partial(self._kill_etcd, range(MEMBERS)),
            "etcd.stop": partial(self._stop_etcd, range(MEMBERS)),
            "etcd.full": self._fill_etcd,
            "drain": partial(self._drain, name, fault.for_s),
            "scale": partial(self._scale, fault.slot),
            "disk.full": self._fill_disk,
            "busy": partial(self.keep_busy, 8),
        }
        return acts[fault.kind]()

    def _leader(self) -> str | None:
        try:
            with Client(self.access) as client:
                entry = client.get(self.job, "leader")
        except StoreError:
            return None
        return entry.fact.node if entry and isinstance(entry.fact, Leadership) else None

    def _hurt_worker(self, what: str, name: str, fault: Fault) -> Callable[[], None] | None:
        node = self.nodes.get(name)
        entered = [line for line in self.ledgers.read() if line.what == "entered"]
        newest = max((line.round for line in entered), default=0)
        here = [line for line in entered if line.round == newest and line.node == name]
        if node is None or not here:
            return None
        line = sorted(here, key=lambda line: line.rank)[fault.slot % len(here)]
        pid = node.numbered(line.pid)
        if pid is None:
            return None
        if what == "raise":
            return self._have_it_raise(line, fault)
        return _signal([pid], signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def _have_it_raise(self, line: Line, fault: Fault) -> Callable[[], None]:
        order = self.folder / f"raise-{line.rank}"
        order.touch()

        def settled() -> bool:
            if not order.exists():
                return True
            if self.ledgers.read()[-1].round <= line.round:
                return False
            order.unlink(missing_ok=True)  # the worker's world was over before the worker could raise
            self._missed.append(fault)
            return True

        self._pending.append(settled)
        return _nothing

    def _hurt_process(self, family: str, what: str, name: str, fault: Fault) -> Callable[[], None] | None:
        node, agent = self.nodes.get(name), self._agents.get(name)
        if node is None or agent is None or agent.code is not None:
            return None
        if family in ("agent", "leader"):
            if what == "kill":
                agent.hurt = True
                self._down[name] = time.monotonic() + fault.for_s
                agent.signal(signal.SIGKILL)
                return _nothing
            agent.signal(signal.SIGSTOP)
            return lambda: agent.signal(signal.SIGCONT)
        pids = [pid for pid in node.processes() if _is(family, pid)]
        if not pids:
            return None
        if family == "warden" and what == "kill":  # then the worker's agent leaves
            agent.hurt = True
            self._down[name] = time.monotonic() + fault.for_s
        return _signal(pids, signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def _crash(self, name: str, for_s: float) -> Callable[[], None] | None:
        node, agent = self.nodes.pop(name, None), self._agents.get(name)
        if node is None:
            return None
        if agent is not None:
            agent.hurt = True
        self._down[name] = time.monotonic() + for_s
        node.close()
        if agent is not None:
            agent.reap()
        return _nothing

    def _kill_all(self, name: str, for_s: float) -> Callable[[], None] | None:
        node, agent = self.nodes.get(name), self._agents.get(name)
        if node is None or agent is None or agent.code is not None:
            return None
        agent.hurt = True
        self._down[name] = time.monotonic() + for_s
        while found := node.processes():
            _signal(found, signal.SIGKILL)()
        agent.reap()
        for path in [path for place in node.own for path in place.iterdir()]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()  # as after a restart of the machine
        return _nothing

    def _freeze(self, name: str) -> Callable[[], None] | None:
        node = self.nodes.get(name)
        agent = self._agents.get(name)
        if node is None or agent is None:
            return None
        signals = _signal(node.processes(), signal.SIGSTOP)

        def thaw() -> None:
            self._thawed.append((time.time(), name))
            signals()
            if agent.code is None:
                agent.signal(signal.SIGCONT)

        return thaw

    def _split(self, name: str) -> Callable[[], None] | None:
        """Crash the other nodes, so that this node trains alone; then cut it off from etcd. The other
        nodes come back and train without it."""
        here = self.plan.slots - self.plan.spares
        if name not in self.nodes or here < self.plan.least:
            return None
        others = [self._name(number) for number in range(self.plan.nodes) if self._name(number) != name]
        for other in others:
            self._crash(other, float("inf"))
        size, self._size = self._size, here
        mark = len(self.ledgers.read())
        self._await(lambda: self._trains(mark), f"{name} trains alone")
        self._tell(f"    {name} trains alone")
        mends = [self._deafen(name, False), self._mute(name)]
        for other in others:
            self._down[other] = 0.0
        self._size = size - here
        self._await(lambda: self._trains(mark), f"the others train without {name}")
        self._tell(f"    the others train without {name}")
        self._size = size

        def mend() -> None:
            for one in mends:
                assert one is not None
                one()

        return mend

    def _blackout(self, what: str) -> Callable[[], None]:
        if what:  # there is a file to damage, and another checkpoint to continue from
            seen = len(self.watch.floors)
            self._await(lambda: len(self.watch.floors) >= seen + 2, "two more checkpoints are committed")
        for name in list(self.nodes):
            self._crash(name, 0.5)
        if what:
            self._damage(what)
        return _nothing

    def _damage(self, what: str) -> None:
        disk, newest = self.folder / "checkpoints", self.watch.newest
        assert newest is not None
        files = sorted(disk.rglob("committed.json"))
        if what == "shard_damaged":
            files = sorted((disk / newest.name).glob("*.distcp"), key=lambda path: path.stat().st_size)[-1:]
            self.watch.forgive(newest.step)
        for path in files:
            if what == "record_gone":
                path.unlink()
            else:
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 4
                path.write_bytes(content)
            self._tell(f"    {what}: {path.relative_to(disk)}")

    def _unplug(self, name: str) -> Callable[[], None] | None:
        node = self.nodes.get(name)
        if node is None:
            return None
        self.network.unplug(node.address)
        return lambda: self.network.plug_in(node.address) if self.nodes.get(name) is node else None

    def _slow(self, name: str) -> Callable[[], None] | None:
        node = self.nodes.get(name)
        if node is None:
            return None
        self.network.slow(node.address, 200)
        return lambda: self.network.fast(node.address) if self.nodes.get(name) is node else None

    def _deafen(self, name: str, all_of_them: bool) -> Callable[[], None] | None:
        node = self.nodes.get(name)
        if node is None:
            return None
        others = [host.address for host in self.hosts]
        if all_of_them:
            others += [other.address for other in self.nodes.values() if other is not node]
        self._lose(node.pid, others)
        return lambda: self._find(node.pid, others) if self.nodes.get(name) is node else None

    def _mute(self, name: str) -> Callable[[], None] | None:
        node = self.nodes.get(name)
        if node is None:
            return None
        for host in self.hosts:
            self._lose(host.pid, [node.address])

        def mend() -> None:
            for host in self.hosts:
                self._find(host.pid, [node.address])

        return mend

    def _lose(self, pid: int, addresses: list[str]) -> None:
        self.network.lose(pid, *addresses)
        self._lost.update((pid, address) for address in addresses)

    def _find(self, pid: int, addresses: list[str]) -> None:
        self._lost.subtract((pid, address) for address in addresses)
        self.network.find(pid, *(address for address in addresses if not self._lost[pid, address]))

    def _stop_etcd(self, which: Any) -> Callable[[], None] | None:
        pids = [m.process.pid for m in (self.etcd.members[i] for i in which) if m.process is not None]
        return _signal(pids, signal.SIGSTOP) if pids else None

    def _kill_etcd(self, which: Any) -> Callable[[], None]:
        members = [self.etcd.members[i] for i in which]
        for member in members:
            member.kill()

        def start() -> None:
            for member in members:
                if member.process is None:
                    member.start()

        return start

    def _etcdctl(self, *argv: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        program = embedded.find_etcd().with_name("etcdctl")
        command = [
            str(program),
            f"--endpoints={','.join(self.etcd.endpoints)}",
            "--command-timeout=5s",
            *argv,
        ]
        return subprocess.run(command, input=given, capture_output=True, env={"ETCDCTL_API": "3"}, timeout=60)

    def _fill_etcd(self) -> Callable[[], None] | None:
        for number in range(2 * QUOTA_BYTES >> 20):
            put = self._etcdctl("put", f"/filling/{number}", given=os.urandom(1 << 19).hex().encode())
            if b"database space exceeded" in put.stderr:
                return self._empty_etcd
        return None

    def _empty_etcd(self) -> None:
        """Free space in etcd as the guide says, and try again if etcd has a bad moment."""
        self._etcdctl("del", "--prefix", "/filling/")
        status = self._etcdctl("endpoint", "status", "--write-out=json")
        with contextlib.suppress(ValueError, KeyError):
            revision = max(s["Status"]["header"]["revision"] for s in json.loads(status.stdout))
            self._etcdctl("compact", "--physical", str(revision))
        self._etcdctl("defrag")
        disarmed = self._etcdctl("alarm", "disarm")
        listed = self._etcdctl("alarm", "list")
        if disarmed.returncode or listed.returncode or b"NOSPACE" in listed.stdout:
            self._at(time.monotonic() + 1.0, self._empty_etcd)

    def _drain(self, name: str, for_s: float) -> Callable[[], None] | None:
        agent = self._agents.get(name)
        if agent is None or agent.code is not None:
            return None
        agent.drained = True
        self._down[name] = time.monotonic() + for_s
        command = self._command("drain", name)

        def settled() -> bool:
            if agent.code is None and command.poll():  # etcd was away
                agent.drained = False
            return agent.code is not None or not agent.drained

        self._pending.append(settled)
        return _nothing

    def _scale(self, fewer: int) -> Callable[[], None] | None:
        most = max(self.plan.least, self.plan.size - 1 - 2 * fewer)
        first = self._command("scale", self.job, f"--max={most}")

        def back() -> None:
            first.wait()
            done = self._command("scale", self.job, f"--max={self.plan.size}")
            try:
                worked = done.wait(120) == 0
            except subprocess.TimeoutExpired:
                worked = False
            if not worked:
                self._at(time.monotonic() + 1.0, back)

        return back

    def _command(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        with (self.folder / "commands.log").open("ab") as log:
            log.write(f"$ elasticd {name} {' '.join(argv)}\n".encode())
            log.flush()
            command = subprocess.Popen(
                [*UNDER_US, ELASTICD, name, f"--etcd={self._endpoints}", *argv],
                env=self._environment({}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._commands.append(command)
        return command

    def _fill_disk(self) -> Callable[[], None]:
        filling = self.folder / "checkpoints" / "filling"
        with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        return lambda: filling.unlink(missing_ok=True)

    def keep_busy(self, count: int) -> Callable[[], None]:
        spinning = [*UNDER_US, sys.executable, "-I", "-S", "-c", "while True: pass"]
        started = [subprocess.Popen(spinning, start_new_session=True) for _ in range(count)]
        self._busy += started

        def end() -> None:
            for process in started:
                process.kill()
                process.wait()

        return end


def _mount(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)


def _nothing() -> None:
    """Do nothing: the fault mends itself."""


def _signal(pids: list[int], number: int) -> Callable[[], None]:
    """Send the signal. Return the function that continues the stopped processes."""
    fds = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            fds.append(fd)
            signal.pidfd_send_signal(fd, number)

    def go_on() -> None:
        for fd in fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGCONT)
            os.close(fd)

    return go_on


def _is(family: str, pid: int) -> bool:
    """Whether the process is a warden, a saver or a zygote."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    if family == "saver":
        return b"elasticd.daemon.node_saver" in command and "RANK" not in environment_of(pid)
    return name == f"elasticd-{family}"
