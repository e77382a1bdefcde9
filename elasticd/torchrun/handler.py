"""The rendezvous of plain torchrun on etcd v3: the side of one node.

``decide`` decides, ``node_membership`` talks to etcd, ``c10d_store`` meets the other members at the round's
store; this module carries out the decisions. No node is special. Nothing here polls: a node waits until etcd
reports a change.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elasticd.etcd.access import EtcdAccess, hosts_and_ports, routed_address
from elasticd.etcd.errors import StoreError, StoreUnavailable
from elasticd.torchrun import BACKEND
from elasticd.torchrun.c10d_store import Arrival, listen
from elasticd.torchrun.decide import (
    EnterRound,
    Form,
    Register,
    Rejected,
    Unreachable,
    Wait,
    changes_pending,
    decide,
    lost_members,
)
from elasticd.torchrun.guard import Guard, boot_time_s
from elasticd.torchrun.node_membership import GuardedView, Membership
from elasticd.torchrun.rendezvous_records import (
    CorruptError,
    NodeRecord,
    RendezvousClosed,
    RendezvousRound,
    decode,
)
from elasticd.torchrun.settings import Settings

log = logging.getLogger("elasticd.torchrun")

RETRY_S = 0.5  # the pause between attempts to write while etcd does not respond


class EtcdV3RendezvousHandler(RendezvousHandler):
    """Torch's RendezvousHandler, based on leases and compare-and-swap; ``settings`` lists the parameters.

    Torch's contract leaves a choice for ``shutdown``. Here it closes the rendezvous for all nodes only if the
    caller is a member of the live round, whose job is then over. Any other node just leaves. A rendezvous
    that was closed because the job failed can be joined again once all nodes of that attempt are gone.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._node = ""  # a new name each time this node joins
        self._address = settings.address or _own_address(settings.access)
        self._membership: Membership | None = None
        self._guard: Guard | None = None
        self._sure_until_s = float("inf")  # the last deadline that was sent to the guard (boot time)
        self._live: RendezvousRound | None = None  # the round this node is in
        self._entered = 0  # the newest round this node has entered
        self._ended = False  # the round was closed as finished
        self._store: Store | None = None

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store that the first node's agent hosts; False if torch's environment
        variable disables it."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    # ---- joining

    def next_rendezvous(self) -> RendezvousInfo:
        self._live, self._store = None, None
        try:
            membership = self._open()
            info = self._join(membership)
        except BaseException as error:
            self._record(f"{type(error).__name__}: {error}", NodeState.FAILED)
            self._leave()
            if isinstance(error, StoreError):
                raise RendezvousConnectionError(str(error)) from error
            raise
        self._record(f"joined round {self._entered} as rank {info.rank} of {info.world_size}", rank=info.rank)
        return info

    def _join(self, membership: Membership) -> RendezvousInfo:
        deadline = time.monotonic() + self._settings.join_timeout_s
        redundant = False
        listener: socket.socket | None = None
        record: NodeRecord | None = None
        try:
            while True:
                sight = membership.sight()
                if sight is None:
                    self._wait(membership, None, deadline)
                    continue
                if listener is None or record is None:
                    listener = self._listen()
                    record = self._record_of(listener, sight)
                mine = sight.view.nodes.get(self._node)
                if mine is not None and mine.record != record:
                    self._try(membership, sight, partial(membership.put, record, sight.own_token))
                    continue
                now = time.monotonic()
                match decide(self._node, self._address, sight.view, self._settings.rules, now):
                    case Register():
                        self._try(membership, sight, partial(membership.put, record, sight.own_token))
                    case EnterRound(round_, rank):
                        self._entered = round_.number
                        info = self._enter(membership, round_, rank, listener)
                        if info is not None:
                            return info
                        log.warning("round %d lost a member before it began; trying again", round_.number)
                        listener.close()
                        listener = record = None
                        deadline = max(deadline, time.monotonic() + self._settings.ttl_s)
                    case Form(round_):
                        formed = replace(round_, formed_at=time.time())
                        self._try(membership, sight, partial(membership.form, formed, sight))
                    case Wait(why, until, redundant):
                        if redundant:
                            deadline = now + self._settings.join_timeout_s
                        elif now >= deadline:
                            raise RendezvousTimeoutError(
                                f"no round of {self._settings.run_id!r} formed within "
                                f"{self._settings.join_timeout_s:g} s; waiting {why}"
                            )
                        self._wait(membership, sight, deadline if until is None else min(until, deadline))
                    case Rejected(round_):
                        raise self._refusal(round_, redundant)
                    case Unreachable(node, address):
                        raise RendezvousConnectionError(
                            f"this node is at {self._address} and {node} is at {address}; a loopback address "
                            "means another machine on each: give --local-addr an address the others can reach"
                        )
        finally:
            if listener is not None:
                listener.close()

    def _record_of(self, listener: socket.socket, sight: GuardedView) -> NodeRecord:
        """Return this node's record, which asks for a round later than any so far."""
        last = sight.view.round.number if sight.view.round else 0
        return NodeRecord(
            after=max(last, self._entered),
            address=self._address,
            port=listener.getsockname()[1],
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def _wait(self, membership: Membership, sight: GuardedView | None, deadline: float) -> None:
        """Wait for a change. Raises RendezvousConnectionError if etcd is silent for too long."""
        left_s = max(deadline - time.monotonic(), 0)
        patience_s = self._settings.silence_s - membership.silent_s
        if patience_s <= 0 and (error := membership.diagnose()) is not None:
            raise _silent(membership, error) from error
        membership.wait(sight, min(left_s, max(patience_s, RETRY_S)) + 0.001)
        if sight is None and time.monotonic() >= deadline:
            raise RendezvousTimeoutError(
                f"etcd at {self._settings.access.url} did not respond in {self._settings.join_timeout_s:g} s"
            )

    def _listen(self) -> socket.socket:
        try:
            return listen(self._address)
        except OSError as error:
            raise RendezvousConnectionError(
                f"this node cannot listen on {self._address} ({error}); give its address with --local-addr"
            ) from error

    def _try(self, membership: Membership, sight: GuardedView, write: Callable[[], bool]) -> None:
        """Write, based on ``sight``. The outcome is ignored: the next sight shows it. Raises
        RendezvousConnectionError if etcd is silent for too long."""
        try:
            written = write()
        except (StoreError, RendezvousConnectionError) as error:
            if membership.silent_s > self._settings.silence_s:
                raise _silent(membership, error) from error
            written = False
        if not written:
            membership.wait(sight, RETRY_S)

    def _refusal(self, round_: RendezvousRound, redundant: bool) -> RendezvousError:
        closed = round_.closed
        assert closed is not None
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(closed.at))
        if redundant:
            return RendezvousGracefulExitError(
                f"the rendezvous {self._settings.run_id!r} was closed by {closed.by}; this node was a spare"
            )
        what = "its workers failed for good" if closed.failed else "the job is over"
        return RendezvousClosedError(
            f"the rendezvous {self._settings.run_id!r} was closed by {closed.by} at {when}, as {what}; "
            "another job needs another --rdzv-id"
        )

    # ---- in a round

    def _enter(
        self, membership: Membership, round_: RendezvousRound, rank: int, listener: socket.socket
    ) -> RendezvousInfo | None:
        """Meet the other members at the round's store. Return None if a member will not come."""
        arrival = Arrival(round_, rank, listener, self._settings.silence_s, membership.changed)
        while not arrival.ended:
            sight = membership.sight()
            if sight is not None and lost_members(round_, sight.view):
                break
            membership.wait(sight, self._settings.ttl_s, also=lambda: arrival.ended)
        if arrival.store is None:
            arrival.give_up()
            self._find_lost_member(membership, round_, arrival.error)
            return None
        self._live, self._store, self._ended = round_, arrival.store, False
        self._watch_over_workers()
        store = PrefixStore("elasticd/agents", arrival.store)
        host = round_.seats[0]
        if self.use_agent_store:
            where = RendezvousStoreInfo(host.address, host.port)
        else:
            where = RendezvousStoreInfo.build(rank, store, local_addr=self._address)
        return RendezvousInfo(store, rank, len(round_.seats), where)

    def _find_lost_member(
        self, membership: Membership, round_: RendezvousRound, error: Exception | None
    ) -> None:
        """Wait until etcd names the lost member, since the store may fail earlier. Raises
        RendezvousConnectionError if no member is lost."""
        deadline = time.monotonic() + 2 * self._settings.ttl_s
        while True:
            sight = membership.sight()
            if sight is not None and lost_members(round_, sight.view):
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                host = round_.seats[0]
                raise RendezvousConnectionError(
                    f"the {len(round_.seats)} nodes of round {round_.number} could not meet at its store, "
                    f"{host.address}:{host.port} on {host.node}: {error}"
                ) from error
            membership.wait(sight, left_s)

    def num_nodes_waiting(self) -> int:
        """Return the number of changes of membership that ask for a new round. Lost members count too,
        because torch's agent acts on this number alone."""
        membership = self._membership
        if membership is None or self._ended:
            return 0
        if membership.etcd_is_down:
            self._tell_guard(boot_time_s() + self._settings.ttl_s)
        try:
            sight = membership.sight()
        except (StoreError, RendezvousStateError) as error:
            log.debug("whether nodes wait is unknown: %s", error)
            return 0  # the present world still trains
        if sight is None or self._live is None:
            return 0
        last = sight.view.round
        if last is not None and last.closed is not None and not last.closed.failed:
            self._ended = True
        return changes_pending(self._node, self._live.number, sight.view, self._settings.rules)

    def _watch_over_workers(self) -> None:
        if self._guard is None:
            self._guard = Guard()
        self._tell_guard(self._sure_until_s)

    def _tell_guard(self, until_s: float) -> None:
        """Tell the guard until when the lease lives. Called in the lease's thread or the agent's."""
        self._sure_until_s = until_s
        if self._guard is not None:
            self._guard.member_until(until_s)

    # ---- closing

    def is_closed(self) -> bool:
        return (found := self._read_round(self._open())) is not None and found[0].closed is not None

    def set_closed(self) -> None:
        self._close(failed=False, as_member=False)

    def shutdown(self) -> bool:
        try:
            if self._live is not None and not self._ended:
                # Torch calls this in a finally clause: an active exception means that the job failed.
                self._close(failed=sys.exc_info()[0] is not None, as_member=True)
            return True
        except RendezvousError as error:
            log.warning("the rendezvous %s could not be closed: %s", self._settings.run_id, error)
            self._record(f"{type(error).__name__}: {error}", NodeState.FAILED)
            return False
        finally:
            self._live = None
            self._leave()

    def _close(self, *, failed: bool, as_member: bool) -> None:
        """Close the rendezvous. Raises RendezvousConnectionError if etcd does not respond within the close
        timeout."""
        membership = self._open()
        deadline = time.monotonic() + self._settings.close_timeout_s
        while True:
            try:
                round_, token = self._read_round(membership) or (RendezvousRound(0), 0)
                if round_.closed is not None or (as_member and round_.rank_of(self._node) is None):
                    return
                closed = replace(round_, closed=RendezvousClosed(self._node, time.time(), failed))
                if membership.close_round(closed, token, self._settings.closed_s, as_member=as_member):
                    self._record("closed the rendezvous", NodeState.SUCCEEDED)
                    return
                problem = RendezvousConnectionError("the state of the rendezvous kept changing")
            except RendezvousConnectionError as error:
                problem = error
            if as_member and not membership.holds_key:
                return  # the others continued without this node, and may close it themselves
            if time.monotonic() >= deadline:
                raise problem
            try:
                sight = membership.sight()
            except StoreError as error:
                raise RendezvousConnectionError(str(error)) from error
            membership.wait(sight, RETRY_S)

    def _read_round(self, membership: Membership) -> tuple[RendezvousRound, int] | None:
        found = membership.backend.get_state()
        if found is None:
            return None
        try:
            return decode(RendezvousRound, found[0], "round"), found[1]
        except CorruptError as error:
            raise RendezvousStateError(str(error)) from error

    # ---- coming and going

    def _open(self) -> Membership:
        if self._membership is None:
            self._sure_until_s = float("inf")
            self._node = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
            self._membership = Membership(
                self._settings.access,
                self._settings.run_id,
                self._node,
                self._settings.ttl_s,
                self._tell_guard,
            )
            atexit.register(self._leave)  # torchrun does not call shutdown if a signal ends it
            error = self._membership.diagnose()
            if isinstance(error, StoreUnavailable):
                log.warning("%s; trying for up to %g s", error, self._settings.silence_s)
            elif error is not None:
                self._leave()
                raise RendezvousConnectionError(str(error)) from error
        return self._membership

    def _leave(self) -> None:
        """Release the lease, the guard and the store. The other nodes notice at once."""
        membership, self._membership = self._membership, None
        if membership is not None:
            atexit.unregister(self._leave)
            membership.close()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()
        self._store = None

    def _record(self, message: str, state: NodeState = NodeState.RUNNING, rank: int | None = None) -> None:
        construct_and_record_rdzv_event(
            run_id=self._settings.run_id,
            message=f"node {self._node}: {message}",
            node_state=state,
            name=BACKEND,
            hostname=self._address,
            pid=os.getpid(),
            rank=rank,
        )


def _silent(membership: Membership, error: Exception) -> RendezvousConnectionError:
    return RendezvousConnectionError(f"etcd has been silent for {membership.silent_s:.0f} s: {error}")


def _own_address(access: EtcdAccess) -> str:
    """Return the address from which this machine reaches etcd: it is on the cluster's network, and does not
    depend on host names. Raises ValueError if no endpoint has a route."""
    places = hosts_and_ports(access.endpoints)
    if not places:  # etcd is a Unix socket, so all nodes are on this machine
        return "127.0.0.1"
    address = routed_address(places)
    if address is None:
        raise ValueError(
            "no endpoint of etcd has a route, so this node's address is unknown; give it with --local-addr"
        )
    return address
