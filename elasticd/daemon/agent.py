"""A ``torch.distributed.elastic`` agent whose rounds come from etcd.

Torch's own agent polls a rendezvous handler and its workers. This agent polls nothing: a watch delivers the
leader's rounds, the warden delivers exits, and ``run`` serves the inbox.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    ElasticAgent,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elasticd.core.facts import Failure, Phase
from elasticd.daemon.config import RunConfig
from elasticd.daemon.driver import Driver
from elasticd.daemon.inbox import Inbox


def worker_spec(config: RunConfig) -> WorkerSpec:
    """Return the command, the slots and the role as torch's ``WorkerSpec``."""
    return WorkerSpec(
        role=config.role,
        local_world_size=config.slots,
        rdzv_handler=None,  # type: ignore[arg-type]  # rounds come from etcd
        entrypoint=config.command.target,
        args=config.command.args,
        max_restarts=config.policy.restarts_max,
    )


class Agent(ElasticAgent):
    """One node's agent. ``routine``: see ``Inbox.serve``."""

    def __init__(
        self,
        spec: WorkerSpec,
        driver: Driver,
        inbox: Inbox,
        clock: Callable[[], float],
        routine: Callable[[float], float],
    ) -> None:
        self._spec = spec
        self._driver = driver
        self._inbox = inbox
        self._clock = clock
        self._routine = routine

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Take part in the job until it ends or this node leaves it."""
        self._driver.begin()
        self._inbox.serve(self._driver, self._clock, self._routine)
        left = self._driver.left
        assert left is not None
        if left.code == 0:
            return RunResult(state=WorkerState.SUCCEEDED)
        failure = self.failure
        failures = {}
        if failure is not None:
            exit = failure.exit
            failures[exit.rank] = ProcessFailure(exit.slot, pid=0, exitcode=exit.code, error_file="")
        return RunResult(
            state=WorkerState.FAILED if left.code == 1 else WorkerState.STOPPED, failures=failures
        )

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return a copy of this node's workers in the present round."""
        group = WorkerGroup(self._spec)
        crew = self._driver.state.crew
        if crew is None:
            group.workers = []
            group.state = WorkerState.INIT
            return group
        address, _, port = crew.round.store.rpartition(":")
        group.group_rank = crew.round.members.index(crew.member)  # type: ignore[assignment]  # torch declares None
        group.group_world_size = len(crew.round.members)  # type: ignore[assignment]
        group.master_addr, group.master_port = address, int(port)  # type: ignore[assignment]
        group.workers = [
            Worker(
                local_rank=local_rank,
                global_rank=crew.member.base_rank + local_rank,
                role_rank=crew.member.base_rank + local_rank,
                world_size=crew.round.world_size,
                role_world_size=crew.round.world_size,
            )
            for local_rank in range(len(crew.member.slots))
        ]
        if crew.finished:
            group.state = WorkerState.SUCCEEDED
        else:
            group.state = WorkerState.FAILED if crew.report.exits else WorkerState.HEALTHY
        return group

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the job; None if there is none."""
        round = self._driver.state.round
        return round.failure if round and round.phase is Phase.ENDED else None
