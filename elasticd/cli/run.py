"""``elasticd run``: from the command line to a checked RunConfig, and on to the agent."""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import click

from elasticd.checkpoint.store import BadStore, store_at
from elasticd.cli import script as scripts
from elasticd.cli.complaint import Complaint
from elasticd.cli.interfaces import network_environment
from elasticd.cli.machine import (
    Machine,
    ThisMachine,
    default_node_name,
    is_ours,
    routed_address,
)
from elasticd.cli.meeting import check_name, meeting
from elasticd.cli.options import (
    CONTEXT_SETTINGS,
    RunOptions,
    Said,
    collect,
    flag,
    run_options,
)
from elasticd.cli.sizes import nodes, sizes
from elasticd.cli.storecheck import reached
from elasticd.core import cadence
from elasticd.core.facts import Limits, Policy, Resume
from elasticd.core.hang import Patience
from elasticd.daemon.config import CommandKind, LogOptions, RunConfig
from elasticd.etcd.access import EtcdAccess, host_and_port
from elasticd.telemetry.termination import TerminationLog

T = TypeVar("T")

_MEANS_NOTHING: Mapping[str, str] = {
    "monitor_interval": "exits are seen at once, not looked for at intervals",
    "start_method": "workers are always started as programs of their own",
    "event_log_handler": "events go to the log; see --log-format",
    "node_rank": "ranks are dealt when a world forms, and survivors keep their order",
    "master_addr": "the store of each round is hosted by an agent, and MASTER_ADDR tells the workers where",
    "master_port": "the store of each round listens on a free port, and MASTER_PORT tells the workers which",
}
HTTP_DEFAULT = ("127.0.0.1", 9408)
_STREAMS = re.compile(r"[0-3]|(\d:[0-3],)*\d:[0-3]")  # as torch reads it: ten ranks at most


@dataclass(frozen=True, slots=True)
class Planned:
    """``notes``: what was said and means nothing here, a sentence each, to be told once."""

    config: RunConfig
    notes: tuple[str, ...]


@click.command(context_settings=CONTEXT_SETTINGS)
@run_options
@click.pass_context
def run(ctx: click.Context, /, **_: object) -> int:
    """Run a training script, and keep it running.

    Takes torchrun's options as well as its own. They end at SCRIPT; what follows is the script's.
    """
    options = collect(ctx, os.environ.get("ELASTICD_ETCD_PASSWORD"))
    last_words = TerminationLog(options.termination_log)
    try:
        return _run(options, last_words)
    except Complaint as complaint:
        last_words.write(complaint.sentence)
        raise


def _run(options: RunOptions, last_words: TerminationLog) -> int:
    planned = plan(options, os.environ, ThisMachine())
    if unanswered := _try_store(planned.config):
        planned = replace(planned, notes=(*planned.notes, unanswered))
    if last_words.problem:
        planned = replace(planned, notes=(*planned.notes, last_words.problem))

    from elasticd.telemetry import log
    from elasticd.telemetry.view import open_view

    with open_view(plain=options.plain) as view:
        try:
            log.setup(
                options.log_format,  # type: ignore[arg-type]  # one of click's choices
                level=os.environ.get("LOGLEVEL") or "info",
                line=view.line,
                colors=None if not os.environ.get("NO_COLOR") else False,
            )
        except ValueError as error:
            raise Complaint(f"LOGLEVEL: {error}.") from error
        _spell_log_level(os.environ)
        log.bind(job=planned.config.job, node=planned.config.node)
        for note in planned.notes:
            log.get().info("options.noted", text=note)

        from elasticd.daemon.main import run as run_agent

        return run_agent(planned.config, view, last_words)


def _spell_log_level(environ: MutableMapping[str, str]) -> None:
    """Torch, here and in the workers, takes a LOGLEVEL only in capitals, and dies of an empty one."""
    if level := environ.pop("LOGLEVEL", ""):
        environ["LOGLEVEL"] = level.upper()


def plan(options: RunOptions, environ: Mapping[str, str], machine: Machine) -> Planned:
    """The configuration that these options ask for. Nothing is started or left behind.

    Raises Complaint for everything that can be seen to be wrong before starting.
    """
    notes: list[str] = []
    _check_together(options)
    _check_programs(options, environ)
    low, high = nodes(options)
    met = meeting(options, nodes_min=low, nodes_max=high)
    size = sizes(options, machine, standalone=met.etcd is None)
    script = scripts.find(
        _kind(options),
        options.target,
        options.args,
        own_python=not environ.get("PYTHON_EXEC"),
    )
    notes += [*size.notes, *met.notes, *_nothings(options)]
    if environ.get("TORCHELASTIC_HEALTH_CHECK_PORT"):
        notes.append("TORCHELASTIC_HEALTH_CHECK_PORT means nothing here: ask `elasticd status`")
    env: dict[str, str] = {}
    if size.slots > 1 and "OMP_NUM_THREADS" not in environ:
        env["OMP_NUM_THREADS"] = "1"
        notes.append("OMP_NUM_THREADS is not set, so each worker gets 1 thread, as with torchrun")
    if options.on_nonfinite is not None:
        env["ELASTICD_ON_NONFINITE"] = options.on_nonfinite
    address = _address(options, met.etcd)
    env |= network_environment(address, environ, asked=options.said("address", "local_addr") > Said.NOWHERE)
    env |= _checkpoints(options)
    config = RunConfig(
        job=met.job or _new_name(script.stem, met.etcd, size.limits, size.slots),
        node=check_name("node", options.node if options.node is not None else default_node_name()),
        address=address,
        limits=size.limits,
        slots=size.slots,
        command=script.command,
        fingerprint=script.fingerprint,
        policy=_policy(options, environ, met.join_timeout_s, met.settle_s, met.node_ttl_s),
        etcd=met.etcd,
        etcd_grace_s=_first(options.etcd_grace, 600.0),
        etcd_wait_s=options.etcd_wait,
        role=options.role or "default",
        logs=_logs(options, environ),
        signals=_signals(options.signals_to_handle or "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        virtual_local_rank=options.virtual_local_rank,
        numa_binding=options.numa_binding,
        fresh_start=options.fresh_start,
        spares=options.spares,
        replicate=options.replicate,
        http=http_place(options.http),
        patience=_patience(options),
        audit=_audit(options),
        env=env,
    )
    return Planned(config, tuple(notes))


def _checkpoints(options: RunOptions) -> dict[str, str]:
    """What workers are told of them. Raises Complaint."""
    env = {"ELASTICD_RESUME": options.resume} if options.resume != Resume.AUTO else {}
    if options.checkpoint_every is not None:
        try:
            cadence.parse(options.checkpoint_every)
        except ValueError as error:
            raise Complaint(f"--checkpoint-every: {error}.") from error
        env["ELASTICD_CHECKPOINT_EVERY"] = options.checkpoint_every
    if options.checkpoints:
        try:
            env["ELASTICD_CHECKPOINTS"] = store_at(options.checkpoints).url
        except BadStore as error:
            raise Complaint(f"--checkpoints: {error}.") from error
    return env


def _try_store(config: RunConfig) -> str:
    """As ``storecheck.reached``."""
    where = config.env.get("ELASTICD_CHECKPOINTS")
    return reached(store_at(where)) if where else ""


def _check_together(options: RunOptions) -> None:
    if options.module and options.no_python and not options.run_path:
        raise Complaint("-m and --no-python exclude each other: a module needs Python.")


def _check_programs(options: RunOptions, environ: Mapping[str, str]) -> None:
    """Those that workers are started with, beside the script."""
    python, path = environ.get("PYTHON_EXEC"), environ.get("PATH")
    if python is not None and _kind(options) is not CommandKind.PROGRAM:
        if not python:
            raise Complaint("PYTHON_EXEC is empty; unset it, or have it name a Python interpreter.")
        if shutil.which(python, path=path) is None:
            raise Complaint(f"PYTHON_EXEC names {python}, which is no program that can be run here.")
    if options.numa_binding is not None and shutil.which("numactl", path=path) is None:
        raise Complaint("--numa-binding needs the program numactl, which is not on the PATH here.")


def _kind(options: RunOptions) -> CommandKind:
    if options.run_path:
        return CommandKind.SCRIPT
    if options.no_python:
        return CommandKind.PROGRAM
    return CommandKind.MODULE if options.module else CommandKind.SCRIPT


def _nothings(options: RunOptions) -> list[str]:
    notes = []
    for name, why in _MEANS_NOTHING.items():
        value = getattr(options, name)
        if value is not None and not (name == "event_log_handler" and value == "null"):
            notes.append(f"{flag(name)} means nothing here: {why}")
    return notes


def _new_name(stem: str, etcd: EtcdAccess | None, limits: Limits, slots: int) -> str:
    """A readable name that no other job has."""
    if etcd is not None and limits.min > slots:
        raise Complaint(
            f"this node offers {slots} of at least {limits.min} workers, "
            "and the other nodes need the job's name to join it: give --job NAME on each."
        )
    readable = re.sub(r"[^A-Za-z0-9_.-]", "-", stem).strip("-.")[:40] or "job"
    return f"{readable}-{secrets.token_hex(3)}"


def _address(options: RunOptions, etcd: EtcdAccess | None) -> str:
    name = "address" if options.said("address") >= options.said("local_addr") else "local_addr"
    asked: str | None = getattr(options, name)
    if asked is not None:
        asked = asked.strip("[]")
        if not asked or any(c.isspace() or c == "/" for c in asked):
            raise Complaint(f"{flag(name)} {asked!r} is not an address.")
        if not is_ours(asked):
            raise Complaint(f"{flag(name)} {asked} is not an address of this machine.")
        return asked
    if etcd is None:
        return "127.0.0.1"
    # Where no name resolves yet, etcd cannot be reached yet either; the host's own name may do later.
    return routed_address([host_and_port(e) for e in etcd.endpoints]) or default_node_name()


def http_place(asked: str | None) -> tuple[str, int] | None:
    """Host and port of what --http says, None for off. Raises Complaint.

    Loopback unless somebody says otherwise: what is served tells of paths, hosts and errors.
    """
    if asked is None:
        return HTTP_DEFAULT
    if asked.strip().lower() in ("off", "none", ""):
        return None
    host, _, port = asked.strip().rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise Complaint(f"--http {asked!r} is neither HOST:PORT (127.0.0.1:9408) nor off.")
    if not is_ours(host):
        raise Complaint(f"--http {asked}: {host} is not an address of this machine.")
    return host, int(port)


def _policy(
    options: RunOptions,
    environ: Mapping[str, str],
    join_timeout_s: float | None,
    settle_s: float | None,
    node_ttl_s: float | None,
) -> Policy:
    """Our own words first, then --rdzv-conf's, then the defaults."""
    default = Policy()
    restarts_max = _first(options.max_restarts, default.restarts_max)
    # Who says how often to restart, as with torchrun, means that number and not an earlier end.
    futile_default = default.futile_max if options.max_restarts is None else restarts_max + 1
    return Policy(
        settle_s=_first(options.settle, settle_s, default.settle_s),
        grow_cooldown_s=_first(options.grow_cooldown, default.grow_cooldown_s),
        join_timeout_s=_first(options.join_timeout, join_timeout_s, default.join_timeout_s),
        shutdown_s=_first(options.shutdown_timeout, _torch_shutdown_s(environ), default.shutdown_s),
        broken_s=_first(options.broken_timeout, default.broken_s),
        part_s=_first(options.part_timeout, default.part_s),
        node_ttl_s=_first(options.node_ttl, node_ttl_s, default.node_ttl_s),
        restarts_max=restarts_max,
        restart_window_s=_first(options.restart_window, default.restart_window_s),
        futile_max=_first(options.futile_max, futile_default),
        quarantine_after=_first(options.quarantine_after, default.quarantine_after),
        quarantine_s=_first(options.quarantine, default.quarantine_s),
        quarantine_max_s=_first(options.quarantine_max, default.quarantine_max_s),
        resume=Resume(options.resume),
        straggler_drain=options.stragglers == "drain",
        straggler_window_s=_first(options.straggler_window, default.straggler_window_s),
        straggler_ratio=_first(options.straggler_ratio, default.straggler_ratio),
    )


def _patience(options: RunOptions) -> Patience | None:
    default = Patience()
    floor_s = _first(options.hang_floor, default.floor_s)
    ceiling_s = _first(options.hang_ceiling, max(default.ceiling_s, floor_s))
    if ceiling_s < floor_s:
        raise Complaint(f"--hang-ceiling {ceiling_s:g} is below --hang-floor, {floor_s:g}.")
    after = options.hang_after or "auto"
    if after == "auto":
        return Patience(floor_s, ceiling_s)
    for name in ("hang_floor", "hang_ceiling"):
        if options.said(name) is Said.COMMAND_LINE:
            raise Complaint(
                f"{flag(name)} bounds what is learned, but --hang-after {after} leaves nothing to."
            )
    if after == "off":
        return None
    try:
        seconds = float(after)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise Complaint(f"--hang-after {after} is neither auto nor off nor a number of seconds above 0.")
    return Patience(fixed_s=seconds)


def _audit(options: RunOptions) -> int | None:
    if not options.audit:
        if options.said("audit_every") is Said.COMMAND_LINE:
            raise Complaint("--audit-every says how often to note the weights: give --audit, too.")
        return None
    if options.logs_specs is not None:
        raise Complaint("--audit notes beside the logs, in torch's layout of them: leave out --logs-specs.")
    return _first(options.audit_every, 100)


def _first(*values: T | None) -> T:
    """The first that was given."""
    return next(v for v in values if v is not None)


def _torch_shutdown_s(environ: Mapping[str, str]) -> float | None:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if not text:
        return None
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise Complaint(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT is {text!r}; expected a number of seconds.")
    return float(seconds)


# ---------------------------------------------------------------- logs and signals


def _logs(options: RunOptions, environ: Mapping[str, str]) -> LogOptions:
    for name in ("redirects", "tee"):
        value = getattr(options, name)
        if value is not None and not _STREAMS.fullmatch(value):
            raise Complaint(
                f"{flag(name)} {value!r} is neither 0, 1, 2 or 3 nor of the form RANK:0-3,RANK:0-3."
            )
    if options.log_dir is not None:
        _check_writable(options.log_dir)
    if options.logs_specs is not None:
        known = sorted(e.name for e in metadata.entry_points(group="torchrun.logs_specs"))
        if options.logs_specs not in known:
            have = f"those installed are {', '.join(known)}" if known else "none is installed"
            raise Complaint(
                f"--logs-specs {options.logs_specs} names no entry point of torchrun.logs_specs: {have}."
            )
    return LogOptions(
        dir=options.log_dir,
        redirects=options.redirects or "0",
        tee=options.tee or "0",
        local_ranks=_ranks(options.local_ranks_filter),
        line_prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        specs=options.logs_specs,
        duplicate_stdout=_commas(options.duplicate_stdout_filters),
        duplicate_stderr=_commas(options.duplicate_stderr_filters),
    )


def _check_writable(folder: Path) -> None:
    """By writing: permissions alone say little (root, read-only mounts). Leaves nothing behind."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".elasticd-", dir=existing):
            pass
    except OSError as error:
        raise Complaint(f"--log-dir {folder} cannot be written to: {error.strerror}.") from error


def _ranks(text: str | None) -> frozenset[int] | None:
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise Complaint(f"--local-ranks-filter {text!r} is not a list of numbers such as 0,1,2.") from None


def _commas(text: str | None) -> tuple[str, ...]:
    """torchrun's lists: a comma separates, two commas are one."""
    if text is None:
        return ()
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in signal.Signals.__members__:
            raise Complaint(f"--signals-to-handle: there is no signal named {name}.")
        if name in ("SIGKILL", "SIGSTOP"):
            raise Complaint(f"--signals-to-handle: no process can handle {name}.")
    if not names:
        raise Complaint("--signals-to-handle names no signal.")
    return names
