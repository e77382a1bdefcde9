"""Messages as bytes, and back. As bytes a message is a JSON object: the name of its class and all its fields.
Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

_M = TypeVar("_M")
_INT_MAX = 1 << 63  # the range of C's 64-bit integers, for example sizes and offsets
_QUOTED_MAX = 80


class ChannelClosed(ConnectionError):
    """The channel has failed: the other process has closed it, does not read, or sent no valid message."""


class BadMessage(ChannelClosed):
    """The other process has sent a packet that is no message of this channel. The text is one sentence."""


class Codec(Generic[_M]):
    """One direction of a channel. ``kinds``: the classes of the messages, as a union. ``bytes_max``: the size
    of an encoded message.

    A field is a bool, int, float, str, Enum or message; a tuple or frozenset of such values; a dict or
    Mapping from str to such values; or a union.
    """

    def __init__(self, kinds: Any, *, bytes_max: int = 1 << 20) -> None:
        self.bytes_max = bytes_max
        classes = get_args(kinds) or (kinds,)
        self._readers = {kind.__name__: _reader(kind) for kind in classes}

    def encode(self, message: _M) -> bytes:
        return _ENCODER.encode({"is": type(message).__name__, **_record(message)}).encode()

    def decode(self, raw: bytes) -> _M:
        """Return the message. Raises BadMessage unless its fields are exactly those of its class."""
        try:
            if len(raw) > self.bytes_max:
                raise ValueError(f"it has {len(raw)} bytes, and {self.bytes_max} are allowed")
            match json.loads(raw):
                case {"is": str(name), **given} if name in self._readers:
                    message: _M = self._readers[name](given)
                    return message
            raise ValueError(f"its kind is none of {', '.join(self._readers)}")
        except (ValueError, RecursionError) as error:
            raise BadMessage(
                f"not a message of this channel: {_quoted(raw[:_QUOTED_MAX])}: {error}"
            ) from error


def _record(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in fields(message)}


def _plain(value: Any) -> Any:
    """Return a value that JSON can express, in place of an Enum, a message or a collection."""
    if is_dataclass(value):
        return _record(value)
    return dict(value) if isinstance(value, Mapping) else sorted(value)


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that returns a JSON value as ``kind``, or raises ValueError."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _any_of(list(map(_reader, inner)))
    if origin is tuple and inner[-1] is not Ellipsis:
        return _tuple_of(list(map(_reader, inner)))
    if origin in (tuple, frozenset, Sequence):
        return _many(_reader(inner[0]), frozenset if origin is frozenset else tuple)
    if origin in (dict, Mapping):
        assert inner[0] is str, kind
        return _strings if inner[1] is str else _mapping_to(_reader(inner[1]))
    if is_dataclass(kind):
        return _record_of(kind)
    if kind is float:
        return _number
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    assert kind in (bool, int, str, NoneType), f"a message cannot have a field of type {kind}"
    return _just(kind)


def _just(kind: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind or (kind is int and not -_INT_MAX <= value < _INT_MAX):
            raise ValueError(f"{_quoted(value)} is no {kind.__name__}")
        return value

    return read


def _number(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"{_quoted(value)} is no number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("a number is too large") from error


def _any_of(readers: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        whys = []
        for reader in readers:
            try:
                return reader(value)
            except ValueError as error:
                whys.append(str(error))
        raise ValueError(", and ".join(whys))

    return read


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{_quoted(value)} is no list")
    return value


def _many(each: Callable[[Any], Any], kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: kind(map(each, _list(value)))


def _tuple_of(readers: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if len(_list(value)) != len(readers):
            raise ValueError(f"{_quoted(value)} has not {len(readers)} elements")
        return tuple(reader(each) for reader, each in zip(readers, value, strict=True))

    return read


def _mapping_to(each: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: {key: each(item) for key, item in _object(value).items()}


def _strings(value: Any) -> dict[str, str]:
    """As ``_mapping_to``, but fast: each start of a worker brings an environment."""
    if not set(map(type, _object(value).values())) <= {str}:
        raise ValueError("a value is no str")
    return cast("dict[str, str]", value)


def _object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{_quoted(value)} is no object")
    return value


def _record_of(kind: Any) -> Callable[[Any], Any]:
    types = get_type_hints(kind)
    readers = {field.name: _reader(types[field.name]) for field in fields(kind)}

    def read(value: Any) -> Any:
        if _object(value).keys() != readers.keys():
            wrong = ", ".join(map(_quoted, sorted(value.keys() ^ readers.keys())))
            raise ValueError(
                f"a {kind.__name__} has the fields {', '.join(readers)}; wrong or missing: {wrong}"
            )
        made = {}
        for name, reader in readers.items():
            try:
                made[name] = reader(value[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return kind(**made)

    return read


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _QUOTED_MAX else f"{text[:_QUOTED_MAX]}..."
