"""Several ranks on one GPU. NCCL refuses that, unless it takes the ranks for different computers. Then its
kernels still wait for each other on the GPU, and the bytes go over the loopback interface."""

from __future__ import annotations

import os


def share_the_gpu() -> None:
    """Let several ranks of this machine share the GPU. Call it before NCCL is used."""
    os.environ.update(
        NCCL_HOSTID=f"computer-{os.getpid()}",
        NCCL_MULTI_RANK_GPU_ENABLE="1",  # newer releases allow it by an option
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_NVLS_ENABLE="0",
    )
