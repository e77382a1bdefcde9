"""Detect changes of parameters by their version, their address, and a few of their elements. Only the
elements show a change through ``.data``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from elasticd.checkpoint.client.tensors import is_plain

FEW = 8  # elements of each tensor
FEWEST = 2  # in a check at each commit, as each element costs a cache miss


class Few:
    """A few elements of each tensor, spread over the whole tensor, read in one pass."""

    def __init__(self, tensors: Sequence[torch.Tensor], few: int = FEW) -> None:
        self._kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        self._views: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            self._views.append(_few_of(tensor.detach(), few) if is_plain(tensor) else torch.empty(0))
            if len(self._views[-1]):
                self._kinds.setdefault((tensor.dtype, tensor.device), []).append(number)

    def read(self) -> list[torch.Tensor]:
        """Return copies of the elements, by type and device."""
        return [torch.cat([self._views[n] for n in numbers]) for numbers in self._kinds.values()]

    def differing(self, these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> dict[int, float]:
        """Return the numbers of the tensors that differ between two reads, each with the difference in units
        in the last place of the largest element."""
        found: dict[int, float] = {}
        for numbers, one, other in zip(self._kinds.values(), these, those, strict=True):
            if torch.equal(_bits(one), _bits(other)):
                continue
            ends = [0, *accumulate(len(self._views[n]) for n in numbers)]
            for number, start, end in zip(numbers, ends, ends[1:], strict=False):
                a, b = one[start:end], other[start:end]
                if not torch.equal(_bits(a), _bits(b)):
                    found[number] = _apart(a, b)
        return dict(sorted(found.items()))


class Sampled:
    """Parameters of which a few elements are read repeatedly."""

    def __init__(self, parameters: Sequence[nn.Parameter], few: int = FEW) -> None:
        self.parameters, self._each = parameters, few
        self.places: list[int] = []
        self._few = Few(())

    @property
    def few(self) -> Few:
        """The elements at the parameters' present addresses."""
        places = [p.data_ptr() for p in self.parameters]
        if places != self.places:
            self.places, self._few = places, Few(self.parameters, self._each)
        return self._few


class Trace:
    """Detects changes of these parameters since ``note``."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if is_plain(p)]
        self._sampled = Sampled(self.parameters, FEWEST)
        self._few = self._sampled.few
        self._versions: list[int] = []
        self._noted: list[torch.Tensor] = []

    def note(self) -> None:
        """Note the present values."""
        self._versions = [p._version for p in self.parameters]
        self._few = self._sampled.few
        self._noted = self._few.read()

    def changed(self, *, contents: bool) -> set[int]:
        """Return the parameters that changed since ``note``. ``contents``: compare elements as well."""
        if not self._versions:
            return set()
        then = zip(self._versions, self._sampled.places, strict=True)
        now = ((p._version, p.data_ptr()) for p in self.parameters)
        found = {number for number, (a, b) in enumerate(zip(then, now, strict=True)) if a != b}
        if contents:  # at their old addresses: parameters at new ones are found already
            found |= self._few.differing(self._few.read(), self._noted).keys()
        return found


def _few_of(tensor: torch.Tensor, few: int) -> torch.Tensor:
    """Return a few elements as a view."""
    count = tensor.numel()
    if not count:
        return tensor.reshape(0)
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span != count:  # its elements are not contiguous
        while tensor.dim() > 1:
            tensor = tensor.select(0, -1)
        return tensor.reshape(-1)[-few:]
    few = min(few, count)
    return tensor.as_strided((few,), (count // few,), tensor.storage_offset() + (count - 1) % (count // few))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.is_floating_point():
        return float("inf")
    a, b = one.double(), other.double()
    largest = torch.maximum(a.abs().max(), b.abs().max()).item()
    apart = (a - b).abs().max().item()
    units = apart / (largest * torch.finfo(one.dtype).eps) if largest else 0.0
    return units if units == units else float("inf")  # NaN
