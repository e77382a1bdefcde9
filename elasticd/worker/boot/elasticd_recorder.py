"""Serve torch's flight recorder: the collectives that this worker has called, up to the one in which it
hangs.

torch itself writes them only after its own timeout, which is far too late.

Standard library only, and self-contained. The reader is elasticd/procs/flight_recorder.py.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

# NCCL's, if torch was built with it, and that of all other backends.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def serve(address: str) -> None:
    """Serve the recorder as JSON on this Unix socket, from a thread that sleeps until a connection comes.

    Do nothing in a worker without a process group, or with a torch without a recorder.
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
        except OSError:  # the script has no descriptor left: the agent looks without the recorder
            listener.close()
            return
        asker = _socket.socket(fileno=descriptor)
        try:
            asker.sendall(max((dump() for dump in dumps), key=len))  # the longest: the backend that was used
        except Exception:  # noqa: BLE001, S110  # the reader does not wait any more
            pass
        finally:
            asker.close()
