"""Decide on warnings about a script that works otherwise than its users may think. Each is given once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticd.core.agent.agent_state import Crew
from elasticd.core.page_layout import PageContents, Use
from elasticd.core.reasons import BatchesChanged, BeganAgain, Reason, WithoutEffect

SEEN_AFTER = 5  # steps: by then a script has used all parts of the library that it trains with
FAR = 20  # steps: fewer repeated steps deserve no warning
_BY_ITSELF = (
    Use.DATA | Use.CHECKPOINTED
)  # a script that uses one of these resizes without losing its place in the data


@dataclass(frozen=True, slots=True)
class Advice:
    """What was seen of the script so far.

    ``asked``: the options that do nothing by themselves, each with the parts of ``elasticd.worker`` that it
    is for; empty once they were checked. ``trained``: the last round with a step, and its world size.
    ``resized``, ``again``: whether that warning was given. ``furthest``: the most steps that a worker has
    made. ``pids``: the processes seen.
    """

    asked: tuple[tuple[str, Use], ...] = ()
    trained: tuple[int, int] = (0, 0)
    resized: bool = False
    again: bool = False
    furthest: int = 0
    pids: frozenset[int] = frozenset()


def advise(known: Advice, crew: Crew, pages: Iterable[PageContents]) -> tuple[Advice, tuple[Reason, ...]]:
    """Return what is known after the pages of the crew were read, and the warnings. In a world of several
    nodes, only the agent with rank 0 warns."""
    pages = [t for t in pages if t.steps]
    if not pages:
        return known, ()
    uses = Use(0)
    for each in pages:
        uses |= each.uses
    reasons: list[Reason] = []
    if max(t.steps for t in pages) >= SEEN_AFTER:
        reasons += [WithoutEffect(option, parts) for option, parts in known.asked if not uses & parts]
        known = replace(known, asked=())
    (last, before), size = known.trained, crew.round.world_size
    known = replace(known, trained=(crew.round.number, size))
    resized = last not in (0, crew.round.number) and before != size
    if resized and not known.resized and not uses & _BY_ITSELF:
        reasons.append(BatchesChanged(before, size))
        known = replace(known, resized=True)
    fresh = [t for t in pages if t.pid not in known.pids]
    anew = bool(fresh) and all(t.made == 0 for t in fresh) and not uses & Use.STATE
    if anew and known.furthest >= FAR and not known.again:
        reasons.append(BeganAgain(known.furthest))
        known = replace(known, again=True)
    furthest = max([known.furthest, *((t.made or 0) + t.steps for t in pages)])
    known = replace(known, furthest=furthest, pids=known.pids | {t.pid for t in fresh})
    return known, tuple(reasons) if crew.member.base_rank == 0 else ()
