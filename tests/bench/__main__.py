"""``python -m tests.bench start | recovery | resize | goodput | node-loss | forming | connecting | scale |
etcd-size | overhead | scrape | hang | checkpoint | consistent | techniques | slow-links | frameworks |
redundancy | gpu``: each prints its ratios."""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path

import click


@click.group()
def main() -> None:
    """Run elasticd, torchrun and the floor in one go, and print how they compare."""
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # then everything that was started is stopped
    click.echo(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}")


@main.command()
@click.option("--workers", default="1,4,8", help="Numbers of workers, with commas.")
@click.option("--pairs", default=2, help="Of starts: torchrun and elasticd in turn.")
@click.option("--only", multiple=True, help="Of the scripts, those whose names begin so.")
def start(workers: str, pairs: int, only: tuple[str, ...]) -> None:
    """From the command to the first step, its CPU time, and a kill a second after the first step."""
    from tests.bench.start import start as measure

    table = ""
    for table in measure([int(size) for size in workers.split(",")], pairs, only):
        click.echo(table)
    if not table:
        raise click.ClickException(f"no script has a name that begins with {' or '.join(only)}")


@main.command()
@click.option("--workers", default="4", help="Workers of the world: numbers, with commas.")
@click.option("--kills", default=8, help="Kills of each launcher.")
@click.option("--megabytes", default="350", help="What a worker holds in memory: sizes, with commas.")
@click.option("--sharded", is_flag=True, help="A model that is sharded (FSDP2), beside DCP from disk.")
def recovery(workers: str, kills: int, megabytes: str, sharded: bool) -> None:
    """From ``kill -9`` of a worker to the next step."""
    from tests.bench.recovery import recovery as measure
    from tests.bench.sharded import recovery as measure_sharded

    if sharded:
        for size in workers.split(","):
            click.echo(measure_sharded(int(size), kills))
        return
    worlds, sizes = ([int(n) for n in text.split(",")] for text in (workers, megabytes))
    for table in measure(worlds, kills, sizes):
        click.echo(table)


@main.command()
@click.option("--workers", default=3, help="More than the most copies of a shard, 2.")
@click.option("--turns", default=3)
@click.option("--steps", default=200, help="Of each kind in each turn.")
@click.option("--copies", default="0,1,2", help="Of each shard: numbers, with commas.")
@click.option("--rows", default=64, help="Of a worker's batch: how much a step computes for each parameter.")
def redundancy(workers: int, turns: int, steps: int, copies: str, rows: int) -> None:
    """A step with copies of each shard, beside plain FSDP2."""
    from tests.bench.sharded import redundancy as measure

    for line in measure(workers, turns, steps, [int(n) for n in copies.split(",")], rows):
        click.echo(line)


@main.command()
@click.option("--workers", default=4)
@click.option("--tries", default=5)
def resize(workers: int, tries: int) -> None:
    """The time without a step when a worker joins, and when one leaves."""
    from tests.bench.resize import resize as measure

    click.echo(measure(workers, tries))


@main.command()
@click.option("--workers", default=4)
@click.option("--seconds", default=180.0, help="How long, of each launcher.")
@click.option("--every", default=20.0, help="Seconds between kills.")
@click.option("--torchrun/--no-torchrun", default=True)
@click.option("--only", multiple=True, help="Of the launchers, those whose names begin so.")
def goodput(workers: int, seconds: float, every: float, torchrun: bool, only: tuple[str, ...]) -> None:
    """The steps made while a worker is killed every so often, as a share of the steps of an
    undisturbed run."""
    from tests.bench.goodput import goodput as measure

    lines = 0
    for line in measure(workers, seconds, every, torchrun, only):
        click.echo(line)
        lines += 1
    if lines == 1:  # the heading
        raise click.ClickException(f"no launcher has a name that begins with {' or '.join(only)}")


@main.command("node-loss")
@click.option("--tries", default=3)
@click.option("--defaults/--no-defaults", default=True, help="Also torchrun with its default 30 s last call.")
def node_loss(tries: int, defaults: bool) -> None:
    """From the loss of a node to the next step of the others."""
    from tests.bench.recovery import node_losses

    click.echo(node_losses(tries, defaults))


@main.command()
@click.option("--sizes", default="2,8,64,256,1024")
@click.option("--tries", default=3)
@click.option("--c10d-most", default=256, help="The largest world to form with c10d, too.")
@click.option("--c10d-timeout", default=240.0, help="Give c10d up after so many seconds.")
def forming(sizes: str, tries: int, c10d_most: int, c10d_timeout: float) -> None:
    """The time to form a world of light, fake agents."""
    from tests.bench.forming import forming as measure

    click.echo(measure([int(s) for s in sizes.split(",")], tries, c10d_most, c10d_timeout))


@main.command()
@click.option("--sizes", default="8,32,128,256", help="Workers of the world.")
@click.option("--tries", default=3)
def connecting(sizes: str, tries: int) -> None:
    """The time to connect the workers of a world, beside torch's process group."""
    from tests.bench.connecting import connecting as measure

    for line in measure([int(size) for size in sizes.split(",")], tries):
        click.echo(line)


@main.command()
@click.option("--sizes", default="100,1000,10000", help="Nodes of the job.")
@click.option("--limit", default=600.0, help="Seconds of each size.")
def scale(sizes: str, limit: float) -> None:
    """The cost of the leader's events, by the number of nodes."""
    from elasticd.daemon import cycles
    from tests.bench.scale import scale as measure

    cycles.look_rarely()  # as in an agent
    click.echo(measure([int(size) for size in sizes.split(",")], limit))


@main.command("etcd-size")
@click.option("--nodes", default=10_000)
@click.option("--days", default=7)
@click.option("--failures", default=1.0, help="Of a thousand workers in a day.")
def etcd_size(nodes: int, days: int, failures: float) -> None:
    """The size of etcd's database after each day of a large job."""
    from tests.bench.etcd_size import etcd_size as measure

    for sizes in measure(nodes, days, failures):
        click.echo(sizes)


@main.command()
@click.option("--workers", default=2)
@click.option("--pairs", default=3, help="Of launches of each kind; 0: none.")
@click.option("--steps", default=300, help="Of each launch.")
@click.option("--watched-pairs", default=20, help="Of blocks that are watched and are not; 0: none.")
@click.option("--watched-steps", default=60, help="Of each block.")
@click.option("--width", default=700, help="Of the layers of the model that is watched.")
@click.option("--batch", default=128)
def overhead(
    workers: int, pairs: int, steps: int, watched_pairs: int, watched_steps: int, width: int, batch: int
) -> None:
    """The cost of being watched, and the time of a step beside that of processes started by hand."""
    from tests.bench.overhead import overhead as measure
    from tests.bench.watching import ALL, watching

    if watched_pairs:
        click.echo(f"{workers} workers watched and not ({watched_steps} steps a block, the same processes)")
        for what in ALL:
            click.echo(watching(workers, watched_pairs, watched_steps, what, width, batch))
    if pairs:
        click.echo(measure(workers, pairs, steps))


@main.command()
@click.option("--sizes", default="8,1000", help="Members of the job.")
@click.option("--scrapes", default=200)
def scrape(sizes: str, scrapes: int) -> None:
    """The cost of a scrape."""
    from tests.bench.scrape import scrapes as measure

    click.echo(measure([int(s) for s in sizes.split(",")], scrapes))


@main.command()
@click.option("--workers", default=4)
@click.option("--stops", default=5, help="How often elasticd's workers are stopped.")
@click.option("--bound", default=60.0, help="Seconds after which torchrun is given up.")
def hang(workers: int, stops: int, bound: float) -> None:
    """From SIGSTOP of a worker until this is noticed, and to the next step, with default settings."""
    from tests.bench.hang import hangs

    click.echo(hangs(workers, stops, bound))


@main.command()
@click.option("--workers", default=4)
@click.option("--megabytes", default=400, help="Of model and optimizer together.")
@click.option("--saves", default=5)
@click.option("--folder", type=click.Path(path_type=Path), help="On the disk to measure; default: TMPDIR.")
@click.option("--only", multiple=True, help="Of the rows, those that begin so.")
def checkpoint(workers: int, megabytes: int, saves: int, folder: Path | None, only: tuple[str, ...]) -> None:
    """How long a checkpoint holds the training loop up, and how long until it is durable."""
    from tests.bench.checkpoint import checkpoint as measure

    click.echo(measure(workers, megabytes, saves, folder, only))


@main.command()
@click.option("--worlds", default="2,4")
@click.option("--models", default="small,medium,large")
@click.option("--virtual-ranks", default="1,2", help="Of each worker.")
@click.option("--turns", default=8)
@click.option("--steps", default=20, help="Of each turn.")
def consistent(worlds: str, models: str, virtual_ranks: str, turns: int, steps: int) -> None:
    """A step with and without consistent mode, beside plain DDP."""
    from tests.bench.consistent import consistent as measure

    numbers = [[int(n) for n in text.split(",")] for text in (worlds, virtual_ranks)]
    for line in measure(numbers[0], models.split(","), numbers[1], turns, steps):
        click.echo(line)


@main.command()
@click.option("--program", "programs", multiple=True, help="Only these, such as ddp.")
@click.option("--fault", "faults", multiple=True, help='Only these, such as "node lost".')
@click.option("--torchrun", is_flag=True, help="Beside torchrun: a worker is killed; with --costs, CPU time.")
@click.option("--costs", is_flag=True, help="The throughput against DDP, and the time to recover, instead.")
@click.option("--turns", default=3, help="With --costs: the cells are medians of so many.")
@click.option("--write", is_flag=True, help="Put the cells into workers/README.md.")
def techniques(
    programs: tuple[str, ...],
    faults: tuple[str, ...],
    torchrun: bool,
    costs: bool,
    turns: int,
    write: bool,
) -> None:
    """Each program of workers/ through each fault: its quality, and the time to the next step."""
    from tests.bench import techniques as bench
    from tests.bench.tables import put

    lines = (
        bench.costs(programs, turns, torchrun=torchrun)
        if costs
        else bench.techniques(programs, faults, torchrun=torchrun)
    )
    printed = []
    for line in lines:
        click.echo(line)
        printed.append(line)
    if write:
        of_faults = {fault: fault for fault in faults or bench.FAULTS}
        tables = [bench.COSTS, *([bench.CPU] if torchrun else [])] if costs else [of_faults]
        text = bench.README.read_text()
        for columns in tables:
            text = put(text, printed, columns)
        bench.README.write_text(text)


@main.command("slow-links")
@click.option("--rates", default="0,20", help="Mbit/s, with commas; 0: no limit.")
def slow_links(rates: str) -> None:
    """DDP and local SGD over links of limited bandwidth (as root): images per second and quality."""
    from tests.bench.slow_links import slow_links as measure

    for line in measure([int(rate) for rate in rates.split(",")]):
        click.echo(line)


@main.command()
@click.option("--only", multiple=True, help="Of the rows, those that begin so.")
def frameworks(only: tuple[str, ...]) -> None:
    """DDP, Trainer, Accelerate and Lightning through a kill and resizes: the samples lost and repeated."""
    from tests.bench.frameworks import frameworks as measure

    for line in measure(only):
        click.echo(line)


@main.command()
@click.option("--kills", default=4, help="Of each launcher; 0: none.")
@click.option("--megabytes", default=2000, help="Of the model and the optimizer that are saved.")
@click.option("--saves", default=5, help="In each way; 0: none.")
@click.option("--device", default="cuda", help='Or "cpu", to try the commands without a GPU.')
@click.option("--folder", type=click.Path(path_type=Path), help="On the disk to measure; default: TMPDIR.")
def gpu(kills: int, megabytes: int, saves: int, device: str, folder: Path | None) -> None:
    """On one GPU: from the kill of a worker to the next step, and what a save costs."""
    from tests.bench.gpu import gpu as measure

    for table in measure(kills, megabytes, saves, device, folder):
        click.echo(table)


main()
