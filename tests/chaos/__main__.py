"""``python -m tests.chaos --seed 7 --minutes 60``: real agents on three nodes and three etcds, under every
fault that the tests can inject, one training after another until the time is over.

Nodes are namespaces of this machine, which need root. A seed draws the same plan again; the timing of the
machine differs. The ledgers and logs of a failed training are kept in a folder, whose name is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.schedule import SORTS, Plan, draw
from tests.k8s.network import why_not

_INSIDE = "CHAOS_INSIDE"
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--seed", type=int, help="of the first training; each has the next one. Else one is drawn"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; a training is ended well then")
    parser.add_argument("--jobs", type=int, help="so many trainings at most")
    parser.add_argument("--episodes", type=int, help="of each training, instead of some number from 4 to 8")
    parser.add_argument("--only", default="", help=f"only these faults, of {','.join(SORTS)}")
    parser.add_argument("--busy", type=int, default=0, help="so many busy processes beside it")
    parser.add_argument("--keep", action="store_true", help="keep the ledgers and logs of all trainings")
    parser.add_argument("--plan", action="store_true", help="show what would happen, and do nothing")
    asked = parser.parse_args()
    only = frozenset(filter(None, asked.only.split(",")))
    if only - SORTS.keys():
        parser.error(f"no such fault: {', '.join(sorted(only - SORTS.keys()))}")
    seed = random.randrange(1 << 24) if asked.seed is None else asked.seed
    if asked.plan:
        for line in told(draw(seed, asked.episodes, only)):
            print(line)
        return 0
    if why := unable():
        print(f"tests.chaos: {why}", file=sys.stderr)
        return 2
    # other processes do not see mounts from here on, and the mounts end with this process
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, "-m", "tests.chaos", *sys.argv[1:]])
    for number in _ENDS:
        signal.signal(number, _end)
    options = "".join(
        f" --{name} {value}"
        for name, value in (("episodes", asked.episodes), ("only", asked.only), ("busy", asked.busy))
        if value
    )
    return play(seed, asked, only, options)


def _end(number: int, _: object) -> None:
    """End everything that was started. A second call does no harm."""
    for one in _ENDS:
        signal.signal(one, signal.SIG_IGN)
    sys.exit(128 + number)


def play(seed: int, asked: argparse.Namespace, only: frozenset[str], options: str) -> int:
    from tests.chaos.nemesis import Broken, Nemesis

    until = time.monotonic() + asked.minutes * 60
    done: Counter[str] = Counter()
    began, number, steps = time.monotonic(), 0, 0
    while time.monotonic() < until and (asked.jobs is None or number < asked.jobs):
        this = seed + number
        plan = draw(this, asked.episodes, only)
        print(f"seed {this}: {title(plan)}", flush=True)
        nemesis = Nemesis(plan, this, lambda line: print(line, flush=True), keep=asked.keep)
        try:
            with nemesis:
                nemesis.keep_busy(asked.busy)
                nemesis.run(until)
        except Broken as broken:
            print(f"BROKEN (seed {this}): {broken}")
            print(f"its ledgers and logs: {nemesis.kept}")
            print(f"replay: python -m tests.chaos --seed {this} --jobs 1 --minutes 60{options}", flush=True)
            return 1
        except FileNotFoundError as error:
            if not str(error.filename).startswith(str(nemesis.folder)):
                raise
            print(
                f"the folder of this training, {nemesis.folder}, was removed while it ran (by something that "
                "tidies up there?): start it again",
                file=sys.stderr,
            )
            return 2
        lines = nemesis.ledgers.lines
        rounds, newest = len({line.round for line in lines}), max(line.step for line in lines)
        slowest = max(nemesis.hurt_s, default=0.0)
        share = nemesis.machine.had_s / max(nemesis.machine.passed_s, 0.001)
        print(
            f"seed {this}: well after {newest} steps in {rounds} rounds, {nemesis.done.total()} faults, "
            f"{time.monotonic() - nemesis.began:.0f} s, of which the job had {share:.0%}; went on after "
            f"{slowest:.1f} s at most",
            flush=True,
        )
        if asked.keep:
            print(f"its ledgers and logs: {nemesis.kept}", flush=True)
        done += nemesis.done
        steps += newest
        number += 1
    took = (time.monotonic() - began) / 60
    print(f"{number} trainings, {steps} steps, {done.total()} faults in {took:.1f} min; all is well")
    print(", ".join(f"{name} {times}" for name, times in done.most_common()))
    return 0


def title(plan: Plan) -> str:
    odd = [
        f"{plan.nodes} nodes of {plan.slots}",
        f"at least {plan.least}",
        *(["replicated"] if plan.replicate else []),
        *([f"{plan.spares} spare each"] if plan.spares else []),
        *(["fresh starts"] if plan.fresh else []),
        *([f"{plan.late} late"] if plan.late else []),
        *(["another clock"] if plan.ahead_s else []),
        f"{len(plan.episodes)} episodes",
    ]
    return f"{plan.kind}, {', '.join(odd)}"


def told(plan: Plan) -> list[str]:
    lines = [title(plan)]
    for number, episode in enumerate(plan.episodes):
        lines += [
            f"episode {number}, after {episode.after} steps:",
            *(f"  {fault}" for fault in episode.faults),
        ]
    return lines


def unable() -> str:
    """Return why chaos cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return (
            "needs root, to make network namespaces: run it with sudo, or in a container with CAP_SYS_ADMIN"
        )
    with tempfile.TemporaryDirectory() as folder:
        return why_not(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
