"""Several ranks on one GPU. NCCL refuses that, unless it takes them for different computers: then its own
kernels wait for each other on the GPU as ever, and the bytes take the loopback interface."""

from __future__ import annotations

import os


def share_the_gpu() -> None:
    """Let several ranks of this machine share the GPU. Call it before NCCL is used."""
    os.environ.update(
        NCCL_HOSTID=f"computer-{os.getpid()}",
        NCCL_MULTI_RANK_GPU_ENABLE="1",  # newer ones allow it by name
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_NVLS_ENABLE="0",
    )
