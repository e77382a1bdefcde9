"""Random numbers: save and restore their sources, so that a repeated step draws the same numbers."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from elasticd.worker.values.plaindata import number_of

_MT19937_BYTES = 4 * 624 + 4  # the generator's 624 keys and the position in them


class _Numpy:
    """numpy's random state.

    ``get_state()`` takes as long as the rest of a commit, and most scripts never draw from numpy. So the
    generator's memory is compared first, and ``get_state()`` is called only after a change. One part of the
    state is not in that memory: the normal number that numpy draws in advance.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._noted: tuple[Any, ...] = ()

    def note(self) -> tuple[Any, ...]:
        numpy = sys.modules["numpy"]
        generator = numpy.random.get_bit_generator()
        memory = b""
        if type(generator) is numpy.random.MT19937:
            memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if not memory or memory != self._memory or self._noted[2]:
            kind, keys, *rest = numpy.random.get_state()
            self._noted = (torch.from_numpy(keys), *rest) if kind == "MT19937" else ()
            self._memory = memory
        return self._noted


_numpy = _Numpy()
Sources = dict[str, Any]  # the state of each source, as data that torch.load(weights_only=True) accepts


def note() -> Sources:
    """Return the states of torch, CUDA, numpy and the standard library."""
    sources: Sources = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        sources["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        sources["numpy"] = _numpy.note()
    return sources


def resume(sources: Sources) -> None:
    """Restore the states that ``note`` returned."""
    for name, state in sources.items():
        match name:
            case "torch":
                torch.set_rng_state(state)
            case "cuda":
                if torch.cuda.is_available():
                    torch.cuda.set_rng_state(state)
            case "random":
                random.setstate(state)
            case "numpy" if "numpy" in sys.modules and state:
                keys, *rest = state
                sys.modules["numpy"].random.set_state(("MT19937", keys.numpy(), *rest))


@contextlib.contextmanager
def drawing_from(sources: Sources | None = None) -> Iterator[None]:
    """A ``with`` block after which random numbers continue as if nothing was drawn in the block. ``sources``:
    the states to draw from in the block; None: the present ones."""
    outer = note()
    try:
        if sources is not None:
            resume(sources)
        yield
    finally:
        resume(outer)


def digests(sources: Sources) -> dict[str, int]:
    """Return 63 bits for each source: equal in workers that draw the same numbers."""
    return {name: _digest(state) for name, state in sources.items()}


def _digest(state: Any) -> int:
    parts = state if isinstance(state, tuple) else (state,)
    summary = hashlib.blake2b(digest_size=8)
    for part in parts:
        summary.update(part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return number_of(summary)


class GeneratorState:
    """A ``torch.Generator`` of the script, with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["state"].cpu())


class OwnRandomness:
    """A ``with`` block with its own random numbers, which continue from one block to the next. The random
    numbers outside the block are unaffected. CUDA's random numbers are not covered."""

    def __init__(self, seed: int) -> None:
        self._inner = _seeded(seed)
        self._outer: Sources = {}

    def __enter__(self) -> None:
        self._outer = _of_the_cpu()
        resume(self._inner)

    def __exit__(self, *_: object) -> None:
        self._inner = _of_the_cpu()
        resume(self._outer)


def _of_the_cpu() -> Sources:
    return {"torch": torch.get_rng_state(), "random": random.getstate(), "numpy": _numpy.note()}


def _seeded(seed: int) -> Sources:
    import numpy as np

    _, keys, *rest = np.random.RandomState(np.random.MT19937(seed)).get_state()
    return {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "random": random.Random(seed).getstate(),
        "numpy": (torch.from_numpy(keys), *rest),
    }


def seed_all(*place: int, generators: Sequence[torch.Generator] = ()) -> None:
    """Seed all sources of random numbers, and the script's own ``generators``, from the numbers ``place``."""
    text = " ".join(map(str, place)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed((number & 0xFFFFFFFF, number >> 32))
    for position, generator in enumerate(generators, start=1):
        generator.manual_seed((number + position) & 0xFFFFFFFFFFFFFFFF)
