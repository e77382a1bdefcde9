"""``elasticd doctor``: collects facts, judges them, and shows the findings."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from elasticd.cli.complaint import ETCD_UNREACHABLE, Complaint
from elasticd.cli.doctor import judge
from elasticd.cli.doctor.judge import Finding, Grade
from elasticd.cli.doctor.machine_facts import (
    look_at_address,
    look_at_driver,
    look_at_http,
    look_at_limits,
    look_at_network,
    look_at_ports,
    look_at_shared_memory,
)
from elasticd.cli.doctor.worker_facts import ask_imports, ask_torch
from elasticd.cli.http_options import http_place
from elasticd.cli.interfaces import network_environment
from elasticd.cli.job_access import named_etcd
from elasticd.cli.machine import default_node_name, nowhere
from elasticd.cli.option_types import Seconds
from elasticd.cli.options import etcd_options
from elasticd.cli.rendezvous import check_name
from elasticd.cli.say import say
from elasticd.core.facts import Node
from elasticd.etcd.access import EtcdAccess, hosts_and_ports, routed_address
from elasticd.etcd.errors import StoreError
from elasticd.etcd.examine import Examined, examine
from elasticd.etcd.names import ROOT, job_prefix
from elasticd.telemetry import describe

NOT_FIT = 1


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("script", required=False)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--job", envvar="ELASTICD_JOB", help="Try to reach the nodes that this job has.")
@click.option("--address", envvar="ELASTICD_ADDRESS", help="Address at which other nodes reach this one.")
@click.option(
    "--node-ttl", type=Seconds(2.0), default=5.0, envvar="ELASTICD_NODE_TTL", help="As of the run.  [5]"
)
@click.option("--http", envvar="ELASTICD_HTTP", help="Where metrics are to be served, as of the run.")
@click.option("--strict", is_flag=True, help="Take advice for wrong, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@etcd_options
def doctor(
    script: str | None,
    module: bool,
    job: str | None,
    address: str | None,
    node_ttl: float,
    http: str | None,
    strict: bool,
    as_json: bool,
    **etcd: Any,
) -> int:
    """Say whether this machine or pod can run a job, and what is wrong if not.

    Give it the options, or the environment, that `elasticd run` is given. With SCRIPT its imports are
    tried too; the script itself is not run.

    Exit codes: 0, it can (there may be advice); 1, something is wrong; 2, bad usage; 4, nothing is wrong
    but that etcd cannot be reached, which may come right.
    """
    if gone := nowhere():
        raise Complaint(gone)
    access = named_etcd(etcd)
    findings = tuple(
        _examination(access, script, module, job, address, node_ttl, http_place(http) if http else None)
    )
    say(*([json.dumps(as_object(findings, strict))] if as_json else as_text(findings, strict)))
    return exit_code(findings, strict)


def _examination(
    access: EtcdAccess | None,
    script: str | None,
    module: bool,
    job: str | None,
    address: str | None,
    node_ttl_s: float,
    http: tuple[str, int] | None,
) -> Iterator[Finding]:
    endpoints = hosts_and_ports(access.endpoints) if access is not None else []
    key = job_prefix(check_name("job", job)) if job is not None else ROOT
    own = address or (routed_address(endpoints) or default_node_name() if endpoints else "127.0.0.1")
    told = network_environment(own, os.environ, asked=address is not None)
    with ThreadPoolExecutor() as pool:  # these checks mostly wait
        torch = pool.submit(ask_torch, told)
        imports = pool.submit(ask_imports, script, module=module) if script is not None else None
        examined = examine(access, key=key) if access is not None else None
        reached = look_at_address(own.strip("[]"), endpoints, _peers(access, examined, job, own))
        if examined is None:
            yield _embedded()
        else:
            yield from judge.etcd(examined, node_ttl_s)
            yield from judge.certificates(examined, time.time())
            yield from judge.clock(examined)
        yield from judge.address(reached)
        yield from judge.ports(look_at_ports())
        if http is not None:
            yield from judge.http(look_at_http(*http))
        yield from judge.network(look_at_network({**os.environ, **told}), reached)
        yield from judge.shared_memory(look_at_shared_memory())
        yield from judge.limits(look_at_limits())
        yield from judge.gpus(look_at_driver(), torch.result())
        yield from judge.torch(torch.result())
        if imports is not None:
            yield from judge.imports(imports.result())


def _embedded() -> Finding:
    """Judge the etcd of standalone runs."""
    from elasticd.etcd.embedded import fault_of, find_etcd, version_of

    try:
        binary = find_etcd()
    except FileNotFoundError as error:
        return judge.embedded("", "", str(error))
    version = version_of(binary)
    return judge.embedded(f"{binary}", fault_of(version), "")


def _peers(
    access: EtcdAccess | None, examined: Examined | None, job: str | None, own: str
) -> list[tuple[str, str]]:
    """Return the job's present nodes, each with a ``host:port`` where it listens."""
    if access is None or job is None or examined is None or all(e.error for e in examined.endpoints):
        return []
    from elasticd.etcd.client import Client

    try:
        with Client(access) as client:
            listing, _ = client.list(job, "nodes/")
    except StoreError:
        return []  # the check of etcd reports this
    nodes = [entry.fact for entry in listing.entries if isinstance(entry.fact, Node)]
    return [(n.name, f"{n.address}:{n.store_port}") for n in nodes if n.address != own]


# ---------------------------------------------------------------- the verdict


def _counts(finding: Finding, strict: bool) -> bool:
    return finding.grade is Grade.WRONG or (strict and finding.grade is Grade.ADVICE)


def exit_code(findings: tuple[Finding, ...], strict: bool) -> int:
    wrong = [f for f in findings if _counts(f, strict)]
    if not wrong:
        return 0
    return ETCD_UNREACHABLE if all(f.later for f in wrong) else NOT_FIT


def as_object(findings: tuple[Finding, ...], strict: bool) -> dict[str, Any]:
    return {
        "schema": 1,
        "fit": exit_code(findings, strict) == 0,
        "exit_code": exit_code(findings, strict),
        "findings": [
            {"check": f.check, "grade": f.grade.value, "says": f.says, "do": f.do or None} for f in findings
        ],
    }


def as_text(findings: tuple[Finding, ...], strict: bool) -> Iterator[str]:
    width = max(len(f.check) for f in findings)
    indent = " " * (width + 10)
    for f in findings:
        lines = textwrap.wrap(f.says, 100, break_long_words=False, break_on_hyphens=False) or [""]
        yield f"{f.check.ljust(width)}  {f.grade.value.ljust(6)}  {lines[0]}"
        yield from (f"{indent}{line}" for line in lines[1:])
        if f.do:
            yield f"{indent}-> {f.do}"
    wrong = sum(f.grade is Grade.WRONG for f in findings)
    advice = sum(f.grade is Grade.ADVICE for f in findings)
    yield ""
    can = "can" if exit_code(findings, strict) == 0 else "cannot"
    things = f"{describe.count(wrong, 'thing')} wrong" if wrong else "nothing is wrong"
    yield f"This machine {can} run a job: {things}{f', {advice} to think about' if advice else ''}."
