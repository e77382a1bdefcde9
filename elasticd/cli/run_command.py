"""``elasticd run``: makes a checked RunConfig from the command line, and runs the agent."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import click

from elasticd import torchparts
from elasticd.checkpoint.storage import store_at
from elasticd.cli import passwords
from elasticd.cli.begin import Stopped
from elasticd.cli.command_error import CommandError
from elasticd.cli.machine import Machine, reserve_node_name, working_directory_fault
from elasticd.cli.options import (
    CONTEXT_SETTINGS,
    RunCommand,
    RunOptions,
    collect,
    run_options,
)
from elasticd.cli.run_configuration import plan
from elasticd.daemon.config import RunConfig
from elasticd.telemetry.termination import TerminationLog

# Workers run other people's code, and must not see these variables.
_FOR_THE_AGENT_ALONE = (
    "ETCD_PASSWORD",
    "ETCD_PASSWORD_FILE",
    "ETCD_KEY",
    "ETCD_CERT",
    "HTTP_KEY",
    "HTTP_TOKEN_FILE",
)
_STORE_TIMEOUT_S: Final = 15.0
_PERMANENT_ERRORS: Final = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EINVAL,
}


@click.command(
    cls=RunCommand,
    context_settings=CONTEXT_SETTINGS,
    epilog="Environment variables set options, too: ELASTICD_MIN=2 is --min 2, and PET_NNODES=2 is "
    "torchrun's --nnodes 2.",
)
@run_options
@click.pass_context
def run(ctx: click.Context, /, **_: object) -> int:
    """Run a training script, and keep it running.

    Takes torchrun's options as well as its own: `elasticd run --help-all` shows all of them. Options come
    before SCRIPT; all that follows SCRIPT goes to the script. SCRIPT may be a job file, such as job.toml,
    which names the script and its options.
    """
    options = collect(ctx, passwords.of_login(ctx.params))
    for name in _FOR_THE_AGENT_ALONE:
        os.environ.pop(f"ELASTICD_{name}", None)
    termination_log = TerminationLog(options.termination_log)
    try:
        # Otherwise torch or the script would fail with an unclear error.
        if gone := working_directory_fault():
            raise CommandError(gone)
        return _run(options, termination_log)
    except (CommandError, Stopped) as end:
        termination_log.write(end.sentence)
        raise


def _run(options: RunOptions, termination_log: TerminationLog) -> int:
    if unfit := torchparts.unfit():
        raise CommandError(unfit)
    planned = plan(options, os.environ, Machine())
    if untested := torchparts.untested(torchparts.installed()):
        planned = replace(planned, notes=(*planned.notes, untested))
    if unanswered := _try_store(planned.config):
        planned = replace(planned, notes=(*planned.notes, unanswered))
    if termination_log.problem:
        planned = replace(planned, notes=(*planned.notes, termination_log.problem))

    from elasticd.telemetry import log
    from elasticd.telemetry.liveview import open_view

    config = planned.config
    with ExitStack() as held:
        if options.node is None and config.etcd is not None:  # a standalone run has no other nodes
            name = held.enter_context(reserve_node_name(config.node, config.job))
            config = replace(config, node=name)
        view = held.enter_context(open_view(plain=options.plain))
        try:
            log.setup(
                options.log_format,  # type: ignore[arg-type]  # one of click's choices
                level=options.log_level or os.environ.get("LOGLEVEL") or "info",
                line=view.line,
            )
        except ValueError as error:
            raise CommandError(f"LOGLEVEL: {error}.") from error
        _spell_log_level(os.environ)
        log.bind(job=config.job, node=config.node)
        for note in planned.notes:
            log.get().info("options.noted", sentence=note, text=note)

        from elasticd.daemon.run_agent import run as run_agent

        return run_agent(config, view, termination_log)


def _spell_log_level(environ: MutableMapping[str, str]) -> None:
    """Write LOGLEVEL in capitals, as torch requires here and in the workers, and remove an empty one."""
    if level := environ.pop("LOGLEVEL", ""):
        environ["LOGLEVEL"] = level.upper()


def _try_store(config: RunConfig) -> str:
    """Return an empty string, or a note if the store of checkpoints does not respond: it may respond later,
    and training goes on. Raises CommandError if the store does not exist, or may not be written to."""
    where = config.env.get("ELASTICD_CHECKPOINTS")
    if not where:
        return ""
    store = store_at(where)
    answers: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

    def try_it() -> None:
        probe = f".elasticd-probe-{os.urandom(4).hex()}"
        try:
            store.replace(probe, b"")
            store.remove(probe)
        except OSError as error:
            answers.put(error)
        else:
            answers.put(None)

    threading.Thread(target=try_it, daemon=True).start()
    try:
        error = answers.get(timeout=_STORE_TIMEOUT_S)
    except queue.Empty:
        error = TimeoutError(errno.ETIMEDOUT, f"no answer within {_STORE_TIMEOUT_S:g} s")
    if error is None:
        return ""
    why = error.strerror or str(error)
    if error.errno in _PERMANENT_ERRORS:
        raise CommandError(f"checkpoints cannot be written to {store.url}: {why}.")
    return f"{store.url} cannot be written to now ({why}): until it can, no checkpoint outlives the job"
