"""Puts the rows that a benchmark printed into the tables of a Markdown file."""

from __future__ import annotations

import re
from collections.abc import Sequence

SECONDS = re.compile(r"(, [\d.]+ s)+$")  # the times behind the quality in a cell


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def put(text: str, printed: Sequence[str], columns: dict[str, str]) -> str:
    """Return the text, with cells of the printed table in those of its tables that have such columns.

    ``columns``: for titles in the text, the titles in the printed table. Rows belong together if their first
    cells begin with the same word, such as the name of a program.
    """
    titles, rows = cells_of(printed[0]), [cells_of(row) for row in printed[2:] if row.startswith("|")]
    found = {_word(row[0]): dict(zip(titles, row, strict=True)) for row in rows}
    lines, header = [], list[str]()
    for line in text.splitlines():
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells_of(line)
        elif columns.keys() <= {*header} and (new := found.get(_word(cells_of(line)[0]))):
            cells = [
                SECONDS.sub("", new[columns[title]]) if title in columns else cell
                for title, cell in zip(header, cells_of(line), strict=True)
            ]
            line = f"| {' | '.join(cells)} |".replace("|  |", "| |")  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines) + "\n"


def _word(cell: str) -> str:
    return re.split(r"[ ,]", cell, maxsplit=1)[0]
