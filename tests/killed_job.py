"""Run by torchrun in `test_faults.py`: a pipeline whose rank 1 is killed in the middle of its second step."""

import torch
import torch.distributed as dist
from test_faults import end_suddenly, fail_in_the_second_step
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fail_in_the_second_step(end_suddenly)


if __name__ == "__main__":
    main()
