"""The ports of the core's driver: a store, the workers' processes, an inspector, a link to the leader, and
the rounds' stores.

The daemon implements the ports with etcd and real processes, the simulator with simulated ones. One contract
suite for each port tests both. No call blocks: every request ends with a callback, and "unknown" is a
possible answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from elasticd.core.age import Age
from elasticd.core.facts import Exit, Fact, Leadership, NodeLedger, NodeTelemetry
from elasticd.core.hang.hang_messages import EvidenceKept, Looked
from elasticd.core.hang.judging import Verdict
from elasticd.core.hang.standstill import Beat, Vitals
from elasticd.core.state_memory import StateMemory

# ---------------------------------------------------------------- the store


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as the store last had it.

    ``key`` is below the job's prefix, such as ``nodes/a``. ``fact`` is None once the key is deleted.
    ``revision``: the key's mod_revision, or the revision of its deletion. ``created``: its create_revision (0
    when deleted).
    """

    key: str
    fact: Fact | None
    revision: int
    created: int


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Guard: the key's mod_revision has not changed; 0 means that the key does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class StillThere:
    """Guard: the key still has this create_revision, so its owner's lease has not run out."""

    key: str
    created: int


Guard = Unchanged | StillThere


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key. ``leased``: the key disappears with this agent's lease."""

    key: str
    fact: Fact
    leased: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key. ``prefix``: delete all keys that begin with ``key`` (``reports/``)."""

    key: str
    prefix: bool = False


Write = Put | Delete


def entry_of(write: Write, revision: int, created: int) -> Entry:
    """Return the entry that a write of one key leaves at this revision. ``created``: of the key, if the write
    is a put."""
    if isinstance(write, Delete):
        return Entry(write.key, None, revision, 0)
    return Entry(write.key, write.fact, revision, created)


@dataclass(frozen=True, slots=True)
class Applied:
    """The writes happened, all at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A guard did not hold; nothing was written."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """No answer came in time. The writes may have happened, or may still happen: read again."""

    why: str


Answer = Applied | Refused | NoAnswer


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries of a watch at a revision. A watch begins with a listing, and repeats it when changes may
    have been missed (compaction, a long outage). A key that is not listed does not exist."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes since the last news, in order of revision."""

    entries: tuple[Entry, ...]


Seen = Listing | Changes


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """The agent's lease is held: the store keeps it until ``until`` at least (seconds since the epoch,
    counted from before the request was sent)."""

    until: float


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """The lease ran out or was revoked, and all its keys are gone. A new lease is being requested, and
    ``LeaseHeld`` announces it. ``late_s``: how late this process was with its renewal."""

    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreSilent:
    """The store does not answer.

    ``cut_off``: the store may be answering others, since most of its endpoints cannot be reached over TCP
    from here. Otherwise the store itself is at fault, and no agent can have written anything up to ``as_of``,
    the time of the newest proof. Each new proof is reported. Times are in seconds since the epoch.
    """

    since: float
    cut_off: bool
    as_of: float = 0.0


LeaseNews = LeaseHeld | LeaseExpired | StoreSilent


class Store(Protocol):
    """The keys of one job."""

    def transact(
        self,
        guards: tuple[Guard, ...],
        writes: tuple[Write, ...],
        answer: Callable[[Answer], None],
    ) -> None:
        """Apply all writes atomically if all guards hold. ``answer`` is called exactly once."""

    def watch(self, key: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        """Follow a key, or all keys that start with it. Return a call that ends the watch.

        The watch survives all errors: it reconnects, resumes from the next revision, and lists anew when it
        must. It never reports an older state of a key after a newer one.
        """

    def hold_lease(self, news: Callable[[LeaseNews], None]) -> None:
        """Take a lease and renew it until ``close``. Called once, before any leased put."""


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker to run: its slot, its ranks, and its environment in addition to the agent's own."""

    slot: int
    rank: int
    local_rank: int
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WorkerLinked:
    """A worker uses ``elasticd.worker``: it can leave a round and enter a later one."""

    slot: int


@dataclass(frozen=True, slots=True)
class WorkerWaiting:
    """A worker has left ``round`` (0: it was in none), after ``steps`` commits, and waits for ``start`` to
    give it the next one. ``age``: the age of its state; None if no worker can use the state. ``sharded``:
    the worker has only a part of the state. ``memory``: what the script's sharded state takes."""

    slot: int
    round: int
    steps: int = 0
    age: Age | None = None
    sharded: bool = False
    memory: StateMemory | None = None


@dataclass(frozen=True, slots=True)
class WorkerReturned:
    """The run function has returned in all workers of the round. Only the end of their scripts remains."""

    slot: int
    round: int


@dataclass(frozen=True, slots=True)
class WorkerBroke:
    """A worker lost the others, cannot go on in the round, and waits to be told to leave. If it ``fails``, an
    exception of its own ends it."""

    slot: int
    round: int
    fails: bool


@dataclass(frozen=True, slots=True)
class WorkerCheckpointed:
    """A script has written a checkpoint of its own at ``path``. Unless the worker is linked, it waits there
    until ``go_on`` or its end."""

    slot: int
    round: int
    path: str


@dataclass(frozen=True, slots=True)
class WorkerLingers:
    """A worker has ended, but the kernel is still taking its process down: the memory, the device and the
    ports are not free yet. The event of the exit follows, and once the process is gone, ``WorkerGone``.
    ``failed``: the worker was training, has announced no error, and has not ended well."""

    slot: int
    pid: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The kernel has taken a process down that lingered."""

    pid: int


WorkerNews = (
    WorkerLinked
    | WorkerWaiting
    | WorkerReturned
    | WorkerBroke
    | WorkerCheckpointed
    | WorkerLingers
    | WorkerGone
)


class Procs(Protocol):
    """The workers of one node. All workers in a round are in the same round.

    A worker that uses ``elasticd.worker`` is linked: it can leave a round, wait, and enter a later one in the
    same process.
    """

    def listen(self, news: Callable[[WorkerNews], None]) -> None:
        """Set the receiver of news from workers. Called once, before any start."""

    def start(
        self,
        round_number: int,
        assignments: tuple[Assignment, ...],
        exited: Callable[[int, Exit], None],
        waiting: Collection[int] = (),
    ) -> None:
        """Have one worker for each assignment take part in the round.

        A slot's waiting process enters the round. A process from ``standby`` that does not wait yet enters
        once it waits. A slot without a process gets a new one, unless the slot is in ``waiting``: its process
        has ended without the caller's knowledge. ``exited(round_number, exit)`` is called once for each
        process, with the last round it was given, also if it could not be started (code 127 and a message).
        ``exit.fenced``: the fence killed it.
        """

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None:
        """Start processes that wait for a round (their round is 0). The ranks in their environment are only a
        guess."""

    def leave(
        self,
        planned: bool,
        signal: int,
        grace_s: float,
        leave_s: float | None,
        going: Collection[int] = (),
    ) -> None:
        """Have every worker leave its round.

        A linked worker is told to leave: at a commit that all ranks agree on if ``planned``, else at once. It
        gets SIGKILL if it has neither left nor ended after ``leave_s`` (None: no limit). A worker that fails
        gets SIGKILL if it has not ended after ``grace_s``. A worker that is not linked gets the signal, and
        SIGKILL after ``grace_s``. ``going``: the slots whose linked workers are also told that the next
        round is without them. A second call may be unplanned, or set a limit.
        """

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None:
        """Send the signal to the workers of these slots (None: to all). Send SIGKILL to the workers that are
        left after ``grace_s``. Return at once.

        Descendants that a worker leaves behind are killed when the worker ends. Another call with a shorter
        grace shortens the grace.
        """

    def go_on(self, slots: tuple[int, ...]) -> None:
        """Let the workers of these slots go on after their checkpoint."""

    def fence(self, until: float | None) -> None:
        """Let the workers run until ``until`` (seconds since the epoch; None: without limit).

        Unless another call comes before, all workers are then killed, also waiting ones, and even if the
        agent is stopped.
        """

    def steps(self) -> Mapping[int, int]:  # read from shared memory: cheap
        """Return the steps made in this round, by slot: committed steps of a linked worker, else optimizer
        steps."""


# ---------------------------------------------------------------- a look at processes


class Inspector(Protocol):
    """The inspector of one node's workers in its round."""

    def now(self) -> float:
        """Return the time of the clock that workers' steps use. The clock stands still while the machine
        sleeps."""

    def listen(self, news: Callable[[Looked | EvidenceKept], None]) -> None:
        """Set the receiver of answers. Called once, before any look."""

    def steps(self, known: Mapping[int, int]) -> tuple[Beat, ...]:
        """Return the workers' steps. ``known``: the number of steps already reported, by pid. Cheap: read
        from shared memory."""

    def sample(self, pids: Mapping[int, int]) -> Mapping[int, Vitals]:
        """Return the kernel's figures of these processes, by slot. Cheap."""

    def look(self, number: int, slots: tuple[int, ...]) -> None:
        """Find out where these workers are in their code. ``Looked(number, ...)`` may come late or never."""

    def keep(self, number: int, round: int, verdict: Verdict, look: int) -> None:
        """Write the findings of the look ``look``, if it was the last one, as evidence of a hang in the
        round. ``EvidenceKept(number, ...)`` may come late or never."""

    def condemn(self, slot: int, pid: int, verdict: Verdict, evidence: str) -> None:
        """Kill the slot's worker, if it is still this process. The exit says that the worker hung, and
        why."""


# ---------------------------------------------------------------- the link to the leader


@dataclass(frozen=True, slots=True)
class Heard:
    """The leader's answer to telemetry. ``every_s``: how often to tell. ``looked_up``: the nodes that asked
    for a ledger of their earlier agent; ``kept`` has the ledgers that were found. ``again``: the nodes that
    are to tell all their values again, since the leader did not know them before."""

    every_s: float
    looked_up: tuple[str, ...] = ()
    kept: tuple[NodeLedger, ...] = ()
    again: tuple[str, ...] = ()


class LeaderLink(Protocol):
    """This agent's connection to the leader."""

    def listen(self, heard: Callable[[Heard], None]) -> None:
        """Pass on the leader's answers from now on, from any thread."""

    def tell(self, told: NodeTelemetry, leader: Leadership | None) -> None:
        """Tell the leader as soon as the leader wants to hear. What has not been sent until the next call is
        replaced. ``leader``: the leader as this agent knows it."""

    def flush(self, within_s: float, spread_s: float = 0.0) -> bool:
        """Tell the leader at a moment of the next ``spread_s`` seconds that is this node's own. Wait until
        the leader has answered; return False if it does not, ``within_s`` after the last moment."""


# ---------------------------------------------------------------- the store of a round


class RoundStores(Protocol):
    """The c10d stores that this node hosts, one after the other: a new one for each round."""

    def open(self) -> None:
        """Serve the round's store on the port that was reserved last. An older store closes."""

    def renew(self) -> int:
        """Return the port that is reserved, and listens, for the next store. An open store serves until the
        next one opens."""
