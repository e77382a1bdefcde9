"""Gives workers' reports of their training to the core, which compares paces and advises users. The simulator
uses the same code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elasticd.core.advice import Advice, advise
from elasticd.core.agent import AgentState
from elasticd.core.facts import Paces, Stragglers
from elasticd.core.gpu_health import GpuErrors, GpuHealth, GpuLoad, note_errors, note_load
from elasticd.core.measuring import Measuring, SlotLag, lags, measure
from elasticd.core.page_layout import PageContents, Use
from elasticd.core.ports import Seen, Store
from elasticd.core.reasons import Reason
from elasticd.daemon.store_news import news_of
from elasticd.telemetry.gpus import GpuReading

LOOK_S = 1.0


class Observer:
    """Call ``begin``, then ``attend`` at ``wake_at``.

    ``page_contents`` returns the contents of a round's workers' pages, by slot. ``throttled_s`` returns how
    long a CPU quota has delayed this node's processes so far. ``asked``: see ``Advice``. ``gpus``: the slots
    with a bad or a strained GPU, and why. ``found``: the leader's last record of stragglers. ``look_s``: the
    least time between two looks.
    """

    def __init__(
        self,
        page_contents: Callable[[int], Mapping[int, PageContents]],
        throttled_s: Callable[[], float],
        asked: tuple[tuple[str, Use], ...] = (),
        look_s: float = 0.0,
    ) -> None:
        self.wake_at = 0.0
        self.gpus = GpuHealth()
        self._look_s = look_s
        self._ended = 0  # the last round whose workers were told to leave or to stop
        self._page_contents = page_contents
        self._throttled_s = throttled_s
        self._advice = Advice(asked)
        self._measuring = Measuring()
        self.found: Stragglers | None = None

    def begin(self, store: Store) -> None:
        store.watch("stragglers", self._stragglers_seen)

    def lags(self, node: str) -> Mapping[int, SlotLag]:
        """Return the comparison of this node's workers with their peers, by slot."""
        return lags(self._measuring, self.found, node)

    def look_at_gpu(self, slot: int, reading: GpuReading, now: float) -> None:
        """Note what the GPU of a slot reports."""
        errors = GpuErrors(reading.xids, reading.ecc.get("uncorrected"), reading.lost)
        held_down = reading.throttled
        used, size = reading.memory_used, reading.memory_size
        memory = used / size if used is not None and size else None
        load = GpuLoad(held_down.get("thermal", False), held_down.get("hardware", False), memory)
        self.gpus = note_load(note_errors(self.gpus, slot, errors), slot, load, now)

    def attend(self, state: AgentState, now: float, say: Callable[[Reason], None]) -> Paces | None:
        """Return this node's paces for the leader, if a period has ended."""
        crew = state.crew
        ends = crew is not None and crew.order is not None and crew.round.number != self._ended
        if now < self.wake_at and not ends:
            return None
        if crew is not None and ends:  # a round that was shorter than the time between two looks counts, too
            self._ended = crew.round.number
        pages = self._page_contents(crew.round.number) if crew is not None else {}
        if crew is not None:
            self._advice, reasons = advise(self._advice, crew, pages.values())
            for reason in reasons:
                say(reason)
        paces = None
        if now >= self._measuring.due:
            throttled_s = self._throttled_s()
            self._measuring, paces = measure(self._measuring, state, pages, throttled_s, self.gpus, now)
        self.wake_at = max(min(now + LOOK_S, self._measuring.due), now + self._look_s)
        return paces

    def _stragglers_seen(self, seen: Seen) -> None:
        for entry in news_of("stragglers", seen):
            self.found = entry.fact if isinstance(entry.fact, Stragglers) else None
