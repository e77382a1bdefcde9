"""What a slow link costs DistributedDataParallel, and what it costs local SGD."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence

from tests.bench.techniques import undisturbed
from tests.workers.programs import Program

NEW_NETWORK = 0x40000000  # of unshare(2)
PROGRAMS = (
    Program("ddp", "--epochs=90", 500, accuracy=90),
    Program("local_sgd", "--method=diloco", 500, accuracy=90),
    Program("local_sgd", "--method=average", 500, accuracy=90),
    Program("local_sgd", "--method=average --fragments=2", 500, accuracy=90),
)


def slow_links(rates: Sequence[int]) -> Iterator[str]:
    """Yield the rows of a table in Markdown: the images that two workers handle in a second over a link of
    each rate in Mbit/s (0: without a limit), and the quality on held-out data. Then yield what local SGD says
    it sent, as a whole and in fragments.

    The link is the loopback interface in a network of this process's own, with a token bucket filter. The
    caller must be root. Raises OSError or CalledProcessError if there can be no such network.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _run("ip link set lo up")
    sent: list[str] = []
    yield "| link | program | images/s | held-out |"
    yield "|---|---|---|---|"
    for rate in rates:
        if rate:
            _run(f"tc qdisc replace dev lo root tbf rate {rate}mbit burst 64kb latency 1s")
        for program in PROGRAMS:
            pace, said = undisturbed(None, program)
            sent += [line for line in said if line.startswith("sent ") and line not in sent]
            quality = program.require_quality(said).removeprefix("held-out: ")
            link = f"{rate} Mbit/s" if rate else "no limit"
            images = f"{pace.samples_per_s:,.0f}"
            yield f"| {link} | `{program.name}.py {program.arguments}` | {images} | {quality} |"
    yield from sent


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
