"""``elasticd status``, ``ls`` and ``top``: the state of jobs, once or at each change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import click

from elasticd.cli.command_error import ETCD_UNREACHABLE, CommandError
from elasticd.cli.job_access import Place, etcd_errors_explained, find, is_full, only_job, places, unusable
from elasticd.cli.option_types import Name
from elasticd.cli.options import etcd_options
from elasticd.cli.say import on_screen, say, table
from elasticd.core.facts import Fact, Leadership, Phase, Round, Spec
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.errors import BadRecord
from elasticd.telemetry import describe, statustext
from elasticd.telemetry.status import JobStatus, Shown, job_status, updated

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


@click.command()
@click.argument("job", type=Name("job"), required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object per line.")
@click.option("--watch", "-w", is_flag=True, help="Keep running, and show each change.")
@click.option(
    "--job-file", "as_job_file", is_flag=True, help="Print the job's command line as a job file instead."
)
@etcd_options
def status(job: str | None, as_json: bool, watch: bool, as_job_file: bool, **etcd: Any) -> None:
    """Show the state of JOB.

    This is its world, its nodes and slots, what it waits for, and what failed. Without JOB: the only job,
    or a list of all jobs.
    """
    if as_job_file and (as_json or watch):
        raise CommandError("--job-file prints one file: leave out --json and --watch.")
    if job is None:
        found = places(etcd)
        if as_job_file:
            place, job = only_job(found, "--job-file")
        elif not watch and sum(len(place.jobs) for place in found) != 1:
            _show_list(found, as_json)
            return
        else:
            place, job = only_job(found, "--watch")
    else:
        place = find(etcd, job)
    if as_job_file:
        _print_job_file(place.access, job)
    elif watch:
        from elasticd.cli.watch import watch as watch_job

        watch_job(place, job, lambda s: _show_anew(s, as_json))
    else:
        _show(_look(place.access, job), as_json)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object per line.")
@etcd_options
def ls(as_json: bool, **etcd: Any) -> None:
    """List the jobs in etcd, or the standalone runs on this machine."""
    _show_list(places(etcd), as_json)


def _look(access: EtcdAccess, job: str) -> JobStatus:
    from elasticd.etcd.blocking_client import Client

    with etcd_errors_explained(), Client(access) as client:
        listing, bad = client.list(job)
        full = is_full(client)
    if failure := unusable(job, bad):
        raise failure from bad[0]
    for error in bad:
        say(f"elasticd: {job}: {error}.", err=True)
    facts = updated({}, listing)
    return job_status(job, {**facts, **_told(facts)}, time.time(), etcd_full=full)


def _told(facts: Mapping[str, Fact]) -> dict[str, Shown]:
    """Return what the job's leader knows. Without an answer, the summary in etcd must do."""
    leader, round = facts.get("leader"), facts.get("round")
    ended = isinstance(round, Round) and round.phase is Phase.ENDED
    if not isinstance(leader, Leadership) or not leader.port or ended:
        return {}
    from elasticd.checkpoint.replication.wire import PeerGone
    from elasticd.daemon.leader_link.telemetry_follower import ask_leader
    from elasticd.daemon.leader_link.telemetry_messages import as_facts

    try:
        known = ask_leader(leader)
    except PeerGone:
        return {}
    return as_facts(known.nodes, known.summary)


def _print_job_file(access: EtcdAccess, job: str) -> None:
    from elasticd.etcd.blocking_client import Client

    with etcd_errors_explained(), Client(access) as client:
        entry = client.get(job, "spec")
    spec = entry.fact if entry is not None else None
    if not isinstance(spec, Spec) or not spec.job_file:
        raise CommandError(f"{job} has no job file: it has ended.")
    scaled = "" if spec.limits == spec.asked else f"; `elasticd scale` has set {describe.sizes(spec.limits)}"
    say(f"# {job}{scaled}", *spec.job_file.splitlines())


def _look_if_there(place: Place, job: str) -> JobStatus | None:
    """Return the job's status; None if its standalone run has just ended. If the job's records are unusable,
    print why and return None, so that the other jobs can still be listed."""
    try:
        return _look(place.access, job)
    except CommandError as error:
        if isinstance(error.__cause__, BadRecord):
            say(f"elasticd: {error.sentence}", err=True)
        elif place.shared or error.code != ETCD_UNREACHABLE:
            raise
        return None


def _show(s: JobStatus, as_json: bool) -> None:
    if as_json:
        say(json.dumps(s.as_json()))
    else:
        say(*on_screen(statustext.lines(s)))


# ---------------------------------------------------------------- lists


def _show_list(there: list[Place], as_json: bool) -> None:
    found = [s for place in there for job in place.jobs if (s := _look_if_there(place, job)) is not None]
    if as_json:
        for s in found:
            say(json.dumps(s.as_json()))
        return
    if not found:
        where = "in this etcd" if any(p.shared for p in there) else "on this machine; for others give --etcd"
        say(f"There is no job {where}.", err=True)
        return
    say(*table([("JOB", "PHASE", "ROUND", "WORLD", "STEP", "NODES", "SCRIPT"), *map(_row, found)]))


def _row(s: JobStatus) -> tuple[str, ...]:
    limits = f" ({describe.sizes(s.limits)})" if s.limits else ""
    return (
        s.job,
        s.condition,
        str(s.round),
        f"{s.world_size}{limits}",
        "-" if s.step is None else str(s.step),
        str(sum(node.state != "lost" for node in s.nodes)),
        s.script or "-",
    )


# ---------------------------------------------------------------- --watch


def _show_anew(s: JobStatus, as_json: bool) -> None:
    """Show the job: on a terminal in place of the previous output, else below it."""
    if as_json or not sys.stdout.isatty():
        _show(s, as_json)
        sys.stdout.flush()
        return
    sys.stdout.write("\x1b[H\x1b[J")
    _show(s, as_json)


# ---------------------------------------------------------------- top


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
