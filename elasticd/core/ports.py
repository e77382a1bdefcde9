"""What the core's driver asks of the world: a store, a keeper of processes, and one who looks at them.

The daemon gives it etcd and real processes, the simulator gives it simulated ones; one contract
suite for each port holds both to the same behaviour. Nothing here blocks: every request ends as a
call back, and "unknown" is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from elasticd.core.age import Age
from elasticd.core.facts import Exit, Fact
from elasticd.core.hang.judging import Verdict
from elasticd.core.hang.messages import EvidenceKept, Looked
from elasticd.core.hang.standstill import Beat, Vitals

# ---------------------------------------------------------------- the store


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as the store last had it. ``key`` is below the job's prefix, such as ``nodes/a``.

    ``fact`` is None once the key is deleted; ``revision`` is then the revision of the deletion,
    else its mod_revision. ``created`` is its create_revision (0 when deleted).
    """

    key: str
    fact: Fact | None
    revision: int
    created: int


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Guard: the key's mod_revision is still this; 0 says that the key does not exist."""

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
    """``leased``: the key disappears with this agent's lease."""

    key: str
    fact: Fact
    leased: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """``prefix``: the key and all keys below it (``reports/``)."""

    key: str
    prefix: bool = False


Write = Put | Delete


@dataclass(frozen=True, slots=True)
class Applied:
    """The writes happened, all at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A guard did not hold; nothing was written."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer in time: the writes may have happened, or may happen yet. Read again."""

    why: str


Answer = Applied | Refused | Unknown


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything a watch covers, as of a revision; sent first, and again whenever changes may
    have been missed (compaction, a long outage). What it does not name does not exist."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed since, in order of revision."""

    entries: tuple[Entry, ...]


Seen = Listing | Changes


@dataclass(frozen=True, slots=True)
class Held:
    """The agent's lease is held: the store will not drop it before ``until`` (seconds since the
    epoch, counted from before the request was sent)."""

    until: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease ran out or was revoked: every key on it is gone. A new one is being asked for;
    ``Held`` will say when there is one. ``late_s``: how late this process was in asking for more time."""

    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Silent:
    """The store does not answer. ``cut_off``: it may be answering others, since a majority of its
    endpoints cannot even be reached over TCP from here. Else the fault is the store's own, and
    nobody else can have written anything either, up to ``as_of``: the time of the newest proof. It is told
    again with each new proof. Times are in seconds since the epoch."""

    since: float
    cut_off: bool
    as_of: float = 0.0


LeaseNews = Held | Lost | Silent


class Store(Protocol):
    """The keys of one job."""

    def transact(
        self,
        guards: tuple[Guard, ...],
        writes: tuple[Write, ...],
        answer: Callable[[Answer], None],
    ) -> None:
        """Apply all writes at once if all guards hold. ``answer`` is called exactly once."""

    def watch(self, key: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        """Follow a key, or all keys that start with it. Returns the call that ends the watch.

        Survives everything: reconnects, resumes from the next revision, lists anew when it must.
        Never reports an older state of a key after a newer one.
        """

    def hold_lease(self, news: Callable[[LeaseNews], None]) -> None:
        """Take a lease and keep it until ``close``. Called once, before any leased put."""


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker to run: where, as which rank, with which environment on top of the agent's own."""

    slot: int
    rank: int
    local_rank: int
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WorkerLinked:
    """A worker uses ``elasticd.worker``: it can leave a round, and take part in a later one."""

    slot: int


@dataclass(frozen=True, slots=True)
class WorkerWaiting:
    """A worker has left ``round`` (0: it never was in one), in which it committed so many steps, and waits
    for ``start`` to give it its next. ``age``: of the state it could bring, None if it has none whole."""

    slot: int
    round: int
    steps: int = 0
    age: Age | None = None


@dataclass(frozen=True, slots=True)
class WorkerReturned:
    """The run function has returned in all workers of the round; what follows is the end of their
    scripts."""

    slot: int
    round: int


@dataclass(frozen=True, slots=True)
class WorkerBroke:
    """A worker can do nothing more in the round: it has lost the others, and waits to be told to leave; or,
    if it ``fails``, an exception of its own ends it."""

    slot: int
    round: int
    fails: bool


@dataclass(frozen=True, slots=True)
class WorkerCheckpointed:
    """A script has written a checkpoint of its own, at ``path``. Unless it is linked, it is held there
    until ``go_on`` or its end."""

    slot: int
    round: int
    path: str


WorkerNews = WorkerLinked | WorkerWaiting | WorkerReturned | WorkerBroke | WorkerCheckpointed


class Procs(Protocol):
    """The workers of one node. Those that act in a round all act in the same one.

    A worker that uses ``elasticd.worker`` is linked: it can leave a round, wait, and take part in a
    later one in the same process.
    """

    def listen(self, news: Callable[[WorkerNews], None]) -> None:
        """Called once, before any start: whom to tell what workers say of themselves."""

    def start(
        self,
        round_number: int,
        assignments: tuple[Assignment, ...],
        exited: Callable[[int, Exit], None],
    ) -> None:
        """Have one worker per assignment take part in the round. A slot's process that waits is let
        in; one that was started by ``standby`` and does not wait yet is let in once it does; where
        there is none, one is started. ``exited(round_number, exit)`` is called once for each process,
        with the round it was given last, also where it could not be started (code 127 and a message);
        ``exit.fenced`` says whether the fence killed it."""

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None:
        """Start processes that belong to no round (0), to wait for one. Their environment's ranks are
        only likely ones."""

    def part(
        self, planned: bool, signal: int, grace_s: float, part_s: float | None, going: bool = False
    ) -> None:
        """Have every worker that acts leave its round. Linked ones are told to (``planned``: at a
        commit point that all ranks agree on, else at once), and get SIGKILL if they have neither left
        nor ended after ``part_s`` (None: they are waited for); those that fail, if they have not
        ended after ``grace_s``; the others are stopped by the signal, with ``grace_s``. ``going``: the first
        are told besides that they will be in no later round. May be called again, with ``planned`` no longer
        true, or with a limit."""

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None:
        """Send the signal to the workers of these slots, or to all there are, and SIGKILL to what is
        left after ``grace_s``; returns at once. Descendants that a worker leaves behind are killed
        when it ends. Calling it again with a shorter grace shortens it."""

    def go_on(self, slots: tuple[int, ...]) -> None:
        """Hold those that have told of a checkpoint no longer."""

    def fence(self, until: float | None) -> None:
        """Workers may run until then (seconds since the epoch; None: without limit) and are killed
        when it passes without another call, even if the agent itself is stopped. Those that wait
        are killed, too."""

    def steps(self) -> Mapping[int, int]:  # read from shared memory: cheap
        """Made in this round, by slot: the steps that a linked worker has committed, or an optimizer's."""


# ---------------------------------------------------------------- a look at processes


class Inspector(Protocol):
    """Who looks at the workers of one node that act in its round."""

    def now(self) -> float:
        """By the clock in which workers tell their steps: seconds that pass while the machine is awake."""

    def listen(self, news: Callable[[Looked | EvidenceKept], None]) -> None:
        """Called once, before any look: whom to answer."""

    def steps(self, known: Mapping[int, int]) -> tuple[Beat, ...]:
        """What they tell of their steps. ``known``: how many of each process, by pid, were told before.
        Cheap: it is read from shared memory."""

    def sample(self, pids: Mapping[int, int]) -> Mapping[int, Vitals]:
        """How these processes are, by slot. Cheap: the kernel is asked."""

    def look(self, number: int, slots: tuple[int, ...]) -> None:
        """Find out where these workers are in their code. ``Looked(number, ...)`` may come late, or never."""

    def keep(self, number: int, round: int, verdict: Verdict, look: int) -> None:
        """Write down what was found at the look of that number, if it was the last one, as evidence of a hang
        of the round. ``EvidenceKept(number, ...)`` may come late, or never."""

    def condemn(self, slot: int, pid: int, verdict: Verdict, evidence: str) -> None:
        """Kill the slot's worker, if it is still this process. Its exit says that it hung, and why."""


# ---------------------------------------------------------------- the store of a round


class RoundStores(Protocol):
    """The c10d stores this node hosts, one after the other: a fresh one for every round."""

    def open(self) -> None:
        """Serve the round's store on the port reserved last, in place of an older one."""

    def renew(self) -> int:
        """The port reserved, and listening, for the next store. One that is open serves until the
        next is opened."""
