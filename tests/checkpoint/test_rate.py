"""Bytes per second, as people write them."""

from __future__ import annotations

import pytest

from elasticd.checkpoint.store.rate_limit import parse_rate


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
def test_words_for_it_are_understood(text, bytes_s):
    assert parse_rate(text) == bytes_s


@pytest.mark.parametrize("text", ["", "0", "0.1", "-5M", "fast", "10 apples", "1e9", "nan", "M"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="is no number of bytes a second, such as 200M"):
        parse_rate(text)
