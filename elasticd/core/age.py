"""The age of a training state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Age:
    """The age of a worker's training state.

    ``step``: the last committed step. ``agreed``: the round in which all workers last agreed on the state
    before that step. ``agreed`` counts first: a worker that was left behind may have committed a step that
    the others made again since.
    """

    agreed: int
    step: int

    def may_share_state_with(self, newest: Age) -> bool:
        """Whether workers of these two ages may have parts of one sharded state.

        Within a round, workers are at most one commit apart. A round may also end while its workers receive
        their parts. Then only some workers have agreed on the state, but none has committed a step, and all
        have the parts of the round before.
        """
        return self.agreed == newest.agreed or self.step == newest.step

    def is_behind(self, round: int, step: int) -> bool:
        """Whether a state that was kept in ``round``, after ``step``, is newer.

        Both must be larger: the round alone proves nothing, since a checkpoint folder that outlives jobs may
        hold higher round numbers.
        """
        return round > self.agreed and step > self.step
