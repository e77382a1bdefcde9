"""The environment of a worker: torchrun's contract, and what elasticd adds to it.

Source: torch.distributed.elastic.agent.server.local_elastic_agent (2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticd.core.facts import Cause, Member, Phase, Round
from elasticd.core.link import HANDOVER
from elasticd.core.ports import Assignment


@dataclass(frozen=True, slots=True)
class Setting:
    """What the workers of an agent have in common. ``inherited`` is the agent's own environment;
    ``devices``: the GPUs of the node's slots, in slot order, as CUDA_VISIBLE_DEVICES names them."""

    job: str
    role: str = "default"
    restarts_max: int = 0
    devices: tuple[str, ...] = ()
    virtual_local_rank: bool = False
    inherited: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)


def assignments(round: Round, member: Member, setting: Setting) -> tuple[Assignment, ...]:
    """One for each of the member's slots, in rank order; the environment is on top of
    ``setting.inherited``."""
    address, _, port = round.store.rpartition(":")
    group_rank = round.members.index(member)
    made = []
    for local_rank, slot in enumerate(member.slots):
        rank = member.base_rank + local_rank
        env = {
            "LOCAL_RANK": str(local_rank),
            "RANK": str(rank),
            "GROUP_RANK": str(group_rank),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": setting.role,
            "LOCAL_WORLD_SIZE": str(len(member.slots)),
            "WORLD_SIZE": str(round.world_size),
            "GROUP_WORLD_SIZE": str(len(round.members)),
            "ROLE_WORLD_SIZE": str(round.world_size),
            "MASTER_ADDR": address.strip("[]"),
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": str(round.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(setting.restarts_max),
            "TORCHELASTIC_RUN_ID": run_id(setting.job, round.began),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": setting.inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "ELASTICD_JOB_NAME": setting.job,
            "ELASTICD_ROUND": str(round.number),
            "ELASTICD_BEGAN": f"{round.began:.0f}",
            "ELASTICD_FAILURES": str(round.failures),
            "ELASTICD_SLOT": str(slot),
            **({HANDOVER: "1"} if round.handover else {}),
            **_devices(member, local_rank, setting),
            **setting.extra,
        }
        if setting.virtual_local_rank:
            env["LOCAL_RANK"] = "0"
        made.append(Assignment(slot, rank, local_rank, env))
    return tuple(made)


def run_id(job: str, began: float) -> str:
    """Another one for each run of the job, as scripts name sockets and shared memory by it: those of an
    earlier run may still be there. The same on all nodes, and from the first round of the run to the last,
    as is ``Round.began``, when the run's first round formed; 0 while there is none."""
    return f"{job}-{round(began * 1000):x}" if began else job


def standbys(
    slots: tuple[int, ...], node_slots: tuple[int, ...], setting: Setting, began: float
) -> tuple[Assignment, ...]:
    """For workers started ahead of any round. The local rank is that of a node with all its slots, as
    devices go by it; all other ranks are given anew with the round. ``began``: see ``run_id``."""
    member = Member("", "", node_slots, 0)
    alone = Round(0, Phase.WAITING, (member,), "localhost:0", Cause.START, 0.0, began=began)
    return tuple(a for a in assignments(alone, member, setting) if a.slot in slots)


def _devices(member: Member, local_rank: int, setting: Setting) -> dict[str, str]:
    """Scripts take LOCAL_RANK for the GPU's index; where a slot is left out, that must still hold."""
    if not setting.devices:
        return {}
    mine = [setting.devices[s] for s in member.slots if s < len(setting.devices)]
    if setting.virtual_local_rank:
        return {"CUDA_VISIBLE_DEVICES": mine[local_rank]} if local_rank < len(mine) else {}
    if member.slots == tuple(range(len(member.slots))):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def over_interface(
    name: str, inherited: Mapping[str, str], *, asked: bool, host_is_named: bool
) -> dict[str, str]:
    """What has gloo and NCCL talk over this network interface, as far as nobody has told them otherwise.

    Left alone, gloo goes by what the host's own name resolves to: with ``host_is_named`` an address that
    others can reach, else loopback, where it would never meet them. NCCL takes what looks fastest. So both
    are told where somebody ``asked`` to be reached at that interface's address, and gloo where it has to be.
    """
    told = {}
    if asked or not host_is_named:
        told["GLOO_SOCKET_IFNAME"] = name
    if asked:
        told["NCCL_SOCKET_IFNAME"] = f"={name}"  # that one alone, and not all whose names begin so
    return {variable: value for variable, value in told.items() if variable not in inherited}
