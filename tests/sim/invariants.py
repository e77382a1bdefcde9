"""What must hold whatever happens. Each rule is checked at the first event that could break it.

Nothing is polled: the invariants see every write to etcd, every world that forms, and every step of a world.
A world may have 80,000 workers, so a step is checked by what has changed since the last step: ``outliving``
and ``slow`` know the workers concerned without a look at all workers. ``look_at_all`` looks at all workers,
and must find the same.
"""

from __future__ import annotations

import math

from elasticd.core import round_parts
from elasticd.core.facts import (
    Budget,
    Exit,
    Limits,
    Node,
    NodeLedger,
    Outcome,
    Phase,
    Round,
    Spec,
    Stragglers,
    Summary,
    UnitWithin,
)
from elasticd.core.hang.judging import REPEAT_S, Verdict, Why
from elasticd.core.hang.watching import LATE_S, LOOK_PATIENCE_S, WRITE_PATIENCE_S
from elasticd.core.ports import Entry
from elasticd.core.straggler import PERIODS
from tests.sim.cluster import PATIENCE, Broken, Cluster, SimAgent
from tests.sim.host import SimHost
from tests.sim.inspector import Illness
from tests.sim.procs import SimWorker, World
from tests.sim.shards import newest_whole

EXIT_CODES = {Outcome.SUCCEEDED: 0, Outcome.FAILED: 1, Outcome.SHORT: 3, Outcome.STOPPED: 143}
NEWS_S = 15.0  # the longest delay of a watch, and of the transaction after it
HANG_CHECK_S = 5.0
ROUNDED_S = 0.1  # the rounding of the seconds of each kind in a record
STEP_S_MAX = 2.0  # of a longer step, only this much counts as training
# seconds of training within which a slow worker is named; a period is a second
NAMED_BY_S = NEWS_S + (PERIODS + 8) * (STEP_S_MAX + 1.0)
FORGOTTEN_BY_S = NEWS_S + 2 * PERIODS * 1.5
# the longest time that a worker may be idle, beyond the cooldown and the wait for a checkpoint
IDLE_S = NEWS_S + 2 * WRITE_PATIENCE_S + 5.0
Place = tuple[str, int]  # node and slot
CARRIED_OUT_S = WRITE_PATIENCE_S + 2 * LATE_S  # from the last look at a hung worker to its end


class Invariants:
    """Watches a cluster; raises ``Broken`` at the event that breaks a rule."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.newest: Round | None = None  # the newest round, as last written
        self.live: dict[int, Round] = {}  # the rounds by number, as first written
        self.last_step_at = cluster.clock.now()
        self.steps = 0
        self.trained_s = 0.0
        self.ledgers: dict[str, NodeLedger] = {}
        self.summarized_at = 0.0
        self.named: set[Place] = set()
        self.slow_at: dict[Place, float] = {}  # the time of training at a slow worker's last step
        # the only slow worker of a round, and since when it is the only one
        self._alone_since = (0, ("", 0), 0.0)
        self.newest_step = 0
        self._larger_since: float | None = None  # since when a larger world is possible
        self._slowest_s = 0.0  # the longest step of a worker since then
        self.worlds = 0
        self.broken_by_user: set[int] = set()  # rounds in which user code failed by itself
        self.charged: set[int] = set()
        self.had_no_memory = False  # the workers that stayed in a planned change could not hold the state
        self.ends: list[Round] = []
        self._limits: list[tuple[float, Limits]] = []  # the limits, and since when each is in force
        cluster.etcd.written.append(self._written)
        cluster.training.formed.append(self._formed)
        cluster.training.laid_out.append(self._laid_out)
        cluster.training.stepped.append(self._stepped)
        cluster.training.failed.append(self._failed)
        cluster.training.fell_ill.append(self._fell_ill)
        cluster.joined.append(self._joined)
        self._incarnations: dict[SimHost, str] = {}
        self._versions: dict[SimHost, str] = {}
        self.condemned: list[tuple[SimWorker, Verdict]] = []
        self.apart: set[SimWorker] = set()  # workers that were in another collective than the other workers

    # ---- 1, 2: one live round, numbers that only grow, sizes within the limits

    def _written(self, entry: Entry) -> None:
        if entry.key == "round":
            if not isinstance(entry.fact, Round):
                raise Broken("the round was deleted")
            whole = self.cluster.round
            assert whole is not None
            if whole.extent is not None and whole.extent.parts and not round_parts.fits(whole):
                raise Broken(f"the parts of round {whole.number} do not fit: {whole}")
            self._round_written(whole)
        elif entry.key == "spec" and isinstance(entry.fact, Spec):
            self._limits.append((self.cluster.clock.now(), entry.fact.limits))
        elif entry.key == "budget" and isinstance(entry.fact, Budget):
            self._budget_written(entry.fact)
        elif isinstance(entry.fact, Summary):
            if entry.fact.at < self.summarized_at:
                self.ledgers.clear()  # a write without an answer was applied late
            self.summarized_at = entry.fact.at
            for told in entry.fact.nodes:
                if told.ledger is not None:
                    self._ledger_written(told.ledger)
        elif entry.key == "stragglers" and isinstance(entry.fact, Stragglers):
            self._stragglers_written(entry.fact)

    def _round_written(self, new: Round) -> None:
        old, self.newest = self.newest, new
        clock = self.cluster.clock
        clock.note(
            "round",
            f"{new.number} {new.phase} {new.closing or new.cause}"
            f" {[(m.node, len(m.slots)) for m in new.members]} {new.outcome or ''} {new.why}"[:300],
        )
        if old is None:
            if new.phase is not Phase.WAITING or new.number != 0:
                raise Broken(f"the first round ever is {new.number}, {new.phase}")
            return
        if new.phase is Phase.CLOSING and new.planned:
            left_out = sum(ranks.end - ranks.first for ranks in new.left_out)
            self.had_no_memory |= left_out == self.live[new.number].world_size
        fresh = new.phase is Phase.LIVE and new.number == old.number + 1
        if not fresh and new.number != old.number:
            raise Broken(f"round {old.number} ({old.phase}) is followed by {new.number} ({new.phase})")
        allowed = {
            Phase.WAITING: {Phase.LIVE, Phase.ENDED},
            Phase.LIVE: {Phase.CLOSING, Phase.ENDED},
            Phase.CLOSING: {Phase.LIVE, Phase.WAITING, Phase.ENDED},
            Phase.ENDED: {Phase.WAITING},
        }
        hurried = old.phase is new.phase is Phase.CLOSING and old.planned and not new.planned
        hurried |= old.phase is new.phase is Phase.CLOSING and new.outlived and not old.outlived
        news = old.leaving != new.leaving or old.resizes_by != new.resizes_by
        told = old.phase is new.phase is Phase.LIVE and news
        if new.phase not in allowed[old.phase] and not (hurried or told or self._all_have_left(old)):
            raise Broken(f"round {new.number} goes from {old.phase} to {new.phase}")
        if new.phase is Phase.LIVE and not told:
            if not fresh:
                raise Broken(f"round {new.number} lives again")
            self._world_written(new)
        if new.phase is Phase.ENDED:
            self._ended(new, old)
        self._charges(old, new)

    def _all_have_left(self, old: Round) -> bool:
        """Whether no member is in the live round any more: then one write may close it and say what
        follows."""
        nodes = [self.cluster.etcd.fact(f"nodes/{member.node}") for member in old.members]
        left = [isinstance(node, Node) and node.released >= old.number for node in nodes]
        return old.phase is Phase.LIVE and all(left)

    def _world_written(self, round: Round) -> None:
        spec = self.cluster.etcd.fact("spec")
        if not isinstance(spec, Spec):
            raise Broken(f"round {round.number} formed without a spec")
        self.live[round.number] = round
        rank = 0
        for member in round.members:
            if member.base_rank != rank or not member.slots:
                raise Broken(f"{member.node} starts at rank {member.base_rank}, not {rank}")
            rank += len(member.slots)
        if len({m.node for m in round.members}) != len(round.members):
            raise Broken(f"a node is twice in round {round.number}")
        # A handover round makes no step, and some of its workers only send their state.
        sizes = range(1, rank) if round.handover else [rank]
        if not any(limits.allows(size) for limits in self._in_force() for size in sizes):
            raise Broken(f"round {round.number} has {rank} workers, not {spec.limits}")
        if spec.inplace and not round.handover:
            for member in round.members:
                agent = self.cluster.agents[member.node]
                known = agent.incarnation == member.incarnation
                if known and len(member.slots) * self._of_each(rank) > self._memory_of(member.node):
                    raise Broken(
                        f"round {round.number} has {rank} workers, too few for the memory of {member}"
                    )
        unit, within = spec.limits.unit, spec.limits.within
        if (
            within is UnitWithin.NODE
            and not round.handover
            and any(len(m.slots) % unit for m in round.members)
        ):
            raise Broken(f"round {round.number} has a unit on several nodes: {round.members}")

    def _of_each(self, workers: int) -> int:
        """Return the memory that each of so many workers needs: for its part, and for copies of half its
        size. Each unit has the whole state, and counts as a copy for the other units."""
        job = self.cluster.training.job
        wholes = workers // job.unit if job.unit > 1 else 1
        copies = max(0, min(job.redundancy + 1, workers) - wholes) * (job.state // 2)
        return math.ceil((job.state * wholes + copies) / workers)

    def _memory_of(self, node: str) -> float:
        return self.cluster.agents[node].memory or float("inf")

    def _in_force(self) -> list[Limits]:
        """Return the present limits, and earlier limits that a leader with a slow watch may still see."""
        until = [*(since for since, _ in self._limits[1:]), float("inf")]
        news_by = self.cluster.clock.now() - NEWS_S
        return [limits for (_, limits), end in zip(self._limits, until, strict=True) if end > news_by]

    def _formed(self, world: World) -> None:
        self.worlds += 1
        round = self.live.get(world.round)
        if round is None:
            raise Broken(f"a world trains for round {world.round}, which was never live")
        mine = {(m.node, m.incarnation, s): m.rank_of(s) for m in round.members for s in m.slots}
        known = self._incarnations
        real = {(w.procs.host.name, known[w.procs.host], w.slot): rank for rank, w in world.workers.items()}
        if mine != real:
            raise Broken(f"round {round.number} is {mine}, but these train: {real}")
        versions = {self._versions[w.procs.host] for w in world.workers.values()}
        if len(versions) > 1:
            raise Broken(f"round {round.number} has workers of elasticd {' and '.join(sorted(versions))}")
        if self.cluster.training.job.inplace:
            self._nothing_lost(world)

    # ---- 3: a committed step is not lost while a worker has it and could have sent it

    def _nothing_lost(self, world: World) -> None:
        if self.cluster.training.job.sharded:
            self._no_part_lost(world)
        elif world.step < self.newest_step:
            holders = [
                (agent.name, worker.slot)
                for agent in self.cluster.running()
                if not (agent.host.paused or agent.store.cut)
                for worker in agent.procs.workers.values()
                if worker.whole and worker.committed == self.newest_step and worker.world in (None, world)
            ]
            if holders:
                raise Broken(f"round {world.round} goes on from step {world.step}, but {holders} know more")
            self.newest_step = world.step

    # ---- sharded models: parts that can make a whole state are used, and parts of two steps are never mixed

    def _no_part_lost(self, world: World) -> None:
        if world.step >= self.newest_step:
            return
        newest = {step for worker in world.workers.values() for _, step in worker.held}
        if self.cluster.only_planned and self.newest_step in newest and not self.had_no_memory:
            raise Broken(f"round {world.round} goes on from step {world.step}: a planned change needs copies")
        known = newest_whole(
            worker.held
            for agent in self.cluster.running()
            if not (agent.host.paused or agent.store.cut)
            for worker in agent.procs.workers.values()
            if worker.world in (None, world)
        )
        if known is not None and known[1] > world.step:
            raise Broken(f"round {world.round} goes on from step {world.step}: together workers know {known}")
        self.newest_step = world.step

    def _laid_out(self, world: World) -> None:
        """Check that all parts of the world are of the step at which the world continues."""
        if world.handover:
            return
        point = world.round, world.step
        if newest_whole(worker.held for worker in world.workers.values()) != point:
            raise Broken(f"the parts of round {world.round} do not make up step {world.step}")
        older = {p for worker in world.workers.values() for p in worker.held if p != point}
        if older - {world.point}:
            raise Broken(f"round {world.round} goes on from {world.point}, with parts of {older}")

    def _joined(self, agent: SimAgent) -> None:
        self._incarnations[agent.host] = agent.incarnation
        self._versions[agent.host] = agent.driver.state.wanted.version
        agent.inspector.condemned.append(self._condemned)

    def _stepped(self, world: World) -> None:
        self.steps += 1
        self.newest_step = max(self.newest_step, world.step)
        now = self.cluster.clock.now()
        self.trained_s += min(STEP_S_MAX, now - self.last_step_at)
        self.last_step_at = now
        self._check_slow(world)
        self._check_idle(world)
        newest = max(self.live)
        if self.live[world.round].handover:
            raise Broken(f"round {world.round} makes a step, though it is to hand over")
        if world.round < newest:
            raise Broken(f"round {world.round} makes a step, though round {newest} is live")
        if len(world.workers) != world.size:
            raise Broken(f"{len(world.workers)} of {world.size} workers make a step")
        for worker in self.outliving(world):
            raise Broken(f"a worker of {worker.procs.host.name} outlives its agent")

    def outliving(self, world: World) -> list[SimWorker]:
        """Return the world's workers whose agent is dead. A node whose workers have all ended gets no new
        ones."""
        dying = self.cluster.dying = [agent for agent in self.cluster.dying if agent.procs.workers]
        left = [worker for agent in dying for worker in agent.procs.workers.values()]
        return [worker for worker in left if world.workers.get(worker.rank) is worker]

    def slow(self, world: World) -> set[Place]:
        """Return the places of the world's workers that are slower than the other workers."""
        return {
            (name, slot)
            for name, slots in self.cluster.slow_slots.items()
            if slots
            for slot, worker in self._workers(name)
            if slot in slots and world.workers.get(worker.rank) is worker
        }

    def _workers(self, name: str) -> list[tuple[int, SimWorker]]:
        agent = self.cluster.agents.get(name)
        return list(agent.procs.workers.items()) if agent is not None else []

    def look_at_all(self, world: World) -> None:
        """Look at every worker of a world that makes a step, and compare that with what the checks of each
        step know."""
        workers, round = world.workers.values(), self.live[world.round]
        outliving = {worker for worker in workers if not worker.procs.host.alive}
        if outliving or self.outliving(world):
            raise Broken(f"{len(outliving)} workers outlive their agents, not {len(self.outliving(world))}")
        slow = {
            (worker.procs.host.name, worker.slot)
            for worker in workers
            if worker.slot in worker.procs.slow_slots
        }
        if slow != self.slow(world):
            raise Broken(f"the slow workers are {slow}, not {self.slow(world)}")
        seats = {(m.node, m.incarnation, slot): m.rank_of(slot) for m in round.members for slot in m.slots}
        known = self._incarnations
        there = {(w.procs.host.name, known[w.procs.host], w.slot): w.rank for w in workers if w.alive}
        if seats != there:
            raise Broken(f"round {round.number} steps with other workers than those of its members")
        for member in round.members:
            crew = self.cluster.agents[member.node].driver.state.crew
            if crew is None or crew.round.number != round.number or crew.alive != {*member.slots}:
                raise Broken(f"{member.node} does not know of its workers in round {round.number}: {crew}")
        made = {worker.steps - worker.steps_before for worker in workers}
        if made != {world.made}:
            raise Broken(f"the workers have made {made} steps, but their world {world.made}")

    # ---- units: no healthy worker is idle while the waiting workers could make a whole unit

    def _check_idle(self, world: World) -> None:
        now, mended_at = self.cluster.clock.now(), self.cluster.mended_at
        if mended_at is None or self._could_have() <= world.size:
            self._larger_since, self._slowest_s = None, 0.0
            return
        self._larger_since = now if self._larger_since is None else self._larger_since
        # the other workers wait for the worker that is stuck
        since = max(self._larger_since, self.cluster.training.stuck_until)
        self._slowest_s = max(self._slowest_s, *(w.own_s for w in world.workers.values()))
        every_s = self.cluster.training.job.save_every * self._slowest_s
        patience_s = self.cluster.setup.policy.grow_cooldown_s + every_s + IDLE_S
        if now - since > patience_s:
            raise Broken(
                f"{self._could_have()} workers could train for {now - since:.0f} s, not {world.size}"
            )

    def _could_have(self) -> int:
        """Return the number of workers of the largest world that is possible now; 0 if the job is about to
        stop."""
        spec, budget = self.cluster.etcd.fact("spec"), self.cluster.etcd.fact("budget")
        round = self.cluster.round
        if not isinstance(spec, Spec) or round is None or spec.stop:
            return 0
        out = {
            (q.node, q.slot)
            for q in (budget.quarantines if isinstance(budget, Budget) else ())
            if q.until > self.cluster.clock.now()
        }
        unit, whole_on_a_node = spec.limits.unit, spec.limits.within is UnitWithin.NODE
        there_are: dict[str, int] = {}
        for entry in self.cluster.etcd.keys.values():
            node = entry.fact
            if not isinstance(node, Node) or node.draining or node.name in {d.node for d in spec.drain}:
                continue
            seat = round.by_node.get(node.name)
            seated = seat.slots if seat is not None and seat.incarnation == node.incarnation else ()
            there = {*node.ready, *seated} if self.cluster.training.job.inplace else {*node.slots}
            usable = sum((node.name, slot) not in out for slot in there)
            there_are[node.name] = min(usable, node.most or usable)
        most = min(sum(there_are.values()), spec.limits.max)
        for workers in range(most - most % unit, 0, -unit):
            each = self._of_each(workers)
            room = [min(n, self._memory_of(name) // each) if each else n for name, n in there_are.items()]
            if sum(n - n % unit if whole_on_a_node else n for n in room) >= workers:
                return workers
        return 0

    # ---- 5: the budget

    def _failed(self, worker: SimWorker, exit: Exit) -> None:
        self.broken_by_user.add(worker.round)
        round = self.newest
        if round is not None and round.phase is Phase.LIVE and not worker.acts:
            member = self.live[round.number].by_node.get(worker.procs.host.name)
            if member is not None and worker.slot in member.slots:  # a slow agent has not told the worker yet
                self.broken_by_user.add(round.number)

    def _charges(self, old: Round, new: Round) -> None:
        if new.restarts > old.restarts:
            if new.restarts != old.restarts + 1 or old.number in self.charged:
                raise Broken(f"round {old.number} is charged twice")
            self.charged.add(old.number)
            if old.number not in self.broken_by_user:
                raise Broken(f"round {old.number} is charged, but no user code failed in it: {new.failure}")
        elif new.restarts < old.restarts and old.phase is not Phase.ENDED:
            raise Broken("charges are forgotten")

    def _budget_written(self, budget: Budget) -> None:
        policy = self.cluster.setup.policy
        if len(budget.charges) > policy.restarts_max:
            raise Broken(f"{len(budget.charges)} charges, but {policy.restarts_max} are allowed")
        if budget.total > len(self.broken_by_user):
            raise Broken(f"{budget.total} charges, but user code broke {len(self.broken_by_user)} rounds")

    # ---- hangs: no innocent worker is condemned, and no hang outlasts its limit while the worker's agent
    # lives

    def _condemned(self, worker: SimWorker, verdict: Verdict) -> None:
        now = self.cluster.clock.now()
        self.condemned.append((worker, verdict))
        ill = worker.ill
        apart = [w for w in self.apart if w.round == worker.round]
        # A worker that got well in this standstill may have been seen at its new place just once.
        apart = [w for w in apart if w.ill is not None or w.well_since >= self.last_step_at]
        if verdict.why is Why.DEADLOCK and 2 * len(apart) >= len(verdict.guilty):
            # without a majority at one place, nobody can tell which worker left a collective out
            return
        if ill is not None and ill.illness is not Illness.BUSY:
            return
        if ill is not None and now - ill.since >= PATIENCE.ceiling_s:
            return
        if ill is not None and apart and now - self.last_step_at >= PATIENCE.ceiling_s:
            return  # who began the standstill seems to wait for this worker, as all others do
        if worker.stuck or now - worker.well_since <= CARRIED_OUT_S:
            return  # the worker got well after the last look at it
        raise Broken(
            f"{worker.procs.host.name}'s slot {worker.slot} is condemned, but does not hang: {verdict}"
        )

    def _fell_ill(self, worker: SimWorker) -> None:
        if worker.ill is not None and worker.ill.illness.waits:
            self.apart.add(worker)
        self.cluster.clock.after(HANG_CHECK_S, lambda: self._check_hang(worker))

    def _check_hang(self, worker: SimWorker) -> None:
        ill, now, mended_at = worker.ill, self.cluster.clock.now(), self.cluster.mended_at
        if ill is None or not worker.alive or ill.illness is Illness.BUSY:
            return
        if mended_at is not None and now - max(ill.since, mended_at) > self._patience_s():
            raise Broken(f"{worker.procs.host.name}'s slot {worker.slot} hangs since {now - ill.since:.0f} s")
        self._fell_ill(worker)

    def _patience_s(self) -> float:
        """Return how long any hang may last, provided that the agents live and hear of each other."""
        known = [agent.hangs.allowed for agent in self.cluster.running()]
        limit_s = max(
            (allowed.busy_s for allowed in known if allowed is not None), default=PATIENCE.ceiling_s
        )
        return limit_s + REPEAT_S + LOOK_PATIENCE_S + WRITE_PATIENCE_S + NEWS_S

    # ---- the ledger: each second of each slot is spent on one kind of time

    def _ledger_written(self, new: NodeLedger) -> None:
        old, self.ledgers[new.node] = self.ledgers.get(new.node), new
        if old is None or old.run != new.run:
            return
        before = {time.slot: sum(time.spent.values()) + time.untold_s for time in old.slots}
        # A node that comes back with a clock further behind may begin before its last record.
        back_s = 2 * self.cluster.setup.skew_max_s
        for time in new.slots:
            if time.slot not in before:
                continue
            told_s = sum(time.spent.values()) + time.untold_s - before[time.slot]
            if not -ROUNDED_S <= told_s - (new.at - old.at) <= ROUNDED_S + back_s:
                raise Broken(
                    f"{new.node}'s slot {time.slot} accounts for {told_s:.2f} of {new.at - old.at:.2f} s"
                )

    # ---- stragglers: a worker that is slower than the others is named in time, and no other worker is named

    def _check_slow(self, world: World) -> None:
        slow = self.slow(world)
        self.slow_at.update(dict.fromkeys(slow, self.trained_s))
        known_troubles = self.cluster.mended_at is not None or not self.cluster.troubled
        if len(slow) != 1 or world.size < 2 or not known_troubles:
            self._alone_since = (0, ("", 0), 0.0)
            return
        (place,) = slow
        if self._alone_since[:2] != (world.round, place):
            self._alone_since = (world.round, place, self.trained_s)
        found = self.cluster.etcd.fact("stragglers")
        known = isinstance(found, Stragglers) and found.round == world.round
        named = (
            {(one.node, one.slot) for one in found.slow} if isinstance(found, Stragglers) and known else set()
        )
        if place not in named and self.trained_s - self._alone_since[2] > NAMED_BY_S:
            raise Broken(f"{place[0]}'s slot {place[1]} is slow, but is not named")

    def _stragglers_written(self, found: Stragglers) -> None:
        for one in found.slow:
            if one.why:
                continue  # its GPU is bad
            self.named.add((one.node, one.slot))
            if self.trained_s - self.slow_at.get((one.node, one.slot), float("-inf")) > FORGOTTEN_BY_S:
                raise Broken(f"{one.node}'s slot {one.slot} is named, but is not slow")

    # ---- the end

    def _ended(self, round: Round, old: Round) -> None:
        self.ends.append(round)
        job = self.cluster.training.job
        match round.outcome:
            case Outcome.SUCCEEDED:
                if job.saved < job.total_steps:
                    raise Broken(f"success after {job.saved} of {job.total_steps} steps")
            case Outcome.FAILED:
                if round.restarts == old.restarts:
                    raise Broken(f"failed without a failure: {round.why}")
            case Outcome.STOPPED:
                # the same transaction deletes the spec, or deletes it later
                spec = self.cluster.etcd.fact("spec")
                if isinstance(spec, Spec) and not spec.stop:
                    raise Broken("stopped, but nobody asked for it")
            case Outcome.SHORT:
                pass  # schedules that may end so check it themselves
            case None:
                raise Broken("ended without an outcome")

    def check_left(self, agent: SimAgent) -> None:
        """Check the exit code of an agent that left the job."""
        assert agent.left is not None
        code = agent.left.code
        if (
            code == 2
            and not agent.driver.state.registration.joined
            and "etcd has not answered" in agent.left.why
        ):
            # the agent came while etcd was away; this message tells it from an agent with a mistyped address
            return
        outcomes = {EXIT_CODES[r.outcome] for r in self.ends if r.outcome}
        if code not in outcomes and not (code >= 128 and agent.signalled):
            raise Broken(f"{agent.name} leaves with {code} ({agent.left.why})")
