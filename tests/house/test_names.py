"""One name for one thing: classes, modules, and what a test is about."""

from __future__ import annotations

import ast
import re
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
    """Packages count, too. ``worker.data`` is what a script sees of the package ``data``."""
    names = [file.stem if file.stem != "__init__" else file.parent.name for file in PACKAGE.rglob("*.py")]
    assert len(names) > 200
    twice = {name for name, modules in Counter(names).items() if modules > 1}
    assert twice == {"data"}, "two modules have the same name: name each after what it holds"


def test_the_name_of_a_test_begins_with_its_subject() -> None:
    """A pronoun in the place of the subject makes a name that only the author understands."""
    pronouns = "it|its|they|that|this|those|these|such|who|whom|whoever|whatever|nobody|somebody|and|so"
    vague = re.compile(rf"test_({pronouns}|one_that|one_who|all_things)_")
    names = [
        node.name
        for file in sorted(PACKAGE.with_name("tests").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 2000
    assert [name for name in names if vague.match(name)] == []
