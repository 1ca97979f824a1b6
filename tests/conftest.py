"""What tests share."""

import logging
import os
from collections.abc import Iterator

import pytest

# Products of small matrices take twenty times the work on two threads that wait for each other on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.distributed as dist

torch.set_num_threads(1)
pytest.register_assert_rewrite("titan_jobs", "cells", "compatibility")
from determinism import short_search  # noqa: E402, F401
from titan_jobs import Titan  # noqa: E402


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


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two tables of the zoo under their names, float64, and no word of what stays in I."""
    from zoo.runner import register_tables

    from zbpipe.schedule import registry

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register_tables()
    monkeypatch.setattr(logging.getLogger("zbpipe.runtime.split.stage"), "disabled", True)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Titan]:
    """Trains short TorchTitan jobs; what one test compared with, another finds done."""
    trains = Titan(tmp_path_factory.mktemp("titan"))
    yield trains
    trains.close()
