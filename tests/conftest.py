"""Settings for all tests. Hypothesis sets no time limit, since an example may wait for a processor on a busy
machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")
