"""Lines as wide as the terminal that they are printed on."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence


def on_screen(lines: Sequence[str]) -> list[str]:
    """The same, fitted to the terminal if stdout is one; elsewhere a line stays a line."""
    return fitted(lines, shutil.get_terminal_size().columns) if sys.stdout.isatty() else list(lines)


def fitted(lines: Sequence[str], columns: int) -> list[str]:
    """The same for a terminal so wide: broken between words, and what follows is set below its beginning.
    A word that is longer, such as a path, stays whole, so that it can be copied."""
    shown: list[str] = []
    for line in lines:
        named = re.match(r"  \S+(?: \S+)? {2,}", line)
        under = named.end() if named else len(line) - len(line.lstrip(" ")) + 2
        shown += textwrap.wrap(
            line, columns, subsequent_indent=" " * under, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return shown
