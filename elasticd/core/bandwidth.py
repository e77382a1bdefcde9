"""Parse a bandwidth in bytes per second."""

from __future__ import annotations

import re

_TIMES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_TIMES |= {f"{letter}I": 1 << 10 * n for n, letter in enumerate("KMGT", 1)}


def parse(text: str) -> int:
    """Return the number of bytes in ``200M``, ``1.5G``, ``512Mi`` or a plain number. Raises ValueError with a
    clause for people."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]I?)?B?", text.strip().upper())
    size = float(match[1]) * _TIMES[match[2] or ""] if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is no number of bytes a second, such as 200M")
    return int(size)
