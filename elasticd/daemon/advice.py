"""Tells once, in words, what a script does that comes out otherwise than people may think."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elasticd.core.facts import Resume
from elasticd.core.page import Told, Use
from elasticd.core.reasons import BatchesChanged, BeganAgain, Reason, WithoutEffect
from elasticd.daemon.config import RunConfig
from elasticd.daemon.driver import Driver

LOOK_S = 1.0
SEEN_AFTER = 5  # steps: by then a script has made what it trains with
FAR = 20  # steps, after which it matters that they are made again
_BY_ITSELF = Use.DATA | Use.CHECKPOINTED  # a script with either does not lose count as it is resized


class Advice:
    """``routine(now)`` looks at the workers and returns when it is to look again. ``hear``: what the workers
    of a round tell, by slot. Of a world of several nodes, the one with rank 0 speaks."""

    def __init__(
        self,
        config: RunConfig,
        driver: Driver,
        hear: Callable[[int], Mapping[int, Told]],
        say: Callable[[Reason], None],
    ) -> None:
        self._driver = driver
        self._hear = hear
        self._say = say
        self._asked = asked(config)
        self._trained = (0, 0)  # the last round in which steps were made, and its size
        self._resized = self._again = False
        self._furthest = 0
        self._pids: set[int] = set()

    def routine(self, now: float) -> float:
        crew = self._driver.state.crew
        if crew is not None:
            round = crew.round
            told = [t for t in self._hear(round.number).values() if t.steps]
            if told:
                self._look(round.number, round.world_size, crew.member.base_rank == 0, told)
        return now + LOOK_S

    def _look(self, number: int, size: int, first: bool, told: list[Told]) -> None:
        uses = Use(0)
        for each in told:
            uses |= each.uses
        if self._asked and max(t.steps for t in told) >= SEEN_AFTER:
            if first:
                for option, wants in self._asked:
                    if not uses & wants:
                        self._say(WithoutEffect(option, wants))
            self._asked = ()
        last, before = self._trained
        self._trained = number, size
        if last not in (0, number) and before != size and not self._resized and not uses & _BY_ITSELF:
            self._resized = True
            if first:
                self._say(BatchesChanged(before, size))
        self._see_how_far(first, uses, told)

    def _see_how_far(self, first: bool, uses: Use, told: list[Told]) -> None:
        fresh = [t for t in told if t.pid not in self._pids]
        self._pids |= {t.pid for t in fresh}
        anew = bool(fresh) and all(t.made == 0 for t in fresh) and not uses & Use.STATE
        if anew and self._furthest >= FAR and not self._again:
            self._again = True
            if first:
                self._say(BeganAgain(self._furthest))
        self._furthest = max([self._furthest, *((t.made or 0) + t.steps for t in told)])


def asked(config: RunConfig) -> tuple[tuple[str, Use], ...]:
    """The options that were given and do nothing by themselves, with what in a script they are for."""
    given = {
        "--checkpoints": ("ELASTICD_CHECKPOINTS" in config.env, Use.CHECKPOINTS),
        "--checkpoint-every": ("ELASTICD_CHECKPOINT_EVERY" in config.env, Use.CHECKPOINTS),
        "--checkpoint-rate": (config.checkpoint_rate is not None, Use.CHECKPOINTS),
        "--replicate": (config.replicate > 0, Use.CHECKPOINTS),
        "--resume": (config.policy.resume is Resume.REQUIRED, Use.CHECKPOINTS),
        "--audit": (config.audit is not None, Use.DATA),
        "--spares": (config.spares > 0, Use.STATE),
    }
    return tuple((option, wants) for option, (is_given, wants) in given.items() if is_given)
