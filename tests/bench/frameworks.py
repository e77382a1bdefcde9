"""Which samples are lost or repeated when a training loses a worker or is resized, for each library with a
loop of its own."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.e2e.conftest import Etcd
from tests.e2e.harness import Cluster
from tests.integrations import jobs
from tests.integrations.jobs import Trained

ROWS = {
    "DDP, batches counted": ("ordinary.py", "plain"),
    "DDP, with worker.rest_of_epoch": ("ordinary.py", "elastic"),
    "Trainer, as it is": ("trainer.py", "plain"),
    "Trainer, with elasticd.integrations": ("trainer.py", "elastic"),
    "Trainer, in place": ("trainer.py", "in_place"),
    "Accelerate, as it is": ("accelerated.py", "plain"),
    "Accelerate, with elasticd.integrations": ("accelerated.py", "elastic"),
    "Accelerate, in place": ("accelerated.py", "in_place"),
    "Lightning, as it is": ("lightened.py", "plain"),
    "Lightning, with elasticd.integrations": ("lightened.py", "elastic"),
    "Lightning, in place": ("lightened.py", "in_place"),
    "Ignite, as it is": ("ignited.py", "plain"),
    "DeepSpeed, with worker.rest_of_epoch": ("deepsped.py", "plain"),
    "torchtitan's checkpoints, with worker.rest_of_epoch": ("titan.py", "plain"),
}
_LIBRARIES = {"ignited.py": "ignite", "deepsped.py": "deepspeed", "titan.py": "torchtitan"}
"""What some programs need that is not in the environment of the tests."""
ACCIDENTS: dict[str, Callable[..., Trained]] = {
    "kill": jobs.killed,
    "resize 2 to 3": partial(jobs.resized, sizes=(2, 3)),
    "resize 3 to 2": partial(jobs.resized, sizes=(3, 2)),
}
ACCUMULATE, EVERY = "1", "4"


def frameworks(only: Sequence[str]) -> Iterator[str]:
    """Yield the rows of a table in Markdown, each as soon as it is known. A cell has the samples that were
    lost and repeated in the committed history, and the steps that were made again."""
    yield f"| | {' | '.join(ACCIDENTS)} |"
    yield "|---" * (1 + len(ACCIDENTS)) + "|"
    etcd = Etcd()
    try:
        for name, program in ROWS.items():
            if only and not name.startswith(tuple(only)):
                continue
            library = _LIBRARIES.get(program[0])
            if library is not None and importlib.util.find_spec(library) is None:
                yield f"| {name} | {' | '.join([f'{library} is not installed'] * len(ACCIDENTS))} |"
            else:
                cells = (_cell(etcd.url, program, met) for met in ACCIDENTS.values())
                yield f"| {name} | {' | '.join(cells)} |"
    finally:
        etcd.close()


def _cell(etcd: str, program: tuple[str, str], met: Callable[..., Trained]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), etcd)
        try:
            output = str(cluster.folder / "output")
            trained = met(cluster, *program, output, ACCUMULATE, EVERY, str(jobs.EPOCHS))
        finally:
            cluster.close(check=False)
    again = trained.ledger.again
    return trained.outcome + (f"; {again} {'step' if again == 1 else 'steps'} again" if again else "")
