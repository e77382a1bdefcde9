"""``elasticd report``: the history of a run, as a page and in the terminal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from elasticd import __version__
from elasticd.cli.command_error import CommandError
from elasticd.cli.history_commands import known_runs, last_run, living
from elasticd.cli.say import on_screen, say
from elasticd.telemetry import events as files
from elasticd.telemetry import runreportpage, runreporttext
from elasticd.telemetry.runreport import AgentFiles, run_report

PAGE = "report.html"


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
    folders = _folders(run)
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


def _folders(run: str | None) -> list[Path]:
    if run is not None and (os.sep in run or os.path.isdir(run)):
        folder = Path(run)
        if not (folder / files.FILE).exists():
            raise CommandError(f"{folder} is not the folder of a run: there is no {files.FILE} in it")
        return [folder]
    _, known = known_runs(run)
    return [one.folder for one in last_run(known)]
