from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.crew import Crew
from tests.worker.jobs import lone, reads


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the job comes to when nothing happens, in a process of its own that has no agent."""
    folder: Path = tmp_path_factory.mktemp("undisturbed")
    with Crew() as crew:
        crew.start(lone, str(folder))
        crew.all_ended()
        [hand] = crew.hands
        assert hand.status == 0, (folder / "alone.err").read_text()
    [outcome] = reads(folder, "alone", "outcome")
    return outcome
