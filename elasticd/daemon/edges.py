"""Functions that make the edges of an agent from its configuration."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack

from elasticd.core.agent_messages import StoreComplained, StoreFilled
from elasticd.core.facts import Round, SaverAddress
from elasticd.daemon.config import CannotStart, CommandKind, RunConfig
from elasticd.daemon.http_pages import Pages
from elasticd.daemon.master_port import MasterPort
from elasticd.daemon.node_saver import etcd_peers
from elasticd.daemon.worker_command import worker_command
from elasticd.etcd.errors import BadRecord, HistoryLost, NewerRecord, StoreError
from elasticd.etcd.store import EtcdLink, EtcdStore
from elasticd.procs.logdest import Reify
from elasticd.procs.output import Output
from elasticd.procs.warden_client import Warden
from elasticd.procs.workers import LocalProcs
from elasticd.telemetry import accepting, log
from elasticd.telemetry.http import HttpServer, Site
from elasticd.telemetry.liveview import TerminalView

LEASE_ALONE_S = 30 * 86_400.0


def store(
    config: RunConfig, link: EtcdLink, post: Callable[[StoreComplained | StoreFilled], None]
) -> EtcdStore:
    """Return the job's store in etcd. Errors are logged; errors that stop the agent are also posted."""
    logged = ""

    def complained(error: StoreError) -> None:
        nonlocal logged
        if str(error) != logged:  # log an error once, although every watch reports it
            logged = str(error)
            log.get("elasticd.agent").warning("etcd.complaint", why=logged)
        needed = isinstance(error, BadRecord) and error.key in ("spec", "round", f"nodes/{config.node}")
        if needed or isinstance(error, NewerRecord) or not isinstance(error, BadRecord):
            post(StoreComplained(str(error), forgot=isinstance(error, HistoryLost)))

    # The embedded etcd ends with the agent: no other agent waits for this lease to run out.
    lasts_s = LEASE_ALONE_S if config.etcd is None else None
    return EtcdStore(
        link,
        config.job,
        config.policy.node_ttl_s,
        lasts_s=lasts_s,
        problems=complained,
        full=lambda why: post(StoreFilled(why)),
    )


def procs(
    config: RunConfig, warden: Warden, view: TerminalView, reify: Reify, clock: Callable[[], float]
) -> LocalProcs:
    """Return the node's workers. Their output goes to the view."""
    output = Output(_Console(view))
    output.follow_window_size()
    logger = log.get("elasticd.agent")
    runs_python = config.command.kind is not CommandKind.PROGRAM
    return LocalProcs(
        warden,
        worker_command(config),
        base_env={
            **os.environ,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(config.signals),  # as torchrun's launcher does
            **config.env,
        },
        reify=reify,
        output=output,
        role=config.role,
        line_prefix=config.logs.line_prefix,
        whole_group=not runs_python,
        zygote=runs_python and not config.fresh_start and config.numa_binding is None,
        imports=() if config.virtual_local_rank and config.slots > 1 else config.imports,
        say=log.of_workers(logger),
        warn=logger.warning,
        duplicate_stdout=config.logs.duplicate_stdout,
        duplicate_stderr=config.logs.duplicate_stderr,
        clock=clock,
    )


def serve_pages(config: RunConfig, pages: Pages, cleanup: ExitStack) -> str:
    """Serve the agent's pages and return their URL; empty if they are not served. A failure is logged and
    does not stop training."""
    if config.http is None:
        return ""
    host, port = config.http
    try:
        site = Site(
            pages.by_path(),
            guarded=("/", "/status"),
            names=(config.node, socket.gethostname()),
            private=("/", "/status", "/metrics"),
            token=config.http_token,
        )
        server = cleanup.enter_context(HttpServer(host, port, site, config.http_tls))
    except OSError as error:
        log.get("elasticd.agent").warning("http.off", host=host, port=port, why=str(error))
        return ""
    return server.url


def open_master_port(
    config: RunConfig, round: Callable[[], Round | None], cleanup: ExitStack
) -> MasterPort | None:
    """Open the port of ``--master-port``, if the user named one. ``round``: see MasterPort. A failure is only
    logged: a script that reads MASTER_PORT needs no such port."""
    if config.master_port is None:
        return None
    hosts, port = config.master_port
    try:
        return cleanup.enter_context(MasterPort(hosts, port, round))
    except OSError as error:
        log.get("elasticd.agent").warning("master_port.off", port=port, why=error.strerror or str(error))
        return None


def listen_for_replicas(config: RunConfig) -> tuple[socket.socket, SaverAddress] | None:
    """Return the socket for other nodes' shards and its address; None without replication. Raise CannotStart
    if the agent cannot listen."""
    if not config.replicate:
        return None
    try:
        return etcd_peers.listen(config.node, config.address)
    except OSError as error:
        raise CannotStart(
            f"cannot listen on {config.address}, this node's --address, for --replicate: {error}"
        ) from error


def listen_for_agents(config: RunConfig) -> socket.socket:
    """Return the socket for other agents' telemetry. Raise CannotStart if the agent cannot listen."""
    try:
        return accepting.listen(config.address)
    except OSError as error:
        raise CannotStart(f"cannot listen on {config.address}, this node's --address: {error}") from error


class _Console:
    """Adapts the view to the console that ``procs.output.Output`` writes to."""

    def __init__(self, view: TerminalView) -> None:
        self._view = view

    def write(self, stream: int, data: bytes) -> None:
        self._view.write(stream, data)

    def is_terminal(self, stream: int) -> bool:
        return os.isatty(stream)
