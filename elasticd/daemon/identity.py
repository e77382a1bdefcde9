"""The identity of an agent: its first state, its workers' environment, and its machine."""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from pathlib import Path

from elasticd import __version__
from elasticd.core.agent import AgentConfig, AgentState, Identity
from elasticd.core.facts import Spec
from elasticd.daemon.config import RunConfig
from elasticd.data import auditnotes
from elasticd.procs.environment import Setting
from elasticd.procs.linux import started_at
from elasticd.procs.usage import memory_limit


def state_of(
    config: RunConfig, store_port: int, telemetry_port: int, etcd_url: str, began_at: float
) -> AgentState:
    """Return the first state of a new incarnation. ``store_port``: the port of the first round's store that
    this node hosts. ``telemetry_port``: where this agent listens for other agents."""
    return AgentState(
        Identity(
            node=config.node,
            incarnation=uuid.uuid4().hex,
            address=config.address,
            slots=tuple(range(config.slots)),
            host=host_identity(),
            pid=os.getpid(),
            port=telemetry_port,
            secret=secrets.token_hex(16),
        ),
        Spec(  # the agent writes the spec to etcd if this node is the job's first
            asked=config.limits,
            limits=config.limits,
            script=config.command.target,
            fingerprint=config.fingerprint,
            policy=config.policy,
            job_file=config.job_file,
            version=__version__,
        ),
        AgentConfig(
            config.etcd_grace_s,
            config.etcd_wait_s,
            f"etcd at {etcd_url}",
            config.spares,
            alone=config.etcd is None,
            began_at=began_at,
            memory=config.memory if config.memory is not None else memory_limit(),
        ),
        store_port,
    )


def setting_of(config: RunConfig, saver: str, began_at: float, *, holds: bool) -> Setting:
    """Return the part of the workers' environment that is the same in every round. ``holds``: this node holds
    copies for other nodes."""
    audit = {}
    if config.audit is not None:
        # An embedded etcd counts rounds from 0 in each run, so the agent's start identifies the run.
        series = f"{began_at:017.6f}" if config.etcd is None else ""
        audit = {auditnotes.EVERY: str(config.audit), auditnotes.SERIES: series}
    return Setting(
        job=config.job,
        role=config.role,
        restarts_max=config.policy.restarts_max,
        devices=visible_devices(config.slots),
        virtual_local_rank=config.virtual_local_rank,
        inherited=dict(os.environ),
        extra={
            "ELASTICD_SAVER": saver,
            **({"ELASTICD_HOLDER": config.node} if holds else {}),
            "ELASTICD_WORLD_MAX": str(config.limits.max),
            "ELASTICD_UNIT": str(config.limits.unit),
            **audit,
            **config.env,
        },
    )


def visible_devices(slots: int) -> tuple[str, ...]:
    """Return the GPUs of the slots, by their names in CUDA_VISIBLE_DEVICES. The machine may have none."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return tuple(part.strip() for part in told.split(",") if part.strip())
    return tuple(str(slot) for slot in range(slots))


def host_identity() -> str:
    """Return a name that identifies this machine and its last boot. psutil has no boot id, and its
    ``boot_time`` changes when the clock is set."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"


def process_alive(pid: int) -> bool:
    """Whether the process runs. A zombie, which its parent has not reaped yet, has ended."""
    return started_at(pid) != 0
