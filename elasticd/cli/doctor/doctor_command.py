"""``elasticd doctor``: looks at this node, and shows the findings."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from elasticd.cli.command_error import ETCD_UNREACHABLE, CommandError
from elasticd.cli.doctor.checks import CHECKS, Candidate, Finding, Grade, ask_python
from elasticd.cli.interfaces import network_environment
from elasticd.cli.job_access import named_etcd
from elasticd.cli.machine import default_node_name, working_directory_fault
from elasticd.cli.option_types import Seconds
from elasticd.cli.options import etcd_options
from elasticd.cli.rendezvous import check_name
from elasticd.cli.say import say
from elasticd.etcd.access import hosts_and_ports, routed_address
from elasticd.etcd.examine import examine
from elasticd.etcd.names import ROOT, job_prefix
from elasticd.telemetry import describe

NOT_FIT = 1
Findings = tuple[tuple[str, Finding], ...]  # each with the name of its check


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("script", required=False)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--job", envvar="ELASTICD_JOB", help="Try to reach the other nodes of this job.")
@click.option("--address", envvar="ELASTICD_ADDRESS", help="Address at which other nodes reach this one.")
@click.option(
    "--node-ttl", type=Seconds(2.0), default=5.0, envvar="ELASTICD_NODE_TTL", help="As for `run`.  [5]"
)
@click.option("--strict", is_flag=True, help="Count advice as wrong.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@etcd_options
def doctor(
    script: str | None,
    module: bool,
    job: str | None,
    address: str | None,
    node_ttl: float,
    strict: bool,
    as_json: bool,
    **etcd: Any,
) -> int:
    """Say whether this machine or pod can run a job.

    Give it the options, or the environment, that `elasticd run` is given. With SCRIPT, its imports
    are tried too, except those in functions, `if` and `try`; the script itself is not run.

    Exit codes: 0, the machine can run a job (there may be advice); 1, something is wrong; 2, bad
    usage; 4, only etcd cannot be reached, so a later try may succeed.
    """
    if gone := working_directory_fault():
        raise CommandError(gone)
    access = named_etcd(etcd)
    endpoints = hosts_and_ports(access.endpoints) if access is not None else []
    key = job_prefix(check_name("job", job)) if job is not None else ROOT
    own = address or (routed_address(endpoints) or default_node_name() if endpoints else "127.0.0.1")
    environ = {**os.environ, **network_environment(own, os.environ, asked=address is not None)}
    with ThreadPoolExecutor() as pool:  # etcd and the workers' Python are asked at the same time
        candidate = Candidate(
            probed=pool.submit(ask_python, script, module=module, environ=environ),
            access=access,
            examined=examine(access, key=key) if access is not None else None,
            job=job,
            address=own.strip("[]"),
            node_ttl_s=node_ttl,
            environ=environ,
            script=script,
        )
        findings = tuple((name, found) for name, check in CHECKS.items() for found in check(candidate))
    say(*([json.dumps(as_object(findings, strict))] if as_json else as_text(findings, strict)))
    return exit_code(findings, strict)


def exit_code(findings: Findings, strict: bool) -> int:
    counted = {Grade.WRONG, Grade.ADVICE} if strict else {Grade.WRONG}
    bad = [f for _, f in findings if f.grade in counted]
    if not bad:
        return 0
    return ETCD_UNREACHABLE if all(f.later for f in bad) else NOT_FIT


def as_object(findings: Findings, strict: bool) -> dict[str, Any]:
    code = exit_code(findings, strict)
    return {
        "schema": 1,
        "fit": code == 0,
        "exit_code": code,
        "findings": [
            {"check": check, "grade": f.grade.value, "says": f.says, "do": f.do or None}
            for check, f in findings
        ],
    }


def as_text(findings: Findings, strict: bool) -> Iterator[str]:
    width = max(len(check) for check, _ in findings)
    indent = " " * (width + 10)
    for check, f in findings:
        lines = textwrap.wrap(f.says, 100, break_long_words=False, break_on_hyphens=False) or [""]
        yield f"{check.ljust(width)}  {f.grade.value.ljust(6)}  {lines[0]}"
        yield from (f"{indent}{line}" for line in lines[1:])
        if f.do:
            yield f"{indent}-> {f.do}"
    wrong, advice = (sum(f.grade is grade for _, f in findings) for grade in (Grade.WRONG, Grade.ADVICE))
    can = "can" if exit_code(findings, strict) == 0 else "cannot"
    things = f"{describe.count(wrong, 'thing')} wrong" if wrong else "nothing is wrong"
    yield ""
    more = f", {describe.count(advice, 'piece')} of advice" if advice else ""
    yield f"This machine {can} run a job: {things}{more}."
