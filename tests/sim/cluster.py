"""Nodes that run the real agent in a simulated world, and what can happen to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial

from elasticd.core import agent, round_parts
from elasticd.core.agent_messages import LeaveJob, Signalled, Tick
from elasticd.core.facts import Drained, Leadership, Limits, Node, NodeTelemetry, Phase, Policy, Round, Spec
from elasticd.core.gathered import TELL_S
from elasticd.core.hang.judging import Patience
from elasticd.core.ports import Heard, Put, Unchanged
from elasticd.core.reasons import Reason
from elasticd.core.round_parts import PART_SIZES, PartSizes
from elasticd.daemon.driver import Driver, Happening
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.hangs import Hangs
from elasticd.daemon.observer import Observer
from elasticd.daemon.timekeeper import Timekeeper
from elasticd.procs import environment
from tests.sim.clock import Clock, Timer
from tests.sim.host import SimHost
from tests.sim.inspector import SimInspector
from tests.sim.procs import Job, SimProcs, Training
from tests.sim.store import RENEWAL, Health, Network, Renewal, SimEtcd, SimStore

POLICY = Policy(
    settle_s=1.0,
    grow_cooldown_s=8.0,
    join_timeout_s=600.0,
    shutdown_s=4.0,
    part_s=3.0,
    broken_s=1.0,
    node_ttl_s=5.0,
    quarantine_s=5.0,
    quarantine_max_s=20.0,
)
PATIENCE = Patience(floor_s=0.1, ceiling_s=60.0)
SPIN_MAX = 400  # the most wake-ups of one agent within a second of simulated time


class Broken(AssertionError):
    """Something that must never happen did."""


@dataclass(slots=True)
class Setup:
    """The description of a cluster. ``slots``: the slots of each node at the start. ``alone``: a standalone
    run of one node, with an etcd of its own. ``memory``: of each slot; some nodes have three times as much.
    ``look_s``: the least time between two looks of an agent at its workers. The other fields are what the
    agents are told."""

    slots: tuple[int, ...]
    limits: Limits
    policy: Policy = POLICY
    etcd_grace_s: float = 600.0
    etcd_wait_s: float | None = None
    skew_max_s: float = 0.0
    alone: bool = False
    script: str = "job.py"
    version: str = ""
    job: Job = field(default_factory=Job)
    memory: int = 0
    part_sizes: PartSizes = PART_SIZES
    look_s: float = 0.0
    renewal: Renewal = RENEWAL


class SimRoundStores:
    """The c10d stores of one node. A worker can join a world only while the world's store is open."""

    def __init__(self, cluster: Cluster, address: str) -> None:
        self._cluster = cluster
        self._address = address
        self._port = cluster.next_port()
        self.opened = ""

    @property
    def port(self) -> int:
        return self._port

    def open(self) -> None:
        self.shut()
        self.opened = f"{self._address}:{self._port}"
        self._cluster.open_stores.add(self.opened)

    def renew(self) -> int:
        self._port = self._cluster.next_port()
        return self._port

    def shut(self) -> None:
        self._cluster.open_stores.discard(self.opened)
        self.opened = ""


class SimLink:
    """The connection on which an agent tells the leader its telemetry. Messages may come late or get lost, as
    requests to etcd do. The agent then sends the message again."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self._random = agent.clock.random(f"link of {agent.incarnation}")
        self._heard: Callable[[Heard], None] = lambda heard: None
        self._told: NodeTelemetry | None = None
        self._leader: Leadership | None = None
        self._timer: Timer | None = None
        self._due = 0.0

    def listen(self, heard: Callable[[Heard], None]) -> None:
        self._heard = heard

    def tell(self, told: NodeTelemetry, leader: Leadership | None) -> None:
        self._told, self._leader = told, leader
        if self._timer is None:
            wait_s = max(0.0, self._due - self._agent.clock.now())
            self._timer = self._agent.host.after(wait_s, self._send)

    def flush(self, within_s: float, spread_s: float = 0.0) -> bool:
        return True

    def _send(self) -> None:
        """Send the message. Send it again a second later if the leader does not answer."""
        told, leader, agent = self._told, self._leader, self._agent
        self._timer = None
        if told is None or not agent.running:
            return
        self._due = agent.clock.now() + TELL_S
        self._timer = agent.host.after(TELL_S, self._send)
        there = agent.cluster.agents.get(leader.node) if leader is not None else None
        network = agent.cluster.network
        if there is None or agent.store.cut or there.store.cut or self._random.random() < network.lost:
            return
        agent.clock.after(
            network.delay_s(self._random), lambda: there.host.call(lambda: self._arrive(there, told))
        )

    def _arrive(self, there: SimAgent, told: NodeTelemetry) -> None:
        heard = there.gathering.hear((told,)) if there.running else None
        network, host = self._agent.cluster.network, self._agent.host
        if heard is None or self._random.random() < network.answer_lost:
            return
        self._agent.clock.after(
            network.delay_s(self._random), lambda: host.call(lambda: self._answered(told, heard))
        )

    def _answered(self, told: NodeTelemetry, heard: Heard) -> None:
        whole = not told.asks and told.node not in heard.again
        if told == self._told and whole and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = self._agent.clock.now() + heard.every_s
        self._heard(heard)


class SimAgent:
    """One incarnation of an agent: the real driver, with simulated edges."""

    def __init__(self, cluster: Cluster, name: str, slots: int, skew_s: float, machine: str = "") -> None:
        self.cluster = cluster
        self.clock = cluster.clock
        self.name = name
        self.pid = cluster.next_pid()
        self.incarnation = f"{name}.{self.pid}"
        self.host = SimHost(cluster.clock, name, skew_s)
        setup = cluster.setup
        ttl_s, renewal = setup.policy.node_ttl_s, setup.renewal
        self.store = SimStore(cluster.etcd, self.host, cluster.network, ttl_s=ttl_s, renewal=renewal)
        bad, slow = cluster.bad_slots.setdefault(name, {}), cluster.slow_slots.setdefault(name, {})
        self.procs = SimProcs(self.host, cluster.training, bad, slow)
        self.stores = SimRoundStores(cluster, name)
        self.inspector = SimInspector(self.procs)
        look_s = setup.look_s
        self.hangs = Hangs(PATIENCE, self.inspector, self.store, look_s)
        self.observer = Observer(self.procs.page_contents, lambda: 0.0, (), look_s)
        self.left: LeaveJob | None = None
        self.signalled = False
        self.memory = slots * setup.memory * cluster.clock.random(f"memory of {name}").choice((1, 1, 3))
        slots += setup.job.spares  # spares come on top of the slots that train, as on the command line
        machine = machine or f"machine-{name}"
        me = agent.Identity(name, self.incarnation, name, tuple(range(slots)), machine, self.pid)
        limits, script = setup.limits, setup.script
        wanted = Spec(limits, limits, script, script, setup.policy, version=setup.version)
        setting = environment.Setting("job")
        config = agent.AgentConfig(
            setup.etcd_grace_s,
            setup.etcd_wait_s,
            spares=setup.job.spares,
            alone=setup.alone,
            memory=self.memory,
        )
        state = agent.AgentState(me, wanted, config, self.stores.port)
        began_at, procs = self.host.now(), self.procs
        self.timekeeper = Timekeeper(state, began_at, procs.progress, procs.step_times, look_s)
        self.gathering = Gathering(state, self.store, SimLink(self))
        self.driver = Driver(
            state,
            store=self.store,
            procs=self.procs,
            stores=self.stores,
            assign=lambda round, member: environment.assignments(round, member, setting),
            assign_standbys=lambda asked, began: environment.standbys(
                asked, tuple(range(slots)), setting, began
            ),
            process_alive=lambda pid: pid in cluster.pids,
            post=self.post,
            say=self._say,
            hangs=self.hangs,
            observer=self.observer,
            timekeeper=self.timekeeper,
            gathering=self.gathering,
            part_sizes=setup.part_sizes,
        )
        self._inbox: deque[Happening] = deque()
        self._busy = False
        self._wake: Timer | None = None
        self._wakes: deque[float] = deque(maxlen=SPIN_MAX)
        cluster.pids.add(self.pid)
        for told in cluster.joined:
            told(self)
        self.host.call(self._begin)

    @property
    def running(self) -> bool:
        return self.host.alive and self.left is None

    def post(self, event: Happening) -> None:
        """Handle the event now, or after the event that is being handled. Called only inside the agent."""
        self._inbox.append(event)
        if self._busy or self.left is not None:
            return
        self._busy = True
        try:
            while (self._inbox or self.driver.has_half_a_decision) and self.left is None:
                event = Tick() if self.driver.has_half_a_decision else self._inbox.popleft()
                self.driver.handle(event, self.host.now())
                if self.driver.left is not None:
                    self._leave(self.driver.left)
        finally:
            self._busy = False
        self._set_alarm()

    # ---- faults

    def crash(self) -> None:
        """Kill the agent (SIGKILL). The kernel then kills its workers."""
        self.clock.note(self.name, "dies")
        self._vanish()

    def signal(self, number: int) -> None:
        self.clock.note(self.name, f"gets signal {number}")
        self.signalled = True
        self.host.call(lambda: self.post(Signalled(number)))

    # ---- inside

    def _begin(self) -> None:
        self.driver.begin()
        self._set_alarm()

    def _set_alarm(self) -> None:
        wake_at = self.driver.wake_at
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if wake_at is not None and self.left is None:
            self._wake = self.host.at(max(wake_at, self.host.now() + 0.001), self._woken)

    def _woken(self) -> None:
        wake_at, now = self.driver.wake_at, self.host.now()
        self._wakes.append(now)
        if len(self._wakes) == SPIN_MAX and now - self._wakes[0] < 1.0:
            raise Broken(f"{self.name} wakes up {SPIN_MAX} times within a second")
        if wake_at is not None and now + 1e-6 >= wake_at:
            self.post(Tick())
        else:
            self._set_alarm()

    def _say(self, reason: Reason) -> None:
        self.clock.note(self.name, reason)

    def _leave(self, left: LeaveJob) -> None:
        self.left = left
        self.clock.note(self.name, f"leaves with {left.code}: {left.why}")
        if self.procs.workers:
            raise Broken(f"{self.name} leaves, but its workers run on")
        self.store.close()
        self._vanish()
        if self.cluster.restarting:
            self.clock.after(1.0, lambda: self.cluster.restart(self.name))

    def _vanish(self) -> None:
        self.host.die()
        self.cluster.dying.append(self)
        self.procs.kill()
        self.stores.shut()
        self.cluster.pids.discard(self.pid)


class Cluster:
    """All nodes of one job, their etcd, and the faults that can be injected."""

    def __init__(self, seed: int | str, setup: Setup, clock: Clock | None = None) -> None:
        self.clock = clock or Clock(seed)
        self.setup = setup
        self.network = Network()
        self.etcd = SimEtcd(self.clock)
        self.training = Training(self.clock, replace(setup.job))
        self.training.serves = lambda store: store in self.open_stores
        self.open_stores: set[str] = set()
        self.pids: set[int] = set()
        self.bad_slots: dict[str, dict[int, float]] = {}
        self.slow_slots: dict[str, dict[int, float]] = {}
        self.agents: dict[str, SimAgent] = {}  # the newest agent of each name
        self.all: list[SimAgent] = []
        self.joined: list[Callable[[SimAgent], None]] = []  # called with each agent that starts
        self.dying: list[SimAgent] = []  # dead agents whose workers still lived at the last look
        self.mended_at: float | None = None
        self.troubled = True  # until then, more than slow workers disturbs the job
        self.only_planned = False  # only planned changes happen
        self.restarting = False  # an agent that leaves a running job is started again
        self._ports = 1024
        self._pids = 100
        self._random = self.clock.random("nodes")
        self._slots: dict[str, int] = {}

    # ---- nodes

    def start_all(self, within_s: float) -> None:
        for i, slots in enumerate(self.setup.slots):
            self.clock.after(self._random.uniform(0.0, within_s), partial(self.join, f"n{i}", slots))

    def join(self, name: str, slots: int, *, unless_over: bool = True) -> None:
        """Start an agent, unless an agent of that name runs or the job is over."""
        old = self.agents.get(name)
        if (old is not None and old.running) or (self.ended and unless_over):
            return
        self.clock.note(name, f"starts with {slots} slot{'s' if slots > 1 else ''}")
        self._slots[name] = slots
        skew_s = self._random.uniform(-1.0, 1.0) * self.setup.skew_max_s
        new = SimAgent(self, name, slots, skew_s)
        self.agents[name] = new
        self.all.append(new)

    def restart(self, name: str) -> None:
        self.join(name, self._slots.get(name, 1))

    def running(self) -> list[SimAgent]:
        return [a for a in self.agents.values() if a.running]

    def capacity(self) -> int:
        """Return the number of workers that could run if nothing was wrong."""
        return sum(self._slots[a.name] for a in self.running())

    def leader(self) -> SimAgent | None:
        fact = self.etcd.fact("leader")
        if isinstance(fact, Leadership):
            known = self.agents.get(fact.node)
            if known and known.running and known.incarnation == fact.incarnation:
                return known
        return None

    # ---- the job

    @property
    def round(self) -> Round | None:
        """The round, with all its members."""
        fact = self.etcd.fact("round")
        facts = {key: at.fact for key, at in self.etcd.keys.items()}
        return round_parts.whole(fact, facts) if isinstance(fact, Round) else None

    @property
    def ended(self) -> bool:
        round = self.etcd.fact("round")
        return isinstance(round, Round) and round.phase is Phase.ENDED

    def edit_spec(self, change: Callable[[Spec], Spec]) -> None:
        """Change the spec as an operator does, from a machine with a good network."""
        at = self.etcd.keys.get("spec")
        if at is not None and isinstance(at.fact, Spec):
            new = change(at.fact)
            if new != at.fact:
                self.etcd.transact((Unchanged("spec", at.revision),), (Put("spec", new),), 0)

    def scale(self, limits: Limits) -> None:
        self.clock.note("operator", f"scales to {limits.min}..{limits.max}")
        self.edit_spec(lambda spec: replace(spec, limits=limits))

    def stop(self) -> None:
        self.clock.note("operator", "stops the job")
        self.edit_spec(lambda spec: replace(spec, stop=True))

    def drain(self, name: str) -> None:
        node = self.etcd.fact(f"nodes/{name}")
        if isinstance(node, Node):
            self.clock.note("operator", f"drains {name}")
            self.agents[name].signalled = True
            drained = Drained(node.name, node.incarnation)
            self.edit_spec(lambda spec: replace(spec, drain=(*spec.drain, drained)))

    # ---- after the faults

    def mend_network(self) -> None:
        for field_ in fields(Network):
            setattr(self.network, field_.name, field_.default)

    def mend(self, *, restart: bool = True) -> None:
        """End every fault. With ``restart``, start every node again that died or left."""
        self.clock.note("sim", "everything is mended")
        self.mended_at = self.clock.now()
        if self.etcd.health is not Health.SERVING:
            self.etcd.recover()
        self.mend_network()
        for slots in self.bad_slots.values():
            slots.clear()
        for a in self.running():
            a.host.slow_s = a.host.crowded = 0.0
            a.inspector.blind = 0.0
            a.host.resume()
            if a.store.cut:
                a.store.reconnect()
        self.restarting = restart
        if restart:
            for name in self._slots:
                self.restart(name)

    # ---- small things

    def slots_of(self, name: str) -> int:
        return self._slots[name]

    def next_port(self) -> int:
        self._ports += 1
        return self._ports

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids
