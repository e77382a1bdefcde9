"""What a PromQL expression uses, as far as its text shows: metrics, and the labels that they must have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from elasticd.telemetry.catalog import BY_NAME, Type

EVERY_SAMPLE = {"run", "node"}
SCRAPED = {"job", "instance"}  # set by Prometheus


@dataclass(frozen=True)
class Selector:
    """``name[a="b"]``: a metric's name as it is written, and its matchers."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expr: str) -> Iterator[Selector]:
    """Yield the selectors of elasticd's metrics. Names with a colon are recorded, see ``recorded``."""
    for name, braces in re.findall(r"(?<![:\w])(elasticd_\w+)(?![:\w])(\{[^}]*\})?", expr):
        yield Selector(name, tuple(re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', braces)))


def recorded(expr: str) -> set[str]:
    """Return the names of recording rules in the expression."""
    return set(re.findall(r"\b\w+:elasticd_\w+:\w+", expr))


def grouped(expr: str) -> set[str]:
    """Return all labels by which the expression aggregates."""
    return {
        label.strip()
        for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expr)
        for label in group.split(",")
    } - {""}


def complaints(expr: str) -> list[str]:
    """Return what the expression uses that is not in the catalogue."""
    found = []
    known: set[str] = set(EVERY_SAMPLE | SCRAPED)
    known |= {"alertname"} if "ALERTS" in expr else set()
    for selector in selectors(expr):
        base = re.sub(r"_(bucket|sum|count)$", "", selector.name)
        metric = BY_NAME.get(base if selector.name not in BY_NAME else selector.name)
        if metric is None or (metric.type is Type.HISTOGRAM) != (metric.name != selector.name):
            found.append(f"there is no {selector.name}")
            continue
        labels = EVERY_SAMPLE | SCRAPED | set(metric.labels)
        labels |= {"le"} if selector.name.endswith("_bucket") else set()
        known |= labels
        for label, how, value in selector.matchers:
            if label not in labels:
                found.append(f"{selector.name} has no label {label}")
            elif metric.values and label == metric.labels[-1] and how in ("=", "!="):
                found += [] if value in metric.values else [f"{selector.name}: {label} is never {value}"]
            elif metric.values and label == metric.labels[-1]:
                for part in value.split("|"):
                    if not any(re.fullmatch(part, v) for v in metric.values):
                        found.append(f"{selector.name}: {label} is never {part}")
    if not recorded(expr):
        found += [f"nothing has a label {label}" for label in sorted(grouped(expr) - known)]
    return found
