"""Prometheus's own checker of metrics, where it is installed."""

from __future__ import annotations

import shutil
import subprocess

PROMTOOL = shutil.which("promtool")


def lint(body: bytes) -> str:
    """Return what promtool says about metrics in Prometheus's text format; empty if it has no complaint."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=body, capture_output=True, timeout=30)
    return (done.stdout + done.stderr).decode()
