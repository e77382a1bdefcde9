"""Serve torch's flight recorder: the collectives that this worker has called, up to the one in which it
hangs.

torch itself writes the record only after the timeout of a collective, which is far too late.

Standard library only, and self-contained. The reader is elasticd/procs/flight_recorder.py.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

# torch's functions: for NCCL, if torch was built with NCCL, and for all other backends.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def serve(address: str) -> None:
    """Serve the record as JSON on the Unix socket ``address``, from a thread that waits for connections.

    Do nothing in a worker without a process group, or if this torch has no flight recorder.
    """
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
        except OSError:  # the script has used up its file descriptors: the agent gets no record
            listener.close()
            return
        asker = _socket.socket(fileno=descriptor)
        try:
            asker.sendall(max((dump() for dump in dumps), key=len))  # the backend in use has the longest one
        except Exception:  # noqa: BLE001, S110  # the agent has closed the connection
            pass
        finally:
            asker.close()
