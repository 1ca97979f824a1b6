"""What tests share. It imports no torch: the process that only hands out tests to others needs none."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from determinism import here, short_search  # noqa: F401
from reaper import watch_session

from zbpipe.planner.engine import fastest

if TYPE_CHECKING:
    from titan_jobs import Titan

# Products of small matrices take twenty times the work on two threads that wait for each other on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# In the process itself: otherwise each process that compiles starts others, which import torch anew.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A collection for each compiled function takes longer than small functions take to run.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
pytest.register_assert_rewrite("titan_jobs", "compatibility")
gc.disable()  # until all tests are collected: it takes a fifth of the time of the imports

SLOWEST = (
    *("matrix", "titan", "zoo", "published", "titan_integration", "data_parallel", "gradient_check"),
    *("examples", "titan_script", "modes", "split_memory", "gradients", "compile", "docs", "schedules"),
)
LAST = "test_the_page_says_what_was_seen"
_deselected = {"deselected": 0}
"""The number of tests that options deselected; each process of pytest-xdist counts all of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-compatibility", action="store_true", help="write what docs/ says of outcomes instead of comparing it"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        watch_session()
        # Code that one process has compiled, another need not. CI names one folder for all suites.
        if cache := getattr(config, "cache", None):  # None with `-p no:cacheprovider`
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.mkdir("inductor")))


@pytest.hookimpl(trylast=True)  # also after a plugin that shuffles
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first, so that processes end alike; tests that look at the others' results last."""
    import torch

    torch.set_num_threads(1)
    places = {f"test_{name}": place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), item.name == LAST))


def pytest_collection_finish() -> None:
    """Searched schedules take a tenth of the time. No collection of garbage looks at what the imports have made."""
    fastest()
    gc.freeze()
    gc.enable()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        getattr(items[0].config, "workeroutput", _deselected)["deselected"] = len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _deselected.update(getattr(node, "workeroutput", {}))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and session.config.option.markexpr == "not long" and not session.config.option.keyword:
        passed, skipped = (len(reporter.stats.get(each, ())) for each in ("passed", "skipped"))
        left = _deselected["deselected"]
        reporter.line(f"{passed} tests passed, {skipped} were skipped (see above), {left} are left to CI: `make long`")


@pytest.fixture
def one_rank() -> Iterator[None]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    yield
    dist.destroy_process_group()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table of the zoo under its name, float64, and no word of what stays in I."""
    import torch
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
    from titan_jobs import Titan

    trains = Titan(tmp_path_factory.mktemp("titan"))
    yield trains
    trains.close()
