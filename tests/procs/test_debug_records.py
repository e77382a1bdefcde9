"""Workers that make a mistake, and what their records show."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import runpy
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elasticd.data.disagreement import disagreements
from elasticd.procs import debugfiles
from elasticd.procs.page import BOOT_DIR
from elasticd.telemetry.disagreementtext import sentences
from tests.worker.crew import forkserver

PROGRAM = Path(__file__).parents[1] / "e2e" / "programs" / "mistaken.py"
LINES = PROGRAM.read_text().splitlines()
PATIENCE_S = 100.0


def at(mark: str) -> str:
    """Return the line of the program that ends with this comment."""
    [number] = [number for number, line in enumerate(LINES, 1) if line.endswith(f"  # {mark}")]
    return f"mistaken.py:{number}"


def work(mistakes: tuple[str, ...], env: dict[str, str]) -> None:
    """Act as a worker of a run with --debug, in this process."""
    os.environ.update(env)
    os.chdir(PROGRAM.parent)
    sys.path.insert(0, BOOT_DIR)
    sys.argv = [str(PROGRAM), *mistakes]
    importlib.import_module("elasticd_debug").start()
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except Exception as error:
        sys.last_value = error  # as Python does
    atexit._run_exitfuncs()
    os._exit(0)


def run(*mistakes: str, folder: Path, world: int = 2, timeout_s: float = 60.0) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "ELASTICD_ROUND": "1", "OMP_NUM_THREADS": "1"}
    env |= {"ELASTICD_DEBUG_FOLDER": str(folder), "MISTAKEN_TIMEOUT_S": str(timeout_s)}
    context: Any = forkserver()
    workers = [
        context.Process(
            target=work,
            args=(mistakes, env | {"RANK": str(rank), "ELASTICD_PAGE": str(folder / f"page{rank}")}),
        )
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            assert wait([worker.sentinel], PATIENCE_S), "a worker does not end"
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def found(folder: Path, *, hung: bool = False) -> list[str]:
    return sentences(disagreements(debugfiles.read(debugfiles.round_folder(folder, 1)), hung=hung))


def test_a_script_without_a_mistake_disagrees_in_nothing(tmp_path: Path) -> None:
    run(folder=tmp_path)
    records = debugfiles.read(debugfiles.round_folder(tmp_path, 1))
    assert [one.rank for one in records] == [0, 1]
    assert found(tmp_path) == []
    calls = [[call.op for call in group.calls] for one in records for group in one.groups]
    expected = ["DistributedDataParallel", *["backward"] * 6, "broadcast", *["all_reduce"] * 3, "barrier"]
    assert calls == [expected, expected]


MISTAKES = {
    "order": f"As collective 8, rank 0 called broadcast (root 0) of 10 x 3 float32 at {at('ORDER OF 0')}; "
    f"rank 1 called all_reduce (SUM) of 10 x 3 float32 at {at('ORDER OF 1')}.",
    "type": f"As collective 10, rank 0 called all_reduce (SUM) of 10 x 3 float32 at {at('TYPE')}; "
    f"rank 1 called all_reduce (SUM) of 10 x 3 float64 at {at('TYPE')}.",
    "shape": f"As collective 11, rank 0 called all_reduce (SUM) of 10 x 3 float32 at {at('SHAPE')}; "
    f"rank 1 called all_reduce (SUM) of 5 x 3 float32 at {at('SHAPE')}.",
    "barrier": f"As collective 12, rank 0 called barrier at {at('BARRIER')}; rank 1 came to the end of its "
    f"script: its last one was all_reduce (SUM) of 10 x 3 float32 at {at('SHAPE')}.",
    "fails": f"As collective 12, rank 0 called barrier at {at('BARRIER')}; rank 1 raised ValueError: no such "
    f"file at {at('FAILS')}: its last one was all_reduce (SUM) of 10 x 3 float32 at {at('SHAPE')}.",
    "weights": "The weights of rank 0 and of rank 1 differ after step 1, first in bias (they are the same at "
    "the beginning).",
    "fewer samples": f"The DataLoader at {at('LOADER')} is not of one length in all ranks in epoch 0: "
    "rank 0 has 6 batches, of 48 samples; rank 1 has 5 batches, of 40 samples.",
    "same data": "Ranks 0 and 1 got the same first batches of epoch 0 from the DataLoader at "
    f"{at('LOADER')}: the data is not dealt to the ranks.",
    "sampler": f"The samplers of the DataLoader at {at('LOADER')} differ in seed: rank 0 has 0; "
    "rank 1 has 1.",
    "seed": "The ranks have different seeds (torch.initial_seed()): rank 0 has 0; rank 1 has 1.",
}


def test_a_line_that_is_too_long_keeps_what_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In other alphabets a place takes up to six bytes for each letter."""
    monkeypatch.syspath_prepend(BOOT_DIR)
    records = importlib.import_module("elasticd_records")
    file = records.RingFile(str(tmp_path / "file"), 512, 3, {"v": 1})
    place = 100 * "\N{GREEK SMALL LETTER ALPHA}" + ".py:7"
    for number in range(5):
        file.add({"same": ["barrier", "", None, ""], "of": "", "at": place, "chain": number})
    file.close()
    kept = [json.loads(line) for line in (tmp_path / "file").read_bytes().splitlines()]
    assert [line.get("n") for line in kept] == [None, 4, 5, 3], "the newest lines replace the oldest"
    assert kept[1]["at"] == place[-20:] and kept[1]["same"][0] == "barrier"
    assert (tmp_path / "file").stat().st_size == 4 * 512


@pytest.mark.parametrize(
    "mistakes",
    [("sampler", "weights", "type", "seed"), ("same data", "barrier"), ("order",), ("shape",), ("fails",)],
    ids=" and ".join,
)
def test_each_mistake_is_named_where_it_was_made(mistakes: tuple[str, ...], tmp_path: Path) -> None:
    run(*mistakes, folder=tmp_path, timeout_s=1.0 if mistakes == ("order",) else 60.0)
    assert found(tmp_path) == [MISTAKES[mistake] for mistake in mistakes]


def test_uneven_data_is_named_before_the_collectives_that_it_breaks(tmp_path: Path) -> None:
    run("fewer samples", folder=tmp_path, timeout_s=1.0)
    first, second = found(tmp_path)
    assert first == MISTAKES["fewer samples"]
    assert re.match(r"As collective 7, rank 0 called backward of .*; rank 1 called broadcast", second), second
