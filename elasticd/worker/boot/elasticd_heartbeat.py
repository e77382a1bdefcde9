"""The heartbeat: tell the agent how many steps an unmodified script has made.

Every optimizer step is noted in a page of shared memory. After the first step, the heartbeat once sends the
names of the imported modules, for the zygote that forks later workers. From then on the heartbeat also serves
torch's flight recorder. On a signal, it appends the stacks of all threads to the page's file. At the end it
notes in the page that the script has ended well. For ``elasticd bench scaling``, the heartbeat also sends the
times of each step.

Standard library only, and self-contained: the worker's Python need not have elasticd installed. The layout is
that of elasticd/procs/page.py.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

from elasticd_afterimport import after_import
from elasticd_mutex import hold_mutex
from elasticd_recorder import serve
from elasticd_steptimes import step_times
from elasticd_waits import Waits

TYPE_CHECKING = False  # typing is not imported before the script imports it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_HOOKED = "torch.optim.optimizer"
# Words of 8 bytes, each stored by one instruction.
_PID, _STEPS, _LAST_NS, _STACKS, _ENDED_WELL = 2, 3, 4, 6, 7
# See elasticd/core/page_layout.py.
_WAIT_NS, _WAITS, _MADE, _DELAY_NS, _MEASURED, _MEASURED_NS = 17, 18, 23, 24, 27, 28
_MUTEX = 104
_TIMES, _TIMES_MASK = 256, 255  # the times of the last 256 steps: the second half of the page
_SIGNAL = 47  # a real-time signal, which programs do not use; see elasticd/procs/stacks.py

_IMPORTED_AGAIN_MAX = 16
preloaded: frozenset[str] = frozenset()  # the modules imported before the fork; set by the zygote


def start() -> None:
    """Claim the page, and wait until the script imports torch's optimizers."""
    path = os.environ.get("ELASTICD_PAGE")
    if path:
        fields = _claim(path)
        if fields is not None:
            _answer_with_stacks(fields, path)
            _prepare_the_end(fields)

            def hook(optimizers: Any) -> None:
                optimizers.register_optimizer_step_post_hook(_make_hook(fields, path))

            after_import({_HOOKED: hook})


def _claim(path: str) -> memoryview[int] | None:
    """Return the page's fields; None if a living process has claimed the page, since a worker has only one
    heartbeat. This process may have claimed the page itself: a subinterpreter runs sitecustomize again."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # Before 3.13 a mapping keeps a descriptor of its own, one file more in the worker.
        memory = mmap.mmap(fd, 4096, **({"trackfd": False} if sys.version_info >= (3, 13) else {}))
    finally:
        os.close(fd)
    if memory[:8] != b"ELASTICD":
        return None
    fields = memoryview(memory).cast("Q")
    if fields[1] != 1 or (fields[_PID] and _lives(fields[_PID])):
        return None
    fields[_PID] = os.getpid()
    fields[_ENDED_WELL] = 0
    try:
        hold_mutex(memory, 8 * _MUTEX)
    except Exception:  # noqa: BLE001, S110  # its death is then noticed later
        pass
    return fields


def _prepare_the_end(fields: memoryview[int]) -> None:
    import elasticd_ending

    def ended_well() -> None:
        fields[_ENDED_WELL] = 1

    elasticd_ending.on_success(ended_well)
    elasticd_ending.settle_after_groups()


def _answer_with_stacks(fields: memoryview[int], path: str) -> None:
    """Have faulthandler's C code write the stacks when the signal comes, even if Python code is stuck.

    Python's table of signal handlers, which scripts read and save, stays as it is.
    """
    known = "faulthandler" in sys.modules
    import faulthandler

    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        faulthandler.register(_SIGNAL, file=fd, all_threads=True, chain=False)
        fields[_STACKS] = fd + 1
    except (AttributeError, OSError, RuntimeError, ValueError):
        pass  # a hang is then judged without stacks
    if not known:
        del sys.modules["faulthandler"]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _make_hook(fields: memoryview[int], path: str) -> Callable[[Any, Any, Any], None]:
    """Return the function that runs after each step of each optimizer.

    It counts iterations, not steps. With several optimizers (the two of a GAN, one for each layer) all of
    them step in one iteration. A sum of their steps would be a multiple that changes with the phase of
    training. An iteration begins when an optimizer steps a second time.
    """
    waits = Waits()
    times = None
    known: set[int] = set()
    pid = fields[_PID]
    steps = fields[_STEPS]
    stepped: set[int] = set()
    getpid = os.getpid
    now_ns = time.monotonic_ns

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal steps, times
        if getpid() != pid:  # in a forked child, which may train a model of its own
            return
        key = id(optimizer)
        if key in stepped or not stepped:
            stepped.clear()
            steps += 1
            at_ns = now_ns()
            fields[_LAST_NS] = fields[_TIMES + (steps & _TIMES_MASK)] = at_ns
            if waits.step_ended(at_ns):
                fields[_WAIT_NS] = waits.total_ns
                fields[_WAITS] = waits.count
                fields[_DELAY_NS] = waits.delay_ns
                fields[_MEASURED] = waits.steps
                fields[_MEASURED_NS] = waits.steps_ns
            fields[_STEPS] = steps
            if steps == 1:
                fields[_MADE] = _counted(optimizer)
                _tell_imports(os.path.join(os.path.dirname(path), "imports"))
                _give_recorder(path)
                times = step_times(fields, waits)
                waits.always = times is not None
            if times is not None:
                times.note(steps, at_ns)
        else:
            fields[_LAST_NS] = now_ns()
        stepped.add(key)
        if key not in known:
            known.add(key)
            waits.follow(optimizer)
            if times is not None:
                times.follow(optimizer)

    # This is what torch.compiler.disable() sets, but without importing the compiler. A compiled step then
    # calls the hook as it is, and neither traces it nor recompiles as the count grows.
    hook._torchdynamo_disable = True
    hook._torchdynamo_disable_msg = None
    return hook


def _counted(optimizer: Any) -> int:
    """Return the optimizer's own count of steps, which snapshots keep: 1 after its very first step.

    Adam and similar optimizers count. Return 0 if the optimizer does not count, or if its count is on a GPU.
    """
    try:
        for state in optimizer.state.values():
            count = state.get("step", 0)
            return 0 if getattr(count, "is_cuda", False) else max(0, int(count))
    except Exception:  # noqa: BLE001, S110  # an unknown kind of state
        pass
    return 0


def _give_recorder(path: str) -> None:
    try:
        serve(f"{path}.recorder")
    except Exception:  # noqa: BLE001, S110  # a hang is then judged without the recorder
        pass


def _tell_imports(address: str) -> None:
    """Send the names of the modules imported so far, in order and without the preloaded ones, if the agent
    wants them."""
    try:
        if os.path.exists(address):
            imported = _imported()
            if preloaded and not imported:
                return
            import _socket
            import zlib

            names = zlib.compress("\n".join(imported).encode())
            with_fd = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK)
            try:
                with_fd.sendto(names, address)
            finally:
                with_fd.close()
    except Exception:  # noqa: BLE001, S110  # workers then start without preloaded modules
        pass


def _imported() -> list[str]:
    """Return the modules of the standard library and of installed packages, without the job's own."""
    # elasticd may be outside the standard library and site-packages (pip install -e, PYTHONPATH).
    homes = [os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))]
    homes += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    main = sys.modules.get("__main__")
    own = []
    if getattr(main, "__file__", None):
        own.append(os.path.dirname(os.path.abspath(main.__file__)))  # type: ignore[union-attr, arg-type]
    own.append(os.getcwd())
    own = [os.path.join(folder, "") for folder in own]
    # A virtual environment may lie in the script's folder.
    own = [folder for folder in own if not any(os.path.join(home, "").startswith(folder) for home in homes)]
    spec = getattr(main, "__spec__", None)
    # The package of a module that was started with python -m.
    own_package = spec.name.partition(".")[0] if spec else None
    found = []
    for name in _newest_modules():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        origin = getattr(spec, "origin", None)
        if (
            isinstance(origin, str)
            and getattr(spec, "name", None) == name
            and any(origin.startswith(os.path.join(home, "")) for home in homes)
            and not origin.startswith(tuple(own))
            and name.partition(".")[0] not in (own_package, "__main__", "sitecustomize", "usercustomize")
        ):
            found.append(name)
    return found


def _newest_modules() -> list[str]:
    """Return the names of the modules that were not preloaded, in the order of import.

    They are the last of all. Not all names are looked at, since the kernel would copy the pages of the names.
    A few preloaded modules may have been imported again.
    """
    new: list[str] = []
    old = 0
    for name in reversed(sys.modules if preloaded else list(sys.modules)):
        if name not in preloaded:
            new.append(name)
        elif (old := old + 1) > _IMPORTED_AGAIN_MAX:
            break
    return new[::-1]
