"""The error of an agent that cannot start."""

from __future__ import annotations


class CannotStart(Exception):
    """The input or the machine does not let the agent start. The message is one sentence that says what to
    do. The exit code is 2."""
