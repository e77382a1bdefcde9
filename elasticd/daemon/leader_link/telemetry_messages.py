"""The messages of the connections to the leader, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from elasticd.checkpoint.replication.wire import PeerGone
from elasticd.core.facts import NodeTelemetry, Summary
from elasticd.core.ports import Heard
from elasticd.etcd import validity
from elasticd.etcd.names import check_name
from elasticd.telemetry.status import Shown

REQUEST_MAX: Final = 4 << 20  # bytes
ANSWER_MAX: Final = 64 << 20
WHY_MAX: Final = 300  # characters
BATCH_NODES: Final = 256  # the most nodes in one answer


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """The telemetry of an agent."""

    nodes: tuple[NodeTelemetry, ...]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for the telemetry of all nodes, as far as it has changed since this connection's last answer."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The answer to ``Tell``."""

    heard: Heard


class TelemetryBatch(msgspec.Struct, frozen=True, tag="batch"):
    """The answer to ``Ask``. ``more``: the next answer has further nodes."""

    nodes: tuple[NodeTelemetry, ...]
    summary: Summary
    more: bool = False


class InvalidTold(msgspec.Struct, frozen=True, tag="refused"):
    """The answer to a message that is not valid. ``why``: a few words."""

    why: str


class NotLeading(msgspec.Struct, frozen=True, tag="not leading"):
    """The answer of an agent that does not lead, or does not know yet who is registered."""


class _Sender(msgspec.Struct):
    node: str


class _Sent(msgspec.Struct):
    nodes: tuple[_Sender, ...]


class InvalidRequest(ValueError):
    """A message is not valid. The text says why. ``sender``: the node that the message names first; empty if
    it names none."""

    def __init__(self, why: str, sender: str) -> None:
        super().__init__(why)
        self.sender = sender


_REQUESTS: Final = msgspec.json.Decoder(Tell | Ask)
_ANSWERS: Final = msgspec.json.Decoder(Taken | TelemetryBatch | NotLeading | InvalidTold)
_SENT: Final = msgspec.json.Decoder(_Sent)


def encoded(message: Tell | Ask | Taken | TelemetryBatch | NotLeading | InvalidTold) -> bytes:
    return msgspec.json.encode(message)


def request(raw: bytes) -> Tell | Ask:
    """Return the request. Raises InvalidRequest."""
    try:
        found: Tell | Ask = _REQUESTS.decode(raw)
        validity.check(found.nodes if isinstance(found, Tell) else ())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(str(error)[:WHY_MAX], _sender(raw)) from error
    return found


def _sender(raw: bytes) -> str:
    try:
        name = _SENT.decode(raw).nodes[0].node
        check_name(name, "node")
    except (msgspec.DecodeError, ValueError, RecursionError, IndexError):
        return ""
    return name


def answer(raw: bytes) -> Taken | TelemetryBatch | NotLeading | InvalidTold:
    """Return the answer. Raises PeerGone if it is none."""
    try:
        found: Taken | TelemetryBatch | NotLeading | InvalidTold = _ANSWERS.decode(raw)
        match found:
            case Taken(heard):
                validity.check(heard)
            case TelemetryBatch(nodes, summary):
                validity.check((nodes, summary))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerGone(f"an invalid message: {error}") from error
    return found


def as_facts(told: Mapping[str, NodeTelemetry], summary: Summary | None) -> dict[str, Shown]:
    """Return what the leader knows as facts by key, for ``telemetry.status``."""
    facts: dict[str, Shown] = {"summary": summary} if summary is not None else {}
    for name, its in told.items():
        if its.progress is not None:
            facts[f"progress/{name}"] = its.progress
        if its.ledger is not None:
            facts[f"ledger/{name}"] = its.ledger
    return facts
