"""The releases of torch that elasticd supports, and every part of torch that it uses or replaces though
torch does not promise it.

tests/house/test_torch_parts.py looks for each part in the torch that is installed, and fails when the code
uses one that is not listed here. The slow tests train with the oldest and with the newest release.
"""

from __future__ import annotations

import re
from importlib import metadata, util
from typing import Final, NamedTuple

# pyproject.toml says so, too. Before, a TCPStore takes no socket that listens already.
OLDEST: Final = (2, 8)
CHECKED: Final = ("2.8.0", "2.13.0", "2.15.0")  # releases on which all of this was seen to work


class Private(NamedTuple):
    """``of``: where it is, from ``torch`` on. ``takes``: its first parameters, where it is called or
    replaced with these. ``since``: the first release that has it; older ones do without."""

    of: str
    use: str
    takes: tuple[str, ...] = ()
    since: tuple[int, int] = OLDEST


_C10D: Final = "torch.distributed.distributed_c10d"
_BUILT: Final = "torch._C._distributed_c10d"

REPLACED: Final = (
    Private(
        f"{_C10D}._new_process_group_helper",
        "worker/world/group.py: notes the sockets that gloo opens while a group is made, to shut them when a "
        "peer is lost. That these are all of its connections, opened by then, is gloo's own business.",
        ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
    ),
    Private(
        f"{_C10D}._world.group_count",
        "worker/world/group.py: set to 0 between worlds: groups find each other by names counted from it.",
    ),
    Private(
        "torch.distributed.ProcessGroup.send",
        "worker/world/message_timeouts.py: waits with the group's own timeout.",
    ),
    Private("torch.distributed.ProcessGroup.recv", "worker/world/message_timeouts.py: the same."),
    Private(
        "torch.distributed.ProcessGroup.recv_anysource",
        "worker/world/message_timeouts.py: the same, in a thread.",
    ),
    Private(f"{_BUILT}.Work.wait", "worker/boot/elasticd_waits.py: measures how long collectives wait."),
    Private(
        "torch.nn.parallel.DistributedDataParallel._run_ddp_forward",
        "worker/gradients/reduction.py: a pass that adds nothing to the sums.",
        ("self",),
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._pre_forward",
        "worker/gradients/wrapping.py: its collectives are not counted for the script's.",
        ("self",),
    ),
    Private(
        "torch.utils.data._utils.worker._worker_info",
        "worker/samples/loading.py: what a stream goes by that deals itself out to loading processes.",
    ),
)

USED: Final = (
    Private(
        f"{_C10D}._abort_process_group",
        "worker/world/group.py: takes a group down that is broken.",
        ("group",),
    ),
    Private(f"{_C10D}._world.pg_names", "worker/world/group.py: groups, the youngest first."),
    Private(
        "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        "worker/gradients/wrapping.py: whether collectives were called.",
    ),
    Private(
        "torch.utils.data._utils.worker.WorkerInfo", "worker/samples/loading.py: made for a dataset to go by."
    ),
    Private("torch.distributed.ProcessGroup._get_backend", "worker/world: gloo's or NCCL's."),
    Private(
        f"{_BUILT}.ProcessGroupGloo._set_default_timeout", "worker/world/group.py: how long collectives wait."
    ),
    Private(f"{_BUILT}.ProcessGroupNCCL._group_start", "worker/world/group.py: aborts communicators as one."),
    Private(f"{_BUILT}.ProcessGroupNCCL._group_end", "worker/world/group.py: the same."),
    Private(f"{_BUILT}._dump_nccl_trace_json", "worker/boot/elasticd_recorder.py: NCCL's flight recorder."),
    Private(
        f"{_BUILT}._dump_fr_trace_json",
        "worker/boot/elasticd_recorder.py: that of gloo and the others.",
        since=(2, 9),
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._remove_autograd_hooks",
        "worker/gradients/reduction.py: undoes a wrapper.",
        ("self",),
    ),
    Private(
        "torch.nn.parallel.distributed._find_tensors",
        "worker/gradients/wrapping.py: the tensors that a loss is made of.",
        ("obj",),
    ),
    Private(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "worker/gradients/wrapping.py, worker/boot/elasticd_waits.py: called in turn when a pass ends.",
    ),
    Private("torch._foreach_add_", "worker/gradients/buckets.py: many tensors in one call."),
    Private("torch._foreach_copy_", "worker: many tensors in one call."),
    Private("torch._foreach_norm", "worker/report.py: many tensors in one call."),
    Private(
        "torch.distributed.checkpoint._nested_dict.flatten_state_dict",
        "checkpoint/client/state_dict.py: the names DCP gives to what is nested.",
        ("state_dict",),
    ),
    Private(
        "torch.distributed.checkpoint._traverse.set_element",
        "checkpoint/client/state_dict.py, plaindcp.py: the way back.",
        ("root_dict", "path", "value"),
    ),
    Private(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "checkpoint/metadata.py: where DCP finds a tensor in a file.",
        ("relative_path", "offset", "length"),
    ),
    Private(
        "torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION",
        "checkpoint/metadata.py: the version of DCP's format.",
        since=(2, 9),
    ),
    Private("torch._utils._rebuild_tensor_v3", "checkpoint/frames.py: what a pickled tensor names."),
    Private("torch._C._get_privateuse1_backend_name", "cli/machine.py: the name of another kind of device."),
    Private(
        "torch.numa.binding._maybe_wrap_command_args_with_numa_binding",
        "daemon/worker_command.py: --numa-binding, as torchrun does it.",
        ("command_args",),
        since=(2, 10),
    ),
)

# Marks that torch.compile looks for on a function: it goes around those that have them.
MARKS: Final = ("_torchdynamo_disable", "_torchdynamo_disable_msg")


def unfit() -> str:
    """Why the torch that is installed cannot be used, in a sentence; empty if it can. Does not import it."""
    try:
        why = judged(metadata.version("torch"))
        return f"{why}: pip install 'torch>={oldest()}'" if why else ""
    except metadata.PackageNotFoundError:
        if util.find_spec("torch") is not None:  # from its sources: they are known to whoever built it
            return ""
        return f"PyTorch is not installed in this Python: pip install 'torch>={oldest()}'"


def judged(version: str) -> str:
    """The same of a version of torch."""
    if release(version) >= OLDEST:
        return ""
    return f"PyTorch {version} is too old for elasticd, which needs {oldest()} or newer"


def untried(version: str) -> str:
    """A note on a release that is newer than all that were checked; empty if it is not."""
    if release(version) <= release(CHECKED[-1]):
        return ""
    return f"PyTorch {version} is newer than {CHECKED[-1]}, the newest that this elasticd was tested with"


def installed() -> str:
    """Return the version of torch; empty if it is unknown."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def release(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"; a version that cannot be read is taken for a new one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (10**6, 0)


def oldest() -> str:
    """As people write it: "2.8"."""
    return ".".join(map(str, OLDEST))
