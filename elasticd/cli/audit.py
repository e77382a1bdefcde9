"""``elasticd audit``: proves from the workers' notes that each sample was used once, or names the samples
that were not; compares two runs."""

from __future__ import annotations

from pathlib import Path

import click

from elasticd.cli.complaint import Complaint
from elasticd.cli.say import say
from elasticd.data.audit import AuditVerdict, compare, judge
from elasticd.telemetry import auditfiles, describe, runs
from elasticd.telemetry import describeaudit as told

NOT_PROVED = 1
_SHOWN = 20


@click.command()
@click.argument("run", nargs=-1, required=True, metavar="RUN...")
@click.option("--against", multiple=True, metavar="RUN", help="Compare with this run, bit by bit.")
def audit(run: tuple[str, ...], against: tuple[str, ...]) -> int:
    """Prove that RUN, made with `elasticd run --audit`, used each sample of an epoch once.

    RUN is a job's name, or the folder of a run's logs; of a job on several nodes, all their folders. It may
    have crashed, or be running. Exit code 0: proved; 1: not proved, and the reason is named; 2: there is
    nothing to prove it by.
    """
    verdict = _judged(run)
    for line in told.summary(verdict):
        say(line)
    for found in verdict.findings[:_SHOWN]:
        say(told.finding(found), fg="red")
    if len(verdict.findings) > _SHOWN:
        say(f"and {len(verdict.findings) - _SHOWN} more like that")
    proved = not verdict.findings and bool(verdict.steps) and bool(verdict.epochs)
    if against:
        compared = compare(verdict, _judged(against))
        if not compared.losses and not compared.weights:
            raise Complaint("the two runs have not a single step in common, so nothing can be compared")
        alike = compared.difference is None
        say(told.comparison(compared), fg=None if alike else "red")
        return 0 if alike and not verdict.findings else NOT_PROVED
    say(told.proved(verdict.kind) if proved else "not proved")
    return 0 if proved else NOT_PROVED


def _judged(names: tuple[str, ...]) -> AuditVerdict:
    folders = [folder for name in names for folder in _folders(name)]
    try:
        notes = auditfiles.read(folders)
        if not notes:
            raise Complaint(
                f"nothing was noted for an audit of {describe.listing(names)}: give `elasticd run` --audit, "
                "and the script a worker.State"
            )
        return judge(notes)
    except OSError as error:
        raise Complaint(f"{error.filename} cannot be read: {error.strerror}") from error


def _folders(name: str) -> list[Path]:
    if known := runs.of_job(runs.state_dir(), name):
        return [run.folder for run in known]
    if Path(name).is_dir():
        return [Path(name)]
    raise Complaint(f"{name} is neither a job that ran on this machine nor a folder")
