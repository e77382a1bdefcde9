"""Which network interface workers use, tried in a network made for the test."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticd.cli import interfaces
from elasticd.cli.interfaces import network_environment, over_interface

ROOT = Path(__file__).parents[2]
APART = ("unshare", "--net", "--mount")
SETUP = """
printf '127.0.0.1 localhost\\n%s\\n' "$1" > "$2/hosts" && mount --bind "$2/hosts" /etc/hosts
echo 'hosts: files' > "$2/order" && mount --bind "$2/order" /etc/nsswitch.conf
ip link set lo up && ip link add near0 type veth peer name far0 && ip link add down0 type bridge
ip addr add 10.9.8.7/24 dev near0 && ip addr add 10.9.8.8/24 dev near0
ip addr add fd09::7/64 dev near0 nodad && ip link set near0 up
ip addr add 10.9.9.9/24 dev down0
"""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Evaluate an expression about ``interfaces`` in the test's network. ``hosts`` is a line of
    /etc/hosts."""
    folder = tmp_path_factory.mktemp("apart")

    def there(hosts: str, *argv: str) -> subprocess.CompletedProcess[str]:
        script = SETUP + 'shift 2 && exec "$@"'
        command = [*APART, "sh", "-ec", script, "sh", hosts, str(folder), *argv]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    def ask(expression: str, hosts: str = "") -> Any:
        code = f"import json\nfrom elasticd.cli.interfaces import *\nprint(json.dumps({expression}))"
        done = there(hosts, sys.executable, "-c", code)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip (packages util-linux and iproute2)")
    if (tried := there("", "true")).returncode:
        pytest.skip(f"no network may be made here: {tried.stderr.strip()[-200:]}")
    return ask


def test_every_address_of_an_interface_is_seen_and_loopback_is_none_to_name(apart: Any) -> None:
    asked = [
        "10.9.8.7",
        "10.9.8.8",
        "fd09::7",
        "[fd09::7]",
        "FD09::0:7",
        "10.9.9.9",
        "127.0.0.1",
        "::1",
        "10.9.8.9",
        "a.name",
    ]
    told = apart(f"[interface_of(a) for a in {asked}]")
    assert told == ["near0", "near0", "near0", "near0", "near0", "down0", "", "", "", ""]


@pytest.mark.parametrize(
    ("hosts", "asked", "told"),
    [
        ("", False, {"GLOO_SOCKET_IFNAME": "near0"}),
        ("127.0.1.1 NAME", False, {"GLOO_SOCKET_IFNAME": "near0"}),
        ("10.9.8.8 NAME", False, {}),
        ("10.9.8.8 NAME", True, {"GLOO_SOCKET_IFNAME": "near0", "NCCL_SOCKET_IFNAME": "=near0"}),
    ],
)
def test_gloo_is_told_where_the_hosts_own_name_would_lead_it_astray(
    apart: Any, hosts: str, asked: bool, told: dict[str, str]
) -> None:
    line = hosts.replace("NAME", socket.gethostname())
    assert apart(f"network_environment('10.9.8.7', {{}}, asked={asked})", line) == told


def test_a_node_on_loopback_tells_its_workers_nothing() -> None:
    for address in ("127.0.0.1", "::1", "localhost", "a-name"):
        assert network_environment(address, {}, asked=True) == {}


def test_the_host_is_asked_for_no_name_where_that_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question may take as long as name servers do not answer."""

    def never() -> tuple[str, ...]:
        raise AssertionError("asked")

    monkeypatch.setattr(interfaces, "host_addresses", never)
    monkeypatch.setattr(interfaces, "interface_of", lambda address: "eth0")
    assert network_environment("10.0.0.7", {"NCCL_SOCKET_IFNAME": "ib"}, asked=True) == {
        "GLOO_SOCKET_IFNAME": "eth0"
    }
    assert network_environment("10.0.0.7", {"GLOO_SOCKET_IFNAME": "ib0"}, asked=False) == {}


def test_gloo_and_nccl_use_the_interface_of_the_given_address() -> None:
    told = over_interface("eth0", {}, asked=True, host_is_named=True)
    assert told == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_where_the_address_was_guessed_gloo_is_told_only_where_it_would_use_loopback() -> None:
    assert over_interface("eth0", {}, asked=False, host_is_named=True) == {}
    assert over_interface("eth0", {}, asked=False, host_is_named=False) == {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
@pytest.mark.parametrize("value", ["ib0", ""])
def test_what_the_user_says_of_interfaces_stands_be_it_nothing(variable: str, value: str) -> None:
    told = over_interface("eth0", {variable: value}, asked=True, host_is_named=False)
    assert variable not in told and len(told) == 1
