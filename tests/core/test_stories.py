"""Stories of jobs: what happens, and what the agents and the leader do about it. ``pytest
tests/core/test_stories.py --record`` writes the transcripts again; review them as a diff."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

from tests.core.story import play

STORIES = sorted((Path(__file__).parent / "stories").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_story_goes_as_recorded(path: Path, request: pytest.FixtureRequest) -> None:
    recorded = path.read_text("utf-8")
    played = play(recorded)
    if request.config.getoption("--record", default=False):
        path.write_text(played, "utf-8")
    elif played != recorded:
        diff = unified_diff(
            recorded.splitlines(), played.splitlines(), "as recorded", "as it goes now", lineterm=""
        )
        again = f"if this is how it should go: pytest tests/core/test_stories.py -k {path.stem} --record"
        pytest.fail("\n".join([path.name, *diff, again]), pytrace=False)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_says_what_it_shows(path: Path) -> None:
    title, about, *_ = path.read_text("utf-8").splitlines()
    assert title.startswith("# ") and about.startswith("# ")
