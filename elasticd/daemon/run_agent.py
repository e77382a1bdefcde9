"""Runs one agent from its start to its exit code, for ``elasticd run``."""

from __future__ import annotations

import os
import signal
import sys
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
# How long a busy thread keeps a thread with news waiting. By default this is 5 ms.
THREAD_TURN_S = 0.0005


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
    sys.setswitchinterval(THREAD_TURN_S)
    with ExitStack() as cleanup:
        agent = _LocalAgent(config, view, manager, cleanup)
        agent.announce()
        code, said = agent.conclude(agent.serve())
    if agent.warden.left:
        said = f"{said}\n{run_summary.left_behind(agent.warden.left)}"
    return code, said


class _LocalAgent:
    """The parts of one agent, connected to each other. Call ``announce``, ``serve`` and ``conclude``.

    ``cleanup`` closes the parts, the last one first. The warden is the first part, since it must start before
    any thread.
    """

    def __init__(self, config: RunConfig, view: TerminalView, manager: Manager, cleanup: ExitStack) -> None:
        self._config = config
        self._clock = SteadyClock()
        self._began_at = self._clock()
        self._log = log.get("elasticd.agent")
        self._handled = [signal.Signals[name] for name in config.signals]
        self._snapshot = ""  # the newest checkpoint that the script wrote itself
        soft = openfiles.raise_limit(config.slots, config.limits.min)
        worker_files = openfiles.of_a_worker(soft, config.limits.max)
        self.warden = cleanup.enter_context(Warden.start(worker_files))
        self._inbox = Inbox()
        self._reserve = openfiles.Reserve(self._inbox.post)
        cleanup.callback(self._reserve.close)
        cleanup.enter_context(Signals(self._handled, self._inbox.post))
        self._open_edges(view, cleanup)
        self._make_driver(cleanup)
        self._make_publisher(view, manager, cleanup)

    def _open_edges(self, view: TerminalView, cleanup: ExitStack) -> None:
        """Make what the agent acts with: the workers, etcd, the stores of rounds, the folders of logs, and
        the saver."""
        config, warden = self._config, self.warden
        self._procs = edges.procs(config, warden, view, self._reify, self._clock)
        cleanup.callback(self._procs.close)
        self._procs.expect(_first_worker(config, self._began_at))
        standalone = (
            cleanup.enter_context(StandaloneEtcd(config.job, warden)) if config.etcd is None else None
        )

        self._stores = TorchRoundStores(config.address, warden, ahead=config.needs_packages)
        cleanup.callback(self._stores.shut)
        access = standalone.wait_until_ready() if standalone else config.etcd
        assert access is not None
        self._access = access
        link = EtcdLink(access, self._clock)
        cleanup.callback(link.close)
        etcd = edges.store(config, link, self._inbox.post)
        cleanup.callback(etcd.close)
        self._store = TimedStore(etcd)
        self._destinations = Destinations(
            layout(config.logs), audit=config.audit is not None, debug=config.debug
        )
        self._replica_listener = edges.listen_for_replicas(config)
        self._saver = SaverService(warden, access, config.job, self._replica_listener, config.checkpoint_rate)
        cleanup.callback(self._saver.close)

    def _make_driver(self, cleanup: ExitStack) -> None:
        """Make the driver, and the parts that ask the core beside it."""
        config, procs = self._config, self._procs
        holds = self._replica_listener is not None
        self._setting = identity.setting_of(config, self._saver.name, self._began_at, holds=holds)
        hangs = None
        if config.patience is not None:
            inspector = LocalInspector(procs, self._destinations.run_folder)
            hangs = Hangs(config.patience, inspector, self._store)
        self._observer = Observer(procs.page_contents, throttled_s, config.for_the_library)
        telemetry_socket = edges.listen_for_agents(config)
        telemetry_port = telemetry_socket.getsockname()[1]
        state = identity.state_of(config, self._stores.port, telemetry_port, self._access.url, self._began_at)
        self._timekeeper = Timekeeper(state, self._began_at, procs.progress, procs.step_times)
        sender = TelemetrySender(config.node)
        cleanup.callback(sender.close)
        self._gathering = Gathering(state, self._store, sender)
        cleanup.enter_context(
            TelemetryListener(telemetry_socket, state.me.secret, self._gathering, self._clock)
        )
        self._driver = Driver(
            state,
            store=self._store,
            procs=procs,
            stores=self._stores,
            assign=self._assign,
            assign_standbys=self._assign_standbys,
            process_alive=identity.process_alive,
            post=self._inbox.post,
            say=self._say,
            hangs=hangs,
            observer=self._observer,
            timekeeper=self._timekeeper,
            gathering=self._gathering,
        )
        self._master_port = edges.open_master_port(config, lambda: self._driver.state.round, cleanup)

    def _make_publisher(self, view: TerminalView, manager: Manager, cleanup: ExitStack) -> None:
        """Make what shows the job to people and programs, and the routines of the loop."""
        config, driver, procs = self._config, self._driver, self._procs
        sampler = cleanup.enter_context(Sampler(identity.visible_devices(config.slots)))
        self._events = cleanup.enter_context(EventFile(self._run_folder, self._note_run))
        meter = Meter(
            config,
            driver,
            self._store,
            procs.step_times,
            self._saver.reports,
            procs.page_contents,
            lambda: self._saver.footprint,
        )
        pages = Pages(self._clock)
        self._publisher = Publisher(
            config,
            driver,
            self._store,
            procs.progress,
            view,
            meter,
            pages,
            sampler,
            self._timekeeper,
            self._gathering,
            self._events,
            Timeline(self._events, self._began_at),
            self._observer,
        )
        cleanup.callback(self._publisher.close)
        self._service = Service(manager, lambda: driver.state)
        self._routines = [self._reserve.routine, self._publisher.routine, self._service.routine]
        run_folder = self._destinations.run_folder
        self._debugging = Debugging(driver, procs, self._store, run_folder) if config.debug else None
        if self._debugging is not None:
            self._routines.append(self._debugging.routine)
        if self._replica_listener is not None:
            announcement = etcd_peers.Announcement(self._replica_listener[1], driver, self._store)
            self._routines.append(announcement.routine)
        self._served_at = edges.serve_pages(config, pages, cleanup)

    # ------------------------------------------------------------ what the parts call

    def _reify(self, number: int, envs: dict[int, dict[str, str]]) -> LogDest:
        return self._destinations.reify(number, envs)

    def _say(self, reason: Reason) -> None:
        if isinstance(reason, ScriptCheckpointed) and reason.path:
            self._snapshot = reason.path
        log.reason(self._log, reason, self._clock())
        self._publisher.note(reason, self._clock())

    def _assign(self, round: Round, member: Member) -> tuple[Assignment, ...]:
        if self._master_port is not None:
            self._master_port.round_begins()
        return assignments(round, member, self._setting)

    def _assign_standbys(self, slots: tuple[int, ...], began: float) -> tuple[Assignment, ...]:
        return standbys(slots, tuple(range(self._config.slots)), self._setting, began)

    def _run_folder(self) -> Path | None:
        if self._driver.state.registered:  # an agent that the job refused keeps no folder of logs
            self._destinations.begin(self._config.job)
        return self._destinations.run_folder()

    def _note_run(self, folder: Path) -> None:
        runs.note(runs.state_dir(), self._config.job, self._config.node, self._began_at, folder)

    # ------------------------------------------------------------ from the start to the end

    def announce(self) -> None:
        """Say that the agent has started."""
        config, served_at = self._config, self._served_at
        self.warden.on_lost(lambda: self._inbox.post(WardenLost()))
        self._events.write(run_summary.started(config, self._access, self._began_at))
        pages_at = f"; status and metrics are at {served_at}" if served_at else ""
        self._log.info(
            "agent.started",
            sentence=f"node {config.node} offers {describe.count(config.slots, 'slot')} to job "
            f"{config.job}{pages_at}",
            etcd=self._access.url,
            slots=config.slots,
            address=config.address,
            http=served_at or "off",
        )

    def serve(self) -> LeaveJob:
        """Take part in the job. Return why the agent left the job."""
        driver = self._driver
        try:
            driver.begin()
            self._inbox.serve(
                driver, self._clock, lambda now: min([routine(now) for routine in self._routines])
            )
        except Exception as error:
            if not self._reserve.explains(error):
                raise
            self._reserve.give()
            driver.left = LeaveJob(3, self._reserve.why)
            _end_workers(self._procs, self._config.policy.broken_s)
        assert driver.left is not None
        return driver.left

    def conclude(self, left: LeaveJob) -> tuple[int, str]:
        """Finish: pass on the error file, tell the last telemetry, commit, write events. Return the exit code
        and the text of the closing screen."""
        config, driver, saver = self._config, self._driver, self._saver
        self._service.ends(left.why)
        if not driver.state.registration.joined and driver.state.etcd.silent is not None:
            left = replace(left, why=run_summary.why_silent(left.why, self._access))
        last = run_summary.ended_round(driver, left)
        if last is not None:
            run_summary.pass_on_error_file(config, last, self._procs.error_file)
        ended_at = self._clock()
        ledger = self._timekeeper.close(driver.state, ended_at)
        ledgers, spent = self._gathering.farewell(
            driver.state, ledger, ended_at, known=self._timekeeper.resumed
        )
        with Signals(self._handled, saver.hurry):
            # The run's events include the last commits.
            saver.close(FINISH_S_MAX if last is not None and left.code < 128 else FINISH_S)
        self._publisher.farewell(ended_at)
        seen = driver.state.round if driver.state.registration.joined else None
        lasted_s = ended_at - run_summary.began_at(last, self._began_at)
        said = run_summary.closing_text(config, last, left, lasted_s, spent, saver.unsaved, seen)
        if left.code == 0:
            kept = run_summary.kept(config, self._destinations.run_folder(), saver.newest, self._snapshot)
            said = "\n".join([said, *kept])
        if self._debugging is not None:
            said = "\n".join([said, *self._debugging.close()])
        self._events.write(run_summary.ended(config, last, left, said, ledgers, ended_at))
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
