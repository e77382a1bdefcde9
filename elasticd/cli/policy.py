"""The options for failures, waiting and hangs: the job's policy, and the agent's patience with hangs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from elasticd.cli.complaint import Complaint
from elasticd.cli.options import RunOptions, Said, flag
from elasticd.core.facts import Policy, Resume
from elasticd.core.hang import Patience

T = TypeVar("T")


def policy(
    options: RunOptions,
    environ: Mapping[str, str],
    join_timeout_s: float | None,
    settle_s: float | None,
    node_ttl_s: float | None,
) -> Policy:
    """Return the policy from elasticd's options, then --rdzv-conf, then the defaults. Raises Complaint."""
    default = Policy()
    restarts_max = first(options.max_restarts, default.restarts_max)
    # A user who gives --max-restarts expects that many restarts, and no earlier end for lack of progress.
    futile_default = default.futile_max if options.max_restarts is None else restarts_max + 1
    quarantine_s = first(options.quarantine, default.quarantine_s)
    quarantine_max_s = first(options.quarantine_max, max(default.quarantine_max_s, quarantine_s))
    if quarantine_s > quarantine_max_s:
        if options.quarantine is not None:
            raise Complaint(f"--quarantine {quarantine_s:g} is above --quarantine-max, {quarantine_max_s:g}.")
        quarantine_s = quarantine_max_s
    return Policy(
        settle_s=first(options.settle, settle_s, default.settle_s),
        grow_cooldown_s=first(options.grow_cooldown, default.grow_cooldown_s),
        join_timeout_s=first(options.join_timeout, join_timeout_s, default.join_timeout_s),
        shutdown_s=first(options.shutdown_timeout, _torch_shutdown_s(environ), default.shutdown_s),
        broken_s=first(options.broken_timeout, default.broken_s),
        part_s=first(options.part_timeout, default.part_s),
        checkpoint_wait_s=first(options.checkpoint_wait, default.checkpoint_wait_s),
        node_ttl_s=first(options.node_ttl, node_ttl_s, default.node_ttl_s),
        restarts_max=restarts_max,
        restart_window_s=first(options.restart_window, default.restart_window_s),
        futile_max=first(options.futile_max, futile_default),
        quarantine_after=first(options.quarantine_after, default.quarantine_after),
        quarantine_s=quarantine_s,
        quarantine_max_s=quarantine_max_s,
        resume=Resume(options.resume),
        straggler_drain=options.stragglers == "drain",
        straggler_window_s=first(options.straggler_window, default.straggler_window_s),
        straggler_ratio=first(options.straggler_ratio, default.straggler_ratio),
    )


def patience(options: RunOptions) -> Patience | None:
    """Return how long a worker may stand still; None: without limit. Raises Complaint."""
    default = Patience()
    floor_s = first(options.hang_floor, default.floor_s)
    ceiling_s = first(options.hang_ceiling, max(default.ceiling_s, floor_s))
    if ceiling_s < floor_s:
        raise Complaint(f"--hang-ceiling {ceiling_s:g} is below --hang-floor, {floor_s:g}.")
    after = options.hang_after or "auto"
    if after == "auto":
        return Patience(floor_s, ceiling_s)
    for name in ("hang_floor", "hang_ceiling"):
        if options.said(name) is Said.COMMAND_LINE:
            raise Complaint(
                f"{flag(name)} bounds what is learned, but --hang-after {after} leaves nothing to."
            )
    if after == "off":
        return None
    try:
        seconds = float(after)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise Complaint(f"--hang-after {after} is neither auto nor off nor a number of seconds above 0.")
    return Patience(fixed_s=seconds)


def _torch_shutdown_s(environ: Mapping[str, str]) -> float | None:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if not text:
        return None
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise Complaint(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT is {text!r}; expected a number of seconds.")
    return float(seconds)


def first(*values: T | None) -> T:
    """Return the first value that is not None."""
    return next(v for v in values if v is not None)
