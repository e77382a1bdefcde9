"""Prints whether the workers' Python can train: ``probe.py``, ``probe.py SCRIPT`` or ``probe.py -m MODULE``.

The first line of the output is about torch: its build, its GPUs, and whether groups can be formed. The second
is about the imports of the script. Both are JSON objects. Standard library only: elasticd may be missing in
this Python.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, which is reserved for the answers
    for look, words in ((look_at_torch, []), (look_at_imports, argv)) if argv else ((look_at_torch, []),):
        said: dict[str, Any] = {}
        try:
            look(said, *words)
        except BaseException as error:  # noqa: BLE001  # any error of a broken installation is the answer
            said["error"] = one_line(error)
        print(json.dumps(said), file=answer, flush=True)
    os._exit(0)  # skips the destructors of incomplete groups, and ends threads of imported modules


# ---------------------------------------------------------------- torch


def look_at_torch(said: dict[str, Any]) -> None:
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    cuda, hip = torch.version.cuda, torch.version.hip
    said.update(version=torch.__version__, build=f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "")
    groups = {"gloo": "cpu"}
    if cuda or hip:
        try:
            torch.cuda.init()
            devices = range(torch.cuda.device_count())
            for device in devices:
                torch.ones(1, device=f"cuda:{device}").add_(1).item()
            said["gpus"] = [torch.cuda.get_device_name(device) for device in devices]
            groups |= {"nccl": "cuda:0"} if devices else {}
        except Exception as error:  # noqa: BLE001
            said["gpu_error"] = one_line(error)
    said["groups"] = {backend: group_of_one(dist, torch, backend, where) for backend, where in groups.items()}


def group_of_one(dist: Any, torch: Any, backend: str, device: str) -> str:
    """Return the error of a group of this process alone; empty if it can be formed. The interface is chosen
    as in a job."""
    try:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30)
        )
        try:
            dist.all_reduce(torch.ones(1, device=device))
        finally:
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001
        return one_line(error)
    return ""


# ---------------------------------------------------------------- imports


def look_at_imports(said: dict[str, Any], *argv: str) -> None:
    """Try all modules that the script always imports. The script and modules beside it are parsed, not run,
    since running them could have any effect. Installed modules are really imported: many faults, such as a
    missing system library, show only then."""
    path = of_module(argv[1]) if argv[0] == "-m" else Path(argv[0]).absolute()
    path = path / "__main__.py" if path.is_dir() else path
    root = Path.cwd() if argv[0] == "-m" else path.parent
    sys.path[0] = str(root)
    said.update(working=0, missing=[])
    for where, name, statement in imports(path, root, set()):
        try:
            program = ast.fix_missing_locations(ast.Module([statement], []))
            exec(compile(program, where, "exec"), {})  # noqa: S102
            said["working"] += 1
        except BaseException as error:  # noqa: BLE001  # modules raise anything, SystemExit too
            said["missing"].append(f"{where} imports {name}, which fails: {one_line(error)}")


def of_module(name: str) -> Path:
    sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}")
    path = Path(spec.origin)
    return path.with_name("__main__.py") if path.name == "__init__.py" else path


def imports(path: Path, root: Path, seen: set[Path]) -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield the imports that a file needs from elsewhere: the place, the name and a statement. ``root``: the
    folder of the script's own modules, which are followed. An import inside a function, or in a ``try`` or
    ``if``, may never be needed, and is left out."""
    if path in seen:
        return
    seen.add(path)
    for node in ast.parse(path.read_bytes(), str(path)).body:
        wanted: list[tuple[Path, str, ast.stmt]] = []
        if isinstance(node, ast.Import):
            wanted = [(root, alias.name, ast.Import([alias])) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if node.level else root
            wanted = [
                (base, f"{node.module or ''}.{alias.name}", ast.ImportFrom(node.module, [alias], node.level))
                for alias in node.names
            ]
        for folder, name, statement in wanted:
            own = files_of(folder, name)
            for file in own:
                yield from imports(file, root, seen)
            if not own and not getattr(node, "level", 0):
                yield f"{path}:{node.lineno}", name, statement


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the files of a module in this folder, those of its packages first; none if it is elsewhere."""
    found = []
    for part in filter(None, name.split(".")):
        folder = folder / part
        files = (folder / "__init__.py", folder.with_name(f"{part}.py"))
        found += [file for file in files if file.is_file()][:1]
    return found


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
