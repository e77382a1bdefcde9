"""The program of the workers: found, read and checked before the start."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from elasticd.cli.command_error import CommandError
from elasticd.cli.first_imports import package_of, read_imports
from elasticd.daemon.config import Command, CommandKind

# Torch imports it for the first optimizer of a process, which takes as long as to import torch. It reads many
# environment variables, so it is imported ahead only for a script that changes none.
_WITH_TORCH = "torch._dynamo"


@dataclass(frozen=True, slots=True)
class ProgramText:
    """What was read of a program. ``fingerprint``: the sha256, in hex, of the script's text; for a program
    that is no script, of its path. ``imports``: what to import for all workers at once, as
    ``first_imports.Imports`` names it. ``needs_packages``: whether the program may import more than the
    standard library."""

    fingerprint: str
    imports: tuple[str, ...] = ()
    needs_packages: bool = True


@dataclass(frozen=True, slots=True)
class Script:
    """``stem``: the name from which the job gets its own."""

    command: Command
    stem: str
    text: ProgramText


def find(kind: CommandKind, target: str, args: tuple[str, ...], *, own_python: bool = True) -> Script:
    """Return the script, checked. Raises CommandError.

    ``own_python``: whether workers run this interpreter. If they run another (PYTHON_EXEC), modules and
    syntax are not checked here.
    """
    if not target:
        raise CommandError("the script's name is empty.")
    command = Command(kind, target, args)
    match kind:
        case CommandKind.SCRIPT:
            text, stem = _read_script(Path(target), own_python), Path(target).stem
        case CommandKind.MODULE:
            text, stem = _read_module(target, own_python), target.rpartition(".")[2]
        case CommandKind.PROGRAM:
            text, stem = ProgramText(_digest(_program(target).encode())), Path(target).stem
    return Script(command, stem, text)


def _read_script(path: Path, own_python: bool) -> ProgramText:
    if os.path.isdir(path):  # like Path.is_dir, but accepts any name
        if not (path / "__main__.py").is_file():
            raise CommandError(f"{path} is a directory; expected a Python script.")
        path = path / "__main__.py"
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise CommandError(f"the script {path} does not exist.") from None
    except OSError as error:
        raise CommandError(f"the script {path} cannot be read: {error.strerror}.") from error
    if not own_python or source.startswith(importlib.util.MAGIC_NUMBER) or zipfile.is_zipfile(path):
        return ProgramText(_digest(source))
    _check_syntax(source, path)
    real = os.path.realpath(path)
    return _text(source, [real], os.path.dirname(real))


def _check_syntax(source: bytes, path: Path) -> None:
    """Reject a script whose syntax error would fail every worker at its start."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers print the warnings
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else str(path)
        text = f": {error.text.strip()}" if error.text and error.text.strip() else ""
        raise CommandError(f"the script has a syntax error at {where}: {error.msg}{text}") from error
    except ValueError as error:  # the file contains null bytes
        raise CommandError(f"{path} is not a Python script: {error}.") from error


def _read_module(name: str, own_python: bool) -> ProgramText:
    if not own_python:
        return ProgramText(_digest(name.encode()))
    if name.endswith(".py"):
        raise CommandError(f"-m takes a module, such as package.job, not a file; leave -m out to run {name}.")
    spec, packages = _locate(name), name.split(".")[:-1]
    if spec is not None and spec.submodule_search_locations is not None:
        spec, packages = _locate(f"{name}.__main__"), name.split(".")
        if spec is None:
            raise CommandError(f"{name} is a package without a __main__ module, so -m cannot run it.")
    if spec is None:
        raise CommandError(f"there is no module named {name}.")
    if spec.origin == "built-in":
        raise CommandError(f"{name} is built into Python, so -m cannot run it.")
    if spec.origin is None or not os.path.isfile(spec.origin):
        return ProgramText(_digest(name.encode()))
    path = Path(spec.origin)
    source = path.read_bytes()
    if path.suffix != ".py":
        return ProgramText(_digest(source))
    _check_syntax(source, path)
    specs = [_locate(".".join(packages[: n + 1])) for n in range(len(packages))]
    before = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return _text(source, [*before, str(path)], os.getcwd())


def _text(source: bytes, paths: Sequence[str], folder: str) -> ProgramText:
    """Return what the program begins to import, if any of it is not of the standard library. ``paths``: of
    the packages that ``python -m`` imports first, and of the program. ``folder``: leads the workers'
    ``sys.path``."""
    homes = [os.path.dirname(os.__file__)]
    homes += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]

    def is_installed(name: str) -> bool:
        own = PathFinder.find_spec(name, [folder])
        if own is not None and own.origin is not None:  # else a folder of data
            return False
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None and spec.origin is not None else ""
        return (
            origin in ("built-in", "frozen")
            or name == "elasticd"
            or any(origin.startswith(f"{home}/") for home in homes)
        )

    try:
        imports = read_imports(paths, folder, is_installed)
    except (OSError, SyntaxError, ValueError):  # only the script itself has been checked
        return ProgramText(_digest(source))
    first, packages = imports.first, set(map(package_of, imports.first)) - sys.stdlib_module_names
    if "torch" in packages and not imports.changes_environment:
        first += (_WITH_TORCH,)
    return ProgramText(_digest(source), first if packages else (), imports.needs_packages)


def _locate(name: str) -> ModuleSpec | None:
    """Find the module as ``python -m`` does, without an import of its parents (which may import torch)."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth, part in enumerate(parts, start=1):
        if not part.isidentifier():
            return None
        full_name = ".".join(parts[:depth])
        spec = _find_spec(full_name, part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _find_spec(full_name: str, part: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is PathFinder:
            # Given the full name, PathFinder would need the imported parent of a namespace package.
            spec = PathFinder.find_spec(part, [os.getcwd(), *sys.path] if path is None else path)
        else:
            find = getattr(finder, "find_spec", None)
            spec = find(full_name, path, None) if find is not None else None
        if spec is not None:
            return spec
    return None


def _program(name: str) -> str:
    """Return the program's path, found as the shell finds it. Raises CommandError."""
    found = shutil.which(name)
    if found is not None:
        return found
    if os.path.isdir(name):
        raise CommandError(f"{name} is a directory; expected a program.")
    if os.path.exists(name):
        hint = (
            f"write ./{name}" if os.sep not in name and os.access(name, os.X_OK) else "it is not executable"
        )
        raise CommandError(f"{name} cannot be run as a program: {hint}.")
    raise CommandError(f"there is no program named {name}.")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
