from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticd.etcd.access import EtcdAccess, parse_endpoints


@pytest.mark.parametrize(
    ("text", "endpoints", "tls"),
    [
        ("http://a:2379", ("a:2379",), False),
        ("http://a", ("a:2379",), False),
        ("a:1,b", ("a:1", "b:2379"), False),
        ("https://a:1/", ("a:1",), True),
        (" http://a:1 , http://b:2,http://a:1", ("a:1", "b:2"), False),
        ("http://[::1]:7", ("[::1]:7",), False),
        ("http://[fe80::1]", ("[fe80::1]:2379",), False),
        ("HTTP://Etcd-0.Svc:1", ("etcd-0.svc:1",), False),
        ("unix:/run/etcd/clients:1", ("unix:/run/etcd/clients:1",), False),
        ("unix:///run/etcd.sock", ("unix:/run/etcd.sock",), False),
    ],
)
def test_endpoints_are_taken_as_people_write_them(text: str, endpoints: tuple[str, ...], tls: bool) -> None:
    access = parse_endpoints(text)
    assert (access.endpoints, access.tls) == (endpoints, tls)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no etcd endpoint"),
        (" , ", "no etcd endpoint"),
        ("http://a,,http://b", "empty one"),
        ("http://a,https://b", "mix http and https"),
        ("etcd://a:1", "scheme 'etcd'"),
        ("unix:etcd.sock", "expected unix:/path"),
        ("unix://", "expected unix:/path"),
        ("unix:/" + "l" * 107, "107 bytes at most"),
        ("unix:/etcd.sock,http://a", "mix http and unix"),
        ("http://", "names no host"),
        ("http://:2379", "names no host"),
        ("http://a:port", "malformed"),
        ("http://a:99999", "malformed"),
        ("http://a:0", "port 0"),
        ("http://::1:2379", "malformed"),
        ("http://[::1", "malformed"),
        ("http://a b:1", "malformed"),
        ("http://etcd..svc:2379", "invalid host name: label empty or too long"),
        (f"http://{'a' * 64}:2379", "invalid host name: label too long"),
        ("http://a:1/v3", "after its port"),
        ("http://a:1?x=1", "after its port"),
        ("http://me:s3cret@a:1", "give them as options"),
    ],
)
def test_a_bad_endpoint_gets_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse_endpoints(text)
    assert "\n" not in str(error.value)
    assert "s3cret" not in str(error.value)


def test_no_error_shows_a_password_typed_into_an_endpoint() -> None:
    for text in (
        "https://me:s3cret@a:1,http://b",
        "http://me:s3cret@a:port",
        "ftp://me:s3cret@a",
        "me:s3cret@a,,",
    ):
        with pytest.raises(ValueError, match="etcd") as error:
            parse_endpoints(text)
        assert "s3cret" not in str(error.value)


def test_tls_options_without_a_scheme_mean_https(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("x")
    assert parse_endpoints("a:1", cacert=ca) == EtcdAccess(("a:1",), tls=True, cacert=ca)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cacert": "missing.pem"}, "CA certificate .*missing.pem does not exist"),
        ({"cert": "there.pem"}, "client certificate is given without its key"),
        ({"key": "there.pem"}, "client key is given without its certificate"),
        ({"cert": "there.pem", "key": "missing.pem"}, "client key .*missing.pem does not exist"),
        ({"cacert": "."}, "cannot be read"),
        ({"cacert": "empty.pem"}, "CA certificate .*empty.pem is empty"),
        ({"cert": "there.pem", "key": "empty.pem"}, "client key .*empty.pem is empty"),
        ({"username": "me"}, "user name is given without a password .--etcd-password-file, or"),
        ({"password": "s3cret"}, "password is given without a user name"),
    ],
)
def test_bad_tls_options_get_one_sentence(options: dict[str, str], says: str, tmp_path: Path) -> None:
    (tmp_path / "there.pem").write_text("x")
    (tmp_path / "empty.pem").touch()
    paths: dict[str, Any] = {
        name: value if name in ("username", "password") else tmp_path / value
        for name, value in options.items()
    }
    with pytest.raises(ValueError, match=says) as error:
        parse_endpoints("https://a:1", **paths)
    assert "s3cret" not in str(error.value)


def test_tls_options_or_passwords_with_http_are_refused(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    with pytest.raises(ValueError, match="use https://"):
        parse_endpoints("http://a:1", cacert=ca)
    with pytest.raises(ValueError, match="in the clear"):
        parse_endpoints("http://a:1", username="me", password="s3cret")


def test_the_password_is_in_no_repr() -> None:
    access = parse_endpoints("https://a:1", username="me", password="s3cret")
    assert "s3cret" not in repr(access)
    assert "s3cret" not in str(access)
    assert "s3cret" not in access.url
