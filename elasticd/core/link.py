"""What a worker that recovers in place and its agent say to each other: one JSON object a line.

They meet at an abstract Unix stream socket whose name, without the leading NUL, is the worker's
``ELASTICD_LINK``. The agent listens; the worker connects when it first enters its run function.

    worker                         agent
    Hello, Waiting(round 0)   ->
                              <-   Enter(round n)
    Entered(round n)          ->
                              <-   Leave(round n)
    Waiting(round n)          ->
                              <-   Enter(round m > n)
    ...
    Broken(round m)           ->
                              <-   Leave(round m)
    ...
    Done(round l)             ->

A script that keeps to torchrun's ways says no Hello, but perhaps, each time it has written a checkpoint,
Checkpointed. It is held until the agent hangs up, or says by Leave that it is to end; then it may go on
to its end. To those that have said Hello nothing is answered.

A worker whose group breaks is told so by Leave, as a rule: another has ended, and its agent knows. Where
it is not, it says Broken. The end of the stream is the end of whoever was there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from elasticd.core.age import Age

VERSION = 1
ADDRESS = "ELASTICD_LINK"
HANDOVER = "ELASTICD_HANDOVER"  # set in the environment of a round that only passes the state on
LINE_BYTES_MAX = 1 << 20


class Source(StrEnum):
    """Where a worker that enters a round has the training's state from."""

    SURVIVOR = "survivor"  # itself, or another worker that trained before
    MEMORY = "memory"  # of this node, where the saver keeps what was handed over
    PEER = "peer"  # the same, and some of it of another node
    DISK = "disk"  # the newest checkpoint that is whole
    SCRIPT = "script"  # what the script starts from, or restores


class LinkError(ValueError):
    """What the other end sent is not of this protocol; says what it was."""


class Holds(StrEnum):
    """What a waiting worker has of the training's state."""

    NONE = "none"  # nothing but what its script starts from
    WHOLE = "whole"  # the step that it last committed
    TORN = "torn"  # an optimizer's step that it cannot finish or undo


@dataclass(frozen=True, slots=True)
class Hello:
    """A process has come to its run function. ``v``: the version of the protocol that it speaks."""

    pid: int
    v: int = VERSION


@dataclass(frozen=True, slots=True)
class Waiting:
    """It acts in no round (``round``: the last one, 0 if there was none) and waits for the next.
    ``step``: the last that it committed; ``agreed``: see ``Age``."""

    round: int
    step: int
    state: Holds
    agreed: int = 0

    @property
    def age(self) -> Age | None:
        """Of the state that it could bring."""
        return Age(self.agreed, self.step) if self.state is Holds.WHOLE else None


@dataclass(frozen=True, slots=True)
class Entered:
    """It has joined the group and has the state, and calls the user's function. What that took.
    ``batch``: samples of a batch that grows with the world, and what it multiplies learning rates by
    (``rates``); 0 where it does not grow."""

    round: int
    step: int
    group_s: float
    state_s: float
    batch: int = 0
    rates: float = 1.0
    source: Source = Source.SCRIPT


@dataclass(frozen=True, slots=True)
class Done:
    """The run function returned in every worker of the round; what follows is the script's end."""

    round: int


@dataclass(frozen=True, slots=True)
class Broken:
    """It can do nothing more in the round, and waits to be told to leave; or, if it ``fails``, an exception
    of its own ends it. ``why``: what it ran into, for people."""

    round: int
    fails: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The script has written a checkpoint of its own, ``path``, and it is whole."""

    path: str


@dataclass(frozen=True, slots=True)
class Enter:
    """Take part in the round. ``env`` replaces those variables of the worker's environment."""

    round: int
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Leave:
    """The round closes. ``planned``: leave it at a commit that all its workers agree on; otherwise
    at once, in the middle of whatever it is doing. A planned leave may be followed by the other.
    ``going``: this worker will be in no later round, and what it has in memory is lost with it."""

    round: int
    planned: bool
    going: bool = False


FromWorker = Hello | Waiting | Entered | Broken | Done | Checkpointed
FromAgent = Enter | Leave
Message = FromWorker | FromAgent


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return json.dumps({"is": type(message).__name__.lower(), **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises LinkError. Fields that this version does not know are passed over."""
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    match said:
        case {"is": "hello", "pid": int(pid), "v": int(v)}:
            return Hello(pid, v)
        case {
            "is": "waiting",
            "round": int(n),
            "step": int(step),
            "state": str(state),
            "agreed": int(agreed),
        } if state in set(Holds):
            return Waiting(n, step, Holds(state), agreed)
        case {
            "is": "entered",
            "round": int(n),
            "step": int(step),
            "group_s": float(group_s) | int(group_s),
            "state_s": float(state_s) | int(state_s),
        } if isinstance(said.get("batch", 0), int) and isinstance(said.get("rates", 1.0), float | int):
            grown = said.get("batch", 0), float(said.get("rates", 1.0))
            source = said.get("source", Source.SCRIPT)
            if source in set(Source):
                return Entered(n, step, float(group_s), float(state_s), *grown, Source(source))
        case {"is": "done", "round": int(n)}:
            return Done(n)
        case {"is": "broken", "round": int(n), "fails": bool(fails), "why": str(why)}:
            return Broken(n, fails, why)
        case {"is": "checkpointed", "path": str(path)}:
            return Checkpointed(path)
        case {"is": "enter", "round": int(n), "env": dict(env)} if all(
            isinstance(v, str) for v in env.values()
        ):
            return Enter(n, env)
        case {"is": "leave", "round": int(n), "planned": bool(planned), **more}:
            return Leave(n, planned, more.get("going") is True)
    raise LinkError(f"not a message of the link between worker and agent: {bytes(line[:200])!r}")


class Lines:
    """Makes messages of the bytes of a stream, however they were cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that ``data`` completes. Raises LinkError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise LinkError(f"a line of the link is longer than {LINE_BYTES_MAX} bytes")
        return map(decode, lines)
