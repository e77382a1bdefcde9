"""Every option of ``elasticd run``: elasticd's own, and torchrun's under the same names.

Options end at the first positional argument (or at ``--``); the rest belongs to the script. Torchrun's
options are also read from ``PET_<NAME>``, elasticd's from ``ELASTICD_<NAME>``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import cloup
from click.core import ParameterSource

from elasticd.cli.command_error import CommandError
from elasticd.cli.job_file import SUFFIX, OptionKind, read_job_file
from elasticd.cli.option_types import Seconds, Switch, Whole
from elasticd.cli.say import say

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]

_HELP_ALL: Final = f"{__name__}.help_all"  # in a context's meta: whether to print the help of all options


class OptionSource(IntEnum):
    """Where a value came from. The greater source takes precedence."""

    NOT_GIVEN = 0
    ENVIRONMENT = 1
    COMMAND_LINE = 2


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``elasticd run`` as given; None if not given."""

    target: str
    args: tuple[str, ...] = ()
    # elasticd's
    min: int | None = None
    max: int | None = None
    unit: int | None = None
    unit_within: str | None = None
    sizes: str | None = None
    slots: str | None = None
    job: str | None = None
    node: str | None = None
    address: str | None = None
    etcd: str | None = None
    etcd_cacert: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    etcd_user: str | None = None
    etcd_password: str | None = None
    join_timeout: float | None = None
    grow_cooldown: float | None = None
    node_ttl: float | None = None
    etcd_wait: float | None = None
    policy: Path | None = None
    hang_after: str | None = None
    stragglers: str | None = None
    on_nonfinite: str | None = None
    fresh_start: bool = False
    spares: int = 0
    memory: str | None = None
    checkpoints: str | None = None
    replicate: int = 0
    audit: bool = False
    debug: bool = False
    checkpoint_every: str | None = None
    checkpoint_rate: str | None = None
    resume: str = "auto"
    http: str | None = None
    http_cert: Path | None = None
    http_key: Path | None = None
    http_token_file: Path | None = None
    plain: bool = False
    log_format: str = "auto"
    log_level: str | None = None
    termination_log: Path | None = None
    # torchrun's
    nnodes: str | None = None
    nproc_per_node: str | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    standalone: bool = False
    max_restarts: int | None = None
    monitor_interval: float | None = None
    start_method: str | None = None
    event_log_handler: str | None = None
    role: str | None = None
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    log_dir: Path | None = None
    redirects: str | None = None
    tee: str | None = None
    local_ranks_filter: str | None = None
    duplicate_stdout_filters: str | None = None
    duplicate_stderr_filters: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    logs_specs: str | None = None
    numa_binding: str | None = None
    signals_to_handle: str | None = None
    shutdown_timeout: float | None = None
    virtual_local_rank: bool = False
    # the names of options that came from the environment
    from_environment: frozenset[str] = frozenset()

    def source(self, *names: str) -> OptionSource:
        """Return the source of these options that takes precedence."""
        return max(self._source(name) for name in names)

    def _source(self, name: str) -> OptionSource:
        if getattr(self, name) in (None, False):
            return OptionSource.NOT_GIVEN
        return OptionSource.ENVIRONMENT if name in self.from_environment else OptionSource.COMMAND_LINE


def flag(name: str) -> str:
    """Return the option as users type it, such as ``--nproc-per-node``."""
    return f"--{name.replace('_', '-')}"


_COUNT = Whole(1)
_FILE = click.Path(path_type=Path)


def _ours(name: str, type: Any = str, help: str = "", **more: Any) -> Callable[[F], F]:
    return _option("ELASTICD", (name,), type=type, help=help, **more)


def _torchruns(*names: str, type: Any = str, help: str = "", **more: Any) -> Callable[[F], F]:
    return _option("PET", names, type=type, help=help, **more)


def _option(whose: str, names: tuple[str, ...], **more: Any) -> Callable[[F], F]:
    destination = names[-1].lstrip("-").replace("-", "_")
    return cloup.option(*names, destination, envvar=f"{whose}_{destination.upper()}", **more)


def _our_switch(name: str, help: str) -> Callable[[F], F]:
    return _ours(name, Switch(), help, is_flag=True, default=False)


def _torchruns_switch(*names: str, help: str) -> Callable[[F], F]:
    return _torchruns(*names, type=Switch(), help=help, is_flag=True, default=False)


_ETCD_OPTION = _ours("--etcd", help="Endpoints of etcd: http://a:2379,http://b:2379", metavar="URLS")
_LOGIN_OPTIONS: tuple[Decorator, ...] = (
    _ours("--etcd-cacert", _FILE, "CA certificate for https:// endpoints."),
    _ours("--etcd-cert", _FILE, "Client certificate."),
    _ours("--etcd-key", _FILE, "Key of the client certificate."),
    _ours("--etcd-user", help="User name in etcd, which needs https:// endpoints."),
    _ours(
        "--etcd-password-file",
        _FILE,
        "Password of --etcd-user, as a file or pipe; else ELASTICD_ETCD_PASSWORD.",
    ),
)


def _add(decorators: Sequence[Decorator], command: F) -> F:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def etcd_options(command: F) -> F:
    """Add the options for etcd's address and login, which all commands share."""
    return _add((_ETCD_OPTION, *_LOGIN_OPTIONS), command)


# The groups of options in the help of ``elasticd run``.
_BASIC_GROUPS: tuple[Decorator, ...] = (
    cloup.option_group(
        "How many workers",
        _ours("--min", _COUNT, "Fewest workers to train with."),
        _ours("--max", _COUNT, "Most workers to train with."),
        _ours(
            "--slots",
            help="Workers that this node offers: a number, or auto (one per GPU, else one per core).",
            metavar="N|auto",
        ),
        _torchruns(
            "--nproc-per-node", help="Workers that a node offers: a number, auto, cpu, gpu or xpu.  [1]"
        ),
        _torchruns(
            "--nnodes",
            help="Nodes: N or MIN:MAX. The limits in workers are --nproc-per-node times that.  [1]",
        ),
    ),
    cloup.option_group(
        "The job",
        _ours("--job", help="Name of the job; the same on all its nodes."),
        _ETCD_OPTION,
        _torchruns_switch("--standalone", help="One node, without a shared etcd."),
        _torchruns_switch("-m", "--module", help="The script is a module, as with python -m."),
    ),
    cloup.option_group(
        "Failures and hangs",
        _torchruns("--max-restarts", type=Whole(0), help="Failures to survive within an hour.  [10]"),
        _ours(
            "--hang-after",
            help="Time without a step after which a worker counts as hung: seconds, auto (learned from the "
            "job's steps) or off.  [auto]",
            metavar="auto|SECONDS|off",
        ),
        _our_switch(
            "--debug", "Record the collectives, weights and data of all ranks, and say where ranks disagree."
        ),
    ),
    cloup.option_group(
        "Checkpoints",
        _ours(
            "--checkpoints",
            help="Where worker.State and worker.Checkpoints() save: a folder that all nodes can write to, "
            "or an address such as s3://bucket/run1.",
            metavar="PATH|URL",
        ),
        _ours(
            "--checkpoint-every",
            help="How often to save: steps (100), time (90s, 10m, 1h), or auto (from the cost of a save and "
            "the rate of failures).",
            metavar="N|TIME|auto",
        ),
    ),
    cloup.option_group(
        "Output and metrics",
        _torchruns("--log-dir", type=_FILE, help="Folder for the workers' output."),
        _ours(
            "--http",
            help="Where metrics and a status page are served, or off.  [127.0.0.1:9408, or a free port]",
            metavar="HOST:PORT|off",
        ),
        _our_switch("--plain", "No live view, even on a terminal."),
    ),
)
_OTHER_GROUPS: tuple[Decorator, ...] = (
    cloup.option_group(
        "Units and sizes",
        _ours(
            "--unit",
            _COUNT,
            "Train with whole units of N workers each, such as the stages of a pipeline: ranks 0 to N-1 are "
            "the first unit. --min and --max are multiples of N.  [1]",
            metavar="N",
        ),
        _ours(
            "--unit-within",
            click.Choice(["node", "any"]),
            "Where the workers of a unit may be: on one node, or also on neighbouring ones if they do not "
            "fit on one.  [any]",
        ),
        _ours("--sizes", help="The only numbers of workers to train with: 2,4,8", metavar="N,N,..."),
    ),
    cloup.option_group(
        "Names and addresses",
        _ours("--node", help="Name of this node.  [the host's name, with a number if that name is taken]"),
        _ours(
            "--address",
            help="Address at which other nodes reach this node. gloo and NCCL use the interface of this "
            "address.",
        ),
    ),
    cloup.option_group(
        "The login to etcd",
        *_LOGIN_OPTIONS,
    ),
    cloup.option_group(
        "Waits",
        _ours("--join-timeout", Seconds(), "Seconds to wait for --min workers, else exit code 3.  [600]"),
        _ours("--grow-cooldown", Seconds(), "Seconds that a round lasts before the job may grow.  [30]"),
        _ours(
            "--node-ttl",
            Seconds(2.0, ", and etcd keeps no lease shorter than that"),
            "Seconds after which a silent node counts as lost.  [5]",
        ),
        _ours(
            "--etcd-wait",
            Seconds(),
            "Seconds to wait for etcd at the start, else exit code 4.  [5, else code 2]",
        ),
        _ours(
            "--policy",
            _FILE,
            "TOML file with further settings for waits, failures, hangs and stragglers: see docs/policy.md",
        ),
    ),
    cloup.option_group(
        "Workers that start, hang or train badly",
        _our_switch(
            "--fresh-start",
            "Start workers as new processes, not as forks of one that has imported torch; slower restarts.",
        ),
        _ours(
            "--spares",
            type=Whole(0),
            default=0,
            help="Extra workers that wait to replace failed ones, for scripts that use elasticd.worker.  [0]",
            metavar="N",
        ),
        _ours(
            "--memory",
            help="Memory that this node's workers may use together: 24G. If a sharded model needs "
            "more than the nodes have, the job waits for more workers. off: do not compare.  [that of the "
            "control group or the machine]",
            metavar="SIZE",
        ),
        _ours(
            "--stragglers",
            type=click.Choice(["report", "drain"]),
            help="What to do about a worker that is slower than its peers, or whose GPU has errors: report "
            "the worker, or leave its slot out for a while.  [report]",
        ),
        _ours(
            "--on-nonfinite",
            type=click.Choice(["ignore", "stop", "rollback"]),
            help="What to do if a script reports a loss or gradient that is NaN or infinite: count the "
            "step, stop the job (exit code 6), or go back to the last checkpoint. The third return without "
            "progress stops the job.  [ignore]",
        ),
    ),
    cloup.option_group(
        "More of checkpoints",
        _ours(
            "--checkpoint-rate",
            help="Most bytes of checkpoints that a node writes per second while it trains: 200M.  [no limit]",
            metavar="SIZE",
        ),
        _ours(
            "--resume",
            click.Choice(["auto", "required", "never"]),
            "auto: load the newest whole checkpoint, if there is one. required: end with exit code 5 if "
            "there is none. never: load only checkpoints of this job.",
            default="auto",
        ),
        _ours(
            "--replicate",
            type=Whole(0, 1),
            default=0,
            help="Number of other nodes that keep a copy of this node's checkpoints in memory.  [0]",
            metavar="0|1",
        ),
        _our_switch(
            "--audit",
            "Have workers note which samples they use, for `elasticd audit`; see elasticd.worker.Data.",
        ),
    ),
    cloup.option_group(
        "More of output and metrics",
        _ours("--http-cert", _FILE, "Certificate for serving metrics and status over https."),
        _ours("--http-key", _FILE, "Key of the certificate of --http-cert."),
        _ours(
            "--http-token-file",
            _FILE,
            "File with the token that clients need for metrics and status. /healthz and /readyz need none.",
        ),
        _ours(
            "--log-format",
            click.Choice(["auto", "console", "json"]),
            "auto: console on a terminal, else json.",
            default="auto",
        ),
        _ours(
            "--log-level",
            click.Choice(["debug", "info", "warning", "error"]),
            "Least severe events that are logged; else LOGLEVEL.  [info]",
        ),
        _ours("--termination-log", _FILE, "File to write the reason of the end to, for Kubernetes."),
    ),
    cloup.option_group(
        "torchrun's rendezvous",
        _torchruns("--rdzv-backend", help="etcd-v3 (or etcd, etcd-v2): --rdzv-endpoint is an etcd."),
        _torchruns("--rdzv-endpoint", help="HOST:PORT of the etcd."),
        _torchruns("--rdzv-id", help="Name of the job, as --job."),
        _torchruns("--rdzv-conf", help="key=value,…: timeouts and certificates."),
        _torchruns(
            "--master-addr",
            help="Ignored, except that --master-port also listens at this address if it is this node's.",
        ),
        _torchruns(
            "--master-port",
            type=Whole(0, 65_535),
            help="Port that forwards to the store of each round, for scripts with init_method=tcp://.",
        ),
        _torchruns("--local-addr", help="Address at which other nodes reach this one, as --address."),
    ),
    cloup.option_group(
        "torchrun's workers",
        _torchruns("--role", help="Role of the workers, for their environment.  [default]"),
        _torchruns_switch("--no-python", help="The script is an executable program, not Python."),
        _torchruns_switch(
            "--run-path", help="SCRIPT is the path of a Python file: -m and --no-python are ignored."
        ),
        _torchruns(
            "--numa-binding",
            type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
            help="Bind workers to the cores near their GPU.",
        ),
        _torchruns(
            "--signals-to-handle", help="Signals that drain this node.  [SIGTERM,SIGINT,SIGHUP,SIGQUIT]"
        ),
        _torchruns("--shutdown-timeout", type=Seconds(), help="Seconds between SIGTERM and SIGKILL.  [30]"),
        _torchruns_switch("--virtual-local-rank", help="Give every worker LOCAL_RANK 0 and one visible GPU."),
    ),
    cloup.option_group(
        "torchrun's output",
        _torchruns(
            "-r", "--redirects", help="Output to files: 0 no, 1 stdout, 2 stderr, 3 both; or RANK:0-3,…"
        ),
        _torchruns("-t", "--tee", help="Output to files and the terminal, as for --redirects."),
        _torchruns("--local-ranks-filter", help="Local ranks whose output is shown: 0,1,2"),
        _torchruns(
            "--duplicate-stdout-filters", help="Copy lines of stdout with these words to a file: apple,orange"
        ),
        _torchruns("--duplicate-stderr-filters", help="Copy lines of stderr with these words to a file."),
        _torchruns("--logs-specs", help="An entry point of the group torchrun.logs_specs."),
    ),
)
_WITHOUT_EFFECT: tuple[Decorator, ...] = (
    _torchruns("--monitor-interval", type=float, help="Ignored.", hidden=True),
    _torchruns(
        "--start-method",
        type=click.Choice(["spawn", "fork", "forkserver"]),
        help="Ignored.",
        hidden=True,
    ),
    _torchruns("--event-log-handler", help="Ignored.", hidden=True),
    _torchruns("--node-rank", type=int, help="Ignored.", hidden=True),
)


def _in_full(token: str) -> str:
    """Return the full name of an option: underscores become dashes, and an unambiguous prefix is
    completed."""
    token = token.replace("_", "-")
    names = _names()
    if token in names or len(token) < 2:
        return token
    begun = [name for name in names if name.startswith(token)]
    return begun[0] if len(begun) == 1 else token


@cache
def _names() -> frozenset[str]:
    """Return the names of the long options, without dashes."""

    def command() -> None: ...

    run_options(command)
    options: list[click.Parameter] = command.__click_params__  # type: ignore[attr-defined]  # as click keeps them
    return frozenset({"help"} | {n[2:] for o in options for n in o.opts if n.startswith("--")})


def _kind(option: click.Option) -> OptionKind:
    if option.is_flag:
        return OptionKind.FLAG
    if isinstance(option.type, Whole | Seconds | click.types.IntParamType | click.types.FloatParamType):
        return OptionKind.NUMBER
    return OptionKind.TEXT if isinstance(option.type, click.Path) else OptionKind.ANY


CONTEXT_SETTINGS: dict[str, Any] = {
    # Options end at the first positional argument: the script's options are never parsed.
    "allow_interspersed_args": False,
    "token_normalize_func": _in_full,
    "max_content_width": 100,
}


class RunCommand(cloup.Command):
    """A command with the options of ``elasticd run``, of which ``--help`` lists the basic ones. A job file in
    place of the script gives the options that neither the command line nor the environment has."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or not any(arg.endswith(SUFFIX) for arg in args):
            return super().parse_args(ctx, args)
        found = self.make_context(ctx.info_name, [*args], ctx.parent, resilient_parsing=True).params
        target = found.get("target")
        if isinstance(target, str) and target.endswith(SUFFIX):
            kinds = {
                option.name: _kind(option)
                for option in self.params
                if isinstance(option, click.Option) and option.name is not None and option.expose_value
            }
            try:
                job = read_job_file(Path(target), kinds)
            except CommandError as error:
                raise click.UsageError(error.sentence, ctx) from error
            ctx.default_map = dict(job.options)
            at = len(args) - len(found["args"] or ()) - 1
            args = [*args[:at], job.script, *job.args, *args[at + 1 :]]
        return super().parse_args(ctx, args)

    def format_params(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        basic = len(_BASIC_GROUPS)
        for group in self.option_groups[basic:]:
            group.hidden = not ctx.meta.get(_HELP_ALL)
        super().format_params(ctx, formatter)


def _print_all_help(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        say(*ctx.get_help().splitlines())
        ctx.exit()


def run_options(command: F) -> F:
    """Add all options of ``elasticd run``, TARGET and ARGS to a command."""
    command = click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")(command)
    command = click.argument("target", type=click.UNPROCESSED, metavar="SCRIPT")(command)
    help_all = cloup.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_all_help,
        help="Show all options and exit.",
    )
    return _add((*_BASIC_GROUPS, *_OTHER_GROUPS, *_WITHOUT_EFFECT, help_all), command)


def collect(ctx: click.Context, etcd_password: str | None) -> RunOptions:
    """Return the options that click parsed, as RunOptions."""
    known = {f.name for f in fields(RunOptions)}
    environment = frozenset(
        name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    )
    values = {name: value for name, value in ctx.params.items() if name in known}
    return RunOptions(**values, etcd_password=etcd_password, from_environment=environment)
