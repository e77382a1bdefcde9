"""The environment of a worker: torchrun's variables, and elasticd's own.

Torchrun sets its variables in torch.distributed.elastic.agent.server.local_elastic_agent (2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticd.channel.worker_messages import GIVES, HANDOVER, TAKES
from elasticd.core.facts import Cause, Member, Phase, Round
from elasticd.core.ports import Assignment


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all workers of an agent share.

    ``inherited``: the agent's own environment. ``devices``: the GPUs of the node's slots in order, as in
    CUDA_VISIBLE_DEVICES.
    """

    job: str
    role: str = "default"
    restarts_max: int = 0
    devices: tuple[str, ...] = ()
    virtual_local_rank: bool = False
    inherited: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)


def assignments(round: Round, member: Member, setting: Setting) -> tuple[Assignment, ...]:
    """Return one assignment for each slot of the member, in rank order. Each environment is added to
    ``setting.inherited``."""
    address, _, port = round.store.rpartition(":")
    made = []
    for local_rank, slot in enumerate(member.slots):
        rank = member.base_rank + local_rank
        env = {
            "LOCAL_RANK": str(local_rank),
            "RANK": str(rank),
            "GROUP_RANK": str(member.place),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": setting.role,
            "LOCAL_WORLD_SIZE": str(len(member.slots)),
            "WORLD_SIZE": str(round.world_size),
            "GROUP_WORLD_SIZE": str(round.nodes),
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
            **({HANDOVER: GIVES if round.leaves_out(rank) else TAKES} if round.handover else {}),
            **_devices(member, local_rank, setting),
            **setting.extra,
        }
        if setting.virtual_local_rank:
            env["LOCAL_RANK"] = "0"
        made.append(Assignment(slot, rank, local_rank, env))
    return tuple(made)


def run_id(job: str, began: float) -> str:
    """Return an id that no other run of the job has. Scripts name sockets and shared memory by the id, and an
    earlier run may have left some.

    The id is the same on all nodes and in all rounds, as is ``began``, the time of the run's first round; 0
    before that.
    """
    return f"{job}-{round(began * 1000):x}" if began else job


def standbys(
    slots: tuple[int, ...], node_slots: tuple[int, ...], setting: Setting, began: float
) -> tuple[Assignment, ...]:
    """Return assignments for workers that start before they have a round.

    They have the local ranks of a round with all of the node's slots, since devices follow the local rank.
    The round sets all other ranks anew. ``began``: see ``run_id``.
    """
    member = Member("", "", node_slots, 0)
    alone = Round(0, Phase.WAITING, (member,), "localhost:0", Cause.START, 0.0, began=began)
    return tuple(a for a in assignments(alone, member, setting) if a.slot in slots)


def _devices(member: Member, local_rank: int, setting: Setting) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES if it is needed: scripts use LOCAL_RANK as the GPU's index, which is wrong
    if a slot of the node is left out of the round."""
    if not setting.devices:
        return {}
    mine = [setting.devices[s] for s in member.slots if s < len(setting.devices)]
    if setting.virtual_local_rank:
        return {"CUDA_VISIBLE_DEVICES": mine[local_rank]} if local_rank < len(mine) else {}
    if member.slots == tuple(range(len(member.slots))):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
