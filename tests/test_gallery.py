"""The gallery is what the schedules are now, and torch reads its files."""

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from test_actions import bare_runtime

from zbpipe import Schedule, validate
from zbpipe.schedule import registry

FOLDER = Path(__file__).parent.parent / "schedules"
TABLES = sorted(FOLDER.glob("*.csv"))


def regenerate() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.delitem(sys.modules, "regenerate", raising=False)
        module = importlib.import_module("regenerate")
    # It asks for most of them several times, and the lean ones are searched for.
    for function in ("generate", "step_times"):
        setattr(module, function, cache(getattr(module, function)))
    return module


def test_the_gallery_is_up_to_date() -> None:
    wanted = regenerate().files()
    found = {file.name: file.read_text() for file in FOLDER.iterdir() if file.suffix in (".csv", ".svg", ".md")}
    stale = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    assert stale == [], "a schedule or a picture is new, or changed: run `make gallery` and look at the difference"


def test_a_new_schedule_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docstrings = {"Mine": "Mine (arXiv 1234.56789).\n\nTo learn from.", "Bare": ""}
    monkeypatch.syspath_prepend(tmp_path)
    needed = ("1F1B", "GPipe", "Interleaved1F1B", "ZB")
    drawn_together = {key: each for key, each in registry._registered.items() if each.name in needed}
    monkeypatch.setattr(registry, "_registered", drawn_together)
    for name, docstring in docstrings.items():
        module = f"my_{name.lower()}"
        (tmp_path / f"{module}.py").write_text(
            f"""{docstring!r}
import zbpipe

@zbpipe.register("{name}", summary="one to learn from")
def mine(ranks, microbatches):
    return zbpipe.generate("GPipe", ranks, microbatches)
"""
        )
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.import_module(module)
    files = regenerate().files()
    for name, docstring in docstrings.items():
        text = docstring or "one to learn from"
        assert f"\n## {name}\n\n{text}\n\nBubble 27.3% with equal times. Memory" in files["README.md"]
        assert {f"{name}.svg", *(f"{name}-p{p}-m{2 * p}.csv" for p in (2, 4, 8))} <= files.keys()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_torchs_loader_takes_every_table(table: Path) -> None:
    """`_load_csv` checks the order and adds sends and receives; TorchTitan loads its CSV files with it."""
    schedule = Schedule.from_csv(table.read_text())
    assert validate(schedule) == []
    runtime = bare_runtime(schedule)
    runtime._load_csv(str(table))
    assert tuple(runtime.stage_index_to_group_rank[s] for s in range(schedule.placement.num_stages)) == (
        schedule.placement.rank_of
    )
    assert len(runtime.pipeline_order_with_comms) == schedule.num_ranks
