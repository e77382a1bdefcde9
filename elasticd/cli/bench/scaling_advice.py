"""Advice for a script that does not scale, from what its steps spend their time on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from elasticd.cli.bench.scaling import WorldMeasured, efficiency
from elasticd.telemetry.describe import count, listing

NOTABLE = 0.15  # the share of a step that is worth advice
ENOUGH = 0.9  # the efficiency of a script that scales well
# A larger batch makes communication a smaller share of a step. If the batch had to grow more than this many
# times to get the share down to 1 - ENOUGH, the communication is at fault, not the batch.
BATCH_FACTOR_MAX = 8.0
FEW_BYTES = 1 << 20  # with fewer bytes of gradients, communication is slow for another reason than the bytes
_MEGABYTE = 1e6


class ScalingFault(StrEnum):
    LOADER = "loader"
    SMALL_BATCH = "small_batch"
    COMMUNICATION = "communication"
    SLOW_WORKER = "slow_worker"
    UNEVEN_WORK = "uneven_work"
    NO_CPU = "no_cpu"
    SLOWER_COMPUTE = "slower_compute"


@dataclass(frozen=True, slots=True)
class ScalingAdvice:
    """``sentence``: what is wrong, and what to do, without a full stop."""

    fault: ScalingFault
    sentence: str


def scaling_advice(one: WorldMeasured, baseline: WorldMeasured, cores: int) -> tuple[ScalingAdvice, ...]:
    """Return advice for the script with ``one.world`` workers, at most one piece for each fault.
    ``baseline``: the same launcher with the fewest workers."""
    given: dict[ScalingFault, ScalingAdvice] = {}
    for advice in (
        *_loader(one),
        *_slow_workers(one),
        *_communication(one),
        *_compute(one, baseline),
        *_no_cpu(one, cores),
    ):
        given.setdefault(advice.fault, advice)
    return tuple(given.values())


def _loader(one: WorldMeasured) -> Iterator[ScalingAdvice]:
    share = one.costs.share(one.costs.data_s)
    if share >= NOTABLE:
        yield ScalingAdvice(
            ScalingFault.LOADER,
            f"the loader holds up training for {share:.0%} of a step: give DataLoader more num_workers, or "
            "do less for each sample",
        )


def _slow_workers(one: WorldMeasured) -> Iterator[ScalingAdvice]:
    if one.slow:
        ranks = listing([str(rank) for rank in one.slow])
        ratio = max(one.slow.values())
        others = one.world - len(one.slow)
        share = one.costs.share(one.costs.waiting_s * one.world / others)
        needs = "needs" if len(one.slow) == 1 else "need up to"
        yield ScalingAdvice(
            ScalingFault.SLOW_WORKER,
            f"rank {ranks} {needs} {ratio:.2f} times as long for a step as the other ranks, which wait for "
            f"{min(share, 1.0):.0%} of a step: look at what else runs beside that rank, and at its device",
        )
        return
    share = one.costs.share(one.costs.waiting_s)
    if share >= NOTABLE:
        yield ScalingAdvice(
            ScalingFault.UNEVEN_WORK,
            f"workers wait for each other for {share:.0%} of a step, and not always for the same one: give "
            "them batches that take equally long, such as samples of similar length, or CPUs of their own",
        )


def _communication(one: WorldMeasured) -> Iterator[ScalingAdvice]:
    costs = one.costs
    share = costs.share(costs.communication_s)
    if share < NOTABLE:
        return
    # A larger batch computes for longer, and sends as many gradients.
    factor = costs.communication_s * ENOUGH / (1 - ENOUGH) / max(costs.compute_s, 1e-9)
    if factor <= BATCH_FACTOR_MAX or 0 < one.parameter_bytes < FEW_BYTES:
        times = f"about {factor:.0f} times as large" if factor <= BATCH_FACTOR_MAX else "many times as large"
        yield ScalingAdvice(
            ScalingFault.SMALL_BATCH,
            f"a step waits {_ms(costs.communication_s)} for communication, and computes for only "
            f"{_ms(costs.compute_s)}: give each worker a batch {times}, "
            "or accumulate gradients over as many batches (DDP's no_sync)",
        )
        return
    of = f" (gradients: {one.parameter_bytes / _MEGABYTE:.1f} MB)" if one.parameter_bytes else ""
    yield ScalingAdvice(
        ScalingFault.COMMUNICATION,
        f"a step waits {_ms(costs.communication_s)} for communication{of}, and computes for "
        f"{_ms(costs.compute_s)}: send fewer bytes (DDP's bf16_compress_hook, accumulation, local SGD), or "
        "use a faster network or backend",
    )


def _compute(one: WorldMeasured, baseline: WorldMeasured) -> Iterator[ScalingAdvice]:
    """Advise on computing that takes longer than with fewer workers, in all ranks."""
    smaller = one.batch / baseline.batch if baseline.batch else 1.0
    more_s = one.costs.compute_s - baseline.costs.compute_s * smaller
    share = one.costs.share(more_s)
    if one.slow or share < NOTABLE or efficiency(one, baseline) >= ENOUGH:
        return
    if smaller < ENOUGH:
        yield ScalingAdvice(
            ScalingFault.SMALL_BATCH,
            f"a worker has {one.batch:.3g} samples a step, {baseline.batch:.3g} with "
            f"{count(baseline.world, 'worker')}, but computes for {_ms(one.costs.compute_s)} instead of "
            f"{_ms(baseline.costs.compute_s)}: a larger global batch keeps more workers busy",
        )
    else:
        ratio = one.costs.compute_s / max(baseline.costs.compute_s * smaller, 1e-9)
        yield ScalingAdvice(
            ScalingFault.SLOWER_COMPUTE,
            f"the same computing takes {ratio:.2f} times as long as with {count(baseline.world, 'worker')}: "
            "the workers share the machine's memory, caches, or power",
        )


def _no_cpu(one: WorldMeasured, cores: int) -> Iterator[ScalingAdvice]:
    share = one.costs.share(one.costs.no_cpu_s)
    if share >= NOTABLE:
        yield ScalingAdvice(
            ScalingFault.NO_CPU,
            f"workers are ready to run but have no CPU for {share:.0%} of a step: this machine has "
            f"{count(cores, 'core')} for {count(one.world, 'worker')}, their loaders and all else that runs",
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
