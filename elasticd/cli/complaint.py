"""What a command says instead of doing its work: one sentence and an exit code."""

from __future__ import annotations

USAGE = 2  # bad usage or bad input
ETCD_UNREACHABLE = 4  # worth another try


class Complaint(Exception):
    """The person can put this right. ``sentence`` says what is wrong and what to do."""

    def __init__(self, sentence: str, code: int = USAGE) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code
