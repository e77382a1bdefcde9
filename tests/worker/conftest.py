import threading
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticd.worker.world import waits
from elasticd.worker.world.group import NCCL_ENVIRONMENT
from tests.checkpoint.faults import Helper
from tests.worker.crew import Crew, outcome_alone
from tests.worker.jobs import work


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the outcome of the job when nothing happens."""
    return outcome_alone(work, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def savers() -> Iterator[Helper]:
    with Helper("forker.py") as helper:
        yield helper


@pytest.fixture
def new_saver(savers: Helper) -> Callable[[], str]:
    """Return a function that starts a saver, and returns the saver's name. The saver stays, as an agent's
    saver does. It has nothing in memory, like the saver of another node, or of this node after a restart."""
    return lambda: savers.saver(linger_s=None)[0]


@pytest.fixture
def saver(new_saver: Callable[[], str]) -> str:
    return new_saver()


@pytest.fixture
def waits_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process, let waits end with the world. Restore afterwards what a world replaces for good."""
    for name, value in NCCL_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    wait, future, before = dist.Work.wait, dist.Work.get_future, {*threading.enumerate()}
    waits.use_group_timeouts()
    yield
    dist.Work.wait, dist.Work.get_future = wait, future  # type: ignore[method-assign]
    DistributedDataParallel._pre_forward = waits._pre_forward  # type: ignore[method-assign]
    DistributedDataParallel._distributed_broadcast_coalesced = waits._share_buffers  # type: ignore[method-assign]
    waits._Ends.patched = False
    waits._Ends.before = waits._Ends.so_far
    waits._Ends.functional = None
    while waits._Substitute.idle:
        waits._Substitute.idle.pop().calls.put(None)
    for thread in {*threading.enumerate()} - before:
        thread._started.wait()  # type: ignore[attr-defined]  # another thread may just be starting it
        thread.join()
    for name, method in waits._METHODS.items():
        setattr(dist.ProcessGroup, name, method)
