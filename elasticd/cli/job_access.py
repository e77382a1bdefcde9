"""How commands reach a job: through the etcd that options give, or the etcds of this machine's standalone
runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticd.cli import passwords
from elasticd.cli.command_error import ETCD_UNREACHABLE, CommandError
from elasticd.etcd.access import EtcdAccess, parse_endpoints
from elasticd.etcd.errors import BadRecord, NoSpace, StoreError, StoreRefused, StoreUnavailable
from elasticd.etcd.names import ROOT, job_prefix
from elasticd.telemetry import describe, runs

if TYPE_CHECKING:
    from elasticd.etcd.blocking_client import Client


@dataclass(frozen=True, slots=True)
class Place:
    """An etcd, and the jobs in it. ``shared``: the etcd was given by options, so no other place is
    searched."""

    access: EtcdAccess
    jobs: tuple[str, ...]
    shared: bool

    def ended(self, job: str) -> bool:
        """Whether this is the etcd of a standalone run that is over. Such an etcd does not come back."""
        if self.shared:
            return False
        from elasticd.etcd.registry import standalone_runs

        return not any(run.job == job and run.access == self.access for run in standalone_runs())


def places(options: Mapping[str, Any], job: str | None = None) -> list[Place]:
    """Return where jobs may be. ``options``: click's values of ``etcd_options``. ``job``: the job that is
    searched; a role that is limited to this job may not read others. Raises CommandError."""
    access = named_etcd(options)
    if access is not None:
        from elasticd.etcd.blocking_client import Client

        with etcd_errors_explained(), Client(access) as client:
            _check(client, job)
            return [Place(access, _jobs(client, job), shared=True)]
    from elasticd.etcd.registry import standalone_runs

    try:
        return [Place(run.access, (run.job,), shared=False) for run in standalone_runs()]
    except PermissionError as error:
        raise CommandError(f"{error}.") from error


def find(options: Mapping[str, Any], job: str) -> Place:
    """Return where the job is. Raises CommandError, with the names of the known jobs."""
    there = places(options, job)
    for place in there:
        if job in place.jobs:
            return place
    raise CommandError(_no_such(job, there))


def only_job(known: Sequence[Place], who: str) -> tuple[Place, str]:
    """Return the only job, and where it is. ``who``: what needs a job. Raises CommandError if there are
    several, or none."""
    jobs = [(place, name) for place in known for name in place.jobs]
    if len(jobs) != 1:
        raise CommandError(f"{who} needs a job: {there_are([name for _, name in jobs])}.")
    return jobs[0]


def there_are(names: Iterable[str]) -> str:
    """Return the names after "there is" or "there are"."""
    known = sorted(set(names))
    verb = "are" if len(known) > 1 else "is"
    return f"there {verb} {describe.listing(known, most=10) or 'none'}"


def _check(client: Client, job: str | None) -> None:
    """Check that etcd works. Raises StoreError; CommandError if the user must name a job."""
    try:
        client.check(ROOT if job is None else job_prefix(job))
    except StoreRefused as error:
        if job is not None or "permission denied" not in str(error):
            raise
        raise CommandError(f"{error}: this user may not list jobs; give the name of a job.") from error


def _jobs(client: Client, job: str | None) -> tuple[str, ...]:
    """Return the jobs that this user may see. Raises StoreError."""
    if job is not None and client.has(job):
        return (job,)
    try:
        return tuple(client.jobs())
    except StoreRefused:
        return ()


def _no_such(job: str, there: list[Place]) -> str:
    known = there_are([name for place in there for name in place.jobs])
    if any(place.shared for place in there):
        return f"no job named {job} in this etcd: {known}."
    hint = f"; `elasticd report {shlex.quote(job)}` shows how the run ended" if _ran_here(job) else ""
    return f"no job named {job} on this machine: {known} (for others give --etcd){hint}."


def _ran_here(job: str) -> bool:
    with suppress(OSError):
        return bool(runs.of_job(runs.state_dir(), job))
    return False


def is_full(client: Client) -> bool:
    """Whether etcd has no space. False for a user who may not ask. Raises StoreError."""
    try:
        return client.full()
    except StoreRefused:
        return False


def unusable(job: str, bad: Sequence[BadRecord]) -> CommandError | None:
    """Return a CommandError if the job's spec or round cannot be read, so that its status is unknown; else
    None."""
    worst = next((error for error in bad if error.key in ("spec", "round")), None)
    return None if worst is None else CommandError(f"{job}: {worst}.")


@contextmanager
def etcd_errors_explained() -> Iterator[None]:
    """Turn errors of etcd into CommandError: code 4 if etcd is unreachable, else 2."""
    try:
        yield
    except NoSpace as error:
        raise CommandError(f"{error}.", ETCD_UNREACHABLE) from error
    except StoreUnavailable as error:
        raise CommandError(f"etcd is unavailable: {error}.", ETCD_UNREACHABLE) from error
    except StoreError as error:
        raise CommandError(f"{error}.") from error


@contextmanager
def job_errors_explained(place: Place, job: str) -> Iterator[None]:
    """Like ``etcd_errors_explained``. If etcd is gone because the standalone run has ended, the message
    says so."""
    try:
        with etcd_errors_explained():
            yield
    except CommandError as error:
        if error.code == ETCD_UNREACHABLE and place.ended(job):
            raise CommandError(f"{job} has ended already.") from error
        raise


def named_etcd(options: Mapping[str, Any]) -> EtcdAccess | None:
    """Return the etcd of ``etcd_options``; None if not given. Raises CommandError."""
    etcd = options.get("etcd")
    tls = {name: options.get(f"etcd_{name}") for name in ("cacert", "cert", "key")}
    user = options.get("etcd_user")
    if etcd is None:
        if any(tls.values()):
            raise CommandError("certificates for etcd are given, but no --etcd to use them with.")
        return None
    password = passwords.of_login(options)
    try:
        return parse_endpoints(
            etcd,
            cacert=tls["cacert"],
            cert=tls["cert"],
            key=tls["key"],
            username=user,
            password=password,
        )
    except ValueError as error:
        raise CommandError(f"{error}.") from error
