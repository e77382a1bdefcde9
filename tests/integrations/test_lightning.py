"""What a fit with Lightning refuses."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _needs_lightning() -> None:
    """Import the library here, not in each process that collects tests."""
    pytest.importorskip("lightning", reason="lightning is not installed")


def test_without_a_loader_it_says_what_to_do(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from elasticd.integrations.lightning import ElasticFit

    trainer = Trainer(
        accelerator="cpu", max_steps=1, callbacks=[ElasticFit(tmp_path, every=1)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"fit with elastic.loader\(loader\)"):
        trainer.fit(BoringModel())
