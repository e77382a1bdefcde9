"""``elasticd etcd-role``: makes a role and a user in etcd that may access one job only."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticd.cli import passwords
from elasticd.cli.command_error import CommandError
from elasticd.cli.job_access import etcd_errors_explained, named_etcd
from elasticd.cli.options import etcd_options
from elasticd.cli.rendezvous import check_name
from elasticd.cli.say import say
from elasticd.etcd.errors import NoLogins, StoreRefused
from elasticd.etcd.names import job_prefix
from elasticd.telemetry import describe

if TYPE_CHECKING:
    from elasticd.etcd.access import EtcdAccess
    from elasticd.etcd.roles import Roles

_COMMON_NAME_MAX = 64  # the longest common name of a certificate, in characters


@dataclass(frozen=True, slots=True)
class RoleAndUser:
    """The role and the user to make. ``password_file``: the password is read from this file, or generated
    into it (``generate``); None: the user logs in with a certificate."""

    prefix: str
    user: str
    password_file: Path | None
    generate: bool

    @property
    def role(self) -> str:
        return self.prefix.strip("/")


@click.command("etcd-role")
@click.argument("job")
@click.option("--user", help="Name of the user; with a certificate, its common name.  [JOB]")
@click.option(
    "--password-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The user logs in with the password in FILE (-: standard input), not with a certificate.",
)
@click.option(
    "--generate",
    is_flag=True,
    help="Make the password, and write it to FILE, readable by its owner only. An existing FILE is kept.",
)
@click.option(
    "--torchrun", is_flag=True, help="JOB is the --rdzv-id of plain torchrun with the back end etcd-v3."
)
@click.option("--remove", is_flag=True, help="Remove the role, and the user if it has no other role.")
@click.option("--print", "only_print", is_flag=True, help="Print commands for etcdctl, and change nothing.")
@etcd_options
def etcd_role(
    job: str,
    user: str | None,
    password_file: Path | None,
    generate: bool,
    torchrun: bool,
    remove: bool,
    only_print: bool,
    **etcd: Any,
) -> None:
    """Make a role and a user in etcd that are limited to JOB.

    Give the login of etcd's user root. A second call changes nothing.

    Exit codes: 0, the role and the user exist; 2, bad usage, or etcd refuses (authentication is off, or this
    user is not root); 4, etcd cannot be reached.
    """
    wanted = _wanted(job, user, password_file, generate, torchrun)
    if remove and password_file is not None:
        raise CommandError("--remove takes no --password-file.")
    if only_print:
        if generate:
            raise CommandError("--generate makes a password, and --print changes nothing: give one of them.")
        say(*(_removal_lines(wanted) if remove else _lines(wanted)))
        return
    access = named_etcd(etcd)
    if access is None:
        raise CommandError("give --etcd: the etcd of a standalone run has no roles.")
    with _as_root(access) as roles:
        if remove:
            _remove(roles, wanted)
        else:
            _make(roles, wanted)


def _wanted(
    job: str, user: str | None, password_file: Path | None, generate: bool, torchrun: bool
) -> RoleAndUser:
    if generate and (password_file is None or str(password_file) == "-"):
        raise CommandError("--generate needs --password-file FILE, to write the password to.")
    if torchrun:
        from elasticd.torchrun.rendezvous_records import prefix_of

        if job in ("", "none"):
            raise CommandError("JOB is torchrun's --rdzv-id: give the job one other than '' and 'none'.")
        prefix = prefix_of(job)
    else:
        prefix = job_prefix(check_name("job", job)).decode()
    name = check_name("user", job if user is None else user)
    otherwise = "give the job's user another name with --user"
    if name == "root":
        raise CommandError(f"the user root may do everything in etcd: {otherwise}.")
    if password_file is None and len(name) > _COMMON_NAME_MAX:
        raise CommandError(
            f"{name} is longer than the {_COMMON_NAME_MAX} characters of a certificate's common name: "
            f"{otherwise}."
        )
    return RoleAndUser(prefix, name, password_file, generate)


# ---------------------------------------------------------------- as etcdctl commands


def _lines(wanted: RoleAndUser) -> list[str]:
    role, user, prefix = (shlex.quote(word) for word in (wanted.role, wanted.user, wanted.prefix))
    how = "--no-password"
    if wanted.password_file is not None:
        if ":" in wanted.user:
            raise CommandError(
                f"etcdctl takes what follows the colon in {wanted.user} for a password: give another user "
                "with --user, or leave out --print."
            )
        piped = str(wanted.password_file) == "-"
        how = "--interactive=false" + ("" if piped else f" < {shlex.quote(str(wanted.password_file))}")
    return [
        f"etcdctl role add {role}",
        f"etcdctl role grant-permission {role} --prefix=true readwrite {prefix}",
        f"etcdctl user add {user} {how}",
        f"etcdctl user grant-role {user} {role}",
    ]


def _removal_lines(wanted: RoleAndUser) -> list[str]:
    return [
        f"etcdctl user delete {shlex.quote(wanted.user)}",
        f"etcdctl role delete {shlex.quote(wanted.role)}",
    ]


# ---------------------------------------------------------------- in etcd


@contextmanager
def _as_root(access: EtcdAccess) -> Iterator[Roles]:
    from elasticd.etcd.blocking_client import Client
    from elasticd.etcd.roles import Roles

    with etcd_errors_explained(), Client(access) as client, Roles(access) as roles:
        try:
            client.check()
            if not roles.requires_login():
                raise NoLogins("")
            yield roles
        except NoLogins as error:
            raise CommandError(
                f"etcd at {access.url} has authentication off, so a role would have no effect: enable it "
                "(etcdctl user add root; etcdctl auth enable), then run this command again as root."
            ) from error
        except StoreRefused as error:
            if "permission denied" not in str(error):
                raise
            raise CommandError(
                f"{error}: only a user with the role root may make and remove roles."
            ) from error


def _make(roles: Roles, wanted: RoleAndUser) -> None:
    from elasticd.etcd.roles import all_below

    role, user = wanted.role, wanted.user
    allowed, own = all_below(wanted.prefix), roles.roles_of(user)
    if own is not None and "root" in own:
        raise CommandError(
            f"the user {user} has the role root, and so may do everything: give another user with --user."
        )
    there = roles.permissions_of(role)
    if there is not None and set(there) - {allowed}:
        raise CommandError(
            f"the role {role} exists, and allows something other than {wanted.prefix}: see "
            f"`etcdctl role get {shlex.quote(role)}`, and remove the role with --remove."
        )
    password = _password(wanted)
    if there is None:
        roles.add_role(role)
    if there != (allowed,):
        roles.add_permission(role, allowed)
        say(f"The role {role} is created: it may read and write below {wanted.prefix}, and nowhere else.")
    else:
        say(f"The role {role} exists already, for the keys below {wanted.prefix} only.")
    if own is None:
        roles.add_user(user, password)
        how = "with a certificate of that common name" if password is None else _from(wanted)
        say(f"The user {user} is created, and logs in {how}.")
    elif password is None or roles.accepts_password(user, password):
        say(f"The user {user} exists already.")
    else:
        roles.set_password(user, password)
        if not roles.accepts_password(user, password):
            raise CommandError(
                f"the user {user} was created to log in with a certificate, and takes no password: remove "
                "the user with --remove first, or give another user with --user."
            )
        say(f"The user {user} now logs in {_from(wanted)} only.")
    if own is None or role not in own:
        roles.grant(user, role)
        say(f"The user {user} has the role {role} now.")
    else:
        say(f"The user {user} has the role {role} already.")
    if others := [other for other in own or () if other != role]:
        say(f"The user {user} also has {describe.listing(others)}.")


def _password(wanted: RoleAndUser) -> str | None:
    file = wanted.password_file
    if file is None:
        return None
    if wanted.generate:
        try:
            return passwords.make(file)
        except FileExistsError:
            pass  # an earlier call has made the role
    return passwords.check_length(passwords.read(file))


def _from(wanted: RoleAndUser) -> str:
    piped = str(wanted.password_file) == "-"
    return "with the password given" if piped else f"with the password in {wanted.password_file}"


def _remove(roles: Roles, wanted: RoleAndUser) -> None:
    role, user = wanted.role, wanted.user
    own = roles.roles_of(user)
    if own is None:
        say(f"There is no user {user}.")
    elif own == (role,):
        roles.delete_user(user)
        say(f"The user {user} is removed.")
    elif others := [other for other in own if other != role]:
        say(f"The user {user} is kept, because it also has {describe.listing(others)}.")
    else:
        say(f"The user {user} is kept, because it does not have the role {role}.")
    if roles.permissions_of(role) is None:
        say(f"There is no role {role}.")
    else:
        roles.delete_role(role)  # etcd also takes the role from all users
        say(f"The role {role} is removed.")
