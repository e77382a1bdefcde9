"""The job's policy, and the agent's limits for hangs: from options, from the file of --policy, and from
torchrun's settings."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from elasticd.cli.command_error import CommandError
from elasticd.cli.option_types import MOST, InvalidValue, Ratio, Seconds, Whole
from elasticd.cli.options import RunOptions
from elasticd.core.facts import Policy, Resume
from elasticd.core.hang.judging import Patience

Settings = Mapping[str, Any]

SETTINGS: Final[Mapping[str, click.ParamType[Any]]] = {
    "settle_s": Seconds(),
    "grow_cooldown_s": Seconds(),
    "join_timeout_s": Seconds(),
    "shutdown_s": Seconds(),
    "broken_s": Seconds(),
    "part_s": Seconds(),
    "checkpoint_wait_s": Seconds(),
    "node_ttl_s": Seconds(2.0, ", and etcd keeps no lease shorter than that"),
    "restarts_max": Whole(0),
    "restart_window_s": Seconds(),
    "etcd_grace_s": Seconds(),
    "audit_every": Whole(1),
    "futile_max": Whole(0),
    "quarantine_after": Whole(0),
    "quarantine_s": Seconds(),
    "quarantine_max_s": Seconds(),
    "straggler_window_s": Seconds(),
    "straggler_ratio": Ratio(),
    "hang_floor_s": Seconds(),
    "hang_ceiling_s": Seconds(),
}
"""What the file of --policy may set; docs/policy.md says what each is for."""


def settings_in(path: Path | None) -> Settings:
    """Return the settings in a TOML file, checked one by one. Raises CommandError."""
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise CommandError(f"--policy {path}: {error.strerror}.") from error
    except ValueError as error:  # the file is not UTF-8, or not TOML
        raise CommandError(f"--policy {path} is not TOML: {error}.") from error
    except RecursionError as error:
        raise CommandError(f"--policy {path} is nested too deeply: each setting is a number.") from error
    return {name: _checked(path, name, value) for name, value in found.items()}


def _checked(path: Path, name: str, value: object) -> Any:
    kind = SETTINGS.get(name)
    if kind is None:
        close = difflib.get_close_matches(name, SETTINGS, 1)
        meant = f"; did you mean {close[0]}?" if close else f": the settings are {', '.join(SETTINGS)}."
        raise CommandError(f"--policy {path}: there is no setting {name}{meant}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CommandError(f"--policy {path}: {name} is not a number.")
    # An integer may have too many digits to be converted to text.
    if isinstance(value, int) and abs(value) > MOST:
        raise CommandError(f"--policy {path}: {name} is not between -{MOST:,} and {MOST:,}.")
    try:
        return kind.convert(value, None, None)
    except InvalidValue as error:
        raise CommandError(f"--policy {path}: {name}: {error.message}") from None


def policy(
    options: RunOptions, settings: Settings, environ: Mapping[str, str], torchruns: Settings
) -> Policy:
    """Return the policy from elasticd's options, then the file's ``settings``, then torchrun's, then the
    defaults. None stands for a setting that was not given. Raises CommandError."""
    default = Policy()
    ours = {
        "grow_cooldown_s": options.grow_cooldown,
        "join_timeout_s": options.join_timeout,
        "shutdown_s": options.shutdown_timeout,
        "node_ttl_s": options.node_ttl,
        "restarts_max": options.max_restarts,
    }
    layers = ({"shutdown_s": _torch_shutdown_s(environ)}, torchruns, settings, ours)
    given: dict[str, Any] = {
        name: value
        for layer in layers
        for name, value in layer.items()
        if value is not None and hasattr(default, name)
    }
    if "restarts_max" in given:  # the user wants that many restarts, even without progress
        given.setdefault("futile_max", given["restarts_max"] + 1)
    given.setdefault("quarantine_max_s", max(default.quarantine_max_s, given.get("quarantine_s", 0.0)))
    given.setdefault("quarantine_s", min(default.quarantine_s, given["quarantine_max_s"]))
    if given["quarantine_s"] > given["quarantine_max_s"]:
        raise CommandError(
            f"--policy: quarantine_s, {given['quarantine_s']:g}, is above quarantine_max_s, "
            f"{given['quarantine_max_s']:g}."
        )
    return Policy(**given, resume=Resume(options.resume), straggler_drain=options.stragglers == "drain")


def patience(options: RunOptions, settings: Settings) -> Patience | None:
    """Return the limits after which a worker counts as hung; None: no limit. Raises CommandError."""
    default = Patience()
    floor_s = settings.get("hang_floor_s", default.floor_s)
    ceiling_s = settings.get("hang_ceiling_s", max(default.ceiling_s, floor_s))
    if ceiling_s < floor_s:
        raise CommandError(f"--policy: hang_ceiling_s, {ceiling_s:g}, is below hang_floor_s, {floor_s:g}.")
    after = options.hang_after or "auto"
    if after == "auto":
        return Patience(floor_s, ceiling_s)
    if after == "off":
        return None
    try:
        seconds = float(after)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST:
        raise CommandError(f"--hang-after {after} is neither auto nor off nor a number of seconds above 0.")
    return Patience(fixed_s=seconds)


def _torch_shutdown_s(environ: Mapping[str, str]) -> float | None:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if not text:
        return None
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= MOST:
        raise CommandError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT is {text!r}; expected a number of seconds.")
    return float(seconds)
