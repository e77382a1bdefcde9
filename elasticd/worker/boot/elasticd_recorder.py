"""Gives away what torch's flight recorder has of this worker: the collectives it has called, up to the one
that it hangs in. Torch itself writes that down only when its own timeout is over, long after anybody wants
to know.

Standard library only, and self-contained. Who asks is elasticd/procs/recorder.py.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

# NCCL's, where torch was built for it, and that of all other backends.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def serve(address: str) -> None:
    """Give it, as JSON, to whoever connects to this Unix socket from now on, in a thread that sleeps until
    then. Nothing happens in a worker without a process group, or with a torch that has no recorder."""
    distributed = sys.modules.get("torch.distributed")
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dumps = [found for name in _DUMPS if (found := getattr(c10d, name, None))]
    if not dumps or distributed is None or not distributed.is_initialized():
        return
    import _socket
    import _thread

    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(1)
    _thread.start_new_thread(_give, (listener, dumps))


def _give(listener: Any, dumps: Sequence[Callable[[], bytes]]) -> None:
    import _socket

    while True:
        try:
            descriptor, _ = listener._accept()
        except OSError:  # the script has no file left to open: whoever looks, looks without this
            listener.close()
            return
        asker = _socket.socket(fileno=descriptor)
        try:
            asker.sendall(max((dump() for dump in dumps), key=len))  # of the backend that was used
        except Exception:  # noqa: BLE001, S110  # who has asked does not wait any more
            pass
        finally:
            asker.close()
