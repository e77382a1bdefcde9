"""From the bytes that workers write to whole lines that cannot disturb a screen.

Workers write what they like: halves of lines, progress bars that return the carriage, codes that
move the cursor. Above a live view only whole lines may be printed, and only colours may pass.
"""

from __future__ import annotations

import codecs
import re

# Of the escape sequences only SGR (colours, ``ESC [ … m``) leaves the cursor where it is.
_ESCAPE = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"  # CSI
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS and other strings, titles and links
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
    r"|\x1b",
    re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")  # not tab, not what is left of ESC
_RESET = "\x1b[0m"
PARTIAL_MAX_CHARS = 64 * 1024  # a "line" longer than this is broken, not kept in memory


class LineBuffer:
    """One writer's output. Feed it bytes; it gives back whole lines and keeps the last, open one.

    ``partial`` is what the open line shows now: of a progress bar, its latest state.
    """

    def __init__(self, *, colors: bool = True) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._open = ""
        self._colors = colors

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete, ready to print, without their line ends."""
        *whole, self._open = (self._open + self._decoder.decode(data)).split("\n")
        if len(self._open) > PARTIAL_MAX_CHARS:
            # A progress bar grows by its rewrites: only its latest state matters. What has no
            # carriage return is a giant line, and is broken.
            if "\r" in self._open.rstrip("\r"):
                self._open = _last_state(self._open)
            else:
                whole.append(self._open)
                self._open = ""
        return [shown(line, colors=self._colors) for line in whole]

    @property
    def partial(self) -> str:
        return shown(self._open, colors=self._colors)

    def close(self) -> str:
        """The open line, which nobody will finish any more; empty when there is none."""
        rest = self._open + self._decoder.decode(b"", final=True)
        self._open = ""
        return shown(rest, colors=self._colors)


def shown(line: str, *, colors: bool = True) -> str:
    """What a terminal would show of the line in the end, with nothing in it that moves the cursor."""
    text = _ESCAPE.sub(_keep_colors if colors else "", _last_state(line))
    text = _CONTROL.sub("", text).expandtabs()
    return text + _RESET if "\x1b" in text and not text.endswith(_RESET) else text


def _last_state(line: str) -> str:
    """What was written after the last carriage return that something follows."""
    return line.rstrip("\r").rpartition("\r")[2]


def _keep_colors(match: re.Match[str]) -> str:
    return match.group() if match.group("final") == "m" else ""
