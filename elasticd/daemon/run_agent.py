"""Runs one agent from its start to its exit code, for ``elasticd run``."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from elasticd.core.agent_messages import LeaveJob, WardenLost
from elasticd.core.facts import Member, Round
from elasticd.core.ports import Assignment
from elasticd.core.reasons import Reason, ScriptCheckpointed
from elasticd.daemon import cycles, edges, identity, openfiles, run_summary
from elasticd.daemon.config import CannotStart, RunConfig
from elasticd.daemon.debugging import Debugging
from elasticd.daemon.driver import Driver
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.hangs import Hangs
from elasticd.daemon.http_pages import Pages
from elasticd.daemon.inbox import Inbox, Signals
from elasticd.daemon.inspector import LocalInspector
from elasticd.daemon.leader_link.telemetry_listener import TelemetryListener
from elasticd.daemon.leader_link.telemetry_sender import TelemetrySender
from elasticd.daemon.logs import Destinations, layout
from elasticd.daemon.meter import Meter
from elasticd.daemon.node_saver import etcd_peers
from elasticd.daemon.node_saver.saver_service import FINISH_S, FINISH_S_MAX, SaverService
from elasticd.daemon.observer import Observer
from elasticd.daemon.publish import Publisher
from elasticd.daemon.roundstore import TorchRoundStores
from elasticd.daemon.service_manager import Manager, Service
from elasticd.daemon.standalone_etcd import StandaloneEtcd
from elasticd.daemon.timedstore import TimedStore
from elasticd.daemon.timekeeper import Timekeeper
from elasticd.daemon.timeline import Timeline
from elasticd.daemon.usage_sampler import Sampler
from elasticd.etcd.clock import SteadyClock
from elasticd.etcd.store import EtcdLink
from elasticd.procs.environment import assignments, standbys
from elasticd.procs.logdest import LogDest
from elasticd.procs.usage import throttled_s
from elasticd.procs.warden_client import Warden
from elasticd.procs.workers import LocalProcs
from elasticd.telemetry import describe, log, runs
from elasticd.telemetry.events import EventFile
from elasticd.telemetry.lines import clean
from elasticd.telemetry.liveview import PlainView, TerminalView
from elasticd.telemetry.termination import TerminationLog

END_S = 5.0  # the time for workers to end after SIGKILL


def run(
    config: RunConfig, view: TerminalView | None = None, termination_log: TerminationLog | None = None
) -> int:
    """Take part in a job until the job ends or this node leaves the job. Return the exit code."""
    view = view or PlainView()
    manager = Manager.of(os.environ, os.getpid())  # before any process inherits the variables
    try:
        code, said = _run(config, view, manager)
    except CannotStart as error:
        code, said = 2, f"elasticd: {error}."
    finally:
        manager.close()
    said = clean(said)
    if termination_log is not None:
        termination_log.write(said)
    view.finish(said)
    return code


def _run(config: RunConfig, view: TerminalView, manager: Manager) -> tuple[int, str]:
    """Return the exit code and the text of the closing screen."""
    cycles.look_rarely()
    clock = SteadyClock()
    began_at = clock()
    logger = log.get("elasticd.agent")
    handled = [signal.Signals[name] for name in config.signals]
    with ExitStack() as cleanup:
        worker_files = openfiles.raise_limit(config.slots, config.limits.min)
        warden = cleanup.enter_context(Warden.start(worker_files))  # before any thread starts
        inbox = Inbox()
        reserve = openfiles.Reserve(inbox.post)
        cleanup.callback(reserve.close)
        cleanup.enter_context(Signals(handled, inbox.post))

        def reify(number: int, envs: dict[int, dict[str, str]]) -> LogDest:
            return destinations.reify(number, envs)

        procs = edges.procs(config, warden, view, reify, clock)
        cleanup.callback(procs.close)
        procs.expect(_first_worker(config, began_at))
        standalone = (
            cleanup.enter_context(StandaloneEtcd(config.job, warden)) if config.etcd is None else None
        )

        stores = TorchRoundStores(config.address, warden, ahead=config.needs_packages)
        cleanup.callback(stores.shut)
        access = standalone.wait_until_ready() if standalone else config.etcd
        assert access is not None
        link = EtcdLink(access, clock)
        cleanup.callback(link.close)
        etcd = edges.store(config, link, inbox.post)
        cleanup.callback(etcd.close)
        store = TimedStore(etcd)
        destinations = Destinations(layout(config.logs), audit=config.audit is not None, debug=config.debug)
        replica_listener = edges.listen_for_replicas(config)
        saver = SaverService(warden, access, config.job, replica_listener, config.checkpoint_rate)
        cleanup.callback(saver.close)

        snapshot = ""

        def say(reason: Reason) -> None:
            nonlocal snapshot
            if isinstance(reason, ScriptCheckpointed) and reason.path:
                snapshot = reason.path
            log.reason(logger, reason, clock())
            publisher.note(reason, clock())

        def assign(round: Round, member: Member) -> tuple[Assignment, ...]:
            if master_port is not None:
                master_port.round_begins()
            return assignments(round, member, setting)

        setting = identity.setting_of(config, saver.name, began_at, holds=replica_listener is not None)
        hangs = None
        if config.patience is not None:
            inspector = LocalInspector(procs, destinations.run_folder)
            hangs = Hangs(config.patience, inspector, store)
        observer = Observer(procs.page_contents, throttled_s, config.for_the_library)
        telemetry_socket = edges.listen_for_agents(config)
        telemetry_port = telemetry_socket.getsockname()[1]
        state = identity.state_of(config, stores.port, telemetry_port, access.url, began_at)
        timekeeper = Timekeeper(state, began_at, procs.progress, procs.step_times)
        sender = TelemetrySender(config.node)
        cleanup.callback(sender.close)
        gathering = Gathering(state, store, sender)
        cleanup.enter_context(TelemetryListener(telemetry_socket, state.me.secret, gathering, clock))
        driver = Driver(
            state,
            store=store,
            procs=procs,
            stores=stores,
            assign=assign,
            assign_standbys=lambda slots, began: standbys(slots, tuple(range(config.slots)), setting, began),
            process_alive=identity.process_alive,
            post=inbox.post,
            say=say,
            hangs=hangs,
            observer=observer,
            timekeeper=timekeeper,
            gathering=gathering,
        )
        master_port = edges.open_master_port(config, lambda: driver.state.round, cleanup)

        def run_folder() -> Path | None:
            if driver.state.registered:  # an agent that the job refused keeps no folder of logs
                destinations.begin(config.job)
            return destinations.run_folder()

        def began(folder: Path) -> None:
            runs.note(runs.state_dir(), config.job, config.node, began_at, folder)

        sampler = cleanup.enter_context(Sampler(identity.visible_devices(config.slots)))
        events = cleanup.enter_context(EventFile(run_folder, began))
        meter = Meter(
            config,
            driver,
            store,
            procs.step_times,
            saver.reports,
            procs.page_contents,
            lambda: saver.footprint,
        )
        pages = Pages(clock)
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
            gathering,
            events,
            Timeline(events, began_at),
            observer,
        )
        cleanup.callback(publisher.close)
        service = Service(manager, lambda: driver.state)
        routines = [reserve.routine, publisher.routine, service.routine]
        debugging = Debugging(driver, procs, store, destinations.run_folder) if config.debug else None
        if debugging is not None:
            routines.append(debugging.routine)
        if replica_listener is not None:
            routines.append(etcd_peers.Announcement(replica_listener[1], driver, store).routine)

        served_at = edges.serve_pages(config, pages, cleanup)
        warden.on_lost(lambda: inbox.post(WardenLost()))
        events.write(run_summary.started(config, access, began_at))
        pages_at = f"; status and metrics are at {served_at}" if served_at else ""
        logger.info(
            "agent.started",
            sentence=f"node {config.node} offers {describe.count(config.slots, 'slot')} to job "
            f"{config.job}{pages_at}",
            etcd=access.url,
            slots=config.slots,
            address=config.address,
            http=served_at,
        )
        try:
            driver.begin()
            inbox.serve(driver, clock, lambda now: min([routine(now) for routine in routines]))
        except Exception as error:
            if not reserve.explains(error):
                raise
            reserve.give()
            driver.left = LeaveJob(3, reserve.why)
            _end_workers(procs, config.policy.broken_s)
        left = driver.left
        assert left is not None
        service.ends(left.why)
        if not driver.state.registration.joined and driver.state.etcd.silent is not None:
            left = replace(left, why=run_summary.why_silent(left.why, access))
        last = run_summary.ended_round(driver, left)
        if last is not None:
            run_summary.pass_on_error_file(config, last, procs.error_file)
        ended_at = clock()
        ledger = timekeeper.close(driver.state, ended_at)
        ledgers, spent = gathering.farewell(driver.state, ledger, ended_at, known=timekeeper.resumed)
        with Signals(handled, saver.hurry):
            # The run's events include the last commits.
            saver.close(FINISH_S_MAX if last is not None and left.code < 128 else FINISH_S)
        publisher.farewell(ended_at)
        seen = driver.state.round if driver.state.registration.joined else None
        lasted_s = ended_at - run_summary.began_at(last, began_at)
        said = run_summary.closing_text(config, last, left, lasted_s, spent, saver.unsaved, seen)
        if left.code == 0:
            kept = run_summary.kept(config, destinations.run_folder(), saver.newest, snapshot)
            said = "\n".join([said, *kept])
        if debugging is not None:
            said = "\n".join([said, *debugging.close()])
        events.write(run_summary.ended(config, last, left, said, ledgers, ended_at))
    if warden.left:
        said = f"{said}\n{run_summary.left_behind(warden.left)}"
    return left.code, said


def _first_worker(config: RunConfig, began_at: float) -> Assignment:
    """Return an assignment like those of the first round, which differ from it only as they differ by
    rank."""
    setting = identity.setting_of(config, "", began_at, holds=False)
    return standbys((0,), tuple(range(config.slots)), setting, 0.0)[0]


def _end_workers(procs: LocalProcs, grace_s: float) -> None:
    """Stop the workers with a grace period, since the driver no longer runs."""
    procs.stop(signal.SIGTERM, grace_s)
    deadline = time.monotonic() + grace_s + END_S
    while procs.pids() and time.monotonic() < deadline:
        time.sleep(0.05)
