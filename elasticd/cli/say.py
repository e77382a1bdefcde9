"""Prints for all commands, and wraps lines to the width of the terminal. Only this module prints, so that
text from etcd, a checkpoint or a file is always cleaned."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import click

from elasticd.telemetry.lines import clean_line


def say(*lines: str, err: bool = False, **style: Any) -> None:
    """Print the lines, cleaned so that each stays one line, in click's styles."""
    text = "\n".join(map(clean_line, lines))
    click.echo(click.style(text, **style) if any(style.values()) else text, err=err)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def on_screen(lines: Sequence[str]) -> list[str]:
    """Wrap the lines to the terminal's width. If stdout is not a terminal, return them unchanged."""
    return fitted(lines, shutil.get_terminal_size().columns) if sys.stdout.isatty() else list(lines)


def fitted(lines: Sequence[str], columns: int) -> list[str]:
    """Wrap the lines to ``columns``, between words, with continuation lines indented below the text. A long
    word, such as a path, stays whole so that it can be copied."""
    shown: list[str] = []
    for line in lines:
        named = re.match(r"  \S+(?: \S+)? {2,}", line)
        under = named.end() if named else len(line) - len(line.lstrip(" ")) + 2
        shown += textwrap.wrap(
            line, columns, subsequent_indent=" " * under, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return shown
