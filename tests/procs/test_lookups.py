"""How long a worker waits for a name server while it connects to torch's store."""

from __future__ import annotations

import ctypes
import importlib
from types import ModuleType

import pytest

from elasticd.procs.page import BOOT_DIR
from tests.procs.conftest import Bench

USUAL_S = 7  # until glibc asks again


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module elasticd_lookups, which workers load from the boot folder."""
    monkeypatch.syspath_prepend(BOOT_DIR)
    return importlib.import_module("elasticd_lookups")


@pytest.fixture
def wait(lookups: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ctypes.c_int:
    """The place of the seconds for which this thread waits for an answer."""
    found: ctypes.c_int = lookups.wait_of_this_thread()
    monkeypatch.setattr(found, "value", USUAL_S)
    return found


@pytest.mark.parametrize(
    ("host", "seconds"),
    [
        ("127.0.0.1", 1),
        ("::1", 1),
        ("10.1.2.3", 1),
        ("trainer.example", USUAL_S),
        ("", USUAL_S),
        ("10.1.2.3\0", USUAL_S),
        (None, USUAL_S),
    ],
)
def test_a_thread_waits_for_a_name_server_for_a_second_if_it_needs_no_name(
    lookups: ModuleType, wait: ctypes.c_int, host: str | None, seconds: int
) -> None:
    seen: list[int] = []
    lookups.call_impatiently(host, lambda: seen.append(wait.value))
    assert seen == [seconds]
    assert wait.value == USUAL_S


def test_an_error_leaves_the_thread_as_it_was(lookups: ModuleType, wait: ctypes.c_int) -> None:
    with pytest.raises(ZeroDivisionError):
        lookups.call_impatiently("127.0.0.1", lambda: 1 / 0)
    assert wait.value == USUAL_S


def test_a_thread_of_another_libc_waits_as_ever(lookups: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    lookups.call_impatiently("127.0.0.1", lambda: called.append(True))
    assert called


CLIENTS = """
import torch.distributed as dist

class Host(str):
    def __str__(self):  # the wrapper asks whether this is an address
        print("asked", flush=True)
        return super().__str__()

host = Host("127.0.0.1")
server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
dist.TCPStore(host_name=host, port=server.port, wait_for_workers=False).set("known", "")
print(server.get("known"), type(dist.TCPStore.__init__).__name__, dist.TCPStore.__init__.__qualname__)
try:
    dist.TCPStore(port=1)
except TypeError as error:
    print("incompatible constructor arguments" in str(error))
"""


def test_a_worker_waits_so_whatever_its_script_is(bench: Bench) -> None:
    (exit,) = bench.run(CLIENTS)
    assert exit.code == 0, exit.traceback
    assert bench.console.lines() == [*[b"asked"] * 2, b"b'' function TCPStore.__init__", b"True"]
