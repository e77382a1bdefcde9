"""The report of a run as one HTML page without scripts, network or other files. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape

from elasticd.core.ledger import Kind
from elasticd.telemetry import charts, describe
from elasticd.telemetry.events import Event
from elasticd.telemetry.lines import cleaned
from elasticd.telemetry.runreport import FailurePart, RoundPart, RunReport, SlotPart
from elasticd.telemetry.statuspage import TILES_NOTES_TABLES

ROWS_MAX = 200  # the most rows of a table; the middle rows of a longer table are left out
_COLOURS = ("var(--a)", "var(--b)", "var(--c)", "var(--d)", "var(--e)", "var(--f)")

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = (
    """
:root{color-scheme:light dark;--line:#8884;--dim:#666;--ok:#1a7f37;--warn:#9a6700;--bad:#cf222e;
--a:#0969da;--b:#bf5700;--c:#1a7f37;--d:#8250df;--e:#bf3989;--f:#57606a}
@media(prefers-color-scheme:dark){:root{--dim:#999;--ok:#3fb950;--warn:#d29922;--bad:#f85149;
--a:#58a6ff;--b:#f0883e;--c:#3fb950;--d:#bc8cff;--e:#f778ba;--f:#8b949e}}
body{font:15px/1.45 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.45rem;margin:0}h2{font-size:1.05rem;margin:1.8rem 0 .4rem}.dim{color:var(--dim)}
.good{color:var(--ok)}.bad{color:var(--bad)}p{margin:.3rem 0}
"""
    + TILES_NOTES_TABLES
    + """\
th{color:var(--dim);font-weight:400}td.t,th.t{text-align:left}td.w{white-space:normal;min-width:14rem;overflow-wrap:anywhere}
svg{display:block}svg.plot{width:100%;height:auto;font-size:11px}svg text{fill:var(--dim)}
svg text.left{text-anchor:end}.grid{stroke:var(--line)}.mark{stroke:var(--bad);stroke-dasharray:2 3}
svg path{fill:none;stroke-width:1.8;stroke-linejoin:round}svg.bar{border-radius:.35rem;overflow:hidden}
.key{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;margin-right:.4rem;vertical-align:-1px}
.k-productive{fill:#2da44e;background:#2da44e}.k-replayed{fill:#bf8700;background:#bf8700}
.k-checkpoint{fill:#8250df;background:#8250df}.k-rendezvous{fill:#218bff;background:#218bff}
.k-restarting{fill:#e16f24;background:#e16f24}.k-waiting{fill:#768390;background:#768390}
.k-hung{fill:#cf222e;background:#cf222e}.k-idle{fill:#d0d7de;background:#d0d7de}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.85rem;margin:.4rem 0}
code{font-size:.85em;overflow-wrap:anywhere;white-space:normal}footer{margin-top:2.2rem;font-size:.85rem}
@media(max-width:40rem){body{margin-top:1rem}table{font-size:.85em}th,td{padding:.25rem .3rem}
td.w{min-width:11rem}svg.plot{font-size:22px;overflow:visible}svg path{stroke-width:3}}
@media print{body{margin:0;max-width:none}h2{break-after:avoid}tr,svg{break-inside:avoid}}
"""
)


def render(r: RunReport, version: str, now: float) -> str:
    """Return the page. ``version``: the elasticd that writes the page. ``now``: seconds since the epoch."""
    r = cleaned(r)
    marks = [(e.ended_at, f"round {e.number} ended: {e.ended_by}") for e in r.rounds[:-1] if e.ended_by]
    plots = [
        ("Workers at work", charts.over_time([r.world], r.began_at, r.ended_at, marks=marks, show=_count)),
        (
            "Goodput",
            charts.over_time(
                [r.goodput_over_time],
                r.began_at,
                r.ended_at,
                top=1.0,
                show="{:.0%}".format,
                marks=marks,
                colours=("var(--c)",),
            ),
        ),
        (
            "Time of a step",
            charts.over_time(
                r.step_times, r.began_at, r.ended_at, show=_seconds, marks=marks, colours=_COLOURS
            )
            + _legend([(_COLOURS[n % len(_COLOURS)], s.name) for n, s in enumerate(r.step_times[:24])]),
        ),
    ]
    return "".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8>",
            '<meta name=viewport content="width=device-width">',
            f'<meta http-equiv=Content-Security-Policy content="{_POLICY}">',
            f"<title>{escape(r.job)}: report</title><style>{_STYLE}</style>",
            f"<h1>{escape(r.job)}</h1>",
            f"<div class='{'good' if r.went_well else 'bad'}'>{escape(_capital(r.outcome))}</div>",
            f"<div class=dim>{escape(r.script)} &middot; {_day(r.began_at)} to {_day(r.ended_at)}</div>",
            _tiles(r),
            *(f"<p class=note>{escape(text)}</p>" for text in notes(r)),
            "<h2>Where the time went</h2>",
            _time(r),
            *(f"<h2>{name}</h2>{plot}" for name, plot in plots),
            _section(
                "Rounds",
                ("round", "began", "lasted", "workers", "cause:t", "ended by:t", "worker time lost"),
                [_round(one, r.began_at) for one in r.rounds],
            ),
            _section(
                "Failures",
                ("when", "what:t", "worker time lost"),
                [_failure(one, r.began_at) for one in r.failures],
            ),
            _happened("Hangs", r.hangs, r.began_at, "evidence"),
            _happened("Stragglers and bad slots", r.stragglers, r.began_at),
            _happened("Checkpoints", r.checkpoints, r.began_at),
            _section(
                "Slots",
                ("node:t", "slot", "steps", "time of a step", "productive", "lost", "mostly to:t"),
                [_slot(one) for one in r.slots],
            ),
            _section(
                "Agents",
                ("node:t", "slots", "began", "last line", "end:t"),
                [
                    f"<td class=t>{escape(a.node)}<td>{a.slots}<td>{_since(a.began_at, r.began_at)}"
                    f"<td>{_since(a.ended_at, r.began_at)}<td class=t>{escape(a.fate)}"
                    for a in r.agents
                ],
            ),
            _happened("Warnings", r.warnings, r.began_at),
            f"<footer class=dim>Written by elasticd {escape(version)} on {_day(now)}, ",
            "from the files of the agents on this machine. Times count from the start of the run.",
            "</footer></html>",
        ]
    )


def notes(r: RunReport) -> list[str]:
    """Return the warnings that a reader needs to judge the numbers."""
    said = []
    if any(agent.code is None and not agent.alive for agent in r.agents):
        said.append("An agent died unexpectedly: its numbers are those of the last line that it wrote.")
    if r.unseen:
        said.append(
            f"Of {describe.listing(r.unseen)} the report has only the sums; "
            "their events are on their machines."
        )
    return said


def _tiles(r: RunReport) -> str:
    share = r.goodput
    most = max((one.world for one in r.rounds), default=0)
    tiles = [
        ("goodput", "-" if share is None else percent(share)),
        ("lasted", describe.span(r.ended_at - r.began_at)),
        ("rounds", str(len(r.rounds))),
        ("failures", str(len(r.failures))),
        ("hangs", str(len(r.hangs))),
        ("workers", f"{most} <small class=dim>of {r.limits[0]} to {r.limits[1]}</small>"),
    ]
    return (
        "<div class=tiles>"
        + "".join(f"<div class=tile><b>{value}</b><span>{name}</span></div>" for name, value in tiles)
        + "</div>"
    )


def _time(r: RunReport) -> str:
    parts = {kind: r.spent.get(kind, 0.0) for kind in describe.KINDS}
    total = sum(parts.values())
    if total <= 0:
        return "<p class=dim>nothing was measured</p>"
    rows = [
        f"<tr><td class=t><span class='key k-{kind}'></span>{name}<td>{length(parts[kind])}"
        f"<td>{percent(parts[kind] / total)}</tr>"
        for kind, name in describe.KINDS.items()
        if parts[kind] >= 0.05 or kind is Kind.PRODUCTIVE
    ]
    head = "<tr><th class=t>worker time<th>length<th>share</tr>"
    bar = charts.shares(
        {str(k): s for k, s in parts.items()}, {str(k): name for k, name in describe.KINDS.items()}
    )
    return bar + f"<div class=wide><table>{head}{''.join(rows)}</table></div>"


def _round(one: RoundPart, since: float) -> str:
    lost = "-" if one.lost_s is None else length(one.lost_s)
    return (
        f"<td>{one.number}<td>{_since(one.began_at, since)}<td>{length(one.ended_at - one.began_at)}"
        f"<td>{one.world}<td class=t>{escape(one.cause.replace('_', ' '))}"
        f"<td class='t w'>{escape(one.ended_by)}<td>{lost}"
    )


def _failure(one: FailurePart, since: float) -> str:
    e = one.event
    log = f"<br><code class=dim>{escape(str(e['log']))}</code>" if e.get("log") else ""
    cost = "-" if one.cost_s is None else "counted above" if one.shared else length(one.cost_s)
    what = escape(_capital(str(e.get("text") or e["event"])))
    return f"<td>{_since(float(e['at']), since)}<td class='t w'>{what}{log}<td>{cost}"


def _slot(one: SlotPart) -> str:
    lost = {k: s for k, s in one.spent.items() if k not in (Kind.PRODUCTIVE, Kind.IDLE)}
    most = max(lost, key=lambda k: lost[k], default="")
    step = "-" if one.step_s is None else _seconds(one.step_s)
    return (
        f"<td class=t>{escape(one.node)}<td>{one.slot}<td>{one.steps:,}<td>{step}"
        f"<td>{length(one.spent.get(Kind.PRODUCTIVE, 0.0))}<td>{length(sum(lost.values()))}"
        f"<td class=t>{escape(describe.KINDS[Kind(most)]) if most and lost[most] > 0 else ''}"
    )


def _happened(title: str, events: Sequence[Event], since: float, place: str = "") -> str:
    """Return a section of events. ``place``: the field with a path to show below the text."""
    rows = [
        f"<td>{_since(float(e['at']), since)}<td class=t>{escape(str(e.get('node', '')))}"
        f"<td class='t w'>{escape(_capital(str(e.get('conclusion') or e.get('text') or e['event'])))}"
        + (f"<br><code class=dim>{escape(str(e[place]))}</code>" if place and e.get(place) else "")
        for e in events
    ]
    return _section(title, ("when", "node:t", "what:t"), rows)


def _section(title: str, head: Sequence[str], rows: list[str]) -> str:
    """Return a section with a table; empty without rows. A name in ``head`` that ends in ":t" is of a column
    of text."""
    if not rows:
        return ""
    heads = "".join(
        f"<th{' class=t' if name.endswith(':t') else ''}>{name.removesuffix(':t')}" for name in head
    )
    left_out = ""
    if len(rows) > ROWS_MAX:
        left_out = f"<p class=dim>{len(rows) - ROWS_MAX} more in between are left out.</p>"
        rows = [*rows[: ROWS_MAX // 2], *rows[-ROWS_MAX // 2 :]]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>{title}</h2><div class=wide><table><tr>{heads}</tr>{body}</table></div>{left_out}"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = "".join(
        f"<span><span class=key style='background:{colour}'></span>{escape(name)}</span>"
        for colour, name in entries
    )
    return f"<div class=legend>{keys}</div>" if len(entries) > 1 else ""


def _count(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else ""


def _seconds(value: float) -> str:
    if value < 0.0995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s"


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def length(seconds: float) -> str:
    """Return a length of time in words, to a tenth of a second below a minute."""
    return f"{seconds:.1f} s" if 0 < seconds < 60 else describe.span(seconds)


def _since(at: float, began_at: float) -> str:
    return length(max(0.0, at - began_at))


def _day(at: float) -> str:
    return f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S %Z}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
