"""The notes that workers wrote for an audit."""

from __future__ import annotations

from pathlib import Path

from elasticd.data.audit import judge
from elasticd.data.auditnotes import FOLDER, lines


def assert_each_sample_is_used_once(folder: Path, samples: int) -> None:
    """Check that the committed steps have used all samples of one epoch, each once. Ranks whose weights
    differ are an error, too."""
    notes = {path.name: lines(path.read_bytes()) for path in (folder / FOLDER).iterdir()}
    verdict = judge(notes)
    assert verdict.findings == ()
    assert [(epoch.used, epoch.over) for epoch in verdict.epochs] == [(samples, True)]
    assert verdict.weights
