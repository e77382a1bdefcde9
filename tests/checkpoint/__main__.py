"""``python -m tests.checkpoint --tries 300``: kill processes that take part in a save, at random instants.

The same seed draws the same tries. The timing of the machine differs.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoint.chaos import VICTIMS, Broken, Chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint", description=__doc__)
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument("--only", default=",".join(VICTIMS), help="kill only these, of %(default)s")
    asked = parser.parse_args()
    victims = tuple(asked.only.split(","))
    if set(victims) - set(VICTIMS):
        parser.error(f"--only takes some of {', '.join(VICTIMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit ends the job and its processes
    seed = random.randrange(1 << 32) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder), seed, lambda line: print(line, flush=True))
        try:
            with chaos:
                chaos.run(asked.tries, victims)
        except Broken as broken:
            print(f"BROKEN (seed {seed}): {broken}")
            return 1
    print(f"\n{sum(chaos.reached.values())} kills in {time.monotonic() - began:.0f} s, seed {seed}")
    print(f"{chaos.missed} instants did not come; nothing torn, nothing committed lost, each went on")
    for what, counted in (("victims", chaos.reached), ("resumed from", chaos.tiers), ("at", chaos.stages)):
        print(f"{what}: {', '.join(f'{name} {times}' for name, times in counted.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
