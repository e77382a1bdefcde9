"""Facts from the workers' own Python: torch with its GPUs and groups, and the script's imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from elasticd.cli.doctor.facts import ImportFacts, Missing, TorchFacts

_PROBES = Path(__file__).parent / "probes"
PROBE_S = 180.0  # a first import of torch over a network file system takes minutes


def ask_torch(told: Mapping[str, str]) -> TorchFacts:
    """Import torch, use each GPU, and form a group of one with gloo and with NCCL. ``told``: the workers'
    variables besides this process's."""
    said = _ask("of_torch.py", [], told)
    if "failed" in said:
        return TorchFacts(_python(), error=said["failed"])
    return TorchFacts(**said)


def ask_imports(target: str, *, module: bool) -> ImportFacts:
    """Return which imports of the script fail. The script is parsed, not run."""
    said = _ask("of_imports.py", ["-m", target] if module else [target])
    if error := said.get("failed") or said.get("error"):
        return ImportFacts(target, error=error)
    return ImportFacts(target, said["working"], tuple(Missing(**missing) for missing in said["missing"]))


def _python() -> str:
    return os.environ.get("PYTHON_EXEC") or sys.executable


def _ask(probe: str, words: Sequence[str], told: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [_python(), str(_PROBES / probe), *words],
            env={**os.environ, **told},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {PROBE_S:g} s"}
    except OSError as error:
        return {"failed": f"{_python()} cannot be run: {error.strerror}"}
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return {"failed": f"{_python()} ended with code {done.returncode}: {last[0]}"}
    return said
