"""What a stack says about a worker. The stacks are real ones, of torch 2.13, shortened."""

from __future__ import annotations

import pytest

from elasticd.core.thread_activity import ActivityKind, Frame, activity_of
from elasticd.worker.agent_link.link import Link

SITE = "/venv/lib/python3.11/site-packages"
LIB = "/usr/lib/python3.11"
MAIN = ("/home/me/job.py", 40, "<module>")
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
LOADER = f"{SITE}/torch/utils/data/dataloader.py"
FETCH = f"{SITE}/torch/utils/data/_utils/fetch.py"


def at(*calls: tuple[object, ...]) -> object:
    found = activity_of([Frame(*call) for call in (*calls, MAIN)])  # type: ignore[arg-type]
    return (found.kind.value, found.place, found.doing) if found else None


def test_a_thread_without_python_is_nowhere() -> None:
    assert activity_of([]) is None


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([], ("own", "job.py:40", "")),
        (
            [(C10D, 3252, "all_reduce"), (f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper")],
            ("collective", "job.py:40", "all_reduce"),
        ),
        (
            [(C10D, 300, "_store_based_barrier"), (C10D, 1700, "init_process_group")],
            ("collective", "job.py:40", "init_process_group"),
        ),
        (
            [(f"{SITE}/torch/autograd/graph.py", 979, "_engine_run_backward"),
             (f"{SITE}/torch/_tensor.py", 623, "backward")],
            ("collective", "job.py:40", "backward"),
        ),
        (
            [(f"{SITE}/torch/nn/parallel/distributed.py", 2000, "_sync_buffers")],
            ("collective", "job.py:40", "_sync_buffers"),
        ),
        (
            [(f"{SITE}/torch/cuda/__init__.py", 900, "synchronize")],
            ("collective", "job.py:40", "synchronize"),
        ),
        ([("/home/me/job.py", 12, "step", "handle.wait()")], ("collective", "job.py:12", "wait")),
        ([("/home/me/job.py", 12, "step", "total += loss.item()")], ("collective", "job.py:12", "item")),
        ([("/home/me/job.py", 12, "step", "x = x.cuda(0)")], ("collective", "job.py:12", "cuda")),
        ([("/home/me/job.py", 12, "step", "x, y = x.to(device), y")], ("collective", "job.py:12", "to")),
        ([("/home/me/job.py", 12, "step", "x.to(self.local_rank)")], ("collective", "job.py:12", "to")),
        ([("/home/me/job.py", 12, "step", "x = x.to(torch.bfloat16)")], ("own", "job.py:12", "")),
        (
            [("/home/me/job.py", 12, "step", "ends = torch.tensor([0.0], device='cuda')")],
            ("collective", "job.py:12", "tensor"),
        ),
        (
            [(f"{SITE}/lightning/fabric/utilities/apply_func.py", 130, "_item", "return value.item()"),
             (f"{SITE}/lightning/pytorch/loops/fit_loop.py", 9, "advance")],
            ("collective", "job.py:40", "item"),
        ),
        (
            [(f"{SITE}/transformers/trainer.py", 3000, "_log", "loss = tr_loss.mean().cpu().numpy()")],
            ("collective", "job.py:40", "cpu"),
        ),
        (
            [(f"{SITE}/torch/amp/grad_scaler.py", 350, "_maybe_opt_step",
              "if not sum(v.item() for v in optimizer_state.values()):")],
            ("collective", "job.py:40", "item"),
        ),
        (
            [(f"{SITE}/filelock/_api.py", 200, "acquire", "self._condition.wait(poll_interval)")],
            ("own", "job.py:40", ""),
        ),
        (
            [(f"{SITE}/datasets/table.py", 12, "items", "rows = [dict(zip(names, row)) for row in rows]")],
            ("own", "job.py:40", ""),
        ),
        (
            [(f"{LIB}/threading.py", 324, "wait", "waiter.acquire()"),
             ("/home/me/job.py", 9, "go", "x.wait()")],
            ("own", "job.py:9", ""),
        ),
        (
            [("/home/me/data.py", 5, "__getitem__"), (FETCH, 52, "fetch"), (LOADER, 788, "_next_data")],
            ("own", "data.py:5", "data loading"),
        ),
        (
            [(f"{LIB}/selectors.py", 415, "select"), (LOADER, 1251, "_try_get_data")],
            ("own", "job.py:40", "data loading"),
        ),
        (
            [(f"{SITE}/torch/distributed/checkpoint/filesystem.py", 300, "_write_item")],
            ("own", "job.py:40", "saving or loading a checkpoint"),
        ),
        (
            [(f"{LIB}/subprocess.py", 2016, "_try_wait"), (f"{LIB}/subprocess.py", 2050, "_wait"),
             (f"{LIB}/subprocess.py", 1270, "wait")],
            ("program", "job.py:40", "waiting for a program"),
        ),
        (
            [(f"{LIB}/multiprocessing/popen_fork.py", 27, "poll"),
             (f"{LIB}/multiprocessing/popen_fork.py", 43, "wait"),
             (f"{LIB}/multiprocessing/process.py", 149, "join")],
            ("program", "job.py:40", "waiting for a program"),
        ),
        (
            [(f"{LIB}/site-packages/elasticd/checkpoint/protocol.py", 79, "receive"),
             (f"{LIB}/site-packages/elasticd/checkpoint/client/saver_connection.py", 130, "listen_while"),
             (f"{LIB}/site-packages/elasticd/worker/checkpoints.py", 213, "wait")],
            ("program", "job.py:40", "waiting for a program"),
        ),
        ([("/home/me/subprocess_jobs.py", 3, "wait")], ("own", "subprocess_jobs.py:3", "")),
    ],
)  # fmt: skip
def test_a_stack_says_in_whose_code_it_is_at_which_line_and_for_what_it_waits(
    stack: list[tuple[object, ...]], expected: object
) -> None:
    assert at(*stack) == expected


def test_a_script_that_is_itself_a_package_is_named_by_its_last_frame() -> None:
    found = activity_of(
        [Frame(f"{SITE}/trainer/loop.py", 3, "run"), Frame("<frozen runpy>", 88, "_run_code")]
    )
    assert found is not None
    assert (found.kind, found.place) == (ActivityKind.OWN, "loop.py:3")


def test_what_we_put_around_a_call_of_torchs_is_passed_over() -> None:
    """elasticd measures waits, so its measurement is the innermost frame of each waiting worker."""
    measured = (f"{SITE}/elasticd/worker/boot/elasticd_waits.py", 82, "measured")
    assert at(measured, (C10D, 3000, "all_reduce")) == ("collective", "job.py:40", "all_reduce")


@pytest.mark.parametrize("where", [SITE, "/home/me/elasticd"])
def test_a_measured_wait_counts_as_a_collective_in_the_script_and_in_elasticd(
    where: str,
) -> None:
    """The script's line has no text, since it is not the innermost."""
    measured = (f"{where}/elasticd/worker/boot/elasticd_waits.py", 82, "measured")
    assert at(measured, ("/home/me/job.py", 12, "step")) == ("collective", "job.py:12", "wait")
    ours = (f"{where}/elasticd/worker/world.py", 324, "wait_for")
    assert at(measured, ours) == ("collective", "job.py:40", "wait")
    assert at(ours) == ("own", "job.py:40", "")
    assert at((f"{where}/elasticd/checkpoint/protocol.py", 79, "receive")) == ("own", "job.py:40", "")


@pytest.mark.parametrize("where", [SITE, "/home/me/elasticd"])
def test_a_wait_that_ends_with_the_world_is_a_wait_for_others(where: str) -> None:
    ours = (f"{where}/elasticd/worker/world/waits.py", 180, "_in_another_thread")
    future = (f"{SITE}/torch/futures/__init__.py", 83, "wait")
    assert at(future, ours, (C10D, 3000, "all_reduce")) == ("collective", "job.py:40", "all_reduce")
    functional = (f"{SITE}/torch/distributed/_functional_collectives.py", 142, "wait_tensor")
    operator = (f"{SITE}/torch/_ops.py", 1200, "__call__")
    assert at(future, ours, operator, functional) == ("collective", "job.py:40", "wait_tensor")
    assert at(operator, functional) == ("collective", "job.py:40", "wait_tensor")
    pipeline = (f"{SITE}/torch/distributed/pipelining/schedules.py", 90, "_wait_batch_p2p")
    assert at(future, ours, pipeline) == ("collective", "job.py:40", "wait")
    assert at(operator) == ("own", "job.py:40", "")


@pytest.mark.parametrize("where", [SITE, "/home/me/elasticd"])
def test_a_worker_without_a_part_waits_for_the_calls_of_another_rank_and_is_not_asleep(where: str) -> None:
    group = f"{where}/elasticd/worker/world/group.py"
    hears = [
        (group, 330, "_await"),
        (group, 196, "wait_for_value"),
        (f"{where}/elasticd/worker/steps.py", 92, "__iter__"),
    ]
    assert at(*hears) == ("collective", "job.py:40", "wait")
    assert at((group, 330, "_await"), (group, 172, "ends_with_commit")) == ("own", "job.py:40", "")


def test_a_worker_whose_world_broke_waits_for_its_agent_and_is_neither_asleep_nor_in_a_collective() -> None:
    wait = Link.wait_for_leave.__code__
    waits = (
        (f"{LIB}/threading.py", 331, "wait"),
        (f"{LIB}/threading.py", 359, "wait_for"),
        (wait.co_filename, wait.co_firstlineno, wait.co_name),
        (f"{SITE}/elasticd/worker/run.py", 120, "_await_the_end"),
    )
    assert at(*waits) == ("program", "job.py:40", "waiting for its agent")
