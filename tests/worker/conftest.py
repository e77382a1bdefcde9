from collections.abc import Callable, Iterator

import pytest

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
