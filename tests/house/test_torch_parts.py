"""The private parts of torch that elasticd uses: listed in one place, and still as listed."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd import torchparts
from elasticd.torchparts import MARKS, REPLACED, USED, Private

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "elasticd").rglob("*.py"))
PYTHONS = {  # of the standard library, and of namedtuple
    "_Environ", "_Pointer", "_SimpleCData", "_exit", "_finalizer_registry", "_getframe", "_ncallbacks",
    "_replace", "_set_native_id", "_ssl", "_startTime", "_test_decode_cert",
}  # fmt: skip
# Private parts of Accelerate, Lightning and Transformers: tests/integrations would notice their absence.
FRAMEWORKS = {"_checkpoint_connector", "_reset_state", "_restarting", "_save_checkpoint"}


def found(of: str) -> Any:
    """Return what the name leads to; raises AttributeError if there is no such part."""
    parts = of.split(".")
    thing: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            try:
                thing = importlib.import_module(".".join(parts[:depth]))
            except ImportError:
                raise AttributeError(f"torch has no {of}") from None
    return thing


def is_there(part: Private) -> bool:
    """Whether this build of torch should have the part: only builds for CUDA have NCCL's parts."""
    import torch

    installed = torchparts.release(torch.__version__)
    of_nccl = "NCCL" in part.name or "nccl" in part.name
    return installed >= part.since and (not of_nccl or torch.distributed.is_nccl_available())


@pytest.mark.parametrize("part", [*REPLACED, *USED], ids=lambda part: part.name)
def test_torch_still_has_each_part_as_it_is_listed(part: Private) -> None:
    if not is_there(part):
        pytest.skip("not in this build of torch")
    thing = found(part.name)
    if part.takes:
        assert tuple(inspect.signature(thing).parameters)[: len(part.takes)] == part.takes


# Functions of torch that make a tensor on the default device, which a script may set.
MAKES_A_TENSOR = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_tensor_is_made_on_whatever_device_is_the_default(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {f"torch.{name}" for name in MAKES_A_TENSOR}
    made = [call for call in calls if ast.unparse(call.func) in names]
    assert not [call.lineno for call in made if "device" not in {key.arg for key in call.keywords}]


def private_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            hidden = any(part.startswith("_") for part in (node.module or "").split("."))
            yield from (
                alias.name if not hidden else f"_of_a_private_module.{alias.name}" for alias in node.names
            )


def own_names(tree: ast.Module) -> Iterator[str]:
    """Yield all names that a module of elasticd defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from (node.attr,) if ast.unparse(node.value) in ("self", "cls") else ()


def test_no_private_part_of_torch_is_used_that_is_not_listed() -> None:
    trees = [ast.parse(module.read_text()) for module in MODULES]
    ours = {name for tree in trees for name in own_names(tree)}
    used = {
        name
        for tree in trees
        for name in private_names(tree)
        if name.startswith("_") and not name.startswith("__") and name not in ours
    }
    listed = {piece for part in (*REPLACED, *USED) for piece in part.name.split(".")} | set(MARKS)
    assert {
        name.removeprefix("_of_a_private_module.") for name in used
    } - PYTHONS - FRAMEWORKS - listed == set()


def test_each_listed_part_is_used() -> None:
    text = "".join(m.read_text() for m in MODULES if m.name != "torchparts.py")
    assert not [part.name for part in (*REPLACED, *USED) if part.name.rpartition(".")[2] not in text]


def test_the_oldest_release_is_the_one_that_is_installed_at_least() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = (d for d in dependencies if d.startswith("torch"))
    assert torch == "torch>=" + ".".join(map(str, torchparts.OLDEST))
    assert torchparts.release(torchparts.CHECKED[0]) == torchparts.OLDEST


@pytest.mark.parametrize(
    ("version", "too_old", "untested"),
    [
        ("1.13.1", True, False),
        ("2.6.0", True, False),
        ("2.6.0+cu124", True, False),
        ("2.7.1+cpu", True, False),
        ("2.8.0", False, False),
        ("2.13.0+cpu", False, False),
        ("2.13.0a0+git1234567", False, False),
        ("2.15.0", False, False),
        ("2.16.0.dev20261101", False, True),
        ("2.100.0", False, True),
        ("3.0.0", False, True),
        ("built by hand", False, True),
    ],
)
def test_releases_are_refused_below_the_oldest_and_noted_above_the_newest(
    version: str, too_old: bool, untested: bool
) -> None:
    assert bool(torchparts.too_old(version)) is too_old
    if too_old:
        assert version in torchparts.too_old(version)
    assert bool(torchparts.untested(version)) is untested


def test_a_run_on_an_old_release_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Torch is not imported for this: the notes that pip has kept about torch are enough."""
    (tmp_path / "torch-2.6.0.dist-info").mkdir()
    (tmp_path / "torch-2.6.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.6.0\n")
    (tmp_path / "job.py").write_text("")
    ran = subprocess.run(
        [sys.executable, "-m", "elasticd.cli.begin", "run", "--plain", str(tmp_path / "job.py")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [
        "elasticd: PyTorch 2.6.0 is too old for elasticd, which needs 2.8 or newer: pip install 'torch>=2.8'."
    ]
