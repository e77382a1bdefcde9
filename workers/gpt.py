"""A small GPT, its training text and its training step, for the scripts in this folder.

The text is bytes: by default the Python standard library's own sources, or any file or folder given
with --data.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT. ``context``: how many bytes the model sees at once."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int = 256


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: turn each pair of features by an angle that grows with position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """A layer. ``recompute``: keep only its input for the backward pass, and compute the rest again there."""

    def __init__(self, shape: Shape, recompute: bool) -> None:
        super().__init__()
        self.heads, self.recompute = shape.heads, recompute
        self.norm_attention = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.mix = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_mlp = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not self.recompute:
            return self._layer(x, cos, sin)
        again: Tensor = checkpoint(self._layer, x, cos, sin, use_reentrant=False)
        return again

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + thought


class GPT(nn.Module):
    """Decoder only; the embedding is also the output layer. Returns logits, one row per byte."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, *, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, recompute) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

        self.shape = shape
        table = torch.empty(shape.context, shape.width // shape.heads // 2)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", table.clone(), persistent=False)
        for name, module in self.named_modules():
            self.fill(name, module)

    @torch.no_grad()
    def fill(self, name: str, module: nn.Module) -> None:
        """Give a module's own parameters and buffers their initial values. ``name``: of the module."""
        layers, (context, features) = self.shape.layers, self.cos.shape
        is_residual = name.endswith(("mix", "down"))
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_residual else 0.02)
            else:
                nn.init.ones_(parameter)
        if module is self:
            angles = torch.outer(torch.arange(context), 10000.0 ** (-torch.arange(features) / features))
            self.cos.copy_(angles.cos())
            self.sin.copy_(angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed.weight)


@torch.no_grad()
def continue_text(
    model: GPT, prompt: bytes, shape: Shape, count: int, device: torch.device, seed: int
) -> str:
    """Return the prompt and ``count`` bytes that the model writes after it at temperature 0.8, as text."""
    random = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        logits = model(tokens[:, -shape.context :])[0, -1]
        following = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=random)
        tokens = torch.cat((tokens, following[None]), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


# ---------------------------------------------------------------- the data


@dataclass(frozen=True)
class Text:
    train: Tensor  # bytes
    held_out: Tensor
    checksum: int


def standard_library() -> list[str]:
    """Return the sources of this Python, without its tests and installed packages."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    sources: list[str] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in skipped]  # the walk enters only these
        sources += [f"{folder}{os.sep}{name}" for name in names if name.endswith(".py")]
    return sorted(sources, key=lambda path: path.split(os.sep))


def read_text(data: Path | None) -> Text:
    """Read the files, and hold out every twentieth, or the last twentieth of the text of fewer than twenty.

    Raises ValueError, with one sentence, if there is too little text to train on.
    """
    files: Sequence[str | Path]
    if data is None:
        files = standard_library()
    elif data.is_dir():
        files = [p for p in sorted(data.rglob("*")) if p.is_file() and not p.name.startswith(".")]
    else:
        files = [data]
    try:
        contents = [c for c in map(content_of, files) if b"\0" not in c]  # a NUL: not text
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error

    if len(contents) >= 20:
        train = b"".join(c for i, c in enumerate(contents) if i % 20 != 19)
        held_out = b"".join(contents[19::20])
    else:
        everything = b"".join(contents)
        cut = len(everything) - len(everything) // 20
        train, held_out = everything[:cut], everything[cut:]
    if len(held_out) < 4096:
        raise ValueError(f"{data or 'the standard library'} has too little text: at least 80 KiB is needed")
    return Text(as_tensor(train), as_tensor(held_out), zlib.crc32(held_out, zlib.crc32(train)))


def content_of(path: str | Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def windows(text: Tensor, numbers: list[int], shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets. Window n starts at n times the context, and its targets one byte later."""
    length = shape.context
    rows = [text[n * length : n * length + length + 1] for n in numbers]
    batch = torch.stack(rows) if rows else torch.empty((0, length + 1), dtype=torch.uint8)
    batch = batch.to(device).long()
    return batch[:, :-1], batch[:, 1:]


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, total: int) -> Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def share(seed: int, position: int, batch: int, total: int, rank: int, world: int) -> list[int]:
    """Return this worker's windows of the global batch at ``position`` (in windows since training began).

    The workers' shares differ by at most one window, and together are the batch in a world of any size.
    """
    places = range(position + rank, position + batch, world)
    return [int(epoch_order(seed, place // total, total)[place % total]) for place in places]


# ---------------------------------------------------------------- learning


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate: it rises linearly in the first twentieth of the steps, then falls along a cosine to a
    tenth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()
def held_out_loss(model: GPT, text: Tensor, shape: Shape, device: torch.device) -> float:
    """Return the mean nats per byte over up to 256 windows of the held-out text, dealt to all workers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = (len(text) - 1) // shape.context
    chosen = sorted({i * total // 256 for i in range(256)})
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, len(chosen), 16 * world):  # as often in each worker, as FSDP needs
        mine = chosen[start + rank : start + 16 * world : world]
        inputs, targets = windows(text, mine, shape, device)
        sums[0] += F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten(), reduction="sum")
        sums[1] += targets.numel()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def learn(
    logits: Tensor, targets: Tensor, tokens: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Tensor:
    """Take an optimizer step on this worker's share of a global batch of ``tokens`` tokens. Return this
    worker's part of the batch's mean loss."""
    summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    # Shares may differ in size, and the gradient is averaged over workers: divide by the whole batch here.
    loss = summed / tokens
    optimizer.zero_grad()
    torch.autograd.backward(loss * dist.get_world_size())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    detached: Tensor = loss.detach()
    return detached


# ---------------------------------------------------------------- options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def rate(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no learning rate")
    return number


def seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 to 2^63 - 1")
    return number


def writable_folder(text: str) -> Path:
    """Return a folder to write to. It is made now, so that no training begins that cannot be saved."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"the folder {path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"the folder {path} cannot be written to: Permission denied")
    return path


class Parser(argparse.ArgumentParser):
    """Answers bad input with one sentence and exit status 2. Each worker says the sentence: the launcher
    stops the others once one of them has ended."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description.partition("\n")[0], allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    @contextlib.contextmanager
    def checks(self) -> Iterator[None]:
        """Answer a ValueError as bad input."""
        try:
            yield
        except ValueError as error:
            self.error(str(error))


def options_parser(description: str) -> Parser:
    """Return a parser of the options that all scripts on text have."""
    parser = Parser(description)
    add = parser.add_argument
    add("--data", type=Path, help="a text file, or a folder of them (default: Python's standard library)")
    add("--steps", type=positive, default=400)
    add("--global-batch", type=positive, default=24, help="windows a step, whatever the number of workers")
    add("--context", type=positive, default=128, help="bytes in a window")
    add("--layers", type=positive, default=4)
    add("--heads", type=positive, default=4)
    add("--width", type=positive, default=128)
    add("--lr", type=rate, default=3e-3, help="the peak learning rate")
    add("--seed", type=seed, default=0)
    add("--log-every", type=positive, default=20, metavar="STEPS")
    return parser


def parsed(parser: Parser) -> tuple[argparse.Namespace, Shape]:
    """Return the options and the model's shape. Exits with status 2 if there is no such model."""
    options = parser.parse_args()
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} must be a multiple of twice --heads {options.heads}")
    return options, Shape(options.layers, options.heads, options.width, options.context)
