"""The configuration of an agent, and the error of an agent that cannot start with it. ``elasticd.cli``
makes the configuration and checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from elasticd.core.facts import Limits, Policy, Resume
from elasticd.core.hang.judging import Patience
from elasticd.core.page_layout import Use
from elasticd.etcd.access import EtcdAccess
from elasticd.telemetry.http import Tls


class CannotStart(Exception):
    """The input or the machine does not let the agent start. The message is one sentence that says what to
    do. The exit code is 2."""


class CommandKind(StrEnum):
    SCRIPT = "script"  # python -u job.py
    MODULE = "module"  # python -u -m package.job
    PROGRAM = "program"  # --no-python


@dataclass(frozen=True, slots=True)
class Command:
    """The command that every worker runs. ``args``: the user's arguments, unchanged."""

    kind: CommandKind
    target: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Torchrun's log options. ``redirects`` and ``tee`` have torchrun's notation, such as "3" or "0:1,1:2".
    ``line_prefix``: torchrun's TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""

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
    """The configuration of one agent of one job.

    * ``fingerprint``: identifies the script among scripts of the same name.
    * ``imports``: what the script begins with, in the notation of ``Preload``: imported once for all workers.
    * ``needs_packages``: whether the script imports more than the standard library, so that it may use torch.
    * ``slots``: the number of workers that this node offers to run. ``spares``: how many of these slots are
      for standbys that replace other workers.
    * ``memory``: the bytes that this node's workers may use together; None: what the machine has for them; 0:
      not known.
    * ``etcd``: None for a standalone run on an embedded etcd.
    * ``etcd_grace_s``: how long etcd may be away before the agent ends with exit code 4.
    * ``etcd_wait_s``: the same before the agent has joined. None: a few seconds, and exit code 2.
    * ``fresh_start``: start each worker as a new process instead of a fork of the zygote.
    * ``replicate``: how many other nodes hold a copy of this node's shards in memory, 0 or 1.
    * ``checkpoint_rate``: the most bytes of checkpoints that this node writes per second.
    * ``http``: the host and port of the agent's pages; None: no pages. ``http_token``: the token that private
      pages require.
    * ``patience``: bounds for the time without a step; None: no limit.
    * ``audit``: the steps between two digests of the weights; workers also record samples and commits. None:
      no audit.
    * ``debug``: workers record their collectives and more, and the agent compares the records.
    * ``master_port``: the hosts and the port that lead to the store of any round (``--master-port``).
    * ``env``: variables added to every worker's environment.
    * ``job_file``: the command line as a job file, for people.
    """

    job: str
    node: str
    address: str
    limits: Limits
    slots: int
    command: Command
    fingerprint: str
    imports: tuple[str, ...] = ()
    needs_packages: bool = True
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
    memory: int | None = None
    replicate: int = 0
    checkpoint_rate: int | None = None
    http: tuple[str, int] | None = None
    http_tls: Tls | None = None
    http_token: str | None = field(default=None, repr=False)
    patience: Patience | None = Patience()
    audit: int | None = None
    debug: bool = False
    master_port: tuple[tuple[str, ...], int] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    job_file: str = ""

    @property
    def for_the_library(self) -> tuple[tuple[str, Use], ...]:
        """The given options that have an effect only on scripts that use ``elasticd.worker``. Each comes with
        the part of ``elasticd.worker`` that the script must use."""
        given = {
            "--checkpoints": ("ELASTICD_CHECKPOINTS" in self.env, Use.CHECKPOINTS),
            "--checkpoint-every": ("ELASTICD_CHECKPOINT_EVERY" in self.env, Use.CHECKPOINTS),
            "--checkpoint-rate": (self.checkpoint_rate is not None, Use.CHECKPOINTS),
            "--replicate": (self.replicate > 0, Use.CHECKPOINTS),
            "--resume": (self.policy.resume is Resume.REQUIRED, Use.CHECKPOINTS),
            "--audit": (self.audit is not None, Use.DATA),
            "--spares": (self.spares > 0, Use.STATE),
            "--memory": (self.memory is not None, Use.STATE),
        }
        return tuple((option, parts) for option, (is_given, parts) in given.items() if is_given)
