"""The zygote's embryos: processes that are forked before a worker is asked for.

The fork of a process with as much memory as the zygote takes long, and a worker that is replaced should not
wait for it. An embryo waits for a request, and then becomes the worker. There are at least as many embryos as
workers that were last asked for at once. Where workers are often replaced, several embryos are forked
together: to fork one embryo alone, an intermediate process is forked too (``fork_apart``). An embryo costs
only the few pages of memory that it writes.

Standard library only, and self-contained: the worker's Python need not have other packages.
"""

from __future__ import annotations

import math
import os
import signal
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from typing import Any

_AGAIN_S = 1.0  # the pause before the next embryos, since the job needs its cores while it recovers
_MAX = 32
_TOGETHER = 4  # fork up to so many together, if as many workers were asked for within the last _LATELY_S
_LATELY_S = 60.0
_AT_ONCE_S = 0.1  # requests that come no later after one another are of the same start
_ANSWER_S_MAX = 1.0  # the time for an embryo's answer; it may be stopped
_PID = struct.Struct("=i")


class Embryos:
    """The embryos of one zygote. ``due``: when to call ``fork``, on the monotonic clock.

    ``framing``, ``words``: the modules of elasticd/channel.
    """

    def __init__(self, framing: Any, words: Any) -> None:
        self._framing, self._words = framing, words
        self._waiting: list[tuple[int, Any]] = []  # pids, and the zygote's ends of their channels
        self._wanted = 1
        self._asked_at = -math.inf  # when workers were last asked for
        self._lately: list[float] = []  # when each worker of the last _LATELY_S was asked for
        self.due = math.inf

    def asked_for(self, workers: int) -> None:
        """Note that so many workers are asked for."""
        now = time.monotonic()
        self._wanted = workers + (self._wanted if now - self._asked_at < _AT_ONCE_S else 0)
        self._lately += [now] * workers
        self._asked_at, self.due = now, now + _AGAIN_S

    def fork(self) -> Any:
        """Fork the embryos that are missing. Return None; in an embryo return its channel to the zygote."""
        self.due = math.inf
        now = time.monotonic()
        self._lately = [at for at in self._lately if now - at < _LATELY_S]
        wanted = min(self._wanted, _MAX)
        if len(self._waiting) >= wanted:
            return None
        missing = max(wanted, min(len(self._lately), _TOGETHER)) - len(self._waiting)
        pairs: list[tuple[socket.socket, socket.socket]] = []
        forked: int | list[int] = []
        try:
            for _ in range(missing):
                pairs.append(self._framing.pair())  # noqa: PERF401  # those that could be made are used
        except OSError:
            pass
        try:
            forked = fork_apart(len(pairs))
        except OSError:
            pass
        words, channel = self._words, self._framing.Channel
        if isinstance(forked, int):
            # An embryo that had the zygote's end of a channel would keep the other embryo from being dropped.
            self.drop()
            for number, (ours, theirs) in enumerate(pairs):
                ours.close()
                if number != forked:
                    theirs.close()
            return channel(pairs[forked][1], words.EMBRYO_TO_ZYGOTE, words.WARDEN_TO_ZYGOTE)
        for number, (ours, theirs) in enumerate(pairs):
            theirs.close()
            if pid := forked[number] if number < len(forked) else 0:
                self._waiting.append((pid, channel(ours, words.WARDEN_TO_ZYGOTE, words.EMBRYO_TO_ZYGOTE)))
            else:
                ours.close()
        if len(forked) < missing or not all(forked):
            self.due = time.monotonic() + _AGAIN_S
        return None

    def use(self, requests: Sequence[tuple[Any, list[int]]]) -> dict[int, int]:
        """Make the embryos the workers of the first requests. Return their pids by the requests' ids.

        An embryo that has exited is left out. An embryo that does not answer is killed.
        """
        used, self._waiting = self._waiting[: len(requests)], self._waiting[len(requests) :]
        asked, pids = [], {}
        for (pid, line), (request, fds) in zip(used, requests, strict=False):
            try:
                line.send(request, fds)
                asked.append((request.id, pid, line))
            except Exception:  # noqa: BLE001  # the embryo has exited
                line.close()
        until = time.monotonic() + _ANSWER_S_MAX
        for id, pid, line in asked:
            try:
                if line.poll(until - time.monotonic()) is not None:
                    pids[id] = pid
                else:
                    kill(pid)
            except Exception:  # noqa: BLE001, S110  # the embryo has exited
                pass
            line.close()
        return pids

    def drop(self) -> None:
        """Close the channels to the embryos, which then exit."""
        for _, line in self._waiting:
            line.close()
        self._waiting = []


def fork_apart(count: int) -> int | list[int]:
    """Fork ``count`` processes through an intermediate process, whose exit makes the warden their parent.

    Return in each new process its number, and in this process the list of pids, 0 for a failed fork. Raises
    OSError if the intermediate process cannot be forked.
    """
    pids, tell = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(pids)
        os.close(tell)
        raise
    if between == 0:
        for number in range(count):
            try:
                pid = os.fork()
            except OSError:
                pid = 0
            else:
                if pid == 0:
                    os.close(pids)  # the parent waits for the end of this pipe
                    os.close(tell)
                    return number
            os.write(tell, _PID.pack(pid))
        os._exit(0)
    os.close(tell)
    with open(pids, "rb") as file:
        data = file.read()
    os.waitpid(between, 0)  # from here on the warden is their parent
    return [pid for (pid,) in _PID.iter_unpack(data)]


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
