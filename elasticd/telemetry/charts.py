"""Plots as small SVG without scripts, for pages that must work without a network. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from elasticd.telemetry.runreport import Series

WIDTH, HEIGHT = 860, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 24


def over_time(
    series: Sequence[Series],
    began_at: float,
    ended_at: float,
    *,
    top: float | None = None,
    show: Callable[[float], str] = "{:g}".format,
    marks: Sequence[tuple[float, str]] = (),
    colours: Sequence[str] = ("var(--a)",),
) -> str:
    """Return a plot of step functions: a value holds until the next point. ``marks``: times of events and
    their texts. ``top``: the upper end of the scale; by default it follows from the largest value."""
    values = [v for s in series for _, v in s.points if v is not None]
    if not values:
        return "<p class=dim>nothing was measured</p>"
    ceiling = top if top is not None else _round_up(max(values))
    span_s = max(ended_at - began_at, 1e-3)

    def x(at: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(max((at - began_at) / span_s, 0.0), 1.0)

    def y(value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - min(value / ceiling, 1.0))

    parts = [f'<svg class=plot viewBox="0 0 {WIDTH} {HEIGHT}" role=img>']
    for share in (0.0, 0.5, 1.0):
        at = y(ceiling * share)
        parts.append(f'<line class=grid x1={_LEFT} x2={WIDTH - _RIGHT} y1="{at:.1f}" y2="{at:.1f}"/>')
        label = escape(show(ceiling * share))
        parts.append(f'<text class=left x={_LEFT - 6} y="{at + 4:.1f}">{label}</text>')
    for at_s in _ticks(span_s):
        where = x(began_at + at_s)
        anchor = "end" if where > WIDTH - 40 else "middle"
        parts.append(
            f'<text x="{where:.1f}" y={HEIGHT - 6} text-anchor={anchor}>{escape(_length(at_s))}</text>'
        )
    for at, what in marks:
        where = x(at)
        parts.append(
            f'<line class=mark x1="{where:.1f}" x2="{where:.1f}" y1={_TOP} y2={HEIGHT - _BOTTOM}>'
            f"<title>{escape(what)}</title></line>"
        )
    for n, one in enumerate(series):
        for path in _steps(one.points, x, y):
            colour = colours[n % len(colours)]
            parts.append(f'<path d="{path}" style="stroke:{colour}"><title>{escape(one.name)}</title></path>')
    return "".join([*parts, "</svg>"])


def shares(parts: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Return a bar divided into parts. The key of a part is its CSS class."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    drawn, at = [], 0.0
    for key, amount in parts.items():
        width = 100 * amount / total
        if width > 0:
            drawn.append(
                f'<rect class="k-{key}" x="{at:.3f}%" width="{width:.3f}%" height=26>'
                f"<title>{escape(names.get(key, key))}: {width:.1f} %</title></rect>"
            )
        at += width
    return f'<svg class=bar width="100%" height=26 role=img>{"".join(drawn)}</svg>'


def _steps(
    points: Sequence[tuple[float, float | None]], x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    """Return one SVG path for each stretch of points that have values."""
    paths: list[str] = []
    drawing = ""
    for at, value in points:
        if value is None:
            if drawing:
                paths.append(f"{drawing}H{x(at):.1f}")
            drawing = ""
        else:
            drawing = f"{drawing}H{x(at):.1f}V{y(value):.1f}" if drawing else f"M{x(at):.1f} {y(value):.1f}"
    return [*paths, drawing] if drawing else paths


def _round_up(value: float) -> float:
    """Round up to a number whose half is a round number as well."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(n * unit for n in (1, 2, 4, 6, 8, 10) if n * unit >= value * 0.999999)


_UNITS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def _ticks(span_s: float) -> list[float]:
    unit = next((u for u in _UNITS if span_s / u <= 8), math.ceil(span_s / 8 / 86400) * 86400)
    return [unit * n for n in range(int(span_s / unit) + 1)]


def _length(seconds: float) -> str:
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60}:{s % 60:02} min"
    if s < 86400:
        return f"{s // 3600}:{s % 3600 // 60:02} h"
    return f"{s / 86400:g} d"
