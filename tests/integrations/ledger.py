"""What a job's notes prove: in which steps samples were lost or repeated."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ledger:
    """The committed history of a job. A step that was made in several rounds counts as made in the last.

    ``made``: by step, the samples of all ranks. ``worlds``: the size of the world of each step. ``again``:
    the number of steps that were made in more than one round.
    """

    made: dict[int, list[int]]
    worlds: dict[int, int]
    again: int

    def epochs(self, samples: int) -> list[list[int]]:
        """Return the samples in the order of their use, cut into epochs of so many samples."""
        used = [sample for step in sorted(self.made) for sample in sorted(self.made[step])]
        return [used[at : at + samples] for at in range(0, len(used), samples)]

    def judge(self, samples: int, epochs: int) -> str:
        """Return what was lost and repeated in so many epochs; "exact" if each sample was used once in each
        epoch."""
        lost = repeated = 0
        found = self.epochs(samples)
        if len(found) == epochs and all(sorted(epoch) == list(range(samples)) for epoch in found):
            return "exact"
        counts = Counter(sample for epoch in found for sample in epoch)
        for sample in range(samples):
            lost += max(0, epochs - counts[sample])
            repeated += max(0, counts[sample] - epochs)
        return f"{lost} lost, {repeated} repeated of {samples * epochs}"


def read(folder: Path) -> Ledger:
    """Read the notes of all workers of a job."""
    rounds: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    worlds: dict[int, int] = {}
    for notes in folder.glob("notes-*"):
        for line in notes.read_text().splitlines():
            round, step, _, world, numbers = line.split()
            rounds[int(step)][int(round)] += map(int, numbers.split(","))
            worlds[int(round)] = int(world)
    made = {step: by[max(by)] for step, by in rounds.items()}
    return Ledger(
        made,
        {step: worlds[max(by)] for step, by in rounds.items()},
        sum(len(by) > 1 for by in rounds.values()),
    )
