import os

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group(backend="gloo")
    if dist.get_rank() == 1:
        raise ValueError("the dataset has moved to another shelf")
    dist.barrier()


if __name__ == "__main__":
    print("environment names an error file:", "TORCHELASTIC_ERROR_FILE" in os.environ)
    main()
