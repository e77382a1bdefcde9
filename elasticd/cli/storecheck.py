"""Checks before training that checkpoints can be written to their store."""

from __future__ import annotations

import errno
import os
import queue
import threading
from typing import Final

from elasticd.checkpoint.store import CheckpointStore
from elasticd.cli.complaint import Complaint

WITHIN_S: Final = 15.0
_FOR_GOOD: Final = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EINVAL,
}


def reached(store: CheckpointStore, within_s: float = WITHIN_S) -> str:
    """Return an empty string, or a note if the store does not respond: it may respond later, and training
    goes on. Raises Complaint if the store does not exist, or may not be written to."""
    answers: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

    def try_it() -> None:
        probe = f".elasticd-probe-{os.urandom(4).hex()}"
        try:
            store.replace(probe, b"")
            store.remove(probe)
        except OSError as error:
            answers.put(error)
        else:
            answers.put(None)

    threading.Thread(target=try_it, daemon=True).start()
    try:
        error = answers.get(timeout=within_s)
    except queue.Empty:
        error = TimeoutError(errno.ETIMEDOUT, f"no answer within {within_s:g} s")
    if error is None:
        return ""
    why = error.strerror or str(error)
    if error.errno in _FOR_GOOD:
        raise Complaint(f"checkpoints cannot be written to {store.url}: {why}.")
    return f"{store.url} cannot be written to now ({why}): until it can, no checkpoint outlives the job"
