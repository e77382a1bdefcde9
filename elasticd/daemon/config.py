"""What an agent is told to do, checked and complete. Made by the command line, or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from elasticd.core.facts import Limits, Policy, Resume
from elasticd.core.hang import Patience
from elasticd.core.page import Use
from elasticd.etcd.access import EtcdAccess
from elasticd.telemetry.http import Tls


class CommandKind(StrEnum):
    SCRIPT = "script"  # python -u job.py
    MODULE = "module"  # python -u -m package.job
    PROGRAM = "program"  # --no-python: as it stands


@dataclass(frozen=True, slots=True)
class Command:
    """What every worker runs. ``args`` are the user's own, untouched."""

    kind: CommandKind
    target: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Torchrun's log options, in its own notation: ``redirects`` and ``tee`` such as "3" or
    "0:1,1:2"; ``line_prefix`` is its TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""

    dir: Path | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks: frozenset[int] | None = None
    line_prefix: str | None = None
    specs: str | None = None  # an entry point of the group torchrun.logs_specs
    duplicate_stdout: tuple[str, ...] = ()
    duplicate_stderr: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One agent of one job. ``etcd`` is None for a standalone run on an embedded etcd.

    ``slots`` is how many workers this node offers to run. ``etcd_grace_s``: how long etcd may be
    away before the agent gives up with exit code 4; ``etcd_wait_s``: the same before it has joined,
    where None is a few seconds and exit code 2. ``env``: added to every worker's environment.
    ``http``: the host and port that metrics are served at; None for nowhere. ``http_tls``: with these files;
    ``http_token``: to who knows it.
    ``fingerprint``: tells this script from another one of the same name. ``fresh_start``: no worker
    is forked from a process that has imported what it imports. ``spares``: how many of the slots are
    for workers that wait to replace others. ``replicate``: how many other nodes hold a copy of this
    one's shards in memory, 0 or 1. ``checkpoint_rate``: bytes per second that this node writes of
    checkpoints at most. ``patience``: with workers that make
    no steps; None to wait for ever. ``audit``: workers note what they use and commit, and a digest of
    the weights after every so many steps; None: they do not. ``door``: the hosts and the port at which
    workers find the store of any round, besides its own; None for none.
    """

    job: str
    node: str
    address: str
    limits: Limits
    slots: int
    command: Command
    fingerprint: str
    policy: Policy = Policy()
    etcd: EtcdAccess | None = None
    etcd_grace_s: float = 600.0
    etcd_wait_s: float | None = None
    role: str = "default"
    logs: LogOptions = LogOptions()
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    fresh_start: bool = False
    spares: int = 0
    replicate: int = 0
    checkpoint_rate: int | None = None
    http: tuple[str, int] | None = None
    http_tls: Tls | None = None
    http_token: str | None = field(default=None, repr=False)
    patience: Patience | None = Patience()
    audit: int | None = None
    door: tuple[tuple[str, ...], int] | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def for_the_library(self) -> tuple[tuple[str, Use], ...]:
        """The options that were given and do nothing by themselves, each with the parts of
        ``elasticd.worker`` that it is for."""
        given = {
            "--checkpoints": ("ELASTICD_CHECKPOINTS" in self.env, Use.CHECKPOINTS),
            "--checkpoint-every": ("ELASTICD_CHECKPOINT_EVERY" in self.env, Use.CHECKPOINTS),
            "--checkpoint-rate": (self.checkpoint_rate is not None, Use.CHECKPOINTS),
            "--replicate": (self.replicate > 0, Use.CHECKPOINTS),
            "--resume": (self.policy.resume is Resume.REQUIRED, Use.CHECKPOINTS),
            "--audit": (self.audit is not None, Use.DATA),
            "--spares": (self.spares > 0, Use.STATE),
        }
        return tuple((option, parts) for option, (is_given, parts) in given.items() if is_given)
