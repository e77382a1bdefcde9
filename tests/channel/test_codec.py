"""A message arrives as it was sent, and nothing else counts as a message."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.channel import warden_messages, worker_messages
from elasticd.channel.codec import BadMessage, Codec
from elasticd.channel.warden_messages import (
    AGENT_TO_WARDEN,
    CHILD_TO_ZYGOTE,
    EMBRYO_TO_ZYGOTE,
    WARDEN_TO_AGENT,
    WARDEN_TO_ZYGOTE,
    ZYGOTE_TO_WARDEN,
    Gone,
    MoveFence,
    Program,
    Spawn,
    Spawned,
)
from elasticd.checkpoint import protocol
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.facts import Saved

DIRECTIONS: list[tuple[Codec[Any], Any]] = [
    (AGENT_TO_WARDEN, warden_messages.AgentToWarden),
    (WARDEN_TO_AGENT, warden_messages.WardenToAgent),
    (WARDEN_TO_ZYGOTE, warden_messages.WardenToZygote),
    (ZYGOTE_TO_WARDEN, warden_messages.ZygoteToWarden),
    (CHILD_TO_ZYGOTE, warden_messages.ChildToZygote),
    (EMBRYO_TO_ZYGOTE, warden_messages.Accepted),
    (worker_messages.WORKER_TO_AGENT, worker_messages.WorkerToAgent),
    (worker_messages.AGENT_TO_WORKER, worker_messages.AgentToWorker),
    (protocol.WORKER_TO_SAVER, protocol.WorkerToSaver),
    (protocol.SAVER_TO_WORKER, protocol.SaverToWorker),
]
# surrogateescape makes this of bytes that are not UTF-8.
ODD_BYTES = st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(codec="utf-8") | ODD_BYTES, max_size=9),
    bool: st.booleans(),
    NoneType: st.none(),
    Saved: st.just(Saved(folder_name(5, 1, "0000000a", 1), 5, 1, 2, 1.5, 100, "digest")),
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
directions = st.sampled_from(DIRECTIONS)


@cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a message or of a field."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return st.builds(kind, **{field.name: values(types[field.name]) for field in fields(kind)})
    if origin is UnionType:
        return st.one_of(list(map(values, inner)))
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*map(values, inner))
    if origin in (tuple, frozenset):
        return st.lists(values(inner[0]), max_size=3).map(origin)
    if origin is not None:
        return st.dictionaries(PLAIN[str], values(inner[1]), max_size=3)
    return st.sampled_from(kind)


@st.composite
def sent(draw: st.DrawFn) -> tuple[Codec[Any], Any]:
    codec, union = draw(directions)
    return codec, draw(values(draw(st.sampled_from(get_args(union) or (union,)))))


def decoded(codec: Codec[Any], raw: bytes) -> Any:
    """Return the message; None if the codec refuses the bytes with one sentence. Raise any other error."""
    try:
        return codec.decode(raw)
    except BadMessage as error:
        said = str(error)
    assert "\n" not in said and len(said) < 2000
    return None


@given(sent())
def test_a_message_arrives_as_it_was_sent(case: tuple[Codec[Any], Any]) -> None:
    codec, message = case
    assert codec.decode(codec.encode(message)) == message


@given(directions, st.binary(max_size=200))
def test_bytes_at_random_are_no_message(direction: tuple[Codec[Any], Any], raw: bytes) -> None:
    assert decoded(direction[0], raw) is None


@given(sent(), st.data())
def test_a_message_that_is_cut_is_none(case: tuple[Codec[Any], Any], data: st.DataObject) -> None:
    codec, message = case
    raw = codec.encode(message)
    assert decoded(codec, raw[: data.draw(st.integers(0, len(raw) - 1))]) is None


@given(sent(), st.data())
def test_a_message_with_other_values_is_refused_or_is_of_the_declared_types(
    case: tuple[Codec[Any], Any], data: st.DataObject
) -> None:
    """A wrong value is decoded as the message that would be sent as this value."""
    codec, message = case
    fields = json.loads(codec.encode(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(json_values)
    heard = decoded(codec, json.dumps(fields).encode())
    if heard is not None:
        assert decoded(codec, codec.encode(heard)) == heard


@given(sent(), st.text(max_size=5).filter(lambda name: name != "is"), json_values, st.booleans())
def test_a_message_has_each_of_its_fields_and_no_other(
    case: tuple[Codec[Any], Any], name: str, value: Any, more: bool
) -> None:
    codec, message = case
    fields = json.loads(codec.encode(message))
    if more and name not in fields:
        fields[name] = value
    elif len(fields) > 1:
        del fields[min(fields.keys() - {"is"})]
    else:
        return
    assert decoded(codec, json.dumps(fields).encode()) is None


NEWS = b'{"is": "ZygoteNews", "id": 1, "untried": 0, "unfit": "", "ready": %b}'


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "codec can't decode|Expecting value"),
        (b"null", "its kind is none of"),
        (b"[" * 100_000, "recursion|allowed"),
        (b'{"id": 1, "pid": 2}', "its kind is none of"),
        (b'{"is": "Leave", "id": 1}', "its kind is none of Spawned, Ended, Gone"),
        (b'{"is": ["Spawned"], "id": 1, "pid": 2}', "its kind is none of"),
        (b'{"is": "Spawned", "id": 1}', "wrong or missing: 'pid'"),
        (b'{"is": "Spawned", "id": 1, "pid": 2, "mood": "good"}', "wrong or missing: 'mood'"),
        (b'{"is": "Spawned", "id": 1, "pid": "2"}', "pid: '2' is no int"),
        (b'{"is": "Spawned", "id": 1, "pid": true}', "pid: True is no int"),
        (b'{"is": "Spawned", "id": 1, "pid": 2.0}', "pid: 2.0 is no int"),
        (b'{"is": "Spawned", "id": 1, "pid": 9223372036854775808}', "9223372036854775808 is no int"),
        (NEWS % b"1, \"left_out\": {}", "1 is no bool"),
        (NEWS % b"true, \"left_out\": []", "no object"),
        (NEWS % b"true, \"left_out\": {\"a\": 1}", "no str"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_wrong(raw: bytes, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        WARDEN_TO_AGENT.decode(raw)


def test_a_message_beyond_the_limit_is_refused_before_it_is_read() -> None:
    small: Codec[Spawned] = Codec(Spawned, bytes_max=40)
    assert small.decode(small.encode(Spawned(1, 2))) == Spawned(1, 2)
    with pytest.raises(BadMessage, match="40 are allowed"):
        small.decode(small.encode(Spawned(1, 2)) + b" " * 40)


def test_a_number_without_a_point_is_a_float_where_one_is_expected() -> None:
    heard = AGENT_TO_WARDEN.decode(b'{"is": "MoveFence", "until": 3}')
    assert heard == MoveFence(3.0) and isinstance(heard, MoveFence) and type(heard.until) is float


def test_strings_keep_bytes_that_are_no_utf_8() -> None:
    odd = b"/tmp/\xff".decode("utf-8", "surrogateescape")
    message = Spawn(1, Program((odd,), {odd: odd}, odd))
    assert AGENT_TO_WARDEN.decode(AGENT_TO_WARDEN.encode(message)) == message


def test_a_message_is_sent_as_a_json_object_with_the_name_of_its_class() -> None:
    said = json.loads(WARDEN_TO_AGENT.encode(Gone(1)))
    assert said == {"is": "Gone", "id": 1}
