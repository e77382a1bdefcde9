"""Files of ``torch.save``, made without the tensor."""

from __future__ import annotations

import io

import pytest
import torch

from elasticd.checkpoint.format.frames import ALIGNMENT, padded_blob, room_for, tensor_frame

TYPES = ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (17,), (5, 7), (0, 4), (2, 3, 4, 1)], ids=str)
def test_torch_loads_what_is_framed_as_what_it_was(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    head, tail = tensor_frame(dtype, shape, len(raw))
    assert len(head) % ALIGNMENT == 0
    loaded = torch.load(io.BytesIO(head + raw + tail), weights_only=True)
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
    assert loaded.reshape(-1).view(torch.uint8).numpy().tobytes() == raw if raw else not loaded.numel()


@pytest.mark.parametrize(
    "value", [1, "x", None, {"a": [1, 2.5]}, torch.arange(4), [torch.ones(3)] * 2], ids=repr
)
def test_a_padded_blob_of_any_length_loads_like_the_blob(value):
    out = io.BytesIO()
    torch.save(value, out)
    for room in (room_for(out.getvalue()), room_for(out.getvalue()) + 12_345):
        padded = padded_blob(out.getvalue(), room)
        assert len(padded) == room
        assert repr(torch.load(io.BytesIO(padded), weights_only=True)) == repr(value)


def test_what_does_not_fit_is_refused():
    out = io.BytesIO()
    torch.save("x" * 500, out)
    with pytest.raises(ValueError, match="do not fit"):
        padded_blob(out.getvalue(), 600)
