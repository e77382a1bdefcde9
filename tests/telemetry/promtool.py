"""Prometheus's own judge of what it scrapes, where it is installed."""

from __future__ import annotations

import shutil
import subprocess

PROMTOOL = shutil.which("promtool")


def lint(body: bytes) -> str:
    """What promtool says of metrics in Prometheus's text format; empty for nothing."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=body, capture_output=True, timeout=30)
    return (done.stdout + done.stderr).decode()
