"""The agent's part in forking workers: keep a zygote that has imported the workers' modules.

Before the first workers start, the zygote imports the modules with which the script begins, in the script's
order. Workers report all their imports after the first optimizer step
(elasticd/worker/boot/elasticd_heartbeat.py), and the zygote imports the rest. Without a zygote, workers start
as fresh processes; so does a worker that needs another environment or another command than the zygote's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticd.channel.warden_messages import Ended, ImportModules, Personal, ZygoteNews
from elasticd.procs.page import VARIABLE
from elasticd.procs.warden_client import Warden

LogFunction = Callable[..., object]

# Variables that may differ between a worker and its zygote: no module may read them on import.
PERSONAL = frozenset(
    f"{whose}{what}" for whose in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
) | {"MASTER_ADDR", "MASTER_PORT"}
PERSONAL_PREFIXES = ("TORCHELASTIC_", "ELASTICD_")
_PADDING_BYTES = 4096  # room for a worker's own variables, where /proc/pid/environ shows them
_DEATHS_MAX = 3  # deaths of zygotes after which no other is started, for example because memory is short
_NAMES_BYTES_MAX = 1 << 22


@dataclass(frozen=True, slots=True)
class _Model:
    """The command, environment and folder with which a worker was started. ``env`` is without the variables
    that differ between workers."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str


class Preload:
    """Manages the zygote of a node. ``folder``: the folder of the workers' pages, which gets the socket for
    their reports. ``say``: takes the name of an event (``zygote.ready``, ``left_out``, ``ended`` or
    ``given_up``) and its fields. ``imports``: the imports with which the script begins; "package:name" means
    ``from package import name``."""

    def __init__(self, warden: Warden, folder: Path, say: LogFunction, imports: tuple[str, ...] = ()) -> None:
        self._warden = warden
        self._say = say
        self._imports = imports
        self._modules: dict[str, None] = {}
        self._left_out: dict[str, str] = {}
        self._latest: _Model | None = None
        self._serving: _Model | None = None
        self._generation = 0
        self._deaths = 0
        self.ready = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(folder / "imports"))
        os.chmod(folder / "imports", 0o600)
        warden.watch(self._socket, self._told)

    def suits(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> bool:
        """Return whether this worker may be forked, as far as the agent can tell without the zygote."""
        model = _Model(tuple(argv), _shared(env), cwd)
        self._latest = model
        serving = self._serving
        return (
            serving is not None
            and model.env == serving.env
            and model.cwd == serving.cwd
            and len(model.argv) == len(serving.argv)
            and model.argv[:3] == serving.argv[:3]
        )

    def begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start the zygote ahead of such workers, if it is known what to import."""
        self._latest = _Model(tuple(argv), _shared(env), cwd)
        if self._imports:
            self._start()

    def close(self) -> None:
        """Stop learning. The zygote ends with the warden."""
        self._generation += 1
        self._warden.unwatch(self._socket)

    # ------------------------------------------------------------ in the warden client's thread

    def _told(self) -> None:
        """Read the names of imported modules that workers have sent."""
        known = len(self._modules)
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._socket.recv(1 << 20)
                try:
                    names = zlib.decompressobj().decompress(data, _NAMES_BYTES_MAX).decode().split("\n")
                except (zlib.error, UnicodeDecodeError):
                    continue  # the sender is not a worker of this node
                self._modules.update(dict.fromkeys(filter(None, names)))
        if len(self._modules) == known and self._serving is not None:
            return
        if self._serving is None or (self._latest is not None and self._latest.env != self._serving.env):
            self._start()
        else:
            self._ask(_packages_first(list(self._modules)[known:]))

    def _start(self) -> None:
        model = self._latest
        if model is None or self._deaths >= _DEATHS_MAX:
            return
        self._serving, self.ready = model, False
        self._generation += 1
        generation = self._generation
        out = [os.memfd_create("elasticd-said", os.MFD_CLOEXEC) for _ in (1, 2)]
        self._warden.start_zygote(
            model.argv,
            # The padding comes last, so that a worker's own variables overwrite only padding.
            env={**model.env, "ELASTICD_ZYGOTE": "-" * _PADDING_BYTES},
            cwd=model.cwd,
            fds=[os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), *out],
            heard=lambda news: self._heard(generation, news),
            ended=lambda end: self._ended(generation, end),
        )
        if self._imports:
            self._ask(self._imports, in_order=True)
        if self._modules or not self._imports:
            self._ask(_packages_first(self._modules))

    def _ask(self, modules: tuple[str, ...], *, in_order: bool = False) -> None:
        self.ready = False
        personal = Personal(tuple(sorted(PERSONAL)), PERSONAL_PREFIXES)
        self._warden.preload(ImportModules(modules, personal, self._left_out, in_order))

    def _heard(self, generation: int, news: ZygoteNews) -> None:
        if generation != self._generation:
            return
        for name, why in news.left_out.items():
            if self._left_out.setdefault(name, why) is why:
                self._say("zygote.left_out", module=name, why=why)
        if news.unfit:
            self._deaths = _DEATHS_MAX  # start no other zygote, since it would be unfit too
            self._say("zygote.given_up", why=news.unfit)
        if news.ready:
            self.ready = True
            more = {"untried": news.untried, "why": "too many modules cannot be imported before the fork"}
            self._say("zygote.ready", **(more if news.untried else {}))

    def _ended(self, generation: int, end: Ended) -> None:
        if generation != self._generation or self._warden.closing:
            return
        self._serving, self.ready = None, False
        if self._deaths >= _DEATHS_MAX:
            return
        self._deaths += 1
        self._say("zygote.ended", code=end.code)
        if self._deaths < _DEATHS_MAX:
            self._start()
        else:
            self._say("zygote.given_up", why=f"it has ended {_DEATHS_MAX} times")


def _packages_first(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the modules in the order to import them: packages before their modules, as scripts do.

    The order matters where modules import each other. Workers report the order of ``sys.modules``, in which a
    package comes after the modules that it imports.
    """
    return tuple(sorted(modules, key=lambda name: name.count(".")))


def _shared(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name not in PERSONAL and not name.startswith(PERSONAL_PREFIXES) and name != VARIABLE
    }
