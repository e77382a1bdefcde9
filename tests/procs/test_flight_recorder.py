"""A worker gives torch's flight recorder to its agent. tests/e2e/test_hangs.py checks that torch gives the
record while a job hangs."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from elasticd.procs import flight_recorder
from elasticd.procs.page import Page, recorder_of
from tests.procs.conftest import Bench
from tests.procs.test_heartbeat import FAKE
from tests.procs.test_stacks import the_one_watched

DISTRIBUTED = """
from types import ModuleType
for name in ("torch.distributed", "torch._C._distributed_c10d"):
    sys.modules[name] = ModuleType(name)
sys.modules["torch.distributed"].is_initialized = lambda: bool(sys.argv[1:])
sys.modules["torch._C._distributed_c10d"]._dump_nccl_trace_json = lambda: b"nothing"
sys.modules["torch._C._distributed_c10d"]._dump_fr_trace_json = lambda: b"all there is" * 100_000
from torch.optim.optimizer import Optimizer
before = len(os.listdir("/proc/self/task"))
Optimizer().step()
print(len(os.listdir("/proc/self/task")) - before, "socket" in sys.modules, flush=True)
import time; time.sleep(3600)
"""


def test_a_worker_with_a_process_group_gives_all_it_has_as_often_as_it_is_asked(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", FAKE + "import os" + DISTRIBUTED, "grouped"])
    bench.start(procs)
    bench.console.wait_for(b"1 False")
    page = the_one_watched(procs).page.path
    for _ in range(2):
        assert flight_recorder.ask(page) == b"all there is" * 100_000
    bench.kill(procs)
    procs.close()
    assert not recorder_of(page).exists()


def test_one_without_a_process_group_has_no_thread_for_it(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", FAKE + "import os" + DISTRIBUTED])
    bench.start(procs)
    bench.console.wait_for(b"0 False")
    assert flight_recorder.ask(the_one_watched(procs).page.path) == b""


def test_the_newest_calls_are_listed_in_order_wherever_the_ring_began() -> None:
    gloo = {"profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "state": "scheduled"}
    calls = [
        {**gloo, "record_id": n, "collective_seq_id": n + 1, "retired": n < 29}
        for n in (*range(20, 30), *range(20))
    ]
    told = flight_recorder.last_calls(json.dumps({"entries": calls}).encode())
    assert len(told) == 10
    assert told[0] == "21 gloo:all_reduce of [[4]]: over"
    assert told[-1] == "30 gloo:all_reduce of [[4]]: not over"


@pytest.mark.parametrize(
    "answer", [b"", b"half an ans", b"[]", b"{}", b'{"entries": [{}]}', b'{"entries": 7}']
)
def test_an_unreadable_recording_yields_no_calls(answer: bytes) -> None:
    assert flight_recorder.last_calls(answer) == []


def test_a_worker_that_does_not_answer_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "ANSWER_S", 0.05)
    page = Page(tmp_path / "page")
    assert flight_recorder.ask(page.path) == b""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(recorder_of(page.path)))
        silent.listen()
        began = time.monotonic()
        assert flight_recorder.ask(page.path) == b""
        assert time.monotonic() - began < 30
    page.close()
    assert os.listdir(tmp_path) == []
