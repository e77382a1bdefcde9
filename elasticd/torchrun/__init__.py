"""``torchrun --rdzv-backend etcd-v3``: elasticd's rendezvous for people who keep torchrun.

The entry point of the group ``torchrun.handlers``. Torchrun loads it at every start, whatever the
back end it was asked for, so nothing heavy is imported before a handler is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousParameters,
    )

BACKEND = "etcd-v3"


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun calls to learn how a handler of this back end is made."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for one node. Raises ValueError, in one sentence, for parameters that are wrong."""
    from elasticd.torchrun.handler import EtcdV3RendezvousHandler
    from elasticd.torchrun.settings import settings_from

    return EtcdV3RendezvousHandler(settings_from(params))
