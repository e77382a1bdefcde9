"""A fit with Lightning: what it refuses, and where it continues after a world has ended at any point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
SAMPLES, EPOCHS, STEPS = 10, 2, 3  # STEPS: the steps of an epoch, with batches of 2, and a largest world of 2


@pytest.fixture(autouse=True)
def _needs_lightning() -> None:
    """Import the library here, not in each process that collects tests."""
    pytest.importorskip("lightning", reason="lightning is not installed")


class Training:
    """A training whose process is in one world after another.

    ``log``: what was committed, in order. ``commits``: the number of commits. ``ends``: called with the name
    of each point that the training passes; it may end the world there.
    """

    def __init__(self, folder: Path, ends: Callable[[str], None]) -> None:
        from elasticd.integrations.in_place import LoopProgress
        from elasticd.worker.commit.copies import LastCommit, Undo
        from elasticd.worker.values.contents import Contents

        torch.manual_seed(0)
        self.log: list[Any] = []
        self.commits = self._kept = 0
        self.model = _module(self.log, ends)
        self._folder, self._ends, self._progress = folder, ends, LoopProgress()
        self._state = _state(self._commit)
        contents = Contents({"model": self.model, "progress": self._progress})
        self._last, self._undo = LastCommit(contents), Undo(contents.parameters(), {})
        self._undo.want(range(len(contents.parameters())), ())
        self._keep()

    def _keep(self) -> None:
        self._last.keep()
        self._undo.keep()
        self._kept = len(self.log)

    def _commit(self) -> None:
        self._keep()
        self.commits += 1
        self._ends("commit")

    def enter(self) -> bool:
        """Train in a world. Return whether the training is over."""
        from lightning.pytorch import Trainer

        from elasticd.integrations.in_place import Present
        from elasticd.integrations.lightning import ElasticFit
        from elasticd.worker.world.group import WorldChanged

        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_size=2, shuffle=True)
        with _present(Present(self._state, self._progress, [self.model])):
            try:
                elastic = ElasticFit(self._folder, every=1000)
                plugins = elastic.world["plugins"][1:]  # a single process, without torchelastic
                trainer = Trainer(
                    max_epochs=EPOCHS, val_check_interval=2, callbacks=[elastic], plugins=plugins, **QUIET
                )
                trainer.fit(self.model, elastic.loader(loader), loader, ckpt_path=elastic.newest)
            except WorldChanged:
                self._progress.read = None
                self._undo.put_back()
                self._last.go_back()
                del self.log[self._kept :]
                return False
        return True


def _module(log: list[Any], ends: Callable[[str], None]) -> Any:
    from lightning.pytorch import LightningModule

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(1, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
            )

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own_state_dict"] = {"step": self.global_step}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["own_state_dict"] == {"step": checkpoint["global_step"]}

        def training_step(self, batch: Any, number: int) -> Any:
            log.append((self.current_epoch, self.global_step, number, batch.tolist()))
            ends("batch")
            return self.layers(batch.float().unsqueeze(1)).square().mean()

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("v", 1.0)
            ends("validation")

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                log.append(("validated", self.global_step))

        def on_train_epoch_end(self) -> None:
            log.append(("epoch", self.current_epoch))
            ends("epoch")

        def on_train_end(self) -> None:
            log.append("end")
            ends("end")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            by_metric.best = 0.0  # so that the first epoch is no better, and the next has another rate
            by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            schedulers = [by_epoch, {"scheduler": by_metric, "monitor": "v", "strict": False}]
            return [optimizer], schedulers

    return Model()


def _state(commit: Callable[[], None], *, nobody_stays: bool = False) -> Any:
    """Return the parts of a State that in_place uses."""
    world = SimpleNamespace(nobody_stays=lambda: nobody_stays)
    return SimpleNamespace(commit=commit, _loop=SimpleNamespace(committed=SimpleNamespace(world=world)))


@contextmanager
def _present(kept: Any) -> Iterator[None]:
    from elasticd.integrations import in_place

    in_place._present.append(kept)
    try:
        yield
    finally:
        in_place._present.pop()


def test_in_place_it_goes_on_as_if_no_world_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a world has ended at any point, the training has the same samples, validations, hooks, learning
    rates, random numbers and weights as an undisturbed one."""
    from elasticd.worker.world.group import WorldChanged

    for name, value in {"ELASTICD_WORLD_MAX": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    points: list[str] = []
    undisturbed = Training(tmp_path / "undisturbed", points.append)
    assert undisturbed.enter()
    assert undisturbed.commits == EPOCHS * STEPS
    assert {*points} == {"batch", "validation", "commit", "epoch", "end"}
    orders = [
        [s for e, *_, batch in _batches(undisturbed.log) if e == epoch for s in batch] for epoch in (0, 1)
    ]
    assert orders[0] != orders[1], "each epoch has its own order"
    assert all(sorted(order) == [*range(SAMPLES)] for order in orders)
    for fatal in range(len(points)):
        passed = iter(range(len(points)))

        def ends(point: str, passed: Iterator[int] = passed, fatal: int = fatal) -> None:
            if next(passed, None) == fatal:
                raise WorldChanged

        training = Training(tmp_path / str(fatal), ends)
        assert not training.enter()
        assert training.enter()
        where = f"the world ended at point {fatal}, {points[fatal]}"
        assert training.log == undisturbed.log, where
        for mine, other in zip(training.model.parameters(), undisturbed.model.parameters(), strict=True):
            assert torch.equal(mine, other), where


def _batches(log: list[Any]) -> list[tuple[int, int, int, list[int]]]:
    return [entry for entry in log if len(entry) == 4 and isinstance(entry, tuple)]


def test_after_the_checkpoint_of_an_epoch_the_next_epoch_has_its_own_order(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    from elasticd.integrations.lightning import ElasticFit

    def fit(folder: Path, epochs: int) -> list[Any]:
        log: list[Any] = []
        elastic = ElasticFit(folder, every=1000)
        loader = torch.utils.data.DataLoader(range(SAMPLES), batch_size=2, shuffle=True)
        trainer = Trainer(max_epochs=epochs, callbacks=[elastic], limit_val_batches=0, **QUIET)
        trainer.fit(_module(log, lambda point: None), elastic.loader(loader), ckpt_path=elastic.newest)
        return _batches(log)

    whole = fit(tmp_path / "whole", 2)
    assert fit(tmp_path / "parts", 1) + fit(tmp_path / "parts", 2) == whole


def _fit(folder: Path, **options: Any) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from elasticd.integrations.lightning import ElasticFit

    elastic = ElasticFit(folder, every=1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=2)
    trainer = Trainer(callbacks=[elastic], limit_val_batches=0, **QUIET, **options)
    trainer.fit(BoringModel(), elastic.loader(loader), ckpt_path=elastic.newest)


def test_an_epoch_that_ends_in_the_middle_of_a_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICD_WORLD_MAX", "2")
    with pytest.raises(ValueError, match="leave limit_train_batches"):
        _fit(tmp_path, limit_train_batches=3, max_epochs=1)
    _fit(tmp_path, limit_train_batches=2, max_epochs=1)


def test_a_schedule_of_accumulation_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.demos.boring_classes import BoringModel

    from elasticd.integrations.lightning import ElasticFit

    elastic = ElasticFit(tmp_path, every=1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=2)
    schedule = GradientAccumulationScheduler({0: 2})
    trainer = Trainer(callbacks=[elastic, schedule], limit_val_batches=0, max_epochs=1, **QUIET)
    with pytest.raises(RuntimeError, match="leave GradientAccumulationScheduler out"):
        trainer.fit(BoringModel(), elastic.loader(loader))


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from elasticd.integrations.lightning import ElasticFit

    model, loader = BoringModel(), torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=2)
    trainer = Trainer(limit_val_batches=0, max_epochs=1, **QUIET)
    trainer.fit(model, loader)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    elastic = ElasticFit(tmp_path, every=1)
    trainer = Trainer(callbacks=[elastic], limit_val_batches=0, max_epochs=2, **QUIET)
    with pytest.raises(ValueError, match="was saved without ElasticFit"):
        trainer.fit(model, elastic.loader(loader), ckpt_path=tmp_path / "other.ckpt")


def test_without_a_loader_it_says_what_to_do(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from elasticd.integrations.lightning import ElasticFit

    trainer = Trainer(max_steps=1, callbacks=[ElasticFit(tmp_path, every=1)], **QUIET)
    with pytest.raises(RuntimeError, match=r"fit with elastic.loader\(loader\)"):
        trainer.fit(BoringModel())
    elastic = ElasticFit(tmp_path, every=1)
    elastic.loader(torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=2))
    trainer = Trainer(max_steps=1, callbacks=[elastic], **QUIET)
    with pytest.raises(RuntimeError, match=r"fit with elastic.loader\(loader\)"):
        trainer.fit(BoringModel())


@pytest.mark.parametrize("nobody_stays", [True, False])
def test_in_place_a_checkpoint_is_saved_where_no_worker_stays(nobody_stays: bool) -> None:
    from elasticd.integrations.in_place import LoopProgress, Present
    from elasticd.worker.world.group import WorldChanged

    def commit() -> None:
        raise WorldChanged

    saved: list[int] = []
    present = Present(_state(commit, nobody_stays=nobody_stays), LoopProgress(), [])
    with pytest.raises(WorldChanged):
        present.commit(lambda: saved.append(1))
    assert saved == [1] * nobody_stays


def test_in_place_refuses_a_model_that_it_does_not_keep() -> None:
    from elasticd.integrations.in_place import LoopProgress, Present

    kept, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    present = Present(_state(lambda: None), LoopProgress(), [kept])
    present.begin(dict, kept.parameters())
    with pytest.raises(ValueError, match="changes parameters that in_place does not keep"):
        present.begin(dict, other.parameters())
    other.requires_grad_(requires_grad=False)
    present.begin(dict, other.parameters())
