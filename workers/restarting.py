"""For the scripts in this folder that start again when a worker dies: the process group, snapshots that are
whole or absent, and an end without tracebacks.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from gpt import Parser, as_tensor, writable_folder


def join_world() -> tuple[torch.device, int]:
    """Join the process group, of one process without a launcher. Return the device and the local rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device, local_rank


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another worker has exited."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or "gloo" in str(error)


@record
def run(program: str, main: Callable[[], None]) -> int:
    """Call a program's ``main``. Return the exit status: 1 if another worker was lost, 2 for bad input, each
    with one sentence."""
    rank = os.environ.get("RANK", "0")
    try:
        main()
    except ValueError as error:  # a restart would fail in the same way
        print(f"{program}: {error}", file=sys.stderr)  # each worker, as the launcher stops the others
        return 2
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        print(f"rank {rank} lost a peer", file=sys.stderr)
        return 1
    if dist.is_initialized():
        dist.destroy_process_group()  # else the exit might wait for lost workers
    return 0


def leave(status: int | None) -> NoReturn:
    """End this process with its exit status; None is 0, as for ``sys.exit``.

    A worker that has lost a peer has nothing left to write, so it ends at once. The worker that replaces it
    waits for that, and Python may take half a second to put torch's modules away.
    """
    if status == 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


# ---------------------------------------------------------------- snapshots


def save_snapshot(folder: Path, snapshot: dict[str, Any]) -> None:
    """Replace the folder's snapshot, so that at any moment there is a whole one: the old or the new."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"snapshot.{os.environ.get('GROUP_RANK', '0')}.tmp"  # nodes may share the folder
    with unfinished.open("wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / "snapshot.pt")
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)  # the new name, too, must survive a power cut
    os.close(directory)


def load_snapshot(folder: Path | None, local_rank: int, device: torch.device) -> dict[str, Any] | None:
    """Return the newest snapshot of any node of this world, in all workers; None if there is none.

    Raises ValueError if the file cannot be read.
    """
    path = folder / "snapshot.pt" if folder is not None and local_rank == 0 else None
    found = path.read_bytes() if path is not None and path.exists() else b""
    snapshot: dict[str, Any] | None = None
    step = -1
    if found:
        try:
            snapshot = torch.load(io.BytesIO(found), map_location=device, weights_only=True)
            step = snapshot["step"]
        except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise ValueError(f"cannot read the snapshot {path}; remove it to start afresh") from error

    steps = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([step, len(found)], dtype=torch.int64, device=device))
    source = max(range(len(steps)), key=lambda rank: (int(steps[rank][0]), -rank))
    newest_step, size = steps[source].tolist()
    if newest_step < 0:
        return None
    content = as_tensor(found) if source == dist.get_rank() else torch.empty(size, dtype=torch.uint8)
    content = content.to(device)
    dist.broadcast(content, source)
    if source != dist.get_rank():
        snapshot = torch.load(io.BytesIO(content.cpu().numpy().data), map_location=device, weights_only=True)
    return snapshot


def add_snapshot_dir(parser: Parser, program: str) -> None:
    """Add the option ``--snapshot-dir``. Its default is a folder of this program and job alone, the same
    after restarts; None if no launcher names a job or run."""
    run = os.environ.get("ELASTICD_JOB_NAME") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    # argparse passes a default that is a string through ``type``, too.
    default = str(state / "elasticd" / program / run) if run != "none" else None
    what = "default: a folder of the run, in $XDG_STATE_HOME/elasticd"
    parser.add_argument("--snapshot-dir", type=writable_folder, default=default, help=what)
