"""A connection to etcd: requests with timeouts over several endpoints, and typed errors.

A connection uses one endpoint at a time, and switches to the next when that endpoint fails. Each endpoint has
its own channel, so that host names are resolved again, and certificates are checked against the intended
host. (gRPC's own address lists allow neither.)
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from elasticd.etcd._client3 import Stubs, grpc, rpc
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.errors import (
    Compacted,
    LeaseGone,
    NoLogins,
    NoSpace,
    NoSuchName,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    TokenExpired,
    WrongEndpoint,
)

RETRY_PAUSE_S = 0.1  # the pause between two attempts
_ROLES_CHANGED = ("revision of auth store is old", "revision in header is old")

_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),  # etcd disconnects clients that ping more often than every 5 s
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),  # otherwise a dead connection is noticed after 65 s
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # this option also limits the time of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", -1),  # a listing of a thousand nodes exceeds the default
    ("grpc.max_send_message_length", -1),
    # One connection per channel, so that a stuck connection blocks no other channel.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # no proxy, since etcd is on the cluster's network
    ("grpc.enable_retries", 0),  # this module decides what to retry
]
# With this metadata, a member without a leader returns an error at once and does not block the request.
_REQUIRE_LEADER = (("hasleader", "true"),)


class Connection:
    """Sends requests to etcd. Safe for use by many threads; ``close`` cancels pending requests."""

    def __init__(self, access: EtcdAccess) -> None:
        self.access = access
        self._lock = threading.Lock()
        self._current = 0
        self._channels: dict[int, tuple[Any, Stubs]] = {}
        self._tokens: dict[int, str] = {}
        self._logins: dict[int, list[Callable[[str | StoreError], None]]] = {}  # what waits for a login
        self._closed = threading.Event()
        self._credentials = _credentials(access) if access.tls else None

    @property
    def endpoint(self) -> str:
        """The endpoint in use, as ``host:port``."""
        return self.access.endpoints[self._current]

    def call(
        self,
        method: str,
        request: Any,
        *,
        idempotent: bool = False,
        timeout_s: float | None = None,
        tries: int | None = None,
    ) -> Any:
        """Send a request, and return the response. One attempt takes ``timeout_s`` at most. A request is
        tried again, at the next endpoint if there is one, if it is idempotent or certainly had no effect.
        Attempts end after ``tries``, or when the time is over (the timeout once; for an idempotent request
        once per endpoint). Raises StoreError."""
        limit_s = self.access.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s * (len(self.access.endpoints) if idempotent else 1)
        logged_in_again = False
        while True:
            tries = None if tries is None else tries - 1
            index = self._current
            try:
                left_s = max(0.001, min(limit_s, deadline - time.monotonic()))
                stub = getattr(self._stubs(index), method)
                return stub(request, timeout=left_s, metadata=self._metadata(index))
            except (grpc.RpcError, ValueError) as error:
                failure = self._failed(error, index)
            except StoreError as error:  # the login failed
                failure = error
            if isinstance(failure, TokenExpired) and not logged_in_again:
                logged_in_again = True
                continue
            again = isinstance(failure, StoreUnavailable) and (idempotent or not failure.sent) and tries != 0
            again = again or isinstance(failure, TokenExpired)
            again = again and not isinstance(failure, NoSpace)
            if not again or deadline - time.monotonic() < RETRY_PAUSE_S or self._closed.wait(RETRY_PAUSE_S):
                raise failure

    def start(
        self, method: str, request: Any, *, timeout_s: float, done: Callable[[Any | StoreError], None]
    ) -> None:
        """Send a request once, without waiting; log in first if there is no login. ``done`` gets the response
        or the error, in any thread."""
        index = self._current

        def logged_in(outcome: str | StoreError) -> None:
            if isinstance(outcome, StoreError):
                done(outcome)
            else:
                self._start(index, method, request, outcome, timeout_s, done)

        with self._lock:  # etcd checks a password slowly: all that wait share one login
            token = self._tokens.get(index)
            waits = token is None and self.access.username is not None
            begins = waits and index not in self._logins
            if waits:
                self._logins.setdefault(index, []).append(logged_in)
        if not waits:
            self._start(index, method, request, token, timeout_s, done)
        elif begins:
            self._start(
                index,
                "authenticate",
                self._login(),
                None,
                timeout_s,
                lambda said: self._logged_in(index, said),
            )

    def _logged_in(self, index: int, said: Any | StoreError) -> None:
        """Tell all that wait for the login how it ended."""
        if isinstance(said, StoreUnavailable):
            said.sent = False  # the requests themselves were never sent
        outcome = said if isinstance(said, StoreError) else said.token
        with self._lock:
            waiting = self._logins.pop(index, [])
            if not isinstance(outcome, StoreError):
                self._tokens[index] = outcome
        for tell in waiting:
            tell(outcome)

    def _start(
        self,
        index: int,
        method: str,
        request: Any,
        token: str | None,
        timeout_s: float,
        done: Callable[[Any | StoreError], None],
    ) -> None:
        metadata = _REQUIRE_LEADER if token is None else (*_REQUIRE_LEADER, ("token", token))
        stubs = None
        try:
            _require_thread()
            stubs = self._stubs(index)
            future = getattr(stubs, method).future(request, timeout=timeout_s, metadata=metadata)
        except (grpc.RpcError, ValueError) as error:
            done(self._failed(error, index, token))
            return
        except StoreError as error:
            done(error)
            return
        except Exception as error:  # noqa: BLE001  # there is no thread, for example
            done(self._unsent(error, index, stubs))
            return

        def finished(future: Any) -> None:
            try:
                result = future.result()
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                done(self._failed(error, index, token))
            else:
                done(result)

        future.add_done_callback(finished)

    def stream(self, method: str, requests: Iterator[Any]) -> tuple[Any, Callable[[Exception], StoreError]]:
        """Open a stream. Return its call (to iterate and cancel), and a function that translates its final
        error and switches to the next endpoint. Raises StoreError."""
        index = self._current
        stubs = None
        try:
            _require_thread()
            metadata = self._metadata(index)
            stubs = self._stubs(index)
            call = getattr(stubs, method)(requests, metadata=metadata)
        except (grpc.RpcError, ValueError) as error:
            raise self._failed(error, index) from error
        except StoreError:
            raise
        except Exception as error:
            raise self._unsent(error, index, stubs) from error
        return call, lambda error: self._failed(error, index)

    def turn(self) -> None:
        """Switch to the next endpoint, because the present one does not respond."""
        self._turn_from(self._current)

    def close(self) -> None:
        """Cancel pending requests, and close the channels."""
        self._closed.set()
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel, _ in channels:
            channel.close()

    def _stubs(self, index: int) -> Stubs:
        with self._lock:
            if self._closed.is_set():
                raise StoreUnavailable("the connection to etcd is closed", sent=False)
            if index not in self._channels:
                endpoint = self.access.endpoints[index]
                channel = (
                    grpc.secure_channel(endpoint, self._credentials, options=_OPTIONS)
                    if self._credentials
                    else grpc.insecure_channel(endpoint, options=_OPTIONS)
                )
                self._channels[index] = channel, Stubs(channel)
            return self._channels[index][1]

    def _metadata(self, index: int) -> tuple[tuple[str, str], ...]:
        """Return the metadata of each request. Logs in first if a password is given."""
        if self.access.username is None:
            return _REQUIRE_LEADER
        token = self._tokens.get(index)
        if token is None:
            try:
                response = self._stubs(index).authenticate(self._login(), timeout=self.access.timeout_s)
            except grpc.RpcError as error:
                failure = self._failed(error, index)
                if isinstance(failure, StoreUnavailable):
                    failure.sent = False  # the request itself was never sent
                raise failure from error
            token = self._tokens[index] = response.token
        return (*_REQUIRE_LEADER, ("token", token))

    def _login(self) -> Any:
        return rpc.AuthenticateRequest(name=self.access.username, password=self.access.password)

    def _failed(self, error: Exception, index: int, token: str | None = None) -> StoreError:
        """Return the typed error. Switches away from a bad endpoint, and forgets an expired token. ``token``:
        of the request, if it is known."""
        failure = translate(error, self.access.endpoints[index])
        failure.__cause__ = error
        if isinstance(failure, StoreUnavailable) and not isinstance(failure, NoSpace):
            self._turn_from(index)
        elif isinstance(failure, TokenExpired) and token in (None, self._tokens.get(index)):
            self._tokens.pop(index, None)
        return failure

    def _unsent(self, error: Exception, index: int, stubs: Stubs | None) -> StoreError:
        """Return the error of a request that could not be sent. ``stubs``: of the channel, if gRPC failed.

        That channel is left alone for ever: gRPC may count on a thread that never started, so no answer would
        arrive, and to close or to delete the channel would wait for that thread.
        """
        failure = StoreUnavailable(f"a request to etcd could not be sent ({error})", sent=False)
        with self._lock:
            channel, present = self._channels.get(index, (None, None))
            lost = stubs is not None and present is stubs
            if lost:
                del self._channels[index]
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))
        if lost:
            self._logged_in(index, failure)  # a login in this channel would get no answer
        return failure

    def _turn_from(self, index: int) -> None:
        with self._lock:
            if self._current == index:  # otherwise another thread has switched already
                self._current = (index + 1) % len(self.access.endpoints)


def _require_thread() -> None:
    """Raise RuntimeError if no thread can start. gRPC starts one for a request, and its channel is of no more
    use if that fails."""
    thread = threading.Thread(target=bool, name="etcd-thread")
    thread.start()
    thread.join()


def translate(error: Exception, endpoint: str) -> StoreError:
    """Return the typed error for a gRPC error. Never raises."""
    if isinstance(error, grpc.FutureCancelledError) or not isinstance(error, grpc.RpcError):
        return StoreUnavailable("the connection to etcd was closed")  # a closed channel raises ValueError
    code, details = error.code(), (error.details() or "").removeprefix("etcdserver: ")
    status = grpc.StatusCode
    if code is status.UNAVAILABLE and details.startswith("failed to connect to all addresses"):
        return StoreUnavailable(f"no connection to etcd at {endpoint} ({_last(details)})", sent=False)
    if code is status.UNAVAILABLE and details == "no leader":  # the member looks before it does anything
        return StoreUnavailable(f"etcd at {endpoint} knows no leader", sent=False)
    if code is status.DEADLINE_EXCEEDED:
        return StoreUnavailable(f"etcd at {endpoint} did not answer in time")
    if code is status.UNAUTHENTICATED:
        return TokenExpired(f"etcd at {endpoint} no longer accepts our login ({details})")
    if code is status.PERMISSION_DENIED:
        return StoreRefused(f"etcd at {endpoint} denies access: {details}")
    if code is status.INVALID_ARGUMENT and "user name is empty" in details:
        return StoreRefused(f"etcd at {endpoint} asks for a user name and password, or a client certificate")
    if code in (status.INVALID_ARGUMENT, status.UNKNOWN) and "authentication failed" in details:
        return StoreRefused(f"etcd at {endpoint} does not accept this user name and password")
    if code is status.FAILED_PRECONDITION and "authentication is not enabled" in details:
        return NoLogins(f"etcd at {endpoint} has no logins enabled; leave out the user name and password")
    if any(words in details for words in _ROLES_CHANGED):
        return TokenExpired(f"users or roles of etcd at {endpoint} have just changed ({details})")
    if code is status.FAILED_PRECONDITION and details in ("user name not found", "role name not found"):
        return NoSuchName(f"etcd at {endpoint} has no such user or role: {details}")
    if code is status.NOT_FOUND and "lease not found" in details:
        return LeaseGone("the lease has ended")
    if code is status.OUT_OF_RANGE and "compacted" in details:
        return Compacted("the revision is no longer kept")
    if code is status.RESOURCE_EXHAUSTED and "space exceeded" in details:
        return NoSpace(endpoint)
    if code is status.RESOURCE_EXHAUSTED:
        return StoreUnavailable(f"etcd at {endpoint} is at a limit: {details}", sent=False)
    if code in (status.INVALID_ARGUMENT, status.FAILED_PRECONDITION):
        return StoreRefused(f"etcd at {endpoint} refuses the request: {details}")
    if code is status.UNIMPLEMENTED:
        return WrongEndpoint(f"what listens at {endpoint} is not an etcd v3 ({details or 'unknown method'})")
    return StoreUnavailable(f"etcd at {endpoint} failed: {details or code.name.lower()}")


def _last(details: str) -> str:
    """Return the cause, which ends gRPC's long message."""
    return details.rpartition("last error: ")[2].removeprefix("UNKNOWN: ").removeprefix("UNAVAILABLE: ")


def _credentials(access: EtcdAccess) -> Any:
    return grpc.ssl_channel_credentials(
        root_certificates=access.cacert.read_bytes() if access.cacert else _machine_authorities(),
        private_key=access.key.read_bytes() if access.key else None,
        certificate_chain=access.cert.read_bytes() if access.cert else None,
    )


def _machine_authorities() -> bytes | None:
    """Return the authorities that this machine trusts; None selects gRPC's own list."""
    import ssl
    from pathlib import Path

    cafile = ssl.get_default_verify_paths().cafile
    return Path(cafile).read_bytes() if cafile else None
