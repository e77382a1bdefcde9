"""What a program imports, read from its text without running it."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Imports:
    """What a program imports.

    * ``first``: what the program imports before anything else, in order: "torch" for ``import torch``, and
      "torch:nn" for ``from torch import nn``, whether ``nn`` is a module or not. The list ends before the
      first statement that may change what an import finds or does, such as a change of the environment or of
      ``sys.path``. The list also ends before the first module that is not installed.
    * ``changes_environment``: whether the program, or a module in its folder, may change an environment
      variable.
    * ``needs_packages``: whether the program, or a module in its folder, imports more than the standard
      library.
    """

    first: tuple[str, ...]
    changes_environment: bool
    needs_packages: bool


def read_imports(paths: Sequence[str], folder: str, is_installed: Callable[[str], bool]) -> Imports:
    """Read what these files import, run one after the other.

    ``folder``: has the modules of the program's own. ``is_installed``: takes the name of a module that is in
    no package. Raises OSError, SyntaxError and ValueError if a file cannot be read.
    """
    texts = _texts(paths, folder)
    nodes = [(node, os.path.dirname(path)) for path, text in texts.items() for node in ast.walk(text)]
    return Imports(
        _first([statement for path in paths for statement in texts[path].body], is_installed),
        any(_changes_environment(node) for node, _ in nodes),
        any(_needs_package(node, folder, place) for node, place in nodes),
    )


def _texts(paths: Sequence[str], folder: str) -> dict[str, ast.Module]:
    """Read these files, and the modules of ``folder`` that the files import."""
    texts: dict[str, ast.Module] = {}
    todo = list(paths)
    while todo:
        path = todo.pop()
        if path not in texts:
            texts[path] = _read(path)
            place = os.path.dirname(path)
            todo += [own for node in ast.walk(texts[path]) for own in _own_modules(node, folder, place)]
    return texts


def _read(path: str) -> ast.Module:
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the workers print the warnings
        return ast.parse(file.read())


def _first(statements: Sequence[ast.stmt], is_installed: Callable[[str], bool]) -> tuple[str, ...]:
    found: list[str] = []
    for statement in statements:
        names = _imported(statement)
        if names is None or not all(is_installed(package_of(name)) for name in names):
            break
        found += names
    return tuple(found)


def package_of(name: str) -> str:
    """Return "torch" for "torch.distributed" and for "torch:nn"."""
    return name.partition(":")[0].partition(".")[0]


def _imported(statement: ast.stmt) -> list[str] | None:
    """Return the imports of the statement; None if it has any other effect."""
    match statement:
        case ast.Import(names):
            return [name.name for name in names]
        case ast.ImportFrom("__future__"):
            return []
        case ast.ImportFrom(str(module), names, 0):
            return [module if name.name == "*" else f"{module}:{name.name}" for name in names]
        case ast.Expr(ast.Constant()) | ast.Pass():
            return []
        case ast.Assign(targets, ast.Constant()) if all(isinstance(target, ast.Name) for target in targets):
            return []
        case ast.If(ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return []
    return None


def _needs_package(node: ast.AST, folder: str, place: str) -> bool:
    match node:
        case ast.Import(names):
            packages = {package_of(name.name) for name in names}
        case ast.ImportFrom(str(module), _, 0):
            packages = {package_of(module)}
        case _:
            return False
    return bool(packages - sys.stdlib_module_names) and not any(_own_modules(node, folder, place))


def _changes_environment(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(ast.Attribute(attr="environ") | ast.Name("environ"), ctx=ast.Store() | ast.Del()):
            return True
        case ast.Call(ast.Attribute(ast.Attribute(attr="environ") | ast.Name("environ"), attr=name)):
            return name in ("setdefault", "update", "pop", "popitem", "clear")
        case ast.Call(ast.Attribute(attr=name) | ast.Name(name)):
            return name in ("putenv", "unsetenv", "load_dotenv")
    return False


def _own_modules(node: ast.AST, folder: str, place: str) -> Iterator[str]:
    """Yield the files of the script's own that the node may import. ``place``: the folder of its text."""
    match node:
        case ast.Import(names):
            modules, base = [name.name for name in names], folder
        case ast.ImportFrom(module, names, level):
            modules = [f"{module or ''}.{name.name}" for name in names]
            base = os.path.join(place, *[os.pardir] * (level - 1)) if level else folder
        case _:
            return
    for module in modules:
        path = base
        for part in filter(None, module.split(".")):
            path = os.path.join(path, part)
            files = (f"{path}.py", os.path.join(path, "__init__.py"))
            yield from map(os.path.normpath, filter(os.path.isfile, files))
