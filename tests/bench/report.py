"""Writes measurements for people: medians with their spread, and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median


def cell(values: Sequence[float | None]) -> str:
    """Return the median (least to most) of the seconds. "never" counts the tries that timed out."""
    have = sorted(v for v in values if v is not None)
    lost = len(values) - len(have)
    if not have:
        return f"never ({lost} of {len(values)})"
    text = f"{median(have):.3f} s ({have[0]:.3f} to {have[-1]:.3f}, n={len(have)})"
    return f"{text}, never {lost} times" if lost else text


def table(title: str, rows: Mapping[str, Sequence[float | None]], reference: str) -> str:
    """Return one line for each row, with the ratio of its median to the reference's."""
    base = [v for v in rows[reference] if v is not None]
    lines = [title]
    for name, values in rows.items():
        have = [v for v in values if v is not None]
        ratio = f"{median(have) / median(base):8.2f}x" if have and base else "        -"
        lines.append(f"  {name:<42} {ratio}  {cell(values)}")
    return "\n".join(lines)


def growth(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> str:
    """Return one line for each row: its first value in seconds, and the others as multiples of the first."""
    lines = [title, f"  {'':<42}" + "".join(f"{column:>16}" for column in columns)]
    for name, (first, *others) in rows.items():
        ratios = [f"{value / first:.2f}x" if first and value else "-" for value in others]
        cells = [f"{first:.3f} s" if first else "never", *ratios]
        lines.append(f"  {name:<42}" + "".join(f"{one:>16}" for one in cells))
    return "\n".join(lines)
