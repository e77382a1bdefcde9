"""``elasticd scale``, ``drain``, ``stop`` and ``forget``. They change a job's spec under a guard, so that no
concurrent change is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from elasticd.cli.command_error import ETCD_UNREACHABLE, CommandError
from elasticd.cli.job_access import Place, find, job_errors_explained, places, there_are
from elasticd.cli.option_types import Name, Whole
from elasticd.cli.options import etcd_options
from elasticd.cli.say import say
from elasticd.core.facts import Drained, Node, Phase, Round, Spec
from elasticd.core.ports import Applied, Delete, Put, Refused, Unchanged
from elasticd.telemetry import describe


@click.command()
@click.argument("job", type=Name("job"))
@click.option("--min", "least", type=Whole(1), help="Fewest workers.")
@click.option("--max", "most", type=Whole(1), help="Most workers.")
@etcd_options
def scale(job: str, least: int | None, most: int | None, **etcd: Any) -> None:
    """Change how many workers JOB may have, while it runs."""
    if least is None and most is None:
        raise CommandError("nothing to change: give --min N, --max N, or both.")

    def change(spec: Spec) -> Spec:
        low = spec.limits.min if least is None else least
        high = spec.limits.max if most is None else most
        if low > high:
            kept = f" (which {job} has now)"
            low_said, high_said = (kept if said is None else "" for said in (least, most))
            raise CommandError(f"--min {low}{low_said} is above --max {high}{high_said}.")
        try:
            return replace(spec, limits=replace(spec.limits, min=low, max=high))
        except ValueError as error:
            raise CommandError(f"{job} cannot have {low} to {high} workers: {error}.") from None

    spec = _edit(find(etcd, job), job, change)
    low, high = spec.limits.min, spec.limits.max
    say(f"{job} may have {f'{low} to ' if low < high else ''}{describe.count(high, 'worker')}.")


@click.command()
@click.argument("node", type=Name("node"))
@click.option("--job", type=Name("job"), help="The job, needed if the node takes part in several.")
@etcd_options
def drain(node: str, job: str | None, **etcd: Any) -> None:
    """Ask NODE to leave: its workers may save, the others go on."""
    place, job, incarnation = _locate(node, job, etcd)
    left = Drained(node, incarnation)

    def change(spec: Spec) -> Spec:
        return spec if left in spec.drain else replace(spec, drain=(*spec.drain, left))

    _edit(place, job, change)
    say(f"{node} is asked to leave {job}.")


@click.command()
@click.argument("job", type=Name("job"))
@click.option("--now", is_flag=True, help="Kill the workers: what they have not saved is lost.")
@etcd_options
def stop(job: str, now: bool, **etcd: Any) -> None:
    """End JOB on all its nodes: its workers may save.

    Workers that take too long to save can be killed by a second command with --now.
    """
    _edit(find(etcd, job), job, lambda spec: replace(spec, stop=True, kill=now or spec.kill))
    say(f"{job} is asked to stop{' at once' if now else ''}.")


@click.command()
@click.argument("job", type=Name("job"))
@etcd_options
def forget(job: str, **etcd: Any) -> None:
    """Remove JOB from etcd.

    JOB must have ended, or all its nodes must be lost.
    """
    from elasticd.etcd.blocking_client import Client

    place = find(etcd, job)
    with job_errors_explained(place, job), Client(place.access) as client:
        while True:
            there = {entry.key: entry for entry in client.list(job)[0].entries}
            live = [entry.fact.name for entry in there.values() if isinstance(entry.fact, Node)]
            if live or "leader" in there:
                at_work = (
                    f"{describe.count(len(live), 'node')} ({describe.listing(live)})" if live else "a leader"
                )
                raise CommandError(
                    f"{job} is alive, with {at_work}: end it first with `elasticd stop {job}`; a killed node "
                    "counts as alive until its lease expires, which takes --node-ttl seconds."
                )
            seen = {key: there[key].revision if key in there else 0 for key in ("spec", "round", "leader")}
            guards = tuple(Unchanged(key, revision) for key, revision in seen.items())
            answer = client.transact(job, guards, (Delete("", prefix=True),))
            if isinstance(answer, Refused):
                continue  # another process changed the job: look again
            if not isinstance(answer, Applied) and client.list(job)[0].entries:
                raise CommandError(
                    f"etcd did not confirm that the job is removed ({answer.why}); try again.",
                    ETCD_UNREACHABLE,
                )
            break
    say(f"{job} is forgotten: its name is free again. Checkpoints and logs are kept.")


def _edit(place: Place, job: str, change: Callable[[Spec], Spec]) -> Spec:
    """Write the spec that ``change`` returns. After a concurrent change, call ``change`` with the newer spec
    and try again.

    Raises CommandError if the job has ended, or etcd does not respond.
    """
    from elasticd.etcd.blocking_client import Client

    with job_errors_explained(place, job), Client(place.access) as client:
        while True:
            found, round_ = client.get(job, "spec"), client.get(job, "round")
            # The round is checked first, because a job that ends loses its spec.
            if round_ is not None and isinstance(round_.fact, Round) and round_.fact.phase is Phase.ENDED:
                raise CommandError(f"{job} has ended already.")
            if found is None or not isinstance(found.fact, Spec):
                raise CommandError(f"{job} has no spec in etcd yet; try again once its first node is up.")
            wanted = change(found.fact)
            if wanted == found.fact:
                return wanted
            answer = client.transact(job, (Unchanged("spec", found.revision),), (Put("spec", wanted),))
            match answer:
                case Applied():
                    return wanted
                case Refused():
                    continue  # another process changed the spec: try again
                case _:
                    now = client.get(job, "spec")
                    if now is not None and now.fact == wanted:
                        return wanted
                    raise CommandError(
                        f"etcd did not confirm the change ({answer.why}); see `elasticd status {job}`.",
                        ETCD_UNREACHABLE,
                    )


def _locate(node: str, job: str | None, etcd: Any) -> tuple[Place, str, str]:
    """Return the place, the job and the incarnation of a node. Raises CommandError."""
    from elasticd.etcd.blocking_client import Client

    candidates = (
        [(find(etcd, job), job)] if job is not None else [(p, name) for p in places(etcd) for name in p.jobs]
    )
    hits: list[tuple[Place, str, str]] = []
    known: list[str] = []
    for place, name in candidates:
        with job_errors_explained(place, name), Client(place.access) as client:
            listing, _ = client.list(name, "nodes/")
        for entry in listing.entries:
            if isinstance(entry.fact, Node):
                known.append(entry.fact.name)
                if entry.fact.name == node:
                    hits.append((place, name, entry.fact.incarnation))
    if len(hits) > 1:
        raise CommandError(
            f"{node} takes part in {describe.listing([j for _, j, _ in hits])}: say which with --job."
        )
    if not hits:
        hint = "" if etcd.get("etcd") else " (for others give --etcd)"
        raise CommandError(f"no node is named {node}{f' in {job}' if job else ''}: {there_are(known)}{hint}.")
    return hits[0]
