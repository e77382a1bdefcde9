"""Sum up the time in the nodes' ledgers, and compute the productive share."""

from __future__ import annotations

from collections.abc import Mapping

from elasticd.core.ledger import Kind, totals

__all__ = ["goodput", "totals", "wanted"]


def wanted(spent: Mapping[str, float]) -> float:
    """Return the seconds of all kinds but idle."""
    return sum(seconds for kind, seconds in spent.items() if kind != Kind.IDLE)


def goodput(spent: Mapping[str, float]) -> float | None:
    """Return the share of the wanted time that was productive; None if no step was seen, for example for
    scripts without an optimizer."""
    trained_s = sum(spent.get(kind, 0.0) for kind in (Kind.PRODUCTIVE, Kind.REPLAYED, Kind.CHECKPOINT))
    return spent.get(Kind.PRODUCTIVE, 0.0) / wanted(spent) if trained_s > 0 else None
