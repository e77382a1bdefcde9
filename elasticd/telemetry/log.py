"""The log: structlog events on stderr, in a readable form on a terminal, as JSON for machines.

Call ``setup`` once, ``bind`` for the fields of every event (job, node, round), and ``get`` for a logger. An
event has a dotted name that says what changed: ``log.info("round.formed", round=7, workers=12)``. An event
with a ``sentence`` shows it on a terminal, in place of its name and its fields; an empty one shows nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar, Literal, TextIO

import structlog
from structlog.typing import ExcInfo, FilteringBoundLogger, Processor

from elasticd.core.reasons import Reason
from elasticd.telemetry import describe
from elasticd.telemetry.lines import clean, cleaned

Format = Literal["auto", "console", "json"]


class _Context:
    """The fields of every event, for all threads: a contextvar would have its default value in each thread of
    the edges. The dict is replaced and never changed, so readers need no lock."""

    fields: ClassVar[dict[str, object]] = {}


def bind(**fields: object) -> None:
    """Add fields to every event from now on, in all threads."""
    _Context.fields = {**_Context.fields, **fields}


def get(name: str = "elasticd") -> FilteringBoundLogger:
    """Return a logger. ``name``: the part of elasticd that logs."""
    logger: FilteringBoundLogger = structlog.get_logger(name)
    return logger


def reason(logger: FilteringBoundLogger, why: Reason, now: float) -> None:
    """Log a decision of the core. ``now``: seconds since the epoch."""
    event = describe.event(why)
    level = logging.getLevelNamesMapping()[event.level.upper()]
    logger.log(level, event.name, sentence=describe.terminal_line(why, now), **event.fields)


def of_workers(logger: FilteringBoundLogger) -> Callable[..., None]:
    """Return a function that logs an event of the node's workers: its name, and its fields as keywords."""

    def say(event: str, **fields: object) -> None:
        logger.info(event, sentence=describe.worker_line(event, fields), **fields)

    return say


def takes_colors(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment allows colours and cursor codes on a terminal."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") not in ("", "dumb")


def setup(
    format: Format = "auto",
    *,
    level: str = "info",
    colors: bool | None = None,
    line: Callable[[str], None] | None = None,
) -> None:
    """Make structlog and the standard library's logging write one line per event.

    ``format``: "auto" is "console" when stderr is a terminal, else "json". ``line`` takes each finished line,
    for example for the live view; by default the line goes to stderr. Raises ValueError for an unknown level.
    """
    terminal = sys.stderr.isatty()
    as_json = format == "json" or (format == "auto" and not terminal)
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is none of debug, info, warning, error and critical")

    shared: list[Processor] = [
        _add_bound,
        structlog.stdlib.add_log_level,
        structlog.processors.StackInfoRenderer(),
    ]
    if as_json:
        shared += [
            _without_sentence,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
        ]
        renderer: Processor = structlog.processors.JSONRenderer(default=str)
    else:
        shared += [
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            _sentence_alone,
            _quiet_for_people,
            _clean_for_terminals,
        ]
        renderer = structlog.dev.ConsoleRenderer(
            colors=terminal and takes_colors() if colors is None else colors,
            pad_event_to=22,
            exception_formatter=_clean_traceback,
        )

    write = line or _to_stderr
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _Lines(write),
        cache_logger_on_first_use=False,
    )
    handler = _LineHandler(write)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _name_of_library],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries log routine work at INFO; users asked for elasticd's log.
    root.setLevel(max(number, logging.WARNING))


class _Lines:
    """A structlog logger that takes finished lines."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def msg(self, message: str) -> None:
        self._write(message)

    debug = info = warning = error = critical = exception = log = msg


class _LineHandler(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:  # noqa: BLE001 - a logging handler never raises into its caller
            self.handleError(record)


def _to_stderr(text: str) -> None:
    # Read sys.stderr at each call: it may have been replaced.
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _add_bound(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in _Context.fields.items():
        event.setdefault(key, value)
    return event


def _without_sentence(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event.pop("sentence", None)
    return event


def _sentence_alone(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    sentence = event.get("sentence")
    if sentence is None:
        return event
    if not sentence:
        raise structlog.DropEvent
    return {"event": sentence, **{key: event[key] for key in ("level", "timestamp") if key in event}}


def _quiet_for_people(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop the job and the node: a terminal shows one job and one node, which the first line names."""
    if event.get("event") != "agent.started":
        for key in ("job", "node"):
            if event.get(key) == _Context.fields.get(key, object()):
                del event[key]
    return event


def _clean_for_terminals(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Clean the values, which may come from another machine."""
    for key, value in event.items():
        if not key.startswith("_"):
            event[key] = cleaned(value) if isinstance(value, str | tuple | list | dict) else value
    return event


def _clean_traceback(into: TextIO, error: ExcInfo) -> None:
    into.write("\n" + clean("".join(traceback.format_exception(*error)).rstrip("\n")))


def _name_of_library(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        event["library"] = record.name
    return event
