"""The agent's status page: plain HTML that needs no script, no network and no other file. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

from elasticd.telemetry import describe
from elasticd.telemetry.lines import cleaned
from elasticd.telemetry.nodenames import short_names
from elasticd.telemetry.status import JobStatus, SlotStatus
from elasticd.telemetry.statustext import left_out

REFRESH_S = 2

# CSS that the report of a run uses, too.
TILES_NOTES_TABLES = """\
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.6rem;margin:1rem 0}
.tile{border:1px solid var(--line);border-radius:.5rem;padding:.45rem .7rem}
.tile b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums}
.tile span{color:var(--dim);font-size:.8rem}
.note{border-left:.25rem solid var(--warn);padding:.3rem .8rem;margin:.8rem 0}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
"""

_STYLE = (
    """
:root{color-scheme:light dark;--line:#8884;--dim:#777;--ok:#1a7f37;--warn:#9a6700;--bad:#cf222e;--off:#6e7781}
@media(prefers-color-scheme:dark){:root{--dim:#999;--ok:#3fb950;--warn:#d29922;--bad:#f85149;--off:#8b949e}}
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.35rem;margin:0}h2{font-size:1rem;margin:1.6rem 0 .4rem}.dim{color:var(--dim)}
"""
    + TILES_NOTES_TABLES
    + """\
th{color:var(--dim);font-weight:400}th:first-child,td:first-child,td.s,th.s{text-align:left}
.running{color:var(--ok)}.starting,.stopping{color:var(--warn)}.failed,.quarantined{color:var(--bad)}
.idle,.ready,.finished{color:var(--off)}
ul{list-style:none;padding:0;margin:0}li{display:flex;gap:.8rem;padding:.15rem 0;overflow-wrap:anywhere}
li time{flex:none;color:var(--dim);font-variant-numeric:tabular-nums}
footer{margin-top:2rem;font-size:.85rem}a{color:inherit}
h1,.note{overflow-wrap:anywhere}td:first-child{max-width:22rem;overflow:hidden;text-overflow:ellipsis}
@media(max-width:40rem){body{margin-top:1rem}.more{display:none}table{font-size:.9em}
th,td{padding:.25rem .3rem}td:first-child{max-width:5.5rem;white-space:normal;overflow-wrap:anywhere}}
"""
)


def render(s: JobStatus) -> str:
    """Return an agent's status page as HTML. ``s.agent`` must not be None."""
    s = cleaned(s)
    agent, own = s.agent, s.own
    assert agent is not None
    limits = f" ({describe.sizes(s.limits)})" if s.limits else ""
    tiles = [
        ("phase", s.condition),
        (f"workers{limits}", f"{s.world_size:,}"),
        ("round", str(s.round)),
        ("step" if s.step_told else "step of this round", "-" if s.step is None else f"{s.step:,}"),
        ("steps/s", "-" if s.steps_per_s is None else f"{s.steps_per_s:.2f}"),
        ("restarts" if s.budget_left is None else f"restarts ({s.budget_left:,} left)", f"{s.restarts:,}"),
    ]
    failed = f"Last failure, at {_clock(s.last_failure.at)}: {s.last_failure.text}" if s.last_failure else ""
    lags = "; ".join(map(describe.laggard, s.stragglers))
    notes = [
        f"<p class=note>{escape(text)}</p>"
        for text in (agent.unready, s.waiting, lags, *left_out(s), failed)
        if text
    ]
    spent = describe.spent(own.time) if own is not None and own.time else ""
    names = short_names({node.node for node in s.nodes})
    told = ((_clock(event.at), escape(event.text)) for event in reversed(agent.events))
    events = [f"<li><time>{at}</time><span>{text}</span></li>" for at, text in told]
    return "".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8>",
            '<meta name=viewport content="width=device-width">',
            f"<meta http-equiv=refresh content={REFRESH_S}>",
            f"<title>{escape(s.job)}: {escape(s.condition)}</title><style>{_STYLE}</style>",
            f"<h1>{escape(s.job)}</h1>",
            f"<div class=dim>as {escape(agent.node)} knows it at {_clock(s.at)} UTC</div>",
            "<div class=tiles>",
            *(f"<div class=tile><b>{value}</b><span>{name}</span></div>" for name, value in tiles),
            "</div>",
            f"<p class=dim>This node: {escape(spent)}.</p>" if spent else "",
            *notes,
            "<h2>Slots</h2><div class=wide><table><tr><th>node<th>slot<th class=s>state<th>rank<th>step",
            "<th class=more>steps/s<th class=more>pid</tr>",
            *(_row(node.node, names[node.node], slot) for node in s.nodes for slot in node.slots),
            "</table></div>",
            f"<h2>What happened</h2><ul>{''.join(events) or '<li class=dim>nothing yet'}</ul>",
            f"<footer class=dim>elasticd {escape(s.version)} · <a href=/metrics>metrics</a> · ",
            "<a href=/status>status as JSON</a></footer></html>",
        ]
    )


def _row(node: str, name: str, slot: SlotStatus) -> str:
    """Return a row of the table. ``name``: the node's short name."""
    pace = "" if slot.steps_per_s is None else f"{slot.steps_per_s:.2f}"
    rank = "" if slot.rank is None else str(slot.rank)
    step = "" if slot.step is None else f"{slot.step:,}"
    awaits = "" if slot.until_gone is None else f", {describe.awaits(slot.until_gone)}"
    return (
        f"<tr><td title='{escape(node)}'>{escape(name)}<td>{slot.slot}"
        f"<td class='s {slot.state}'>● {slot.state}{awaits}<td>{rank}<td>{step}"
        f"<td class=more>{pace}<td class=more>{slot.pid or ''}</tr>"
    )


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")
