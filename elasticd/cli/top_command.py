"""``elasticd top``: all nodes of a job, live, on the full terminal."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import Any

import click

from elasticd.cli.command_error import CommandError
from elasticd.cli.job_access import find, only_job, places
from elasticd.cli.option_types import Name
from elasticd.cli.options import etcd_options
from elasticd.telemetry.status import JobStatus

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


@click.command()
@click.argument("job", type=Name("job"), required=False)
@etcd_options
def top(job: str | None, **etcd: Any) -> None:
    """Show the state of JOB live, with every slot of every node.

    Ctrl-C quits. Without JOB: the only job.
    """
    if not sys.stdout.isatty():
        raise CommandError("top needs a terminal; elsewhere use `elasticd status --watch`")
    # A shell script that runs "top &" makes its commands ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place, job = only_job(places(etcd), "top") if job is None else (find(etcd, job), job)

    from elasticd.cli.watch import watch

    sys.stdout.write(_ENTER)
    last: list[JobStatus] = []
    try:
        watch(place, job, lambda status: _draw(status, last))
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
    if last:
        from elasticd.telemetry import footer

        lines = footer.render(last[-1], 80, 24, fold=True)
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def _draw(status: JobStatus, last: list[JobStatus]) -> None:
    last[:] = [status]
    size = os.get_terminal_size(1) if sys.stdout.isatty() else shutil.get_terminal_size()
    room = size.lines - 1
    from elasticd.telemetry import footer  # late, since it imports rich, which --help does not need

    lines = footer.render(status, size.columns, 2 * room, rows_max=room, fold=True)
    sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in lines[:room]) + "\x1b[J")
    sys.stdout.flush()
