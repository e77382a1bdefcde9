"""An error of a command: one sentence and an exit code."""

from __future__ import annotations

USAGE = 2  # bad usage or bad input
ETCD_UNREACHABLE = 4  # a new try may succeed


class CommandError(Exception):
    """An error that the user can fix. ``sentence`` says what is wrong and what to do."""

    def __init__(self, sentence: str, code: int = USAGE) -> None:
        ends = sentence.rstrip(".")
        self.sentence = ends if ends.endswith(("?", "!")) else f"{ends}."
        super().__init__(self.sentence)
        self.code = code
