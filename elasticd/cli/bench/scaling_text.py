"""What ``elasticd bench scaling`` prints: tables, plots in plain characters, and the JSON document.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elasticd.cli.bench.scaling import StepCosts, WorldMeasured, efficiency, speed_up
from elasticd.cli.bench.scaling_advice import ENOUGH, ScalingAdvice
from elasticd.cli.say import table
from elasticd.telemetry.describe import count

# How the parts of a step are drawn and called.
_PARTS = (
    ("data_s", "%", "data"),
    ("compute_s", "#", "compute"),
    ("communication_s", "=", "communication"),
    ("waiting_s", ".", "waiting"),
    ("no_cpu_s", "?", "no CPU"),
)
_BAR = 50  # characters of the longest bar


def baselines(measured: Sequence[WorldMeasured]) -> dict[str, WorldMeasured]:
    """Return what each launcher did with the fewest workers."""
    return {one.launcher: one for one in sorted(measured, key=lambda one: -one.world)}


def unit_of(measured: Sequence[WorldMeasured]) -> str:
    return "samples/s" if all(one.samples_per_s for one in measured) else "steps/s"


def throughput(measured: Sequence[WorldMeasured]) -> Iterator[str]:
    """Yield a table of the throughput, and a plot of the speed-up beside the ideal one."""
    base = baselines(measured)
    ups = [speed_up(one, base[one.launcher]) for one in measured]
    rows = [("workers", "launcher", "steps", unit_of(measured), "per worker", "speed-up", "efficiency")]
    for one, up in zip(measured, ups, strict=True):
        share = f"{efficiency(one, base[one.launcher]):.0%}"
        each = _number(one.throughput), _number(one.throughput / one.world)
        rows.append((str(one.world), one.launcher, str(one.steps), *each, f"{up:.2f}", share))
    yield from table(rows)
    ideals = [one.world / base[one.launcher].world for one in measured]
    per_up = _BAR / max([*ups, *ideals])
    yield ""
    yield "speed-up (| is the ideal)"
    for name, up, ideal in zip(_names(measured), ups, ideals, strict=True):
        bar, mark = "#" * round(up * per_up), max(0, round(ideal * per_up) - 1)
        yield f"  {name}  {bar[:mark].ljust(mark)}|{bar[mark + 1 :]} {up:.2f}"


def costs(measured: Sequence[WorldMeasured]) -> Iterator[str]:
    """Yield a table of what the time of a step goes into, and a plot of it."""
    rows = [("workers", "launcher", "step", *(part for _, _, part in _PARTS))]
    for one in measured:
        shares = (f"{one.costs.share(getattr(one.costs, name)):.0%}" for name, _, _ in _PARTS)
        rows.append((str(one.world), one.launcher, _ms(one.costs), *shares))
    yield from table(rows)
    per_s = _BAR / max(one.costs.step_s for one in measured)
    yield ""
    yield f"a step ({', '.join(f'{sign} {part}' for _, sign, part in _PARTS)})"
    for name, one in zip(_names(measured), measured, strict=True):
        yield f"  {name}  {_stacked(one.costs, per_s)} {_ms(one.costs)}"


def conclusion(one: WorldMeasured, baseline: WorldMeasured, advice: Sequence[ScalingAdvice]) -> Iterator[str]:
    """Yield what the measurement says of ``elasticd run`` with the most workers, as lines."""
    share = efficiency(one, baseline)
    if one.world > baseline.world:
        well = "scales well" if share >= ENOUGH else "falls short"
        ideal = f"{one.world / baseline.world:g} times the throughput of {count(baseline.world, 'worker')}"
        yield f"{well}: {count(one.world, 'worker')} reach {share:.0%} of {ideal}"
    yield from (f"- {piece.sentence}" for piece in advice)
    if share < ENOUGH and not advice:
        yield "- no single part of a step is to blame: see where the time goes above"


def document(
    script: Sequence[str],
    threads: str,
    measured: Sequence[WorldMeasured],
    advice: Sequence[ScalingAdvice],
) -> Mapping[str, Any]:
    """Return the JSON document."""
    base = baselines(measured)
    return {
        "schema": 1,
        "script": list(script),
        "omp_num_threads": threads,
        "unit": unit_of(measured),
        "runs": [
            {
                "launcher": one.launcher,
                "workers": one.world,
                "steps": one.steps,
                "throughput": one.throughput,
                "throughput_per_worker": one.throughput / one.world,
                "speed_up": speed_up(one, base[one.launcher]),
                "efficiency": efficiency(one, base[one.launcher]),
                "step": {"step_s": one.costs.step_s, **asdict(one.costs)},
                "slow_ranks": {str(rank): ratio for rank, ratio in one.slow.items()},
            }
            for one in measured
        ],
        "advice": [{"fault": piece.fault.value, "text": piece.sentence} for piece in advice],
    }


def _names(measured: Sequence[WorldMeasured]) -> list[str]:
    width = max(len(one.launcher) for one in measured)
    digits = max(len(str(one.world)) for one in measured)
    return [f"{one.world:>{digits}} {one.launcher.ljust(width)}" for one in measured]


def _stacked(costs: StepCosts, per_s: float) -> str:
    """Return a bar in which each part begins where the one before ends, however they are rounded."""
    bar, until_s = "", 0.0
    for name, sign, _ in _PARTS:
        until_s += getattr(costs, name)
        bar += sign * (round(until_s * per_s) - len(bar))
    return bar


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ms(costs: StepCosts) -> str:
    return f"{costs.step_s * 1e3:.3g} ms"
