"""``elasticd etcd-role``, and what its roles forbid, with a real etcd that requires a login."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from elasticd.cli.main import _exit_code
from elasticd.core.facts import Budget
from elasticd.core.ports import Applied, Put
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.embedded import Embedded, find_etcd
from elasticd.etcd.errors import StoreRefused
from elasticd.etcd.roles import Roles, all_below

from .cluster import GuardedEtcd
from .conftest import PATIENCE_S

TRIES = 25  # so many that a request is under way when roles change


class Guarded(GuardedEtcd):
    """An etcd. The command makes its roles."""

    def by_password(self, user: str, password: str) -> EtcdAccess:
        return replace(self.known_as("nobody"), username=user, password=password)

    def role(self, *argv: str | Path, said: str = "", by: str = "root") -> subprocess.CompletedProcess[str]:
        """Run the command as that user, with ``said`` on standard input."""
        return elasticd("etcd-role", *options(self.known_as(by)), *map(str, argv), said=said)

    def made(self, *argv: str | Path, said: str = "") -> list[str]:
        """Return the output of the command, which must succeed."""
        done = self.role(*argv, said=said)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout.splitlines()

    def refused(self, *argv: str | Path, said: str = "", by: str = "root") -> str:
        """Return the sentence with which the command fails."""
        done = self.role(*argv, said=said, by=by)
        assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1, done
        return done.stderr


def elasticd(*argv: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """Run an elasticd command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch("sys.stdin", io.StringIO(said)), redirect_stdout(out), redirect_stderr(err):
        code = _exit_code(argv)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def options(access: EtcdAccess) -> list[str]:
    return [
        f"--etcd={access.url}",
        f"--etcd-cacert={access.cacert}",
        f"--etcd-cert={access.cert}",
        f"--etcd-key={access.key}",
    ]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded(tmp_path_factory.mktemp("guarded")) as etcd:
        etcd.require_login()
        yield etcd


def may_use(access: EtcdAccess, job: str) -> bool:
    """Whether the user may write and read the keys of that job. A user who may do only one of them fails
    the test."""
    with Client(access) as client:
        try:
            client.transact(job, (), (Put("budget", Budget()),))
        except StoreRefused:
            with pytest.raises(StoreRefused, match="permission denied"):
                client.list(job)
            return False
        return bool(client.list(job)[0].entries)


def test_a_user_with_a_certificate_may_use_its_job_and_no_other(guarded: Guarded) -> None:
    assert guarded.made("one") == [
        "The role elasticd/one is created: it may read and write below /elasticd/one/, and nowhere else.",
        "The user one is created, and logs in with a certificate of that common name.",
        "The user one has the role elasticd/one now.",
    ]
    assert guarded.made("two", "--user=other")
    one, other = guarded.known_as("one"), guarded.known_as("other")
    assert may_use(one, "one") and may_use(other, "two")
    for job in ("two", "one.", "on", "ones", "onf"):
        assert not may_use(one, job), job
    assert not may_use(guarded.known_as("two"), "two"), "its certificate names another user"
    with Client(one) as client, pytest.raises(StoreRefused, match="permission denied"):
        client.get_raw(b"/elasticd.torchrun/one/round")
    with Client(guarded.by_password("one", "")) as client, pytest.raises(StoreRefused):
        client.get_raw(b"/elasticd/one/round")


def test_doing_it_again_changes_nothing_and_mends_what_is_missing(guarded: Guarded) -> None:
    guarded.made("again")
    assert guarded.made("again") == [
        "The role elasticd/again exists already, for the keys below /elasticd/again/ only.",
        "The user again exists already.",
        "The user again has the role elasticd/again already.",
    ]
    with Roles(guarded.known_as("root")) as roles:
        roles.revoke("again", "elasticd/again")
    assert not may_use(guarded.known_as("again"), "again")
    assert guarded.made("again")[2] == "The user again has the role elasticd/again now."
    assert may_use(guarded.known_as("again"), "again")


def test_what_is_removed_may_do_nothing_any_more_and_a_user_of_others_stays(guarded: Guarded) -> None:
    guarded.made("gone")
    guarded.made("mine", "--user=me")
    guarded.made("ours", "--user=me")
    assert guarded.made("gone", "--remove") == [
        "The user gone is removed.",
        "The role elasticd/gone is removed.",
    ]
    assert guarded.made("gone", "--remove") == ["There is no user gone.", "There is no role elasticd/gone."]
    assert not may_use(guarded.known_as("gone"), "gone")
    assert guarded.made("mine", "--user=me", "--remove") == [
        "The user me is kept, because it also has elasticd/ours.",
        "The role elasticd/mine is removed.",
    ]
    assert may_use(guarded.known_as("me"), "ours") and not may_use(guarded.known_as("me"), "mine")


def test_a_password_comes_from_a_file_or_standard_input_or_is_made_and_is_never_shown(
    guarded: Guarded, tmp_path: Path
) -> None:
    given, made = tmp_path / "given", tmp_path / "made"
    given.write_text("s3cret from a file\n")
    said = guarded.made("pw", f"--password-file={given}")
    assert said[1] == f"The user pw is created, and logs in with the password in {given}."
    assert may_use(guarded.by_password("pw", "s3cret from a file"), "pw")
    assert not may_use(guarded.by_password("pw", "s3cret from a file"), "other")
    assert guarded.made("pw", f"--password-file={given}")[1] == "The user pw exists already."

    said += guarded.made("pw", "--password-file=-", said="s3cret piped")
    assert may_use(guarded.by_password("pw", "s3cret piped"), "pw")

    said += guarded.made("pw", f"--password-file={made}", "--generate")
    assert made.stat().st_mode & 0o777 == 0o600
    password = made.read_text().strip()
    assert len(password) >= 32 and may_use(guarded.by_password("pw", password), "pw")
    said += guarded.made("pw", f"--password-file={made}", "--generate")
    assert made.read_text().strip() == password, "as the last time"
    assert not any(secret in "".join(said) for secret in ("s3cret", password))
    with (
        Client(guarded.by_password("pw", "s3cret piped")) as client,
        pytest.raises(StoreRefused, match="does not accept this user name and password"),
    ):
        client.get_raw(b"/elasticd/pw/round")


def test_commands_log_in_with_a_password_from_a_file(guarded: Guarded, tmp_path: Path) -> None:
    made = tmp_path / "made"
    guarded.made("file", f"--password-file={made}", "--generate")
    assert may_use(guarded.known_as("root"), "file")
    login = [*options(guarded.known_as("nobody")), "--etcd-user=file", f"--etcd-password-file={made}"]
    for job, code in (("file", 0), ("other", 2)):
        done = elasticd("status", job, *login)
        assert done.returncode == code, done


def test_plain_torchrun_has_a_role_of_its_own(guarded: Guarded) -> None:
    said = guarded.made("run 1", "--torchrun", "--user=run-1")
    assert "below /elasticd.torchrun/run%201/, and nowhere else" in said[0]
    with Client(guarded.known_as("run-1")) as client:
        assert client.swap_raw(b"/elasticd.torchrun/run%201/round", b"x", 0)
        with pytest.raises(StoreRefused, match="permission denied"):
            client.get_raw(b"/elasticd/run 1/round")


def test_what_it_prints_does_the_same_with_etcdctl(guarded: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "a password"
    file.write_text("pr1nted\n")
    access = guarded.known_as("root")
    etcdctl = [find_etcd().parent / "etcdctl", f"--endpoints={access.url}", f"--cacert={access.cacert}"]
    etcdctl += [f"--cert={access.cert}", f"--key={access.key}"]
    in_sh = f'etcdctl() {{ {shlex.join(map(str, etcdctl))} "$@"; }}; set -e'

    def print_and_do(*argv: str) -> None:
        printed = elasticd("etcd-role", *argv, "--print")
        assert (printed.returncode, printed.stderr) == (0, "")
        done = subprocess.run(
            ["sh", "-c", f"{in_sh}\n{printed.stdout}"],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done

    print_and_do("it's a job", "--user=printed")
    print_and_do("another", f"--password-file={file}")
    assert may_use(guarded.known_as("printed"), "it's a job")
    assert may_use(guarded.by_password("another", "pr1nted"), "another")
    assert "exists already" in "".join(guarded.made("it's a job", "--user=printed"))
    print_and_do("it's a job", "--user=printed", "--remove")
    assert guarded.made("it's a job", "--user=printed", "--remove")[0] == "There is no user printed."


def test_another_user_than_root_is_refused_in_one_sentence(guarded: Guarded) -> None:
    guarded.made("plain")
    for user in ("plain", "nobody"):
        said = guarded.refused("evil", by=user)
        assert "permission denied: only a user with the role root may make and remove roles." in said


def test_an_etcd_without_authentication_gets_no_roles(etcd: Embedded) -> None:
    done = elasticd("etcd-role", "job", f"--etcd=http://{etcd.endpoint}")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "has authentication off" in done.stderr and "etcdctl auth enable" in done.stderr
    with Roles(EtcdAccess((etcd.endpoint,))) as roles:
        assert roles.permissions_of("elasticd/job") is None and roles.roles_of("job") is None


def test_an_etcd_that_is_not_there_may_be_tried_again() -> None:
    done = elasticd("etcd-role", "job", "--etcd=http://127.0.0.1:1")
    assert done.returncode == 4 and len(done.stderr.splitlines()) == 1, done


def test_a_role_that_allows_more_and_a_user_who_may_do_everything_are_not_used(guarded: Guarded) -> None:
    with Roles(guarded.known_as("root")) as roles:
        roles.add_role("elasticd/wide")
        roles.add_permission("elasticd/wide", all_below("/"))
        roles.add_user("boss", None)
        roles.grant("boss", "root")
    assert "allows something other than /elasticd/wide/" in guarded.refused("wide")
    assert "the user boss has the role root" in guarded.refused("small", "--user=boss")
    with Roles(guarded.known_as("root")) as roles:
        assert roles.roles_of("wide") is None and roles.permissions_of("elasticd/small") is None


def test_a_user_with_a_certificate_is_not_told_to_have_a_password(guarded: Guarded) -> None:
    guarded.made("certified")
    said = guarded.role("certified", "--password-file=-", said="s3cret")
    assert said.returncode == 2 and "was created to log in with a certificate" in said.stderr
    assert "s3cret" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["root"], "the user root may do everything in etcd"),
        (["job", "--user=root", "--remove"], "the user root may do everything in etcd"),
        (["a/b"], "has a slash in it"),
        ([""], "cannot be empty"),
        (["--", "-a"], "begins with a dash"),
        (["none", "--torchrun"], "--rdzv-id"),
        (["j" * 65], "a certificate's common name"),
        (["job", "--generate"], "--generate needs --password-file FILE"),
        (["job", "--generate", "--password-file=-"], "--generate needs --password-file FILE"),
        (["job", "--generate", "--password-file=/no/folder/file"], "cannot be written to /no/folder/file"),
        (["job", "--password-file=/no/such/file"], "cannot be read from /no/such/file"),
        (["job", "--password-file=/"], "cannot be read from /: Is a directory"),
        (["job", "--password-file=/dev/null"], "there is no password in /dev/null"),
        (["job", "--password-file=-"], "there is no password in standard input"),
        (["job", "--password-file=" + __file__], "is more than one line"),
        (["job", "--remove", "--password-file=x"], "--remove takes no --password-file"),
        (["job", "--print", "--generate", "--password-file=x"], "give one of them"),
        (["a:job", "--print", "--password-file=x"], "etcdctl takes what follows the colon in a:job"),
        (["job", "--etcd-password-file=x"], "is given without --etcd-user"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(guarded: Guarded, argv: list[str], says: str) -> None:
    assert says in guarded.refused(*argv)


def test_a_password_that_etcd_would_cut_short_is_refused(guarded: Guarded) -> None:
    assert "73 bytes long" in guarded.refused("long", "--password-file=-", said="x" * 73)


def test_without_an_etcd_it_asks_for_one() -> None:
    done = elasticd("etcd-role", "job")
    assert done.returncode == 2 and "give --etcd" in done.stderr


def test_others_go_on_while_roles_are_made(guarded: Guarded) -> None:
    """etcd answers "revision of auth store is old" to a request that was under way meanwhile."""
    guarded.made("steady", "--password-file=-", said="s3cret")
    root, steady = guarded.known_as("root"), guarded.by_password("steady", "s3cret")
    began = threading.Semaphore(0)

    def change() -> None:
        with Roles(root) as roles:
            for number in range(2 * TRIES):
                began.acquire()
                if number % 2:
                    roles.delete_user("fleeting")
                else:
                    roles.add_user("fleeting", None)

    other = threading.Thread(target=change, daemon=True)
    other.start()
    for access in (root, steady):
        with Client(access) as client:
            for _ in range(TRIES):
                began.release()
                assert isinstance(client.transact("steady", (), (Put("budget", Budget()),)), Applied)
    other.join(PATIENCE_S)
    assert not other.is_alive()
