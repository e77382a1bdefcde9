"""The page into which unmodified workers write their steps. Scripts hardly notice it."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from elasticd.core.ports import Assignment
from elasticd.procs.page import BOOT_DIR, MAGIC, Page, shared_memory_dir
from tests.procs.agents import PATIENCE_S, PROGRAMS
from tests.procs.conftest import Bench

FAKE = f"import sys; sys.path.insert(0, {str(PROGRAMS / 'faketorch')!r})\n"
STEPS = FAKE + "from torch.optim.optimizer import Optimizer\no = Optimizer()\n"


def _steps(bench: Bench) -> int:
    return bench._made[-1].steps()[10]


@pytest.mark.slow
def test_the_steps_of_an_unmodified_torch_script_are_counted_and_a_compiled_step_is_compiled_once(
    bench: Bench,
) -> None:
    program = """
import torch, warnings
warnings.simplefilter("error", UserWarning)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
step = torch.compile(lambda: optimizer.step(), backend="eager")
for _ in range(12):
    model(torch.ones(1, 2)).sum().backward()
    step()
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] == 1, counters
"""
    before = time.time()
    (exit,) = bench.run(program, env={"OMP_NUM_THREADS": "1"})
    assert exit.code == 0, exit.traceback
    (progress,) = bench._made[-1].progress()
    assert (progress.slot, progress.rank, progress.step, progress.base) == (10, 0, 12, 0)
    assert before - 1 < progress.at < time.time() + 1


def test_steps_that_were_made_before_are_told_if_the_optimizer_counts_them(
    bench: Bench, tmp_path: Path
) -> None:
    """Checked in two workers that are forked from a process which has imported torch."""
    script = tmp_path / "job.py"
    script.write_text("""
import os, torch
model = torch.nn.Linear(2, 2)
if os.environ["RANK"] == "0":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # it does not count
else:
    optimizer = torch.optim.Adam(model.parameters())
    state = {"step": torch.tensor(7.0), "exp_avg": torch.zeros(2, 2), "exp_avg_sq": torch.zeros(2, 2)}
    bias = {"step": torch.tensor(7.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state, 1: bias}})
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
""")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    procs = bench.procs([sys.executable, str(script)], zygote=True, imports=("torch",), base_env=env)
    procs.expect(Assignment(0, 0, 0, {"RANK": "0"}))
    bench.start(procs, 2)
    assert [exit.code for exit in bench.wait(2)] == [0, 0], bench.console.written
    assert [(one.step, one.base) for one in procs.progress()] == [(3, None), (3, 7)]


@pytest.mark.parametrize(
    ("order", "iterations"),
    [
        ("a" * 5, 5),
        ("ab" * 5, 5),  # a generator and a discriminator
        ("aaab" * 5, 15),  # one of them makes more steps than the other
        ("aaaa" + "bbbb", 7),  # one optimizer after the other
        ("abcdefgh" * 3, 3),  # one optimizer for each layer
    ],
)
def test_iterations_are_counted_with_any_number_of_optimizers(
    bench: Bench, order: str, iterations: int
) -> None:
    program = STEPS + "made = {}\nfor name in sys.argv[1]: made.setdefault(name, Optimizer()).step()"
    bench.run(program, 1, order)
    assert _steps(bench) == iterations


def test_a_worker_that_has_not_stepped_is_seen(bench: Bench) -> None:
    procs = bench.procs(
        [sys.executable, "-c", STEPS + "print('up', flush=True)\nimport time; time.sleep(1000)"]
    )
    bench.start(procs)
    bench.console.wait_for(b"up")
    page = procs._workers[10].page
    assert page is not None
    deadline = time.monotonic() + PATIENCE_S
    while not procs.pids()[10]:  # the worker may print before the agent hears of its start
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert procs.progress()[0].at == 0.0
    assert procs.progress()[0].pid == page.contents().pid != 0


@pytest.mark.parametrize("given", [None, "/x", f"/x{os.pathsep}/y"])
def test_the_script_sees_the_python_path_it_was_given(bench: Bench, given: str | None) -> None:
    program = """
import os, subprocess, sys
show = "import os, sys; print(os.environ.get('PYTHONPATH'), [p for p in sys.path if p.endswith('boot')])"
exec(show)
subprocess.run([sys.executable, "-c", show])
print([m for m in sys.modules if "heartbeat" in m], sys.modules.get("sitecustomize"))
"""
    base = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    bench.run(
        "import sys; sys.stdout.reconfigure(line_buffering=True)\n" + program,
        base_env=base | ({"PYTHONPATH": given} if given else {}),
    )
    assert bench.console.lines()[:2] == [f"{given} []".encode()] * 2
    assert bench.console.lines()[2] == b"[] None"


def test_the_sitecustomize_that_would_have_run_still_runs(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; print('mine', os.environ['PYTHONPATH'])")
    bench.run(
        STEPS + "o.step(); import sitecustomize; print(sitecustomize.__file__)",
        base_env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert bench.console.lines() == [f"mine {tmp_path}".encode(), str(tmp_path / "sitecustomize.py").encode()]
    assert _steps(bench) == 1


def test_an_error_in_that_sitecustomize_is_told_as_ever(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('mine is broken')")
    bench.run("print('runs')", base_env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert b"mine is broken" in bench.console.written[2]
    assert bench.console.lines() == [b"runs"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_worker_do_not_touch_its_page(bench: Bench, tmp_path: Path, method: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        f"""
import multiprocessing, sys
sys.path.insert(0, {str(PROGRAMS / "faketorch")!r})
from torch.optim.optimizer import Optimizer

def child():
    optimizer = Optimizer()
    for _ in range(100):
        optimizer.step()

if __name__ == "__main__":
    Optimizer().step()
    process = multiprocessing.get_context({method!r}).Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    )
    bench.start(bench.procs([sys.executable, str(script)]))
    (exit,) = bench.wait()
    assert exit.code == 0, exit.traceback
    assert _steps(bench) == 1


def test_python_started_by_a_shell_is_counted_one_after_the_other(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(STEPS + "o.step(); o.step()")
    run = f'"{sys.executable}" {script}'
    bench.start(bench.procs(["/bin/sh", "-c", f"{run} && {run}"]))
    bench.wait()
    assert _steps(bench) == 4


@pytest.mark.parametrize("content", [None, b"", b"x" * 4096, b"ELASTICD" + b"\xff" * 4088])
def test_a_page_that_is_missing_or_broken_does_not_disturb_the_script(
    bench: Bench, tmp_path: Path, content: bytes | None
) -> None:
    page = tmp_path / "page"
    if content is not None:
        page.write_bytes(content)
    env = {**os.environ, "PYTHONPATH": BOOT_DIR, "ELASTICD_PAGE": str(page)}
    bench.run(STEPS + "o.step(); print('fine')", base_env=env, heartbeat=False)
    assert bench.console.written == {1: b"fine\n", 2: b""}


def test_a_worker_that_truncates_its_page_does_not_kill_its_agent(bench: Bench) -> None:
    bench.run("import os; os.truncate(os.environ['ELASTICD_PAGE'], 0)")
    assert _steps(bench) == 0


def test_both_sides_agree_on_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BOOT_DIR)
    worker_side: ModuleType = importlib.import_module("elasticd_heartbeat")
    folder = shared_memory_dir()
    page = Page(folder / "page")
    try:
        fields = worker_side._claim(str(page.path))
        hook = worker_side._make_hook(fields, str(page.path))
        for _ in range(3):
            hook(page, (), {})
        told = page.contents()
        assert (told.pid, told.steps) == (os.getpid(), 3)
        assert abs(told.stepped_at - time.monotonic()) < 60
        assert page.path.read_bytes().startswith(MAGIC)
    finally:
        page.close()
        folder.rmdir()
        sys.modules.pop("elasticd_heartbeat")


def test_other_users_cannot_read_pages(bench: Bench) -> None:
    procs = bench.procs(["/bin/sleep", "1000"])
    bench.start(procs)
    assert procs.page_dir.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in procs.page_dir.iterdir()] == [0o600]
