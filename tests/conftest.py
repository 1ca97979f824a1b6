"""What tests share."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

pytest.register_assert_rewrite("titan_jobs", "cells", "compatibility")
from titan_jobs import Titan  # noqa: E402

settings.register_profile("zbpipe", deadline=None, derandomize=True)
settings.load_profile("zbpipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-compatibility", action="store_true", help="write what docs/ says of outcomes instead of comparing it"
    )


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group with this process alone, for pipelines of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Titan]:
    """Trains short TorchTitan jobs; what one test compared with, another finds done."""
    trains = Titan(tmp_path_factory.mktemp("titan"))
    yield trains
    trains.close()
