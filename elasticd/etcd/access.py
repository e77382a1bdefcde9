"""The address of an etcd and the means to use it, parsed from the user's options and checked once."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_PORT = 2379
UNIX = "unix:"  # the prefix of an endpoint that is a Unix socket, as in gRPC
SOCKET_PATH_MAX = 107  # Linux's limit for the path of a socket, in bytes


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How to reach an etcd v3. ``endpoints`` are ``host:port`` (``[host]:port`` for IPv6), or ``unix:/path``
    for an etcd on this machine that listens on a Unix socket.

    With ``tls`` and without ``cacert``, the machine's trusted authorities apply. ``username`` and
    ``password`` need TLS; the password never appears in a repr. ``timeout_s`` limits one request.
    """

    endpoints: tuple[str, ...]
    tls: bool = False
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    timeout_s: float = 2.0

    @property
    def url(self) -> str:
        """The endpoints in the form that users write, without secrets."""
        scheme = "https" if self.tls else "http"
        return ",".join(e if is_unix(e) else f"{scheme}://{e}" for e in self.endpoints)


def parse_endpoints(
    text: str,
    *,
    cacert: str | Path | None = None,
    cert: str | Path | None = None,
    key: str | Path | None = None,
    username: str | None = None,
    password: str | None = None,
    timeout_s: float = 2.0,
) -> EtcdAccess:
    """Return the EtcdAccess for endpoints such as ``http://a:2379,http://b`` or ``unix:/path``, and the TLS
    options.

    Without a scheme, https applies if any TLS option is given, else http. Raises ValueError with one sentence
    for a person.
    """
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise ValueError("no etcd endpoint is given; expected something like http://host:2379")
    if not all(parts):
        raise ValueError(f"the etcd endpoints {_shown(text)!r} have an empty one between their commas")
    tls_options = {"CA certificate": cacert, "client certificate": cert, "client key": key}
    fallback = "https" if any(tls_options.values()) else "http"
    split = [_split(part, fallback) for part in parts]
    schemes = {scheme for scheme, _ in split}
    if len(schemes) > 1:
        raise ValueError(
            f"etcd endpoints mix {' and '.join(sorted(schemes))} ({_shown(text)}); use one of them for all"
        )
    tls = schemes == {"https"}
    for name, path in tls_options.items():
        if path is None:
            continue
        if not tls:
            raise ValueError(
                f"a {name} is given ({path}), but the etcd endpoints are not https://; use https://"
            )
        _check_readable(name, Path(path))
    if (cert is None) != (key is None):
        given, missing = ("certificate", "key") if key is None else ("key", "certificate")
        raise ValueError(f"an etcd client {given} is given without its {missing}; they only work together")
    if (username is None) != (password is None):
        given, missing = ("user name", "password") if password is None else ("password", "user name")
        how = " (--etcd-password-file, or ELASTICD_ETCD_PASSWORD)" if password is None else ""
        raise ValueError(f"an etcd {given} is given without a {missing}{how}")
    if username is not None and not tls:
        raise ValueError("an etcd password would be sent in the clear over http://; use https:// endpoints")
    return EtcdAccess(
        endpoints=tuple(dict.fromkeys(endpoint for _, endpoint in split)),
        tls=tls,
        cacert=Path(cacert) if cacert is not None else None,
        cert=Path(cert) if cert is not None else None,
        key=Path(key) if key is not None else None,
        username=username,
        password=password,
        timeout_s=timeout_s,
    )


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``; the host has no brackets."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def is_unix(endpoint: str) -> bool:
    return endpoint.startswith(UNIX)


def hosts_and_ports(endpoints: Iterable[str]) -> list[tuple[str, int]]:
    """Return the hosts and ports of the endpoints that are not Unix sockets."""
    return [host_and_port(endpoint) for endpoint in endpoints if not is_unix(endpoint)]


def routed_address(endpoints: Iterable[tuple[str, int]]) -> str | None:
    """Return the local address of the route to etcd, if possible one that is not loopback.

    No packet is sent. None if no endpoint resolves or has a route.
    """
    found: str | None = None
    for host, port in endpoints:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in infos:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    mine = str(probe.getsockname()[0])
            except OSError:  # there is no route, or this machine lacks IPv6
                continue
            if not ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
                return mine
            found = found or mine
    return found


def dial(endpoint: str, timeout_s: float) -> socket.socket:
    """Connect to an endpoint. Raises OSError."""
    if not is_unix(endpoint):
        return socket.create_connection(host_and_port(endpoint), timeout=timeout_s)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(endpoint.removeprefix(UNIX))
    except BaseException:
        sock.close()
        raise
    return sock


def _split(part: str, fallback: str) -> tuple[str, str]:
    """Return scheme and ``host:port`` of an endpoint; for a Unix socket, "unix" and the endpoint."""
    shown = _shown(part)
    if is_unix(part):
        path = "/" + part.removeprefix(UNIX).lstrip("/")
        if path == "/" or not part.startswith(f"{UNIX}/") or len(os.fsencode(path)) > SOCKET_PATH_MAX:
            raise ValueError(
                f"etcd endpoint {shown!r} is malformed; expected unix:/path/of/a/socket, "
                f"{SOCKET_PATH_MAX} bytes at most"
            )
        return "unix", UNIX + path
    if "://" not in part:
        part = f"{fallback}://{part}"
    try:
        url = urlsplit(part)
        port = DEFAULT_PORT if url.port is None else url.port
    except ValueError as error:
        raise ValueError(f"etcd endpoint {shown!r} is malformed: {error}") from None
    if url.scheme not in ("http", "https"):
        raise ValueError(
            f"etcd endpoint {shown!r} has the scheme {url.scheme!r}; expected http, https or unix"
        )
    if url.username is not None or url.password is not None:
        raise ValueError("an etcd endpoint carries a user name or password; give them as options instead")
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError(f"etcd endpoint {shown!r} has something after its port; expected scheme://host:port")
    if not url.hostname:
        raise ValueError(f"etcd endpoint {shown!r} names no host")
    if any(c.isspace() for c in url.hostname) or (":" in url.hostname and "[" not in url.netloc):
        raise ValueError(f"etcd endpoint {shown!r} is malformed; expected scheme://host:port")
    try:
        url.hostname.encode("idna")
    except UnicodeError as error:
        raise ValueError(
            f"etcd endpoint {shown!r} has an invalid host name: {error.__cause__ or error}"
        ) from None
    if port == 0:
        raise ValueError(f"etcd endpoint {shown!r} has port 0, which nobody can listen on")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return url.scheme, f"{host}:{port}"


def _shown(text: str) -> str:
    """Return the user's text for an error message, without user name and password."""
    return ",".join(
        f"{part.split('://', 1)[0]}://{part.rpartition('@')[2]}"
        if "://" in part and "@" in part
        else part.rpartition("@")[2]
        for part in text.split(",")
    )


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except FileNotFoundError:
        raise ValueError(f"the etcd {name} {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"the etcd {name} {path} cannot be read: {error.strerror}") from error
    if empty:  # gRPC would abort the process if the file were empty
        raise ValueError(f"the etcd {name} {path} is empty")
