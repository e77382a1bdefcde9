"""The figures that a benchmark prints go to the table that has the same columns."""

from __future__ import annotations

from pathlib import Path

from tests.bench.tables import cells_of, put
from tests.bench.techniques import COSTS, CPU, README
from tests.workers.programs import FAULTS, PROGRAMS

TEXT = """\
| program | after | quality |
|---|---|---|
| a.py, 2 x 2 | 1 s | good |
| b.py | 2 s | good |

| program | quality |
|---|---|
| a.py | 90 % |
"""


def test_cells_are_replaced_in_the_table_with_the_columns_and_other_rows_stay() -> None:
    printed = [
        "| program | pace | until |",
        "|---|---|---|",
        "| a.py | 10 | 0.5 s |",
        "| c.py | 10 | 0.5 s |",
    ]
    assert put(TEXT, printed, {"after": "until"}) == TEXT.replace("1 s", "0.5 s")


def test_times_after_a_quality_are_left_out() -> None:
    printed = ["| program | quality |", "|---|---|", "| a.py | 95 %, 0.5 s, 1.04 s |"]
    assert put(TEXT, printed, {"quality": "quality"}).endswith("| a.py | 95 % |\n")


def test_the_tables_of_workers_have_the_columns_of_the_benchmark_and_each_program() -> None:
    text = Path(README).read_text()
    names = {f"{program.name}.py" for program in PROGRAMS}
    for columns, rows in (
        (COSTS, names),
        ({fault: fault for fault in FAULTS}, names),
        (CPU, {"ddp.py", "pipeline.py"}),
    ):
        titles = ["program", *columns.values()]
        printed = [
            f"| {' | '.join(titles)} |",
            "",
            *(f"| {n} |" + " new |" * len(columns) for n in sorted(rows)),
        ]
        changed = put(text, printed, columns)
        new = {
            cells_of(line)[0].split(",")[0].split()[0] for line in changed.splitlines() if "| new |" in line
        }
        assert new == rows
