"""Where the job's nodes meet: the etcd and the job's name, from elasticd's and torchrun's options. Pure,
except that certificate files are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticd.cli.command_error import CommandError
from elasticd.cli.option_types import MOST
from elasticd.cli.options import OptionSource, RunOptions
from elasticd.etcd import names
from elasticd.etcd.access import EtcdAccess, parse_endpoints

ETCD_BACKENDS = frozenset({"etcd", "etcd-v2", "etcd-v3"})

_HOW = "give --etcd http://HOST:2379 on each node"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the job's nodes meet. ``etcd``: None for a standalone run; ``job``: None if the user gave no
    name. ``timing``: settings of the policy from torchrun's --rdzv-conf, in seconds; None if not given."""

    etcd: EtcdAccess | None
    job: str | None
    timing: Mapping[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Conf:
    """The values of --rdzv-conf. Keys that were read are noted in ``used``."""

    values: dict[str, str]
    used: set[str] = field(default_factory=set)

    def text(self, *names: str) -> str | None:
        found = None
        for name in names:
            if name in self.values:
                self.used.add(name)
                found = self.values[name] if found is None else found
        return found

    def seconds(self, *names: str) -> float | None:
        text = self.text(*names)
        if text is None:
            return None
        said = next(name for name in names if name in self.values)
        try:
            value = float(text)
        except ValueError:
            raise CommandError(f"--rdzv-conf {said}={text} is not a number.") from None
        if not 0 <= value <= MOST:
            raise CommandError(f"--rdzv-conf {said}={text} is not a length of time.")
        return value

    def unused(self) -> list[str]:
        return sorted(set(self.values) - self.used)


def check_name(what: str, name: str) -> str:
    """Return the name if it can be part of a key and an argument of a command. ``what``: "job" or "node".
    Raises CommandError."""
    try:
        names.check_name(name, what)
    except ValueError as error:
        raise CommandError(f"{error}.") from None
    if name.startswith("-"):
        raise CommandError(f"{name!r} cannot be the name of a {what}: it begins with a dash.")
    return name


def rendezvous(options: RunOptions, *, nodes_max: int, nodes_min: int) -> Rendezvous:
    """Return where the nodes meet. ``nodes_min`` and ``nodes_max`` come from torchrun's --nnodes. Raises
    CommandError."""
    notes: list[str] = []
    conf = _Conf(_parse_conf(options.rdzv_conf or ""))
    etcd = _etcd(options, conf, notes)
    if etcd is None:
        _check_alone(options, nodes_min, nodes_max, notes)
    interval, attempts = (
        conf.seconds("keep_alive_interval"),
        conf.seconds("keep_alive_max_attempt"),
    )
    ttl = (5 if interval is None else interval) * (3 if attempts is None else attempts)
    result = Rendezvous(
        etcd=etcd,
        job=_job(options, notes),
        timing={
            "join_timeout_s": conf.seconds("join_timeout", "timeout"),
            "settle_s": conf.seconds("last_call_timeout"),
            "node_ttl_s": min(max(2.0, ttl), MOST) if interval is not None or attempts is not None else None,
        },
        notes=tuple(notes),
    )
    if unused := conf.unused():
        plural = len(unused) > 1
        note = (
            f"{', '.join(unused)} of --rdzv-conf mean{'' if plural else 's'} nothing here: "
            f"{'they set' if plural else 'it sets'} up rendezvous back ends that elasticd does not use"
        )
        result = replace(result, notes=(*result.notes, note))
    return result


def _etcd(options: RunOptions, conf: _Conf, notes: list[str]) -> EtcdAccess | None:
    backend = options.rdzv_backend
    by_rdzv = backend in ETCD_BACKENDS and options.rdzv_endpoint is not None
    ours = options.source("etcd")
    torchruns = options.source("rdzv_endpoint") if by_rdzv else OptionSource.NOT_GIVEN
    alone = options.source("standalone")
    tls = {
        "cacert": options.etcd_cacert or conf.text("cacert", "ca_cert"),
        "cert": options.etcd_cert or conf.text("cert", "ssl_cert"),
        "key": options.etcd_key or conf.text("key", "ssl_cert_key"),
    }
    protocol, read_timeout_s = conf.text("protocol"), conf.seconds("read_timeout")
    if alone:
        if alone is ours:
            raise CommandError(
                "--standalone runs without a shared etcd, so it takes no --etcd: give one of them."
            )
        if alone >= max(ours, torchruns):
            return None
    if ours and ours >= torchruns:
        if by_rdzv and options.rdzv_endpoint != options.etcd:
            notes.append(f"--rdzv-endpoint {options.rdzv_endpoint} is ignored beside --etcd")
        text = options.etcd or ""
    elif torchruns:
        text = options.rdzv_endpoint or ""
        if "://" not in text and protocol:
            text = ",".join(f"{protocol}://{part}" for part in text.split(","))
    elif backend in ETCD_BACKENDS:
        raise CommandError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT, an etcd.")
    else:
        if any(tls.values()):
            raise CommandError("certificates for etcd are given, but no --etcd to use them with.")
        return None
    try:
        return parse_endpoints(
            text,
            **tls,
            username=options.etcd_user,
            password=options.etcd_password,
            timeout_s=read_timeout_s or 2.0,
        )
    except ValueError as error:
        raise CommandError(f"{error}.") from error


def _check_alone(options: RunOptions, nodes_min: int, nodes_max: int, notes: list[str]) -> None:
    """Check that only one node is requested, since there is no etcd."""
    backend, endpoint = options.rdzv_backend, options.rdzv_endpoint
    if options.standalone:
        if nodes_min > 1:
            raise CommandError(f"--standalone runs one node, but --nnodes asks for at least {nodes_min}.")
        if backend or endpoint:
            notes.append("--rdzv-backend and --rdzv-endpoint are ignored with --standalone")
        return
    if nodes_max > 1:
        told = f" (elasticd does not use the rendezvous of --rdzv-backend {backend})" if backend else ""
        raise CommandError(f"--nnodes {options.nnodes} needs an etcd in which the nodes meet: {_HOW}{told}.")
    said = [f for f, value in (("--rdzv-backend", backend), ("--rdzv-endpoint", endpoint)) if value]
    if said:
        verb = "mean" if len(said) > 1 else "means"
        notes.append(
            f"{' and '.join(said)} {verb} nothing here: elasticd's nodes meet in etcd, "
            "and a single node starts its own; for several nodes give --etcd"
        )


def _job(options: RunOptions, notes: list[str]) -> str | None:
    ours, torchruns = options.source("job"), options.source("rdzv_id")
    if ours and ours >= torchruns:
        if torchruns and options.rdzv_id != options.job:
            notes.append(f"--rdzv-id {options.rdzv_id} is ignored beside --job")
        return check_name("job", options.job or "")
    if torchruns and options.rdzv_id != "none":  # "none" is torchrun's default
        return check_name("job", options.rdzv_id or "")
    return None


def _parse_conf(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        key, equals, value = (p.strip() for p in part.partition("="))
        if not key or not equals or not value:
            raise CommandError(f"--rdzv-conf {text!r} is not of the form key=value,key=value.")
        values[key] = value
    return values
