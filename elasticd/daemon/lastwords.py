"""The first and the last that is told of a run: its events, its closing screen, its error file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elasticd import __version__
from elasticd.checkpoint.server.save_report import SaveReport
from elasticd.core.facts import NodeLedger, Phase, Round
from elasticd.core.ledger import totals
from elasticd.core.messages import Leave
from elasticd.daemon.config import RunConfig
from elasticd.daemon.driver import Driver
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.diagnose import diagnose
from elasticd.procs.linux import started_at
from elasticd.telemetry import describe, summary
from elasticd.telemetry.events import ENDED, STARTED, Event, of_agent


def started(config: RunConfig, access: EtcdAccess, at: float) -> Event:
    """What this agent offers, and to whom."""
    script = os.path.basename(config.command.target)
    return of_agent(
        STARTED,
        at,
        config.job,
        config.node,
        f"{config.node} offers {describe.count(config.slots, 'slot')} for {script}",
        pid=os.getpid(),
        pid_started=started_at(os.getpid()),
        version=__version__,
        script=config.command.target,
        slots=config.slots,
        spares=config.spares,
        min=config.limits.min,
        max=config.limits.max,
        etcd=access.url if config.etcd is not None else "embedded",
    )


def ended(
    config: RunConfig, last: Round | None, left: Leave, said: str, ledgers: Sequence[NodeLedger], at: float
) -> Event:
    """``time``: of every node that has told its own, in seconds by kind. ``outcome``: of the job, if it
    is over."""
    over = {"outcome": last.outcome, "rounds": last.number, "restarts": last.restarts} if last else {}
    return of_agent(
        ENDED,
        at,
        config.job,
        config.node,
        describe.first_line(said),
        code=left.code,
        why=(last.why if last is not None else "") or left.why,
        time={ledger.node: totals([ledger]) for ledger in ledgers},
        **over,
    )


def ended_round(driver: Driver, left: Leave) -> Round | None:
    """The round the job ended with, if it is this agent's job and it did end."""
    round = driver.state.round
    over = round is not None and round.phase is Phase.ENDED and driver.state.registration.joined
    return round if over and left.code != 2 else None


def began_at(last: Round | None, agent_began_at: float) -> float:
    """When what is told of at the end began: the job, if it is over, though this agent came later; else this
    agent. Seconds since the epoch."""
    return min(agent_began_at, last.began or agent_began_at) if last is not None else agent_began_at


def why_silent(why: str, access: EtcdAccess) -> str:
    """Why etcd has not answered, as far as it can be seen from here: a certificate, a scheme, a port."""
    found = diagnose(access)
    return why if found is None else f"{why}: {found}"


def last_words(
    config: RunConfig,
    last: Round | None,
    left: Leave,
    lasted_s: float,
    spent: Mapping[str, float],
    unsaved: str = "",
    seen: Round | None = None,
) -> str:
    """``last``: the round the job ended with, if it did; ``seen``: the last that this node knows of."""
    if last is not None:
        restarts = last.restarts
        return summary.screen(
            config.job, last, restarts=restarts, lasted_s=lasted_s, spent=spent, unsaved=unsaved
        )
    if left.code > 128:
        # Of a job of many nodes, rounds that this one had no part in are none of its own.
        known = seen if config.etcd is None and seen is not None and seen.number else None
        return summary.left(
            config.job, config.node, left.why, known, lasted_s=lasted_s, spent=spent, unsaved=unsaved
        )
    return f"elasticd: {left.why}."


def kept(config: RunConfig, logs: Path | None, newest: SaveReport | None, snapshot: str) -> list[str]:
    """What there is to go on from, once all has ended well: a line each. ``newest``: the checkpoint committed
    last, as this node's saver knows; ``snapshot``: the last that the script has told of."""
    lines = [f"Report: elasticd report {config.job}"]
    if logs is not None:
        lines.append(f"Logs: {logs}")
    if newest is not None:
        place = config.env.get("ELASTICD_CHECKPOINTS")
        lines.append(f"Checkpoint of step {newest.step}: {f'{place}/' if place else ''}{newest.name}")
    if snapshot:
        lines.append(f"Snapshot: {snapshot}")
    return lines


def pass_on_error_file(config: RunConfig, last: Round, error_file_of: Callable[[int], str]) -> None:
    """Torch's contract of nested launchers: what the first failing worker wrote of its error becomes
    the error file of the launcher, if whoever launched that asked for one."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    asked = os.environ.get("TORCHELASTIC_ERROR_FILE")
    failure = last.failure
    if not asked or failure is None or failure.node != config.node:
        return
    written = error_file_of(failure.exit.slot)
    if not written or not os.path.isfile(written):
        return
    try:
        ErrorHandler().dump_error_file(written, failure.exit.code)  # with the code, as torch's launcher does
    except ValueError:  # not whole: better than nothing
        shutil.copyfile(written, asked)
