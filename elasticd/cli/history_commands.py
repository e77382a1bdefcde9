"""``elasticd events``, ``logs`` and ``report``: show the files that the runs on this machine have written."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from types import FrameType

import click

from elasticd import __version__
from elasticd.cli.command_error import CommandError
from elasticd.cli.option_types import Name, Whole
from elasticd.cli.say import on_screen, say
from elasticd.procs.linux import started_at
from elasticd.telemetry import describe, runreportpage, runreporttext, runs
from elasticd.telemetry import events as files
from elasticd.telemetry.events import Event
from elasticd.telemetry.runreport import AgentFiles, failures, run_report

_STYLES = {"warning": "yellow", "error": "red"}
_STREAMS = ("stdout.log", "stderr.log")
PAGE = "report.html"


@click.command()
@click.argument("job", type=Name("job"), required=False)
@click.option("--follow", "-f", is_flag=True, help="Keep running, and show each event as it happens.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object per event.")
@click.option("--all-runs", is_flag=True, help="Show the events of JOB's earlier runs, too.")
def events(job: str | None, follow: bool, as_json: bool, all_runs: bool) -> None:
    """Show the events of JOB's last run on this machine.

    Without JOB: the job that ran last. --follow ends when the last agent of the run here has ended.
    """
    job, known = _known_runs(job)
    state = runs.state_dir()
    earlier = set() if all_runs else set(known) - set(_last_run(known))

    def folders() -> list[Path]:
        return [run.folder for run in runs.of_job(state, job) if run not in earlier]

    seen: Iterable[Event]
    if follow:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, _end)
        seen = files.follow(folders, runs.job_folder(state, job), _process)
    else:
        seen = files.read(folders())
    for event in seen:
        say(
            *([json.dumps(event)] if as_json else _lines(event)),
            fg=None if as_json else _STYLES.get(str(event.get("level"))),
        )
        sys.stdout.flush()


@click.command()
@click.argument("job", type=Name("job"), required=False)
@click.option("--slot", type=Whole(0), help="Print only the output of the worker in this slot.")
@click.option("--node", help="Print only the output of this node, if agents of several nodes ran here.")
@click.option("--failed", is_flag=True, help="Print only the output of the worker that failed last.")
def logs(job: str | None, slot: int | None, node: str | None, failed: bool) -> None:
    """Print the output of the workers in JOB's last run.

    This is the output of the newest worker of each slot on this machine. Without JOB: the job that ran last.
    """
    job, known = _known_runs(job)
    known = _last_run(known)
    if failed:
        how, log = _last_failure(job, [run.folder for run in known])
        say(how, bold=True, err=True)
        _print([log])
        return
    newest = {run.node: run for run in known}  # the last run of each node
    if node is not None and node not in newest:
        raise CommandError(
            f"no node of {job} named {node} ran on this machine; known: {describe.listing(sorted(newest))}"
        )
    found = [
        path
        for name, run in sorted(newest.items())
        if node in (None, name)
        for path in _outputs(run.folder, slot)
    ]
    if not found:
        whose = f" in slot {slot}" if slot is not None else ""
        raise CommandError(f"no output of a worker of {job}{whose} is kept on this machine")
    _print(found)


@click.command()
@click.argument("run", required=False)
@click.option(
    "--out",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write the page to.  [report.html in the folder of the run]",
)
@click.option("--text", is_flag=True, help="Only print the report; write no page.")
def report(run: str | None, out: Path | None, text: bool) -> None:
    """Report on RUN: lost time, rounds, failures and checkpoints.

    RUN is a job, whose last run on this machine is reported, or the folder of a run. Without RUN: the job
    that ran last. The run may have crashed, or still be running. The page is one HTML file that needs no
    network.
    """
    if run == "":
        raise CommandError("the name of a run cannot be empty.")
    folders = _folders_of(run)
    parts = []
    for folder in folders:
        told = files.read([folder])
        alive = any(living(e) for e in told if e["event"] == files.STARTED)
        parts.append(AgentFiles(told, files.read_timeline(folder), alive))
    try:
        found = run_report(parts)
    except ValueError:
        raise CommandError(f"no agent has written anything about this run in {folders[-1]}") from None
    say(*on_screen(runreporttext.lines(found)))
    if text:
        return
    page = out or folders[-1] / PAGE
    try:
        page.write_text(runreportpage.render(found, __version__, time.time()), encoding="utf-8")
    except OSError as error:
        raise CommandError(
            f"{page} cannot be written: {error.strerror}; say where with --out FILE"
        ) from error
    say("", f"The page: {page}")


def _folders_of(run: str | None) -> list[Path]:
    if run is not None and (os.sep in run or os.path.isdir(run)):
        folder = Path(run)
        if not (folder / files.FILE).exists():
            raise CommandError(f"{folder} is not the folder of a run: there is no {files.FILE} in it")
        return [folder]
    _, known = _known_runs(run)
    return [one.folder for one in _last_run(known)]


def _known_runs(job: str | None) -> tuple[str, list[runs.KnownRun]]:
    """Return the job, by default the one that ran last, and the runs of its agents. Raises CommandError."""
    state = runs.state_dir()
    there = runs.jobs(state)
    if job is None and not there:
        raise CommandError("no files of a run are kept on this machine")
    name = there[-1] if job is None else job
    known = runs.of_job(state, name)
    if not known:
        have = f"; known: {describe.listing(there[::-1], most=10)}" if there else ""
        raise CommandError(f"no files of a job named {name} are kept on this machine{have}")
    return name, known


def _last_run(known: list[runs.KnownRun]) -> list[runs.KnownRun]:
    """Return the agents of the job's last run, oldest first. ``known``: the agents of all its runs."""
    last: list[runs.KnownRun] = []
    place, over_at = "", math.inf
    for one in known:
        told = files.read([one.folder])
        first = next((e for e in told if e["event"] == files.STARTED), {})
        where = str(first.get("etcd", "embedded"))
        if one.began_at > over_at or where == "embedded" or where != place:
            last, over_at = [], math.inf
        last.append(one)
        place, over_at = where, min([over_at, *(float(e["at"]) for e in told if _over(e))])
    return last


def _over(event: Event) -> bool:
    """Whether the event ends the whole job. Agents that start later belong to another run of that name."""
    return event["event"] == "job.ended" or (event["event"] == files.ENDED and bool(event.get("outcome")))


def living(started: Event) -> bool:
    """Whether the agent that wrote this first event is alive."""
    found = _process(started)
    if found is not None:
        os.close(found)
    return found is not None


def _end(number: int, frame: FrameType | None) -> None:
    """End the command at once. Python drops an exception that a handler raises while a destructor runs."""
    os._exit(128 + number)


def _process(started: Event) -> int | None:
    """Return a pidfd of the agent that wrote this first event; None if the agent has exited."""
    pid = int(started.get("pid") or 0)
    try:
        found = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    if started_at(pid) != started.get("pid_started"):  # the pid belongs to another process now
        os.close(found)
        return None
    return found


def _lines(event: Event) -> list[str]:
    at = datetime.fromtimestamp(float(event["at"])).astimezone()
    text = f"{at:%Y-%m-%d %H:%M:%S}  {event.get('node', '')}  {event.get('text') or event['event']}"
    return on_screen([text])


def _last_failure(job: str, folders: list[Path]) -> tuple[str, Path]:
    """Return a sentence about the last failure, and the path of its output. Raises CommandError."""
    known = failures(files.read(folders))
    if not known:
        raise CommandError(f"no failure of {job} is known on this machine")
    # The leader's event names the failure that broke the round, and has no "round". Otherwise the first
    # failure of the round counts: the later ones follow from it.
    last = known[-1]
    if "round" in last:
        last = next(e for e in known if e.get("round") == last["round"])
    log = Path(str(last.get("log") or os.devnull))
    if not log.is_dir() and not log.is_file():
        node = last.get("failed_node") or last["node"]
        raise CommandError(f"{last['text']}; its output is on the machine of node {node}")
    return str(last["text"]), log


def _outputs(folder: Path, slot: int | None) -> Iterator[Path]:
    """Yield the folder that the newest process of each slot prints to. A process that stays from round to
    round prints to the folder of its first round; ``daemon.logs`` describes the folders of standbys."""
    newest: dict[int, Path] = {}
    standbys = 0
    for event in files.read([folder]):
        if event["event"] == "workers.started":
            of_round = folder / f"attempt_{int(event['round']) - 1}"
            places = {s: of_round / str(local_rank) for local_rank, s in enumerate(event.get("slots", ()))}
        elif event["event"] == "standbys.started":
            standbys += 1
            places = {s: folder / f"attempt_standby_{standbys}" / str(s) for s in event["slots"]}
        else:
            continue
        newest |= {s: place for s, place in places.items() if place.is_dir()}
    yield from (place for its_slot, place in sorted(newest.items()) if slot in (None, its_slot))


def _print(places: Iterable[Path]) -> None:
    """Print files, or the streams in folders, each under its name. Print a sentence if all are empty."""
    out, printed = sys.stdout.buffer, False
    for place in places:
        paths = [place / name for name in _STREAMS] if place.is_dir() else [place]
        for path in paths:
            if path.exists() and os.path.getsize(path):
                printed = True
                say(f"==> {path} <==", bold=True)
                sys.stdout.flush()
                with path.open("rb") as file:
                    shutil.copyfileobj(file, out)
                out.flush()
    if not printed:
        say("nothing was printed", err=True)
