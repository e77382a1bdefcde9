"""What commands print. The one place that does, so that nothing from etcd, a checkpoint or a file reaches a
terminal but as text."""

from __future__ import annotations

from typing import Any

import click

from elasticd.telemetry.lines import clean_line


def say(*lines: str, err: bool = False, **style: Any) -> None:
    """Print lines, each of them one line, in click's styles."""
    text = "\n".join(map(clean_line, lines))
    click.echo(click.style(text, **style) if any(style.values()) else text, err=err)
