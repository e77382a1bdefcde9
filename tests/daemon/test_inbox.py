"""In which order an agent's events are handled."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import cast

from elasticd.core.agent_messages import LeaseChanged, LeaveJob, Signalled, Tick
from elasticd.core.ports import LeaseHeld
from elasticd.daemon.driver import Driver, Happening
from elasticd.daemon.inbox import Inbox, Signals

HALF = Signalled(99)  # lets the stand-in make half a decision


@dataclass
class Handling:
    """Stands in for a driver, which leaves after ``most`` events. ``comes``: is posted with the first one."""

    inbox: Inbox
    most: int
    comes: tuple[Happening, ...] = ()
    wake_at: float | None = None
    has_half_a_decision: bool = False
    left: LeaveJob | None = None
    handled: list[Happening] = field(default_factory=list)

    def handle(self, event: Happening, now: float) -> None:
        if not self.handled:
            for other in self.comes:
                self.inbox.post(other)
        self.handled.append(event)
        self.has_half_a_decision = event == HALF
        self.wake_at = now if event == HALF else None
        if len(self.handled) == self.most:
            self.left = LeaveJob(0, "")


def order(*posted: Happening, comes: tuple[Happening, ...] = (), ticks: int = 0) -> list[Happening]:
    """Return the events in the order in which they are handled, with so many ticks among them. ``comes``: are
    posted while the first one is handled."""
    inbox = Inbox()
    for event in posted:
        inbox.post(event)
    driver = Handling(inbox, len(posted) + len(comes) + ticks, comes)
    inbox.serve(cast(Driver, driver), lambda: 0.0, lambda now: 1e9)
    return driver.handled


def test_news_of_the_lease_comes_before_all_that_waits() -> None:
    held, longer = LeaseChanged(LeaseHeld(5.0)), LeaseChanged(LeaseHeld(6.0))
    assert order(Signalled(1), Signalled(2), held, longer) == [held, longer, Signalled(1), Signalled(2)]
    assert order(Signalled(1), Signalled(2), comes=(held,)) == [Signalled(1), held, Signalled(2)]


def test_other_events_are_handled_in_the_order_in_which_they_came() -> None:
    events = [Signalled(number) for number in range(1, 5)]
    assert order(*events) == events


def test_only_news_of_the_lease_comes_between_the_halves_of_a_decision() -> None:
    held = LeaseChanged(LeaseHeld(5.0))
    assert order(HALF, Signalled(1), ticks=1) == [HALF, Tick(), Signalled(1)]
    assert order(HALF, Signalled(1), comes=(held,), ticks=0) == [HALF, held, Signalled(1)]


def test_an_agent_that_was_started_to_outlive_its_terminal_does_so() -> None:
    """As nohup does, the parent has SIGHUP ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    heard: list[Happening] = []
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Signals((signal.SIGHUP, signal.SIGTERM), heard.append):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert heard == [Signalled(signal.SIGTERM)]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
