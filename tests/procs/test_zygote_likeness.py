"""A forked worker is compared with one started afresh, point by point: a script cannot tell which it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from elasticd.procs import stacks
from elasticd.procs.logdest import LogDest
from tests.procs.agents import PATIENCE_S, PROGRAMS
from tests.procs.conftest import Bench, wait_until_ready
from tests.procs.forked import both, run

DESCRIBE = PROGRAMS / "dumped" / "describe.py"


@pytest.mark.parametrize("how", ["script", "relative", "link", "module"])
def test_a_script_sees_the_same(bench: Bench, tmp_path: Path, how: str) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(DESCRIBE)
    argv, cwd = {
        "script": ([str(DESCRIBE)], tmp_path),
        "relative": (["dumped/describe.py"], PROGRAMS),
        "link": (["./link.py"], tmp_path),
        "module": (["-m", "dumped.describe"], PROGRAMS),
    }[how]
    first, second = both(bench, [*argv, "an argument", "--and", "ü"], cwd=cwd)
    assert not first.exits[0].code, first.err
    assert not second.exits[0].code, second.err
    fresh, expected = _seen(first.out)
    forked, seen = _seen(second.out)
    assert (fresh, forked) == (False, True)
    assert seen == expected
    _, python = _seen(_plainly([*argv, "an argument", "--and", "ü"], cwd).stdout)
    assert seen == python | _ours(seen, python)


def _ours(seen: dict[str, Any], python: dict[str, Any]) -> dict[str, Any]:
    """The differences between a worker and ``python job.py``, with their reasons."""
    page = seen["environ"]["ELASTICD_PAGE"]
    given = {"ELASTICD_PAGE": page, "ELASTICD_LINK": seen["environ"]["ELASTICD_LINK"]}
    caught = int(python["masks"]["SigCgt"], 16) | 1 << (stacks.SIGNAL - 1)
    assert 0 < len(seen["fds"]) <= 2
    return {
        "environ": python["environ"] | given,
        "proc environ": False,  # the kernel shows the environment at the start: PYTHONPATH, and padding
        # memory for stacks, which is mapped
        "fds": {fd: [page.rstrip("0123456789/"), False] for fd in seen["fds"]},
        "masks": python["masks"] | {"SigCgt": f"{caught:016x}"},  # the handler that writes stacks
        "exithandlers": python["exithandlers"] + 1,  # notes that the script came to its end
        "dies with parent": signal.SIGKILL,  # ends the worker when its agent ends
    }


def _seen(out: bytes) -> Any:
    """Return what the script sees, without what differs between any two processes."""
    return json.loads(re.sub(rb"0x[0-9a-f]+|(?<=process)\d+", b"", out))


def _plainly(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """Run the same script without elasticd, in a terminal: processes that are started in the background
    ignore signals."""

    def as_in_a_terminal() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)

    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-u", *argv],
        cwd=cwd,
        env={**env, "WORD": "given", "RANK": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        preexec_fn=as_in_a_terminal,
        timeout=PATIENCE_S,
        check=False,
    )


ENDINGS = [
    "end", "exit 7", "exit text", "exit in a function at exit", "raise", "interrupt", "a real interrupt",
    "_exit", "kill", "terminate", "abort", "excepthook", "a thread raises", "closed stdout",
]  # fmt: skip


def test_a_script_ends_the_same(bench: Bench, tmp_path: Path) -> None:
    """One worker for each way to end: first all as new processes, then all forked."""
    script = str(PROGRAMS / "dumped" / "ending.py")

    def files(number: int, stream: str) -> dict[int, str]:
        return {rank: str(tmp_path / f"{stream}-{number}-{rank}") for rank in range(len(ENDINGS))}

    procs = bench.procs(
        lambda a: [sys.executable, "-u", script, ENDINGS[a.rank]],
        zygote=True,
        reify=lambda number, _: LogDest(stdouts=files(number, "out"), stderrs=files(number, "err")),
    )
    fresh = run(bench, procs, len(ENDINGS)).exits
    wait_until_ready(procs)
    forked = run(bench, procs, len(ENDINGS)).exits
    for rank, how in enumerate(ENDINGS):
        python = _plainly([script, how], tmp_path)
        assert fresh[rank].code == forked[rank].code == python.returncode, how
        assert fresh[rank].message == forked[rank].message, how
        for number in (1, 2):
            for stream, said in (("out", python.stdout), ("err", python.stderr)):
                written = Path(files(number, stream)[rank]).read_bytes()
                assert _without_addresses(written) == _without_addresses(said), (how, number)


def _without_addresses(text: bytes) -> bytes:
    return re.sub(rb"Thread-\d+|0x[0-9a-f]+", b"", text)


def test_children_of_every_kind_find_the_classes_of_the_script(bench: Bench) -> None:
    first, second = both(bench, [str(PROGRAMS / "dumped" / "several.py")], 2)
    assert [exit.code for exit in second.exits] == [0, 0], second.err
    assert sorted(second.out.splitlines()) == sorted(first.out.splitlines())
    drawn = second.err.splitlines() + first.err.splitlines()
    assert len(drawn) == len(set(drawn)) == 12, "no two draw the same random numbers, or have the same key"


@pytest.mark.slow
def test_loaders_have_workers_of_every_kind(bench: Bench, tmp_path: Path) -> None:
    argv = [str(PROGRAMS / "dumped" / "loading.py")]
    first, second = both(bench, argv, more={"OMP_NUM_THREADS": "1"})
    assert second.exits[0].code == 0, second.err
    assert (first.err.splitlines()[-1], second.err.splitlines()[-1]) == (b"False", b"True")
    assert second.out == first.out == _plainly(argv, tmp_path).stdout
    assert [line.split()[0] for line in second.out.splitlines()] == [b"fork", b"spawn", b"forkserver"]


@pytest.mark.slow
def test_what_torchs_record_says_of_a_failure_is_heard(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("""
import gc
import torch
from torch.distributed.elastic.multiprocessing.errors import record
torch.optim.SGD([torch.zeros(1)], lr=0.1).step()
@record
def main():
    raise ValueError(f"spoiled, {gc.get_freeze_count() > 1000}")
main()
""")
    file = tmp_path / "error.json"
    dest = LogDest(error_files={0: str(file)})
    first, second = both(bench, [str(tmp_path / "job.py")], reify=lambda _n, _e: dest)
    told = [ran.exits[0] for ran in (first, second)]
    assert [exit.message for exit in told] == ["ValueError: spoiled, False", "ValueError: spoiled, True"]
    assert json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] == told[1].traceback
    assert [exit.code for exit in told] == [1, 1]


def test_forked_workers_share_a_seed_of_hashes_which_pythonhashseed_gives(
    bench: Bench, tmp_path: Path
) -> None:
    """A running process cannot change its seed. It does no harm that ranks iterate over a set in the same
    order."""
    (tmp_path / "job.py").write_text(
        f"import sys; sys.path.insert(0, {str(PROGRAMS / 'dumped')!r})\n"
        "from steps import step_once\nstep_once()\nprint(hash('a word'))\n"
    )
    first, second = both(bench, ["job.py"], 2)
    assert len(set(first.out.split())) == 2 and len(set(second.out.split())) == 1
    first, second = both(bench, ["job.py"], 2, more={"PYTHONHASHSEED": "7"})
    assert len({*first.out.split(), *second.out.split()}) == 1


def test_what_modules_print_and_set_when_imported_reaches_every_worker(bench: Bench, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "talker.py").write_text(
        "import os, sys, warnings\n"
        "print('a word'); warnings.warn('be warned'); os.environ['SET'] = 'by talker'\n"
        "os.environ.setdefault('WORD', 'not taken'); print(sys.stderr.isatty())\n"
    )
    script = tmp_path / "job.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(PROGRAMS / 'dumped')!r}); import talker, steps, os\n"
        "steps.step_once(); print(os.environ['SET'], os.environ['WORD'])"
    )
    first, second = both(bench, [str(script)], more={"PYTHONPATH": str(site)})
    assert first.exits[0].code == 0, first.err
    assert (second.out, second.err) == (first.out, first.err)
    assert b"be warned" in first.err
    assert first.out.endswith(b"by talker given\n")


def test_the_script_and_its_own_modules_are_read_at_every_start(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("word = 'old'")
    (tmp_path / "job.py").write_text(
        f"import sys; sys.path.insert(1, {str(PROGRAMS / 'dumped')!r}); import steps\n"
        "import helper; steps.step_once(); print(helper.word, 'old')"
    )
    procs = bench.procs([sys.executable, "-u", str(tmp_path / "job.py")], zygote=True)
    assert run(bench, procs).out == b"old old\n"
    wait_until_ready(procs)
    (tmp_path / "helper.py").write_text("word = 'newer'")
    job = (tmp_path / "job.py").read_text()
    (tmp_path / "job.py").write_text(
        job.replace("'old'", "'newer, too'") + "; import gc; print(gc.get_freeze_count() > 1000)"
    )
    assert run(bench, procs).out == b"newer newer, too\nTrue\n"


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "3"])
def test_torch_computes_the_same_on_the_same_threads_and_draws_other_random_numbers(
    bench: Bench, tmp_path: Path, threads: str
) -> None:
    """The worker uses more than one thread: an import of numpy then starts OpenBLAS's threads, which cope
    with forks."""
    script = tmp_path / "job.py"
    script.write_text("""
import gc, json, os, random, sys, numpy, torch
from torch.profiler import profile
print("drawn", torch.initial_seed(), torch.rand(1).item(), numpy.random.rand(), random.random())
torch.manual_seed(5); numpy.random.seed(5); random.seed(5)
print(torch.rand(1).item(), numpy.random.rand(), random.random())
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
with profile() as traced:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(400, 300)).square().mean().backward()
        optimizer.step()
traced.export_chrome_trace(f"trace{os.getpid()}.json")
with open(f"trace{os.getpid()}.json") as file:
    pids = {event["pid"] for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"}
print(gc.get_freeze_count() > 1000, file=sys.stderr)
print(pids == {os.getpid()}, torch.__config__.parallel_info(), torch.get_default_dtype())
print(torch.are_deterministic_algorithms_enabled())
print(numpy.arange(1e6).reshape(1000, 1000).dot(numpy.eye(1000)).sum())
print([parameter.sum().item() for parameter in model.parameters()], torch.cuda.is_initialized())
if os.environ["OMP_NUM_THREADS"] == "1":  # the import of the compiler takes seconds
    try:
        print(torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.ones(3)))
    except RuntimeError as error:
        print(error)
""")
    env = {**os.environ, "OMP_NUM_THREADS": threads}
    procs = bench.procs([sys.executable, "-u", str(script)], zygote=True, base_env=env)
    ran = [run(bench, procs)]
    wait_until_ready(procs)
    ran += [run(bench, procs, 2), run(bench, procs)]
    assert [exit.code for one in ran for exit in one.exits] == [0] * 4, ran
    forked = [line for one in ran for line in one.err.splitlines() if line in (b"True", b"False")]
    assert forked == [b"False", b"True", b"True", b"True"]
    lines = [line for one in ran for line in one.out.splitlines()]
    drawn = [line.split()[1:] for line in lines if line.startswith(b"drawn")]
    for kind in zip(*drawn, strict=True):
        assert len(kind) == len(set(kind)) == 4, "by ranks and in runs"
    same = Counter(line for line in lines if line and not line.startswith(b"drawn"))
    assert all(count % 4 == 0 for count in same.values()), same
    assert any(line.startswith(b"True ") for line in same)


@pytest.mark.parametrize("kind", ["directory", "zip"])
def test_a_script_may_be_a_directory_or_a_zip_file(bench: Bench, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "job"
    target.mkdir()
    (target / "__main__.py").write_text(
        f"import gc, json, sys; sys.path.insert(1, {str(PROGRAMS / 'dumped')!r}); import steps\n"
        "steps.step_once()\n"
        "print(json.dumps([gc.get_freeze_count() > 1000, sys.argv, sys.path]\n"
        " + [__file__, __package__, repr(__spec__)]))"
    )
    if kind == "zip":
        target = Path(shutil.make_archive(str(tmp_path / "zipped"), "zip", target))
    first, second = both(bench, [str(target), "word"])
    fresh, *expected = _seen(first.out)
    forked, *seen = _seen(second.out)
    assert (fresh, forked) == (False, True), second.err
    assert seen == expected


def test_another_sitecustomize_and_a_usercustomize_run_in_each_worker(bench: Bench, tmp_path: Path) -> None:
    customs = tmp_path / "customs"
    customs.mkdir()
    for name in ("sitecustomize", "usercustomize"):
        (customs / f"{name}.py").write_text(
            "import os, sys; print(__name__, os.environ['RANK'], os.environ.get('PYTHONPATH'))"
        )
    script = tmp_path / "job.py"
    script.write_text(
        f"import sys; sys.path.insert(1, {str(PROGRAMS / 'dumped')!r}); import steps; steps.step_once()\n"
        "print(*(m for m in sys.modules if 'custom' in m))"
    )
    first, second = both(bench, [str(script)], more={"PYTHONPATH": str(customs)})
    assert second.out == first.out
    assert first.out.startswith(f"sitecustomize 0 {customs}\n".encode())
