"""``python -m tests.sim --seed 7``: run one schedule or many, and show what happened in a schedule that
failed. SIGTERM and Ctrl-C end the command, which then prints the seed at which to continue."""

from __future__ import annotations

import argparse
import signal
import sys
import time

from tests.sim.schedule import ALL_KINDS, draw, run, shrink


def replay_command(seed: int, nodes: int | None = None, only: str = "") -> str:
    told = (f"--seed {seed}", f"--nodes {nodes}" if nodes else "", f"--only {only}" if only else "")
    return " ".join(("python -m tests.sim", *filter(None, told)))


def _kinds(asked: str) -> frozenset[str] | None:
    kinds = frozenset(filter(None, asked.split(",")))
    if kinds - ALL_KINDS.keys():
        raise SystemExit(
            f"no such fault: {', '.join(sorted(kinds - ALL_KINDS.keys()))} (of {', '.join(ALL_KINDS)})"
        )
    return kinds or None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--schedules", type=int, default=1, help="how many seeds from there on")
    parser.add_argument("--nodes", type=int, help="as many nodes, instead of some number from 2 to 12")
    parser.add_argument("--only", default="", help=f"only these faults, of {','.join(ALL_KINDS)}")
    parser.add_argument("--shrink", action="store_true", help="leave out the faults that do not matter")
    parser.add_argument("--keep-going", action="store_true", help="count the failing seeds")
    parser.add_argument("--trace", action="store_true", help="show what happened even if all went well")
    asked = parser.parse_args()
    kinds = _kinds(asked.only)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed, started, events, end = 0, time.monotonic(), 0, asked.seed + asked.schedules
    for seed in range(asked.seed, end):
        schedule = draw(seed, asked.nodes, kinds)
        try:
            result = run(seed, schedule)
        except KeyboardInterrupt:
            print(f"stopped: go on with --seed {seed} --schedules {end - seed}")
            asked.schedules = seed - asked.seed
            break
        events += result.cluster.clock.events
        if not result.broken and not asked.trace:
            continue
        failed += bool(result.broken)
        if asked.keep_going:
            print(f"seed {seed}: {result.broken}", flush=True)
            continue
        if asked.shrink and result.broken:
            schedule = shrink(seed, schedule)
            result = run(seed, schedule)
        print(result.cluster.clock.told())
        print(f"\n{schedule.setup}\n")
        for fault in schedule.faults:
            print(fault)
        if result.broken:
            print(f"\nBROKEN: {result.broken}\nreplay: {replay_command(seed, asked.nodes, asked.only)}")
            return 1
    took_s = time.monotonic() - started
    print(f"{asked.schedules} schedules, {events} events in {took_s:.1f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
