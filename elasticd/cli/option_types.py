"""Types of option values. An invalid value is reported in one sentence."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from elasticd.etcd.names import check_name

MOST = 1_000_000_000  # the largest number for any option: clocks and records have limits
_SHOWN_MAX = 40  # the most characters of an invalid value that are shown


_WHOLE = r"\s*[+-]?[0-9]+\s*"  # int() also accepts 1_0 and non-ASCII digits


class InvalidValue(click.BadParameter):
    """An invalid value. The sentence names the option and the value."""

    def __init__(
        self, value: Any, why: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> None:
        option = max(param.opts, key=len) if param is not None else "the value"
        shown = str(value) or repr(value)
        if len(shown) > _SHOWN_MAX:
            shown = f"{shown[:_SHOWN_MAX]}..."
        super().__init__(f"{option} {shown} {why}.", ctx, param)

    def format_message(self) -> str:
        return self.message


class Name(click.ParamType[str]):
    """A valid name of a job or a node."""

    name = "name"

    def __init__(self, what: str) -> None:
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            check_name(str(value), self._what)
        except ValueError as error:
            raise click.BadParameter(f"{error}.", ctx, param) from None
        return str(value)


class Whole(click.ParamType[int]):
    """A whole number from ``least`` to ``most``."""

    name = "integer"

    def __init__(self, least: int, most: int = MOST) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if not re.fullmatch(_WHOLE, str(value)):
            raise InvalidValue(value, "is not a whole number", param, ctx)
        number = float(value)  # int() raises for a string of thousands of digits
        if number > self._most:
            raise InvalidValue(value, f"is more than {self._most:,}", param, ctx)
        if number < self._least:
            raise InvalidValue(value, f"is less than {self._least}", param, ctx)
        return int(number)


class Seconds(click.ParamType[float]):
    """A finite number of seconds that is at least ``least``."""

    name = "seconds"

    def __init__(self, least: float = 0.0, why: str = "") -> None:
        self._least, self._why = least, why

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            raise InvalidValue(value, "is not a number of seconds", param, ctx) from None
        if not math.isfinite(seconds):
            raise InvalidValue(value, "is not a finite number of seconds", param, ctx)
        if seconds < self._least:
            raise InvalidValue(value, f"is less than {self._least:g}{self._why}", param, ctx)
        if seconds > MOST:
            raise InvalidValue(value, f"is more than {MOST:,}", param, ctx)
        return seconds


class Ratio(click.ParamType[float]):
    """A finite number above 1."""

    name = "ratio"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            ratio = float(value)
        except ValueError:
            raise InvalidValue(value, "is not a number", param, ctx) from None
        if not 1.0 < ratio < math.inf:
            raise InvalidValue(value, "is not a number above 1", param, ctx)
        return ratio


class Switch(click.types.BoolParamType):
    """A flag. As in torchrun, a number from the environment means yes unless it is 0."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        if isinstance(value, str) and re.fullmatch(_WHOLE, value):
            return float(value) != 0
        return bool(super().convert(value, param, ctx))
