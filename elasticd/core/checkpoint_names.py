"""The names of checkpoint folders. They become paths, so they are checked before any use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

WORLD_MAX: Final = 1 << 20  # workers that save together; a larger number must be an error
_NAME: Final = re.compile(
    r"step-(?P<step>\d{10,19})-r(?P<round>\d{1,19})-(?P<token>[0-9a-f]{8})\.(?P<seq>\d{1,19})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Folder:
    """The parts of a checkpoint folder's name."""

    step: int
    round: int
    token: str
    seq: int

    @property
    def age(self) -> tuple[int, int, int]:
        """Round, step and number of the save: of the saves of one job, a newer one has a larger age. The same
        workers may save a step again, as after an evaluation."""
        return self.round, self.step, self.seq


def folder_name(step: int, round: int, token: str, seq: int) -> str:
    """Return a name that is never used again: the workers that save together draw the token and count their
    saves."""
    return f"step-{step:010d}-r{round}-{token}.{seq}"


def parse_folder(name: str) -> Folder | None:
    """Return the parts of a folder's name; None if the folder is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Folder(int(match["step"]), int(match["round"]), match["token"], int(match["seq"]))


def folder_of(name: str) -> Folder:
    """Return the parts of a checkpoint's name. Raises ValueError."""
    there = parse_folder(name)
    if there is None:
        raise ValueError(f"{name!r} is no checkpoint's name")
    return there


def age_of(name: str) -> tuple[int, int, int]:
    """Return ``Folder.age`` of a checkpoint with this name. Raises ValueError."""
    return folder_of(name).age


def require_name(name: str, step: int, round: int, world: int) -> None:
    """Raise ValueError unless ``world`` workers may have saved this step of this round under that name."""
    there = folder_of(name)
    if (there.step, there.round) != (step, round):
        raise ValueError(f"{name} is not of step {step} and round {round}")
    if not 0 < world <= WORLD_MAX:
        raise ValueError(f"{name} cannot have been saved by {world} workers")
