"""The number of workers: limits and slots, from the options and the machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticd.cli.command_error import CommandError
from elasticd.cli.machine import Machine
from elasticd.cli.option_types import MOST
from elasticd.cli.options import OptionSource, RunOptions
from elasticd.core.facts import Limits, UnitWithin

SLOTS_MAX = 1024  # the most slots of a node; a larger number is probably a typing error


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many workers the job and this node may run. ``notes``: options that have no effect, in
    sentences."""

    limits: Limits
    slots: int
    notes: tuple[str, ...] = ()


def nodes(options: RunOptions) -> tuple[int, int]:
    """Return torchrun's --nnodes as (least, most); (1, 1) if not given or not in effect.

    Raises CommandError, also if limits in nodes and limits in workers contradict each other.
    """
    if options.source("nnodes") is options.source("min", "max", "sizes") is not OptionSource.NOT_GIVEN:
        raise CommandError(
            "--min, --max and --sizes count workers and --nnodes counts nodes: give one or the other."
        )
    if not _counts_nodes(options) or options.nnodes is None:
        return 1, 1
    least, colon, most = options.nnodes.partition(":")
    try:
        low, high = int(least), int(most if colon else least)
    except ValueError:
        raise CommandError(f"--nnodes {options.nnodes!r} is neither a number nor MIN:MAX.") from None
    if low < 1 or high < low:
        raise CommandError(f"--nnodes {options.nnodes} must have 1 <= MIN <= MAX.")
    if high > MOST:
        raise CommandError(f"--nnodes {options.nnodes} is more than {MOST:,} nodes.")
    return low, high


def sizes(options: RunOptions, machine: Machine, *, standalone: bool) -> Sizes:
    """Return the limits in workers, and the slots of this node including spares. Raises CommandError.

    ``standalone``: no other node can join.
    """
    listed = _listed(options)
    if listed:
        options = replace(options, min=listed[0], max=listed[-1])
    found = _sizes(options, machine, standalone=standalone)
    found = replace(found, limits=_in_units(options, found, listed, standalone=standalone))
    if not options.spares:
        return found
    slots = _at_most(found.slots + options.spares, "--slots with --spares")
    if (gpus := machine.gpus()) and slots > gpus:  # spares then take some of the node's GPUs
        slots = max(found.slots, gpus)
    if slots <= options.spares:
        raise CommandError(
            f"--spares {options.spares} leaves none of this node's {slots} slots for training: give fewer."
        )
    return replace(found, slots=slots)


def _sizes(options: RunOptions, machine: Machine, *, standalone: bool) -> Sizes:
    """Return the sizes without spares."""
    notes: list[str] = []
    by_nodes, by_workers = options.source("nnodes"), options.source("min", "max", "sizes")
    if by_nodes and by_workers:
        loser = (
            "the environment's --nnodes"
            if by_workers > by_nodes
            else "the environment's --min, --max and --sizes"
        )
        notes.append(f"ignored: {loser}, because the command line gives other limits")
    offered = _offered(options, machine)
    if by_workers > by_nodes:
        return _by_workers(options, machine, offered, standalone, tuple(notes))
    low, high = nodes(options)
    per_node = offered if offered is not None else options.unit or 1
    if offered is None and options.slots is not None:
        per_node = _auto(machine)
        per_node = max(per_node - per_node % (options.unit or 1), 1)
    if standalone:  # no other node can join
        high = low
    return Sizes(Limits(low * per_node, high * per_node), per_node, tuple(notes))


def _counts_nodes(options: RunOptions) -> bool:
    return options.source("nnodes") >= options.source("min", "max", "sizes")


def _by_workers(
    options: RunOptions,
    machine: Machine,
    offered: int | None,
    standalone: bool,
    notes: tuple[str, ...],
) -> Sizes:
    if options.min is not None and options.max is not None and options.min > options.max:
        raise CommandError(f"--min {options.min} is above --max {options.max}.")
    unit = options.unit or 1
    low = options.min if options.min is not None else unit
    slots = offered if offered is not None else _auto(machine)
    high = options.max
    if high is None:
        if not standalone:
            raise CommandError("--min needs --max beside it, as other nodes may bring any number of workers.")
        high = max(low, slots - slots % unit)
    if offered is None:
        slots = min(slots, high)
        if standalone:
            slots = _at_most(max(slots, low), "--min", "; for more nodes give --etcd")
    elif standalone and unit <= slots < low:
        raise CommandError(
            f"this one node offers {slots} slots, so it can never run --min {low} workers; "
            "raise --slots, lower --min, or give --etcd for more nodes."
        )
    return Sizes(Limits(low, high), slots, notes)


def _listed(options: RunOptions) -> tuple[int, ...]:
    """Return the numbers of --sizes, ascending; empty if not given. Raises CommandError."""
    if options.sizes is None:
        return ()
    try:
        numbers = sorted({int(part) for part in options.sizes.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1 or numbers[-1] > MOST:
        raise CommandError(f"--sizes {options.sizes!r} is no list of numbers of workers, such as 2,4,8.")
    if options.min is not None and numbers[0] < options.min:
        raise CommandError(f"--sizes has {numbers[0]}, which is below --min {options.min}.")
    if options.max is not None and numbers[-1] > options.max:
        raise CommandError(f"--sizes has {numbers[-1]}, which is above --max {options.max}.")
    return tuple(numbers)


def _in_units(options: RunOptions, found: Sizes, listed: tuple[int, ...], *, standalone: bool) -> Limits:
    """Return the limits with the unit and the listed sizes. Raises CommandError."""
    unit, within = options.unit or 1, UnitWithin(options.unit_within or UnitWithin.ANY)
    if options.unit_within is not None and unit == 1:
        raise CommandError("--unit-within has no effect without --unit N, a number of workers above 1.")
    low, high = found.limits.min, found.limits.max
    if listed:
        given = [("--sizes", size) for size in listed]
    elif _counts_nodes(options):
        given = [("the number of workers,", low), ("the number of workers,", high)]
    else:
        given = [("--min", low), ("--max", high)]
    for name, size in given:
        if size % unit:
            comma = "," if name.endswith(",") else ""
            raise CommandError(
                f"{name} {size}{comma} is no multiple of --unit {unit}: a world has whole units only."
            )
    if found.slots < unit and (standalone or within is UnitWithin.NODE):
        hint = "" if standalone else ", or give --unit-within any"
        raise CommandError(
            f"a unit of {unit} workers does not fit on this node, which offers {found.slots} slots: "
            f"raise --slots{hint}."
        )
    return Limits(low, high, unit, within, listed)


def _offered(options: RunOptions, machine: Machine) -> int | None:
    """Return the requested slots; None for as many as fit."""
    ours, torchruns = options.source("slots"), options.source("nproc_per_node")
    if ours and ours is torchruns:
        raise CommandError("--slots and --nproc-per-node mean the same: give one or the other.")
    if ours > torchruns:
        return _slots(options.slots or "", machine)
    if options.nproc_per_node is not None and torchruns is not OptionSource.NOT_GIVEN:
        return _nproc(options.nproc_per_node, machine)
    return None


def _slots(text: str, machine: Machine) -> int | None:
    if text == "auto":
        return None
    try:
        slots = int(text)
    except ValueError:
        raise CommandError(f"--slots {text!r} is neither a number nor auto.") from None
    if slots < 1:
        raise CommandError(f"--slots is {slots}, but a node offers at least 1.")
    _at_most(slots, "--slots")
    gpus = machine.gpus()
    if gpus and slots > gpus:
        raise CommandError(
            f"--slots {slots} is more than the {gpus} GPU{'s' if gpus > 1 else ''} of this machine; "
            "set CUDA_VISIBLE_DEVICES= to train on its cores."
        )
    return slots


def _nproc(text: str, machine: Machine) -> int:
    """Return the number for torchrun's --nproc-per-node."""
    match text:
        case "cpu":
            return machine.affinity_cores()
        case "auto":
            return machine.gpus() or machine.affinity_cores()
        case "gpu":
            found: int | None = machine.gpus()
        case _:
            try:
                number = int(text)
            except ValueError:
                found = machine.torch_devices(text)
            else:
                if number < 1:
                    raise CommandError(f"--nproc-per-node is {number}, but a node runs at least 1 worker.")
                return _at_most(number, "--nproc-per-node")
    if found is None:
        raise CommandError(f"--nproc-per-node {text!r} is none of a number, auto, cpu, gpu and xpu.")
    if found == 0:
        raise CommandError(f"--nproc-per-node {text} asks for devices that this machine does not have.")
    return found


def _at_most(slots: int, option: str, hint: str = "") -> int:
    if slots > SLOTS_MAX:
        raise CommandError(
            f"{option} {slots} is more than the {SLOTS_MAX} workers that one node runs at most{hint}."
        )
    return slots


def _auto(machine: Machine) -> int:
    return min(machine.gpus() or machine.cores(), SLOTS_MAX)
