"""When a watch shows the job: at each new phase and round, and heartbeats together."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

import pytest

from elasticd.cli import watch as watching
from elasticd.cli.command_error import CommandError
from elasticd.cli.job_access import Place
from elasticd.core.facts import Cause, Fact, Node, Phase, Progress, Round, SlotProgress
from elasticd.core.ports import Changes, Entry, Listing
from elasticd.etcd.access import EtcdAccess
from elasticd.telemetry.status import JobStatus

NODE = Node("a", "a-1", "10.0.0.1", (0,), 0, 1, 2, "host")
LIVE = Round(1, Phase.LIVE, (), "x:1", Cause.START, 1.0)


class Watched(watching._Watch):
    """A watch that the test feeds with events. Its clock is the real one, since two displays are less than
    a second apart."""

    def __init__(self, *, shared: bool = True) -> None:
        self.told: list[JobStatus] = []
        super().__init__(Place(EtcdAccess(("127.0.0.1:1",)), ("j",), shared), "j", self.told.append)

    def hears(self, **facts: Fact | None) -> None:
        self._take(Changes(tuple(Entry(k.replace("__", "/"), f, 1, 1) for k, f in facts.items())))
        if self._is_due():
            self._look()

    def is_told(self, **facts: Progress) -> None:
        """Let the job's leader report."""
        self._take(watching._Told({k.replace("__", "/"): f for k, f in facts.items()}))
        if self._is_due():
            self._look()


def beat(node: str, step: int) -> Progress:
    return Progress(node, 1, (SlotProgress(0, 0, 7, step, 1.0),))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(watching, "EVERY_S", 3600.0)
    watched = Watched()
    watched.hears(round=LIVE, nodes__a=NODE)
    assert len(watched.told) == 1  # the first status is shown at once
    return watched


def test_heartbeats_are_shown_together_when_it_is_time(watched: Watched) -> None:
    for step in range(100):
        watched.is_told(progress__a=beat("a", step), progress__b=beat("b", step))
    assert len(watched.told) == 1
    assert 0 < watched._patience_s() <= 3600
    watched._shown_at -= 3600.0
    assert watched._patience_s() == 0 and watched._is_due()
    assert not watched._look() and len(watched.told) == 2
    assert not watched._is_due()  # nothing is shown twice


def test_a_new_phase_or_round_is_shown_at_once(watched: Watched) -> None:
    watched.is_told(progress__a=beat("a", 1))
    watched.hears(round=replace(LIVE, phase=Phase.CLOSING))
    watched.hears(round=replace(LIVE, number=2))
    watched.hears(round=replace(LIVE, number=2, restarts=1))  # neither
    assert [(r.round, r.phase) for r in watched.told] == [(1, "live"), (1, "closing"), (2, "live")]


def test_what_changed_together_is_shown_together(watched: Watched) -> None:
    watched._news.put(Changes(()))
    watched.hears(round=replace(LIVE, number=2))
    assert len(watched.told) == 1
    watched._take(watched._news.get())
    assert watched._is_due()


def test_a_job_that_vanishes_is_told_at_once(watched: Watched) -> None:
    with pytest.raises(CommandError, match="no longer in etcd"):
        watched.hears(round=None, nodes__a=None)


def test_a_standalone_run_may_have_written_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "EVERY_S", 3600.0)
    watched = Watched(shared=False)
    watched.hears()
    watched.hears(round=LIVE)
    assert [r.phase for r in watched.told] == ["starting", "live"]
    with pytest.raises(CommandError, match="no longer in etcd"):
        watched.hears(round=None)


def test_the_first_news_after_an_outage_are_shown_at_once(watched: Watched) -> None:
    watched._away = True
    assert watched._patience_s() <= watching.AWAY_S
    watched._take(Listing((Entry("round", LIVE, 1, 1),), 1))
    assert watched._is_due() and not watched._away


class InterruptedAtItsEnd:
    """Ctrl-C is pressed while Python destroys this object."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_ends_a_watch_though_python_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def show(_: JobStatus) -> None:
        InterruptedAtItsEnd()

    watched = watching._Watch(Place(EtcdAccess(("127.0.0.1:1",)), ("j",), shared=False), "j", show)
    watched._news.put(Listing((Entry("round", LIVE, 1, 1), Entry("nodes/a", NODE, 1, 1)), 1))
    try:
        with pytest.raises(KeyboardInterrupt):
            watched.run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert dropped == [KeyboardInterrupt]
