"""``elasticd debug``: compares what the workers of a run recorded, on all its nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from elasticd.cli.command_error import CommandError
from elasticd.cli.say import say
from elasticd.data.debugrecords import FOLDER, RankRecords
from elasticd.data.disagreement import disagreements
from elasticd.procs import debugfiles
from elasticd.telemetry import disagreementtext, runs
from elasticd.telemetry.describe import listing

DISAGREE = 1


@click.command()
@click.argument("run", nargs=-1, required=True, metavar="RUN...")
def debug(run: tuple[str, ...]) -> int:
    """Say where the ranks of RUN first disagree.

    RUN was started with `elasticd run --debug`. Give a job's name, or the folder of the run's logs; for a job
    on several nodes, the folders of all nodes. Exit codes: 0, no disagreement was found; 1, there is one; 2,
    the run left no records.
    """
    folders = [folder for name in run for folder in _folders(name)]
    rounds = sorted({number for folder in folders for number in _rounds(folder)})
    found = False
    for number in rounds:
        records = _records(folders, number)
        hung = any((folder / f"hang-of-round-{number}").is_dir() for folder in folders)
        here = disagreements(records, hung=hung)
        found = found or bool(here)
        say(
            *([""] if number != rounds[0] else []),
            *disagreementtext.summary(number, here, records).splitlines(),
        )
    if not rounds:
        raise CommandError(
            f"there are no records of {listing(run)}: start the job with `elasticd run --debug`."
        )
    return DISAGREE if found else 0


def _folders(name: str) -> list[Path]:
    """Return the newest folder of each node of a job, or the folder of this name."""
    if known := runs.of_job(runs.state_dir(), name):
        return list({one.node: one.folder for one in known}.values())
    folder = Path(name)
    if folder.is_dir():
        return [folder.parent if folder.resolve().name == FOLDER else folder]
    raise CommandError(f"{name} is neither a job that ran on this machine nor a folder.")


def _rounds(folder: Path) -> list[int]:
    names = (re.fullmatch(r"round-(\d{1,9})", path.name) for path in (folder / FOLDER).glob("round-*"))
    return [int(name[1]) for name in names if name is not None]


def _records(folders: Sequence[Path], number: int) -> list[RankRecords]:
    """Return the records of all ranks of a round, in rank order."""
    by_rank = {
        one.rank: one
        for folder in folders
        for one in debugfiles.read(debugfiles.round_folder(folder / FOLDER, number))
    }
    return [by_rank[rank] for rank in sorted(by_rank)]
