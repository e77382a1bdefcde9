"""``elasticd demo`` and ``export``: the training programs, manifests and rules that come with elasticd."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Final

import click

from elasticd.cli.command_error import CommandError
from elasticd.cli.option_types import Whole
from elasticd.cli.say import say

_WHAT: Final = {
    "workers": "workers",
    "k8s": "k8s",
    "grafana": "deploy/grafana",
    "prometheus": "deploy/prometheus",
    "systemd": "deploy/systemd",
    "slurm": "deploy/slurm",
}
"""The folders of the repository that can be exported, by what users call them."""
_NO_DOCS: Final = "https://elasticd.example.org"  # stands in the rules for the address of the documentation
_NOT_OURS: Final = shutil.ignore_patterns("__pycache__", "boards.py", "generate.py")


def example(path: str) -> Path:
    """Return a file or folder of the repository: an installed wheel has a copy, a checkout the original.
    Raises CommandError if neither is there."""
    package = Path(__file__).parents[1]
    for place in (package / "examples" / path, package.parent / path):
        if place.exists():
            return place
    raise CommandError(f"this installation of elasticd has no {path}: install elasticd from a wheel.")


@click.command()
@click.option("--max", "most", type=Whole(1), default=8, help="Most workers to train with.  [8]")
@click.argument("args", nargs=-1, metavar="[-- ARGS]...")
def demo(most: int, args: tuple[str, ...]) -> int:
    """Train a small GPT on the sources of Python's standard library.

    Takes about two minutes on two cores. Meanwhile, in another terminal, `elasticd status` shows the pids of
    the workers: kill one with `kill -9 PID`, and watch the training go on. ARGS go to the program.
    """
    from elasticd.cli.run_command import run

    command = ["--min", str(min(2, most)), "--max", str(most), str(example("workers/train_gpt.py")), *args]
    say(
        f"Running: elasticd run {shlex.join(command)}",
        "In another terminal: `elasticd status` shows the workers, and `kill -9 PID` kills one.",
        err=True,
    )
    code: int = run.main(command, "elasticd run", standalone_mode=False)
    return code


@click.command()
@click.argument("what", type=click.Choice(list(_WHAT)))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--docs",
    metavar="URL",
    help="With prometheus: where you serve elasticd's documentation, for the runbook_url of alerts.",
)
def export(what: str, folder: Path, docs: str | None) -> None:
    """Write files that come with elasticd to a new FOLDER.

    workers: a training program for each technique. k8s: manifests for kustomize, and a Helm chart.
    grafana: dashboards. prometheus: rules and alerts. systemd, slurm: a unit, and a batch script.
    """
    if docs is not None and what != "prometheus":
        raise CommandError("--docs has a meaning with prometheus only.")
    if docs is not None and not docs.startswith(("http://", "https://")):
        raise CommandError(f"--docs {docs} is no address: give https://HOST/PATH.")
    if folder.exists():
        raise CommandError(f"{folder} exists: give a folder that does not, so that no file is replaced.")
    try:
        shutil.copytree(example(_WHAT[what]), folder, ignore=_NOT_OURS)
        if docs is not None:
            _lead_to(docs.rstrip("/"), folder)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}.") from error
    say(f"wrote {sum(file.is_file() for file in folder.rglob('*'))} files to {folder}")
    if what == "prometheus" and docs is None:
        say(
            f"The alerts' runbook_url begins with {_NO_DOCS}, which leads nowhere: give --docs URL.", err=True
        )


def _lead_to(docs: str, folder: Path) -> None:
    """Put the address of the documentation into the links of the rules."""
    for file in folder.glob("*.y*ml"):
        file.write_text(file.read_text().replace(_NO_DOCS, docs))
