"""Read tensors in the memory of another worker of the same node, with process_vm_readv(2).

Such a read copies the bytes once, and several workers can read at the same time. A message through a socket
is copied twice, and costs both workers time in the kernel.

The kernel lets a process read the memory of another process of the same user if it may trace that process.
Yama's ``ptrace_scope`` 1, the default of some distributions, lets only ancestors trace. So a worker allows it
to its parent, the warden, and thereby to the warden's descendants, for as long as others read.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from elasticd.worker.values.plaindata import number_of

PIECE_BYTES = 64 << 20  # what is read at once
_PR_SET_PTRACER = 0x59616D61
_FORBIDS = {errno.EPERM, errno.EACCES, errno.ENOSYS}
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_read_memory = _libc.process_vm_readv
_read_memory.restype = ctypes.c_ssize_t
_read_memory.argtypes = (
    ctypes.c_int,
    *(ctypes.POINTER(_Span), ctypes.c_ulong),  # the spans here, and their number
    *(ctypes.POINTER(_Span), ctypes.c_ulong),  # the spans in the other process
    ctypes.c_ulong,
)


class UnreadableMemory(Exception):
    """The memory of another process cannot be read: the process has ended, or the reading is forbidden."""


class _Forbidden:
    """Whether the kernel once forbade this process to read another worker's memory. The process then asks for
    messages."""

    so_far = False


def reach() -> int:
    """Return a number that is the same in all workers that can read each other's memory; 0 if this worker has
    no part in that."""
    if _Forbidden.so_far or _yama_scope() > 1:
        return 0
    mine = torch.tensor([1], device="cpu")
    try:
        _read(os.getpid(), mine.data_ptr(), torch.zeros_like(mine))
        place = f"{_BOOT.read_text()} {os.readlink('/proc/self/ns/pid')} {os.getppid()} {os.geteuid()}"
    except (UnreadableMemory, OSError):  # no such system call, or it is forbidden
        return 0
    return number_of(hashlib.blake2b(place.encode(), digest_size=8)) or 1


@contextmanager
def shown(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Let the other workers of the node read the tensors in the block. Yield what ``PeerMemory`` needs to
    find them, a tensor of integers. ``tensors``: contiguous, and in the memory of the host."""
    # A pid may be another process's, so the reader first looks for this number.
    proof = torch.tensor([secrets.randbits(63)], device="cpu")
    addresses = [tensor.data_ptr() for tensor in tensors]
    is_guarded = _yama_scope() == 1
    if is_guarded:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
    try:
        yield torch.tensor([os.getpid(), proof.data_ptr(), int(proof), *addresses], device="cpu")
    finally:
        if is_guarded:
            _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)


class PeerMemory:
    """The tensors that another worker shows. ``where``: what ``shown`` yields. ``go_on``: called before each
    piece that is read; the reading ends if it raises. Raises UnreadableMemory."""

    def __init__(self, where: torch.Tensor, go_on: Callable[[], None]) -> None:
        self._pid, address, proof, *self._addresses = where.tolist()
        self._go_on = go_on
        found = torch.zeros(1, dtype=torch.int64, device="cpu")
        _read(self._pid, address, found)
        if int(found) != proof:
            raise UnreadableMemory(f"process {self._pid} is another worker here")

    def read(self, number: int, place: torch.Tensor) -> None:
        """Copy the tensor of this number to ``place``, a contiguous tensor in the memory of the host with the
        same number of bytes. Raises UnreadableMemory."""
        address = self._addresses[number]
        for piece in torch.split(place.detach().view(-1).view(torch.uint8), PIECE_BYTES):
            self._go_on()
            _read(self._pid, address, piece)
            address += piece.nbytes


def _read(pid: int, address: int, place: torch.Tensor) -> None:
    """Fill the tensor with the bytes at the address in that process. Raises UnreadableMemory."""
    done = 0
    while done < place.nbytes:
        left = place.nbytes - done
        here, there = _Span(place.data_ptr() + done, left), _Span(address + done, left)
        got = _read_memory(pid, here, 1, there, 1, 0)
        if got <= 0:
            code = ctypes.get_errno()
            _Forbidden.so_far = _Forbidden.so_far or code in _FORBIDS
            raise UnreadableMemory(f"the memory of process {pid} cannot be read: {os.strerror(code)}")
        done += got


def _yama_scope() -> int:
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):  # the kernel has no Yama
        return 0
