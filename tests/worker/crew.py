"""Stands in for the agent of workers: starts them, exchanges messages with them, hosts a store for each
round, and ends the round when a worker ends.

Workers are forked from a process that has imported what they need.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import Channel, listen
from elasticd.channel.worker_messages import (
    AGENT_TO_WORKER,
    GIVES,
    HANDOVER,
    TAKES,
    WORKER_TO_AGENT,
    AgentToWorker,
    Broken,
    Done,
    Enter,
    Entered,
    Hello,
    Leave,
    Waiting,
    WorkerToAgent,
)
from elasticd.procs.linux import kill_tree
from tests.worker.jobs import Accident, reads, work

PATIENCE_S = float(os.environ.get("CREW_PATIENCE_S", "60"))
_addresses = itertools.count()
AgentEnd = Channel[AgentToWorker, WorkerToAgent]
PRELOADED = [
    "pytest",
    "elasticd.worker.checkpoints",
    *(
        f"tests.worker.{module}"
        for module in ("guarding", "many", "forking", "chaosjob", "shardjob", "shardgpt", "splitjob")
    ),
]


def forkserver() -> ForkServerContext:
    """Return the context that forks workers from a process which has imported what their scripts import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclass
class Hand:
    """One worker. ``round``: its round; 0 while it waits. ``status``: its exit code, once it has ended and
    all its messages have been read."""

    process: BaseProcess
    channel: AgentEnd | None = None
    said: list[WorkerToAgent] = field(default_factory=list)
    round: int = 0
    waiting: Waiting | None = None
    done: bool = False
    shunned: bool = False  # the worker counts as dead, and gets no further round
    status: int | None = None

    @property
    def broken(self) -> list[Broken]:
        return [m for m in self.said if isinstance(m, Broken)]

    @property
    def entered(self) -> list[Entered]:
        return [m for m in self.said if isinstance(m, Entered)]


class Crew:
    """The workers of a test, with the part of an agent that they talk to. ``hands``: all workers so far, in
    the order of their start."""

    def __init__(self) -> None:
        self._context = forkserver()
        self.address = f"elasticd-test-{os.getpid()}-{next(_addresses)}"
        self._listener = listen(self.address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.hands: list[Hand] = []
        self.round = 0
        self.members: list[Hand] = []
        self.closing = self.aborting = False
        self.stores: list[dist.TCPStore] = []
        self.least = 1
        self.knows = True  # whether the death of a worker ends the round
        self.led: Callable[[int], int] = lambda port: port  # the port at which workers reach a store
        self.settled: list[tuple[int, int]] = []  # each round's number and size

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for hand in self.hands:
            if hand.process.is_alive() and hand.process.pid is not None:
                kill_tree(hand.process.pid)  # with the processes that load the worker's data
            hand.process.join()
            if hand.channel is not None:
                hand.channel.close()
        self._listener.close()
        self._selector.close()

    # ------------------------------------------------------------ what tests call

    def start(self, job: Callable[..., None], *args: Any, **options: Any) -> Hand:
        """Start one more worker, in no round."""
        process = self._context.Process(target=job, args=(self.address, *args), kwargs=options)
        process.start()
        hand = Hand(process)
        self.hands.append(hand)
        self._selector.register(process.sentinel, selectors.EVENT_READ, lambda: self._exited(hand))
        return hand

    def begin(
        self,
        folder: Path,
        *accidents: Accident,
        job: Callable[..., None] = work,
        first: int = 0,
        **options: Any,
    ) -> list[Hand]:
        """Start one worker for each accident, numbered from ``first`` on. Form a round of them."""
        names = map(str, itertools.count(first))
        hands = [self.start(job, str(folder), next(names), accident, **options) for accident in accidents]
        self.form(*hands)
        return hands

    def form(self, *hands: Hand, handover: bool = False) -> None:
        """Form the next round of these workers, by default of all workers, once they wait. ``handover``:
        workers that are shunned send what they have to the others."""
        hands = hands or (*self.hands,)
        self.all_waiting(*hands)
        self.round += 1
        self.closing = self.aborting = handover  # workers leave a handover by themselves
        self.members = list(hands)
        self.stores = [*self.stores[-1:], self._host()]
        for rank, hand in enumerate(hands):
            hand.waiting, hand.round = None, self.round
            passing = {HANDOVER: GIVES if hand.shunned else TAKES} if handover else {}
            self._tell(hand, Enter(self.round, self._environment(rank) | passing))
        self.settled.append((self.round, len(hands)))

    def close(self, planned: bool = False, going: tuple[Hand, ...] = ()) -> None:
        """End the round. The next round is formed of all workers that wait then, except ``going``."""
        self.closing = True
        self.aborting = not planned
        for hand in self.members:
            self._tell(hand, Leave(self.round, planned, hand in going))

    def until(self, condition: Callable[[], Any]) -> None:
        """Answer the workers until the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"did not come about: {self}"
            for key, _ in self._selector.select(left):
                key.data()
            self._go_on()

    def hand_over(self, *newcomers: Hand) -> None:
        """Have these workers replace all others at the next commit."""
        self.all_waiting(*newcomers)
        going = tuple(self.members)
        self.least = len(self.hands) + 1  # no next round before all have left, since they save first
        self.close(planned=True, going=going)
        self.until(lambda: all(hand.waiting is not None for hand in going))
        for hand in going:
            hand.shunned = True
            hand.process.kill()
        self.least = 1
        self.form(*newcomers)

    def grow(self, *newcomers: Hand) -> None:
        """Take these workers in at the next commit."""
        self.all_waiting(*newcomers)
        self.close(planned=True)

    def all_waiting(self, *hands: Hand) -> None:
        self.until(lambda: all(h.waiting is not None or h.status is not None for h in hands))
        assert all(h.waiting is not None for h in hands), self

    def all_ended(self) -> None:
        self.until(lambda: all(h.status is not None for h in self.hands if not h.shunned))

    def __repr__(self) -> str:
        return "\n".join(
            f"{h.process.pid}: exit {h.status}, round {h.round}, {h.said[-3:]}" for h in self.hands
        )

    # ------------------------------------------------------------

    def _go_on(self) -> None:
        """Do what the leader would decide: survivors continue at once, together with the workers that
        wait."""
        alive = [h for h in self.members if h.status is None]
        if not self.round or not self.members:
            return
        if not alive or all(h.done or h.status == 0 for h in self.members):
            return
        lost = any(h.status is not None for h in self.members)
        lost = lost and self.knows
        if (not self.closing and any(h.round != self.round for h in alive)) or (lost and not self.aborting):
            self.close()
        if self.closing and all(h.round != self.round or h.shunned for h in alive):
            ready = [h for h in self.hands if h.waiting is not None and h.status is None and not h.shunned]
            if len(ready) >= self.least:
                self.form(*ready)

    def _host(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(self.members)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.led(self.stores[-1].port)),
        }

    def _tell(self, hand: Hand, message: AgentToWorker) -> None:
        if hand.channel is not None:
            hand.channel.try_send(message)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        channel: AgentEnd = Channel(connection, AGENT_TO_WORKER, WORKER_TO_AGENT)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(channel))

    def _hear(self, channel: AgentEnd) -> bool:
        """Hear the worker's next message. Return whether there was one."""
        try:
            heard = channel.poll()
        except ChannelClosed:
            with contextlib.suppress(KeyError):
                self._selector.unregister(channel)
            return False
        if heard is not None:
            self._note(channel, heard[0])
        return heard is not None

    def _note(self, channel: AgentEnd, message: WorkerToAgent) -> None:
        if isinstance(message, Hello):
            next(h for h in self.hands if h.process.pid == message.pid).channel = channel
        hand = next(h for h in self.hands if h.channel is channel)
        hand.said.append(message)
        match message:
            case Waiting():
                hand.waiting, hand.round = message, 0
            case Done():
                hand.done = True

    def _exited(self, hand: Hand) -> None:
        self._selector.unregister(hand.process.sentinel)
        hand.process.join()
        while hand.channel is not None and self._hear(hand.channel):
            pass
        hand.waiting = None
        hand.status = hand.process.exitcode


def outcome_alone(job: Callable[..., None], folder: Path, what: str = "outcome") -> Any:
    """Run the job in one process, without an agent. Return the last entry ``what`` of the worker's
    journal."""
    with Crew() as crew:
        hand = crew.start(_alone, job, str(folder))
        crew.all_ended()
    assert hand.status == 0, (folder / "alone.err").read_text()
    return reads(folder, "alone", what)[-1]


def _alone(_address: str, job: Callable[..., None], folder: str) -> None:
    job("", folder, "alone")
