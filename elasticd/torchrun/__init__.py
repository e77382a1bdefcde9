"""``torchrun --rdzv-backend etcd-v3``: elasticd's rendezvous for plain torchrun.

This is the entry point of the group ``torchrun.handlers``. Torchrun loads the module at every start, for
every back end, so slow imports wait until a handler is created.
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
    """Return the function that creates a handler. Torchrun calls this."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Return a handler for one node. Raises ValueError, with one sentence, if a parameter is wrong."""
    from elasticd.torchrun.handler import EtcdV3RendezvousHandler
    from elasticd.torchrun.settings import settings_from

    return EtcdV3RendezvousHandler(settings_from(params))
