"""Find out why an etcd cannot be used, by a direct connection to its port.

gRPC reports "unavailable" for a wrong scheme, a wrong certificate and a wrong port alike. The first bytes of
the server tell them apart: connect, do the TLS handshake if the scheme is https, start HTTP/2, and read.
"""

from __future__ import annotations

import socket
import ssl

from elasticd.etcd.access import EtcdAccess, dial, host_and_port, is_unix
from elasticd.etcd.errors import StoreError, StoreRefused, StoreUnavailable, WrongEndpoint

# The preface, and a SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS = 4  # the type of the first frame from any HTTP/2 server
# The errors of a TLS handshake with a server that does not speak TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", "HTTP_REQUEST")


def diagnose(access: EtcdAccess) -> StoreError | None:
    """Return the first error that a person must fix, at any endpoint. If there is none, return
    StoreUnavailable if no endpoint can be reached, and None if at least one endpoint seems to work."""
    found = [_diagnose(access, endpoint) for endpoint in access.endpoints]
    unreachable = [error for error in found if isinstance(error, StoreUnavailable)]
    for error in found:
        if error is not None and not isinstance(error, StoreUnavailable):
            return error
    if len(unreachable) < len(found):
        return None
    return StoreUnavailable("; ".join(map(str, unreachable)), sent=False)


def _diagnose(access: EtcdAccess, endpoint: str) -> StoreError | None:
    host = "" if is_unix(endpoint) else host_and_port(endpoint)[0]
    try:
        sock = dial(endpoint, access.timeout_s)
    except socket.gaierror as error:
        return StoreUnavailable(f"the host of etcd endpoint {endpoint} is not known ({error.strerror})")
    except (ConnectionRefusedError, FileNotFoundError):
        return StoreUnavailable(f"nothing listens at {endpoint}; start etcd there or correct the address")
    except OSError as error:
        return StoreUnavailable(f"etcd endpoint {endpoint} cannot be reached ({error.strerror or error})")
    with sock:
        return _with_tls(access, endpoint, host, sock) if access.tls else _without_tls(access, endpoint, sock)


def _without_tls(access: EtcdAccess, endpoint: str, sock: socket.socket) -> StoreError | None:
    error = _judge(endpoint, _first_bytes(sock))
    if error is not None and _speaks_tls(endpoint, access.timeout_s):
        return WrongEndpoint(f"etcd at {endpoint} speaks TLS; use https://{endpoint} and its CA certificate")
    return error


def tls_context(access: EtcdAccess) -> ssl.SSLContext:
    """Return a TLS context like gRPC's. Raises StoreRefused for unusable files."""
    try:
        context = ssl.create_default_context(cafile=access.cacert)
    except (ssl.SSLError, OSError) as error:
        raise StoreRefused(
            f"the etcd CA certificate {access.cacert} cannot be used ({_reason(error)})"
        ) from error
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # which Python 3.13 has added, and gRPC has not
    context.set_alpn_protocols(["h2"])
    if access.cert is not None:
        try:
            context.load_cert_chain(access.cert, access.key)
        except (ssl.SSLError, OSError) as error:
            raise StoreRefused(
                f"the etcd client certificate {access.cert} and key {access.key} cannot be used "
                f"({_reason(error)})"
            ) from error
    return context


def _with_tls(access: EtcdAccess, endpoint: str, host: str, sock: socket.socket) -> StoreError | None:
    try:
        context = tls_context(access)
    except StoreRefused as error:
        return error
    try:
        tls = context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        trusted = access.cacert or "this machine's authorities"
        return StoreRefused(
            f"the certificate of etcd at {endpoint} is not valid for {trusted}: {error.verify_message}"
        )
    except TimeoutError:
        return _judge(endpoint, None)
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason not in _NO_TLS:
            return _client_certificate_refused(access, endpoint, error)
        return WrongEndpoint(f"what listens at {endpoint} does not speak TLS; use http://{endpoint}")
    with tls:
        try:
            first = _first_bytes(tls)
        except ssl.SSLError as error:  # in TLS 1.3, the server checks our certificate after the handshake
            return _client_certificate_refused(access, endpoint, error)
    return _judge(endpoint, first)


def _client_certificate_refused(access: EtcdAccess, endpoint: str, error: ssl.SSLError) -> StoreError:
    if access.cert is None:
        return StoreRefused(f"etcd at {endpoint} asks for a client certificate ({_reason(error)})")
    return StoreRefused(
        f"etcd at {endpoint} does not accept the certificate {access.cert} ({_reason(error)})"
    )


def _first_bytes(sock: socket.socket) -> bytes | None:
    """Return the server's reply to the start of HTTP/2: empty if the server closes the connection, None
    if it stays silent."""
    try:
        sock.sendall(_PREFACE)
        return sock.recv(64)
    except TimeoutError:
        return None
    except ssl.SSLError:
        raise
    except OSError:
        return b""


def _judge(endpoint: str, first: bytes | None) -> StoreError | None:
    """Judge a server by what ``_first_bytes`` returned."""
    if first is None:
        return StoreUnavailable(f"what listens at {endpoint} accepts connections but does not answer")
    if len(first) >= 9 and first[3] == _SETTINGS:
        return None
    return WrongEndpoint(f"what listens at {endpoint} is not an etcd v3")


def _speaks_tls(endpoint: str, timeout_s: float) -> bool:
    """Return whether a TLS handshake gets any TLS reply, including an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no data is sent; only the handshake matters
    try:
        with (
            dial(endpoint, timeout_s) as sock,
            context.wrap_socket(sock),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return reason.lower().replace("_", " ") if reason else str(error)
