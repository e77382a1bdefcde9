"""Decide on warnings about a script that does not do what its users may expect. Each is given once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticd.core.agent.agent_state import Crew
from elasticd.core.page_layout import NOTHING, PageContents, Use
from elasticd.core.reasons import BatchesChanged, OptionWithoutEffect, Reason, TrainingBeganAgain

SEEN_AFTER = 5  # steps after which a script has used every part of the library that it will use
FAR = 20  # a warning needs at least this many repeated steps
# With one of these, a resize keeps the place in the data.
_KEEPS_ITS_PLACE = Use.DATA | Use.CHECKPOINTED | Use.PLACE


@dataclass(frozen=True, slots=True)
class Advice:
    """The observations of the script so far.

    ``uses``: the parts of the library that the script has used, in any round.
    ``asked``: options that need the script to use ``elasticd.worker``, each with the parts that it needs;
    empty once the options were checked. ``trained``: the last round with a step, and its world size.
    ``resized``, ``again``: whether the warning ``BatchesChanged`` or ``TrainingBeganAgain`` was given.
    ``furthest``: the most steps that a worker has made. ``pids``: the processes seen.
    """

    asked: tuple[tuple[str, Use], ...] = ()
    uses: Use = NOTHING
    trained: tuple[int, int] = (0, 0)
    resized: bool = False
    again: bool = False
    furthest: int = 0
    pids: frozenset[int] = frozenset()


def advise(known: Advice, crew: Crew, pages: Iterable[PageContents]) -> tuple[Advice, tuple[Reason, ...]]:
    """Return the observations after the pages of the crew's workers were read, and the warnings to give. In a
    world of several nodes, only the agent with rank 0 warns."""
    pages = [page for page in pages if page.steps]
    if not pages:
        return known, ()
    uses = known.uses
    for page in pages:
        uses |= page.uses
    known = replace(known, uses=uses)
    reasons: list[Reason] = []
    if max(page.steps for page in pages) >= SEEN_AFTER:
        reasons += [OptionWithoutEffect(option, parts) for option, parts in known.asked if not uses & parts]
        known = replace(known, asked=())
    (last, before), size = known.trained, crew.round.world_size
    known = replace(known, trained=(crew.round.number, size))
    resized = last not in (0, crew.round.number) and before != size
    if resized and not known.resized and not uses & _KEEPS_ITS_PLACE:
        reasons.append(BatchesChanged(before, size))
        known = replace(known, resized=True)
    fresh = [page for page in pages if page.pid not in known.pids]
    anew = bool(fresh) and all(page.made == 0 for page in fresh) and not uses & Use.STATE
    if anew and known.furthest >= FAR and not known.again:
        reasons.append(TrainingBeganAgain(known.furthest))
        known = replace(known, again=True)
    furthest = max([known.furthest, *((page.made or 0) + page.steps for page in pages)])
    known = replace(known, furthest=furthest, pids=known.pids | {page.pid for page in fresh})
    return known, tuple(reasons) if crew.member.hosts_store else ()
