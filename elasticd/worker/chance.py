"""Random numbers: where each source of them stands, so that a step done again draws the same."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

Sources = dict[str, Any]  # by the name of the source, in values that torch.load(weights_only=True) loads


def note() -> Sources:
    """Where torch, CUDA, numpy and the standard library stand."""
    sources: Sources = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        sources["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        if kind == "MT19937":
            sources["numpy"] = (torch.from_numpy(keys), *rest)
    return sources


def resume(sources: Sources) -> None:
    """Draw from there again."""
    for name, stand in sources.items():
        match name:
            case "torch":
                torch.set_rng_state(stand)
            case "cuda":
                if torch.cuda.is_available():
                    torch.cuda.set_rng_state(stand)
            case "random":
                random.setstate(stand)
            case "numpy" if "numpy" in sys.modules:
                keys, *rest = stand
                sys.modules["numpy"].random.set_state(("MT19937", keys.numpy(), *rest))


def digests(sources: Sources) -> dict[str, int]:
    """What tells whether two workers draw alike, by source: 63 bits each."""
    return {name: _digest(stand) for name, stand in sources.items()}


def _digest(stand: Any) -> int:
    parts = stand if isinstance(stand, tuple) else (stand,)
    summary = hashlib.blake2b(digest_size=8)
    for part in parts:
        summary.update(part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return int.from_bytes(summary.digest(), "little") >> 1
