"""Stands in for torch in tests that need the hooks of torch's optimizers, but not torch's slow import."""

from . import distributed as distributed
