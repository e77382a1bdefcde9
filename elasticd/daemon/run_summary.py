"""The first and the last event of a run, its closing screen, and its error file."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elasticd import __version__
from elasticd.checkpoint.server.save_report import SaveReport
from elasticd.core.agent_messages import LeaveJob
from elasticd.core.facts import NodeLedger, Phase, Round
from elasticd.daemon.config import RunConfig
from elasticd.daemon.driver import Driver
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.diagnose import diagnose
from elasticd.procs.linux import started_at
from elasticd.telemetry import describe, summary
from elasticd.telemetry.events import ENDED, STARTED, Event, of_agent
from elasticd.telemetry.goodput import totals


def started(config: RunConfig, access: EtcdAccess, at: float) -> Event:
    """Return the event of the agent's start: its slots, its limits, its script and its etcd."""
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
    config: RunConfig, last: Round | None, left: LeaveJob, said: str, ledgers: Sequence[NodeLedger], at: float
) -> Event:
    """Return the event of the agent's end. ``time`` has seconds by kind for each node in ``ledgers``. If the
    job has ended, ``outcome`` is the job's outcome."""
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


def ended_round(driver: Driver, left: LeaveJob) -> Round | None:
    """Return the job's last round; None if the job goes on, or if this agent had not joined the job."""
    round = driver.state.round
    over = round is not None and round.phase is Phase.ENDED and driver.state.registration.joined
    return round if over and left.code != 2 else None


def began_at(last: Round | None, agent_began_at: float) -> float:
    """Return the start of the job if the job is over, else the start of this agent. Seconds since the
    epoch."""
    return min(agent_began_at, last.began or agent_began_at) if last is not None else agent_began_at


def why_silent(why: str, access: EtcdAccess) -> str:
    """Return the reason for etcd's silence, with a fault in a certificate, scheme or port if one is found."""
    found = diagnose(access)
    return why if found is None else f"{why}: {found}"


def closing_text(
    config: RunConfig,
    last: Round | None,
    left: LeaveJob,
    lasted_s: float,
    spent: Mapping[str, float],
    unsaved: str = "",
    seen: Round | None = None,
) -> str:
    """Return the text of the closing screen. ``last``: the job's last round, if the job has ended. ``seen``:
    the last round that this node knows."""
    if last is not None:
        restarts = last.restarts
        return summary.screen(
            config.job, last, restarts=restarts, lasted_s=lasted_s, spent=spent, unsaved=unsaved
        )
    if left.code > 128:
        # In a job of many nodes, the last round may be one without this node.
        known = seen if config.etcd is None and seen is not None and seen.number else None
        return summary.left(
            config.job, config.node, left.why, known, lasted_s=lasted_s, spent=spent, unsaved=unsaved
        )
    return f"elasticd: {left.why}."


def kept(config: RunConfig, logs: Path | None, newest: SaveReport | None, snapshot: str) -> list[str]:
    """Return one line for each of: report, logs, newest checkpoint, newest snapshot. ``newest``: the last
    commit of this node's saver. ``snapshot``: the path of the last checkpoint that the script wrote
    itself."""
    lines = [f"Report: elasticd report {shlex.quote(config.job)}"]
    if logs is not None:
        lines.append(f"Logs: {logs}")
    if newest is not None:
        place = config.env.get("ELASTICD_CHECKPOINTS")
        lines.append(f"Checkpoint of step {newest.step}: {f'{place}/' if place else ''}{newest.name}")
    if snapshot:
        lines.append(f"Snapshot: {snapshot}")
    return lines


def left_behind(pids: Sequence[int]) -> str:
    """Return a sentence about processes of the run that are not gone."""
    which = "process" if len(pids) == 1 else "processes"
    return (
        f"elasticd: the kernel has not taken down {which} {describe.listing(list(map(str, pids)))} of this "
        "run after SIGKILL, so some memory and devices are not free. See `dmesg` for errors of a driver or a "
        "disk. If this lasts, restart the machine."
    )


def pass_on_error_file(config: RunConfig, last: Round, error_file_of: Callable[[int], str]) -> None:
    """Copy the error file of the failed worker to TORCHELASTIC_ERROR_FILE. Torch's nested launchers expect
    this."""
    asked = os.environ.get("TORCHELASTIC_ERROR_FILE")
    failure = last.failure
    if not asked or failure is None or failure.node != config.node:
        return
    written = error_file_of(failure.exit.slot)
    if not written or not os.path.isfile(written):
        return
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    try:
        ErrorHandler().dump_error_file(written, failure.exit.code)  # with the code, as torch's launcher does
    except ValueError:  # the worker's file is incomplete
        shutil.copyfile(written, asked)
