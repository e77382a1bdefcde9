"""Passwords, from a file, a pipe or the environment, and never from a command line."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from elasticd.cli.command_error import CommandError
from elasticd.procs.linux import hide_memory

VARIABLE = "ELASTICD_ETCD_PASSWORD"
MOST = 72  # bytes; etcd's bcrypt ignores further bytes, or rejects the password
_READ_MAX = 4096


def of_login(options: Mapping[str, Any]) -> str | None:
    """Return the password for --etcd-user. ``options``: click's values of ``etcd_options``. Raises
    CommandError."""
    file = options.get("etcd_password_file")
    if not options.get("etcd_user"):
        if file is not None:
            raise CommandError(f"--etcd-password-file {file} is given without --etcd-user.")
        return None  # a password in the environment needs --etcd-user too
    hide_memory()  # hide the password from the scripts that the agent runs
    return os.environ.get(VARIABLE) if file is None else read(file)


def read(file: Path) -> str:
    """Return the line in the file; ``-`` is standard input. Raises CommandError."""
    shown = "standard input" if str(file) == "-" else str(file)
    try:
        if str(file) == "-":
            if sys.stdin.isatty():
                return _checked(click.prompt("Password", hide_input=True, err=True), shown)
            return _checked(sys.stdin.read(_READ_MAX), shown)
        with file.open(encoding="utf-8") as opened:
            return _checked(opened.read(_READ_MAX), shown)
    except OSError as error:
        raise CommandError(f"the password cannot be read from {shown}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"the password in {shown} is not text in UTF-8.") from error


def _checked(text: str, shown: str) -> str:
    password = text.removesuffix("\n").removesuffix("\r")
    if not password:
        raise CommandError(f"there is no password in {shown}: it is empty.")
    if not password.isprintable():
        raise CommandError(f"the password in {shown} is more than one line, or has unprintable characters.")
    return password


def check_length(password: str) -> str:
    """Return the password if etcd uses all of it. Raises CommandError."""
    if (length := len(password.encode())) > MOST:
        raise CommandError(
            f"the password is {length} bytes long, and etcd uses {MOST} at most: choose a shorter one."
        )
    return password


def make(file: Path) -> str:
    """Make a password, and write it to a new file that only its owner can read. Raises CommandError,
    FileExistsError."""
    password = secrets.token_urlsafe(32)
    try:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(number, "w") as opened:
                opened.write(f"{password}\n")
                opened.flush()
                os.fsync(number)
        except BaseException:
            file.unlink()
            raise
    except FileExistsError:
        raise
    except OSError as error:
        raise CommandError(f"the password cannot be written to {file}: {error.strerror}.") from error
    return password
