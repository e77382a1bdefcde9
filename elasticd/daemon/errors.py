"""What keeps an agent from starting."""

from __future__ import annotations


class CannotStart(Exception):
    """The input or the machine does not allow it. Its text is one sentence for a person, who can
    put it right; the exit code is 2."""
