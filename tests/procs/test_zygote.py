"""When workers are forked and when not, and what happens to them if the zygote fails."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticd.channel.framing import close_all, pair
from elasticd.channel.warden_messages import ImportModules, Personal, Program, Spawn
from elasticd.procs.launch import start_error
from elasticd.procs.linux import children, steady_now
from elasticd.procs.page import BOOT_DIR
from elasticd.procs.workers import LocalProcs
from elasticd.procs.zygote import ZygoteProcess
from tests.channel.starved import descriptors
from tests.procs.agents import PROGRAMS, is_running, wait_until, wait_until_gone
from tests.procs.conftest import Bench, News, named, wait_until_ready
from tests.procs.forked import run

# Python 3.12 freezes some hundred objects when it starts.
PREAMBLE = (
    f"import gc, os, sys, time\nsys.path.insert(0, {str(PROGRAMS / 'dumped')!r})\n"
    "from steps import step_once\nforked = gc.get_freeze_count() > 1000\n"
)
SHOW = PREAMBLE + "step_once()\nprint(forked)\n"
STAY = PREAMBLE + "step_once()\nprint(forked, os.getpid(), os.getppid(), flush=True)\ntime.sleep(1000)\n"


def _procs(bench: Bench, folder: Path, script: str, *args: str, **how: object) -> LocalProcs:
    (folder / "job.py").write_text(script)
    return bench.procs([sys.executable, "-u", str(folder / "job.py"), *args], zygote=True, **how)


def _zygote(bench: Bench) -> int:
    """Return the zygote's pid. A process that the zygote has just forked has the zygote's name at first."""
    found: list[int] = []

    def alone() -> bool:
        found[:] = named(bench.warden, "elasticd-zygote")
        return len(found) == 1

    wait_until(alone, "one process is the zygote")
    return found[0]


@pytest.fixture
def staying(bench: Bench, tmp_path: Path) -> tuple[LocalProcs, int]:
    """Workers that stay until they are stopped, and the zygote that forks later workers."""
    procs = _procs(bench, tmp_path, STAY)
    bench.start(procs, 2)
    wait_until_ready(procs)
    bench.kill(procs, 2)
    return procs, _zygote(bench)


# ---------------------------------------------------------------- when


def test_the_first_start_is_fresh_and_the_next_are_forked(bench: Bench, tmp_path: Path) -> None:
    procs = _procs(bench, tmp_path, SHOW)
    assert run(bench, procs, 2).out == b"False\n" * 2
    wait_until_ready(procs)
    for _ in range(3):
        assert run(bench, procs, 3).out.split() == [b"True"] * 3


def test_a_forked_worker_counts_its_steps(bench: Bench, tmp_path: Path) -> None:
    procs = _procs(bench, tmp_path, SHOW)
    for _ in range(2):
        run(bench, procs)
        wait_until_ready(procs)
        assert procs.steps() == {10: 1}


def test_a_script_that_never_steps_gets_no_zygote(bench: Bench, tmp_path: Path) -> None:
    procs = _procs(bench, tmp_path, "print('done')")
    run(bench, procs)
    assert run(bench, procs).out == b"done\n"
    assert not children(bench.warden.pid)


def test_arguments_may_differ_between_workers(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SHOW + "print(sys.argv[1:], sys.orig_argv[3:])")
    procs = bench.procs(
        lambda a: [sys.executable, "-u", str(tmp_path / "job.py"), "rank", str(a.rank)], zygote=True
    )
    run(bench, procs, 2)
    wait_until_ready(procs)
    said = run(bench, procs, 2).out.splitlines()
    assert sorted(said)[:2] == [b"True"] * 2
    assert sorted(said)[2:] == [f"['rank', '{rank}'] ['rank', '{rank}']".encode() for rank in (0, 1)]


def test_a_worker_of_another_environment_is_started_afresh(bench: Bench, tmp_path: Path) -> None:
    procs = _procs(bench, tmp_path, SHOW + "print(os.environ.get('OMP_NUM_THREADS'))")
    run(bench, procs)
    wait_until_ready(procs)
    bench.start(procs, OMP_NUM_THREADS="3")
    bench.wait()
    assert bench.console.lines() == [b"False", b"3"]
    assert run(bench, procs).out == b"True\nNone\n"


def test_a_worker_that_other_variables_are_asked_of_has_its_own(bench: Bench, tmp_path: Path) -> None:
    procs = _procs(bench, tmp_path, SHOW + "print(os.environ['RANK'])")
    run(bench, procs, 2)
    wait_until_ready(procs)
    assert sorted(run(bench, procs, 2).out.split()) == [b"0", b"1", b"True", b"True"]


def test_where_something_else_starts_with_python_workers_are_started_afresh(
    bench: Bench, tmp_path: Path
) -> None:
    """coverage does so from a .pth file. In each worker usercustomize and another sitecustomize run, too."""
    news = News()
    site = tmp_path / "user" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (site / "watcher.pth").write_text("import sys; sys.setprofile(lambda *_: None)\n")
    env = {**os.environ, "PYTHONUSERBASE": str(tmp_path / "user")}
    python = [sys._base_executable, "-u"]  # type: ignore[attr-defined]  # in a venv there is no user site
    (tmp_path / "job.py").write_text(SHOW)
    procs = bench.procs([*python, str(tmp_path / "job.py")], zygote=True, base_env=env, say=news)
    assert run(bench, procs).out == b"False\n"
    news.wait_for("zygote.given_up")
    assert run(bench, procs).out == b"False\n"
    assert len(news.of("zygote.given_up")) == 1


# ---------------------------------------------------------------- what is left out

OFFENDERS = {  # modules, by the reason for which each is left out
    "it reads RANK": "import os; RANK = os.environ.get('RANK')",
    "it starts threads": "import _thread, time; _thread.start_new_thread(time.sleep, (1e6,))",
    "it keeps files open": "import os; FD = os.open('/dev/null', os.O_RDONLY)",
    "it has memory that it would share": "import mmap; SHARED = mmap.mmap(-1, 4096)",
    "it initialises CUDA": (
        "import sys, types; sys.modules['torch.cuda'] = types.SimpleNamespace(is_initialized=lambda: True)"
    ),
    "it starts processes": "import subprocess; CHILD = subprocess.Popen(['/bin/sleep', '1000'])",
    "it cannot be imported: FileExistsError": "import os; os.mkdir(os.environ['ONCE'])",
    "it cannot be imported: SystemExit": "import os, sys\nif 'RANK' not in os.environ.copy(): sys.exit(3)",
    "it ends the process": (
        "import os, signal\nif 'RANK' not in os.environ.copy(): os.kill(os.getpid(), signal.SIGKILL)"
    ),
}


def test_modules_that_a_fork_does_not_suit_are_left_out_alone_each_with_its_reason(
    bench: Bench, tmp_path: Path
) -> None:
    package = tmp_path / "site-packages" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "fine.py").write_text("import colorsys")
    expected = {}
    for n, (why, text) in enumerate(OFFENDERS.items()):
        (package / f"offender{n}.py").write_text(text)
        (package / f"user{n}.py").write_text(f"from package import offender{n}")
        expected |= {f"package.offender{n}": why, f"package.user{n}": f"it imports package.offender{n}"}
    script = PREAMBLE.replace(
        "from steps",
        "there = set(sys.modules); os.environ['ONCE'] = os.environ['PLACE'] + str(os.getpid())\nfrom steps",
    )
    script += (
        f"from package import fine, {', '.join(f'user{n}' for n in range(len(OFFENDERS)))}\nstep_once()\n"
    )
    script += "print(forked, *(m for m in there if m.startswith('package.')))\nos._exit(0)"
    more = {"PYTHONPATH": str(package.parent), "PLACE": str(tmp_path / "once"), "ONCE": str(tmp_path)}
    procs = _procs(bench, tmp_path, script, base_env={**os.environ, **more}, say=(news := News()))
    assert run(bench, procs).out == b"False\n"
    wait_until_ready(procs)
    assert run(bench, procs, 2).out == b"True package.fine\n" * 2
    told = [(fields["module"], fields["why"]) for fields in news.of("zygote.left_out")]
    assert len(told) == len(expected), "each is said once"
    for module, why in told:
        assert why.startswith(expected[module]), (module, why)


def test_what_suits_is_imported_ahead_once_however_much_does_not(bench: Bench, tmp_path: Path) -> None:
    news = News()
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "heavy.py").write_text(
        f"import time\nwith open({str(tmp_path / 'imported')!r}, 'a') as file: file.write('once ')\n"
        "time.sleep(0.5)  # longer than what is imported again beside what does not suit\n"
    )
    unsuited = [f"unsuited{n}" for n in range(20)]
    for n, name in enumerate(unsuited):
        offender = "import os; RANK = os.environ.get('RANK')" if n % 2 else f"import unsuited{n + 1}"
        (site / f"{name}.py").write_text(offender)
    script = PREAMBLE + f"import heavy, {', '.join(unsuited)}\nstep_once()\nprint(forked)\n"
    procs = _procs(bench, tmp_path, script, base_env={**os.environ, "PYTHONPATH": str(site)}, say=news)
    assert run(bench, procs).out == b"False\n"
    wait_until_ready(procs)
    assert (tmp_path / "imported").read_text() == "once once ", "by the first worker, and ahead"
    assert {fields["module"] for fields in news.of("zygote.left_out")} == set(unsuited)
    assert run(bench, procs).out == b"True\n"


ALLOCATOR = """
import _thread, time

named = _thread.allocate_lock()
named.acquire()

def allocate():
    with open("/proc/thread-self/comm", "w") as file:
        file.write("jemalloc_bg_thd")
    named.release()
    time.sleep(1e6)

_thread.start_new_thread(allocate, ())
named.acquire()
"""


def test_threads_that_know_of_forks_do_not_count(bench: Bench, tmp_path: Path) -> None:
    """Such threads are those of pyarrow's allocator, which pandas and many other packages use."""
    news = News()
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "allocator.py").write_text(ALLOCATOR)
    script = (
        PREAMBLE
        + "there = 'allocator' in sys.modules\nimport allocator\nstep_once()\nprint(there)\nos._exit(0)"
    )
    procs = _procs(bench, tmp_path, script, base_env={**os.environ, "PYTHONPATH": str(site)}, say=news)
    assert run(bench, procs).out == b"False\n"
    wait_until_ready(procs)
    assert not news.of("zygote.left_out")
    assert run(bench, procs).out == b"True\n"


def test_what_only_a_later_worker_imports_is_imported_before_the_next(bench: Bench, tmp_path: Path) -> None:
    script = PREAMBLE + (
        "there = [name in sys.modules for name in ('colorsys', 'elasticd.core.age')]\n"
        "import elasticd.core.age\n"
        "if forked: import colorsys\n"
        "step_once()\nprint(*there)\n"
    )
    news = News()
    procs = _procs(bench, tmp_path, script, say=news)
    assert run(bench, procs).out == b"False False\n"
    wait_until_ready(procs)
    assert run(bench, procs).out == b"False True\n", "wherever elasticd itself is installed"
    news.wait_for("zygote.ready", 2)
    assert run(bench, procs).out == b"True True\n"


@pytest.fixture
def importing(bench: Bench, tmp_path: Path) -> tuple[LocalProcs, Path]:
    """Workers whose zygote is stuck in an import until the test writes to that file."""
    site = tmp_path / "site-packages"
    site.mkdir()
    until = tmp_path / "until"
    os.mkfifo(until)
    (site / "slow.py").write_text(
        f"import os\nif 'RANK' not in os.environ.copy(): open({str(until)!r}).read()"
    )
    script = STAY.replace("step_once()", "import slow; step_once()", 1)
    procs = _procs(bench, tmp_path, script, base_env={**os.environ, "PYTHONPATH": str(site)})
    bench.start(procs)
    wait_until(lambda: named(bench.warden, "elasticd-zygote"), "a zygote comes")
    bench.kill(procs)
    return procs, until


def test_workers_asked_of_a_zygote_that_still_imports_wait_for_it(
    bench: Bench, importing: tuple[LocalProcs, Path]
) -> None:
    procs, until = importing
    bench.start(procs, 2)
    until.write_text("go on")  # the import waits until the file is read
    assert [line.split()[0] for line in bench.console.wait_for_lines(2)] == [b"True"] * 2


def test_workers_do_not_wait_for_a_zygote_for_longer_than_they_take_without(
    bench: Bench, importing: tuple[LocalProcs, Path]
) -> None:
    procs, until = importing
    for _ in range(2):
        bench.start(procs, 2)
        assert [line.split()[0] for line in bench.console.wait_for_lines(2)] == [b"False"] * 2
        bench.kill(procs, 2)
    root = named(bench.warden, "elasticd-root")
    until.write_text("go on")
    wait_until_ready(procs)
    assert root == named(bench.warden, "elasticd-root"), "it was let import to the end"
    bench.start(procs)
    assert bench.console.wait_for_lines(1)[0].startswith(b"True")


@pytest.mark.parametrize(
    ("start_s", "most_s"), [(1000.0, 30.0), pytest.param(None, 300.0, id="the first workers wait for it")]
)
def test_a_zygote_may_import_as_long_as_a_fresh_worker_would_take_to_start(
    start_s: float | None, most_s: float
) -> None:
    ours, theirs = pair()
    request = Spawn(7, Program((), {}, "/"))
    zygote = ZygoteProcess(1, 0, ours, start_s)
    began = steady_now()
    zygote.preload(ImportModules((), Personal((), ()), {}))
    zygote.fork(request, [])
    assert zygote.until is not None and most_s - 5.0 < zygote.until - began < most_s + 10.0
    zygote.imported(1)
    for fork in zygote.give_up():
        fork.drop()
    zygote.fork(request, [])
    assert zygote.until is not None and zygote.until - steady_now() < 5.0
    for fork in zygote.give_up():
        fork.drop()
    zygote.channel.close()
    theirs.close()


# ---------------------------------------------------------------- the workers that are forked in advance


def test_at_least_as_many_workers_are_forked_in_advance_as_were_last_asked_for_at_once(
    bench: Bench, staying: tuple[LocalProcs, int]
) -> None:
    procs, _ = staying
    (embryo,) = named(bench.warden, "elasticd-embryo")
    bench.start(procs, 3)
    said = [line.split() for line in bench.console.wait_for_lines(3)]
    assert {(forked, int(parent)) for forked, _, parent in said} == {(b"True", bench.warden.pid)}
    assert embryo in {int(pid) for _, pid, _ in said}

    wait_until(lambda: len(named(bench.warden, "elasticd-embryo")) == 3, "three are forked")
    embryos = named(bench.warden, "elasticd-embryo")
    bench.kill(procs, 3)
    bench.start(procs, 2)
    assert {int(line.split()[1]) for line in bench.console.wait_for_lines(2)} == {*embryos[:2]}
    wait_until(lambda: len(named(bench.warden, "elasticd-embryo")) == 4, "three are forked")
    assert embryos[2] in named(bench.warden, "elasticd-embryo")


@pytest.mark.parametrize(
    ("asked", "forked"),
    [
        ([(0, 2), (100, 1), (200, 1), (300, 1)], [2, 0, 1, 1]),
        ([(0, 2), (5, 1), (10, 1), (15, 1), (20, 1), (25, 1), (30, 1)], [2, 0, 4, 0, 0, 0, 4]),
        ([(0, 8), (5, 8), (10, 1)], [8, 8, 0]),
        ([(0, 40)], [32]),
    ],
    ids=["seldom", "often", "all together", "more than are forked in advance"],
)
def test_workers_that_are_often_replaced_are_forked_together(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[float, int]], forked: list[int]
) -> None:
    """``asked``: the times, and the workers that are asked for. ``forked``: the embryos that follow."""
    monkeypatch.syspath_prepend(BOOT_DIR)
    module = importlib.import_module("elasticd_embryos")
    ends: list[socket.socket] = []

    def ends_of_a_channel() -> tuple[socket.socket, socket.socket]:
        ends.extend(pair())
        return ends[-2], ends[-1]

    framing = SimpleNamespace(pair=ends_of_a_channel, Channel=lambda sock, says, hears: sock)
    words = SimpleNamespace(EMBRYO_TO_ZYGOTE=None, WARDEN_TO_ZYGOTE=None)
    made: list[int] = []

    def fork_apart(count: int) -> list[int]:
        made.append(count)
        return [1] * count

    monkeypatch.setattr(module, "fork_apart", fork_apart)
    embryos = module.Embryos(framing, words)
    found = []
    for at, workers in asked:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda at=at: at))
        embryos.asked_for(workers)
        embryos._waiting = embryos._waiting[workers:]
        made.clear()
        embryos.fork()
        found.append(sum(made))
    embryos.drop()
    for end in ends:
        end.close()
    assert found == forked


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_is_forked_ahead_and_dies_or_does_not_answer_is_replaced(
    bench: Bench, staying: tuple[LocalProcs, int], number: signal.Signals
) -> None:
    procs, _ = staying
    bench.start(procs, 3)
    wait_until(lambda: len(named(bench.warden, "elasticd-embryo")) == 3, "three are forked")
    _, lost, _ = embryos = named(bench.warden, "elasticd-embryo")
    bench.kill(procs, 3)
    os.kill(lost, number)
    if number == signal.SIGKILL:
        wait_until_gone([lost])
    bench.start(procs, 3)
    said = [line.split() for line in bench.console.wait_for_lines(3)]
    assert {forked for forked, *_ in said} == {b"True"}
    assert {int(pid) for _, pid, _ in said} & {*embryos} == {*embryos} - {lost}
    wait_until_gone([lost])


def test_what_is_forked_ahead_ends_with_the_zygote(bench: Bench, staying: tuple[LocalProcs, int]) -> None:
    _, zygote = staying
    embryos = named(bench.warden, "elasticd-embryo")
    os.kill(zygote, signal.SIGKILL)
    wait_until_gone([zygote, *embryos])


# ---------------------------------------------------------------- the warden's children


def test_forked_workers_are_the_wardens_children_and_die_with_it(
    bench: Bench, staying: tuple[LocalProcs, int]
) -> None:
    procs, zygote = staying
    bench.start(procs, 2)
    said = [line.split() for line in bench.console.wait_for_lines(2)]
    assert {(forked, int(parent)) for forked, _, parent in said} == {(b"True", bench.warden.pid)}
    os.kill(bench.warden.pid, signal.SIGKILL)
    bench.wait(2)
    wait_until_gone([zygote, *(int(pid) for _, pid, _ in said)])


def test_what_a_forked_worker_leaves_behind_is_killed_while_others_and_theirs_live_on(
    bench: Bench, tmp_path: Path
) -> None:
    family = (PROGRAMS / "family.py").read_text().replace("signal.pause()", "step_once(); signal.pause()")
    procs = _procs(bench, tmp_path, PREAMBLE.replace("\n", ";", 2) + family, "child,setsid,daemon")
    bench.start(procs, 2)
    bench.console.wait_for_lines(2)
    wait_until_ready(procs)
    bench.kill(procs, 2)
    bench.start(procs, 2)
    dead, living = (json.loads(line.removeprefix(b"family ")) for line in bench.console.wait_for_lines(2))
    os.kill(dead["worker"], signal.SIGKILL)
    wait_until_gone(dead.values())
    assert all(map(is_running, living.values()))
    (exit,) = bench.wait()
    assert exit.code == -signal.SIGKILL


def test_a_daemon_forked_without_exec_is_killed_with_its_worker(bench: Bench, tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
step_once()
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writer, str(os.getpid()).encode())
        time.sleep(1000)
    os._exit(0)
os.wait()
print(forked, os.getpid(), os.read(reader, 20).decode(), flush=True)
time.sleep(1000)
"""
    )
    procs = _procs(bench, tmp_path, script)
    bench.start(procs, 2)
    wait_until_ready(procs)
    bench.kill(procs, 2)
    bench.start(procs, 2)
    dead, living = ([int(pid) for pid in line.split()[1:]] for line in bench.console.wait_for_lines(2))
    os.kill(dead[0], signal.SIGKILL)
    wait_until_gone(dead)
    assert all(map(is_running, living))


# ---------------------------------------------------------------- when the zygote fails


def test_the_death_of_the_zygote_leaves_its_workers_alone_and_another_one_comes(
    bench: Bench, staying: tuple[LocalProcs, int]
) -> None:
    procs, zygote = staying
    bench.start(procs, 2)
    pids = [int(line.split()[1]) for line in bench.console.wait_for_lines(2)]
    os.kill(zygote, signal.SIGKILL)
    wait_until_gone([zygote])
    wait_until(lambda: set(named(bench.warden, "elasticd-zygote")) - {zygote}, "another one comes")
    wait_until_ready(procs)
    assert all(map(is_running, pids))
    assert not bench.exits
    bench.kill(procs, 2)
    bench.start(procs)
    assert bench.console.wait_for_lines(1)[0].startswith(b"True")


def test_workers_asked_of_a_zygote_that_hangs_are_started_afresh(
    bench: Bench, staying: tuple[LocalProcs, int]
) -> None:
    procs, zygote = staying
    os.kill(zygote, signal.SIGSTOP)
    bench.start(procs, 2)
    assert [line.split()[0] for line in bench.console.wait_for_lines(2)] == [b"False"] * 2
    wait_until_gone([zygote])


def test_workers_asked_of_a_zygote_that_dies_are_started_afresh(
    bench: Bench, staying: tuple[LocalProcs, int]
) -> None:
    procs, zygote = staying
    os.kill(zygote, signal.SIGSTOP)
    bench.start(procs, 2)
    os.kill(zygote, signal.SIGKILL)
    assert [line.split()[0] for line in bench.console.wait_for_lines(2)] == [b"False"] * 2


@pytest.mark.parametrize("room", [3, 5, 7])  # the worker's three files, its link, and copies of the files
def test_a_warden_without_descriptors_for_a_fork_reports_an_error_and_lives_on(
    bench: Bench, staying: tuple[LocalProcs, int], room: int
) -> None:
    procs, zygote = staying
    with bench.room(room):
        bench.start(procs)
        if room == 3:
            (exit,) = bench.wait()
            assert (exit.code, exit.message) == (127, "cannot fork: Too many open files")
        else:  # enough for a start without the zygote; 7 are enough for a fork if the zygote is quick
            forked = [line.split()[0] for line in bench.console.wait_for_lines(1)]
            assert forked == [b"False"] or (room == 7 and forked == [b"True"])
            bench.kill(procs)
    bench.start(procs)
    assert [line.split()[0] for line in bench.console.wait_for_lines(1)] == [b"True"]
    assert _zygote(bench) == zygote


@pytest.mark.parametrize("room", range(2, 12))
def test_a_fork_is_requested_whole_or_not_at_all_if_there_are_few_descriptors(room: int) -> None:
    """A request that is larger than a packet takes one descriptor more if it is sent, and four if it
    waits."""
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = pair()
    zygote = ZygoteProcess(1, 0, ours, start_s=0.0)
    files = list(os.pipe())
    with descriptors(room):
        try:
            zygote.fork(Spawn(7, Program((), {"LARGE": "x" * 70_000}, "/")), [*files, files[1]])
        except OSError:
            assert zygote.until is None, "nobody waits for a fork that was not requested"
        else:
            assert zygote.until is not None
    for fork in zygote.give_up():
        fork.drop()
    close_all(files)
    zygote.channel.close()
    theirs.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_workers_that_are_stopped_before_they_are_forked_never_run(
    bench: Bench, staying: tuple[LocalProcs, int]
) -> None:
    procs, zygote = staying
    os.kill(zygote, signal.SIGSTOP)
    bench.start(procs, 2)
    procs.stop(signal.SIGTERM, 60.0)
    assert [(exit.code, exit.fenced) for exit in bench.wait(2)] == [(-signal.SIGTERM, False)] * 2
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children(bench.warden.pid)}
    os.kill(zygote, signal.SIGCONT)
    bench.start(procs)
    (line,) = bench.console.wait_for_lines(1)
    forked, pid, _ = line.split()
    assert forked == b"True"
    worker = Path(f"/proc/{int(pid)}/comm").read_text().strip()
    dying = [pid for pid, name in names.items() if name == worker]  # the killed workers are not reaped yet
    called_so = [pid for pid in named(bench.warden, worker) if pid not in dying]
    assert called_so == [int(pid)], "the others are not called so yet, and never will be"


def test_the_fence_holds_for_workers_that_are_still_to_be_forked(
    bench: Bench, staying: tuple[LocalProcs, int]
) -> None:
    procs, zygote = staying
    os.kill(zygote, signal.SIGSTOP)
    procs.fence(time.time() + 0.2)
    bench.start(procs, 2)
    assert [(exit.code, exit.fenced) for exit in bench.wait(2)] == [(-signal.SIGKILL, True)] * 2
    os.kill(zygote, signal.SIGCONT)
    procs.fence(None)
    bench.start(procs)
    assert bench.console.wait_for_lines(1)[0].split()[0] == b"True"


def test_a_folder_that_is_gone_is_an_exit_of_127_with_the_reason(bench: Bench, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    procs = _procs(bench, tmp_path, SHOW, cwd=place)
    run(bench, procs)
    wait_until_ready(procs)
    place.rmdir()
    (exit,) = run(bench, procs).exits
    assert (exit.code, exit.message) == (127, f"cannot run in {place}: No such file or directory")


def test_closing_ends_the_zygote(bench: Bench, staying: tuple[LocalProcs, int]) -> None:
    procs, zygote = staying
    bench.warden.close()
    wait_until_gone([zygote])
    assert not procs.page_dir.exists()


def test_the_warden_outlives_a_worker_that_is_killed_before_it_heard_its_go() -> None:
    """The worker has not read its message, which comes back as an error of the link."""
    ours, theirs = socket.socketpair()
    ours.send(b"g")
    theirs.close()
    assert start_error(ours.detach()) is None
