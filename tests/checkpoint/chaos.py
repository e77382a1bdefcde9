"""Kill workers, savers, agents and whole nodes of a real job at random instants of its saves, many times.

The job is two agents on this machine, three workers that save each step, copies in the other node's
memory, and an etcd. After each kill, workers resume from a whole state of one step that is not older than
the newest commit; all committed checkpoints read back whole; and new saves are committed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from elasticd.checkpoint.format.manifest import BadCheckpoint
from elasticd.checkpoint.storage import store_at
from elasticd.checkpoint.storage.reading import open_manifest, verify
from elasticd.core.facts import Checkpoint, Saved
from elasticd.etcd.blocking_client import Client
from tests.e2e.harness import Cluster, marked
from tests.etcd.cluster import EtcdOnPorts

PROGRAMS: Final = Path(__file__).parent / "programs" / "chaos"
VICTIMS: Final = ("worker", "saver", "agent", "node")
SLOTS: Final = {"a": 2, "b": 1}
PATIENCE_S: Final = 120.0
_REACHED_S: Final = 10.0  # an instant may not come, for example if nothing is to be removed
_PACE: Final = {"--max-restarts": "1000000", "--grow-cooldown": "0.1", "--node-ttl": "2"}
_POLICY: Final = {"quarantine_after": 0, "futile_max": 0, "settle_s": 0.2, "broken_s": 0.3}

# About how often each event comes in one save.
_OF_SAVER: Final = {"write": 4, "fsync": 6, "after fsync": 6, "send": 12}
_OF_WHO_COMMITS: Final = dict.fromkeys(
    ("rename", "after rename", "mkdir", "remove", "after remove", "transact", "after transact"), 1
)
_OF_WORKER: Final = {
    "copy": 1,
    "say BufferTorn": 1,
    "after say BufferTorn": 1,
    "say SaveShard": 1,
    "after say SaveShard": 1,
}
_OF_BEGINNING: Final = {"say OpenWorld": 1, "say PlanShard": 1, "say ShareBuffer": 2}  # steps of a world


class Broken(AssertionError):
    """A checkpoint was lost or torn, or the job does not continue."""


@dataclass(frozen=True, slots=True)
class Try:
    """``who`` kills a ``victim`` of ``node`` at an ``event``, after ``skip`` such events, when ``part`` of
    the call is done."""

    victim: str
    node: str
    slot: int
    who: str  # a name, or the beginning of names
    event: str
    skip: int
    part: float

    @property
    def begins(self) -> bool:
        """Whether the event comes only at the beginning of a world."""
        return self.event in _OF_BEGINNING

    @property
    def stage(self) -> str:
        return f"{self.who.partition('@')[0]} {self.event}"

    def __str__(self) -> str:
        slot = f".{self.slot}" if self.victim == "worker" else ""
        at = f"{self.skip} times {self.event!r}" if self.skip else f"{self.event!r}"
        part = f", {self.part:.0%} of it done" if self.event in ("write", "send", "copy") else ""
        return f"{self.victim} {self.node}{slot} at {self.who}'s {at}{part}"


def draw(chance: random.Random, victims: tuple[str, ...] = VICTIMS) -> Try:
    victim, node = chance.choice(victims), chance.choice(tuple(SLOTS))
    slot = chance.randrange(SLOTS[node])
    at = chance.choice(tuple(SLOTS))
    worker = f"worker@{at}.{chance.randrange(SLOTS[at])}"
    by = [(f"saver@{at}", _OF_SAVER), ("saver@", _OF_WHO_COMMITS), (worker, _OF_WORKER)]
    if victim == "worker":
        by.append((worker, _OF_BEGINNING))
    who, events = chance.choice(by)
    event = chance.choice(tuple(events))
    times = events[event] if events is _OF_BEGINNING else 2 * events[event]
    return Try(victim, node, slot, who, event, chance.randrange(times), chance.random())


@dataclass
class Chaos:
    """The job, and the tries. ``tell`` gets a line for each try."""

    folder: Path
    seed: int
    tell: Callable[[str], None] = print
    reached: Counter[str] = field(default_factory=Counter)  # the tries, by victim and by stage
    stages: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    _heard: list[dict[str, Any]] = field(default_factory=list)
    _newest: Saved | None = None
    _floors: list[tuple[float, int]] = field(default_factory=list)  # when each committed step was first seen
    _judged: int = 0

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"elasticd-chaos-{uuid.uuid4().hex}"
        self._socket.bind(f"\0{name}")
        self._etcd = EtcdOnPorts()
        self._etcd.start()
        self.cluster = Cluster(self.folder, f"http://{self._etcd.endpoint}")
        self.cluster.limits = (1, sum(SLOTS.values()))
        self.cluster.pace |= _PACE
        self.cluster.policy |= _POLICY
        self._client = Client(self.cluster.access)
        self._path = self.folder / "kept"
        self._armed = self.folder / "armed"
        self._env = {"CHAOS_SOCKET": name, "CHAOS_ARMED": str(self._armed), "PYTHONPATH": str(PROGRAMS)}
        self._agents = {node: self._begin(node) for node in SLOTS}
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        try:
            self.cluster.close(check=error == (None, None, None))
        finally:
            self._etcd.stop()
            self._socket.close()

    def run(self, tries: int, victims: tuple[str, ...] = VICTIMS) -> None:
        """Make the tries. Raises Broken."""
        chance = random.Random(self.seed)
        self._goes_on()
        for number in range(tries):
            one = draw(chance, victims)
            self.tell(f"{number:4} {one}: {self._hurt(one)}")

    # ------------------------------------------------------------ one try

    def _hurt(self, one: Try) -> str:
        """Make one try. Return the outcome in words."""
        self._see()
        first = len(self._heard)
        order = {"who": one.who, "event": one.event, "skip": one.skip, "part": one.part}
        order["pids"] = [] if one.begins else self._pids(one)
        fresh = self._armed.with_suffix(".new")
        fresh.write_text(json.dumps(order))
        fresh.rename(self._armed)
        if one.begins:
            for pid in self._pids(one):  # another world has begun
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        fired = self._until(lambda: self._said("fired", first), _REACHED_S)
        if not fired:
            self._armed.unlink(missing_ok=True)
            fired = self._said("fired", first)
        if not fired or not fired[0]["pids"]:
            self.missed += 1
            self._goes_on()
            return "the victim was gone already" if fired else "the event did not come"
        self.reached[one.victim] += 1
        self.stages[one.stage] += 1
        killed = fired[0]["at"]
        floor = self._see()
        if one.victim in ("agent", "node"):
            self._agents[one.node].process.wait(PATIENCE_S)
            self._agents[one.node] = self._begin(one.node)

        def resumed() -> list[dict[str, Any]]:
            return [m for m in self._said("resumed", first) if m["since"] > killed]

        if one.victim != "saver":
            there = {one.node} if one.victim != "worker" else set()
            self._until_or_break(
                lambda: resumed() and {m["node"] for m in resumed()} >= there,
                f"{one.node} trains again",
            )
        step = self._goes_on(max((m["step"] for m in resumed()), default=0))
        self.tiers.update(m["tier"] for m in resumed())
        from_ = ", ".join(sorted({f"{m['step']} from {m['tier']}" for m in resumed()})) or "nobody"
        return f"committed {floor}, resumed {from_}, then committed {step}"

    def _goes_on(self, after: int = 0) -> int:
        """Wait until a later step is committed. Check everything that has happened. Return that step."""
        before = max(after, self._see())
        self._until_or_break(lambda: self._see() > before, f"more than step {before} is committed")
        self._judge()
        self._verify()
        return self._see()

    def _judge(self) -> None:
        """Check that workers have resumed from one step, and from no older step than the commits before."""
        for message in self._heard[self._judged :]:
            if message["is"] == "torn":
                raise Broken(f"a torn state was loaded: {message['why']}")
            if message["is"] == "resumed":
                floor = max((step for at, step in self._floors if at < message["since"]), default=0)
                if message["step"] < floor:
                    raise Broken(f"step {floor} was committed, and {message} began after it")
        self._judged = len(self._heard)

    def _verify(self) -> None:
        """Read back all committed checkpoints. Those that retention drops meanwhile may be missing."""
        store = store_at(self._path)
        for saved in self._committed().saved:
            try:
                wrong = [w for _, whys in verify(store, open_manifest(store, saved)) for w in whys]
            except BadCheckpoint as error:
                wrong = [str(error)]
            if wrong and saved in self._committed().saved:
                raise Broken(f"step {saved.step} is committed, and {wrong[0]}")

    # ------------------------------------------------------------ the job

    def _begin(self, node: str) -> Any:
        options = ("--replicate=1", f"--checkpoints={self._path}", "--http=off")
        program = (str(PROGRAMS / "training.py"),)
        [agent] = self.cluster.start(node, slots=SLOTS[node], options=options, program=program, env=self._env)
        return agent

    def _pids(self, one: Try) -> list[int]:
        if one.victim == "agent":
            return [self._agents[one.node].pid]
        if one.victim == "node":
            return [pid for pid in marked(self.cluster.mark) if _node_of(pid) == one.node]
        if one.victim == "saver":
            return [m["pid"] for m in self._heard if m["is"] == "saver" and m["node"] == one.node][-1:]
        newest = max((m["round"] for m in self._heard if m["is"] == "began"), default=0)
        its = [m for m in self._heard if m["is"] == "began" and (m["node"], m["round"]) == (one.node, newest)]
        return [m["pid"] for m in sorted(its, key=lambda m: m["rank"])][one.slot :][:1]

    def _committed(self) -> Checkpoint:
        entry = self._client.get(self.cluster.job, "checkpoint")
        fact = entry.fact if entry else Checkpoint("")
        assert isinstance(fact, Checkpoint)
        return fact

    def _see(self) -> int:
        """The newest committed step. Raises Broken if an older one was the newest."""
        newest = self._committed().newest
        if self._newest is not None and (newest is None or newest.step < self._newest.step):
            raise Broken(f"{self._newest} was committed, and now {newest} is the newest")
        self._newest = newest
        step = newest.step if newest else 0
        self._floors.append((time.monotonic(), step))
        return step

    # ------------------------------------------------------------ messages of the processes

    def _said(self, what: str, first: int = 0) -> list[dict[str, Any]]:
        return [m for m in self._heard[first:] if m["is"] == what]

    def _until(self, holds: Callable[[], Any], patience_s: float) -> Any:
        """Wait until ``holds`` returns a true value, and return it; ask after each message, and ten times a
        second."""
        deadline = time.monotonic() + patience_s
        while not (found := holds()) and time.monotonic() < deadline:
            self._socket.settimeout(0.1)
            try:
                self._heard.append(json.loads(self._socket.recv(65536)))
            except TimeoutError:
                continue
        return found

    def _until_or_break(self, holds: Callable[[], Any], what: str) -> None:
        if not self._until(holds, PATIENCE_S):
            raise Broken(f"not within {PATIENCE_S:g} s: {what}\n{self.cluster.state()}")


def _node_of(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((os.fsdecode(word[9:]) for word in raw if word.startswith(b"E2E_NODE=")), "")
