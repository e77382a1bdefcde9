"""Workers of the first round, forked from a zygote that has imported what the script begins with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd.cli.script import find
from elasticd.core.ports import Assignment
from elasticd.daemon.config import CommandKind
from elasticd.procs.workers import LocalProcs
from tests.procs.conftest import Bench, News, named
from tests.procs.forked import run
from tests.procs.test_zygote import OFFENDERS

FORKED = "import gc\nprint('forked', gc.get_freeze_count() > 1000)\n"
OMP = "OMP_NUM_THREADS"

Expected = Callable[..., LocalProcs]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site-packages"
    site.mkdir()
    counted = f"with open({str(tmp_path / 'imported')!r}, 'a') as file: file.write(__name__ + ' ')\n"
    (site / "heavy.py").write_text(counted)
    (site / "later.py").write_text(counted)
    (site / "reader.py").write_text(f"import os\n{counted}SEEN = os.environ.get({OMP!r})\n")
    return site


@pytest.fixture
def expected(bench: Bench, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Expected:
    """Make workers of a script for which the zygote imports modules before they start."""
    monkeypatch.syspath_prepend(str(site))

    def expect(text: str, *, news: News | None = None, **more: str) -> LocalProcs:
        (tmp_path / "job.py").write_text(text)
        imports = find(CommandKind.SCRIPT, str(tmp_path / "job.py"), ()).text.imports
        procs = bench.procs(
            [sys.executable, "-u", str(tmp_path / "job.py")],
            zygote=True,
            imports=imports,
            base_env={**os.environ, "PYTHONPATH": str(site), **more},
            say=news or News(),
        )
        procs.expect(Assignment(0, 0, 0, {"RANK": "0"}))
        return procs

    return expect


def _imported(tmp_path: Path) -> list[str]:
    return (tmp_path / "imported").read_text().split()


def test_what_the_script_begins_with_is_imported_once_for_all_workers(
    bench: Bench, expected: Expected, tmp_path: Path
) -> None:
    procs = expected("import heavy\nfrom later import file as f\n" + FORKED)
    ran = run(bench, procs, 4)
    assert ran.out.splitlines() == [b"forked True"] * 4, ran.err
    assert _imported(tmp_path) == ["heavy", "later"]


def test_workers_have_their_own_variables(bench: Bench, expected: Expected) -> None:
    procs = expected("import heavy, os\nprint(os.environ['RANK'])\n" + FORKED)
    out = run(bench, procs, 3).out.splitlines()
    assert sorted(out) == [b"0", b"1", b"2", *[b"forked True"] * 3]


def test_a_variable_that_the_script_sets_first_is_seen_by_what_it_imports_then(
    bench: Bench, expected: Expected, tmp_path: Path
) -> None:
    procs = expected(
        f"import os, heavy\nos.environ[{OMP!r}] = '3'\nimport reader\nprint(reader.SEEN)\n" + FORKED
    )
    assert sorted(run(bench, procs, 2).out.splitlines()) == [b"3", b"3", b"forked True", b"forked True"]
    assert _imported(tmp_path) == ["heavy", "reader", "reader"], "by each worker"


def test_a_module_of_the_script_that_comes_first_may_set_a_variable(
    bench: Bench, expected: Expected, tmp_path: Path
) -> None:
    (tmp_path / "settings.py").write_text(f"import os; os.environ[{OMP!r}] = '3'")
    procs = expected("import heavy, settings, reader\nprint(reader.SEEN)\n")
    assert run(bench, procs).out == b"3\n"


def test_an_installed_module_that_comes_first_may_set_a_variable(
    bench: Bench, expected: Expected, site: Path, tmp_path: Path
) -> None:
    (site / "settings.py").write_text(f"import os; os.environ[{OMP!r}] = '3'")
    procs = expected(
        "import settings, reader, os\nprint(reader.SEEN, os.environ['OMP_NUM_THREADS'])\n" + FORKED
    )
    out = run(bench, procs, 2).out.splitlines()
    assert sorted(out) == [b"3 3", b"3 3", b"forked True", b"forked True"]
    assert _imported(tmp_path) == ["reader"], "once, after the other"


def test_a_module_of_the_script_hides_an_installed_one(
    bench: Bench, expected: Expected, tmp_path: Path
) -> None:
    (tmp_path / "later.py").write_text("file = 'own'")
    procs = expected("import heavy\nfrom later import file\nprint(file)\n" + FORKED)
    assert run(bench, procs).out == b"own\nforked True\n"


def test_a_path_that_the_script_adds_is_searched_first(
    bench: Bench, expected: Expected, tmp_path: Path
) -> None:
    (tmp_path / "vendored").mkdir()
    (tmp_path / "vendored" / "later.py").write_text("file = 'vendored'")
    text = "import heavy, sys\nsys.path.insert(0, 'vendored')\nfrom later import file\nprint(file)\n"
    assert run(bench, expected(text + FORKED)).out == b"vendored\nforked True\n"


@pytest.mark.parametrize("why", ["it reads RANK", "it ends the process"])  # others: test_zygote
def test_a_module_that_a_fork_does_not_suit_is_imported_by_each_worker_and_so_is_what_follows(
    bench: Bench, expected: Expected, site: Path, tmp_path: Path, why: str
) -> None:
    (site / "offender.py").write_text(OFFENDERS[why])
    news = News()
    text = "import heavy, os\nimport offender, later\nprint(getattr(offender, 'RANK', ''))\n" + FORKED
    procs = expected(text + "os._exit(0)", news=news)
    ran = run(bench, procs, 2)
    assert ran.out.count(b"forked True") == 2, ran.err
    if why == "it reads RANK":
        assert sorted(line for line in ran.out.splitlines() if line.isdigit()) == [b"0", b"1"]
    assert _imported(tmp_path).count("later") == 2, "by each worker, though it would suit"
    assert "offender" in {fields["module"] for fields in news.of("zygote.left_out")}


def test_members_that_a_package_loads_on_demand_are_loaded_ahead(
    bench: Bench, expected: Expected, site: Path, tmp_path: Path
) -> None:
    """The package transformers loads its members so."""
    package = site / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib\nname = 'a function'\n"
        "def __getattr__(name):\n    if name != 'Model': raise AttributeError(name)\n"
        "    return importlib.import_module('package.models').Model\n"
    )
    (package / "models.py").write_text("import heavy\nclass Model: ...\n")
    (package / "module.py").write_text("import later\n")
    (package / "name.py").write_text("raise AssertionError('the package has this name itself')")
    text = "from package import Model, module, name\nprint(Model.__name__, module.__name__, name)\n"
    ran = run(bench, expected(text + FORKED), 2)
    assert sorted(ran.out.splitlines()) == [*[b"Model package.module a function"] * 2, *[b"forked True"] * 2]
    assert _imported(tmp_path) == ["heavy", "later"]


def test_what_cannot_be_imported_fails_in_the_worker(bench: Bench, expected: Expected, site: Path) -> None:
    (site / "broken.py").write_text("import not_there")
    (exit,) = run(bench, expected("import heavy\nimport broken\n")).exits
    assert exit.code == 1
    assert "No module named 'not_there'" in exit.message


def test_a_module_that_prints_prints_in_every_worker(bench: Bench, expected: Expected, site: Path) -> None:
    (site / "talker.py").write_text("print('a word')")
    assert run(bench, expected("import talker\n"), 2).out == b"a word\n" * 2


def test_a_script_that_begins_with_nothing_installed_gets_no_zygote_before_its_first_step(
    bench: Bench, expected: Expected
) -> None:
    procs = expected("import os\n" + FORKED)
    assert not named(bench.warden, "elasticd-root")
    assert run(bench, procs).out == b"forked False\n"


def test_workers_that_differ_from_what_was_expected_are_started_afresh(
    bench: Bench, expected: Expected
) -> None:
    procs = expected("import reader\nprint(reader.SEEN)\n" + FORKED, **{OMP: "1"})
    bench.start(procs, OMP_NUM_THREADS="2")
    bench.wait()
    assert bench.console.lines() == [b"2", b"forked False"]
