"""The options that begin with --http: where metrics and the status page are served, and to whom."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from elasticd.cli.command_error import CommandError
from elasticd.cli.interfaces import host_is_loopback
from elasticd.cli.machine import is_local_address
from elasticd.cli.options import RunOptions
from elasticd.telemetry.http import Tls, context

HTTP_DEFAULT = ("127.0.0.1", 9408)


def http_place(asked: str | None) -> tuple[str, int] | None:
    """Return the host and port of --http; None for off. Raises CommandError.

    The default is loopback, because the pages show paths, hosts and errors.
    """
    if asked is None:
        return HTTP_DEFAULT
    if asked.strip().lower() in ("off", "none", ""):
        return None
    host, _, port = asked.strip().rpartition(":")
    host = host.strip("[]")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise CommandError(f"--http {asked!r} is neither HOST:PORT (127.0.0.1:9408) nor off.")
    if not is_local_address(host):
        raise CommandError(f"--http {asked}: {host} is not an address of this machine.")
    return host, int(port)


def http_tls(options: RunOptions) -> Tls | None:
    """Return the files of --http-cert and --http-key, which must be given together. Raises CommandError."""
    cert, key = options.http_cert, options.http_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        given, missing = ("--http-cert", "--http-key") if key is None else ("--http-key", "--http-cert")
        raise CommandError(f"{given} is given without {missing}; they only work together.")
    tls = Tls(cert, key)
    try:
        context(tls)
    except ssl.SSLError as error:
        raise CommandError(
            f"--http-cert {cert} and --http-key {key} are no PEM certificate and its unencrypted key"
            f" ({error.reason or 'not PEM'})."
        ) from error
    except OSError as error:
        raise CommandError(f"--http-cert {cert}, --http-key {key}: {error.strerror}.") from error
    return tls


def http_token(options: RunOptions) -> str | None:
    """Return the token in --http-token-file. Raises CommandError."""
    file = options.http_token_file
    if file is None:
        return None
    try:
        token = Path(file).read_text(encoding="ascii").strip()
    except OSError as error:
        raise CommandError(f"--http-token-file {file}: {error.strerror}.") from error
    except UnicodeDecodeError:
        token = ""
    if not token.isprintable() or not token or " " in token:
        raise CommandError(f"--http-token-file {file} holds no token: write one word of ASCII into it.")
    return token


def http_note(place: tuple[str, int] | None, tls: Tls | None, token: str | None) -> str | None:
    """Return a warning if other machines can read the pages; None otherwise."""
    if place is None or host_is_loopback(place[0]) or (tls and token):
        return None
    if token:
        return (
            "the token of --http-token-file crosses the network unencrypted without --http-cert, --http-key"
        )
    more = "--http-token-file" if tls else "--http-token-file, --http-cert and --http-key"
    return (
        f"every client of {place[0]}:{place[1]} can read this run's metrics, paths and errors without {more}"
    )
