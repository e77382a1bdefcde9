"""Membership: join the job, stay registered, campaign for leader, and outlast a silent store."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address

from elasticd.core.age import Age
from elasticd.core.agent.agent_state import AgentState, Decisions
from elasticd.core.agent.crew import unreported
from elasticd.core.agent_messages import CheckProcess, CountOtherNodes, Fence, LeaveJob, Tag
from elasticd.core.facts import Leadership, Limits, Node, Outcome, Resume, Round, Spec, UnitWithin
from elasticd.core.ports import Delete, Entry, Guard, Put, StillThere, Unchanged, Write
from elasticd.core.reasons import NameTaken, PolicyDiffers

CONNECT_PATIENCE_S = 5.0  # how long an agent that has not joined waits for etcd


def outlast_the_store(do: Decisions) -> None:
    silent = do.state.etcd.silent
    if do.state.exiting is not None:
        return
    if silent is None:
        _outlast_a_full_store(do)
        return
    grace_s, wait_s, code = do.state.config.etcd_grace_s, do.state.config.etcd_wait_s, 4
    if not do.state.registration.joined and wait_s is not None:
        grace_s = wait_s
    elif not do.state.registration.joined:
        grace_s, code = min(grace_s, CONNECT_PATIENCE_S), 2  # etcd never answered: probably a wrong address
    until = silent.since + grace_s
    if do.now >= until:
        do.set(exiting=LeaveJob(code, f"{do.state.config.store_name} has not answered for {grace_s:g} s"))
    else:
        do.wakes.append(until)


def _outlast_a_full_store(do: Decisions) -> None:
    """Leave if the store stays full for too long and this agent has neither a record nor workers. Running
    workers go on."""
    state = do.state
    if not state.etcd.full or state.registered or state.crew is not None:
        return
    grace_s = state.config.etcd_grace_s if state.config.etcd_wait_s is None else state.config.etcd_wait_s
    until = state.etcd.full_since + grace_s
    if do.now >= until:
        do.set(exiting=LeaveJob(4, f"{state.etcd.full}; it has had no room for {grace_s:g} s"))
    else:
        do.wakes.append(until)


def move_the_fence(do: Decisions) -> None:
    """Move the fence: the time until which workers may run even if this agent is stopped.

    Workers may run as long as no other node can have replaced them: while this node's record is on a live
    lease. After an outage of the whole etcd, workers may run one lease time longer, since the leader waits
    that long for nodes to register again. The fence never moves back, and stays while this node has no
    record.
    """
    state = do.state
    if state.config.alone or not (state.registered or state.empty):
        return
    until = state.etcd.lease_until or 0.0
    if state.etcd.silent is not None and not state.etcd.silent.cut_off:
        last_proof = max(state.etcd.silent.since, state.etcd.silent.as_of)
        until = max(until, last_proof + state.policy.node_ttl_s)
    if until > state.etcd.fence:
        do.etcd(fence=until)
        do.actions.append(Fence(until))


def rejoin_if_spec_was_deleted(do: Decisions) -> None:
    """Join again if the spec has been deleted: this agent had joined a job that was just ending."""
    state = do.state
    withdrawn = state.registration.joined and "spec" in state.seen and state.spec is None
    if withdrawn and (state.round is None or state.ended_before_joining):
        do.registration(joined=False)


def join(do: Decisions) -> None:
    """Join the job: agree with its spec, or write the spec if there is none."""
    state = do.state
    if "spec" not in state.seen or "round" not in state.seen or state.me.key not in state.seen:
        return
    spec, round, wanted = state.spec, state.round, state.wanted
    if round is not None and state.over:
        if spec is None and round.outcome is Outcome.SUCCEEDED:
            do.set(exiting=_finished_before(round, state.config.began_at))
            return
        do.registration(history=state.seen["round"].revision)
    if spec is None:
        # A job that has just ended has no spec either. The guard on the round prevents a new start if this
        # agent has not seen the end yet.
        guards = (Unchanged("spec", 0), Unchanged("round", state.seen["round"].revision if round else 0))
        do.transact(Tag.SPEC, guards, (Put("spec", wanted),))
        return
    difference = _difference(spec, wanted)
    if difference is None:
        do.registration(joined=True)
        other_policy = tuple(
            name
            for name in type(spec.policy).__dataclass_fields__
            if getattr(spec.policy, name) != getattr(wanted.policy, name)
        )
        if other_policy:
            do.reasons.append(PolicyDiffers(other_policy))
    elif state.registration.others is None:
        do.actions.append(CountOtherNodes())
        do.registration(others=-1)  # -1: the number was asked for, and is not known yet
    elif state.registration.others == 0:
        # No node works on this job any more, so this agent replaces its spec.
        guard = Unchanged("spec", state.seen["spec"].revision)
        do.transact(Tag.SPEC, (guard,), _replacement(spec, wanted))
    elif state.registration.others > 0:
        do.set(exiting=LeaveJob(2, difference))


def _replacement(spec: Spec, wanted: Spec) -> tuple[Write, ...]:
    """Return the writes that replace the spec of a job without nodes. The job goes on if only the version of
    elasticd is another one. Else nothing of the earlier job stays."""
    upgraded = replace(spec, version=wanted.version)
    if _difference(upgraded, wanted) is None:
        return (Put("spec", upgraded),)
    forgotten = (Delete("checkpoint"),) if wanted.policy.resume is Resume.NEVER else ()
    return (
        Put("spec", wanted),
        Delete("budget"),
        Delete("reports/", prefix=True),
        Delete("summary"),
        Delete("forgotten"),
        *forgotten,
    )


def leave_a_replaced_job(do: Decisions) -> None:
    """Leave if the spec was replaced after this node joined: another agent came while no node was
    registered."""
    state = do.state
    if not state.registration.joined or state.spec is None:
        return
    difference = _difference(state.spec, state.wanted)
    if difference is not None:
        do.set(exiting=LeaveJob(2, difference))


def leave_an_unreachable_leader(do: Decisions) -> None:
    """Leave if this node and the leader's cannot reach each other: they are different machines, and one of
    them is at a loopback address. The leader was there first."""
    leader, me = do.state.leader, do.state.me
    if leader is None or leader.node == me.node or not _are_apart(leader.machine, me.host):
        return
    if _is_loopback(me.address):
        why = (
            f"node {leader.node}, which leads the job, is on another machine, and cannot reach this node at "
            f"{me.address}, a loopback address: give --address with one at which other nodes reach this node"
        )
    elif _is_loopback(leader.host):
        why = (
            f"this node cannot reach node {leader.node}, which leads the job from another machine at "
            f"{leader.host}, a loopback address: give --address on that node"
        )
    else:
        return
    do.set(exiting=LeaveJob(2, why))


def _are_apart(machine: str, other: str) -> bool:
    """Whether these are different machines: they have other names and other boot ids. A container has a name
    of its own, and a machine that has just started again has another boot id."""
    pairs = zip(machine.partition("/")[::2], other.partition("/")[::2], strict=True)
    return all(one and another and one != another for one, another in pairs)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def _finished_before(round: Round, began_at: float) -> LeaveJob:
    """Return the exit of a node that finds the job finished.

    The node does not train: every late node would start the job again. The exit is a success only if the job
    finished after this node was started.
    """
    if round.since >= began_at:
        return LeaveJob(0, "the job finished before this node could take part in it")
    return LeaveJob(
        7,
        "a job of this name has finished before, so nothing was done; to train again, give another --job, or "
        "run `elasticd forget` with this job's name first",
    )


def _difference(spec: Spec, wanted: Spec) -> str | None:
    if spec.asked != wanted.asked:
        return (
            f"this job runs with {_options(spec.asked)}, not with {_options(wanted.asked)}; use the same "
            "limits, another --job, or `elasticd scale`"
        )
    if spec.fingerprint != wanted.fingerprint:
        return (
            f"this job runs another script ({spec.script}, not {wanted.script} as it is here); "
            "use the same script, or another --job"
        )
    if spec.version != wanted.version:
        return (
            f"this job runs with elasticd {spec.version or 'of another version'}, and this node has elasticd "
            f"{wanted.version}: install the same version on all nodes; to change the version of a job, stop "
            "all its nodes first"
        )
    return None


def _options(limits: Limits) -> str:
    """Return the options that ask for these limits."""
    options = f"--min {limits.min} --max {limits.max}"
    if limits.unit > 1:
        options += f" --unit {limits.unit}"
    if limits.within is not UnitWithin.ANY:
        options += f" --unit-within {limits.within}"
    return f"{options} --sizes {','.join(map(str, limits.sizes))}" if limits.sizes else options


def register(do: Decisions) -> None:
    """Write the node's record in etcd when it changes."""
    state = do.state
    if not state.registration.joined or state.etcd.lease_until is None or state.me.key not in state.seen:
        return
    if state.renewing_store:
        return  # the record needs the new port, since the leader may form the next round from the record
    key = state.seen[state.me.key]
    if state.registration.own is None:
        if state.departure is not None and state.crew is None:
            return
        if isinstance(key.fact, Node) and key.fact.incarnation != state.me.incarnation:
            if "leader" in state.seen:  # the holder of the name may lead, and is then replaced as leader, too
                _wait_for_name(do, key.fact)
        elif key.fact is None:
            put = Put(state.me.key, _record(state), leased=True)
            do.transact(Tag.NODE, (Unchanged(state.me.key, 0), *_guards_of_crew(state)), (put,))
    elif state.registration.own.fact != _record(state):
        put = Put(state.me.key, _record(state), leased=True)
        # The report is written with the release, since the leader needs both to settle the round.
        before = len(do.actions)
        guard = Unchanged(state.me.key, state.registration.own.revision)
        do.transact(Tag.NODE, (guard,), (put, *unreported(state)))
        if len(do.actions) > before:
            do.registration(reported=state.report)


def _guards_of_crew(state: AgentState) -> tuple[Guard, ...]:
    """Return the guard of a new registration while workers run: they may only run in the present round."""
    return (Unchanged("round", state.seen["round"].revision),) if state.crew is not None else ()


def _record(state: AgentState) -> Node:
    me, ready = state.me, _ready(state)
    ages = {slot: state.ages[slot] for slot in ready if slot in state.ages}
    newest = max(ages.values(), default=None)
    return Node(
        name=me.node,
        incarnation=me.incarnation,
        address=me.address,
        slots=me.slots,
        released=state.released.round,
        told=state.released.ends,
        store_port=state.store_port,
        pid=me.pid,
        host=me.host,
        draining=state.departure is not None,
        fenced=state.released.fenced,
        declined=state.released.declined,
        ready=ready,
        most=max(1, len(me.slots) - state.config.spares) if state.config.spares else 0,
        age=newest,
        holders=tuple(slot for slot, age in ages.items() if _belongs(state, age, newest)),
        sharded=state.features.sharded and bool(ages),
        state=state.features.memory,
        memory=state.config.memory if state.features.memory is not None else 0,
    )


def _belongs(state: AgentState, age: Age, newest: Age | None) -> bool:
    """Whether a state of this age is the newest, or may have a part of the newest."""
    assert newest is not None
    return age.may_share_state_with(newest) if state.features.sharded else age == newest


def _ready(state: AgentState) -> tuple[int, ...]:
    """Return the slots with a waiting worker. Workers that leave a round one after the other are added all at
    once, when the node releases the round."""
    told = state.registration.own.fact if state.registration.own else None
    if state.crew is not None and state.crew.order is not None and isinstance(told, Node):
        return tuple(slot for slot in told.ready if slot in state.waiting)
    return tuple(sorted(state.waiting))


def write_worker_features(do: Decisions) -> None:
    """Write into the spec that the job's workers keep their process, or report checkpoints of their own.

    A node that joins later then has its workers ready before it gets work.
    """
    state, spec = do.state, do.state.spec
    if not state.registration.joined or spec is None:
        return
    if spec.inplace and not state.inplace:
        do.features(inplace=True)
    inplace, checkpointed = spec.inplace or state.inplace, spec.checkpointed or state.features.checkpointed
    if (inplace, checkpointed) != (spec.inplace, spec.checkpointed) and state.registered:
        guard = Unchanged("spec", state.seen["spec"].revision)
        known = replace(spec, inplace=inplace, checkpointed=checkpointed)
        do.transact(Tag.INPLACE, (guard,), (Put("spec", known),))


def _wait_for_name(do: Decisions, holder: Node) -> None:
    """Wait for the lease of another agent of this name, which may have died, to run out."""
    state = do.state
    if state.etcd.silent is not None:
        do.registration(name_taken_until=None)  # no lease runs out while etcd is away: begin again later
        return
    if state.registration.name_taken_until is None:
        until = do.now + 2 * state.policy.node_ttl_s + 1.0
        do.registration(name_taken_until=until)
        do.reasons.append(NameTaken(until))
        if holder.host == state.me.host:
            do.actions.append(CheckProcess(holder.pid, holder.incarnation))
    elif do.now >= state.registration.name_taken_until:
        why = f"another agent of this job is already called {state.me.node}; give this one another --node"
        do.set(exiting=LeaveJob(2, why))
        return
    assert do.state.registration.name_taken_until is not None
    do.wakes.append(do.state.registration.name_taken_until)


def take_over_record(do: Decisions, key: Entry, dead: Node) -> None:
    """Replace the record of a dead agent of this node, without waiting for its lease.

    One transaction replaces the record, so no round is formed without this node.
    """
    if do.state.etcd.lease_until is None:
        return
    guards: list[Guard] = [Unchanged(key.key, key.revision), *_guards_of_crew(do.state)]
    writes: list[Write] = [Put(key.key, _record(do.state), leased=True)]
    leader = do.state.seen.get("leader")
    if leader and do.state.leader and do.state.leader.is_of(dead.name, dead.incarnation):
        guards.append(Unchanged("leader", leader.revision))
        writes.append(Delete("leader"))
    do.transact(Tag.SUCCEED, tuple(guards), tuple(writes))


def campaign(do: Decisions) -> None:
    state = do.state
    leader = state.seen.get("leader")
    if not (state.registered and leader and leader.fact is None and state.departure is None):
        return
    assert state.registration.own is not None
    me = state.me
    mine = Leadership(me.node, me.incarnation, me.address, me.port, me.secret, me.host)
    there = StillThere(state.me.key, state.registration.own.created)
    do.transact(Tag.LEAD, (Unchanged("leader", 0), there), (Put("leader", mine, leased=True),))
