"""What worker and agent say to each other survives the way there, and nothing else is taken for it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.core.age import Age
from elasticd.core.link import (
    LINE_BYTES_MAX,
    Done,
    Enter,
    Entered,
    Hello,
    Holds,
    Leave,
    Lines,
    LinkError,
    Waiting,
    decode,
    encode,
)

naturals = st.integers(0, 2**60)
seconds = st.floats(0, 1e6)
messages = st.one_of(
    st.builds(Hello, pid=naturals, v=naturals),
    st.builds(Waiting, round=naturals, step=naturals, state=st.sampled_from(Holds), agreed=naturals),
    st.builds(
        Entered,
        round=naturals,
        step=naturals,
        group_s=seconds,
        state_s=seconds,
        batch=naturals,
        rates=seconds,
    ),
    st.builds(Done, round=naturals),
    st.builds(
        Enter, round=naturals, env=st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4)
    ),
    st.builds(Leave, round=naturals, planned=st.booleans(), going=st.booleans()),
)


@given(st.lists(messages, max_size=5), st.integers(1, 40))
def test_messages_arrive_as_they_were_sent_however_the_stream_is_cut(said, size):
    stream = b"".join(map(encode, said))
    lines = Lines()
    heard = [m for i in range(0, len(stream), size) for m in lines.feed(stream[i : i + size])]
    assert heard == said


def test_only_a_whole_state_is_one_to_bring():
    assert Waiting(4, 7, Holds.WHOLE, 3).age == Age(3, 7)
    assert Waiting(4, 7, Holds.TORN, 3).age is None
    assert Waiting(0, 0, Holds.NONE).age is None


def test_a_field_of_a_later_version_is_passed_over():
    assert decode(b'{"is": "done", "round": 3, "mood": "good"}') == Done(3)


def test_an_agent_that_does_not_say_who_goes_means_that_nobody_need_be_gone():
    assert decode(b'{"is": "leave", "round": 3, "planned": true}') == Leave(3, planned=True, going=False)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"is": "done"}',
        b'{"is": "done", "round": "3"}',
        b'{"is": "undone", "round": 3}',
        b'{"is": "waiting", "round": 1, "step": 2, "state": "fine", "agreed": 0}',
        b'{"is": "enter", "round": 1, "env": {"RANK": 0}}',
        b'{"is": "leave", "round": 1, "planned": 1}',
    ],
)
def test_anything_else_is_refused_and_shown(line):
    with pytest.raises(LinkError, match="not a message of the link"):
        decode(line)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory():
    lines = Lines()
    with pytest.raises(LinkError, match="longer than"):
        list(lines.feed(b"x" * (LINE_BYTES_MAX + 1)))


def test_what_is_sent_is_one_line_of_json():
    sent = encode(Enter(7, {"RANK": "0\n1"}))
    assert sent.endswith(b"\n") and sent.count(b"\n") == 1
    assert json.loads(sent) == {"is": "enter", "round": 7, "env": {"RANK": "0\n1"}}
