"""Render a job's status in the lines at the bottom of a terminal. Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from io import StringIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from elasticd.telemetry import describe, statustext
from elasticd.telemetry.lines import cleaned
from elasticd.telemetry.nodenames import short_names, shortened
from elasticd.telemetry.status import JobStatus, Note, SlotState, SlotStatus

_STATE_STYLES: dict[SlotState, str] = {
    SlotState.IDLE: "dim",
    SlotState.READY: "cyan",
    SlotState.STARTING: "yellow",
    SlotState.RUNNING: "green",
    SlotState.STOPPING: "yellow",
    SlotState.FINISHED: "blue",
    SlotState.FAILED: "bold red",
    SlotState.QUARANTINED: "magenta",
}
_GAP = 3  # between columns of slots
SLOT_ROWS_MAX = 8


def render(
    status: JobStatus, width: int, height: int, rows_max: int = SLOT_ROWS_MAX, *, fold: bool = False
) -> list[str]:
    """Return lines with ANSI colours, each narrower than ``width`` cells.

    There are at most ``height // 2`` lines in all, and at most ``rows_max`` lines of slots. ``fold``: wrap
    the texts of events where there is room for more lines, else cut them off. A status without an agent has
    no events: ``statustext.notes`` take their place.
    """
    status = cleaned(status)
    room = max(1, height // 2)
    usable = max(8, width - 1)  # a full last column makes some terminals wrap
    lines: list[Text] = [Text("─" * usable, style="dim")] if room > 2 else []
    lines.append(_head(status, usable))
    if status.waiting and len(lines) < room:
        lines.append(Text(f" {status.waiting}", style="yellow"))
    events = status.agent.events if status.agent else statustext.notes(status)
    events = events[-3:] if room > 8 else events[-1:]
    kept = len(_told(events, usable, max(len(events), room // 3), fold))
    lines += _slots(status, usable, min(rows_max, room - len(lines) - kept))
    lines += _told(events, usable, room - len(lines), fold)
    return _ansi(lines, usable)


def _told(events: Sequence[Note], width: int, room: int, fold: bool) -> list[Text]:
    lines: list[Text] = []
    for at, event in enumerate(events, 1):
        clock = time.strftime(" %H:%M:%S ", time.localtime(event.at))
        most = room - len(lines) - (len(events) - at)  # keep one line free for each later event
        words = textwrap.wrap(event.text, max(8, width - len(clock))) if fold and most > 1 else [event.text]
        if len(words) > most:
            words = [*words[: most - 1], " ".join(words[most - 1 :])]
        for part in words[: max(0, most)]:
            lines.append(Text.assemble((clock, "dim"), part))
            clock = " " * len(clock)
    return lines


def _head(s: JobStatus, width: int) -> Text:
    """Return the job in one line: the most important words first, and as many words as fit."""
    pace = s.steps_per_s
    words: list[tuple[str, str]] = [
        (f"world {s.world_size}", "bold green" if s.world_size else "bold yellow"),
        (f"({describe.sizes(s.limits)})" if s.limits else "", "dim"),
        (f"round {s.round}", "bold"),
        (s.condition, "yellow" if s.condition != "live" else ""),
        (describe.step(s.step, s.step_told) if s.step is not None else "", ""),
    ]
    if pace is not None:
        words.append((f"{_rate(pace)} steps/s", "cyan"))
    restarts = f"restarts {s.restarts}" + (f"  ({s.budget_left} left)" if s.budget_left is not None else "")
    words.append((restarts, "yellow" if s.restarts else "dim"))
    head = Text.assemble((f" {shortened(s.job, max(8, width // 3))}", "bold cyan"))
    for word, style in words:
        if word and head.cell_len + 2 + cell_len(word) <= width:
            head.append("  ").append(word, style=style)
    return head


def _slots(s: JobStatus, width: int, rows: int) -> list[Text]:
    """Return the slots in as many columns as fit. A last line counts the slots that do not fit."""
    slots = [(node.node, slot) for node in s.nodes for slot in node.slots]
    if not slots or rows < 1:
        return []
    names = short_names({node for node, _ in slots})
    cells = [_cell(slot, names[node] if len(names) > 1 else "") for node, slot in slots]
    widest = min(max(c.cell_len for c in cells), width - 1)
    columns = max(1, (width - 1 + _GAP) // (widest + _GAP))
    capacity = columns * rows
    rest = 0
    if len(cells) > capacity:
        # People look for the slots that do not run as they should.
        order = sorted(range(len(slots)), key=lambda i: (slots[i][1].state is SlotState.RUNNING, i))
        kept = sorted(order[: max(0, columns * (rows - 1))])
        rest = len(cells) - len(kept)
        cells = [cells[i] for i in kept]
    lines: list[Text] = []
    for start in range(0, len(cells), columns):
        line = Text(" ")
        for cell in cells[start : start + columns]:
            padding = widest - cell.cell_len + _GAP
            line.append_text(cell).append(" " * max(0, padding))
        line.rstrip()
        lines.append(line)
    if rest:
        lines.append(Text(f" … and {rest} more slots", style="dim"))
    return lines


def _cell(s: SlotStatus, node: str) -> Text:
    """Return one slot. ``node``: the node's short name, or empty in a job on one node."""
    where = f"{node}/{s.slot}" if node else f"slot {s.slot}"
    cell = Text.assemble((where, "dim"))
    if s.rank is not None:
        cell.append(f" rank {s.rank}", style="")
    cell.append(f" {s.state}", style=_STATE_STYLES[s.state])
    if s.until_gone is not None:
        cell.append(f", waits for process {s.until_gone}")
    if s.step:
        cell.append(f" {s.step}")
    if s.steps_per_s is not None:
        cell.append(f" {_rate(s.steps_per_s)}/s", style="cyan")
    return cell


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2f}"


def _ansi(lines: Sequence[Text], width: int) -> list[str]:
    out: list[str] = []
    console = Console(
        file=StringIO(),
        width=width + 1,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
        highlight=False,
        emoji=False,
        no_color=False,
    )
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        with console.capture() as printed:
            console.print(line, end="", soft_wrap=True)
        out.append(printed.get())
    return out
