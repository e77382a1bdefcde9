"""Train a small GPT on text with DistributedDataParallel, and survive whatever the machines do.

    elasticd run --min 2 --max 8 workers/train_gpt.py
    torchrun --standalone --nproc-per-node 4 --max-restarts 5 workers/train_gpt.py
    python workers/train_gpt.py                    # one process, no launcher

The text is bytes: by default the Python standard library's own sources, or any file or folder given
with --data. It is a plain torchrun script to start your own from, and shows what such a script needs
so that it can be killed at any moment and started again in a world of another size:

* Snapshots are whole or absent, and hold everything that training goes on from. One worker of each
  node writes them, and a new world goes on from the newest that any of its nodes has, so the nodes
  need no shared disk.
* What is trained on is a function of the seed and the position in the data. The global batch is
  constant and is dealt over the workers there are, so a resize neither skips nor repeats a sample,
  nor changes what a step computes beyond the rounding of a sum.
* SIGTERM means: finish the step together, save, leave.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import os
import pickle
import signal
import sys
import sysconfig
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Shape:
    """``context``: how many bytes the model sees at once."""

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
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.mix = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_mlp = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

        features = shape.width // shape.heads // 2
        speeds = 10000.0 ** (-torch.arange(features) / features)
        angles = torch.outer(torch.arange(shape.context), speeds)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_residual = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if is_residual else 0.02)

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
    """What the model writes after the prompt: ``count`` bytes at temperature 0.8, as text."""
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


def standard_library() -> list[Path]:
    """The sources of the Python that runs this, without its tests and what was installed into it."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return [p for p in sorted(root.rglob("*.py")) if skipped.isdisjoint(p.relative_to(root).parts)]


def read_text(data: Path | None) -> Text:
    """Every twentieth file is held out; of fewer than twenty files, the last twentieth of their text.

    Raises ValueError, in one sentence, where there is no text to train on.
    """
    if data is None:
        files = standard_library()
    elif data.is_dir():
        files = [p for p in sorted(data.rglob("*")) if p.is_file() and not p.name.startswith(".")]
    else:
        files = [data]
    try:
        contents = [c for c in (p.read_bytes() for p in files) if b"\0" not in c]  # a NUL: not text
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


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def windows(text: Tensor, numbers: list[int], shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets; window n starts at n times the context, and its targets one byte later."""
    length = shape.context
    rows = [text[n * length : n * length + length + 1] for n in numbers]
    batch = torch.stack(rows) if rows else torch.empty((0, length + 1), dtype=torch.uint8)
    batch = batch.to(device).long()
    return batch[:, :-1], batch[:, 1:]


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, total: int) -> Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def share(seed: int, position: int, batch: int, total: int, rank: int, world: int) -> list[int]:
    """This worker's windows of the global batch at ``position`` (in windows since training began).

    The workers' shares differ by at most one window and together are the batch, whatever the world.
    """
    places = range(position + rank, position + batch, world)
    return [int(epoch_order(seed, place // total, total)[place % total]) for place in places]


# ---------------------------------------------------------------- snapshots


def save_snapshot(folder: Path, snapshot: dict[str, Any]) -> None:
    """Replace the folder's snapshot, so that at any moment there is a whole one: the old or the new."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"snapshot.{os.environ.get('GROUP_RANK', '0')}.tmp"  # nodes may share the folder
    with unfinished.open("wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / "snapshot.pt")
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)  # the new name, too, must survive a power cut
    os.close(directory)


def load_snapshot(folder: Path | None, local_rank: int, device: torch.device) -> dict[str, Any] | None:
    """The newest snapshot that any node of this world has, sent to all; None where there is none.

    Raises ValueError where the file cannot be read.
    """
    path = folder / "snapshot.pt" if folder is not None and local_rank == 0 else None
    found = path.read_bytes() if path is not None and path.exists() else b""
    step = -1
    if found:
        try:
            step = torch.load(io.BytesIO(found), weights_only=True)["step"]
        except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise ValueError(f"cannot read the snapshot {path}; remove it to start afresh") from error

    steps = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([step, len(found)], dtype=torch.int64, device=device))
    source = max(range(len(steps)), key=lambda rank: (int(steps[rank][0]), -rank))
    newest_step, size = steps[source].tolist()
    if newest_step < 0:
        return None
    is_source = source == dist.get_rank()
    content = as_tensor(found) if is_source else torch.empty(size, dtype=torch.uint8)
    content = content.to(device)
    dist.broadcast(content, source)
    snapshot: dict[str, Any] = torch.load(
        io.BytesIO(content.cpu().numpy().tobytes()), map_location=device, weights_only=True
    )
    return snapshot


def default_folder() -> Path | None:
    """A folder of this run alone, kept over its restarts; None where the launcher names no run."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run == "none":
        return None
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "elasticd" / "train_gpt" / run


# ---------------------------------------------------------------- training


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a line over the first twentieth, then down a cosine to a tenth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()
def held_out_loss(model: GPT, text: Tensor, shape: Shape, device: torch.device) -> float:
    """Mean nats per byte over up to 256 windows, spread over the held-out text; all workers share them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = (len(text) - 1) // shape.context
    chosen = sorted({i * total // 256 for i in range(256)})
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for start in range(0, len(chosen), 16 * world):  # as often on each: sharded models compute together
        mine = chosen[start + rank : start + 16 * world : world]
        inputs, targets = windows(text, mine, shape, device)
        sums[0] += F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        sums[1] += targets.numel()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


class StopRequest:
    """Remembers that this worker was asked to stop, by which signal; the step at hand goes on."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = number


def say(message: str) -> None:
    if dist.get_rank() == 0:
        print(message + "\n", end="", flush=True)  # one write, which no other worker's can cut in two


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another worker is gone, which is no fault of this one."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or "gloo" in str(error)


class Trainer:
    """What is trained and how far it is: ``step`` steps, ``position`` windows of the data."""

    def __init__(
        self, options: argparse.Namespace, text: Text, device: torch.device, local_rank: int
    ) -> None:
        self.options, self.text, self.device = options, text, device
        self.rank, self.world, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank
        self.folder: Path | None = options.snapshot_dir or default_folder()
        self.shape = Shape(options.layers, options.heads, options.width, options.context)
        self.windows_total = (len(text.train) - 1) // self.shape.context
        torch.manual_seed(options.seed)
        self.model = GPT(self.shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.step, self.position, self.loss_before = 0, 0, math.nan
        # What a run is: it does not go on from a snapshot of another one.
        self.identity = {"shape": asdict(self.shape), "seed": options.seed, "text": text.checksum}
        self.restore()
        self.replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def restore(self) -> None:
        """Go on where the newest snapshot was made, or begin.

        Raises ValueError where the snapshot is of another run.
        """
        snapshot = load_snapshot(self.folder, self.local_rank, self.device)
        if snapshot is None:
            parameters = sum(p.numel() for p in self.model.parameters())
            say(f"{parameters:,} parameters, {len(self.text.train):,} bytes of text, {self.world} workers")
            say(f"snapshots: {self.folder or 'none, as no run is named: give --snapshot-dir'}")
            self.loss_before = held_out_loss(self.model, self.text.held_out, self.shape, self.device)
            say(f"held-out loss before training: {self.loss_before:.3f} nats/byte")
            return
        for key, value in self.identity.items():
            if snapshot[key] != value:
                raise ValueError(
                    f"the snapshot in {self.folder} has another {key} ({snapshot[key]}, not {value}): "
                    "give the same options again, or another --snapshot-dir"
                )
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.step, self.position = snapshot["step"], snapshot["position"]
        self.loss_before = snapshot["loss_before"]
        say(f"resumed after step {self.step} of {self.options.steps}, {self.world} workers")

    def save(self) -> None:
        if self.folder is None or self.local_rank != 0:
            return
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        place = {"step": self.step, "position": self.position, "loss_before": self.loss_before}
        save_snapshot(self.folder, self.identity | parts | place)

    def take_step(self) -> Tensor:
        """Learn from one global batch; returns this worker's part of its mean loss."""
        options = self.options
        # Whatever a step draws (dropout, if you add it) is a function of seed, step and rank, so
        # there is no random state to bring back after a restart.
        torch.manual_seed(zlib.crc32(f"{options.seed} {self.step} {self.rank}".encode()))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, options.steps, options.lr)

        batch = options.global_batch
        mine = share(options.seed, self.position, batch, self.windows_total, self.rank, self.world)
        inputs, targets = windows(self.text.train, mine, self.shape, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.replica(inputs)
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        # Shares may differ in size, and DDP averages over workers: divide by the whole batch here.
        loss = summed / (batch * self.shape.context)
        self.optimizer.zero_grad()
        (loss * self.world).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step, self.position = self.step + 1, self.position + batch
        detached: Tensor = loss.detach()
        return detached

    def train(self) -> int:
        """Take all steps that are left, unless asked to stop. Returns the signal that asked, else 0."""
        options, stop = self.options, StopRequest()
        since, step_since = time.monotonic(), self.step
        while self.step < options.steps:
            loss = self.take_step()
            # All workers must leave after the same step, or some would wait for those that left.
            told = torch.tensor([float(loss), float(stop.received > 0)], device=self.device)
            dist.all_reduce(told)
            stopping, is_last = bool(told[1]), self.step == options.steps
            if stopping or is_last or self.step % options.snapshot_every == 0:
                self.save()
            if is_last or self.step % options.log_every == 0:
                now = time.monotonic()
                tokens = (self.step - step_since) * options.global_batch * self.shape.context
                say(f"step {self.step:>5}  loss {told[0]:.3f}  {tokens / (now - since):,.0f} tokens/s")
                since, step_since = now, self.step
            if stopping:
                where = f"saved in {self.folder}" if self.folder else "nothing saved"
                say(f"asked to stop: left after step {self.step}, {where}")
                return stop.received or signal.SIGTERM
        return 0

    def run(self) -> int:
        """Train, and show what came of it. Returns the exit status."""
        try:
            asked_to_stop = self.train()
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            # No collective runs between the change of the weights and that of the step, so what is
            # here is whole. On a GPU the broken collective may still be running, and block a copy.
            if self.device.type == "cpu":
                self.save()
            sys.stderr.write(f"rank {self.rank}: lost a peer after step {self.step}\n")
            return 1
        if asked_to_stop:
            return 128 + asked_to_stop  # as a shell says it; 0 would say that training is done

        loss_after = held_out_loss(self.model, self.text.held_out, self.shape, self.device)
        say(f"held-out loss: {self.loss_before:.3f} -> {loss_after:.3f} nats/byte")
        if self.rank == 0 and self.options.sample:
            prompt = (self.options.prompt or ("\n" if self.options.data else "def ")).encode()
            count, seed = self.options.sample, self.options.seed
            say(f"a sample:\n{continue_text(self.model, prompt, self.shape, count, self.device, seed)}")
        return 0


# ---------------------------------------------------------------- the program


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, help="a text file, or a folder of them (default: Python's standard library)")
    add("--steps", type=positive, default=400)
    add("--global-batch", type=positive, default=24, help="windows a step, whatever the number of workers")
    add("--context", type=positive, default=128, help="bytes in a window")
    add("--layers", type=positive, default=4)
    add("--heads", type=positive, default=4)
    add("--width", type=positive, default=128)
    add("--lr", type=float, default=3e-3, help="the peak learning rate")
    add("--seed", type=int, default=0)
    add("--snapshot-dir", type=Path, help="default: a folder of the run, in $XDG_STATE_HOME/elasticd")
    add("--snapshot-every", type=positive, default=20, metavar="STEPS")
    add("--log-every", type=positive, default=20, metavar="STEPS")
    add("--prompt", help="what the sample begins with")
    add("--sample", type=int, default=300, metavar="BYTES")
    options = parser.parse_args()
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} must be a multiple of twice --heads {options.heads}")
    return options


def join_world() -> tuple[torch.device, int]:
    """This worker's device and local rank; a world of one where no launcher has set one up."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device, local_rank


def require_same_text(text: Text, device: torch.device) -> None:
    checksum = torch.tensor([text.checksum], dtype=torch.int64, device=device)
    dist.broadcast(checksum, 0)
    if int(checksum) != text.checksum:
        raise ValueError("this node's text differs from rank 0's: give all nodes the same --data or Python")


@record
def main() -> int:
    options = parse_options()
    device, local_rank = join_world()
    try:
        text = read_text(options.data)
        require_same_text(text, device)
        status = Trainer(options, text, device, local_rank).run()
    except ValueError as error:  # what was asked for cannot be done; trying again would not help
        if local_rank == 0:
            print(f"train_gpt: {error}", file=sys.stderr)
        return 2
    if status == 0:
        dist.destroy_process_group()  # otherwise it might wait for those that are gone
    return status


if __name__ == "__main__":
    sys.exit(main())
