"""One name for one thing: no class name is defined in two modules of elasticd."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "elasticd"
# Still defined twice. The list only shrinks.
TWICE = {
    "Doing",
    "Progress",
    "Leave",
    "Standalone",
    "Standing",
    "State",
    "Step",
    "Worker",
}


def test_a_class_name_is_defined_once() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(file.relative_to(PACKAGE)))
    assert len(where) > 300
    twice = {name: files for name, files in where.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in TWICE} == {}
    assert TWICE - twice.keys() == set(), "these are defined once by now: take them off the list"
