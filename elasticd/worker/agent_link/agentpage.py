"""The page of memory in which this worker reports its training to its agent.

A report is a few writes to memory, which never block. Outside an agent's worker (torchrun, plain ``python``)
no process reads the page.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from traceback import format_exception
from types import TracebackType
from typing import Any, Final, ParamSpec

from elasticd.core import page_layout as layout
from elasticd.core.page_layout import Fatal

P = ParamSpec("P")

_PAGE = "ELASTICD_PAGE"
_MARK: Final = "_elasticd_ends_the_job"


class AgentPage:
    """This process's page. Outside an agent's worker it is memory that no process reads."""

    def __init__(self, path: str | None) -> None:
        self._memory: Any = self._open(path) if path else None
        if self._memory is None:
            self._memory = bytearray(layout.WORDS * 8)
        whole = memoryview(self._memory)[: layout.WORDS * 8]
        self.words = whole.cast("Q")
        self.doubles = whole.cast("d")
        self.bytes = whole
        self.names: dict[str, int] = {}
        self.has_checkpoints = False  # the script loads checkpoints when it is restarted

    @staticmethod
    def _open(path: str) -> mmap.mmap | None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            memory = mmap.mmap(fd, 4096, **({"trackfd": False} if sys.version_info >= (3, 13) else {}))
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
        with memoryview(memory)[: layout.WORDS * 8] as whole, whole.cast("Q") as words:
            mine = words[layout.PID] == os.getpid()
        return memory if mine else None  # a child process inherits the variable, but not the page

    def add(self, word: int, amount: int) -> None:
        self.words[word] += amount

    def value(self, name: str, value: float) -> None:
        at = self.names.get(name)
        if at is None:
            text = name.encode()
            room = layout.NAME_WORDS * 8
            if len(self.names) >= layout.VALUES_MAX:
                raise ValueError(
                    f"{name!r} is one name too many: a script may report {layout.VALUES_MAX} values of its "
                    "own"
                )
            if not name.isidentifier() or len(text) > room:
                raise ValueError(
                    f"{name!r} cannot be reported: a name is a Python name of at most {room} bytes"
                )
            at = self.names[name] = layout.VALUES + len(self.names) * layout.VALUE_WORDS
            self.doubles[at + layout.NAME_WORDS] = value
            self.bytes[at * 8 : at * 8 + room] = text.ljust(room, b"\0")
        self.doubles[at + layout.NAME_WORDS] = value


@functools.cache
def _page_of(pid: int) -> AgentPage:
    return AgentPage(os.environ.get(_PAGE))


def own_page() -> AgentPage:
    return _page_of(os.getpid())


def uses(what: layout.Use) -> None:
    """Tell the agent that the script uses this part of the library."""
    own_page().words[layout.USES] |= what


def samples(number: int) -> None:
    """Count samples that were trained on."""
    own_page().add(layout.SAMPLES, number)


def committed(step: int) -> None:
    page = own_page()
    page.words[layout.COMMITTED] = 1 + step
    page.add(layout.COMMITS, 1)


def begins_after(step: int) -> None:
    """Tell the agent that this worker continues after this step of the job."""
    page = own_page()
    page.words[layout.BASE_STEPS] = page.words[layout.STEPS]
    page.words[layout.BASE] = 1 + step


def keeps_shards(shard: int, copies: int) -> None:
    """Tell the agent the bytes of this worker's shard of the state, and of its copies of shards."""
    page = own_page()
    page.words[layout.SHARD_BYTES], page.words[layout.COPIES_BYTES] = shard, copies


@contextlib.contextmanager
def held_up() -> Iterator[None]:
    """Count the time of a ``with`` block, or of a decorated function, as training held up by a
    checkpoint."""
    began = time.monotonic_ns()
    try:
        yield
    finally:
        page = own_page()
        page.add(layout.HELD_NS, time.monotonic_ns() - began)
        page.add(layout.HELD, 1)


def has_checkpoints() -> None:
    """Note that this script loads its checkpoints when it is restarted."""
    own_page().has_checkpoints = True


def reports_loaded_step(load: Callable[P, int | None]) -> Callable[P, int | None]:
    """Decorate a function that loads a checkpoint: report the step that it returns (None: the beginning)."""

    @functools.wraps(load)
    def noted(*args: P.args, **kwargs: P.kwargs) -> int | None:
        step = load(*args, **kwargs)
        has_checkpoints()
        begins_after(step or 0)
        return step

    return noted


# ---------------------------------------------------------------- errors that end the job


def fatal(why: Fatal) -> None:
    """Tell the agent that this process ends now, and that the job is to end with it."""
    own_page().words[layout.FATAL] = layout.FATALS.index(why)


def end_job_if_uncaught(error: BaseException, why: Fatal) -> None:
    """Have the job end if ``error``, which is about to be raised, ends this process. A script may catch the
    error and go on."""
    setattr(error, _MARK, why)
    _watch_the_end()


def end_job(sentence: str, why: Fatal, traceback: str = "") -> None:
    """Tell the agent that this process ends now, with this sentence, and the job with it."""
    fatal(why)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(file, "w") as out:
            json.dump({"message": {"message": sentence, "extraInfo": extra}}, out)


@functools.cache
def _watch_the_end() -> None:
    before = sys.excepthook

    def ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(why := getattr(error, _MARK, None), Fatal):
            end_job(str(error), why, "".join(format_exception(error)))
        before(kind, error, trace)

    sys.excepthook = ended
