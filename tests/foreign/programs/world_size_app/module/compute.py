import torch
import torch.distributed as dist


def compute_world_size(config):
    """Each rank adds one, so the sum is the number of ranks."""
    dist.init_process_group(backend=config["backend"])
    try:
        heads = torch.ones((), dtype=torch.int64)
        dist.all_reduce(heads)
        print(f"rank: {dist.get_rank()}, computed world_size: {heads.item()}")
    finally:
        dist.destroy_process_group()
