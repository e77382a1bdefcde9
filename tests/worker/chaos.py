"""``python -m tests.worker.chaos``: scripts, faults and moments drawn from a seed. Each run is compared with
an undisturbed run of the same script.

Workers are real processes, and are really killed and stopped; the crew takes the agent's place. The
comparison covers everything that training leads to (bit for bit in consistent mode, else within rounding). It
also covers a ledger that the script itself keeps: the committed steps have used each sample once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.worker import chaosjob
from tests.worker.chaosjob import BATCH, EPOCHS, SAMPLES, STEPS, Fault, Script
from tests.worker.crew import Crew, Hand

PATIENCE_S = float(os.environ.get("CREW_PATIENCE_S", "90"))
PAUSE_S = 0.3  # how long a worker stays stopped, until it continues or its agent notices
TOLERANCE = 1e-6  # of sums in another order, in float64
POINTS = (
    "start", "fetched", "forward", "backward", "summed", "unscaled", "in the optimizer", "after an optimizer",
    "stepped", "in commit", "committed",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """``workers``: their number at the start. ``again``: whether each worker that dies is replaced."""

    script: Script
    workers: int
    faults: tuple[Fault, ...]
    again: bool

    def __str__(self) -> str:
        plain = Script()
        said = {k: v for k, v in asdict(self.script).items() if v != getattr(plain, k) and k != "seed"}
        faults = ", ".join(f"{f.kind} {f.who} at {f.point} {f.step}" for f in self.faults)
        return f"{said or 'plain'}; {self.workers} workers{', replaced' * self.again}; {faults}"


def draw(seed: int) -> Plan:
    plan = _with_more(_simple(seed), random.Random(f"more chaos {seed}"))
    plan = _with_epochs(plan, random.Random(f"epochs of chaos {seed}"))
    late, apart = (random.Random(f"{how} {seed}").random() for how in ("late", "apart"))
    return replace(plan, script=replace(plan.script, late=late < 0.25, apart=apart < 0.5))


def _with_epochs(plan: Plan, chance: random.Random) -> Plan:
    """Return the plan, with epochs in half of the scripts, and with values of each worker's own in half of
    them."""
    script = replace(plan.script, local=chance.random() < 0.5)
    if script.twice or chance.random() < 0.5:
        return replace(plan, script=script)
    script = replace(script, epochs="steps" if script.data == "numbers" else chance.choice(["data", "steps"]))
    faults = tuple(
        replace(fault, point="after an epoch", step=chance.choice([STEPS - 1, script.steps - 1]))
        if fault.point in POINTS and fault.step < script.steps and chance.random() < 0.4
        else fault
        for fault in plan.faults
    )
    return replace(plan, script=script, faults=faults)


def _with_more(plan: Plan, chance: random.Random) -> Plan:
    """Return the plan. Three of four scripts also do what only some scripts do."""
    script = plan.script
    if chance.random() < 0.25:
        return plan
    plain = script.optimizer not in ("closure", "fused") and script.ddp != "static"
    again = plain and script.data == "numbers" and script.kind == "mlp" and not script.scaler
    if again and chance.random() < 0.5:  # a step of Data yields its samples only once
        # an optimizer with momentum is needed
        schedule = script.schedule if script.schedule != "onecycle" else ""
        script = replace(script, optimizer="lbfgs", every=1, clip=False, schedule=schedule)
    more = replace(
        script,
        autocast=script.consistent and chance.random() < 0.5,
        follows=chance.choice(["", "early", "averages"]) if script.ddp != "static" else "",
        sharp=chance.random() < 0.25,
        unfreezes=plain and script.kind != "gan" and chance.random() < 0.25,
        codes=chance.random() < 0.2,
        undo=chance.choice([None, None, True]),
    )
    faults = plan.faults
    if more.follows == "averages":
        faults = tuple(
            replace(f, point="evaluated", step=f.step | 1)
            if f.point in POINTS and chance.random() < 0.4
            else f
            for f in faults
        )
    if more.undo is None:  # the first two commits show what must be copied
        first = 2 * more.every
        faults = tuple(
            replace(f, step=max(f.step, first | 1 if f.point == "evaluated" else first))
            if f.point in (*POINTS, "evaluated")
            else f
            for f in faults
        )
    return replace(plan, script=more, faults=faults)


def _simple(seed: int) -> Plan:
    chance = random.Random(f"chaos {seed}")
    data = chance.choice(["numbers", "map", "map", "stream", "sharding"])
    consistent = data != "numbers" and chance.random() < 0.5
    kind = chance.choice(["mlp", "mlp", "bn" if consistent else "mlp", "gan", "two"])
    closure = kind != "gan" and chance.random() < 0.1
    scaler = not closure and chance.random() < 0.25
    every = 1 if closure else chance.choice([1, 1, 1, 2, 3])
    static = data == "numbers" and chance.random() < 0.2
    script = Script(
        data=data,
        consistent=consistent,
        kind=kind,
        optimizer="closure" if closure else chance.choice(["sgd", "adamw", "amsgrad", "rmsprop", "fused"]),
        scaler=scaler,
        every=every,
        accumulate=1 if static or kind == "bn" else chance.choice([1, 1, 2]),
        loaders=chance.choice([0, 0, 1, 2]) if data != "numbers" else 0,
        schedule="" if scaler else chance.choice(["", "exponential", "onecycle", "warm"]),
        clip=not closure and chance.random() < 0.4,
        ddp="" if consistent else "static" if static else chance.choice(["", "unused", "view", "small"]),
        wrapper=chance.choice(["", "", "exits", "cleans"]),
        twice=chance.random() < 0.2,
        checkpoints=chance.random() < 0.15,
        seed=chance.randrange(1000),
    )
    workers = chance.randint(1, 4)
    faults = [
        fault for _ in range(chance.choice([1, 1, 2, 3])) for fault in _at_once(chance, workers, script.steps)
    ]
    return Plan(script, workers, tuple(faults), again=chance.random() < 0.5)


def _at_once(chance: random.Random, workers: int, steps: int) -> Iterator[Fault]:
    """Yield one fault, or one fault for each of two workers."""
    step = chance.randrange(steps)
    for who in chance.sample(range(workers + 1), 2 if chance.random() < 0.25 else 1):
        kind = chance.choice(["kill", "kill", "kill", "stop", "pause", "fail", "drain", "grow"])
        if chance.random() < 0.2 and kind in ("kill", "stop"):
            yield Fault(kind, who, chance.choice(chaosjob.OUTSIDE), chance.choice([1, 2, 2]))
        else:
            yield Fault(kind, who, chance.choice(POINTS), step)


# ---------------------------------------------------------------- a run


class Agent(Crew):
    """Runs one training to its end."""

    preload = ("tests.worker.chaosjob",)

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__()
        self.plan, self.folder = plan, folder
        self._wishes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._wishes.bind("\0" + self.address + "-wishes")
        self._selector.register(self._wishes, 1, self._wish)
        self._later: list[tuple[float, Any]] = []
        self._coming: list[Hand] = []
        self.drained: list[Hand] = []
        self.lost = 0  # the number of workers that were replaced
        self.befell: Counter[str] = Counter()  # faults

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._wishes.close()

    def add(self) -> Hand:
        number = len(self.hands)
        faults = [asdict(f) for f in self.plan.faults if f.who == number]
        script = asdict(self.plan.script)
        wishes = self.address + "-wishes"
        return self.start(chaosjob.work, str(self.folder), str(number), script, faults, wishes)

    def see_through(self) -> None:
        """Run the training. Raises AssertionError if it does not end."""
        for _ in range(self.plan.workers):
            self.add()
        self._until(lambda: all(h.waiting or h.status is not None for h in self.hands))
        self.form(*[h for h in self.hands if h.waiting])
        self._until(self._is_over)

    def _is_over(self) -> bool:
        """Whether the training is over. If it is, workers in no round are told that they are not needed."""
        return all(h.status is not None for h in self.members) and any(
            h.done or h.status == 0 for h in self.hands
        )

    def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            now = time.monotonic()
            assert now < deadline, f"did not come to its end: {self}"
            for due, act in [entry for entry in self._later if entry[0] <= now]:
                self._later.remove((due, act))
                act()
            wait = min([deadline, *(due for due, _ in self._later)]) - now
            for key, _ in self._selector.select(max(0.0, wait)):
                key.data()
            self._care()

    def _care(self) -> None:
        if not self.round:
            return
        self._go_on()
        alive = [h for h in self.members if h.status is None and not h.shunned]  # these workers can continue
        over = any(h.done or h.status == 0 for h in self.members)
        lost = sum(h.status is not None for h in self.hands)
        if not over and lost > self.lost and (self.plan.again or not alive):
            self.lost = lost
            assert len(self.hands) < 14, f"one worker dies after the other: {self}"
            self._coming.append(self.add())
        self._coming = [h for h in self._coming if h.status is None]
        ready = [h for h in self._coming if h.waiting]
        if over or not ready:
            return
        if not alive:
            self._coming = []
            self.form(*[h for h in self.hands if h.waiting and h.status is None and not h.shunned])
        elif not self.closing:
            self._coming = [h for h in self._coming if h not in ready]
            self.close(planned=True)

    def _wish(self) -> None:
        kind, pid = self._wishes.recv(100).decode().split()
        self.befell[kind] += 1
        hand = next(h for h in self.hands if h.process.pid == int(pid))
        if kind in ("stop", "pause"):
            number = signal.SIGKILL if kind == "stop" else signal.SIGCONT
            self._later.append((time.monotonic() + PAUSE_S, lambda: self._signal(hand, number)))
        elif kind == "grow":
            self._coming.append(self.add())
        elif kind == "drain" and not self.closing and len(self.members) > 1 and hand in self.members:
            hand.shunned = True
            self.drained.append(hand)
            self.close(planned=True, going=(hand,))

    @staticmethod
    def _signal(hand: Hand, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hand.process.pid, number)


# ---------------------------------------------------------------- the results


def differences(agent: Agent, folder: Path, alone: Path, plan: Plan) -> list[str]:
    """Return how the run differs from what it should be."""
    found = []
    failed = {f.who for f in plan.faults if f.kind == "fail"}
    for number, hand in enumerate(agent.hands):
        fine = hand.status in (0, -signal.SIGKILL, None) or (hand.status == 1 and number in failed)
        if not fine:
            found.append(f"worker {number} ended with {hand.status}: {_last(folder / f'{number}.err')}")
    expected = json.loads((alone / "alone.outcome").read_text())
    for path in sorted(folder.glob("*.outcome")):
        outcome = json.loads(path.read_text())
        found += _against(path.stem, outcome, expected, plan.script.consistent)
        found += _own(path.stem, outcome["own"], plan.script)
    return found + _ledger(folder, plan.script)


def _last(errors: Path) -> str:
    """Return the last error of a worker, with its causes."""
    lines = errors.read_text().strip().splitlines() if errors.exists() else []
    said = [line for line in lines if line[:1].isalpha() and "Error" in line.partition(":")[0]]
    return " <- ".join([*reversed(said[-3:])] or lines[-1:] or ["nothing said"])[:600]


def _against(name: str, mine: dict[str, Any], other: dict[str, Any], consistent: bool) -> list[str]:
    said = [f"worker {name}: {k} is {v}, not {other['plain'][k]}" for k, v in mine["plain"].items()
            if not _close(v, other["plain"][k])]  # fmt: skip
    if consistent:
        if mine["digest"] != other["digest"]:
            said.append(f"worker {name}: other bits")
        return said
    for key, values in other["tensors"].items():
        if not _close(mine["tensors"].get(key), values):
            said.append(f"worker {name}: {key} is {mine['tensors'].get(key)}, not {values}"[:200])
            break
    return said


def _own(name: str, own: list[list[Any]], script: Script) -> list[str]:
    """Check the worker's own values: the steps that it made itself, and the numbers that it drew one
    by one."""
    if not script.local:
        return []
    steps, drawn = [step for step, _ in own], [number for _, number in own]
    source = chaosjob.source(name)
    right = [chaosjob.drawn_from(source) for _ in own]
    if steps != sorted(set(steps)) or not _close(drawn, right):
        return [f"worker {name}: its own steps are {steps}, with {drawn}, not {right}"]
    return []


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(one == other)


def _ledger(folder: Path, script: Script) -> list[str]:
    """Check that the committed steps used each sample once in an epoch. A round continues the newest earlier
    round that got to the step after which it begins; later commits of that round are void. Usually that is
    the round before. A round that began while a killed worker's saver still wrote is passed over if it ends
    before its own first checkpoint."""
    begins: dict[int, int] = {}
    last: dict[int, int] = defaultdict(int)
    took: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(dict)
    for path in folder.glob("*.ledger"):
        number, fresh = 0, -1
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if "entered" in entry:
                number, fresh = entry["entered"], -1
                if begins.setdefault(number, entry["step"]) != entry["step"]:
                    return [f"round {number} begins after steps {begins[number]} and {entry['step']}"]
            elif "took" in entry:
                if entry["took"] != fresh:
                    took[number, entry["took"]][path.stem] = []
                    fresh = entry["took"]
                took[number, fresh][path.stem] += entry["ids"]
            else:
                last[number] = max(last[number], entry["committed"])
    made: dict[int, int] = {}
    lines: list[dict[int, int]] = []
    for number in sorted(begins):
        steps = range(begins[number])
        joined = (line for line in reversed(lines) if line.keys() >= set(steps))
        made = {step: by for step, by in next(joined, made).items() if step in steps}
        made |= dict.fromkeys(range(begins[number], last[number]), number)
        lines.append(made)
    if sorted(made) != list(range(script.steps)):
        return [f"committed are steps {sorted(made)}, not {script.steps}"]
    used = [Counter(i for ids in took[by, step].values() for i in ids) for step, by in sorted(made.items())]
    if script.data == "numbers":
        whole = [Counter((step * BATCH + i) % SAMPLES for i in range(BATCH)) for step in range(script.steps)]
        wrong = [step for step, ids in enumerate(used) if ids != whole[step]]
        return [f"steps {wrong} used other samples: {[used[s] for s in wrong][:2]}"] if wrong else []
    each = script.steps // EPOCHS
    found = []
    for epoch in range(EPOCHS):
        all_of = sum(used[epoch * each : (epoch + 1) * each], Counter())
        if all_of != Counter(range(SAMPLES)):
            lost, more = Counter(range(SAMPLES)) - all_of, all_of - Counter(range(SAMPLES))
            found.append(f"epoch {epoch}: lost {sorted(lost)}, too often {sorted(more.elements())}")
    return found


def run(seed: int, plan: Plan | None = None, befell: Counter[str] | None = None) -> list[str]:
    """Run the plan of the seed. Return what is wrong with the run. ``befell`` counts the faults of
    each kind."""
    plan = plan or draw(seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    alone = folder / "alone"
    disturbed = folder / "disturbed"
    for place in (alone, disturbed):
        place.mkdir()
    try:
        with Agent(plan, disturbed) as agent:
            undisturbed = agent._context.Process(
                target=chaosjob.work, args=("", str(alone), "alone", asdict(plan.script), [], "")
            )
            undisturbed.start()
            try:
                agent.see_through()
            except AssertionError as error:
                stands = [h for h in agent.hands if h.status is None]
                for hand in stands:
                    os.kill(hand.process.pid, signal.SIGUSR1)  # the worker's stack, into its file of errors
                time.sleep(1.0 if stands else 0.0)
                if os.environ.get("CHAOS_KEEP"):
                    shutil.copytree(folder, os.environ["CHAOS_KEEP"], dirs_exist_ok=True)
                errors = [_last(disturbed / f"{n}.err") for n in range(len(agent.hands))]
                return [str(error).replace("\n", "; ")[:1500], *errors]
            finally:
                undisturbed.join(PATIENCE_S)
                undisturbed.kill()
                undisturbed.join()
            if befell is not None:
                killed = sum(hand.status == -signal.SIGKILL for hand in agent.hands)
                befell.update(agent.befell, kill=killed - agent.befell["stop"])
                befell["fail"] += sum(hand.status == 1 for hand in agent.hands)
            if undisturbed.exitcode != 0:
                return [f"alone it ended with {undisturbed.exitcode}: {_last(alone / 'alone.err')}"]
            found = differences(agent, disturbed, alone, plan)
            if found and os.environ.get("CHAOS_KEEP"):
                shutil.copytree(folder, os.environ["CHAOS_KEEP"], dirs_exist_ok=True)
            return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replay(seed: int, module: str = "tests.worker.chaos") -> str:
    return f"python -m {module} --seed {seed}"


def run_seeds(
    module: str,
    description: str | None,
    run: Callable[[int, Counter[str]], list[str]],
    draw: Callable[[int], object],
) -> int:
    """Run the seeds that the command line of ``python -m module`` names. Return the exit code.

    ``run`` gets a seed, and a counter in which it counts the faults of the run. It returns what is wrong with
    the run.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds from there on")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no other run after so long")
    parser.add_argument("--keep-going", action="store_true", help="count the failing seeds")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server's workers end with it
    began, failed, made = time.monotonic(), [], 0
    befell: Counter[str] = Counter()
    for seed in range(asked.seed, asked.seed + asked.runs):
        if time.monotonic() - began > 60 * asked.minutes:
            break
        started = time.monotonic()
        wrong = run(seed, befell)
        made += 1
        took_s = time.monotonic() - started
        print(f"seed {seed}: {'WRONG' if wrong else 'right'} in {took_s:.1f} s; {draw(seed)}", flush=True)
        if wrong:
            failed.append(seed)
            print(*(f"  {line}" for line in wrong), f"  replay: {replay(seed, module)}", sep="\n", flush=True)
            if not asked.keep_going:
                break
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(befell.items()) if count)
    took = f"{made} runs in {time.monotonic() - began:.0f} s, {len(failed)} wrong"
    print(f"seeds {asked.seed} to {asked.seed + made - 1}: {took}")
    print(f"what befell them: {faults or 'nothing'}")
    for seed in failed:
        print(f"replay: {replay(seed, module)}")
    return 1 if failed else 0


def main() -> int:
    return run_seeds("tests.worker.chaos", __doc__, lambda seed, befell: run(seed, befell=befell), draw)


if __name__ == "__main__":
    sys.exit(main())
