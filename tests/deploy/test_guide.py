"""The guide: the files that it names exist, and its commands are valid."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from elasticd.cli.main import cli

DEPLOY = Path(__file__).parents[2] / "deploy"
TEXT = (DEPLOY / "README.md").read_text()


def test_every_file_that_the_guide_names_exists() -> None:
    named = set(re.findall(r"\]\(([\w./-]+)\)", TEXT))
    assert named
    assert not [n for n in named if not (DEPLOY / n).exists()]


def test_every_file_beside_it_is_named() -> None:
    for path in DEPLOY.iterdir():
        if path.name not in {"README.md", "Dockerfile.dockerignore", "requirements.py"}:
            assert f"({path.name}" in TEXT, path.name


def commands() -> list[tuple[str, list[str]]]:
    found = re.findall(
        r"\belasticd (run|status|scale|drain|stop|ls|doctor)\b([^`#\n]*(?:\\\n[^`#\n]*)*)", TEXT
    )
    return [(name, re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)) for name, rest in found]


@pytest.mark.parametrize(("name", "flags"), commands())
def test_every_option_it_tells_is_one_of_its_command(name: str, flags: list[str]) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    known = {opt for param in command.params for opt in param.opts}
    assert {f for f in flags if f not in {"--your", "--flags"}} <= known


def test_the_codes_are_those_of_the_documentation() -> None:
    documented = (DEPLOY.parent / "docs/exit-codes.md").read_text()
    codes = re.findall(r"^\| ([\d, ]+) \|", documented, re.MULTILINE)
    assert codes and all(re.search(rf"^\| {code} \|", TEXT, re.MULTILINE) for code in codes)
