"""The releases of torch that elasticd supports, and every private part of torch that it uses or replaces.

tests/house/test_torch_parts.py looks for each part in the installed torch, and fails if the code uses a part
that is not listed here. The slow tests train with the oldest and with the newest release.
"""

from __future__ import annotations

import re
from importlib import metadata, util
from typing import Final, NamedTuple

# The same as in pyproject.toml. The TCPStore of an older release cannot take over a listening socket.
OLDEST: Final = (2, 8)
CHECKED: Final = ("2.8.0", "2.13.0", "2.15.0")  # the tests pass with these releases


class Private(NamedTuple):
    """A private part of torch. ``name``: its full name. ``use``: the files that use it, and what for.
    ``takes``: its first parameters, if elasticd relies on them. ``since``: the first release that has it."""

    name: str
    use: str
    takes: tuple[str, ...] = ()
    since: tuple[int, int] = OLDEST


_C10D: Final = "torch.distributed.distributed_c10d"
_BUILT: Final = "torch._C._distributed_c10d"

REPLACED: Final = (
    Private(
        f"{_C10D}.destroy_process_group",
        "worker/boot/elasticd_ending.py: returns once gloo's threads have released their collectives.",
        ("group",),
    ),
    Private(
        f"{_C10D}._new_process_group_helper",
        "worker/world/group.py: records the sockets that gloo opens while it makes a group, to shut them if "
        "a peer is lost. Later connections are found through gloo's event loop, which watches such a socket. "
        "checkpoint/client/levels.py: makes a group of some ranks without the others.",
        ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
    ),
    Private(
        f"{_C10D}._world.group_count",
        "worker/world/group.py: set to 0 between worlds, since torch names groups by this counter. "
        "checkpoint/client/levels.py: names groups by the counter, too.",
    ),
    Private(
        "torch.distributed.ProcessGroup.send",
        "worker/world/waits.py: waits with the group's own timeout.",
    ),
    Private("torch.distributed.ProcessGroup.recv", "worker/world/waits.py: as for send."),
    Private(
        "torch.distributed.ProcessGroup.recv_anysource",
        "worker/world/waits.py: as for send, also when it is asked for after the end.",
    ),
    Private(
        "torch.ops._c10d_functional.wait_tensor",
        "worker/world/waits.py: the wait of functional collectives on CPUs ends with the world.",
    ),
    Private(
        f"{_BUILT}.Work.wait",
        "worker/world/waits.py: ends with the world. worker/boot/elasticd_waits.py: measures how long.",
    ),
    Private(
        f"{_BUILT}.Work.get_future",
        "worker/world/waits.py: the future fails when the world ends.",
    ),
    Private(
        "torch.nn.utils.clip_grad._get_total_norm",
        "worker/gradients/whole_norms.py: the norm of a sharded gradient does not depend on the layout.",
        ("tensors", "norm_type", "error_if_nonfinite", "foreach"),
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._run_ddp_forward",
        "worker/gradients/reduction.py: a forward pass that adds nothing to the sums of gradients.",
        ("self",),
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._pre_forward",
        "worker/gradients/wrapping.py: keeps its collectives out of the count of the script's collectives. "
        "worker/world/waits.py: the backward passes end with the world.",
        ("self",),
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._distributed_broadcast_coalesced",
        "worker/world/waits.py: a wait for a model's buffers ends with the world.",
        ("self", "tensors", "buffer_size"),
    ),
    Private("torch._disable_dynamo", "worker/world/waits.py: that forward pass is not compiled."),
    *(
        Private(
            f"torch.distributed.ProcessGroup.{method}", "worker/boot/elasticd_debug.py: records each call."
        )
        for method in ("_allgather_base", "_reduce_scatter_base")
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._sync_buffers",
        "worker/boot/elasticd_debug.py: records that buffers are sent.",
        ("self",),
    ),
    Private(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "worker/boot/elasticd_debug.py: records the first batches of an epoch.",
    ),
    Private(
        "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
        "worker/boot/elasticd_steptimes.py: measures how long loading takes, for `elasticd bench scaling`.",
        ("self",),
    ),
    Private(
        "torch.utils.data._utils.worker._worker_info",
        "worker/samples/loading.py: gives all samples to a dataset that shards itself by process.",
    ),
)

USED: Final = (
    Private(
        "torch.nn.Module._compiled_call_impl",
        "checkpoint/client/tensors.py: tells that a module was compiled by its compile(), which a deep copy "
        "forgets.",
    ),
    Private(
        "torch.ops._c10d_functional.wait_tensor.default._op_dk",
        "worker/world/waits.py: torch's own wait, below the one that replaces it.",
    ),
    Private("torch._C.DispatchKey.CompositeExplicitAutograd", "worker/world/waits.py: the key of that wait."),
    Private(
        f"{_C10D}._abort_process_group",
        "worker/world/group.py: aborts a broken group, and every group with NCCL.",
        ("group",),
    ),
    Private(f"{_C10D}._world.pg_names", "worker/world/group.py: lists the groups."),
    Private(f"{_C10D}._world.pg_group_ranks", "checkpoint/client/levels.py: notes the ranks of a group."),
    Private(
        f"{_C10D}._get_default_store",
        "checkpoint/client/levels.py: the store through which all ranks tell their nodes.",
    ),
    Private(
        "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        "worker/gradients/wrapping.py: counts the collectives that were called.",
    ),
    Private(
        "torch.utils.data._utils.worker.WorkerInfo", "worker/samples/loading.py: the value of _worker_info."
    ),
    Private("torch.distributed.ProcessGroup._get_backend", "worker/world: the gloo or NCCL group."),
    Private(
        "torch.futures.Future._set_unwrap_func",
        "worker/world/waits.py: a failed future raises another exception for each wait.",
    ),
    *(
        Private(f"torch.distributed.tensor.{name}", "worker/world/round_mesh.py: its cache is cleared.")
        for name in (
            "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding",
            "_redistribute._gen_transform_infos",
            "_collective_utils.MeshTopoInfo.build_from_mesh",
        )
    ),
    Private(
        "torch._C._clear_DTensor_sharding_propagator_cache",
        "worker/world/round_mesh.py: clears it after a world.",
        since=(2, 10),
    ),
    Private(
        "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache",
        "worker/world/round_mesh.py: clears it after a world.",
        since=(2, 10),
    ),
    Private(
        f"{_BUILT}.ProcessGroupGloo._set_default_timeout",
        "worker/world/group.py: collectives' timeout.",
    ),
    Private(f"{_BUILT}._dump_nccl_trace_json", "worker/boot/elasticd_recorder.py: NCCL's flight recorder."),
    Private(
        f"{_BUILT}._dump_fr_trace_json",
        "worker/boot/elasticd_recorder.py: the flight recorder of gloo and other backends.",
        since=(2, 9),
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._remove_autograd_hooks",
        "worker/gradients/reduction.py: removes a wrapper from a model.",
        ("self",),
    ),
    Private(
        "torch.nn.parallel.distributed._find_tensors",
        "worker/gradients/wrapping.py, sharded_reduction.py: finds the tensors in what goes into a model or "
        "comes out.",
        ("obj",),
    ),
    Private(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "worker/gradients/wrapping.py, replicated.py, worker/boot/elasticd_waits.py: a call at the end of a "
        "backward pass.",
    ),
    Private(
        "torch._C._current_graph_task_id",
        "worker/gradients/replicated.py: the backward pass that is under way.",
    ),
    Private(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "worker/sharding/initial_values.py: sees each operation of init=.",
    ),
    Private(
        "torch.ops.aten.add_.Tensor._schema",
        "worker/sharding/initial_values.py: which arguments an operation writes to.",
    ),
    *(
        Private(
            f"torch._C._dynamo.eval_frame.{name}",
            "worker/boot/elasticd_debug.py: functions that torch.compile does not compile.",
        )
        for name in ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
    ),
    Private(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "worker/sharding/sharded_model.py: has FSDP let go of its process groups.",
        ("self",),
    ),
    Private("torch._foreach_add_", "worker/gradients/buckets.py: adds many tensors in one call."),
    Private("torch._foreach_copy_", "worker, checkpoint/client: copies many tensors in one call."),
    Private(
        "torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
        "worker/gradients/whole_norms.py: the order in which torch adds up norms.",
    ),
    Private(
        "torch._foreach_norm", "worker/report.py, gradients: takes the norms of many tensors in one call."
    ),
    Private(
        "torch.distributed.checkpoint._nested_dict.flatten_state_dict",
        "checkpoint/client/state_dict.py: flattens a nested state dict, with the names that DCP uses.",
        ("state_dict",),
    ),
    Private(
        "torch.distributed.checkpoint._traverse.set_element",
        "checkpoint/client/state_dict.py, plain_dcp.py: puts a value back into a nested state dict.",
        ("root_dict", "path", "value"),
    ),
    Private(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "checkpoint/format/metadata.py: where DCP finds a tensor in a file.",
        ("relative_path", "offset", "length"),
    ),
    Private("torch._utils._rebuild_tensor_v3", "checkpoint/format/frames.py: rebuilds a pickled tensor."),
    Private(
        "torch._dynamo",
        "cli/script.py: imported ahead, since torch imports it for the first optimizer of a process.",
    ),
    Private(
        "torch._C._get_privateuse1_backend_name", "cli/machine.py: the name of a third-party kind of device."
    ),
    Private(
        "torch.numa.binding._maybe_wrap_command_args_with_numa_binding",
        "daemon/worker_command.py: applies --numa-binding as torchrun does.",
        ("command_args",),
        since=(2, 10),
    ),
)

# Attributes that no class defines. torch.compile does not compile functions that have one of the first two.
# Newer releases keep the process groups of a DeviceMesh in the third.
MARKS: Final = ("_torchdynamo_disable", "_torchdynamo_disable_msg", "_pg_registry")


def unfit() -> str:
    """Return why the installed torch cannot be used; empty if it can be used. Does not import torch."""
    try:
        why = too_old(metadata.version("torch"))
        return f"{why}: pip install 'torch>={oldest()}'" if why else ""
    except metadata.PackageNotFoundError:
        if util.find_spec("torch") is not None:  # torch is used from its source tree, without a known version
            return ""
        return f"PyTorch is not installed in this Python: pip install 'torch>={oldest()}'"


def too_old(version: str) -> str:
    """Return a sentence if elasticd needs a newer torch than this version; else an empty string."""
    if release(version) >= OLDEST:
        return ""
    return f"PyTorch {version} is too old for elasticd, which needs {oldest()} or newer"


def untested(version: str) -> str:
    """Return a note if the version of torch is newer than all in ``CHECKED``; else an empty string."""
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
    """Return (2, 13) for "2.13.0+cpu"; a version that cannot be parsed counts as newer than all others."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (10**6, 0)


def oldest() -> str:
    """Return the oldest supported release as text: "2.8"."""
    return ".".join(map(str, OLDEST))
