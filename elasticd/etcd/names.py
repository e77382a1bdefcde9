"""The keys of a job in etcd, and the rules for names of jobs and nodes."""

from __future__ import annotations

from typing import Final

ROOT: Final = b"/elasticd/"
NAME_MAX: Final = 200


def job_prefix(job: str) -> bytes:
    """Return ``/elasticd/<job>/``. Raises ValueError, with one sentence, if ``job`` is not a valid name."""
    check_name(job, "job")
    return ROOT + job.encode() + b"/"


def check_name(name: str, what: str) -> None:
    """Raise ValueError, with one sentence, unless ``name`` can be part of a key."""
    if not name:
        raise ValueError(f"the name of a {what} cannot be empty")
    if name in (".", ".."):
        raise ValueError(f"the {what} name {name!r} has a special meaning in file paths; use another")
    if "/" in name:
        raise ValueError(f"the {what} name {name!r} has a slash in it; use another character")
    if len(name) > NAME_MAX:
        raise ValueError(f"the {what} name is {len(name)} characters long; at most {NAME_MAX} are allowed")
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"the {what} name {name!r} has blanks at its ends or characters that cannot be seen")
