"""What tests share."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

settings.register_profile("zbpipe", deadline=None, derandomize=True)
settings.load_profile("zbpipe")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group with this process alone, for pipelines of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    yield
    dist.destroy_process_group()
