"""One name for one thing: no two classes of elasticd have the same name, and no two modules."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "elasticd"


def test_a_class_name_is_defined_once() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(file.relative_to(PACKAGE)))
    assert len(where) > 300
    twice = {name: files for name, files in where.items() if len(files) > 1}
    assert twice == {}, "two classes have the same name: name each after what it is"


def test_a_module_name_is_used_once() -> None:
    count = Counter(file.stem for file in PACKAGE.rglob("*.py") if file.stem != "__init__")
    assert len(count) > 200
    twice = {name for name, modules in count.items() if modules > 1}
    assert twice == set(), "two modules have the same name: name each after what it holds"
