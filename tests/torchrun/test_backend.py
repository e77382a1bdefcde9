"""Torch's contract for a rendezvous back end: state fenced by tokens."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError

from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.connection import Connection
from elasticd.etcd.embedded import Embedded
from elasticd.torchrun.backend import EtcdV3RendezvousBackend, unwrap, wrap


@pytest.fixture
def key(run_id: str) -> bytes:
    return f"/backend/{run_id}".encode()


@pytest.fixture
def backend(etcd: Embedded, key: bytes) -> Iterator[EtcdV3RendezvousBackend]:
    connection = Connection(etcd.access)
    yield EtcdV3RendezvousBackend(connection, key)
    connection.close()


def written(
    backend: EtcdV3RendezvousBackend, state: bytes, token: object = None
) -> tuple[bytes, object, bool]:
    result = backend.set_state(state, token)
    assert result is not None
    return result


def test_the_back_end_has_torchrun_s_name_for_it_and_no_state_at_first(
    backend: EtcdV3RendezvousBackend,
) -> None:
    assert backend.name == "etcd-v3"
    assert backend.get_state() is None


def test_state_is_set_where_there_is_none_and_read_back(backend: EtcdV3RendezvousBackend) -> None:
    state, token, has_set = written(backend, b"x")
    assert (state, has_set) == (b"x", True)
    assert backend.get_state() == (b"x", token)


def test_the_current_token_replaces_the_state_and_an_old_one_changes_nothing(
    backend: EtcdV3RendezvousBackend,
) -> None:
    _, first, _ = written(backend, b"x")
    state, second, has_set = written(backend, b"y", first)
    assert (state, has_set) == (b"y", True) and second != first
    assert written(backend, b"z", first) == (b"y", second, False)
    assert written(backend, b"y", first) == (b"y", second, False), "though the state is the same"


@pytest.mark.parametrize("token", [None, "invalid", b"invalid", 10**15, 0])
def test_no_token_or_a_wrong_one_changes_nothing(backend: EtcdV3RendezvousBackend, token: object) -> None:
    _, first, _ = written(backend, b"x")
    assert written(backend, b"y", token) == (b"x", first, False)


def test_a_token_where_there_is_no_state_sets_none(backend: EtcdV3RendezvousBackend) -> None:
    assert backend.set_state(b"x", 7) is None
    assert backend.set_state(b"x", "invalid") is None
    assert backend.get_state() is None


@pytest.mark.parametrize(
    "value", [b"", b"non-JSON", b"{}", b"[]", b'{"base64":"?"}', b"\xff\xfe", pickle.dumps(1)]
)
def test_a_corrupt_state_raises_an_error(
    etcd: Embedded, backend: EtcdV3RendezvousBackend, key: bytes, value: bytes
) -> None:
    with Client(etcd.access) as client:
        client.swap_raw(key, value, 0)
    with pytest.raises(RendezvousStateError, match="is corrupt"):
        backend.get_state()


def test_a_missing_connection_raises_an_error(key: bytes) -> None:
    connection = Connection(EtcdAccess(("127.0.0.1:1",), timeout_s=0.5))
    backend = EtcdV3RendezvousBackend(connection, key)
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()
    with pytest.raises(RendezvousConnectionError):
        backend.set_state(b"x")
    connection.close()


@pytest.mark.parametrize(
    "state",
    [b"", b"x", b"\x00\xff", b'{"a":1}', b'{ "a": 1 }', b'"x"', b"null", "ü".encode(), b"[" * 100_000],
)
def test_any_bytes_survive_and_the_value_is_json(state: bytes) -> None:
    assert unwrap(wrap(state), b"key") == state
    json.loads(wrap(state))
