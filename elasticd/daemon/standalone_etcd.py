"""The embedded etcd of a run without ``--etcd``. It starts while torch is imported, and restarts if it
dies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from elasticd.channel.warden_messages import Ended
from elasticd.daemon.config import CannotStart
from elasticd.etcd import registry
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.embedded import Embedded, fault_of
from elasticd.etcd.errors import StoreError
from elasticd.procs.warden_client import Warden, WardenError
from elasticd.telemetry import log, runs


class StandaloneEtcd:
    """A context manager that runs the server. The warden stops the server if the agent is killed.

    Raises CannotStart if a standalone run of this name is running, or no etcd is found.
    """

    def __init__(self, job: str, warden: Warden) -> None:
        self._job = job
        self._warden = warden
        self._started = time.time()
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._ending = threading.Event()
        self._died = threading.Event()
        try:
            if registry.find(job) is not None:
                raise CannotStart(
                    f"a standalone run named {job!r} is running on this machine already: give another --job"
                )
            self._server = Embedded(self._spawn)
        except OSError as error:
            raise CannotStart(str(error)) from error
        warden.remove_at_end(self._server.folder)
        self._thread = threading.Thread(target=self._serve, name="elasticd-etcd", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._died.set()
        self._thread.join()
        registry.unregister(self._job, self._server.folder)
        self._server.stop()

    def wait_until_ready(self) -> EtcdAccess:
        """Return the access to the server. Raise CannotStart if the server does not start."""
        self._ready.wait()
        if isinstance(self._error, StoreError | WardenError | OSError):
            raise CannotStart(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        return self._server.access

    def _serve(self) -> None:
        """Start the server, and again whenever it dies. Its data and leases survive the restart."""
        while True:
            self._died.clear()
            if self._ending.is_set():  # not before the clear, which may undo what __exit__ has set
                return
            try:
                self._server.start()
                registry.register(
                    self._job, self._server.endpoint, self._server.pid, self._started, self._server.folder
                )
            except Exception as error:  # noqa: BLE001  # wait_until_ready reports any error
                if not self._ready.is_set():
                    self._error = error
                    self._ready.set()
                    return
                log.get("elasticd.etcd").error("etcd.restart_failed", why=str(error))
                if isinstance(error, WardenError) or self._ending.wait(1.0):
                    return  # without the warden the agent leaves
                continue
            if not self._ready.is_set():
                self._warn()
            else:
                log.get("elasticd.etcd").warning("etcd.restarted", endpoint=self._server.endpoint)
            self._ready.set()
            self._died.wait()

    def _warn(self) -> None:
        """Warn of a version with a known fault, once per machine."""
        fault = fault_of(self._server.version)
        if not fault:
            return
        with suppress(OSError):  # the user was warned before, or the file cannot be written
            told = runs.state_dir() / f".told-etcd-{'.'.join(map(str, self._server.version or ()))}"
            os.close(os.open(told, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            advice = "this etcd keeps the data of this run only; a newer etcd on PATH is used instead"
            log.get("elasticd.etcd").warning("etcd.old", why=fault, note=advice)

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> int:
        return self._warden.spawn_service(
            argv, env=env, log_path=log_path, cwd=log_path.parent, ended=self._ended
        )

    def _ended(self, _: Ended) -> None:
        self._died.set()
