"""JSON messages with open files, over a Unix stream socket. Standard library only."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_FDS_MAX = 16
_CHUNK_BYTES = 1 << 18


class ChannelClosed(Exception):
    """The process at the other end is gone."""


class Channel:
    """One end of a channel. No method blocks: bytes that the socket does not take yet stay queued."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unread = bytearray()
        self._unclaimed_fds: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether messages are queued for ``flush``."""
        return bool(self._unsent)

    @property
    def unfinished(self) -> bool:
        """Whether a message has arrived only in part."""
        return bool(self._unread)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message, and send as much as possible. The channel owns ``fds``, and closes them once
        sent."""
        assert len(fds) <= _FDS_MAX, f"{len(fds)} files are more than one message carries"
        body = json.dumps({**message, "fds": len(fds)}).encode()
        self._unsent.append((memoryview(_LENGTH.pack(len(body)) + body), tuple(fds)))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], attached)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            for fd in fds:  # the files were sent with the first byte
                os.close(fd)
            if sent < len(data):
                self._unsent[0] = (data[sent:], ())
            else:
                self._unsent.popleft()

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Return the messages that have arrived completely, each with its files. The caller owns the
        files."""
        room = socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
        try:
            data, attached, _, _ = self._sock.recvmsg(_CHUNK_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        for level, kind, payload in attached:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._unclaimed_fds.extend(fds)
        if not data:
            raise ChannelClosed("end of file")
        self._unread += data
        return self._whole_messages()

    def _whole_messages(self) -> list[tuple[Message, list[int]]]:
        messages = []
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            end = _LENGTH.size + length
            if len(self._unread) < end:
                break
            message: Message = json.loads(self._unread[_LENGTH.size : end])
            del self._unread[:end]
            messages.append((message, [self._unclaimed_fds.popleft() for _ in range(message.pop("fds"))]))
        return messages

    def forget(self) -> None:
        """Detach the socket without closing it, for a forked process that closes descriptors by number."""
        self._sock.detach()

    def close(self) -> None:
        """Close the socket, and every file that was neither sent nor claimed."""
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()
        while self._unclaimed_fds:
            os.close(self._unclaimed_fds.popleft())
        self._sock.close()
