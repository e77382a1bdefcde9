"""What a training job writes down itself, so that the test need not trust the agents: one line for each
event, in a file of each process, on disk before the process continues.

``CHAOS_FOLDER`` has ``ledger/``, the folder of the files; ``stop``, once the job is to end; and
``raise-RANK``, if the worker of that rank is to fail.
"""

import functools
import hashlib
import json
import os
import time
import uuid

FOLDER = os.environ["CHAOS_FOLDER"]
ALONE = os.environ.get("CHAOS_UNTIL")  # so many steps in one undisturbed process, without an agent
STEP_S = float(os.environ.get("CHAOS_STEP_S", "0"))


@functools.cache
def opened():
    """Open the file at the first line: the module may be imported in a process from which workers are
    forked."""
    node, id = os.environ.get("CHAOS_NODE", ""), uuid.uuid4().hex[:12]
    path = os.path.join(FOLDER, "ledger", f"{node}-{id}.jsonl")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    about = {"node": node, "id": id, "pid": os.getpid(), "slot": int(os.environ.get("ELASTICD_SLOT", "0"))}
    return file, about


def note(what, **facts):
    file, about = opened()
    line = {"is": what, "at": time.time(), **about, **facts}
    os.write(file, json.dumps(line).encode() + b"\n")
    if ALONE is None:
        os.fdatasync(file)


def told_to_stop():
    return os.path.exists(os.path.join(FOLDER, "stop"))


def fail_if_told(rank):
    """Fail if the test has ordered this rank to fail, once for each order."""
    try:
        os.unlink(os.path.join(FOLDER, f"raise-{rank}"))
    except FileNotFoundError:
        return
    raise ValueError("this worker was told to fail")


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
