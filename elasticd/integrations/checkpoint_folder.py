"""A folder of checkpoints, each of which is whole or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from elasticd import worker

_STEP: Final = "step-"  # begins the name of a checkpoint
_UNFINISHED: Final = ".unfinished"


class CheckpointFolder:
    """The checkpoints of a training: a file or a folder ``step-N`` for the N-th step, with ``suffix``.

    All nodes share the folder. The newest ``last`` checkpoints are kept. ``.unfinished`` ends the name of one
    that is being written. The next save removes those that were never finished.
    """

    def __init__(self, folder: str | os.PathLike[str], *, last: int, suffix: str = "") -> None:
        if last < 1:
            raise ValueError(f"last={last}: keep at least the newest checkpoint")
        self._folder, self._last, self._suffix = Path(folder), last, suffix

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint that this node sees; None if there is none."""
        return next(reversed(self._all()), None)

    def newest_on_all_ranks(self, gather: Callable[[int], Sequence[int]]) -> Path | None:
        """Return the newest checkpoint. All ranks call it. ``gather``: returns the numbers of all ranks.
        Raises ValueError if the ranks find different ones."""
        newest = self.newest()
        steps = sorted({*gather(-1 if newest is None else self._step_of(newest))})
        if len(steps) > 1:
            found = ["none" if step < 0 else f"the one of step {step}" for step in steps]
            raise ValueError(
                f"the ranks find different newest checkpoints in {self._folder} ({', '.join(found)}): give a "
                "folder that all nodes share"
            )
        return newest

    def save(
        self, step: int, write: Callable[[Path], object], *, is_main: bool, barrier: Callable[[], object]
    ) -> None:
        """Save the checkpoint of a step. All ranks call it. ``write``: writes this rank's part to a path.
        ``is_main``: true in one rank. ``barrier``: returns once all ranks have called it."""
        whole = self._folder / f"{_STEP}{step}{self._suffix}"
        unfinished = whole.with_name(f"{whole.name}{_UNFINISHED}")
        if is_main:
            for left in self._folder.glob(f"{_STEP}*{self._suffix}{_UNFINISHED}"):
                _remove(left)
        barrier()
        write(unfinished)
        barrier()
        if is_main:
            if whole.is_dir():  # the same step, saved before: removing a folder takes time
                before = whole.with_name(f"{_STEP}{step}-before{self._suffix}{_UNFINISHED}")
                whole.rename(before)
                unfinished.rename(whole)
                _remove(before)
            else:
                unfinished.replace(whole)
            for old in self._all()[: -self._last]:
                _remove(old)
            worker.checkpointed(whole)
        barrier()

    def _all(self) -> list[Path]:
        """Return the whole checkpoints, the newest last."""
        found = (path for path in self._folder.glob(f"{_STEP}*") if self._step_of(path) >= 0)
        return sorted(found, key=self._step_of)

    def _step_of(self, path: Path) -> int:
        """Return the step of a whole checkpoint; -1 for another path."""
        number = path.name.removeprefix(_STEP).removesuffix(self._suffix)
        is_whole = path.name == f"{_STEP}{number}{self._suffix}" and number.isdecimal()
        return int(number) if is_whole else -1


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
