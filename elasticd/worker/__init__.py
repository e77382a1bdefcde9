"""The library for training scripts. A worker keeps its process, its model and every committed step while
other workers die, are replaced, join and leave::

    from elasticd import worker

    @worker.run                                       # called again after each change of world
    def train(state):
        for step in state.steps():                    # one global batch each, in any world
            for batch in step:                        # this worker's share of the batch
                step.backward(loss_of(state.model, batch))
            optimizer.step()
            optimizer.zero_grad()
            state.commit()                            # training never goes back behind it

    data = worker.Data(dataset, global_batch=256, seed=0, epochs=10)
    train(worker.State(model=model, optimizer=optimizer, data=data))

Under ``elasticd run`` the script recovers in place. Under torchrun or plain ``python`` the same script runs
in the world that it finds.
"""

from typing import TYPE_CHECKING, Any

from elasticd.worker.commit.shared import Unlike
from elasticd.worker.data import Data, DataChanged
from elasticd.worker.joining.exchange import StateLost
from elasticd.worker.report import NotFinite, checkpointed, report
from elasticd.worker.rest_of_epoch import rest_of_epoch
from elasticd.worker.run import run
from elasticd.worker.state import State
from elasticd.worker.steps import Epoch
from elasticd.worker.values.contents import Local
from elasticd.worker.world.group import WorldChanged, device, mesh, rank, world_size

if TYPE_CHECKING:
    from elasticd.worker.checkpoints import Checkpoints, NoCheckpoint

__all__ = [
    "Checkpoints",
    "Data",
    "DataChanged",
    "Epoch",
    "Local",
    "NoCheckpoint",
    "NotFinite",
    "State",
    "StateLost",
    "Unlike",
    "WorldChanged",
    "checkpointed",
    "device",
    "mesh",
    "rank",
    "report",
    "rest_of_epoch",
    "run",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Import Checkpoints on first use: it needs parts of torch that nothing else here needs."""
    if name in ("Checkpoints", "NoCheckpoint"):
        from elasticd.worker import checkpoints

        return getattr(checkpoints, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
