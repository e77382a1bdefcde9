"""The world as a mesh of units."""

from __future__ import annotations

import pytest

from elasticd import worker


@pytest.mark.parametrize(
    ("unit", "of_the_job", "sentence"),
    [
        (3, "1", "a world of 4 workers has no whole units of 3; give `elasticd run --unit 3`"),
        (None, "3", "a world of 4 workers has no whole units of 3; give `elasticd run --unit 3`"),
        (0, "1", "unit is 0: give a number that is 1 or more"),
    ],
)
def test_a_world_that_is_no_multiple_of_the_unit_is_refused(
    unit: int | None, of_the_job: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ELASTICD_UNIT", of_the_job)
    with pytest.raises(ValueError, match=sentence):
        worker.mesh(unit)
