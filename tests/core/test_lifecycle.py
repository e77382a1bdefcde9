"""The table of a worker's life, and the diagram that ARCHITECTURE.md draws from it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from elasticd.core.lifecycle import TRANSITIONS, ImpossibleChange, Life, become

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
CHANGES = {(before, after) for before, row in TRANSITIONS.items() for after in row}


def diagram() -> str:
    """The table in Mermaid's notation. The ways to end are one arrow."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for before, row in TRANSITIONS.items():
        lines += [f"    {before or '[*]'} --> {a}: {what}" for a, what in row.items() if not a.ended]
        if ends := [what for after, what in row.items() if after.ended]:
            lines.append(f"    {before} --> [*]: {', '.join(ends)}")
    return "\n".join([*lines, "```"])


def test_the_architecture_shows_the_table() -> None:
    assert diagram() in ARCHITECTURE.read_text(), f"put this into ARCHITECTURE.md:\n{diagram()}"


@pytest.mark.parametrize(("before", "after"), list(product([None, *Life], Life)))
def test_a_worker_changes_as_the_table_says_and_in_no_other_way(before: Life | None, after: Life) -> None:
    if (before, after) in CHANGES:
        assert become(before, after) is after
    else:
        with pytest.raises(ImpossibleChange, match=f"cannot be {after} next"):
            become(before, after)


def test_each_state_is_reached_and_each_worker_can_end() -> None:
    assert {after for _, after in CHANGES} == set(Life)
    for life in Life:
        assert life.ended or any(after.ended for after in TRANSITIONS[life])
