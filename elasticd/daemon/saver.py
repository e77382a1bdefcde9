"""The saver of an agent: started when a worker first asks for it, committing through etcd.

What is in etcd is the truth; the file beside the checkpoints is a copy for those who come without.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from elasticd.checkpoint import handover
from elasticd.checkpoint.alone import be_modest, say
from elasticd.checkpoint.pointer import FilePointer
from elasticd.checkpoint.saver import Saver
from elasticd.checkpoint.store import Store
from elasticd.core.facts import Checkpoint, Round, Saved
from elasticd.core.ports import Applied, Put, Unchanged
from elasticd.core.retention import Commit, Keep, Refused, commit
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.client import Client
from elasticd.etcd.errors import StoreError, StoreUnavailable
from elasticd.procs.keeper import Ended, KeeperError, Warden

_log = logging.getLogger(__name__)
_KEY: Final = "checkpoint"
_OPTIONS: Final = "ELASTICD_SAVER_OPTIONS"
_PASSWORD: Final = "ELASTICD_SAVER_PASSWORD"  # noqa: S105  its name
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = "import sys; sys.path.append({root!r}); from elasticd.daemon.saver import main; main()"
_AGAIN_S: Final = 0.5
PATIENCE_S: Final = 600.0  # with an etcd that is away


class EtcdPointer:
    """What was committed in ``store``, as etcd's key ``checkpoint`` has it.

    A commit is one transaction, guarded by the round of those who saved: once a later round has
    begun, they may be a world that lives on beside it. While etcd is away a commit waits.
    """

    def __init__(
        self,
        access: EtcdAccess,
        job: str,
        store: Store,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._access = access
        self._job = job
        self._url = store.url
        self._file = FilePointer(store)
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep

    def commit(self, new: Saved, keep: Keep, fence: int) -> Commit:
        """Raises ``retention.Refused``; TimeoutError where etcd stays away; OSError."""
        deadline = self._clock() + self._patience_s
        while True:
            try:
                made = self._try(new, keep, fence)
            except StoreUnavailable as error:
                if self._clock() >= deadline:
                    raise TimeoutError(f"etcd cannot be reached: {error}") from error
                made = None
            except StoreError as error:
                raise Refused(f"etcd refuses it: {error}") from error
            if made is not None:
                with contextlib.suppress(OSError):  # a copy; the next commit writes it again
                    self._file.write(made.checkpoint)
                return made
            self._sleep(_AGAIN_S)

    def _try(self, new: Saved, keep: Keep, fence: int) -> Commit | None:
        """None where something changed meanwhile, or it is not known whether it was done."""
        with Client(self._access) as client:
            round_, there = client.get(self._job, "round"), client.get(self._job, _KEY)
            known = self._known(there.fact if there else None)
            if new in known.saved:  # a former try that was not answered
                return Commit(known, ())
            number = round_.fact.number if round_ and isinstance(round_.fact, Round) else 0
            if number != fence:
                raise Refused(f"step {new.step} was saved in round {fence}, and now it is round {number}")
            made = commit(known, new, keep)
            guards = (
                Unchanged("round", round_.revision if round_ else 0),
                Unchanged(_KEY, there.revision if there else 0),
            )
            answer = client.transact(self._job, guards, (Put(_KEY, made.checkpoint),))
        return made if isinstance(answer, Applied) else None

    def _known(self, fact: object) -> Checkpoint:
        """Where etcd is new, or was told of another folder, the file's word is taken."""
        if isinstance(fact, Checkpoint) and fact.path == self._url:
            return fact
        return self._file.read()


def settle(access: EtcdAccess, job: str) -> None:
    """Bring the file up to etcd, in case a saver died between the two."""
    with contextlib.suppress(StoreError, OSError), Client(access) as client:
        there = client.get(job, _KEY)
        if there is not None and isinstance(there.fact, Checkpoint):
            FilePointer(there.fact.path).write(there.fact)


class SaverService:
    """Has a saver run for the workers of this agent while there is one that asks for it.

    Until then there is only a socket, ``name`` (for workers: ELASTICD_SAVER). It ends with the agent.
    """

    def __init__(self, warden: Warden, access: EtcdAccess, job: str, log_path: str = os.devnull) -> None:
        self._warden = warden
        self._log_path = log_path
        self._listener, self.name = handover.listen()
        self._closed = False
        options = {
            "endpoints": access.endpoints,
            "tls": access.tls,
            "cacert": str(access.cacert or ""),
            "cert": str(access.cert or ""),
            "key": str(access.key or ""),
            "username": access.username or "",
            "timeout_s": access.timeout_s,
            "job": job,
        }
        self._env = {**os.environ, _OPTIONS: json.dumps(options), _PASSWORD: access.password or ""}
        self._await()

    def _await(self) -> None:
        """Until somebody connects, whom the kernel has wait for the saver to take over."""
        watched = self._listener.dup()

        def asked() -> None:
            self._warden.unwatch(watched)
            threading.Thread(target=self._start, name="elasticd-saver", daemon=True).start()

        self._warden.watch(watched, asked)

    def _start(self) -> None:
        def ended(end: Ended) -> None:
            if not self._closed and not self._warden.closing:
                _log.warning("the saver of checkpoints ended (%s); another starts when asked for", end.code)
                self._await()

        if self._closed:
            return
        program = _PROGRAM.format(root=_ROOT)
        try:
            self._warden.spawn_service(
                [sys.executable, "-c", program],
                env=self._env,
                stdin=self._listener.fileno(),
                log_path=self._log_path,
                ended=ended,
            )
        except KeeperError as error:
            _log.warning("checkpoints cannot be saved: %s", error)

    def close(self) -> None:
        """No more are started; the warden ends the one there is."""
        self._closed = True
        self._listener.close()


def access_of(env: Mapping[str, str]) -> tuple[EtcdAccess, str]:
    """As the agent passed it on, and the job."""
    said = json.loads(env[_OPTIONS])
    return EtcdAccess(
        tuple(said["endpoints"]),
        tls=said["tls"],
        cacert=Path(said["cacert"]) if said["cacert"] else None,
        cert=Path(said["cert"]) if said["cert"] else None,
        key=Path(said["key"]) if said["key"] else None,
        username=said["username"] or None,
        password=env.get(_PASSWORD) or None,
        timeout_s=said["timeout_s"],
    ), said["job"]


def main() -> None:
    """The process. Its standard input is the socket to listen at."""
    be_modest()
    access, job = access_of(os.environ)
    settle(access, job)

    listener = socket.socket(fileno=0)
    Saver(
        listener, committer_of=lambda store: EtcdPointer(access, job, store), linger_s=None, say=say
    ).serve()
