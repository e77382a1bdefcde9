"""Train the small GPT of gpt.py with its weights spread over the workers (FSDP2), and keep their processes.

    elasticd run --min 2 --max 8 workers/train_gpt_fsdp_in_place.py
    elasticd run --min 2 --max 8 --unit 2 workers/train_gpt_fsdp_in_place.py     # replicas on 2 workers each
    torchrun --standalone --nproc-per-node 4 workers/train_gpt_fsdp_in_place.py
    python workers/train_gpt_fsdp_in_place.py           # one process, no launcher

**When**: as for train_gpt_fsdp.py, if no other worker may start again when one dies. With ``--unit N`` each N
workers hold one model together (hybrid sharding): choose it if N workers have the memory, since replicas
need no further copies.

**How**: elasticd.worker shards the model for each world with the function ``spread``. The model is built
without memory, and ``GPT.fill`` gives each module its initial values. At each commit a worker copies its part
of the weights and of the optimizer's state to the host's memory, and sends it to ``--redundancy`` other
workers, on other nodes if there are any.

**Cost**: that of train_gpt_fsdp.py, the copy, and the time to send it at each commit. The copies need host
memory for 2 x (1 + redundancy) times a worker's part. ``--commit-every K`` copies and sends less often, and
repeats up to K steps after a loss.

**When a worker dies**: the others keep their process, take its part from a replica or a copy, shard the model
anew, and go on from the last commit. The replacement joins at a commit. If more workers are lost at once than
there are copies, all load the newest checkpoint (``elasticd run --checkpoints``).
"""

from __future__ import annotations

import argparse
import functools
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elasticd import worker
from gpt import (
    GPT,
    Parser,
    Shape,
    Text,
    held_out_loss,
    learn,
    learning_rate,
    options_parser,
    parsed,
    positive,
    read_text,
    share,
    windows,
)


def spread(model: GPT, mesh: DeviceMesh, *, bf16: bool) -> None:
    """Shard the model: a worker keeps a part of each block, and gathers the rest only to compute with it."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@worker.run
def train(state: worker.State, text: Text, shape: Shape, options: argparse.Namespace) -> None:
    """Train. Called again after each change of world, with the state of the last committed step."""
    say(f"{worker.world_size()} workers, {state.step} steps done")
    total, batch = (len(text.train) - 1) // shape.context, options.global_batch
    since, step_since = time.monotonic(), state.step
    for step in state.steps(options.steps):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.lr)
        mine = share(options.seed, step * batch, batch, total, worker.rank(), worker.world_size())
        inputs, targets = windows(text.train, mine, shape, worker.device())
        logits = state.model(inputs)
        loss = learn(logits, targets, batch * shape.context, state.model, state.optimizer)
        done = step + 1
        if done % options.log_every == 0:
            dist.all_reduce(loss)
            rate = (done - step_since) / (time.monotonic() - since)
            say(f"step {done:>5}  loss {float(loss):.3f}  {rate:.1f} steps/s")
        if done % options.commit_every == 0 or done == options.steps:
            state.commit()
    loss_after = held_out_loss(state.model, text.held_out, shape, worker.device())
    say(f"held-out loss: {loss_after:.4f} nats/byte")


def say(line: str) -> None:
    if worker.rank() == 0:
        print(line, flush=True)


def parse_options(parser: Parser) -> tuple[argparse.Namespace, Shape]:
    add = parser.add_argument
    redundancy = "how many other workers keep a copy of each part; replicas count"
    add("--redundancy", type=int, choices=range(9), default=1, metavar="N", help=redundancy)
    add("--commit-every", type=positive, default=1, metavar="STEPS")
    bf16 = "compute in bfloat16 (default: on GPUs only)"
    add("--bf16", action=argparse.BooleanOptionalAction, help=bf16)
    add("--recompute", action="store_true", help="keep less for the backward pass")
    return parsed(parser)


def main() -> None:
    parser = options_parser(__doc__)
    options, shape = parse_options(parser)
    with parser.checks():
        text = read_text(options.data)
    torch.manual_seed(options.seed)
    with torch.device("meta"):
        model = GPT(shape, recompute=options.recompute)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    bf16 = worker.device().type == "cuda" if options.bf16 is None else options.bf16
    shard = functools.partial(spread, bf16=bf16)
    state = worker.State(
        model=model, optimizer=optimizer, shard=shard, init=model.fill, redundancy=options.redundancy
    )
    train(state, text, shape, options)


if __name__ == "__main__":
    main()
