"""The messages between agent, warden and zygote. Standard library only, and loaded by path: see the package.

The agent asks the warden to start and stop processes, and the warden reports their starts and ends. It
asks the zygote to import modules and to fork workers. ``id`` is the agent's number of a process, before the
process has a pid and after it has ended.
"""

# The annotations are evaluated here, because the zygote loads this file under another name.

from dataclasses import dataclass, field

from .codec import Codec


@dataclass(frozen=True, slots=True)
class Program:
    """A command to run. The strings are UTF-8 with surrogate escapes, whatever the encoding of the sender."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


# ------------------------------------------------------------ agent to warden


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process whose first descriptors are the message's files; ``Warden.spawn_worker`` explains the
    fields. A service ends with its agent, but neither the fence nor ``StopProcesses`` ends it. ``fork``: fork
    the process from the zygote, if there is one; a service that is forked serves the stores of rounds in
    place of its program."""

    id: int
    program: Program
    mark: str = ""
    page: str = ""
    service: bool = False
    whole_group: bool = False
    fork: bool = False


@dataclass(frozen=True, slots=True)
class StartZygote:
    """Start the zygote, or replace it. Its descriptors are the message's files, and then its channel."""

    id: int
    program: Program


@dataclass(frozen=True, slots=True)
class Personal:
    """The variables that differ between workers, by name and by the beginning of the name."""

    names: tuple[str, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportModules:
    """Have the zygote import the modules. The warden passes this message on. "package:name" means ``from
    package import name``. ``left_out``: modules that cannot be shared, and why. ``in_order``: import nothing
    after a module that is left out, since the later module may rely on the one left out."""

    modules: tuple[str, ...]
    personal: Personal
    left_out: dict[str, str]
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class StopProcesses:
    """Signal workers, and SIGKILL them after the grace. Signal 0: only the SIGKILL. ``ids`` None: all."""

    signal: int
    grace_s: float
    ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class SpareWorker:
    """Cancel the SIGKILL at the end of the worker's grace."""

    id: int


@dataclass(frozen=True, slots=True)
class StopService:
    """Send SIGTERM, and SIGKILL after the grace."""

    id: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class MoveFence:
    """Kill all workers at ``until`` (``steady_now``); None: never."""

    until: float | None


@dataclass(frozen=True, slots=True)
class RemoveAtEnd:
    """Remove the file or folder when the agent has exited."""

    path: str


@dataclass(frozen=True, slots=True)
class CloseWarden:
    """End all processes, and then exit. The agent's death has the same effect, without grace."""

    grace_s: float


AgentToWarden = (
    Spawn
    | StartZygote
    | ImportModules
    | StopProcesses
    | SpareWorker
    | StopService
    | MoveFence
    | RemoveAtEnd
    | CloseWarden
)


# ------------------------------------------------------------ warden to agent


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process runs."""

    id: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. ``code``: its exit status, or minus the signal that killed it.

    ``at``: seconds since the epoch. ``error``: why it could not be started (code 127). ``fenced``: the warden
    killed it because the agent did not move the fence in time, or the warden itself was killed. ``lingers``:
    the kernel is still taking the process down, and ``Gone`` follows.
    """

    id: int
    pid: int
    code: int
    at: float
    error: str = ""
    fenced: bool = False
    lingers: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """The kernel has taken a process down that lingered."""

    id: int


@dataclass(frozen=True, slots=True)
class LateNotices:
    """Deaths are noticed only once processes are gone, and ``why``."""

    why: str


@dataclass(frozen=True, slots=True)
class Leftover:
    """The warden closes, but the kernel is still taking these processes down. The warden waits for them for
    ``waits_s``; 0: it leaves them."""

    pids: tuple[int, ...]
    waits_s: float


@dataclass(frozen=True, slots=True)
class ZygoteNews:
    """News of the zygote. ``ready``: it has imported all requested modules except ``untried`` ones.
    ``left_out``: modules that cannot be shared, and why. ``unfit``: why no zygote can work."""

    id: int
    ready: bool = False
    untried: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    unfit: str = ""


WardenToAgent = Spawned | Ended | Gone | LateNotices | Leftover | ZygoteNews


# ------------------------------------------------------------ warden to zygote, and zygote to embryo


@dataclass(frozen=True, slots=True)
class ForkWorker:
    """Fork a worker with the files of the message. The last file is the link on which the worker waits until
    the warden lets it run."""

    id: int
    program: Program


@dataclass(frozen=True, slots=True)
class ForkStore:
    """Fork the process that serves the stores of rounds, with the files of the message. The last file is a
    link, as for ``ForkWorker``."""

    id: int


WardenToZygote = ImportModules | ForkWorker | ForkStore


# ------------------------------------------------------------ zygote to warden, embryo to zygote


@dataclass(frozen=True, slots=True)
class Forked:
    """Workers are forked. ``pids``: pairs of id and pid; pid 0 where the fork failed."""

    pids: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """All modules of the first ``asked`` requests are imported, but for ``untried`` modules."""

    asked: int
    untried: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Modules that cannot be shared, and why."""

    modules: dict[str, str]


@dataclass(frozen=True, slots=True)
class NoZygote:
    """No zygote can work with this Python."""

    why: str


ZygoteToWarden = Forked | Imported | LeftOut | NoZygote


@dataclass(frozen=True, slots=True)
class Importing:
    """A child of the zygote begins to import the module. ``LeftOut`` follows if the module cannot be
    shared."""

    module: str


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The child of the zygote has imported its share, and is the zygote from now on."""


ChildToZygote = Importing | LeftOut | Succeeded


@dataclass(frozen=True, slots=True)
class Accepted:
    """The embryo, a process that was forked in advance, accepts a request and becomes the worker."""


AGENT_TO_WARDEN: Codec[AgentToWarden] = Codec(AgentToWarden, bytes_max=1 << 24)
WARDEN_TO_AGENT: Codec[WardenToAgent] = Codec(WardenToAgent, bytes_max=1 << 24)
WARDEN_TO_ZYGOTE: Codec[WardenToZygote] = Codec(WardenToZygote, bytes_max=1 << 24)
ZYGOTE_TO_WARDEN: Codec[ZygoteToWarden] = Codec(ZygoteToWarden, bytes_max=1 << 24)
CHILD_TO_ZYGOTE: Codec[ChildToZygote] = Codec(ChildToZygote)
EMBRYO_TO_ZYGOTE: Codec[Accepted] = Codec(Accepted)
