"""A trainer in one process, and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.worker.world.group import WorldChanged
from tests.e2e.harness import Cluster
from tests.integrations import jobs


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    """Import the library here, not in each process that collects tests."""
    pytest.importorskip("transformers", reason="transformers is not installed")


class TestOneProcess:
    """A trainer in this process, which no launcher has started."""

    def made(self, folder: Path, dataset: Any) -> Any:
        from transformers import TrainingArguments

        from elasticd.integrations.transformers import Trainer

        args = TrainingArguments(str(folder), per_device_train_batch_size=2, max_steps=1, use_cpu=True)
        return Trainer(torch.nn.Linear(1, 1), args, train_dataset=dataset)

    def test_outside_elasticd_nothing_changes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ELASTICD_WORLD_MAX", raising=False)
        trainer = self.made(tmp_path, [*range(8)])
        assert "ElasticCallback" not in trainer.callback_handler.callback_list
        assert trainer.get_train_dataloader().batch_sampler.batch_size == 2

    def test_a_step_has_the_samples_of_the_largest_world(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ELASTICD_WORLD_MAX", "4")
        trainer = self.made(tmp_path, [*range(16)])
        assert len(trainer.get_train_dataloader()) == 8
        assert trainer.args.gradient_accumulation_steps == 4

    @pytest.mark.parametrize("accumulated", [1, 2])
    @pytest.mark.parametrize("largest", [1, 2, 4])
    def test_a_loss_function_of_the_script_s_own_gives_the_same_step_in_any_world(
        self, largest: int, accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers import TrainingArguments

        from elasticd.integrations.transformers import Trainer

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = torch.nn.Parameter(torch.zeros(1))

            def forward(self, x: Any, target: Any) -> dict[str, Any]:
                return {"y": self.w * x, "target": target}

        def mean_of_squares(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            return (outputs["y"] - outputs["target"]).square().mean()

        monkeypatch.setenv("ELASTICD_WORLD_MAX", str(largest))
        args = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=8 // largest // accumulated,
            gradient_accumulation_steps=accumulated,
            max_steps=1,
            learning_rate=0.1,
            optim="sgd",
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            max_grad_norm=0,
        )
        data = [{"x": torch.tensor([1.0]), "target": torch.tensor([1.0])} for _ in range(8)]
        net = Net()
        Trainer(net, args, train_dataset=data, compute_loss_func=mean_of_squares).train()
        # Transformers itself adds up what it accumulates.
        assert net.w.item() == pytest.approx(0.2 * accumulated)

    @pytest.mark.parametrize("max_steps", [-1, 7])
    def test_each_step_is_committed_once_after_what_is_due_after_it(
        self, max_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also in a world that continues, and restores the callbacks from the state."""
        from transformers import TrainerCallback, TrainingArguments

        from elasticd.integrations import in_place
        from elasticd.integrations.transformers import Trainer

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)

            def forward(self, x: Any, labels: Any = None) -> Any:
                return {"loss": self.layer(x).square().mean(), "logits": x}

        log: list[tuple[str, int]] = []

        class Noting(TrainerCallback):
            def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                log.append(("evaluated", state.global_step))

        class Kept:
            """Stands in for a State: commits the progress, and ends the first world after step 3."""

            def __init__(self, committed: dict[str, Any]) -> None:
                self.committed, self.read = committed, dict

            def begin(self, read: Any, trained: Any) -> dict[str, Any]:
                self.read = read
                return self.committed

            def resume_random(self) -> None:
                pass

            def commit(self, save: Any) -> None:
                self.now = self.read()
                log.append(("committed", trainer.state.global_step))
                if trainer.state.global_step == 3 and not self.committed:
                    raise WorldChanged

        monkeypatch.setenv("ELASTICD_WORLD_MAX", "1")
        model, data = Model(), [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(10)]
        committed: dict[str, Any] = {}
        for _ in range(2):
            args = TrainingArguments(
                str(tmp_path),
                per_device_train_batch_size=2,
                num_train_epochs=2,
                max_steps=max_steps,
                eval_strategy="epoch",
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                restore_callback_states_from_checkpoint=True,
            )
            kept = Kept(committed)
            trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=[Noting()])
            monkeypatch.setattr(in_place, "_present", [kept])
            try:
                trainer.train()
            except WorldChanged:
                committed = kept.now
        last = 10 if max_steps < 0 else max_steps
        expected: list[tuple[str, int]] = []
        for step in range(1, last + 1):
            expected += [("evaluated", step)] * (step in (5, last)) + [("committed", step)]
        assert log == expected

    def test_the_trainer_warns_of_data_whose_order_is_not_known(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("ELASTICD_WORLD_MAX", "4")

        class Stream(torch.utils.data.IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                yield from range(8)

        trainer = self.made(tmp_path, Stream())
        trainer.get_train_dataloader()
        assert "samples may be lost or repeated when the world changes" in caplog.text
        assert trainer.args.gradient_accumulation_steps == 1

    def test_the_trainer_continues_from_a_checkpoint_of_transformers_own_trainer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

        from elasticd.integrations.transformers import Trainer

        data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
        config = GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
        made = []
        for largest, steps in ((0, 2), (1, 3)):
            monkeypatch.setenv("ELASTICD_WORLD_MAX", str(largest))
            args = TrainingArguments(
                str(tmp_path), max_steps=steps, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
            )
            trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=data)
            trainer.train()
            made.append(trainer.state.global_step)
        assert made == [2, 3]
        assert "was not saved under elasticd" in caplog.text
        assert (tmp_path / "checkpoint-3" / "trainer_state.json").exists()


class TestCheckpoints:
    @pytest.fixture
    def output(self, tmp_path: Path) -> Path:
        """A trainer's folder with checkpoints of steps 2 and 4."""
        from safetensors.torch import save_file

        for step in (2, 4):
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            save_file({"weight": torch.zeros(4)}, folder / "model.safetensors")
            torch.save({}, folder / "optimizer.pt")
            torch.save({}, folder / "scheduler.pt")
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return tmp_path

    def newest(self, output: Path) -> str | None:
        from elasticd.integrations.transformers import newest_whole_checkpoint

        found = newest_whole_checkpoint(output)
        return found.name if found is not None else None

    def test_the_newest_is_found_by_its_step(self, output: Path) -> None:
        assert self.newest(output) == "checkpoint-4"
        (output / "checkpoint-4").rename(output / "checkpoint-x")
        assert self.newest(output) == "checkpoint-2"

    @pytest.mark.parametrize(
        "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"]
    )
    def test_a_checkpoint_that_lacks_a_file_or_its_end_is_skipped(self, output: Path, name: str) -> None:
        file = output / "checkpoint-4" / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        assert self.newest(output) == "checkpoint-2"
        file.unlink()
        assert self.newest(output) == "checkpoint-2"

    def test_one_whose_index_names_a_missing_file_is_skipped(self, output: Path) -> None:
        index = {"weight_map": {"weight": "model.safetensors", "bias": "model-2.safetensors"}}
        (output / "checkpoint-4" / "model.safetensors.index.json").write_text(json.dumps(index))
        assert self.newest(output) == "checkpoint-2"

    def test_a_folder_without_a_checkpoint_has_none(self, tmp_path: Path) -> None:
        assert self.newest(tmp_path) is None


@pytest.mark.parametrize("kind", ["in_place", "elastic"])
def test_an_evaluation_in_which_a_worker_dies_comes_again(kind: str, cluster: Cluster) -> None:
    assert jobs.killed_in_an_evaluation(cluster, "trainer.py", kind).outcome == "exact"
