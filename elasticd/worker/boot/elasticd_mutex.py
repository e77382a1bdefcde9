"""Hold a robust mutex in the page while this process lives.

The kernel reports an exit to the parent only once it has released the memory and the files of the process,
which takes a second for 2 GB. One of the first steps of an exit is much earlier: the kernel marks the robust
mutexes that the thread holds, and wakes the threads that wait for them. elasticd/procs/death_notices.py waits
for this mutex.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not imported before the script imports it
if TYPE_CHECKING:
    from mmap import mmap
    from typing import Any

_SHARED = _ROBUST = 1  # for pthread_mutexattr_setpshared and pthread_mutexattr_setrobust
_BYTES = 64  # enough for pthread_mutex_t and pthread_mutexattr_t of every libc
_WAITERS = 0x80000000  # a bit of the mutex's first word: the kernel wakes the threads that wait
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # the number of the system call
_FUTEX_WAKE = 1


def hold_mutex(memory: mmap, offset: int) -> None:
    """Take the mutex at ``offset`` of the shared memory. Call this only from the main thread."""
    futex = _FUTEX.get(os.uname().machine)
    if futex is None:
        return
    known = "_ctypes" in sys.modules
    import _ctypes  # the C part only, so that the script finds sys.modules unchanged

    if not known:
        del sys.modules["_ctypes"]
    c: Any = _ctypes

    class Word(c._SimpleCData):  # type: ignore[misc]
        _type_ = "I"

    class Words(c.Array):  # type: ignore[misc]
        _type_ = Word
        _length_ = _BYTES // 4

    libc = c.dlopen(None, 0)

    def call(name: str, *arguments: Any) -> int:
        code: int = c.call_function(c.dlsym(libc, name), arguments)
        return code

    mutex, attributes = Words.from_buffer(memory, offset), Words()
    steps = (
        ("pthread_mutexattr_init", c.byref(attributes)),
        ("pthread_mutexattr_setpshared", c.byref(attributes), _SHARED),
        ("pthread_mutexattr_setrobust", c.byref(attributes), _ROBUST),
        ("pthread_mutex_init", c.byref(mutex), c.byref(attributes)),
        ("pthread_mutex_lock", c.byref(mutex)),
    )
    c.Py_INCREF(mutex)  # keeps the memory mapped until the process ends, also during finalisation
    if all(call(*step) == 0 for step in steps):
        mutex[0] |= _WAITERS  # no other thread writes the word while the mutex is held
        call("syscall", futex, c.byref(mutex), _FUTEX_WAKE, 1)
