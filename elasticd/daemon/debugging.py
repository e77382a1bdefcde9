"""``elasticd run --debug``: compares what workers record, and says where they disagree."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from elasticd.core.ports import Store
from elasticd.daemon.debug_exchange import DebugExchange, Tails
from elasticd.daemon.driver import Driver
from elasticd.data.debugrecords import FOLDER
from elasticd.data.disagreement import Disagreement, NoCall, OtherCall, OtherSeeds, disagreements
from elasticd.procs import debugfiles, hang_evidence
from elasticd.procs.workers import LocalProcs
from elasticd.telemetry import disagreementtext, log

LOOK_S: Final = 1.0
LAST_S: Final = 10.0  # the longest wait for the last comparison
SHOWN_AT_END: Final = 5


class Debugging:
    """Compares the workers' records of the present round now and then, and once more when the round is over.
    On the node of rank 0, the last records of other nodes' workers are compared, too.

    Call ``routine`` at the time that it last returned. ``close`` returns the lines for the closing screen.
    Reading the records may take a while, so a thread reads them. ``run_folder`` returns the run's folder.
    """

    def __init__(
        self, driver: Driver, procs: LocalProcs, store: Store, run_folder: Callable[[], Path | None]
    ) -> None:
        self._driver = driver
        self._exchange = DebugExchange(store)
        self._round = 0
        self._due = 0.0
        self._todo: queue.SimpleQueue[tuple[int, bool, bool] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._findings = Findings(procs, run_folder, self._exchange)
        self._thread = threading.Thread(target=self._compare, name="elasticd-debug", daemon=True)
        self._thread.start()

    def routine(self, now: float) -> float:
        if now < self._due:
            return self._due
        self._due = now + LOOK_S
        self._exchange.follow(self._driver.state, now)
        crew = self._driver.state.crew
        number = crew.round.number if crew is not None else 0
        if number != self._round:
            self._end_round()
            self._round = number
        elif number and self._idle.is_set():  # polls: a worker that is stuck in a collective tells nothing
            self._idle.clear()
            self._todo.put((number, False, False))
        return self._due

    def close(self) -> list[str]:
        """Compare the last round, and return what was found in the run, one line each."""
        self._end_round()
        self._todo.put(None)
        self._thread.join(LAST_S)
        return self._findings.closing()

    def _end_round(self) -> None:
        if self._round:
            self._todo.put((self._round, True, self._driver.hung_round == self._round))

    def _compare(self) -> None:
        while (item := self._todo.get()) is not None:
            number, over, hung = item
            try:
                self._findings.look(number, over=over, hung=hung)
            except OSError as error:
                log.get("elasticd.agent").warning("debug.not_written", why=str(error))
            self._idle.set()


class Findings:
    """What the comparisons found, and what of it was said."""

    def __init__(
        self, procs: LocalProcs, run_folder: Callable[[], Path | None], exchange: DebugExchange
    ) -> None:
        self._procs = procs
        self._exchange = exchange
        self._run_folder = run_folder
        self._changed: tuple[tuple[int, ...], Tails] = ((), ())
        self._sentences: dict[tuple[int, str], str] = {}  # by round and kind: the last comparison knows most
        self._agreed = ""

    def look(self, number: int, *, over: bool, hung: bool) -> None:
        """Compare the records of a round, say what is new, and write the summary. Raises OSError."""
        base = self._run_folder()
        if base is None:
            return
        folder = debugfiles.round_folder(base / FOLDER, number)
        changed = debugfiles.changed_at(folder), self._exchange.others(number)
        if not changed[0] or (changed == self._changed and not over):
            return
        self._changed = changed
        self._exchange.offer(number, debugfiles.tails(folder))
        records = [*debugfiles.read(folder), *debugfiles.read_tails(changed[1])]
        found = disagreements(records, hung=hung)
        fresh = [one for one in found if self._is_new(number, one)]
        if fresh or over:
            text = disagreementtext.summary(number, found, records)
            (folder / "summary.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        if over and not found:
            self._agreed = f"In round {number} {disagreementtext.all_agree(records)}."
            _log("info", "debug.agreed", self._agreed, round=number)
        if not over and any(isinstance(one, OtherCall | NoCall) for one in fresh):
            self._keep_stacks(folder / "stacks", disagreementtext.sentences(fresh))

    def closing(self) -> list[str]:
        """Return the lines for the closing screen."""
        found = list(dict.fromkeys(self._sentences.values()))  # a restarted script does the same again
        lines = found[:SHOWN_AT_END] or ([self._agreed] if self._agreed else [])
        lines += [f"There are {len(found) - SHOWN_AT_END} more."] if len(found) > SHOWN_AT_END else []
        base = self._run_folder()
        if base is not None and (base / FOLDER).is_dir():
            lines.append(f"The records of the ranks are in {base / FOLDER}.")
        return [f"Debug: {line}" for line in lines]

    def _is_new(self, number: int, one: Disagreement) -> bool:
        """Note the disagreement, and say it if it was not said before. Return whether it is new in the
        round."""
        [sentence] = disagreementtext.sentences([one])
        may_be_meant = isinstance(one, OtherSeeds)  # a script without a seed draws others in each round
        key = 0 if may_be_meant else number, disagreementtext.subject(one)
        is_new = key not in self._sentences
        if is_new and sentence not in self._sentences.values():
            _log("info" if may_be_meant else "warning", "debug.disagreement", sentence, round=number)
        self._sentences[key] = sentence
        return is_new

    def _keep_stacks(self, folder: Path, sentences: list[str]) -> None:
        """Write down what the workers do now: the stacks, and the flight recorders of torch."""
        with contextlib.suppress(OSError, ValueError):  # a worker may end meanwhile
            hang_evidence.write(folder, "\n".join(sentences), hang_evidence.look(self._procs.watched()))


def _log(level: str, event: str, sentence: str, **fields: object) -> None:
    getattr(log.get("elasticd.agent"), level)(event, sentence=f"debug: {sentence}", text=sentence, **fields)
