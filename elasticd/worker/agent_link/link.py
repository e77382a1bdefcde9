"""The worker's end of the link to its agent: it sends the worker's state and receives, in a thread, the
agent's orders."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import assert_never

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import Channel, close_all, connect
from elasticd.channel.worker_messages import (
    AGENT_TO_WORKER,
    WORKER_TO_AGENT,
    Enter,
    Hello,
    Leave,
    WorkerToAgent,
)
from elasticd.worker.world.group import World


class AgentGone(RuntimeError):
    """The agent has exited, so no further round follows."""


class Link:
    """The link. ``address``: the name of the agent's abstract Unix socket. Raises AgentGone if no process of
    this user listens there."""

    def __init__(self, address: str) -> None:
        try:
            self._channel = Channel(connect(address), WORKER_TO_AGENT, AGENT_TO_WORKER)
        except ChannelClosed as error:
            raise AgentGone(f"the agent of this worker cannot be reached: {error}") from error
        self._news = threading.Condition()
        self._world: World | None = None
        self._enter: Enter | None = None
        self._to_leave = 0  # the newest round that the agent asks this worker to leave
        self._to_leave_planned = 0  # the newest round to leave at a commit
        self._going = False  # the next round is without this worker
        self._closed = 0  # the newest round that is over
        self._gone = ""
        threading.Thread(target=self._listen, name="elasticd-link", daemon=True).start()

    def send(self, message: WorkerToAgent) -> None:
        """Send a message. If the agent has exited, do nothing."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send(message)

    def next_round(self, after: int) -> Enter:
        """Wait for the next round. ``after``: this worker's last round. Raises AgentGone."""
        with self._news:
            self._world = None
            self._news.wait_for(lambda: self._gone or (self._enter and self._enter.round > after))
            if self._enter is None or self._enter.round <= after:
                raise AgentGone(f"the agent of this worker has exited: {self._gone}")
            return self._enter

    def pass_orders_to(self, world: World) -> None:
        """From now on, pass the agent's orders about this world on to ``world``."""
        with self._news:
            self._world = world
            closed = self._closed >= world.number
            asked = self._to_leave_planned >= world.number
        if closed:
            world.abort()
        elif asked:
            world.ask_to_leave(self._going)

    def wait_for_leave(self, round: int, within_s: float | None = None) -> bool:
        """Wait until the agent asks this worker to leave the round, or exits. Return whether it has asked."""
        with self._news:
            self._news.wait_for(lambda: self._gone or self._to_leave >= round, within_s)
            return self._to_leave >= round

    def is_closed(self, round: int) -> bool:
        """Whether the round is over, so that this worker must leave it at once."""
        with self._news:
            return self._closed >= round

    def _listen(self) -> None:
        try:
            while True:
                message, files = self._channel.receive()
                close_all(files)
                match message:
                    case Leave(round, planned=True, going=going):
                        self._ask(round, going)
                    case Leave(round):
                        self._close(round)
                    case Enter(round):
                        self._close(round - 1)  # even if no Leave was sent
                        with self._news:
                            self._enter = message
                            self._news.notify_all()
                    case _:
                        assert_never(message)
        except ChannelClosed as error:
            with self._news:
                self._gone = str(error)
                self._news.notify_all()

    def _ask(self, round: int, going: bool) -> None:
        with self._news:
            self._to_leave = max(self._to_leave, round)
            self._to_leave_planned, self._going = max(self._to_leave_planned, round), going
            world = self._world
            self._news.notify_all()
        if world is not None and world.number == round:
            world.ask_to_leave(going)

    def _close(self, round: int) -> None:
        with self._news:
            self._closed = max(self._closed, round)
            self._to_leave = max(self._to_leave, round)
            world = self._world
            self._news.notify_all()
        if world is not None and world.number <= round:
            world.abort()


@functools.cache
def own_link(address: str) -> Link:
    """Return this process's link to its agent, made when the run function is first entered."""
    link = Link(address)
    link.send(Hello(os.getpid()))
    return link
