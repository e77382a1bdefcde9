"""What one agent does: it joins, works, reports, releases and leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd.core.agent import RETRY_S, membership
from elasticd.core.agent.hearing import with_exit
from elasticd.core.agent_messages import (
    CheckProcess,
    CountOtherNodes,
    Fence,
    KeySeen,
    LeaseChanged,
    LeaveJob,
    LeaveRound,
    OtherNodesCounted,
    PortReserved,
    ProcessGone,
    RenewStore,
    RoundWritten,
    Signalled,
    StartWorkers,
    StopWorkers,
    StoreComplained,
    Tag,
    Transact,
)
from elasticd.core.facts import (
    Cause,
    Exit,
    Leadership,
    Limits,
    Node,
    Outcome,
    Phase,
    Policy,
    RankRange,
    Report,
    Resume,
    Round,
    Spec,
    UnitWithin,
)
from elasticd.core.page_layout import Fatal
from elasticd.core.ports import (
    Answer,
    Delete,
    Entry,
    LeaseExpired,
    LeaseHeld,
    NoAnswer,
    Put,
    Refused,
    StillThere,
    StoreSilent,
    Unchanged,
)
from elasticd.core.reasons import (
    Expelled,
    LeaseLost,
    StoreAway,
    StoreBack,
    WorkerEnded,
)
from tests.core.build import NOW, exit, life, node, report, round, spec
from tests.core.by_hand import NEXT_PORT, PORT, Agent, put

SIGINT, SIGKILL, SIGUSR1, SIGTERM = 2, 9, 10, 15
POLICY = Policy()
ROUND = round(1, {"a": 2, "b": 2})
SECOND = round(1, {"b": 2, "a": 2})  # another node hosts the store


def ended(round: Round, outcome: Outcome) -> Round:
    return replace(round, phase=Phase.ENDED, outcome=outcome, why=f"it {outcome}")


def closing(round: Round, cause: Cause = Cause.WORKER_FAILED, *, planned: bool = False) -> Round:
    return replace(round, phase=Phase.CLOSING, closing=cause, planned=planned)


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        (Limits(2, 4), "--min 2 --max 4"),
        (Limits(2, 8, unit=2), "--min 2 --max 8 --unit 2"),
        (Limits(2, 8, unit=2, within=UnitWithin.NODE), "--min 2 --max 8 --unit 2 --unit-within node"),
        (Limits(2, 8, sizes=(2, 4, 8)), "--min 2 --max 8 --sizes 2,4,8"),
    ],
)
def test_a_node_with_other_limits_is_told_the_options_that_differ(wanted: Limits, options: str) -> None:
    why = membership._difference(spec(2, 8), spec(2, 8, asked=wanted))
    assert why is not None and f"runs with --min 2 --max 8, not with {options}; use the same" in why


@pytest.mark.parametrize(
    ("exits", "told"),
    [
        ([exit(0, at=3.0), exit(1, at=4.0), exit(2, at=5.0)], [0]),
        ([exit(1, at=4.0), exit(0, at=3.0)], [0]),
        ([exit(0, at=3.0), replace(exit(1, at=4.0), raised=True), replace(exit(2), raised=True)], [0, 1]),
        ([exit(0, at=3.0), replace(exit(1, at=4.0), fatal=Fatal.NOT_FINITE)], [0, 1]),
    ],
)
def test_a_report_has_the_tracebacks_of_the_exits_that_may_be_the_cause(
    exits: list[Exit], told: list[int]
) -> None:
    found: tuple[Exit, ...] = ()
    for one in exits:
        found = with_exit(found, replace(one, traceback="Traceback"))
    assert [one.slot for one in found] == [one.slot for one in exits]
    assert sorted(one.slot for one in found if one.traceback) == told
    assert all(one.message for one in found)


# ---------------------------------------------------------------- joining


def test_the_first_agent_says_what_the_job_is() -> None:
    one = Agent(spec(2, 4))
    for key in ("round", "nodes/a"):
        assert one.sees(key, None) == ()
    one.sees("spec", None)
    write = one.wrote(Tag.SPEC)
    assert write.writes == (Put("spec", spec(2, 4)),)
    assert write.guards == (Unchanged("spec", 0), Unchanged("round", 0))
    one.answered(Tag.SPEC)
    assert one.state.registration.joined


@pytest.mark.parametrize(
    ("mine", "leaders", "machine", "said"),
    [
        ("127.0.0.1", "10.0.0.2", "z/boot2", "cannot reach this node at 127.0.0.1"),
        ("127.0.1.1", "127.0.1.1", "z/boot2", "cannot reach this node at 127.0.1.1"),
        ("::1", "fd09::7", "z/boot2", "cannot reach this node at ::1"),
        ("10.0.0.1", "127.0.1.1", "z/boot2", "cannot reach node z, which leads the job from another machine"),
        ("10.0.0.1", "localhost", "z/boot2", "give --address on that node"),
        ("10.0.0.1", "10.0.0.2", "z/boot2", ""),
        ("fe80::1%eth0", "z.example", "z/boot2", ""),
        ("127.0.0.1", "127.0.0.1", "a/boot1", ""),
        ("127.0.0.1", "10.0.0.1", "another name/boot1", ""),
        ("127.0.0.1", "127.0.0.1", "a/boot0", ""),
        ("127.0.0.1", "10.0.0.2", "", ""),
        ("127.0.0.1", "10.0.0.2", "z/", ""),
    ],
)
def test_a_node_that_its_leader_cannot_reach_leaves_with_a_sentence(
    mine: str, leaders: str, machine: str, said: str
) -> None:
    one = Agent(address=mine, machine="a/boot1")
    one.sees("leader", Leadership("z", life("z"), leaders, 1234, "secret", machine))
    leaving = one.state.exiting
    assert (leaving is not None) == bool(said)
    if leaving is not None:
        assert leaving.code == 2 and said in leaving.why and "give --address" in leaving.why
        assert LeaveJob(2, leaving.why) in one.did, "nothing else keeps the agent"


@pytest.mark.parametrize(
    ("theirs", "mine", "leaves"),
    [
        ("0.1.0", "0.1.0", False),
        ("0.1.0", "0.2.0", True),
        ("0.2.0", "0.1.0", True),
        ("0.2.0", "0.2.0.dev1", True),
        ("", "0.2.0", True),
        ("", "", False),
    ],
)
def test_a_node_with_another_version_than_the_jobs_leaves_before_it_registers(
    theirs: str, mine: str, leaves: bool
) -> None:
    one = Agent(spec(version=mine))
    one.holds_lease()
    for key in ("round", "nodes/a"):
        one.sees(key, None)
    one.sees("spec", spec(version=theirs))
    assert one.state.registration.joined is not leaves
    assert one.all_of(CountOtherNodes) == [CountOtherNodes()] * leaves
    if leaves:
        assert not one.all_of(Transact)
        one.told(OtherNodesCounted(1))
        left = one.one(LeaveJob)
        assert left.code == 2
        assert f"runs with elasticd {theirs or 'of another version'}, and this node has" in left.why
        assert f"elasticd {mine}: install the same version on all nodes" in left.why


def test_a_job_without_nodes_goes_on_with_another_version() -> None:
    old = replace(spec(2, 8, asked=Limits(2, 4), version="0.1.0"), inplace=True)
    one = Agent(spec(2, 4, policy=replace(POLICY, resume=Resume.NEVER), version="0.2.0"))
    for key in ("round", "nodes/a"):
        one.sees(key, None)
    one.sees("spec", old)
    one.told(OtherNodesCounted(0))
    write = one.wrote(Tag.SPEC)
    assert write.guards == (Unchanged("spec", one.revision),)
    assert write.writes == (Put("spec", replace(old, version="0.2.0")),), "its limits, budget and times stay"
    one.answered(Tag.SPEC)
    assert one.state.registration.joined


def test_an_agent_joins_if_the_other_nodes_have_just_given_the_job_its_version() -> None:
    one = Agent(spec(version="0.2.0"))
    for key in ("round", "nodes/a"):
        one.sees(key, None)
    one.sees("spec", spec(version="0.1.0"))
    one.one(CountOtherNodes)
    one.sees("spec", spec(version="0.2.0"))
    one.told(OtherNodesCounted(1))
    assert one.state.registration.joined and one.state.exiting is None


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (spec(version="0.2.0"), "with elasticd 0.2.0"),
        (spec(script="other.py", version="0.1.0"), "another script"),
        (spec(3, 8, version="0.1.0"), "--min 3 --max 8"),
    ],
)
def test_a_node_whose_job_was_replaced_leaves_with_a_sentence(now: Spec, says: str) -> None:
    """Another agent saw no node, as this node's lease had run out or this node was about to register."""
    one = Agent.working(ROUND, spec(version="0.1.0"))
    one.sees("spec", now)
    one.one(StopWorkers)
    for slot in (0, 1):
        one.exits(1, exit(slot, code=-SIGTERM))
    left = one.one(LeaveJob)
    assert left.code == 2 and says in left.why


def test_a_node_whose_job_is_scaled_or_drained_stays() -> None:
    one = Agent.working(ROUND, spec(version="0.1.0"))
    one.sees("spec", replace(one.state.wanted, limits=Limits(1, 2), stop=False, inplace=True))
    assert one.state.exiting is None


@pytest.mark.parametrize("resume", Resume)
def test_an_agent_replaces_the_spec_of_a_job_without_nodes(resume: Resume) -> None:
    other = spec(script="other.py", policy=replace(POLICY, resume=resume))
    one = Agent(other)
    for key in ("round", "nodes/a"):
        one.sees(key, None)
    one.sees("spec", spec())
    one.told(OtherNodesCounted(0))
    write = one.wrote(Tag.SPEC)
    assert write.guards == (Unchanged("spec", one.revision),)
    assert write.writes[0] == Put("spec", other)
    folders = {Delete("reports/", prefix=True), Delete("summary"), Delete("forgotten")}
    checkpoint = {Delete("checkpoint")} if resume is Resume.NEVER else set()
    assert set(write.writes[1:]) == {Delete("budget"), *folders, *checkpoint}, "what an earlier run left"
    one.answered(Tag.SPEC)
    assert one.state.registration.joined


def test_an_agent_that_was_beaten_to_it_looks_around_again_before_it_takes_a_job_over() -> None:
    one = Agent(spec(script="other.py"))
    for key in ("round", "nodes/a"):
        one.sees(key, None)
    one.sees("spec", spec())
    one.told(OtherNodesCounted(0))
    one.answered(Tag.SPEC, Refused())
    one.one(CountOtherNodes)
    one.sees("spec", spec(script="third.py"))
    one.at(NOW + 10)
    assert not one.all_of(Transact)
    one.told(OtherNodesCounted(1))
    assert one.one(LeaveJob).code == 2


def test_an_agent_that_joined_by_the_spec_of_a_job_that_just_ended_joins_again() -> None:
    one = Agent()
    one.sees("nodes/a", None)
    one.sees("round", ended(ROUND, Outcome.FAILED))
    one.sees("spec", spec())
    assert one.state.registration.joined
    one.sees("spec", None)
    one.wrote(Tag.SPEC)


def test_a_job_that_finished_unseen_is_not_started_again_by_a_late_spec() -> None:
    """The spec is gone already, and the end of the round has not arrived. The guard tells etcd so."""
    one = Agent()
    one.sees("nodes/a", None)
    one.sees("round", ROUND)
    seen_at = one.revision
    one.sees("spec", None)
    assert Unchanged("round", seen_at) in one.wrote(Tag.SPEC).guards


# ---------------------------------------------------------------- registering


def test_a_registered_agent_offers_itself_as_leader_when_there_is_none() -> None:
    one = Agent.registered()
    assert not one.all_of(Transact)
    one.sees("leader", None)
    write = one.wrote(Tag.LEAD)
    own = one.state.registration.own
    assert own is not None
    assert set(write.guards) == {Unchanged("leader", 0), StillThere("nodes/a", own.created)}
    one.answered(Tag.LEAD)
    assert one.state.leads is not None


def test_an_agent_that_leaves_does_not_offer_itself() -> None:
    one = Agent.working(ROUND)
    one.told(Signalled(SIGTERM))
    one.answered(Tag.NODE)
    one.sees("leader", None)
    assert not [t for t in one.all_of(Transact) if t.tag is Tag.LEAD]


def taken(**more: Any) -> Agent:
    one = Agent()
    one.sees("spec", spec())
    one.sees("round", None)
    one.holds_lease()
    one.sees("nodes/a", replace(node("a", life_number=0), **more))
    assert not one.did, "the holder of the name may lead"
    one.sees("leader", Leadership("a", life("a", 0)))
    return one


def test_an_agent_takes_the_place_of_an_earlier_one_on_its_machine_whose_process_is_gone() -> None:
    one = taken()
    leads_at = one.revision
    assert one.one(CheckProcess) == CheckProcess(4711, life("a", 0))
    one.told(ProcessGone(life("a", 0)))
    write = one.wrote(Tag.SUCCEED)
    assert write.guards == (Unchanged("nodes/a", leads_at - 1), Unchanged("leader", leads_at))
    made, unled = write.writes
    record = put(made)
    assert isinstance(record, Node) and record.incarnation == life("a") and unled == Delete("leader")
    one.answered(Tag.SUCCEED)
    assert one.state.registered and one.wrote(Tag.LEAD)


def test_an_agent_with_workers_takes_a_place_again_only_for_the_round_that_is_written() -> None:
    """Another agent got its name while its lease was away, and died at once."""
    one = Agent.working(ROUND)
    round_at = one.state.seen["round"].revision
    one.told(LeaseChanged(LeaseExpired()))
    one.sees("nodes/a", replace(node("a", life_number=2), host="machine of a"))
    one.holds_lease()
    assert one.one(CheckProcess).incarnation == life("a", 2)
    one.told(ProcessGone(life("a", 2)))
    assert Unchanged("round", round_at) in one.wrote(Tag.SUCCEED).guards


def test_no_name_is_called_taken_while_the_store_is_silent() -> None:
    """The lease of the name's holder cannot run out while etcd is silent."""
    one = taken(host="elsewhere")
    one.told(LeaseChanged(StoreSilent(NOW, cut_off=False)))
    one.at(NOW + 60)
    assert not one.did
    one.holds_lease()
    assert one.state.exiting is None and one.wake_at == one.now + 2 * POLICY.node_ttl_s + 1


# ---------------------------------------------------------------- starting


def test_a_round_that_closed_before_it_was_begun_is_released() -> None:
    """The leader waits for the release, and no worker will ever run in this round here."""
    one = Agent.registered()
    one.sees("round", closing(SECOND))
    record = put(one.wrote(Tag.NODE).writes[0])
    assert isinstance(record, Node) and record.released == 1


def test_a_host_whose_port_is_no_longer_the_one_in_the_round_asks_for_another_round() -> None:
    one = Agent.registered()
    one.sees("round", replace(ROUND, store="a.example:1"))
    record = put(one.wrote(Tag.NODE).writes[0])
    assert not one.all_of(StartWorkers)
    assert isinstance(record, Node) and (record.released, record.store_port) == (1, PORT)


def test_a_host_reserves_the_port_of_its_next_store_while_its_workers_train() -> None:
    """So its release waits for nothing."""
    one = Agent.registered()
    one.sees("round", ROUND)
    one.one(StartWorkers)
    one.store_opened(NEXT_PORT)
    one.exits(1, exit(0, 0, code=0))
    one.exits(1, exit(1, 1, code=0))
    one.sees("round", closing(ROUND))
    record = put(one.wrote(Tag.NODE).writes[0])
    assert isinstance(record, Node) and (record.released, record.store_port) == (1, NEXT_PORT)
    assert not one.all_of(RenewStore)


def test_an_agent_whose_node_leads_begins_the_round_before_the_watch_brings_it() -> None:
    one = Agent.registered()
    one.sees("round", closing(replace(ROUND, number=0)))
    before = one.revision
    one.told(RoundWritten(ROUND, before + 2))
    assert one.one(StartWorkers).round == ROUND
    one.told(KeySeen(Entry("round", closing(replace(ROUND, number=0)), before + 1, 1)))
    assert one.state.round == ROUND and not one.did, "older news"
    one.told(KeySeen(Entry("round", ROUND, before + 2, 1)))
    assert one.state.round == ROUND and not one.did


# ---------------------------------------------------------------- reporting


@pytest.mark.parametrize("answer", [Refused(), NoAnswer("no answer")])
def test_a_report_that_may_be_lost_is_sent_again_but_not_at_once(answer: Answer) -> None:
    one = Agent.working(ROUND)
    one.exits(1, exit(1, 1))
    assert one.state.registration.own is not None
    record = Unchanged("nodes/a", one.state.registration.own.revision)
    assert one.wrote(Tag.REPORT).guards == (record,), "after the release a late report replaces nothing"
    one.answered(Tag.REPORT, answer)
    assert one.did == () and one.wake_at == NOW + RETRY_S
    one.at(NOW + RETRY_S)
    one.wrote(Tag.REPORT)


def test_a_report_waits_for_the_answer_to_the_record_that_it_is_guarded_by() -> None:
    """A worker fails as soon as it has started, while the record with the next port is being written."""
    one = Agent.registered()
    one.sees("round", ROUND)
    one.told(PortReserved(NEXT_PORT))
    one.wrote(Tag.NODE)
    one.exits(1, exit(1, 1))
    assert not one.all_of(Transact), "etcd would refuse it"
    one.answered(Tag.NODE)
    assert one.state.registration.own is not None
    assert one.wrote(Tag.REPORT).guards == (Unchanged("nodes/a", one.state.registration.own.revision),)


def test_a_report_that_etcd_applies_late_is_replaced_by_the_newer_one() -> None:
    one = Agent.working(ROUND)
    one.exits(1, exit(0, 0))
    late = put(one.wrote(Tag.REPORT).writes[0])
    one.answered(Tag.REPORT, NoAnswer("no answer"))
    one.exits(1, exit(1, 1))
    one.at(NOW + RETRY_S)
    newest = put(one.wrote(Tag.REPORT).writes[0])
    assert newest != late and not one.sees("reports/a", late), "the answer to the newer one may come yet"
    one.answered(Tag.REPORT)
    assert not one.sees("reports/a", newest)
    assert not one.sees("reports/a", replace(late, incarnation=life("a", 2)))
    one.sees("reports/a", late)
    assert put(one.wrote(Tag.REPORT).writes[0]) == newest


@pytest.mark.parametrize(
    "stray",
    [
        pytest.param((2, exit(0, 0)), id="of another round"),
        pytest.param((1, exit(7, 0)), id="of a slot that is not its"),
    ],
)
def test_an_exit_that_cannot_be_is_ignored(stray: tuple[int, Exit]) -> None:
    one = Agent.working(ROUND)
    before = one.state
    assert one.exits(*stray) == () and one.state == before


# ---------------------------------------------------------------- stopping


def test_a_failure_seen_last_is_told_with_the_release() -> None:
    """The leader settles a round by its reports, as soon as all have released the round."""
    one = Agent.working(SECOND)
    one.exits(1, exit(0, 2))
    one.answered(Tag.REPORT, Refused())
    one.sees("round", closing(SECOND))
    one.exits(1, exit(1, 3, code=-15))
    told = [put(w) for w in one.wrote(Tag.NODE).writes]
    assert isinstance(told[0], Node) and told[0].released == 1
    assert isinstance(told[1], Report) and told[1].exits == (exit(0, 2),)


def test_workers_of_an_older_round_than_the_newest_are_killed() -> None:
    one = Agent.working(ROUND)
    one.sees("round", round(3, {"b": 2}))
    assert one.one(StopWorkers) == StopWorkers(SIGKILL, 0.0)
    assert one.said[0] == Expelled(1, 3)
    one.sees("round", round(4, {"b": 2}))
    assert not one.did


# ---------------------------------------------------------------- the lease and the store


def test_an_agent_with_a_store_of_its_own_puts_up_no_fence() -> None:
    one = Agent.working(ROUND, alone=True)
    assert one.holds_lease(7) == ()
    for news in (
        StoreSilent(NOW, cut_off=False),
        StoreSilent(NOW, cut_off=True),
        LeaseHeld(NOW + 60),
        LeaseExpired(),
    ):
        one.told(LeaseChanged(news))
        assert not one.all_of(Fence), news
        assert StoreAway(True, NOW + 7) not in one.said, "there is no time by which workers would stop"
    one.sees("nodes/a", None)
    one.holds_lease()
    assert one.wrote(Tag.NODE) and not one.all_of(StopWorkers), "and the round goes on"


def test_training_goes_on_while_the_store_itself_is_away() -> None:
    """The fence moves with each proof that etcd serves no agent. The workers of a stopped agent would train
    on otherwise."""
    one = Agent.working(ROUND)
    one.told(LeaseChanged(StoreSilent(NOW + 1, cut_off=False)))
    assert one.did == (Fence(NOW + 6),) and one.said == (StoreAway(False, None),)
    one.at(NOW + 3)
    assert one.did == (), "without a proof it stays"
    one.told(LeaseChanged(StoreSilent(NOW + 1, cut_off=False, as_of=NOW + 4)))
    assert one.did == (Fence(NOW + 9),) and one.said == ()
    one.now = NOW + 60
    one.holds_lease()
    assert one.did == (Fence(NOW + 65),) and one.said == (StoreBack(59.0),)


def test_an_outage_that_becomes_a_partition_takes_no_time_back_that_was_proved() -> None:
    """Until two seconds ago etcd served no agent. A new leader has to wait for this agent from the moment
    when etcd came back."""
    one = Agent.working(ROUND)
    one.told(LeaseChanged(StoreSilent(NOW, cut_off=False)))
    one.now = NOW + 60
    one.told(LeaseChanged(StoreSilent(NOW, cut_off=False, as_of=NOW + 58)))
    one.told(LeaseChanged(StoreSilent(NOW, cut_off=True, as_of=NOW + 60)))
    assert one.did == () and one.said == (StoreAway(True, NOW + 63),)
    one.told(LeaseChanged(StoreSilent(NOW, cut_off=False, as_of=NOW + 61)))
    assert one.did == (Fence(NOW + 66),), "it only seemed so"


def test_a_renewal_that_comes_late_does_not_move_the_fence_back() -> None:
    one = Agent.working(ROUND)
    one.told(LeaseChanged(StoreSilent(NOW, cut_off=False, as_of=NOW + 58)))
    one.now = NOW + 60
    one.told(LeaseChanged(LeaseHeld(NOW + 59)))
    assert one.did == ()


def test_fenced_workers_charge_no_failure_and_the_round_is_released() -> None:
    one = Agent.working(SECOND)
    one.exits(1, exit(0, 2, code=-9, fenced=True))
    one.exits(1, exit(1, 3, code=-9, fenced=True))
    assert [t.tag for t in one.all_of(Transact)] == [Tag.NODE]
    assert one.state.released.round == 1 and one.said == ()
    record = put(one.wrote(Tag.NODE).writes[0])
    assert isinstance(record, Node) and record.fenced == 1, "so that nobody is charged for its peers"


@pytest.mark.parametrize(("forgot", "codes"), [(False, []), (True, [4])])
def test_a_store_that_lost_its_memory_is_left_and_one_that_grumbles_is_not(
    forgot: bool, codes: list[int]
) -> None:
    one = Agent.registered()
    one.told(StoreComplained("it has been wiped", forgot))
    assert [a.code for a in one.all_of(LeaveJob)] == codes
    assert all("start the job again" in a.why for a in one.all_of(LeaveJob))


def test_a_lost_lease_is_followed_by_registering_and_reporting_again() -> None:
    one = Agent.working(SECOND)
    one.exits(1, exit(0, 2))
    one.answered(Tag.REPORT)
    one.told(LeaseChanged(LeaseExpired(late_s=3.0)))
    assert one.said == (LeaseLost(5.0, 3.0),)
    assert one.did == (), "the fence stays: for as long the others wait for us, and no longer"
    one.sees("nodes/a", None)
    assert not one.all_of(Transact)
    one.now = NOW + 1
    one.holds_lease()
    assert not one.all_of(Fence), "a lease without our record on it protects nobody"
    assert one.wrote(Tag.NODE).guards == (
        Unchanged("nodes/a", 0),
        Unchanged("round", one.state.seen["round"].revision),
    ), "in the round that is written, and in no other"
    one.answered(Tag.NODE)
    assert one.one(Fence) == Fence(NOW + 6)
    assert put(one.wrote(Tag.REPORT).writes[0]) == report("a", 1, exit(0, 2))
    assert one.state.crew is not None and not one.all_of(StartWorkers)


@pytest.mark.parametrize("answer", [Refused(), NoAnswer("no answer")])
@pytest.mark.parametrize("tag", [Tag.NODE, Tag.LEAD])
def test_a_write_that_failed_is_tried_again_without_spinning(tag: Tag, answer: Answer) -> None:
    one = Agent()
    for key in ("round", "nodes/a", "leader"):
        one.sees(key, None)
    one.sees("spec", spec())
    one.holds_lease()
    if tag is Tag.LEAD:
        one.answered(Tag.NODE)
    one.wrote(tag)
    one.answered(tag, answer)
    assert not one.all_of(Transact) and one.wake_at == NOW + RETRY_S
    one.at(NOW + RETRY_S / 2)
    assert not one.all_of(Transact)
    one.at(NOW + RETRY_S)
    one.wrote(tag)


def test_older_news_does_not_undo_newer() -> None:
    one = Agent.registered()
    one.sees("round", round(2, {"b": 2}))
    one.revision -= 2
    one.sees("round", SECOND)
    assert not one.all_of(StartWorkers)


# ---------------------------------------------------------------- leaving


def test_workers_that_keep_their_process_hear_whether_they_take_part_in_a_later_round() -> None:
    for cause, leaves, going in [
        (Cause.NODE_DRAINED, True, (0, 1)),
        (Cause.NODE_DRAINED, False, ()),
        (Cause.GREW, False, ()),
        (Cause.STOPPED, False, (0, 1)),
    ]:
        one = Agent.working(SECOND)
        one.sees("spec", replace(spec(), inplace=True))
        if leaves:
            one.told(Signalled(SIGTERM))
        one.sees("round", closing(SECOND, cause, planned=True))
        assert one.one(LeaveRound).going == going, cause


def test_only_those_workers_of_a_node_give_what_they_hold_that_the_next_round_leaves_out() -> None:
    one = Agent.working(SECOND)
    one.sees("spec", replace(spec(), inplace=True))
    smaller = replace(closing(SECOND, Cause.SCALED, planned=True), left_out=(RankRange(3, 4),))
    one.sees("round", smaller)
    leave = one.one(LeaveRound)
    assert (leave.going, leave.leave_s) == ((1,), None)


def test_another_signal_is_passed_on_to_the_workers() -> None:
    one = Agent.working(SECOND)
    one.told(Signalled(SIGUSR1))
    one.sees("round", closing(SECOND, Cause.NODE_DRAINED, planned=True))
    assert one.one(StopWorkers).signal == SIGUSR1


def test_leadership_ends_with_the_registration() -> None:
    one = Agent.registered()
    one.sees("leader", Leadership("a", life("a")))
    assert one.state.leads is not None
    one.told(LeaseChanged(LeaseExpired()))
    assert one.state.leads is None


def test_a_standby_that_died_as_its_round_began_is_reported_with_its_rank_and_the_round() -> None:
    one = Agent.working(replace(SECOND, number=4))  # has ranks 2 and 3
    one.exits(0, exit(1, rank=1))
    ended = [reason for reason in one.said if isinstance(reason, WorkerEnded)]
    assert [(its.round, its.rank) for its in ended] == [(4, 3)]
