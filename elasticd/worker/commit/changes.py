"""Detect changes of parameters by their version, their address, and a few of their elements. Only the
elements show a change through ``.data``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from elasticd.checkpoint.client.tensors import is_plain

SAMPLE_SIZE = 8  # the number of elements of each tensor
SAMPLE_SIZE_AT_COMMIT = 2  # smaller, as each element costs a cache miss


class ElementSample:
    """A few elements of each tensor, spread over the whole tensor, read in one pass."""

    def __init__(self, tensors: Sequence[torch.Tensor], size: int = SAMPLE_SIZE) -> None:
        self._by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        self._views: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            self._views.append(
                _sample_of(tensor.detach(), size) if is_plain(tensor) else torch.empty(0, device="cpu")
            )
            if len(self._views[-1]):
                self._by_type.setdefault((tensor.dtype, tensor.device), []).append(number)

    def read(self) -> list[torch.Tensor]:
        """Return copies of the elements, by type and device."""
        return [torch.cat([self._views[n] for n in numbers]) for numbers in self._by_type.values()]

    def differing(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> dict[int, float]:
        """Return the numbers of the tensors that differ between two reads, each with the difference in units
        in the last place of the largest element."""
        found: dict[int, float] = {}
        for numbers, one, other in zip(self._by_type.values(), before, after, strict=True):
            if torch.equal(_bits(one), _bits(other)):
                continue
            ends = [0, *accumulate(len(self._views[n]) for n in numbers)]
            for number, start, end in zip(numbers, ends, ends[1:], strict=False):
                a, b = one[start:end], other[start:end]
                if not torch.equal(_bits(a), _bits(b)):
                    found[number] = _difference_in_ulps(a, b)
        return dict(sorted(found.items()))


class SampledParameters:
    """Parameters whose elements are sampled repeatedly. Parameters may move in memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], size: int = SAMPLE_SIZE) -> None:
        self.parameters, self._size = parameters, size
        self.places: list[int] = []
        self._sample = ElementSample(())

    @property
    def sample(self) -> ElementSample:
        """The sample of the elements. If a parameter has moved in memory, the sample is made anew."""
        places = [p.data_ptr() for p in self.parameters]
        if places != self.places:
            self.places, self._sample = places, ElementSample(self.parameters, self._size)
        return self._sample


class ChangeDetector:
    """Detects which parameters changed since the last ``note``."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if is_plain(p)]
        self._sampled = SampledParameters(self.parameters, SAMPLE_SIZE_AT_COMMIT)
        self._sample = self._sampled.sample
        self._versions: list[int] = []
        self._noted: list[torch.Tensor] = []

    def note(self) -> None:
        """Note the present values."""
        self._versions = [p._version for p in self.parameters]
        self._sample = self._sampled.sample
        self._noted = self._sample.read()

    def changed(self, *, contents: bool) -> set[int]:
        """Return the numbers of the changed parameters. ``contents``: compare elements as well."""
        if not self._versions:
            return set()
        then = zip(self._versions, self._sampled.places, strict=True)
        now = ((p._version, p.data_ptr()) for p in self.parameters)
        found = {number for number, (a, b) in enumerate(zip(then, now, strict=True)) if a != b}
        if contents:  # parameters that have moved are found already
            found |= self._sample.differing(self._sample.read(), self._noted).keys()
        return found


def _sample_of(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return a few elements as a view."""
    count = tensor.numel()
    if not count:
        return tensor.reshape(0)
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span != count:  # the elements are not contiguous in memory
        while tensor.dim() > 1:
            tensor = tensor.select(0, -1)
        return tensor.reshape(-1)[-size:]
    size = min(size, count)
    step = count // size
    return tensor.as_strided((size,), (step,), tensor.storage_offset() + (count - 1) % step)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _difference_in_ulps(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.is_floating_point():
        return float("inf")
    a, b = one.double(), other.double()
    largest = torch.maximum(a.abs().max(), b.abs().max()).item()
    difference = (a - b).abs().max().item()
    units = difference / (largest * torch.finfo(one.dtype).eps) if largest else 0.0
    return units if units == units else float("inf")  # NaN
