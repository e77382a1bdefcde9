"""The length of an outage: from the event that ended a round to the first step of a later round. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticd.core.facts import Cause, Phase, Round


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery. ``detect_s``: from the fault to the decision to end the round; None if the end was
    planned. ``recover_s``: from the fault, or from a planned decision, to the first step."""

    cause: Cause
    detect_s: float | None
    recover_s: float


@dataclass(frozen=True, slots=True)
class Outage:
    """The present outage, if there is one. Times are seconds since the epoch.

    ``number``: the newest round seen live. ``last_step_at``: the last step of the round before, 0 for none.
    """

    number: int = 0
    stepped: bool = False
    last_step_at: float = 0.0
    cause: Cause | None = None
    decided_at: float = 0.0
    planned: bool = False
    fault_at: float | None = None

    def see(self, round: Round, last_step_at: float) -> Outage:
        """Return the outage after the round has changed. ``last_step_at``: the last step of this node's
        workers in the last live round, 0 for none."""
        if round.number < self.number:
            return self
        now = self
        if (
            round.number == self.number
            and round.phase is not Phase.LIVE
            and now.cause is None
            and now.stepped
        ):
            now = replace(
                now,
                cause=round.next_cause,
                decided_at=round.since,
                planned=round.planned,
                last_step_at=last_step_at,
            )
        if round.phase is Phase.LIVE and round.number > self.number:
            if now.cause is None and now.stepped:  # the round before closed unseen, or in the same write
                now = replace(now, cause=round.cause, decided_at=round.since, last_step_at=last_step_at)
            now = replace(now, number=round.number, stepped=False)
            if now.cause is not None and now.fault_at is None:
                now = replace(now, fault_at=_fault(now, round))
        return now

    def first_step(self, at: float) -> tuple[Outage, Recovery | None]:
        """Note the first step of the live round, made at ``at``. Return the recovery that it ends, if any."""
        if self.stepped:
            return self, None
        after = Outage(self.number, stepped=True)
        if self.cause is None or self.fault_at is None:
            return after, None
        detect_s = None if self.planned else max(0.0, self.decided_at - self.fault_at)
        return after, Recovery(self.cause, detect_s, max(0.0, at - self.fault_at))


def _fault(still: Outage, formed: Round) -> float:
    """Return the start of the outage: the worker's exit if an exit caused it, else the last step."""
    if still.planned:
        return still.decided_at
    failure = formed.failure
    since = still.last_step_at or still.decided_at
    if still.cause is Cause.WORKER_FAILED and failure is not None and failure.exit.at >= since - 1.0:
        return min(failure.exit.at, still.decided_at)
    return min(since, still.decided_at)
