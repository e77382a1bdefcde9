"""The limit on the rate of writing, and its notation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticd.checkpoint.storage.rate_limit import RateLimit, parse_rate


def test_several_writers_have_it_together():
    slept: list[float] = []
    pace = RateLimit(100.0, clock=lambda: 7.0, sleep=slept.append)
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(pace.wrote, [50] * 200))
    assert sorted(slept) == pytest.approx([0.5 * n for n in range(1, 201)])


def test_a_hurried_writer_stops_waiting():
    pace = RateLimit(1e-6)
    with ThreadPoolExecutor(1) as writer:
        waits = writer.submit(pace.wrote, 1)
        pace.hurry(True)
        waits.result(60.0)
    pace.wrote(1)


def test_what_was_written_in_a_hurry_is_not_made_up_for():
    slept: list[float] = []
    pace = RateLimit(100.0, clock=lambda: 7.0, sleep=slept.append)
    pace.hurry(True)
    pace.wrote(1_000_000)
    pace.hurry(False)
    pace.wrote(50)
    pace.wrote(50)
    assert slept == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [
        ("200M", 200e6),
        ("1.5G", 1.5e9),
        ("512Mi", 512 << 20),
        ("64kB", 64e3),
        ("1000", 1000),
        ("2TiB", 2 << 40),
    ],
)
def test_a_rate_is_read_in_bytes_per_second(text, bytes_s):
    assert parse_rate(text) == bytes_s


@pytest.mark.parametrize("text", ["", "0", "0.1", "-5M", "fast", "10 apples", "1e9", "nan", "M", "9" * 400])
def test_an_invalid_rate_is_refused(text):
    with pytest.raises(ValueError, match="is no number of bytes a second, such as 200M"):
        parse_rate(text)
