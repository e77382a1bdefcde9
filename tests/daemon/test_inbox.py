"""In which order an agent's events are handled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from elasticd.core.agent_messages import LeaseChanged, LeaveJob, Signalled
from elasticd.core.ports import LeaseHeld
from elasticd.daemon.driver import Driver, Happening
from elasticd.daemon.inbox import Inbox


@dataclass
class Handling:
    """Stands in for a driver, which leaves after ``most`` events. ``comes``: is posted with the first one."""

    inbox: Inbox
    most: int
    comes: tuple[Happening, ...] = ()
    wake_at: float | None = None
    left: LeaveJob | None = None
    handled: list[Happening] = field(default_factory=list)

    def handle(self, event: Happening, now: float) -> None:
        if not self.handled:
            for other in self.comes:
                self.inbox.post(other)
        self.handled.append(event)
        if len(self.handled) == self.most:
            self.left = LeaveJob(0, "")


def order(*posted: Happening, comes: tuple[Happening, ...] = ()) -> list[Happening]:
    """Return the events in the order in which they are handled. ``comes``: are posted while the first one is
    handled."""
    inbox = Inbox()
    for event in posted:
        inbox.post(event)
    driver = Handling(inbox, len(posted) + len(comes), comes)
    inbox.serve(cast(Driver, driver), lambda: 0.0, lambda now: 1e9)
    return driver.handled


def test_news_of_the_lease_comes_before_all_that_waits() -> None:
    held, longer = LeaseChanged(LeaseHeld(5.0)), LeaseChanged(LeaseHeld(6.0))
    assert order(Signalled(1), Signalled(2), held, longer) == [held, longer, Signalled(1), Signalled(2)]
    assert order(Signalled(1), Signalled(2), comes=(held,)) == [Signalled(1), held, Signalled(2)]


def test_other_events_are_handled_in_the_order_in_which_they_came() -> None:
    events = [Signalled(number) for number in range(1, 5)]
    assert order(*events) == events
