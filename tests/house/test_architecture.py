"""ARCHITECTURE.md names functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
WALKS = TEXT.partition("## Five walks")[2].partition("\n## ")[0]
NAMES = sorted(set(re.findall(r"`(elasticd(?:\.\w+)+)`", WALKS)))


def defined(name: str) -> bool:
    """Whether this dotted name is a module, or a class or function in one."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:i])
        if module.is_dir() and i == len(parts):
            return True
        file = module.with_suffix(".py")
        if file.is_file():
            return _holds(_parsed(file), parts[i:])
    return False


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _holds(node: ast.AST, names: list[str]) -> bool:
    if not names:
        return True
    inside = [
        child
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == names[0]
    ]
    return any(_holds(child, names[1:]) for child in inside)


def test_there_are_five_walks() -> None:
    assert WALKS.count("\n### ") == 5 and len(NAMES) > 30


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_walk_is_in_the_code(name: str) -> None:
    assert defined(name)


def test_a_name_that_is_not_in_the_code_is_noticed() -> None:
    assert not defined("elasticd.core.seating.deform") and not defined("elasticd.nothing.at_all")
