"""The time that the import of popular libraries in the zygote takes, and that this import ends. Only
installed libraries are tried."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

from elasticd.procs.linux import children
from tests.procs.conftest import Bench, News

LIBRARIES = {
    "torch": "import torch",
    "transformers": "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments",
    "datasets": "import datasets",
    "lightning": "import lightning",
    "torchmetrics": "import torchmetrics",
    "pandas": "import pandas",
    "pyarrow": "import pyarrow.parquet, pyarrow.dataset",
    "sklearn": "import sklearn.linear_model",
    "wandb": "import wandb",
    "mlflow": "import mlflow",
    "accelerate": "import accelerate",
}
LIBRARIES["all"] = "; ".join(text for name, text in LIBRARIES.items() if importlib.util.find_spec(name))
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, of its children that have ended, and of those that live."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * TICK_S + sum(map(cpu_s, children(pid)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LIBRARIES)
def test_what_a_library_imports_is_imported_ahead_for_little_more_than_one_import(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name != "all" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setitem(Bench.wait.__globals__, "PATIENCE_S", 300.0)  # type: ignore[attr-defined]  # a busy machine
    news = News()
    (tmp_path / "job.py").write_text(
        f"import gc, time\nbegan = time.monotonic()\nimport torch\n{LIBRARIES[name]}\n"
        "torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()\n"
        "print(gc.get_freeze_count() > 1000, time.monotonic() - began)\n"
    )
    procs = bench.procs([sys.executable, "-u", str(tmp_path / "job.py")], zygote=True, say=news)
    bench.start(procs)
    bench.wait()
    began = time.monotonic()
    first_s = cpu_s(bench.warden.pid)
    while not any(event in ("zygote.ready", "zygote.given_up") for event, _ in news.events):
        assert time.monotonic() < began + 300, news.events
        time.sleep(0.05)
    took = time.monotonic() - began
    more_s = cpu_s(bench.warden.pid) - first_s
    bench.start(procs)
    bench.wait()
    print(name, bench.console.lines(), f"first {first_s:.1f} s, zygote {more_s:.1f} s, took {took:.1f}")
    print("events", *news.events, sep="\n  ")
    assert more_s < 2 * first_s
    assert not news.of("zygote.given_up")
