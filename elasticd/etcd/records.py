"""Facts as etcd values: JSON with a version, never pickle.

A value is ``{"v":1, ...}``. Unknown fields are ignored, so the version changes only when an older elasticd
would misread the value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from elasticd.core.facts import (
    Budget,
    Checkpoint,
    DebugTails,
    Exit,
    Fact,
    ForgottenNodes,
    Hang,
    Leadership,
    Member,
    MemberPart,
    Node,
    Report,
    RoomProbe,
    Round,
    SaverAddress,
    Spec,
    Stall,
    Stragglers,
    Summary,
    without_surrogates,
)
from elasticd.etcd.errors import BadRecord, NewerRecord
from elasticd.etcd.validity import problem

VERSION: Final = 1  # the newest version that this elasticd reads

_BY_KEY: Final[dict[str, type[Fact]]] = {
    "spec": Spec,
    "leader": Leadership,
    "round": Round,
    "budget": Budget,
    "checkpoint": Checkpoint,
    "hang": Hang,
    "stragglers": Stragglers,
    "summary": Summary,
    "forgotten": ForgottenNodes,
    "room": RoomProbe,
}
_BY_FOLDER: Final[dict[str, type[Fact]]] = {
    "nodes": Node,
    "members": MemberPart,
    "reports": Report,
    "stalls": Stall,
    "savers": SaverAddress,
    "debug": DebugTails,
}


T = TypeVar("T")
_SHARED: Final[Mapping[type, Sequence[str]]] = {
    Node: ("name", "incarnation", "slots", "ready", "holders", "age", "state"),
    Member: ("node", "incarnation", "slots"),
    Report: ("node", "incarnation"),
}


class _Version(msgspec.Struct):
    v: int


# The decoders are made before any thread starts: msgspec crashes if two threads make the first decoder of a
# class at the same time.
_VERSIONS: Final = msgspec.json.Decoder(_Version)
_DECODERS: Final[dict[type[Fact], msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (*_BY_KEY.values(), *_BY_FOLDER.values())
}


def fact_type(key: str) -> type[Fact] | None:
    """Return the type of the fact under a key (below the job's prefix); None for a key that elasticd does not
    know."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    folder, slash, name = key.partition("/")
    return _BY_FOLDER.get(folder) if slash and name and "/" not in name else None


def encode(key: str, fact: Fact) -> bytes:
    """Return the value for ``key``. Raises ValueError if the key does not hold this kind of fact."""
    expected = fact_type(key)
    if type(fact) is not expected:
        raise ValueError(f"key {key!r} does not hold a {type(fact).__name__}")
    value = _told(fact) if isinstance(fact, Report) else fact
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:  # a worker's output or a path may not be UTF-8
        encoded = msgspec.json.encode(_printable(msgspec.to_builtins(value)))
    return b'{"v":%d%s%s' % (VERSION, b"" if encoded == b"{}" else b",", encoded[1:])


def _told(report: Report) -> dict[str, Any]:
    """Return a report without the fields that have their defaults. When a worker of a large job dies, all
    nodes may report the exits of all their workers."""

    def told(part: Report | Exit) -> dict[str, Any]:
        values = ((field, getattr(part, field.name)) for field in fields(part))
        return {field.name: value for field, value in values if value != field.default}

    return told(report) | ({"exits": [told(one) for one in report.exits]} if report.exits else {})


@lru_cache(maxsize=512)  # agents that share a process see the same values; facts are frozen
def decode(key: str, value: bytes) -> Fact | None:
    """Return the fact in a value after validation; None for a key that elasticd does not know.

    Raises NewerRecord or BadRecord, which name the key.
    """
    fact = _decoded(key, value)
    if fact is not None and (wrong := problem(key, fact)):
        raise BadRecord(key, wrong)
    return fact


def _decoded(key: str, value: bytes) -> Fact | None:
    expected = fact_type(key)
    if expected is None:
        return None
    try:
        version = _VERSIONS.decode(value).v
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRecord(key, f"not a record of elasticd ({error})") from error
    if version > VERSION:
        raise NewerRecord(key, version, VERSION)
    try:
        fact: Fact = _DECODERS[expected].decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRecord(key, str(error)) from error
    _share_parts(fact)
    return fact


def _share_parts(fact: Fact) -> None:
    """Have a new fact share its names, slots, age and state with other facts.

    Each node is in several records of a large job, and most nodes have the same slots and workers of the same
    age. What is one object takes memory once, and is equal without a look at it.
    """
    for one in fact.members if isinstance(fact, MemberPart) else (fact,):
        for field in _SHARED.get(type(one), ()):
            value = getattr(one, field)
            object.__setattr__(one, field, sys.intern(value) if isinstance(value, str) else _first(value))


@lru_cache(maxsize=1024)
def _first(value: T) -> T:
    """Return the first value that is equal to this one."""
    return value


def _printable(value: Any) -> Any:
    """Replace the surrogates that stand for bytes that are not UTF-8."""
    match value:
        case str():
            return without_surrogates(value)
        case dict():
            return {key: _printable(item) for key, item in value.items()}
        case list() | tuple():
            return [_printable(item) for item in value]
        case _:
            return value
