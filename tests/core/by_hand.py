"""One agent, node a, driven by the test, which sends events and gets actions."""

from __future__ import annotations

from typing import TypeVar

from elasticd.core import agent
from elasticd.core.agent_messages import (
    Action,
    Answered,
    Event,
    KeySeen,
    LeaseChanged,
    PortReserved,
    RenewStore,
    StartWorkers,
    Tag,
    Tick,
    Transact,
    WorkerExited,
)
from elasticd.core.facts import Exit, Fact, Leadership, Round, Spec
from elasticd.core.ports import Answer, Applied, Entry, LeaseHeld, Put, Write
from elasticd.core.reasons import Reason
from tests.core.build import NOW, life, spec

A = TypeVar("A")
PORT, NEXT_PORT = 29500, 1234
OTHER_LEADER = Leadership("z", life("z"))


class Agent:
    """``did`` and ``said``: the actions and reasons of the last event. ``now``: the test sets the time."""

    def __init__(
        self,
        wanted: Spec | None = None,
        *,
        slots: int = 2,
        etcd_grace_s: float = 600.0,
        etcd_wait_s: float | None = None,
        began_at: float = 0.0,
        alone: bool = False,
        address: str = "a.example",
        machine: str = "machine of a",
    ) -> None:
        self.me = agent.Identity("a", life("a"), address, tuple(range(slots)), machine, 99)
        self.state = agent.AgentState(
            self.me,
            wanted or spec(),
            agent.AgentConfig(etcd_grace_s, etcd_wait_s, alone=alone, began_at=began_at),
            PORT,
        )
        self.now = NOW
        self.revision = 100
        self.did: tuple[Action, ...] = ()
        self.said: tuple[Reason, ...] = ()
        self.wake_at: float | None = None

    def told(self, event: Event) -> tuple[Action, ...]:
        step = agent.step(self.state, event, self.now)
        self.state, self.did, self.said = step.state, step.actions, step.reasons
        self.wake_at = step.wake_at
        return self.did

    def sees(self, key: str, fact: Fact | None, *, created: int | None = None) -> tuple[Action, ...]:
        self.revision += 1
        return self.told(KeySeen(Entry(key, fact, self.revision, created or (self.revision if fact else 0))))

    def answered(self, tag: Tag, answer: Answer | None = None) -> tuple[Action, ...]:
        """Answer a write. By default the write is applied."""
        self.revision += 1
        return self.told(Answered(tag, answer or Applied(self.revision)))

    def holds_lease(self, for_s: float = 5.0) -> tuple[Action, ...]:
        return self.told(LeaseChanged(LeaseHeld(self.now + for_s)))

    def at(self, now: float) -> tuple[Action, ...]:
        """Let time pass, and nothing else."""
        self.now = now
        return self.told(Tick())

    def exits(self, round: int, exit: Exit, steps: int = 0) -> tuple[Action, ...]:
        return self.told(WorkerExited(round, exit, steps))

    # ---------------------------------------------------------------- the agent's actions

    def all_of(self, kind: type[A]) -> list[A]:
        return [a for a in self.did if isinstance(a, kind)]

    def one(self, kind: type[A]) -> A:
        found = self.all_of(kind)
        assert len(found) == 1, f"{kind.__name__} is not done once in {self.did}"
        return found[0]

    def wrote(self, tag: Tag) -> Transact:
        found = [t for t in self.all_of(Transact) if t.tag is tag]
        assert len(found) == 1, f"{tag} is not written once in {self.did}"
        return found[0]

    # ---------------------------------------------------------------- common beginnings

    @classmethod
    def registered(cls, wanted: Spec | None = None, **more: float) -> Agent:
        """Let the agent join and register in a job that another agent leads, and that waits."""
        one = cls(wanted, **more)  # type: ignore[arg-type]
        one.sees("spec", one.state.wanted)
        one.sees("round", None)
        one.sees("leader", OTHER_LEADER)
        one.sees("nodes/a", None)
        one.holds_lease()
        one.answered(Tag.NODE)
        assert one.state.registered
        return one

    @classmethod
    def working(cls, round: Round, wanted: Spec | None = None, **more: float) -> Agent:
        """Let the agent register, and run the workers of a live round."""
        one = cls.registered(wanted, **more)
        one.sees("round", round)
        one.one(StartWorkers)
        if one.all_of(RenewStore):
            one.store_opened(NEXT_PORT)
        return one

    def store_opened(self, next_port: int) -> tuple[Action, ...]:
        """Reserve the port of the next store, and take the record with that port."""
        self.one(RenewStore)
        self.told(PortReserved(next_port))
        self.wrote(Tag.NODE)
        return self.answered(Tag.NODE)


def put(write: Write) -> Fact:
    assert isinstance(write, Put)
    return write.fact
