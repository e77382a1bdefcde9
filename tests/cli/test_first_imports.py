"""What a script imports at its beginning, read from its text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd.cli.first_imports import read_imports
from elasticd.cli.script import find
from elasticd.daemon.config import CommandKind

Read = Callable[..., tuple[str, ...]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read a text. ``own``: the modules that are not installed."""

    def read(text: str, *own: str) -> tuple[str, ...]:
        (tmp_path / "text.py").write_text(text)
        return read_imports([str(tmp_path / "text.py")], str(tmp_path), lambda name: name not in own).first

    return read


def test_imports_are_listed_in_their_order_with_the_names_they_take(read: Read) -> None:
    text = (
        '#!/usr/bin/env python\n"""A script."""\nfrom __future__ import annotations\nimport os, sys\n'
        "import torch.distributed as dist\nfrom torch import Tensor, nn as layers\nfrom math import *\nmain()"
    )
    assert read(text) == ("os", "sys", "torch.distributed", "torch:Tensor", "torch:nn", "math")


@pytest.mark.parametrize(
    "statement",
    ["VERSION = '1'", "A = B = 1", "pass", "'a text'", "if TYPE_CHECKING:\n    import other",
     "if typing.TYPE_CHECKING:\n    import other"],
)  # fmt: skip
def test_a_statement_without_an_effect_is_passed_over(read: Read, statement: str) -> None:
    assert read(f"import a\n{statement}\nimport b\n") == ("a", "b")


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "os.environ.setdefault('HF_HOME', '/data')",
        "sys.path.insert(0, 'lib')",
        "warnings.filterwarnings('ignore')",
        "VERSION = version()",
        "NAMES[0] = 1",
        "VERSION: str = '1'",
        "if DEBUG:\n    import c",
        "if TYPE_CHECKING:\n    import c\nelse:\n    import d",
        "try:\n    import c\nexcept ImportError:\n    c = None",
        "def f(x=g()): ...",
        "class C: ...",
        "with catch_warnings(): import c",
        "from . import sibling",
        "import own",
        "from own.module import name",
    ],
)
def test_the_list_ends_before_what_may_change_an_import(read: Read, statement: str) -> None:
    assert read(f"import a\n{statement}\nimport b\n", "own") == ("a",)


def test_a_statement_that_imports_something_own_is_left_out_whole(read: Read) -> None:
    assert read("import a\nimport b, own\n", "own") == ("a",)


# ---------------------------------------------------------------- a script in its folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, and folders of installed and of other modules on the Python path."""
    for place, name in (("site-packages", "installed"), ("site-packages", "shadowed"), ("lib", "linked")):
        package = tmp_path / place / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('it is not to be imported')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages"), str(tmp_path / "lib")])
    work = tmp_path / "work"
    (work / "installed").mkdir(parents=True)  # a folder of data with that name
    (work / "shadowed.py").touch()
    monkeypatch.chdir(work)
    return work


def _of_script(folder: Path, text: str) -> tuple[str, ...]:
    (folder / "job.py").write_text(text)
    return find(CommandKind.SCRIPT, "job.py", ()).text.imports


@pytest.mark.parametrize("name", ["installed", "elasticd", "numpy"])
def test_an_installed_module_is_listed_though_a_folder_has_its_name(folder: Path, name: str) -> None:
    assert _of_script(folder, f"import os, {name}") == ("os", name)


@pytest.mark.parametrize("name", ["shadowed", "linked", "missing"])
def test_what_is_the_scripts_own_or_nowhere_ends_the_list(folder: Path, name: str) -> None:
    assert _of_script(folder, f"import installed\nimport {name}\nimport torch") == ("installed",)


def test_a_module_beside_a_linked_script_is_its_own(folder: Path, tmp_path: Path) -> None:
    (folder / "job.py").write_text("import installed, shadowed")
    (tmp_path / "link.py").symlink_to(folder / "job.py")
    assert find(CommandKind.SCRIPT, str(tmp_path / "link.py"), ()).text.imports == ()


def test_the_standard_library_alone_is_not_worth_a_list(folder: Path) -> None:
    assert _of_script(folder, "import os, json\nfrom collections import deque") == ()


def test_another_python_may_import_anything_else(folder: Path) -> None:
    (folder / "job.py").write_text("import installed")
    assert find(CommandKind.SCRIPT, "job.py", (), own_python=False).text.imports == ()


@pytest.mark.parametrize(
    ("init", "listed"),
    [("", ("installed",)), ("'''A package.'''", ("installed",)), ("import os\nos.environ.clear()", ())],
)
def test_a_module_is_read_after_its_package(folder: Path, init: str, listed: tuple[str, ...]) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    for name in ("job", "__main__"):
        (package / f"{name}.py").write_text("import installed\nfrom package import other\nimport torch")
    assert find(CommandKind.MODULE, "package.job", ()).text.imports == listed
    assert find(CommandKind.MODULE, "package", ()).text.imports == listed


def test_a_module_in_no_package_is_read_as_a_script(folder: Path) -> None:
    (folder / "job.py").write_text("import installed, numpy")
    assert find(CommandKind.MODULE, "job", ()).text.imports == ("installed", "numpy")


# ---------------------------------------------------------------- torch's imports for the first optimizer


@pytest.mark.parametrize("text", ["", "os.environ['RANK'], os.environ.get('WORLD_SIZE')", "x.update({})"])
def test_what_torch_imports_for_an_optimizer_is_listed_last(folder: Path, text: str) -> None:
    assert _of_script(folder, f"import torch, installed\n{text}") == ("torch", "installed", "torch._dynamo")


@pytest.mark.parametrize(
    "text",
    [
        "os.environ['TMPDIR'] = '/scratch'",
        "del os.environ['TMPDIR']",
        "def main():\n    environ.setdefault('TMPDIR', '/scratch')",
        "os.environ.update(TMPDIR='/scratch')",
        "os.putenv('TMPDIR', '/scratch')",
        "dotenv.load_dotenv()",
    ],
)
def test_imports_after_a_change_of_the_environment_are_not_listed(folder: Path, text: str) -> None:
    assert _of_script(folder, f"import torch\n{text}") == ("torch",)


@pytest.mark.parametrize(
    "statement",
    ["import settings", "from settings import x", "import shadowed", "from package import inner",
     "import package.inner as p", "def main():\n    from package.inner import y"],
)  # fmt: skip
def test_nor_if_a_module_of_the_script_does_so(folder: Path, statement: str) -> None:
    (folder / "package").mkdir()
    for path, text in {
        "settings.py": "import os\nos.environ['TMPDIR'] = '/scratch'",
        "shadowed.py": "import settings, shadowed",
        "package/__init__.py": "from . import inner",
        "package/inner.py": "from ..package import inner\nfrom .deep import x",
        "package/deep.py": "from .. import settings",
    }.items():
        (folder / path).write_text(text)
    assert _of_script(folder, f"import torch\n{statement}") == ("torch",)
    deep = read_imports([str(folder / "package" / "deep.py")], str(folder), lambda name: True)
    assert deep.changes_environment


def test_a_module_of_the_script_that_cannot_be_read_leaves_nothing_to_list(folder: Path) -> None:
    (folder / "settings.py").write_text("a b")
    assert _of_script(folder, "import torch, settings") == ()
