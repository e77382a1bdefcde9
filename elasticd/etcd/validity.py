"""Validates the values of records from etcd. Pure.

Decoding has checked the types. This module rejects invalid names, impossible numbers, and contradictory
members of a round. A writer to etcd is trusted with the job, and can stop it. But no record may crash an
agent or a command, or make it use files that are not the job's. Texts for people are not checked here: they
are cleaned where they are shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any, Final, get_type_hints

from elasticd.core.facts import (
    Extent,
    Fact,
    ForgottenNodes,
    Leadership,
    Limits,
    Member,
    Node,
    NodeTelemetry,
    RankRange,
    Round,
    Saved,
    SaverAddress,
)
from elasticd.etcd.names import NAME_MAX, check_name

COUNT_MAX: Final = 2**31 - 1  # workers, slots, processes: the kernel's and torch's limit
_INT_MAX: Final = 2**63 - 1
_SECONDS: Final = (-1e9, 2e11)  # the range that can be converted to a date
_ADDRESS: Final = re.compile(r"[0-9A-Za-z_.:%-]{1,255}", re.ASCII)


def problem(key: str, fact: Fact) -> str:
    """Return what is wrong with the fact under this key, in a few words; empty if it is valid."""
    _, slash, node = key.partition("/")
    try:
        if slash:
            check_name(node, "node")
            said = fact.name if isinstance(fact, Node) else getattr(fact, "node", node)
            if said != node:
                raise ValueError(f"it names the node {said!r}")
        check(fact)
    except ValueError as error:
        return str(error)
    return ""


def check(value: Any) -> None:
    """Check a record, or a part of one. Raises ValueError with a few words."""
    _CHECKS[type(value)](value)


def _between(low: float, high: float) -> Callable[[Any], None]:
    def rule(value: Any) -> None:
        if value is not None and not low <= value <= high:  # this comparison also rejects NaN
            raise ValueError(f"{value} is not between {low:g} and {high:g}")

    return rule


def _name(value: Any) -> None:
    check_name(value, "node")


def _names(value: Any) -> None:
    for name in value:
        _name(name)


def _by_name(value: Any) -> None:
    _names(value)
    check(value)


def _word(value: Any) -> None:
    if not value.isprintable() or len(value) > NAME_MAX:
        raise ValueError(f"{value[:NAME_MAX]!r} is not a word")


def _address(value: Any) -> None:
    if not _ADDRESS.fullmatch(value):
        raise ValueError(f"{value[:300]!r} is not an address")


def _address_if_any(value: Any) -> None:
    if value:
        _address(value)


def _store(value: Any) -> None:
    host, _, port = value.rpartition(":")
    whole = _ADDRESS.fullmatch(host.removeprefix("[").removesuffix("]")) and re.fullmatch("[0-9]{1,5}", port)
    if value and not (whole and int(port) <= 65535):
        raise ValueError(f"{value[:300]!r} is not HOST:PORT")


def _slots(value: Any) -> None:
    if len(set(value)) < len(value):
        raise ValueError("a slot is named twice")
    for slot in value:
        _COUNT(slot)


_COUNT: Final = _between(0, COUNT_MAX)
_PORT: Final = _between(0, 65535)
_BY_NAME: Final[dict[str, Callable[[Any], None]]] = {
    "node": _name,
    "incarnation": _word,
    "leaving": _names,
    "address": _address,
    "store": _store,
    "slot": _COUNT,
    "rank": _COUNT,
    "base_rank": _COUNT,
    "pid": _COUNT,
    "world": _COUNT,
    "most": _COUNT,
    "port": _PORT,
    "store_port": _PORT,
    "code": _between(-256, 2**32),  # minus a signal
}
_BY_FIELD: Final[dict[tuple[type, str], Callable[[Any], None]]] = {
    (Node, "name"): _name,
    (Node, "slots"): _slots,
    (Member, "slots"): _slots,
    (Member, "place"): _COUNT,
    **{(Extent, name): _COUNT for name in ("workers", "nodes", "leaving", "parts")},
    (Extent, "digest"): _word,
    (RankRange, "first"): _COUNT,
    (RankRange, "end"): _COUNT,
    (Node, "ready"): _slots,
    (Node, "holders"): _slots,
    (Leadership, "host"): _address_if_any,
    (SaverAddress, "host"): _address,
    (SaverAddress, "port"): _between(1, 65535),
    (Limits, "max"): _COUNT,
    (Saved, "name"): _word,
    (ForgottenNodes, "spent"): _by_name,
}


class _Checks(dict[type, Callable[[Any], None]]):
    """The check of each type, made when the type is first seen: the leader checks millions of values."""

    def __missing__(self, kind: type) -> Callable[[Any], None]:
        self[kind] = made = _check_of(kind)
        return made


_CHECKS: Final = _Checks()


def _check_of(kind: type) -> Callable[[Any], None]:
    if is_dataclass(kind):
        return partial(_fields, _rules(kind), _WHOLE.get(kind, _anything))
    if issubclass(kind, tuple):
        return _items
    if issubclass(kind, Mapping):
        return _values
    if issubclass(kind, bool | str | Enum | NoneType):
        return _anything
    return _between(0, _INT_MAX) if issubclass(kind, int) else _between(*_SECONDS)


def _rules(kind: Any) -> tuple[tuple[str, Callable[[Any], None]], ...]:
    hints = get_type_hints(kind)
    rules = (
        (
            field.name,
            _BY_FIELD.get((kind, field.name)) or _BY_NAME.get(field.name) or _rule_of(hints[field.name]),
        )
        for field in fields(kind)
    )
    return tuple((name, rule) for name, rule in rules if rule is not _anything)


def _rule_of(hint: Any) -> Callable[[Any], None]:
    """Return the rule for a field of this type, which decoding has checked."""
    return _CHECKS[hint] if hint in (bool, str, int, float) else check


def _anything(value: Any) -> None:
    """Take any value."""


def _fields(
    rules: tuple[tuple[str, Callable[[Any], None]], ...], whole: Callable[[Any], None], value: Any
) -> None:
    for name, rule in rules:
        try:
            rule(getattr(value, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    whole(value)


def _items(value: tuple[Any, ...]) -> None:
    for item in value:
        _CHECKS[type(item)](item)


def _values(value: Mapping[Any, Any]) -> None:
    for item in value.values():
        _CHECKS[type(item)](item)


def _same_node(told: NodeTelemetry) -> None:
    for part in (told.progress, told.paces, told.ledger):
        if part is not None and part.node != told.node:
            raise ValueError(f"{told.node} tells of the node {part.node!r}")


def _members(round: Round) -> None:
    """Check that each member occurs once, and that ranks are consecutive. A round with an extent has its
    members elsewhere."""
    if round.extent is not None:
        if round.members:
            raise ValueError("members: they are here and in parts")
        return
    if len({member.node for member in round.members}) < len(round.members):
        raise ValueError("members: a node occurs twice")
    rank = 0
    for member in round.members:
        _slots(member.slots)
        if member.base_rank != rank:
            raise ValueError(f"members: {member.node} begins at rank {member.base_rank} in place of {rank}")
        rank += len(member.slots)
    _COUNT(rank)


_WHOLE: Final[dict[Any, Callable[[Any], None]]] = {Round: _members, NodeTelemetry: _same_node}
