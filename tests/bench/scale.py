"""The cost of the leader's events by the number of nodes: the real driver of the agent that leads, and the
facts that the other agents would write. All numbers but the seconds are the same in each run.

The other agents and etcd are left out, so the leader's own thread is measured alone. ``ops`` are the lines of
Python that run, in loops and comprehensions once for each turn: the same number on every machine.
"""

from __future__ import annotations

import math
import sys
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from types import FrameType
from typing import Any

import msgspec

from elasticd.checkpoint.client.packs import packed
from elasticd.checkpoint.client.save_plan import RankContent, share_out
from elasticd.checkpoint.format.layout import (
    Box,
    Holding,
    RankShare,
    StateForm,
    TensorForm,
    box_of,
    encode_shares,
    lay_out,
)
from elasticd.checkpoint.replication.wire import HEAD
from elasticd.core import agent, gathered
from elasticd.core.age import Age
from elasticd.core.agent.hearing import with_exit
from elasticd.core.agent_messages import Tick
from elasticd.core.facts import (
    Exit,
    Fact,
    Leadership,
    Limits,
    Member,
    MemberPart,
    Node,
    NodeLedger,
    NodeTelemetry,
    Outcome,
    Paces,
    Phase,
    Policy,
    Progress,
    Report,
    RoomProbe,
    Round,
    SlotPace,
    SlotProgress,
    SlotTime,
    Spec,
    Stall,
    Summary,
)
from elasticd.core.hang.judging import Doing, Look, Patience, allowance
from elasticd.core.ledger import KEPT_MOST_S, Kind
from elasticd.core.ports import (
    Answer,
    Applied,
    Assignment,
    Changes,
    Entry,
    Guard,
    Heard,
    LeaseHeld,
    LeaseNews,
    Listing,
    Put,
    Seen,
    WorkerNews,
    Write,
)
from elasticd.core.state_memory import StateMemory
from elasticd.core.straggler import PERIODS
from elasticd.daemon import cycles
from elasticd.daemon.driver import JUDGE_S, Driver, Happening
from elasticd.daemon.gathering import Gathering, PacesTold
from elasticd.daemon.leader_link import telemetry_messages
from elasticd.daemon.leader_link.telemetry_messages import Taken, Tell
from elasticd.daemon.leader_link.telemetry_sender import KEPT_S_MAX
from elasticd.etcd import records
from elasticd.worker.joining.shard_agreement import Bringing
from elasticd.worker.sharding.held import CommitPoint, HeldShard, newest_whole_point
from elasticd.worker.sharding.moves import MovePlan, guardians, replicas
from elasticd.worker.sharding.parts import Cut, Shapes, parts_of_ranks
from tests.bench.telling import hearing_s

WORKERS = 8  # workers of a node
RENEWAL_BYTES = 40  # bytes of a request to renew a lease, or of its answer
# the agents that send over sockets: a message costs the same in a job of any size
HEARD_AGENTS, HEARD_ROUNDS = 200, 8
SHARDS = (1, 8, 256)
TIMED_PLAYS = 3
ONE_BY_ONE = 20  # how many events of a kind are measured; the leader gets the rest at once
POLICY = Policy(straggler_drain=False)
SLOTS = tuple(range(WORKERS))  # one object, as in the records that an agent reads
STATE = StateMemory(20 * 10**9)  # of a sharded model; each node has memory for 50 of it
FRAMES = "Traceback (most recent call last):\n" + '  File "train.py", line 88, in step\n' * 40  # 1.5 kB

QUIET = "a quiet event"
REPORT = "a report"
TOLD = "a node's telemetry"
PACES = "a node's paces"
PERIOD = "the last paces of a period"
LOST = "a lost node"
STANDSTILL = "a node stands still"
STILL = "a quiet event, all still"
RELEASE = "a release"
JUDGED = "a judgement of a hang"
FORMING = "a forming"
FAILURE = "a release with failures"
REFORMING = "a re-forming, all failed"
UNITS = "a forming of units, few places"
RESIZE = "a resize, sharded"
HANDOVER = "a handover, sharded"
IN_PLACE = "a release, sharded"
GIVING = "a release of a handover"
TAKEOVER = "a takeover of the lead"
END = "the end of the job"
OF_ONE_NODE = (QUIET, REPORT, TOLD, PACES, STANDSTILL, STILL, LOST, RELEASE, FAILURE, IN_PLACE, GIVING)
OF_ALL_NODES = (PERIOD, JUDGED, FORMING, REFORMING, UNITS, RESIZE, HANDOVER, TAKEOVER, END)
ONCE = (LOST, *OF_ALL_NODES)  # these happen once or twice, in several events


class Missing(Exception):
    """A figure is missing."""


class _NoLink:
    """The connection of the leader's own agent, which needs none."""

    def listen(self, heard: Callable[[Heard], None]) -> None: ...

    def tell(self, told: NodeTelemetry, leader: Leadership | None) -> None: ...

    def flush(self, within_s: float, spread_s: float = 0.0) -> bool:
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """A watch of a key, or of a prefix."""

    key: str
    prefix: bool
    seen: Callable[[Seen], None]

    def covers(self, key: str) -> bool:
        return key.startswith(self.key) if self.prefix else key == self.key


class _Etcd:
    """The keys of the job. ``messages`` and ``bytes``: to and from all agents, by ``what`` they are for."""

    def __init__(self, watched_by_all: Sequence[str], nodes: int) -> None:
        self.what = ""
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.lease: Callable[[LeaseNews], None] = lambda news: None
        self._watched_by_all = (*watched_by_all, "hang", "stragglers")
        self._nodes = nodes
        self._entries: dict[str, Entry] = {}
        self._revision = 1
        self._watches: list[_Watched] = []
        self._asked: deque[_Watched] = deque()
        self._taken: deque[tuple[tuple[Write, ...], Callable[[Answer], None]]] = deque()

    def hold_lease(self, news: Callable[[LeaseNews], None]) -> None:
        self.lease = news

    def watch(self, key: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        watch = _Watched(key, prefix, seen)
        self._watches.append(watch)
        self._asked.append(watch)
        return lambda: self._watches.remove(watch)

    def transact(
        self, guards: tuple[Guard, ...], writes: tuple[Write, ...], answer: Callable[[Answer], None]
    ) -> None:
        """Take the writes, which the agent's thread encodes. ``work`` applies them."""
        for write in writes:
            if isinstance(write, Put):
                records.encode(write.key, write.fact)
        self._taken.append((writes, answer))

    def _apply(self, writes: tuple[Write, ...], answer: Callable[[Answer], None]) -> None:
        """Apply the writes. Nobody else writes meanwhile, so all guards hold."""
        self._revision += 1
        answer(Applied(self._revision))
        changed: dict[str, Fact | None] = {}
        for write in writes:
            if isinstance(write, Put):
                changed[write.key] = write.fact
            else:
                changed |= dict.fromkeys(k for k in self._entries if k.startswith(write.key))
        self._write(changed)

    def forget_watches(self) -> None:
        """Let the agent that watches be gone."""
        self._watches.clear()
        self._asked.clear()

    def fact(self, key: str) -> Fact | None:
        return self._entries[key].fact

    def put(self, facts: Mapping[str, Fact | None]) -> None:
        """Let other agents write the keys; None deletes a key. Each watch brings all changes at once."""
        self._revision += 1
        self._write(facts)

    def _write(self, facts: Mapping[str, Fact | None]) -> None:
        changes = []
        for key, fact in facts.items():
            before = self._entries.pop(key, None)
            created = before.created if before is not None else self._revision
            changes.append(Entry(key, fact, self._revision, created if fact is not None else 0))
            if fact is not None:
                self._entries[key] = changes[-1]
            self._count(key, fact)
        for watch in tuple(self._watches):
            if mine := tuple(e for e in changes if watch.covers(e.key)):
                watch.seen(Changes(mine))

    def work(self) -> None:
        """Apply the writes, and send each new watch what there is. An agent's thread has no part in that."""
        while self._taken:
            self._apply(*self._taken.popleft())
        while self._asked:
            watch = self._asked.popleft()
            there = tuple(e for k, e in self._entries.items() if watch.covers(k))
            watch.seen(Listing(there, self._revision))

    def _count(self, key: str, fact: Fact | None) -> None:
        folder = key.partition("/")[0]
        size = len(key) + (len(records.encode(key, fact)) if fact is not None else 0)
        if isinstance(
            fact, MemberPart
        ):  # written once, and read once by the leader and each agent in the part
            reads = 1 + len(fact.members)
            self.messages[self.what] += 2 * reads
            self.bytes[self.what] += size * (1 + reads) + len(key) * reads
            return
        watchers = self._nodes if key in self._watched_by_all else 2 if folder in ("nodes", "reports") else 1
        asked = 0 if folder in ("reports", "members") else 2  # the leader's transaction, or the release's
        self.messages[self.what] += asked + (watchers if folder != "members" else 0)
        self.bytes[self.what] += size * (1 + watchers)


class _Procs:
    """Workers of the leader's own node: they end when they are told to."""

    def __init__(self) -> None:
        self._end: Callable[[], None] = lambda: None

    def listen(self, news: Callable[[WorkerNews], None]) -> None: ...

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None: ...

    def start(
        self,
        round_number: int,
        assignments: tuple[Assignment, ...],
        exited: Callable[[int, Exit], None],
        waiting: Collection[int] = (),
    ) -> None:
        def end() -> None:
            for slot in range(WORKERS):
                exited(round_number, Exit(slot, slot, -15, 0.0))

        self._end = end

    def leave(
        self, planned: bool, signal: int, grace_s: float, leave_s: float | None, going: bool = False
    ) -> None:
        self._end()

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None:
        self._end()

    def go_on(self, slots: tuple[int, ...]) -> None: ...

    def fence(self, until: float | None) -> None: ...

    def steps(self) -> Mapping[int, int]:
        return {}


class _Stores:
    def __init__(self) -> None:
        self._port = 29500

    def open(self) -> None: ...

    def renew(self) -> int:
        self._port += 1
        return self._port


@dataclass(slots=True)
class Cost:
    """The costs of the single events of a kind: CPU seconds, or operations."""

    cpu_s: list[float] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)


class Leader:
    """The agent that leads a job of ``nodes`` nodes.

    ``counting``: count operations, which takes long, instead of the time. ``until``: when to give up, by
    ``time.monotonic``. ``unit``: the workers of a unit. ``sharded``: the workers of all other nodes keep
    their process, and a part of the state.
    """

    def __init__(
        self,
        nodes: int,
        *,
        counting: bool = False,
        until: float = math.inf,
        unit: int = 1,
        sharded: bool = False,
    ) -> None:
        self.costs: dict[str, Cost] = {kind: Cost() for kind in (*OF_ONE_NODE, *OF_ALL_NODES)}
        self._counting = counting
        self._until = until
        self._now = 1_000_000.0
        self._inbox: deque[Happening] = deque()
        self.names = [f"node-{n:05}" for n in range(nodes)]
        self._records = {name: _record(n, name, sharded) for n, name in enumerate(self.names)}
        self._sharded = sharded
        self._ages: dict[int, Age] = {}  # one object for all records, as decoded records have it
        limits = Limits(WORKERS, (nodes - sharded) * WORKERS, unit)
        self._spec = Spec(limits, limits, "train.py", "f" * 64, POLICY, inplace=sharded)
        self.etcd = _Etcd(agent.watched(_identity(self._records[self.names[0]]))[:3], nodes)
        self.etcd.put({f"nodes/{name}": self._records[name] for name in self.names[1:-1]})
        self._lead(self.names[0], "")

    def _lead(self, name: str, kind: str) -> None:
        """Let the agent of this node start. It takes the lead, which no other agent has."""
        me = self._records[name]
        self.driver = Driver(
            agent.AgentState(_identity(me), self._spec, agent.AgentConfig(etcd_grace_s=600.0), me.store_port),
            store=self.etcd,
            procs=_Procs(),
            stores=_Stores(),
            assign=lambda round, member: (),
            assign_standbys=lambda slots, began: (),
            process_alive=lambda pid: True,
            post=self._inbox.append,
            say=lambda reason: None,
        )
        self.driver.begin()
        self.etcd.lease(LeaseHeld(self._now * 2))
        self.settle(kind)

    @property
    def round(self) -> Round:
        """The round with all its members."""
        round = self.driver.view.round if self.driver.view is not None else None
        if round is None:
            raise Missing("the leader has opened no round")
        return round

    def settle(self, kind: str = "") -> None:
        """Handle all events, as the agent's loop does."""
        self.etcd.work()
        while self._inbox or self.driver.has_half_a_decision:
            self._handle(kind, Tick() if self.driver.has_half_a_decision else self._inbox.popleft())
            self.etcd.work()

    def tick(self, kind: str, after_s: float) -> None:
        self._now += after_s
        self._handle(kind, Tick())
        self.settle(kind)

    def see(self, kind: str, facts: Mapping[str, Fact | None]) -> None:
        """Let other agents write these keys."""
        self.etcd.put(facts)
        self.settle(kind)

    def _hear(self, kind: str, *paces: Paces) -> None:
        """Let other agents report their paces."""
        self._inbox.append(PacesTold(paces))
        self.settle(kind)

    def _handle(self, kind: str, event: Happening) -> None:
        with self._costing(kind), cycles.not_now():
            self.driver.handle(event, self._now)

    @contextmanager
    def _costing(self, kind: str) -> Iterator[None]:
        if time.monotonic() > self._until:
            raise Missing(f"{kind or 'the start'} was not over in time")
        if not kind:
            yield
        elif self._counting:
            with counted() as count:
                yield
            self.costs[kind].ops.append(count())
        else:
            began = time.thread_time()
            yield
            self.costs[kind].cpu_s.append(time.thread_time() - began)

    def gathering(self) -> Gathering:
        """Return an object that receives the agents' telemetry, and has received none."""
        made = Gathering(self.driver.state, self.etcd, _NoLink())
        made.begin(lambda news: None)
        made.attend(self.driver.state, self.driver.view, self._now)
        self.etcd.work()
        return made

    def telemetry(self, member: Member, period: int) -> NodeTelemetry:
        """Return what the agent of the member reports after a while."""
        number = self.round.number
        beats = tuple(SlotProgress(s, member.rank_of(s), 123456, 1000, 1e9 + s) for s in member.slots)
        spent = dict.fromkeys(map(str, Kind), 12345.678)
        times = tuple(SlotTime(slot, spent, 1000, 1.234) for slot in member.slots)
        return NodeTelemetry(
            member.node,
            member.incarnation,
            29501,
            Progress(member.node, number, beats),
            _paces(member, number, period),
            NodeLedger(member.node, self._now, times, 2),
        )

    def summary(self) -> Summary:
        """Return what the leader writes once all nodes have reported everything."""
        known = gathered.restore(gathered.Gathered(2), None)
        for member in self.round.members:
            known = gathered.hear(known, self.telemetry(member, 1000))
        return gathered.summarize(known, self.names[0], set(self.names), self._now)[1]

    # ------------------------------------------------------------ events of the job

    def form(self, kind: str = FORMING) -> None:
        """The last node joins, and the first round forms."""
        self._expect(Phase.WAITING)
        last = self.names[-1]
        self.see(kind, {f"nodes/{last}": self._records[last]})
        self._expect(Phase.LIVE)

    def stay_quiet(self, events: int = ONE_BY_ONE) -> None:
        for _ in range(events):
            self.tick(QUIET, 0.5)

    def report(self, events: int = ONE_BY_ONE) -> None:
        """Workers of some nodes have made steps. No node has to act on that."""
        for n in range(1, min(events, len(self.names))):
            name = self.names[n]
            told = Report(name, self._records[name].incarnation, self.round.number, steps=n)
            self.see(REPORT, {f"reports/{name}": told})

    def tell(self) -> None:
        """All nodes report their telemetry. A few report further telemetry."""
        gathering, members = self.gathering(), self.round.members
        gathering.hear([self.telemetry(member, 1) for member in members])
        for member in members[-ONE_BY_ONE:]:
            raw = telemetry_messages.encoded(Tell((self.telemetry(member, 2),)))
            with self._costing(TOLD):
                told = telemetry_messages.request(raw)
                heard = gathering.hear(told.nodes) if isinstance(told, Tell) else None
            if heard is None or heard.again:
                raise Missing("the leader does not know the agents")

    def compare(self, periods: int) -> None:
        """All nodes report their paces, a few of them one by one."""
        first, rest, last = self.names[1:ONE_BY_ONE], self.names[ONE_BY_ONE:-1], self.names[-1]
        members = {m.node: m for m in self.round.members}
        for number in range(1, periods + 1):
            paces = {name: _paces(members[name], self.round.number, number) for name in self.names}
            for name in first:
                self._hear(PACES, paces[name])
            self._hear("", *(paces[name] for name in (self.names[0], *rest)))
            self._hear(PERIOD, paces[last])
        if self.driver.view is None or not self.driver.view.stragglers:
            raise Missing("the leader has compared nobody")

    def stand_still(self) -> None:
        """One node after the other reports that its workers wait. Then all continue."""
        allowed = allowance([1.0] * 10, 10, Patience())
        assert allowed is not None
        stalls: dict[str, Fact] = {
            f"stalls/{m.node}": Stall(m.node, m.incarnation, self.round.number, _waiting(m), allowed)
            for m in self.round.members
        }
        keys = list(stalls)
        self.see("", {key: stalls[key] for key in keys[ONE_BY_ONE:-1]})
        for key in keys[:ONE_BY_ONE]:
            self.see("", {key: stalls[key]})
            self.tick(STANDSTILL, JUDGE_S)
        self.see("", {keys[-1]: stalls[keys[-1]]})
        self.tick(JUDGED, JUDGE_S)
        for _ in range(ONE_BY_ONE):
            self.tick(STILL, JUDGE_S)
        if self.driver.view is None or not self.driver.view.judged.of:
            raise Missing("the leader has judged nobody")
        self.tick(JUDGED, allowed.waiting_s)
        if self.driver.view.hang is None:
            raise Missing("the leader has found nobody who hangs")
        self.see("", dict.fromkeys(stalls))

    def lose_a_node(self) -> None:
        """The last node is lost. The others release the round, and form the next one."""
        lost = self.names.pop()
        self.see(LOST, {f"nodes/{lost}": None})
        self._expect(Phase.CLOSING)
        self._release(RELEASE, FORMING, failing=False)

    def scale(self, kind: str, nodes: int) -> None:
        """The operator wants a world of so many nodes' workers."""
        self._spec = replace(self._spec, limits=replace(self._spec.limits, max=nodes * WORKERS))
        self.see(kind, {"spec": self._spec})
        self._expect(Phase.CLOSING)

    def release(self, last_kind: str, kind: str = "") -> None:
        """All nodes release the round, and form the next one."""
        self._release(kind, last_kind, failing=False)

    def fail_everywhere(self) -> None:
        """All workers fail. Their nodes release the round with their reports, and form the next one."""
        self._release(FAILURE, REFORMING, failing=True)

    def take_over(self) -> None:
        """Another agent starts, and leads the job from now on. It reads all that etcd has."""
        self._inbox.clear()
        self.etcd.forget_watches()
        self.names.append(f"node-{len(self._records):05}")
        self._records[self.names[-1]] = _record(len(self._records), self.names[-1], self._sharded)
        self.etcd.put({"leader": None})
        self._lead(self.names[-1], TAKEOVER)
        self._expect(Phase.LIVE)

    def end(self) -> None:
        """The operator stops the job, and all nodes release the round."""
        self.see("", {"spec": replace(self._spec, stop=True)})
        self._expect(Phase.CLOSING)
        number, members = self.round.number, self.round.members
        released: dict[str, Fact | None] = {}
        for member in members:
            released |= self._released(member, number, failing=False)
        last = members[-1].node
        finish = {key: released.pop(key) for key in (f"reports/{last}", f"nodes/{last}")}
        self.see("", released)
        self._expect(Phase.CLOSING)
        self.see(END, finish)
        ended = self.etcd.fact("round")
        if not isinstance(ended, Round) or ended.outcome is not Outcome.STOPPED:
            raise Missing("the job has not ended")

    def _release(self, kind: str, last_kind: str, *, failing: bool) -> None:
        number, members = self.round.number, {m.node: m for m in self.round.members}
        others = [name for name in self.names[1:] if name in members]
        phase = Phase.LIVE if self.round.handover else Phase.CLOSING
        released = [self._released(members[name], number, failing) for name in others]
        # Those that are measured come when nearly all others have released the round.
        self.see("", dict(chain.from_iterable(facts.items() for facts in released[:-ONE_BY_ONE])))
        for facts in released[-ONE_BY_ONE:-1]:
            self.see(kind, facts)
        self._expect(phase)
        self.see(last_kind, released[-1])
        self._expect(Phase.LIVE)
        if self.round.number != number + 1:
            raise Missing(f"after round {number} comes round {self.round.number}")

    def _released(self, member: Member, number: int, failing: bool) -> dict[str, Fact | None]:
        """Return what an agent writes with its release of the round."""
        name, known = member.node, self._records[member.node]
        exits: tuple[Exit, ...] = ()
        for slot in member.slots if failing else ():
            rank = member.rank_of(slot)
            message = f"RuntimeError: rank {rank} has lost its connection to another rank"
            failed = Exit(slot, rank, 1, self._now, message, FRAMES + message, f"/logs/{slot}/stderr")
            exits = with_exit(exits, failed)
        report = Report(name, known.incarnation, number, exits, steps=1000)
        known = replace(known, released=number, told=report.ends, store_port=known.store_port + 1)
        if self._sharded:
            age = self._ages.setdefault(number, Age(number, 1000))
            known = replace(known, age=age, holders=known.slots, sharded=True, state=STATE)
        self._records[name] = known
        return {f"reports/{name}": report, f"nodes/{name}": self._records[name]}

    def _expect(self, phase: Phase) -> None:
        if self.round.phase is not phase:
            raise Missing(f"round {self.round.number} is {self.round.phase}, not {phase}")


def _identity(node: Node) -> agent.Identity:
    return agent.Identity(node.name, node.incarnation, node.address, node.slots, node.host, node.pid)


def _record(n: int, name: str, sharded: bool) -> Node:
    address = f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}"
    node = Node(name, f"{n:032x}", address, SLOTS, 0, 29500, 4711, f"{name}:{n:036x}")
    return replace(node, ready=SLOTS, memory=10**12) if sharded else node


def _waiting(member: Member) -> tuple[Look, ...]:
    return tuple(
        Look(
            member.node, slot, member.rank_of(slot), 9, 1.0, Doing.WAITING, "train.py:88", "all_reduce", 10.0
        )
        for slot in member.slots
    )


def _paces(member: Member, number: int, period: int) -> Paces:
    slots = tuple(
        SlotPace(slot, rank, 0.1 + 1e-4 * (rank * 7919 % 97 + period * rank % 13))
        for slot in member.slots
        for rank in (member.rank_of(slot),)
    )
    return Paces(member.node, member.incarnation, number, period, slots)


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the lines of Python that run in the block."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: lines
    finally:
        sys.settrace(before)


# ---------------------------------------------------------------- the figures


@dataclass(slots=True)
class Figures:
    """The figures of one size. ``cpu_s`` and ``ops``: of one event of each kind. For kinds with many events
    that is the median, else the worst; and of the times, the median of several plays, since a machine may be
    slow for a moment. ``plans``: of ``plan_of_a_checkpoint``, for each of ``SHARDS``."""

    nodes: int
    cpu_s: dict[str, float]
    ops: dict[str, float]
    reforming: tuple[float, float]  # messages and bytes of an agent, at the loss of a node
    minute: tuple[float, float]  # messages and bytes of an agent in a quiet minute
    told: tuple[float, float]  # messages and bytes between an agent and the leader in a quiet minute
    hearing_s: float  # the leader's CPU time for the messages of all agents in a quiet minute
    memory: int
    plans: Sequence[Planning]
    moving: tuple[float, int]  # of ``moves_in_a_new_world``

    @classmethod
    def of(cls, nodes: int, limit_s: float) -> Figures:
        until = time.monotonic() + limit_s
        earlier = [play(nodes, until=until).costs for _ in range(TIMED_PLAYS - 1)]
        timed, costed = play(nodes, until=until), play(nodes, counting=True, until=until)
        cpu_s = {
            kind: median(_event(kind, costs[kind].cpu_s) for costs in (*earlier, timed.costs))
            for kind in timed.costs
        }
        ops = {kind: _event(kind, cost.ops) for kind, cost in costed.costs.items()}
        etcd = timed.etcd
        reforming = etcd.messages[LOST] / nodes, etcd.bytes[LOST] / nodes
        minute, told, memory = _quiet_minute(timed), _told(timed, nodes), _memory(nodes, until)
        hearing = _hearing_s(timed, nodes, cpu_s[PACES])
        plans = [plan_of_a_checkpoint(nodes * WORKERS, shards) for shards in SHARDS]
        moving = moves_in_a_new_world(nodes * WORKERS)
        return cls(nodes, cpu_s, ops, reforming, minute, told, hearing, memory, plans, moving)


def play(nodes: int, *, counting: bool = False, until: float = math.inf) -> Leader:
    """Play all that is measured."""
    leader = Leader(nodes, counting=counting, until=until)
    leader.form()
    leader.stay_quiet()
    leader.report()
    leader.tell()
    leader.compare(2 if counting else PERIODS + 1)
    leader.stand_still()
    leader.etcd.what = LOST
    leader.lose_a_node()
    leader.etcd.what = ""
    leader.fail_everywhere()
    for another in (_units_in_few_places, _handover, _takeover_and_end):
        other = another(nodes, counting, until)
        leader.costs |= {kind: cost for kind, cost in other.costs.items() if cost.cpu_s or cost.ops}
    return leader


def _units_in_few_places(nodes: int, counting: bool, until: float) -> Leader:
    """Half of the workers are to go on, in units of four."""
    leader = Leader(nodes, counting=counting, until=until, unit=4)
    leader.form("")
    leader.scale("", nodes // 2)
    leader.release(UNITS)
    return leader


def _handover(nodes: int, counting: bool, until: float) -> Leader:
    """A sharded job is to be smaller, and smaller again before its round has ended. Those that learn only
    then that they leave give their parts in a handover round."""
    leader = Leader(nodes, counting=counting, until=until, sharded=True)
    leader.form("")
    leader.scale(RESIZE, 3 * nodes // 4)
    leader.scale("", nodes // 2)
    leader.release(HANDOVER, IN_PLACE)
    if not leader.round.handover:
        raise Missing("there is no handover")
    leader.release("", GIVING)
    return leader


def _takeover_and_end(nodes: int, counting: bool, until: float) -> Leader:
    """Another agent takes the lead, when all nodes have reported. Then the operator stops the job."""
    leader = Leader(nodes, counting=counting, until=until)
    leader.form("")
    leader.scale("", nodes - 1)
    leader.release("")
    leader.take_over()
    leader.end()
    return leader


def _event(kind: str, costs: Sequence[float]) -> float:
    if not costs or not max(costs) > 0:
        raise Missing(f"the cost of {kind} is missing")
    return max(costs) if kind in ONCE else median(costs)


def _quiet_minute(leader: Leader) -> tuple[float, float]:
    """Return an agent's share of the messages and bytes through etcd in a quiet minute: each agent renews its
    lease, and the leader writes the summary."""
    nodes = len(leader.names)
    renewals = 60 / (POLICY.node_ttl_s / 3)
    summary = leader.summary()
    every_s = gathered.summarize_every_s(summary)
    writes: dict[str, tuple[Fact, float]] = {"summary": (summary, 60 / every_s)}
    if every_s > gathered.PROBE_S:
        writes["room"] = RoomProbe(summary.at), 60 / gathered.PROBE_S
    size = sum((len(key) + len(records.encode(key, fact))) * often for key, (fact, often) in writes.items())
    messages = 2 * renewals + 2 * sum(often for _, often in writes.values()) / nodes
    return messages, 2 * RENEWAL_BYTES * renewals + size / nodes


def _told(leader: Leader, nodes: int) -> tuple[float, float]:
    """Return the messages and bytes between an agent and the leader of a job of so many nodes."""
    every_s, paced_s, kept_s = _periods(nodes)
    told = leader.telemetry(leader.round.members[-1], 1000)
    parts = (
        (replace(told, paces=None, ledger=None), every_s),
        (replace(told, progress=None, ledger=None), paced_s),
        (replace(told, progress=None, paces=None), kept_s),
    )
    size = sum(60 / s * len(telemetry_messages.encoded(Tell((part,)))) for part, s in parts)
    answer = len(telemetry_messages.encoded(Taken(Heard(every_s))))
    return 2 * 60 / every_s, size + 60 / every_s * (answer + 2 * HEAD.size)


def _periods(nodes: int) -> tuple[float, float, float]:
    """Return how often each of so many agents reports its progress, its paces and its ledger."""
    every_s = gathered.tell_every_s(nodes)
    return every_s, max(every_s, POLICY.straggler_window_s / PERIODS), max(every_s, KEPT_MOST_S)


def _hearing_s(leader: Leader, nodes: int, paces_s: float) -> float:
    """Return the CPU time of the leader's threads for everything that so many agents report in a minute.
    ``paces_s``: the time for the paces of one node, once they are received."""
    every_s, paced_s, kept_s = _periods(nodes)
    members = leader.round.members[-HEARD_AGENTS:]

    def told(member: Member, number: int) -> NodeTelemetry:
        whole, at_s = leader.telemetry(member, number + 1), number * every_s + member.base_rank
        news = replace(whole, paces=whole.paces if at_s % paced_s < every_s else None)
        return news if at_s % kept_s < every_s else replace(news, ledger=None)

    rounds = ([told(member, number) for member in members] for number in range(HEARD_ROUNDS))
    each_s = hearing_s(leader.gathering(), rounds, kept=every_s <= KEPT_S_MAX)
    return nodes * (60 / every_s * each_s + 60 / paced_s * paces_s)


def _memory(nodes: int, until: float) -> int:
    """Return the bytes that the agent holds once it leads and has compared a whole window of paces."""
    tracemalloc.start()
    try:
        leader = Leader(nodes, until=until)
        leader.form()
        leader.compare(PERIODS)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@dataclass(frozen=True, slots=True)
class Planning:
    """The first save of a GPT with 1.3 billion parameters, without the copy. ``first_s``: CPU seconds of rank
    0, which plans. ``received``, ``given``: bytes that rank 0 gets from all ranks, and gives its saver.
    ``other_s``, ``share``: CPU seconds, and bytes from rank 0, of the other rank that writes most."""

    first_s: float
    received: int
    given: int
    other_s: float
    share: int


def plan_of_a_checkpoint(ranks: int, shards: int) -> Planning:
    """Plan a checkpoint. ``shards``: the ranks that hold one copy of the model together."""
    form = msgspec.json.encode(_form_of_a_gpt())
    encoded = [msgspec.json.encode(_holding_of_a_gpt(shard, shards)) for shard in range(shards)]
    # RankGroup.collect, twice: four numbers; unless all ranks are alike, also two packs with their sizes from
    # each node, of the ranks' digests and of what they are asked for, and the kinds
    digests = packed([bytes([rank % shards] * 14) for rank in range(WORKERS)])
    told = len(digests) + len(packed([b""] * WORKERS)) + 2 * 8
    received = 8 * 8 + (0 if shards == 1 else ranks // WORKERS * told + sum(map(len, encoded)))
    began = time.thread_time()
    one = msgspec.json.decode(form, type=StateForm)
    kinds = [RankContent(one, msgspec.json.decode(raw, type=Holding)) for raw in encoded]
    held = [kinds[rank % shards] for rank in range(ranks)]
    shares = share_out(held)
    sent = [msgspec.json.encode(share) if share else b"" for share in shares]
    given = len(encode_shares([form] * ranks, [encoded[rank % shards] for rank in range(ranks)], sent))
    first_s = time.thread_time() - began
    rank = max(range(1, ranks), key=lambda rank: len(sent[rank]))
    began = time.thread_time()
    lay_out(rank, one, held[rank].holding, msgspec.json.decode(sent[rank], type=RankShare))
    return Planning(first_s, received, given, time.thread_time() - began, len(sent[rank]))


def _form_of_a_gpt(layers: int = 24, width: int = 2048) -> StateForm:
    """Return the tensors of the model and of its optimizer."""
    layer = {"ln_1.weight": (width,), "ln_1.bias": (width,), "ln_2.weight": (width,), "ln_2.bias": (width,)}
    for name, *shape in (("qkv", 3 * width, width), ("proj", width, width), ("fc", 4 * width, width)):
        layer |= {f"{name}.weight": tuple(shape), f"{name}.bias": tuple(shape[:1])}
    layer |= {"out.weight": (width, 4 * width), "out.bias": (width,)}
    shapes = {"wte": (50304, width), "wpe": (2048, width)}
    shapes |= {f"h.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    return StateForm(
        tuple(
            TensorForm(f"{kind}.{name}", (kind, name), "float32", 4, shape)
            for kind in ("model", "exp_avg", "exp_avg_sq")
            for name, shape in shapes.items()
        )
    )


def _holding_of_a_gpt(shard: int, shards: int) -> Holding:
    """Return what a rank has of the model and of its optimizer."""
    boxes: list[Box | None] = []
    for tensor in _form_of_a_gpt().tensors:
        most, rest = -(-tensor.shape[0] // shards), tensor.shape[1:]
        first = min(shard * most, tensor.shape[0])
        rows = min(most, tensor.shape[0] - first)
        boxes.append(box_of((first, *(0 for _ in rest)), (rows, *rest)) if rows else None)
    return Holding(tuple(boxes), {"random": (6000, ("random",)), "step": (200, ("step",))})


def moves_in_a_new_world(ranks: int) -> tuple[float, int]:
    """Return a rank's CPU seconds for the moves of its parts of a model with 290 parameters, after a node is
    lost, and the bytes that the rank hears of the others. All ranks share the model, and keep two commits,
    each with a copy of another rank's shard."""
    shapes, parts = Shapes((1 << 20,) * 290, (300,) * 290), parts_of_ranks(Cut(ranks), ranks)
    nodes = [str(rank // WORKERS) for rank in range(ranks)]
    owners = {guardian: owner for owner, its in enumerate(guardians(nodes, 1)) for guardian in its}
    points = CommitPoint(3, 1000, 0), CommitPoint(3, 1001, 0)
    told = []
    for rank in range(WORKERS, ranks):
        copy = parts[owners[rank]]._replace(copy=True)
        held = [HeldShard(point, its, its.copy, ranks) for point in points for its in (parts[rank], copy)]
        told.append(msgspec.json.encode(Bringing(nodes[rank], shapes.digest, held)))
    began = time.thread_time()
    brought = [msgspec.json.decode(raw, type=Bringing) for raw in told]
    point = newest_whole_point(shapes, (its.held for its in brought))
    wanted = parts_of_ranks(Cut(len(told)), len(told))
    moves = MovePlan(shapes, [its.held for its in brought], points[-1], wanted).of_rank(0)
    guardians([its.node for its in brought], 1, replicas(wanted))
    if point != points[-1] or not moves:
        raise Missing("there are no moves")
    return time.thread_time() - began, sum(map(len, told))


def scale(sizes: Sequence[int], limit_s: float) -> str:
    """Return the table. Raises Missing if a figure is missing."""
    found = [Figures.of(nodes, limit_s) for nodes in sizes]
    lines = [f"{WORKERS} workers a node" + "".join(f"{f'{each.nodes:,} nodes':>28}" for each in found)]
    lines.append(f"{'an event of':<26}" + f"{'ms':>14}{'operations':>14}" * len(found))
    for kind in (*OF_ONE_NODE, *OF_ALL_NODES):
        costs = (f"{each.cpu_s[kind] * 1e3:>14,.2f}{each.ops[kind]:>14,.0f}" for each in found)
        lines.append(f"{kind:<26}{''.join(costs)}")
    for name, of in {
        "a node is lost, an agent": [each.reforming for each in found],
        "a quiet minute, etcd": [each.minute for each in found],
        "and telling the leader": [each.told for each in found],
    }.items():
        lines.append(f"{name:<26}" + "".join(f"{f'{m:,.0f} messages, {_size(b)}':>28}" for m, b in of))
    hearing = (f"{each.hearing_s:,.1f} s of CPU time" for each in found)
    lines.append(f"{'and hearing all agents':<26}" + "".join(f"{one:>28}" for one in hearing))
    lines.append(f"{'memory of the leader':<26}" + "".join(f"{_size(each.memory):>28}" for each in found))
    for number, shards in enumerate(SHARDS):
        plans = [each.plans[number] for each in found]
        first = (f"{p.first_s:,.2f} s, {_size(p.received)} in, {_size(p.given)} out" for p in plans)
        other = (f"{p.other_s * 1e3:,.2f} ms, {_size(p.share)} in" for p in plans)
        name = "a plan of a checkpoint" if shards == 1 else f"and of a model in {shards} shards"
        lines.append(f"{name:<28}" + "".join(f"{one:>34}" for one in first))
        lines.append(f"{'  on another rank':<28}" + "".join(f"{one:>34}" for one in other))
    moving = (f"{each.moving[0]:,.2f} s, {_size(each.moving[1])} in" for each in found)
    lines.append(f"{'a rank in a new world, FSDP2':<28}" + "".join(f"{one:>34}" for one in moving))
    return "\n".join(lines)


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"
