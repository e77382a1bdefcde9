"""The agent's saver: the agent's side, the saver process, and their records in etcd."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

import msgspec

from elasticd.core.facts import SaverAddress
from elasticd.etcd.access import EtcdAccess

VARIABLE: Final = "ELASTICD_SAVER_OPTIONS"  # in the environment of the saver process


@dataclass(frozen=True, slots=True)
class SaverOptions:
    """What an agent tells its saver process. ``access`` has no password here: it must not be in an
    environment.

    ``agent``: the agent's pid. ``bytes_s``: the most bytes that the saver writes per second while training
    does not wait for it. ``address``: the saver's own address, in jobs that replicate.
    """

    access: EtcdAccess
    job: str
    agent: int
    bytes_s: int | None = None
    address: SaverAddress | None = None

    def encoded(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def decoded(cls, text: str) -> Self:
        return msgspec.convert(json.loads(text), cls, dec_hook=lambda kind, value: kind(value))
