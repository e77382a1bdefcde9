"""Prints what this Python's torch can do: its build, its GPUs, and whether groups can be formed.

Runs in the workers' Python, where only torch is assumed.
"""

import importlib
import json
import os
import sys
from datetime import timedelta
from typing import Any


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, which is for the answer
    said: dict[str, object] = {"python": sys.executable}
    try:
        look(said)
    except BaseException as error:  # noqa: BLE001  # any error of a broken installation is the answer
        said["error"] = one_line(error)
    json.dump(said, answer)
    answer.flush()
    os._exit(0)  # skips the destructors of incomplete groups


def look(said: dict[str, object]) -> None:
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    said.update(version=torch.__version__, cuda=torch.version.cuda or "", hip=torch.version.hip or "")
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
            for device in range(torch.cuda.device_count()):
                torch.ones(1, device=f"cuda:{device}").add_(1).item()
            said["devices"] = torch.cuda.device_count()
        except Exception as error:  # noqa: BLE001
            said["device_error"] = one_line(error)
    said["gloo"] = group_of_one(dist, torch, "gloo", "cpu") if dist.is_gloo_available() else "not built in"
    if said.get("devices"):
        said["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
        said["nccl"] = group_of_one(dist, torch, "nccl", "cuda:0")


def group_of_one(dist: Any, torch: Any, backend: str, device: str) -> str:
    """Return why a group of this process alone cannot be formed, or an empty string. The interface is chosen
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


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__


if __name__ == "__main__":
    main()
