"""Turn the bytes that workers write into whole lines that cannot disturb a screen.

Workers may write half lines, progress bars with carriage returns, and codes that move the cursor. Above a
live view only whole lines may be printed, and only colour codes may pass.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

# Of the escape sequences only SGR (colours, ``ESC [ … m``) leaves the cursor where it is.
_ESCAPE = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"  # CSI
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS and other strings, titles and links
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
    r"|\x1b",
    re.DOTALL,
)
# All control characters except tab and the ESC of colours.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")
# Further characters that clean() removes: C0 except tab and line feed, C1, and marks that change the reading
# direction.
_UNCLEAN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_Value = TypeVar("_Value")
_RESET = "\x1b[0m"
PARTIAL_MAX_CHARS = 64 * 1024  # a longer line is broken in two, to bound memory


class LineBuffer:
    """The output of one writer. ``feed`` takes bytes and returns whole lines. It keeps the open line, a
    last line without an end.

    ``partial`` is the open line as a terminal shows it now, for example the latest state of a progress bar.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._open = ""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete, ready to print, without line ends."""
        *whole, self._open = (self._open + self._decoder.decode(data)).split("\n")
        if len(self._open) > PARTIAL_MAX_CHARS:
            # A progress bar rewrites its line, and only its latest state matters. A long line without a
            # carriage return is broken.
            if "\r" in self._open.rstrip("\r"):
                self._open = _last_state(self._open)
            else:
                whole.append(self._open)
                self._open = ""
        return list(map(shown, whole))

    @property
    def partial(self) -> str:
        return shown(self._open)

    def close(self) -> str:
        """Return the open line, which its writer will not finish; empty when there is none."""
        rest = self._open + self._decoder.decode(b"", final=True)
        self._open = ""
        return shown(rest)


def shown(line: str) -> str:
    """Return the line as a terminal shows it in the end, without codes that move the cursor."""
    text = _ESCAPE.sub(_keep_colors, _last_state(line))
    text = _CONTROL.sub("", text).expandtabs()
    return text + _RESET if "\x1b" in text and not text.endswith(_RESET) else text


def clean(text: str) -> str:
    """Return the text without characters that a terminal or a page interprets. Line feeds stay.

    Text from etcd, a checkpoint or a file passes this function before a person sees it.
    """
    return _UNCLEAN.sub("", _ESCAPE.sub("", text))


def clean_line(text: str) -> str:
    """Return the clean text on one line."""
    return " ".join(clean(text).splitlines())


def cleaned(value: _Value) -> _Value:
    """Return the value with every string in it cleaned, at any depth; the same object if nothing changes."""
    found: Any = value
    if type(value) is str:
        found = clean(str(value))
    elif is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: cleaned(item) for name, item in old.items()}
        if any(new[name] is not item for name, item in old.items()):
            found = replace(value, **new)
    elif type(value) in (tuple, list):
        items = [cleaned(item) for item in value]  # type: ignore[attr-defined]
        if any(new is not old for new, old in zip(items, value, strict=True)):  # type: ignore[call-overload]
            found = type(value)(items)  # type: ignore[call-arg]
    elif isinstance(value, Mapping):
        pairs = {cleaned(name): cleaned(item) for name, item in value.items()}
        found = value if pairs == value else pairs
    return found  # type: ignore[no-any-return]


def _last_state(line: str) -> str:
    """Return the text after the last carriage return, ignoring carriage returns at the end."""
    return line.rstrip("\r").rpartition("\r")[2]


def _keep_colors(match: re.Match[str]) -> str:
    return match.group() if match.group("final") == "m" else ""
