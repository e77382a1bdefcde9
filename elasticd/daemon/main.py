"""An agent from its first process to its last word: what ``elasticd run`` does once it knows what."""

from __future__ import annotations

import os
import signal
import socket
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

from elasticd.core import agent as agents
from elasticd.core.agent import Identity
from elasticd.core.environment import Setting, assignments
from elasticd.core.facts import Phase, Spec
from elasticd.core.messages import KeeperLost, Leave, StoreComplained
from elasticd.core.reasons import Reason
from elasticd.daemon.config import CommandKind, RunConfig
from elasticd.daemon.driver import Driver
from elasticd.daemon.inbox import Inbox, Signals
from elasticd.daemon.publish import Publisher
from elasticd.daemon.standalone import Standalone
from elasticd.etcd.clock import SteadyClock
from elasticd.etcd.errors import BadRecord, NewerRecord, StoreError
from elasticd.etcd.store import EtcdStore, Link
from elasticd.procs.keeper import Warden
from elasticd.procs.output import Output
from elasticd.procs.workers import LocalProcs
from elasticd.telemetry import final, log
from elasticd.telemetry.view import PlainView, View


def run(config: RunConfig, view: View | None = None) -> int:
    """Take part in a job until it ends or this node leaves it; returns the exit code (DESIGN 7)."""
    view = view or PlainView()
    clock = SteadyClock()
    began_at = clock()
    logger = log.get("elasticd.agent")
    with ExitStack() as cleanup:
        warden = cleanup.enter_context(Warden.start())  # first: it wants a process without threads
        inbox = Inbox()
        cleanup.enter_context(Signals((signal.Signals[name] for name in config.signals), inbox.post))

        standalone = cleanup.enter_context(Standalone(config.job, warden)) if config.etcd is None else None

        # Torch takes seconds to import; etcd starts meanwhile.
        from torch.distributed.elastic.agent.server.api import WorkerSpec

        from elasticd.daemon.agent import Agent
        from elasticd.daemon.logs import Destinations, logs_specs
        from elasticd.daemon.roundstore import TorchRoundStores

        access = standalone.wait_until_ready() if standalone else config.etcd
        assert access is not None

        def complained(error: StoreError) -> None:
            logger.warning("etcd.complaint", why=str(error))
            fatal = isinstance(error, NewerRecord) or not isinstance(error, BadRecord)
            if fatal:
                inbox.post(StoreComplained(str(error)))

        link = Link(access, clock)
        cleanup.callback(link.close)
        store = EtcdStore(link, config.job, config.policy.node_ttl_s, problems=complained)
        cleanup.callback(store.close)
        stores = TorchRoundStores(config.address)
        cleanup.callback(stores.shut)

        output = Output(_Console(view))
        output.follow_window_size()
        specs = logs_specs(config.logs)
        destinations = Destinations(specs)
        procs = LocalProcs(
            warden,
            worker_command(config),
            base_env={**os.environ, **config.env},
            reify=destinations.reify,
            output=output,
            role=config.role,
            line_prefix=config.logs.line_prefix,
            heartbeat=True,
            whole_group=config.command.kind is CommandKind.PROGRAM,
            duplicate_stdout=config.logs.duplicate_stdout,
            duplicate_stderr=config.logs.duplicate_stderr,
        )
        cleanup.callback(procs.close)

        setting = Setting(
            job=config.job,
            role=config.role,
            restarts_max=config.policy.restarts_max,
            devices=visible_devices(config.slots),
            virtual_local_rank=config.virtual_local_rank,
            inherited=dict(os.environ),
            extra=config.env,
        )
        identity = Identity(
            node=config.node,
            incarnation=uuid.uuid4().hex,
            address=config.address,
            slots=tuple(range(config.slots)),
            host=host_identity(),
            pid=os.getpid(),
        )
        wanted = Spec(
            asked=config.limits,
            limits=config.limits,
            script=config.command.target,
            fingerprint=config.fingerprint,
            policy=config.policy,
        )

        def say(reason: Reason) -> None:
            log.reason(logger, reason)
            publisher.note(reason, clock())

        driver = Driver(
            agents.start(identity, wanted, stores.port, config.etcd_grace_s),
            store=store,
            procs=procs,
            stores=stores,
            assign=lambda round, member: assignments(round, member, setting),
            process_alive=process_alive,
            post=inbox.post,
            say=say,
        )
        publisher = Publisher(config, driver, store, procs.progress, view)
        warden.on_lost(lambda: inbox.post(KeeperLost()))
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.slots,
            rdzv_handler=None,  # type: ignore[arg-type]  # rounds are not asked for, they arrive
            entrypoint=config.command.target,
            args=config.command.args,
            max_restarts=config.policy.restarts_max,
        )
        logger.info("agent.started", etcd=access.url, slots=config.slots, address=config.address)
        Agent(spec, driver, inbox, clock, publisher.routine).run()
        left = driver.left
        assert left is not None
    view.finish(_last_words(config, driver, left, clock() - began_at))
    return left.code


def worker_command(config: RunConfig) -> list[str]:
    """The argv of every worker, as torchrun makes it."""
    command = config.command
    if command.kind is CommandKind.PROGRAM:
        return [command.target, *command.args]
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    module = ["-m"] if command.kind is CommandKind.MODULE else []
    return [python, "-u", *module, command.target, *command.args]


def visible_devices(slots: int) -> tuple[str, ...]:
    """The GPUs behind the slots, as CUDA_VISIBLE_DEVICES names them; harmless where there are none."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return tuple(part.strip() for part in told.split(",") if part.strip())
    return tuple(str(slot) for slot in range(slots))


def host_identity() -> str:
    """Tells this machine, since it booted, from all others."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"


def process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, so it lives
    return True


class _Console:
    """The view, as the output pump wants it."""

    def __init__(self, view: View) -> None:
        self._view = view

    def write(self, stream: int, data: bytes) -> None:
        self._view.write(stream, data)

    def is_terminal(self, stream: int) -> bool:
        return os.isatty(stream)


def _last_words(config: RunConfig, driver: Driver, left: Leave, lasted_s: float) -> str:
    round = driver.state.round
    over = round is not None and round.phase is Phase.ENDED and driver.state.joined
    if round is not None and over and (left.code != 2):
        return final.screen(config.job, round, restarts=round.restarts, lasted_s=lasted_s)
    if left.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return f"{config.job}: {config.node} {left.why}."
    return f"elasticd: {left.why}."
