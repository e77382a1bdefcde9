"""Turns options into a checked RunConfig, or raises one sentence about what is wrong."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from elasticd.checkpoint.client.schedule import parse_cadence
from elasticd.checkpoint.storage import store_at
from elasticd.checkpoint.storage.rate_limit import parse_rate, parse_size
from elasticd.cli import script as scripts
from elasticd.cli.command_error import CommandError
from elasticd.cli.http_options import http_note, http_place, http_tls, http_token
from elasticd.cli.interfaces import host_is_loopback, loopback_of, network_environment
from elasticd.cli.job_file import job_file_of
from elasticd.cli.log_options import logs, signals
from elasticd.cli.machine import Machine, default_node_name, is_local_address, visible
from elasticd.cli.options import RunOptions, flag
from elasticd.cli.policy import Settings, patience, policy, settings_in
from elasticd.cli.rendezvous import check_name, rendezvous
from elasticd.cli.sizes import nodes, sizes
from elasticd.core.facts import Limits, Resume
from elasticd.daemon.config import CommandKind, RunConfig
from elasticd.etcd.access import EtcdAccess, hosts_and_ports, routed_address

T = TypeVar("T")

_MEANS_NOTHING: Mapping[str, str] = {
    "monitor_interval": "exits are seen at once, not looked for at intervals",
    "start_method": "workers are always started as programs of their own",
    "event_log_handler": "events go to the log; see --log-format",
    "node_rank": "ranks are dealt when a world forms, and survivors keep their order",
    "master_addr": "the store of each round is hosted by an agent, and MASTER_ADDR tells the workers where",
}
# torch 2.13 crashes in DistributedDataParallel on gloo if TORCH_DISTRIBUTED_DEBUG is DETAIL.
_FOR_DEBUGGING: Mapping[str, str] = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
_ANY_GPU = 1 << 20  # more GPUs than any machine has
_OF_A_NODE = {"node", "address", "local_addr", "node_rank"}
_NO_OPTIONS = {"target", "args", "etcd_password", "from_environment"}
_COMMON = ("--min", "--max", "--slots", "--etcd", "--job", "--checkpoints", "--nnodes", "--nproc-per-node")


@dataclass(frozen=True, slots=True)
class Planned:
    """A checked configuration. ``notes``: options that have no effect here, one sentence each, to be shown
    once."""

    config: RunConfig
    notes: tuple[str, ...]


def plan(options: RunOptions, environ: Mapping[str, str], machine: Machine) -> Planned:
    """Return the configuration for these options. Starts nothing, and leaves nothing behind.

    Raises CommandError for every fault that can be found before the start.
    """
    notes: list[str] = []
    _check_programs(options, environ)
    low, high = nodes(options)
    met = rendezvous(options, nodes_min=low, nodes_max=high)
    size = sizes(options, machine, standalone=met.etcd is None)
    settings = settings_in(options.policy)
    script = scripts.find(
        _kind(options),
        options.target,
        options.args,
        own_python=not environ.get("PYTHON_EXEC"),
    )
    notes += [*size.notes, *met.notes, *_ignored(options)]
    if environ.get("TORCHELASTIC_HEALTH_CHECK_PORT"):
        notes.append("TORCHELASTIC_HEALTH_CHECK_PORT means nothing here: ask `elasticd status`")
    if options.replicate and met.etcd is None:
        notes.append("--replicate has no effect on a standalone run: no other node is there to hold a copy")
    if beyond := sorted(rank for rank in logs(options, environ).local_ranks or () if rank >= size.slots):
        notes.append(f"--local-ranks-filter names {beyond[0]}, but local ranks here end at {size.slots - 1}")
    _check_devices(options, size.slots, environ)
    if options.hang_after not in (None, "auto"):
        notes += [
            f"{name} in the file of --policy has no effect beside --hang-after {options.hang_after}"
            for name in ("hang_floor_s", "hang_ceiling_s")
            if name in settings
        ]
    notes += _went_to_the_script(options)
    env: dict[str, str] = {}
    if size.slots > 1 and "OMP_NUM_THREADS" not in environ:
        env["OMP_NUM_THREADS"] = "1"
        notes.append("OMP_NUM_THREADS is not set, so each worker gets 1 thread, as with torchrun")
    if options.on_nonfinite is not None:
        env["ELASTICD_ON_NONFINITE"] = options.on_nonfinite
    address = _address(options, met.etcd, notes)
    env |= network_environment(address, environ, asked=bool(options.source("address", "local_addr")))
    env |= _checkpoints(options) | _debug(options, environ)
    config = RunConfig(
        job=met.job or _new_name(script.stem, met.etcd, size.limits, size.slots),
        node=check_name("node", options.node if options.node is not None else default_node_name()),
        address=address,
        limits=size.limits,
        slots=size.slots,
        command=script.command,
        fingerprint=script.text.fingerprint,
        imports=script.text.imports,
        needs_packages=script.text.needs_packages,
        policy=policy(options, settings, environ, met.timing),
        etcd=met.etcd,
        etcd_grace_s=settings.get("etcd_grace_s", 600.0),
        etcd_wait_s=options.etcd_wait,
        role=options.role or "default",
        logs=logs(options, environ),
        signals=signals(options.signals_to_handle or "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        virtual_local_rank=options.virtual_local_rank,
        numa_binding=options.numa_binding,
        fresh_start=options.fresh_start,
        spares=options.spares,
        memory=_parsed(options, "memory", _memory),
        replicate=options.replicate,
        checkpoint_rate=_parsed(options, "checkpoint_rate", parse_rate),
        http=http_place(options.http),
        http_tls=http_tls(options),
        http_token=http_token(options),
        patience=patience(options, settings),
        audit=_audit(options, settings),
        debug=options.debug,
        master_port=_master_port(options, address),
        env=env,
        job_file=_job_file(options),
    )
    if met.job is None and met.etcd is not None and config.limits.max > config.slots:
        notes.append(f"--job was not given, so other nodes join this one only with --job {config.job}")
    if note := http_note(config.http, config.http_tls, config.http_token):
        notes.append(note)
    return Planned(config, tuple(notes))


def _job_file(options: RunOptions) -> str:
    """Return the options that were given as a job file, without those that are different on each node."""
    given = {
        option.name: getattr(options, option.name)
        for option in fields(options)
        if option.name not in _OF_A_NODE | _NO_OPTIONS and getattr(options, option.name) != option.default
    }
    return job_file_of(options.target, options.args, given)


def _checkpoints(options: RunOptions) -> dict[str, str]:
    """Return the workers' environment variables for checkpoints. Raises CommandError."""
    env = {"ELASTICD_RESUME": options.resume} if options.resume != Resume.AUTO else {}
    _parsed(options, "checkpoint_every", parse_cadence)
    if options.checkpoint_every is not None:
        env["ELASTICD_CHECKPOINT_EVERY"] = options.checkpoint_every
    store = _parsed(options, "checkpoints", store_at) if options.checkpoints else None
    if store is not None:
        env["ELASTICD_CHECKPOINTS"] = store.url
    return env


def _memory(text: str) -> int:
    return 0 if text.strip().lower() == "off" else parse_size(text)


def _parsed(options: RunOptions, name: str, parse: Callable[[str], T]) -> T | None:
    """Return the value of an option; None if not given. Raises CommandError if ``parse`` raises
    ValueError."""
    text = getattr(options, name)
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise CommandError(f"{flag(name)}: {error}.") from error


def _check_programs(options: RunOptions, environ: Mapping[str, str]) -> None:
    """Check the programs that start workers, other than the script."""
    python, path = environ.get("PYTHON_EXEC"), environ.get("PATH")
    if python is not None and _kind(options) is not CommandKind.PROGRAM:
        if not python:
            raise CommandError("PYTHON_EXEC is empty; unset it, or have it name a Python interpreter.")
        if shutil.which(python, path=path) is None:
            raise CommandError(f"PYTHON_EXEC names {python}, which is no program that can be run here.")
    if options.numa_binding is not None and shutil.which("numactl", path=path) is None:
        raise CommandError("--numa-binding needs the program numactl, which is not on the PATH here.")


def _kind(options: RunOptions) -> CommandKind:
    if options.run_path:
        return CommandKind.SCRIPT
    if options.module and options.no_python:
        raise CommandError("-m and --no-python exclude each other: a module needs Python.")
    if options.no_python:
        return CommandKind.PROGRAM
    return CommandKind.MODULE if options.module else CommandKind.SCRIPT


def _ignored(options: RunOptions) -> list[str]:
    notes = []
    for name, why in _MEANS_NOTHING.items():
        value = getattr(options, name)
        if name == "master_addr" and options.master_port:
            continue
        if value is not None and not (name == "event_log_handler" and value == "null"):
            notes.append(f"{flag(name)} means nothing here: {why}")
    return notes


def _went_to_the_script(options: RunOptions) -> list[str]:
    """Return a note for each elasticd option after the script's name that the script's text does not
    mention."""
    said = {arg.partition("=")[0] for arg in options.args}
    try:
        own = Path(options.target).read_text(errors="replace")
    except OSError:
        own = ""
    return [
        f"{name} stands after the script's name, so it went to the script: elasticd's options come before"
        for name in _COMMON
        if name in said and not re.search(rf"{name}\b(?!-)", own)
    ]


def _new_name(stem: str, etcd: EtcdAccess | None, limits: Limits, slots: int) -> str:
    """Return a readable, unique job name."""
    if etcd is not None and limits.min > slots:
        raise CommandError(
            f"this node offers {slots} of at least {limits.min} workers, "
            "and the other nodes need the job's name to join it: give --job NAME on each."
        )
    readable = re.sub(r"[^A-Za-z0-9_.-]", "-", stem).strip("-.")[:40] or "job"
    return f"{readable}-{secrets.token_hex(3)}"


def _hosts(etcd: EtcdAccess) -> list[str]:
    return [host for host, _ in hosts_and_ports(etcd.endpoints)]


def _address(options: RunOptions, etcd: EtcdAccess | None, notes: list[str]) -> str:
    name = "address" if options.source("address") >= options.source("local_addr") else "local_addr"
    asked: str | None = getattr(options, name)
    if asked is not None:
        asked = asked.strip("[]")
        if not asked or any(c.isspace() or c == "/" for c in asked):
            raise CommandError(f"{flag(name)} {asked!r} is not an address.")
        if not is_local_address(asked):
            raise CommandError(f"{flag(name)} {asked} is not an address of this machine.")
        own = loopback_of(asked)
        if own and etcd is not None and not all(map(host_is_loopback, _hosts(etcd))):
            notes.append(
                f"other nodes cannot reach this node at {flag(name)} {asked}, which is "
                f"{'a loopback address' if own == asked else f'{own} on this machine'}: "
                "give an address at which they reach this node"
            )
        return own or asked
    places = hosts_and_ports(etcd.endpoints) if etcd is not None else []
    if not places:  # without other endpoints, no other machine can join
        return "127.0.0.1"
    # If no endpoint resolves yet, etcd cannot be reached yet either; the host's name may resolve later.
    return routed_address(places) or default_node_name()


def _master_port(options: RunOptions, address: str) -> tuple[tuple[str, ...], int] | None:
    """Return the addresses and the port of --master-port, where a script may look for its store as under
    torchrun."""
    port = options.master_port
    if not port:  # 0 means any free port, as in torchrun
        return None
    named = options.master_addr or address
    return tuple({address, "127.0.0.1", named if is_local_address(named) else address}), port


def _check_devices(options: RunOptions, slots: int, environ: Mapping[str, str]) -> None:
    """Raise CommandError if two workers would use one GPU, each as its only one."""
    devices = visible(environ.get("CUDA_VISIBLE_DEVICES", ""), _ANY_GPU)
    if options.virtual_local_rank and 0 < devices < slots:
        raise CommandError(
            f"--virtual-local-rank gives each slot a GPU of its own, and CUDA_VISIBLE_DEVICES has {devices} "
            f"for {slots} slots: offer at most {devices}."
        )


def _debug(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's own variables for ``--debug`` that the user has not set. Raises CommandError."""
    if not options.debug:
        return {}
    if options.logs_specs is not None:
        raise CommandError("--debug needs torch's own layout of the log folder: leave out --logs-specs.")
    return {name: value for name, value in _FOR_DEBUGGING.items() if name not in environ}


def _audit(options: RunOptions, settings: Settings) -> int | None:
    if not options.audit:
        return None
    if options.logs_specs is not None:
        raise CommandError("--audit needs torch's own layout of the log folder: leave out --logs-specs.")
    return int(settings.get("audit_every", 100))
