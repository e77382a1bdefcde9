"""The ``elasticd`` command. The module of a subcommand is imported only when the subcommand is used."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from elasticd import __version__
from elasticd.cli.command_error import CommandError
from elasticd.cli.machine import working_directory_fault
from elasticd.cli.say import say
from elasticd.procs.init import fork_from_process_1
from elasticd.procs.linux import hide_memory
from elasticd.telemetry.termination import TerminationLog

_COMMANDS = {
    "run": "elasticd.cli.run_command:run",
    "status": "elasticd.cli.status_command:status",
    "ls": "elasticd.cli.status_command:ls",
    "scale": "elasticd.cli.job_commands:scale",
    "drain": "elasticd.cli.job_commands:drain",
    "stop": "elasticd.cli.job_commands:stop",
    "forget": "elasticd.cli.job_commands:forget",
    "top": "elasticd.cli.status_command:top",
    "events": "elasticd.cli.history_commands:events",
    "logs": "elasticd.cli.history_commands:logs",
    "report": "elasticd.cli.history_commands:report",
    "audit": "elasticd.cli.audit_command:audit",
    "debug": "elasticd.cli.debug_command:debug",
    "ckpt": "elasticd.cli.ckpt_command:ckpt",
    "etcd-role": "elasticd.cli.etcd_role_command:etcd_role",
    "doctor": "elasticd.cli.doctor.doctor_command:doctor",
    "bench": "elasticd.cli.bench.scaling_command:bench",
    "demo": "elasticd.cli.example_commands:demo",
    "export": "elasticd.cli.example_commands:export",
    "version": "elasticd.cli.main:version",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elasticd", message="%(prog)s %(version)s")
def cli() -> None:
    """Keeps PyTorch training running on machines that fail, get preempted, and come back."""


@click.command()
def version() -> None:
    """Print the version."""
    say(f"elasticd {__version__}")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit. Errors that users can fix are one sentence on stderr."""
    _open_missing_streams()
    # Otherwise the password would be visible in /proc, also if this is process 1.
    if os.environ.get("ELASTICD_ETCD_PASSWORD"):
        hide_memory()
    fork_from_process_1()
    sys.exit(_exit_code(argv))


def _open_missing_streams() -> None:
    """Open /dev/null for each standard stream that is closed (``>&-``). Otherwise the next file or socket
    would get its number, and receive what is printed; Python has no stream object for it either."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The descriptor gets the lowest free number, which is the closed stream's.
            os.open(os.devnull, os.O_RDWR)
            stream = os.fdopen(number, "r" if number == 0 else "w", closefd=False)
            setattr(sys, name, stream)


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        result = cli.main(args=argv, prog_name="elasticd", standalone_mode=False)
        sys.stdout.flush()
    except CommandError as error:
        _say(error.sentence)
        return error.code
    except click.exceptions.NoArgsIsHelpError as error:
        say(*error.format_message().splitlines())
        return 2
    except click.ClickException as error:
        sentence = _sentence(error)
        _say(sentence)
        _write_termination_log(error, sentence)
        return 2
    except FileNotFoundError:
        sentence = working_directory_fault()
        if not sentence:
            raise
        _say(sentence)
        return 2
    except PermissionError as error:  # elasticd's own folders or the Python interpreter cannot be used
        _say(f"{error}.")
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of stdout has closed the pipe
        _drop_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        _say(f"the output cannot be written: {error.strerror}.")
        return 2
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Discard the rest of the output; otherwise Python would report the error again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(sentence: str) -> None:
    one_line = " ".join(sentence.split())
    say(f"elasticd: {one_line}", err=True)


def _write_termination_log(error: click.ClickException, sentence: str) -> None:
    """Write the termination log if ``elasticd run`` had bad options. The path comes from the environment,
    since the options are unknown."""
    path = os.environ.get("ELASTICD_TERMINATION_LOG")
    if path and isinstance(error, click.UsageError) and error.ctx and error.ctx.info_name == "run":
        TerminationLog(Path(path)).write(sentence)


def _sentence(error: click.ClickException) -> str:
    """Return click's message, and the variable's name if the value came from the environment."""
    message = error.format_message()
    if message.startswith(("Missing argument", "No such")) and message.endswith("."):
        name = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "elasticd"
        return f"{message} See `{name} --help`."
    if isinstance(error, click.BadParameter) and error.ctx and error.param and error.param.name:
        source = error.ctx.get_parameter_source(error.param.name)
        names = error.param.envvar
        if source is ParameterSource.ENVIRONMENT and names:
            candidates = [names] if isinstance(names, str) else names
            name = next((n for n in candidates if os.environ.get(n)), candidates[0])
            message = f"{message.rstrip('.')} (from the environment variable {name})."
        elif source is ParameterSource.DEFAULT_MAP:
            message = f"{message.rstrip('.')} (from the job file)."
    return message


if __name__ == "__main__":
    main()
