"""The documentation is complete, and its commands exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from elasticd.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "workers/README.md")),
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}


def test_all_pages_are_built_without_a_warning_and_are_within_reach(tmp_path: Path) -> None:
    """Sphinx also warns of a page that no list of contents has, and of a link that leads nowhere."""
    argv = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-q",
        "-c",
        "docs",
        "-b",
        "html",
        ".",
        str(tmp_path / "html"),
    ]
    built = subprocess.run(
        [*argv, "-d", str(tmp_path / "trees")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "--max-restarts" in (tmp_path / "html/docs/commands.html").read_text()
    man = [*argv[:-3], "man", ".", str(tmp_path / "man"), "-d", str(tmp_path / "trees")]
    subprocess.run(man, cwd=ROOT, check=True)
    assert '.TH "ELASTICD" "1"' in (tmp_path / "man/elasticd.1").read_text().replace("'", '"')
    runbooks = (tmp_path / "html/docs/runbooks.html").read_text()
    rules = (ROOT / "deploy/prometheus/rules.yml").read_text()
    anchors = re.findall(r"runbook_url: \S+/docs/runbooks\.html#(\w+)", rules)
    assert anchors and all(f'id="{anchor}"' in runbooks for anchor in anchors)
    assert "elasticd_world_size" in (tmp_path / "html/docs/metrics.html").read_text()
    assert "round.formed" in (tmp_path / "html/docs/events.html").read_text()


def typed() -> list[tuple[str, str]]:
    """Return the commands of elasticd in all pages, each with its page."""
    return sorted(
        {
            (page, re.sub(r"\s*(\\\n\s*|#.*)", " ", found).strip())
            for page, text in TEXTS.items()
            for found in re.findall(
                r"(?:(?<=`)|(?<=\$ )|(?<=sh\n))elasticd ([a-z-]+\b(?:\\\n|[^`\n])*)", text
            )
        }
    )


@pytest.mark.parametrize(("page", "words"), typed())
def test_each_command_and_its_options_exist(page: str, words: str) -> None:
    context, command = click.Context(cli), cli
    rest = words.split()
    while isinstance(command, click.Group) and rest:
        inner = command.get_command(context, rest[0])
        assert inner is not None, words
        command = inner
        rest.pop(0)
    # What follows a script or a job file is the script's.
    own = re.split(r"\s[\w./]+\.(?:py|toml)\b", " ".join(rest))[0]
    params = command.get_params(context)
    known = {opt for param in params for opt in (*param.opts, *param.secondary_opts)}
    assert {option.partition("=")[0] for option in re.findall(r"(?<!\S)--[a-z][\w=-]*", own)} <= known


@pytest.mark.parametrize("page", TEXTS)
def test_each_module_that_it_tells_to_run_exists(page: str) -> None:
    for module in re.findall(r"python -m (tests[\w.]*)", TEXTS[page]):
        assert importlib.util.find_spec(module) is not None, module
    source = (ROOT / "tests/bench/__main__.py").read_text()
    commands = re.findall(r'@main\.command\((?:"([a-z-]+)")?\)\n(?:@.*\n)*def (\w+)', source)
    known = {name or function for name, function in commands}
    assert known and set(re.findall(r"python -m tests\.bench ([a-z-]+)", TEXTS[page])) <= known
