"""Find out from the Python stack of a worker's main thread what the thread is doing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Frame:
    """One call. ``text``: the line of source, if it could be read."""

    file: str
    line: int
    function: str
    text: str = ""


Stack = Sequence[Frame]  # innermost first


class ActivityKind(StrEnum):
    COLLECTIVE = "collective"  # waits for other ranks
    PROGRAM = "program"  # waits for a program or a process that the thread started, the saver, or the agent
    OWN = "own"  # runs the script's or a library's code


@dataclass(frozen=True, slots=True)
class ThreadActivity:
    """The activity of a thread, and its place in the code. ``place``: such as "job.py:88", in the script if a
    frame of the script is on the stack. ``doing``: the collective, or a word for the work; empty if
    unknown."""

    kind: ActivityKind
    place: str
    doing: str = ""


_LIBRARY = re.compile(
    r"[/\\](site-packages|dist-packages|lib[/\\]python3[.\d]*|elasticd[/\\](worker|checkpoint|data))[/\\]|^<|^\?"
)
_TORCH = re.compile(r"[/\\]torch[/\\](.*)")
# Parts of torch.distributed that do work of their own and wait for no rank.
_OWN_WORK = re.compile(r"distributed[/\\](checkpoint|elastic|pipelining|optim)[/\\]")
_TALKING = re.compile(r"(distributed|nn[/\\]parallel)[/\\]")
_ENGINE = re.compile(r"autograd[/\\](graph|__init__)\.py")
# These calls wait in C++ code. A copy from the GPU waits for the GPU, which waits for other ranks. So does a
# copy to the GPU from memory that is not pinned. A library's frame counts, too. wait() waits for other ranks
# only where the script itself calls it.
_COPIED = re.compile(
    r"\.(item|tolist|cpu|cuda|synchronize|to(?=\([^)]*(?:device|cuda|gpu|rank)))\(|\b(tensor)\(.*\bdevice="
)
_AWAITED = re.compile(r"\.(wait)\(")
# elasticd's wrappers around torch's functions.
_OURS = ("elasticd_waits.py", "elasticd_heartbeat.py")
_AROUND_WAIT = ("elasticd_waits.py", "measured")
# elasticd's waits that end with the world, and what is between such a wait and the collective.
_ENDING = re.compile(
    r"elasticd[/\\]worker[/\\]world[/\\]waits\.py$|[/\\]torch[/\\](_ops|futures[/\\]__init__)\.py$"
)
# In World.wait_for_value, a worker without a part of the batch waits for another rank to call a model. In
# wait_for_ranks, ranks wait for each other before they make groups.
_WAITS_FOR_RANKS = ("wait_for_value", "wait_for_ranks")
_BY_STORE = re.compile(r"elasticd[/\\](worker[/\\]world[/\\]group|checkpoint[/\\]client[/\\]levels)\.py$")
# A worker whose world broke waits for its agent to close the round, and says so after a few seconds.
_AWAITS_AGENT = ("link.py", "wait_for_leave")
_WRAPPERS = ("wrapper", "inner", "_fn", "decorate_context", "__call__", "_call_impl", "_wrapped_call_impl")


def activity_of(stack: Stack) -> ThreadActivity | None:
    """Return the activity of a thread; None if the thread has no Python frames."""
    waits = bool(stack) and (_name(stack[0].file), stack[0].function) == _AROUND_WAIT
    stack = tuple(f for f in stack if _name(f.file) not in _OURS)
    within = next((n for n, f in enumerate(stack) if not _ENDING.search(f.file)), 0)
    waits = waits or any(f.file.endswith("waits.py") for f in stack[:within])
    stack = stack[within:]
    if not stack:
        return None
    own = next((f for f in stack if not _LIBRARY.search(f.file)), stack[0])
    place = f"{_name(own.file)}:{own.line}"
    inner = stack[0]
    in_torch = _TORCH.search(inner.file)
    module = in_torch[1] if in_torch else ""
    if _TALKING.match(module) and not _OWN_WORK.match(module):
        return ThreadActivity(ActivityKind.COLLECTIVE, place, _collective(stack))
    if _ENGINE.match(module):
        return ThreadActivity(ActivityKind.COLLECTIVE, place, "backward")
    if module.startswith(("cuda/", "cuda\\")) and "synchronize" in inner.function:
        return ThreadActivity(ActivityKind.COLLECTIVE, place, "synchronize")
    if waits or any(f.function in _WAITS_FOR_RANKS and _BY_STORE.search(f.file) for f in stack[:3]):
        return ThreadActivity(ActivityKind.COLLECTIVE, place, "wait")
    if call := _COPIED.search(inner.text) or (inner is own and _AWAITED.search(inner.text)):
        return ThreadActivity(ActivityKind.COLLECTIVE, place, call[call.lastindex or 0])
    if any((_name(f.file), f.function) == _AWAITS_AGENT for f in stack[:4]):
        return ThreadActivity(ActivityKind.PROGRAM, place, "waiting for its agent")
    if any(_waits_for_a_program(f) for f in stack[:4]):
        return ThreadActivity(ActivityKind.PROGRAM, place, "waiting for a program")
    return ThreadActivity(ActivityKind.OWN, place, _work(stack))


def _collective(stack: Stack) -> str:
    """Return the name of the collective: the outermost of the innermost frames that belong to
    torch.distributed."""
    name = stack[0].function
    for frame in stack:
        module = _TORCH.search(frame.file)
        if module is None or not _TALKING.match(module[1]):
            break
        if frame.function not in _WRAPPERS:
            name = frame.function
    return name


def _waits_for_a_program(frame: Frame) -> bool:
    name = _name(frame.file)
    if (name, frame.function) == ("saver_connection.py", "listen_while"):  # waits for the saver's disk
        return True
    return (name == "subprocess.py" and frame.function.strip("_") in _WAITS) or (
        name.startswith("popen_") and "multiprocessing" in frame.file and frame.function in _POLLS
    )


def _name(file: str) -> str:
    return re.split(r"[/\\]", file)[-1]


_WAITS = ("wait", "try_wait", "communicate", "run", "call", "check_call", "check_output")
_POLLS = ("wait", "poll")


def _work(stack: Stack) -> str:
    """Return a word for the work, from the libraries on the stack."""
    for frame in stack:
        file = frame.file.replace("\\", "/")
        if "/torch/utils/data/" in file:
            return "data loading"
        if "/torch/distributed/checkpoint/" in file or file.endswith("/torch/serialization.py"):
            return "saving or loading a checkpoint"
        if "/torch/_dynamo/" in file or "/torch/_inductor/" in file:
            return "compiling"
    return ""
