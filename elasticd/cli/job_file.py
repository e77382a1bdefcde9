"""A job file: what ``elasticd run`` takes on its command line, in TOML."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from elasticd.cli.command_error import CommandError

SUFFIX: Final = ".toml"
_MOST: Final = 32_768  # characters that etcd keeps of a job file
_BITS: Final = 63  # of TOML's numbers, besides the sign


class OptionKind(Enum):
    """What an option takes as its value, in words."""

    FLAG = "true or false without quotes"
    NUMBER = "a number without quotes"
    TEXT = "a text in quotes"
    ANY = "a text in quotes or a number"

    def takes(self, value: object) -> bool:
        """Whether an option of this kind takes the value."""
        match value:
            case bool():
                return self is OptionKind.FLAG
            case int() | float():
                return self in (OptionKind.NUMBER, OptionKind.ANY)
        return isinstance(value, str) and self in (OptionKind.TEXT, OptionKind.ANY)


@dataclass(frozen=True, slots=True)
class JobFile:
    """``options``: the values by the options' long names, with underscores in place of dashes."""

    script: str
    args: tuple[str, ...]
    options: Mapping[str, str | int | float | bool]


def read_job_file(path: Path, kinds: Mapping[str, OptionKind]) -> JobFile:
    """Read a job file. ``kinds``: the options by their names, as in ``JobFile``. Raises CommandError."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise CommandError(f"the job file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # the file is not UTF-8, or not TOML
        raise CommandError(f"the job file {path} is not TOML: {error}.") from error
    script, args = found.pop("script", None), found.pop("args", [])
    if not isinstance(script, str) or not script or script.endswith(SUFFIX):
        raise CommandError(f'the job file {path} names no script: write script = "train.py".')
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise CommandError(f'{path}: args is not a list of texts: write args = ["--epochs", "3"].')
    options = {name.replace("-", "_"): value for name, value in found.items()}
    if len(options) < len(found):
        raise CommandError(f"{path}: an option is given twice, with a dash and with an underscore.")
    if any(isinstance(text, str) and "\0" in text for text in (script, *args, *options.values())):
        raise CommandError(f"{path}: a text has a NUL character, which no argument of a program can have.")
    for name, value in options.items():
        if name not in kinds:
            close = difflib.get_close_matches(name, kinds, 1)
            hint = f"did you mean {close[0]}?" if close else "`elasticd run --help-all` shows all options."
            raise CommandError(f"{path}: there is no option {name}; {hint}")
        if not kinds[name].takes(value):
            raise CommandError(f"{path}: {name} is not {kinds[name].value}.")
        if isinstance(value, int) and value.bit_length() > _BITS:
            raise CommandError(f"{path}: {name} is too large a number.")
    return JobFile(script, tuple(args), options)


def job_file_of(script: str, args: Sequence[str], options: Mapping[str, object]) -> str:
    """Return a job file with these options. ``options``: as in ``JobFile``, or paths. Where the file would be
    too long to keep, a comment takes the place of the arguments."""
    whole = [f"args = [{', '.join(map(_text, args))}]"] if args else []
    own = [f"script = {_text(script)}"]
    others = [f"{name.replace('_', '-')} = {_value(value)}" for name, value in options.items()]
    if sum(map(len, (*own, *whole, *others))) > _MOST:
        whole = [f"# {len(args)} arguments of the script are left out: they are too long"]
    return "\n".join([*own, *whole, *others])


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
    return _text(str(value))


def _text(value: str) -> str:
    """Return a basic string of TOML: JSON's, but for characters that are no text."""
    quoted = json.dumps(value.encode(errors="replace").decode(), ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08X}" for char in quoted)
