"""The agent's record of one worker process, from start to exit, over all its rounds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticd.channel.warden_messages import Ended
from elasticd.channel.worker_messages import AgentToWorker
from elasticd.core.facts import LAST_OUTPUT, Exit, SlotProgress, without_surrogates
from elasticd.core.lifecycle import Life, become
from elasticd.core.page_layout import PageContents
from elasticd.core.ports import Assignment
from elasticd.procs.errorfile import read_announced, read_error_file, read_tail, tail_of
from elasticd.procs.link_protocol import LinkProtocol
from elasticd.procs.logdest import STDERR, STDOUT, LogDest, trouble_with
from elasticd.procs.output import Feed
from elasticd.procs.page import Page
from elasticd.procs.worker_links import WorkerLink

# Of a crash, and of a process that does not exit: see boot/elasticd_ending.py.
_SIGNALS_AT_EXIT = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGALRM)


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process and its place in the round. ``life``: its state. ``round``: its present or last
    round; 0 before the first.

    ``dest``, ``log_rank``: where the output goes, and the local rank at the start, which names the files.
    ``steps_before``, ``commits_before``: the counts when the worker entered the round. ``hung``: why it was
    killed for a hang. ``error``: its own exception, which ends it, as the worker announced. ``held``: it has
    reported a checkpoint, and waits for permission to go on.
    """

    assignment: Assignment
    round: int
    life: Life
    exited: Callable[[int, Exit], None]
    dest: LogDest
    log_rank: int
    page: Page | None = None
    steps_before: int = 0
    commits_before: int = 0
    feeds: tuple[Feed, ...] = ()
    id: int = 0
    pid: int = 0
    link: WorkerLink | None = None
    protocol: LinkProtocol = field(default_factory=LinkProtocol)
    hung: str = ""
    error: str = ""
    held: bool = False

    def started(self, pid: int) -> None:
        self.pid = pid
        if self.link is not None:
            self.link.started(pid)

    def tell(self, message: AgentToWorker) -> bool:
        """Send a message. Return whether it was sent."""
        return self.link is not None and self.link.tell(message)

    @property
    def error_file(self) -> str:
        """The path of torch's error file; empty if there is none."""
        return self.dest.error_files.get(self.log_rank, "")

    @property
    def alive(self) -> bool:
        return not self.life.ended

    def become(self, life: Life) -> None:
        if life is not self.life:
            self.life = become(self.life, life)

    @property
    def steps(self) -> int:
        """The steps made in the round; if the script uses ``elasticd.worker``, the committed steps."""
        page = self.page_contents()
        if self.protocol.linked:
            return max(0, page.commits - self.commits_before)
        return max(0, page.steps - self.steps_before)

    def progress(self) -> SlotProgress:
        page = self.page_contents()
        steps = max(0, page.steps - self.steps_before)
        pid = self.pid if self.alive else page.pid
        at = time.time() - (time.monotonic() - page.stepped_at) if steps else 0.0
        began_after = page.base if page.base is not None else page.made
        base = began_after + self.steps_before if began_after is not None else None
        a = self.assignment
        memory = page.shard_bytes, page.copies_bytes
        return SlotProgress(a.slot, a.rank, pid, steps, at, base, page.held_s, page.committed, *memory)

    def page_contents(self) -> PageContents:
        """Return the contents of the worker's page."""
        return self.page.contents() if self.page is not None else PageContents()

    def finished(self, end: Ended) -> bool:
        """Return whether the script had ended well, even if Python crashed or hung afterwards: finalisation
        may do both, mostly because of threads of torch. No work is lost then."""
        page = self.page_contents()
        return (
            -end.code in (0, *_SIGNALS_AT_EXIT) and page.pid == end.pid and page.ended_well and not end.fenced
        )

    def ended(self, end: Ended) -> Exit:
        """Note the end of the process. Return how the worker ended, and why as far as known."""
        if self.finished(end):
            end = replace(end, code=0)
        if end.fenced:
            self.become(Life.FENCED)
        elif self.life in (Life.LEAVING, Life.STOPPING):
            self.become(Life.STOPPED)
        else:
            self.become(Life.FAILED if end.code else Life.FINISHED)
        a = self.assignment
        message, traceback = end.error, ""
        hung = bool(self.hung) and end.code != 0
        if hung:
            message = self.hung
        elif end.fenced:
            message = end.error or "killed by the warden: the agent did not renew the worker's time limit"
        elif not message and end.code != 0:
            # A worker that ends too slowly is killed before it writes its error anywhere.
            found = read_error_file(self.error_file) or (read_announced(self.error) if end.code < 0 else None)
            message, traceback = found or read_tail(self._stderr_tail(), end.code)
        place = self._log_place()
        # After a fatal error the worker may be killed before it exits, so any code but 0 is accepted.
        told = self.page_contents() if end.code else PageContents()
        if told.fatal:
            message = message.removeprefix(LAST_OUTPUT)  # the last line names the fatal error
        own_doing = end.code <= 0 or hung or end.fenced or end.error or told.fatal or told.astray is not None
        trouble = "" if own_doing else self._log_trouble()
        if trouble:
            message = f"the node is at fault, not the worker: {trouble}"
        return Exit(
            a.slot,
            a.rank,
            end.code,
            end.at,
            # The agent compares its report with what etcd has, which is UTF-8.
            without_surrogates(message),
            traceback,
            without_surrogates(place),
            fenced=end.fenced,
            hung=hung,
            fatal=told.fatal,
            astray=told.astray,
            node_fault=bool(trouble),
        )

    def _log_trouble(self) -> str:
        """Return why the worker cannot print to its own log file, which raises an exception in Python; empty
        if it can."""
        rank = self.log_rank
        own = [
            self.dest.file_of(stream, rank)
            for stream in (STDERR, STDOUT)
            if not self.dest.tee_of(stream, rank)
        ]
        return next((why for path in own if path and (why := trouble_with(path))), "")

    def _stderr_tail(self) -> bytes:
        for feed in self.feeds:
            if feed.stream == STDERR:
                return feed.tail
        return tail_of(self.dest.file_of(STDERR, self.log_rank))

    def _log_place(self) -> str:
        """Return the file with the worker's stderr, or the folder that has the files of stdout and stderr."""
        paths = [
            Path(path)
            for stream in (STDERR, STDOUT)
            if (
                path := self.dest.file_of(stream, self.log_rank)
                or self.dest.capture_of(stream, self.log_rank)
            )
            and path != os.devnull
        ]
        if len(paths) == 2 and paths[0].parent == paths[1].parent:
            return str(paths[0].parent)
        return str(paths[0]) if paths else ""
