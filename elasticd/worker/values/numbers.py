"""Numbers that a script gives."""

from __future__ import annotations

import operator


def whole_number(value: object, name: str) -> int:
    """Return the value as an int: it may be one of numpy's or torch's. ``name``: of the argument. Raises
    TypeError for anything else, such as 3.0 or "3"."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}: give a whole number") from None
