"""What tests without torch need, too: hypothesis draws the same examples in each run, and searches may be short."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import blocks
from hypothesis import HealthCheck, settings
from searching import searching_little

import zbpipe
from zbpipe.costs import CostModel, JobCosts, dump_costs

# Searched schedules and random orders take a while to draw; a busy machine is no failure.
settings.register_profile(
    "zbpipe",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=40,
)
settings.load_profile("zbpipe")


def draw_fewer(times: int) -> settings:
    """The profile's number of examples divided by `times`, where an example takes long."""
    return settings(max_examples=settings().max_examples // times)


@pytest.fixture(scope="module")
def short_search() -> Iterator[None]:
    """ZB and plans take little search in a whole module."""
    with searching_little():
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a table for 3 ranks and 4 microbatches, the cost files of the page, and wrong files."""
    monkeypatch.chdir(tmp_path)
    stages, layers, *_, model = (block.code for block in blocks("docs/costs-file.md", "toml"))
    contents = {"stages.toml": stages, "layers.toml": layers, "model.toml": model, "bad.toml": "m = 3\n"}
    contents |= {"stuck.csv": "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "twice.csv": "0F0,0B0,1F0,1B0\n1F0,1B0\n"}
    for name, content in (contents | {"mine.csv": zbpipe.generate("ZBV", 3, 4).to_csv()}).items():
        Path(name).write_text(content)
    dump_costs(JobCosts(CostModel((1,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)), "three.toml")
    return tmp_path
