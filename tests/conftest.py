"""Hypothesis times no test: on a busy machine, an example that waits for a processor is not a slow one."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")
