"""What a script imports before it does anything else, read from its text without running it."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence


def first_imports(paths: Sequence[str], is_installed: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the imports that these files, run one after the other, begin with, in their order: "torch" for
    ``import torch``, and "torch:nn" for ``from torch import nn``, whether ``nn`` is a module or not.

    The list ends before the first statement that may change what an import finds or does, such as a change of
    the environment or of ``sys.path``, and before the first module that is not installed: it belongs to the
    script, and may do the same. ``is_installed``: takes the name of a module that is in no package.
    Raises as ``changes_environment`` does.
    """
    found: list[str] = []
    for statement in (statement for path in paths for statement in _read(path).body):
        names = _imported(statement)
        if names is None or not all(is_installed(package_of(name)) for name in names):
            break
        found += names
    return tuple(found)


def _read(path: str) -> ast.Module:
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the workers print the warnings
        return ast.parse(file.read())


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


def changes_environment(paths: Sequence[str], folder: str) -> bool:
    """Whether one of these files, or a module of ``folder`` that it imports, may change an environment
    variable. Raises OSError, SyntaxError and ValueError if a file cannot be read."""
    return any(_changes_environment(node) for node, _ in _nodes(paths, folder))


def imports_packages(paths: Sequence[str], folder: str) -> bool:
    """Whether one of these files, or a module of ``folder`` that it imports, imports more than the standard
    library. Raises as ``changes_environment`` does."""
    for node, place in _nodes(paths, folder):
        match node:
            case ast.Import(names):
                packages = {package_of(name.name) for name in names}
            case ast.ImportFrom(str(module), _, 0):
                packages = {package_of(module)}
            case _:
                continue
        if packages - sys.stdlib_module_names and not list(_own_modules(node, folder, place)):
            return True
    return False


def _nodes(paths: Sequence[str], folder: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the nodes of these files, and of the modules of ``folder`` that the files import, each with the
    folder of its text."""
    todo, known = list(paths), set(paths)
    while todo:
        path = todo.pop()
        place = os.path.dirname(path)
        for node in ast.walk(_read(path)):
            yield node, place
            own = set(_own_modules(node, folder, place)) - known
            todo += own
            known |= own


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
