"""An agent from its first process to its last word: what ``elasticd run`` does once it knows what."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from elasticd.core import agent as agents
from elasticd.core.environment import assignments, standbys
from elasticd.core.facts import Holder
from elasticd.core.ledger import totals
from elasticd.core.messages import KeeperLost, StoreComplained
from elasticd.core.reasons import Reason
from elasticd.daemon import holding, identity, lastwords, openfiles
from elasticd.daemon.chronicle import Chronicle
from elasticd.daemon.command import worker_command
from elasticd.daemon.config import CommandKind, RunConfig
from elasticd.daemon.driver import Driver
from elasticd.daemon.errors import CannotStart
from elasticd.daemon.hangs import Hangs
from elasticd.daemon.inbox import Inbox, Signals
from elasticd.daemon.meter import Meter
from elasticd.daemon.pages import Pages
from elasticd.daemon.publish import Publisher
from elasticd.daemon.sampler import Sampler
from elasticd.daemon.saver import FINISH_S, FINISH_S_MAX, SaverService
from elasticd.daemon.service import Manager, Service
from elasticd.daemon.standalone import Standalone
from elasticd.daemon.stragglers import Comparison
from elasticd.daemon.timedstore import TimedStore
from elasticd.daemon.timekeeper import Timekeeper
from elasticd.etcd.clock import SteadyClock
from elasticd.etcd.errors import BadRecord, HistoryLost, NewerRecord, StoreError
from elasticd.etcd.store import EtcdStore, Link
from elasticd.procs.keeper import Warden
from elasticd.procs.output import Output
from elasticd.procs.workers import LocalProcs
from elasticd.telemetry import log, runs
from elasticd.telemetry.events import EventFile
from elasticd.telemetry.http import HttpServer
from elasticd.telemetry.termination import TerminationLog
from elasticd.telemetry.view import PlainView, View


def run(config: RunConfig, view: View | None = None, last_words: TerminationLog | None = None) -> int:
    """Take part in a job until it ends or this node leaves it; returns the exit code (DESIGN 7)."""
    view = view or PlainView()
    manager = Manager.of(os.environ, os.getpid())  # first: nobody else is to find it there
    try:
        code, said = _run(config, view, manager)
    except CannotStart as error:
        code, said = 2, f"elasticd: {error}."
    finally:
        manager.close()
    if last_words is not None:
        last_words.write(said)
    view.finish(said)
    return code


def _run(config: RunConfig, view: View, manager: Manager) -> tuple[int, str]:
    """The exit code, and what to say at the end."""
    clock = SteadyClock()
    began_at = clock()
    logger = log.get("elasticd.agent")
    with ExitStack() as cleanup:
        worker_files = openfiles.raise_limit(config.slots, config.limits.min)
        warden = cleanup.enter_context(
            Warden.start(worker_files)
        )  # first: it wants a process without threads
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

        complaint = ""

        def complained(error: StoreError) -> None:
            nonlocal complaint
            if str(error) != complaint:  # each watch has the same one
                complaint = str(error)
                logger.warning("etcd.complaint", why=complaint)
            needed = isinstance(error, BadRecord) and error.key in ("spec", "round", f"nodes/{config.node}")
            if needed or isinstance(error, NewerRecord) or not isinstance(error, BadRecord):
                inbox.post(StoreComplained(str(error), forgot=isinstance(error, HistoryLost)))

        link = Link(access, clock)
        cleanup.callback(link.close)
        etcd = EtcdStore(link, config.job, config.policy.node_ttl_s, problems=complained)
        cleanup.callback(etcd.close)
        store = TimedStore(etcd)
        stores = TorchRoundStores(config.address)
        cleanup.callback(stores.shut)

        output = Output(_Console(view))
        output.follow_window_size()
        destinations = Destinations(logs_specs(config.logs), audit=config.audit is not None)
        procs = LocalProcs(
            warden,
            worker_command(config),
            base_env={
                **os.environ,
                "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(config.signals),  # as torchrun's launcher does
                **config.env,
            },
            reify=destinations.reify,
            output=output,
            role=config.role,
            line_prefix=config.logs.line_prefix,
            whole_group=config.command.kind is CommandKind.PROGRAM,
            zygote=(
                not config.fresh_start
                and config.command.kind is not CommandKind.PROGRAM
                and config.numa_binding is None
            ),
            say=logger.info,
            warn=logger.warning,
            duplicate_stdout=config.logs.duplicate_stdout,
            duplicate_stderr=config.logs.duplicate_stderr,
            clock=clock,
        )
        cleanup.callback(procs.close)

        def say(reason: Reason) -> None:
            log.reason(logger, reason)
            publisher.note(reason, clock())

        held = _hold(config)
        saver = SaverService(warden, access, config.job, held, config.checkpoint_rate)
        cleanup.callback(saver.close)
        setting = identity.setting_of(config, saver.name, began_at, holds=held is not None)
        driver = Driver(
            agents.start(
                identity.of(config),
                identity.spec_of(config),
                stores.port,
                config.etcd_grace_s,
                f"etcd at {access.url}",
                etcd_wait_s=config.etcd_wait_s,
                spares=config.spares,
                alone=standalone is not None,
            ),
            store=store,
            procs=procs,
            stores=stores,
            assign=lambda round, member: assignments(round, member, setting),
            assign_standbys=lambda slots: standbys(slots, tuple(range(config.slots)), setting),
            process_alive=identity.process_alive,
            post=inbox.post,
            say=say,
        )
        pages = Pages(clock)
        sampler = cleanup.enter_context(Sampler(identity.visible_devices(config.slots)))

        def step_times(slot: int, after: int) -> tuple[float, ...]:
            offset_s = clock() - time.monotonic()
            return tuple(at + offset_s for at in procs.step_times(slot, after))

        meter = Meter(
            config, driver, store, step_times, began_at, saver.reports, procs.told, lambda: saver.footprint
        )
        timekeeper = Timekeeper(config, driver, store, step_times, began_at)

        def run_folder() -> Path | None:
            if driver.state.registered:  # who was turned away at once has no part in the job
                destinations.begin(config.job)
            return destinations.run_folder()

        events = cleanup.enter_context(
            EventFile(
                run_folder,
                lambda folder: runs.note(runs.state_dir(), config.job, config.node, began_at, folder),
            )
        )
        comparison = Comparison(driver, store, procs.told, say)
        publisher = Publisher(
            config,
            driver,
            store,
            procs.progress,
            view,
            meter,
            pages,
            sampler,
            timekeeper,
            events,
            Chronicle(events, began_at),
            comparison,
        )
        served_at = _serve_pages(config, pages, cleanup)
        warden.on_lost(lambda: inbox.post(KeeperLost()))
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.slots,
            rdzv_handler=None,  # type: ignore[arg-type]  # rounds are not asked for, they arrive
            entrypoint=config.command.target,
            args=config.command.args,
            max_restarts=config.policy.restarts_max,
        )
        events.write(lastwords.started(config, access, began_at))
        logger.info(
            "agent.started", etcd=access.url, slots=config.slots, address=config.address, http=served_at
        )
        service = Service(manager, lambda: driver.state)
        routines = [publisher.routine, service.routine, comparison.routine]
        if held is not None:
            routines.append(holding.Announcement(held[1], driver, store).routine)
        if config.patience is not None:
            hangs = Hangs(config.patience, driver, store, procs, destinations.run_folder, say, time.monotonic)
            routines.append(hangs.routine)
            driver.leaving_s = hangs.leaving_s
        Agent(spec, driver, inbox, clock, lambda now: min([routine(now) for routine in routines])).run()
        left = driver.left
        assert left is not None
        service.ends(left.why)
        if not driver.state.joined and driver.state.silent is not None:
            left = replace(left, why=lastwords.why_silent(left.why, access))
        last = lastwords.ended_round(driver, left)
        if last is not None:
            lastwords.pass_on_error_file(config, last, procs.error_file)
        ended_at = clock()
        ledgers = timekeeper.farewell(ended_at)
        with Signals((signal.Signals[name] for name in config.signals), saver.hurry):
            # What it had yet to commit is told of this run, too.
            saver.close(FINISH_S_MAX if last is not None and left.code < 128 else FINISH_S)
        publisher.farewell(ended_at)
        spent = totals(ledgers)
        seen = driver.state.round if driver.state.joined else None
        lasted_s = ended_at - lastwords.began_at(last, began_at)
        said = lastwords.last_words(config, last, left, lasted_s, spent, saver.unsaved, seen)
        events.write(lastwords.ended(config, last, left, said, ledgers, ended_at))
    return left.code, said


def _serve_pages(config: RunConfig, pages: Pages, cleanup: ExitStack) -> str:
    """Where the agent can be looked at over HTTP. Nobody's training fails because that cannot be."""
    if config.http is None:
        return "off"
    host, port = config.http
    try:
        server = cleanup.enter_context(HttpServer(host, port, pages.by_path()))
    except OSError as error:
        log.get("elasticd.agent").warning("http.off", host=host, port=port, why=str(error))
        return "off"
    return server.url


def _hold(config: RunConfig) -> tuple[socket.socket, Holder] | None:
    """Where other nodes' shards come to; they are held in the memory of one node more, or of none."""
    if not config.replicate:
        return None
    try:
        return holding.listen(config.node, config.address)
    except OSError as error:
        raise CannotStart(f"no copies can be held for others at {config.address}: {error}") from error


class _Console:
    """The view, as the output pump wants it."""

    def __init__(self, view: View) -> None:
        self._view = view

    def write(self, stream: int, data: bytes) -> None:
        self._view.write(stream, data)

    def is_terminal(self, stream: int) -> bool:
        return os.isatty(stream)
