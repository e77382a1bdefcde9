"""Prints which imports of a script fail: ``of_imports.py SCRIPT``, or ``of_imports.py -m MODULE``.

The script and modules beside it are parsed, not run, since running them could have any effect. Installed
modules are really imported: many faults, such as a missing system library or incompatible packages, show only
then. Standard library only: this program runs in the workers' Python.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_FORGIVING = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


class Reader:
    """Collects imports. ``root``: the folder of the script's own modules."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tried: dict[str, str] = {}  # import: its error, or empty
        self.read: set[Path] = set()
        self.missing: dict[str, dict[str, object]] = {}

    def script(self, path: Path, package: str = "") -> None:
        if path in self.read:
            return
        self.read.add(path)
        tree = ast.parse(path.read_bytes(), str(path))
        for node, optional in statements(tree.body, optional=False):
            for module, attribute in modules_of(node, package):
                self.follow(module, attribute, f"{path}:{node.lineno}", optional)

    def follow(self, module: str, attribute: str, where: str, optional: bool) -> None:
        if local := self.local(module):
            for path in local:
                own = module if path.name == "__init__.py" else module.rpartition(".")[0]
                self.script(path, own)
            if attribute and (more := self.local(f"{module}.{attribute}")):
                for path in more:
                    self.script(path, module)
            return
        error = self.attempt(module, attribute)
        name = f"{module}.{attribute}" if attribute and "cannot import name" in error else module
        if error and (name not in self.missing or not optional):
            self.missing[name] = {"module": name, "where": where, "error": error, "optional": optional}

    def local(self, module: str) -> list[Path]:
        """Return the files of a module beside the script, packages first; none if the module is elsewhere."""
        found = []
        folder = self.root
        for part in module.split("."):
            if (folder / part / "__init__.py").is_file():
                found.append(folder / part / "__init__.py")
            elif (folder / f"{part}.py").is_file():
                found.append(folder / f"{part}.py")
            elif not (folder / part).is_dir():
                return []
            folder = folder / part
        return found

    def attempt(self, module: str, attribute: str) -> str:
        key = f"{module}:{attribute}"
        if key not in self.tried:
            try:
                found = importlib.import_module(module)
                if attribute and not hasattr(found, attribute):
                    if importlib.util.find_spec(f"{module}.{attribute}") is None:
                        raise ImportError(f"cannot import name {attribute!r} from {module!r}")
                    importlib.import_module(f"{module}.{attribute}")
                self.tried[key] = ""
            except BaseException as error:  # noqa: BLE001  # modules raise anything, SystemExit too
                text = " ".join(str(error).split())
                self.tried[key] = f"{type(error).__name__}: {text}"[:400]
        return self.tried[key]


def statements(body: list[ast.stmt], *, optional: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the import statements, and whether each is optional: the script handles its failure, or may never
    reach it."""
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node, optional
            case ast.Try():
                yield from statements(node.body, optional=optional or any(map(forgives, node.handlers)))
                for handler in node.handlers:
                    yield from statements(handler.body, optional=True)
                yield from statements([*node.orelse, *node.finalbody], optional=optional)
            case ast.If():
                if "TYPE_CHECKING" not in ast.dump(node.test):
                    told = "__main__" not in ast.dump(node.test)
                    yield from statements(node.body, optional=optional or told)
                yield from statements(node.orelse, optional=True)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from statements(node.body, optional=True)
            case ast.ClassDef() | ast.With():
                yield from statements(node.body, optional=optional)
            case ast.For() | ast.While():
                yield from statements(node.body, optional=True)


def forgives(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(isinstance(n, ast.Name) and n.id in _FORGIVING for n in ast.walk(handler.type))


def modules_of(node: ast.stmt, package: str) -> Iterator[tuple[str, str]]:
    """Yield the imports of a statement, as (module, attribute)."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ""
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".") if package else []
            above = parts[: len(parts) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        if base:
            for alias in node.names:
                yield base, "" if alias.name == "*" else alias.name


def main(argv: list[str]) -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    said: dict[str, object] = {}
    try:
        if argv[0] == "-m":
            sys.path[0] = os.getcwd()
            reader = Reader(Path.cwd())
            spec = importlib.util.find_spec(argv[1])
            if spec is None or spec.origin is None:
                raise ModuleNotFoundError(f"No module named {argv[1]!r}")
            path = Path(spec.origin)
            if path.name == "__init__.py":
                path = path.with_name("__main__.py")
            reader.script(path, spec.parent or argv[1])
        else:
            path = Path(argv[0]).absolute()
            path = path / "__main__.py" if path.is_dir() else path
            sys.path[0] = str(path.parent)
            reader = Reader(path.parent)
            reader.script(path)
        said = {"working": list(reader.tried.values()).count(""), "missing": list(reader.missing.values())}
    except BaseException as error:  # noqa: BLE001
        said["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    json.dump(said, answer)
    answer.flush()
    os._exit(0)  # ends threads that imported modules have started


if __name__ == "__main__":
    main(sys.argv[1:])
