"""Make top.svg: python deploy/pictures/generate.py (needs pyte, and some minutes).

It runs a job in a terminal, kills one of the job's workers and stops another, and draws the screen of
`elasticd top` in a second terminal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).parent
ELASTICD = str(Path(sys.executable).with_name("elasticd"))
JOB = ["--job", "gpt", "--node", "a", "--slots", "4", "--min", "2", "--max", "4"]
SCRIPT = ["workers/train_gpt_in_place.py", "--steps", "1000000"]
COLUMNS, ROWS = 92, 30
PATIENCE_S = 600.0
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # fonts that a viewer would load from the network


class Terminal:
    """A program in a terminal of its own. ``screen`` shows the program's output."""

    def __init__(self, *command: str) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        self._fd, its_own = os.openpty()
        termios.tcsetwinsize(its_own, (ROWS, COLUMNS))
        environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"}
        self._process = subprocess.Popen(
            command, stdin=its_own, stdout=its_own, stderr=its_own, env=environ, start_new_session=True
        )
        os.close(its_own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self.until(lambda: self._process.poll() is not None)
        os.close(self._fd)

    def until(self, holds: Callable[[], bool]) -> None:
        """Read the output until ``holds()`` is true. Raises TimeoutError after ``PATIENCE_S``."""
        late_at = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > late_at:
                raise TimeoutError("\n".join(self.screen.display))
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # the program has closed the terminal
                self._process.wait()
                continue
            self._stream.feed(data.replace(b"\x1b[2m", b"\x1b[90m"))  # pyte knows no faint text

    def until_said(self, pattern: str, *, step: int = 0) -> None:
        """Wait until ``pattern`` and, below it, a step of at least ``step`` were shown. Both may have been
        scrolled away since."""

        def said() -> bool:
            above = ("".join(line[x].data for x in range(COLUMNS)) for line in self.screen.history.top)
            found = re.search(f"{pattern}(.*)", "\n".join([*above, *self.screen.display]), re.DOTALL)
            steps = re.findall(r"^step +(\d+) ", found[1], re.MULTILINE) if found else []
            return found is not None and any(int(n) >= step for n in ("0", *steps))

        self.until(said)


def main() -> None:
    """Run the job, and write the picture."""
    os.chdir(HERE.parents[1])
    with Terminal(ELASTICD, "run", *JOB, *SCRIPT) as run:
        run.until_said("zygote.ready", step=200)
        os.kill(pid_in(2), signal.SIGKILL)
        run.until_said("round=3 world_size=4", step=400)  # grown again
        os.kill(pid_in(1), signal.SIGSTOP)
        run.until_said("round=5 world_size=4", step=1200)
        with Terminal(ELASTICD, "top", "gpt") as top:
            top.until_said("steps/s.*productive")
            (HERE / "top.svg").write_text(drawn(top.screen, "elasticd top gpt"))


def pid_in(slot: int) -> int:
    """Return the pid of the slot's worker."""
    said = subprocess.run([ELASTICD, "status", "gpt", "--json"], check=True, capture_output=True).stdout
    (node,) = json.loads(said)["nodes"]
    return next(int(one["pid"]) for one in node["slots"] if one["slot"] == slot)


def drawn(screen: pyte.Screen, title: str) -> str:
    """Return the screen as an SVG that loads no other file."""
    shown = list(lines(screen))
    while shown and not shown[-1].plain:
        shown.pop()
    console = Console(record=True, width=screen.columns, file=StringIO(), force_terminal=True)
    for line in shown:
        console.print(line, soft_wrap=True)
    return _FONTS.sub("", console.export_svg(title=title, theme=MONOKAI, unique_id="elasticd"))


def lines(screen: pyte.Screen) -> Iterator[Text]:
    for y in range(screen.lines):
        cells: list[Any] = [screen.buffer[y][x] for x in range(screen.columns)]
        line = Text()
        for (colour, bold), run in groupby(cells, lambda cell: (cell.fg, cell.bold)):
            name = {"default": None, "brown": "yellow"}.get(colour, colour.replace("bright", "bright_"))
            line.append("".join(cell.data for cell in run), Style(color=name, bold=bold))
        line.rstrip()
        yield line


if __name__ == "__main__":
    main()
