"""Prints for all commands. Only this module prints, so that text from etcd, a checkpoint or a file is always
cleaned."""

from __future__ import annotations

from typing import Any

import click

from elasticd.telemetry.lines import clean_line


def say(*lines: str, err: bool = False, **style: Any) -> None:
    """Print the lines, cleaned so that each stays one line, in click's styles."""
    text = "\n".join(map(clean_line, lines))
    click.echo(click.style(text, **style) if any(style.values()) else text, err=err)
