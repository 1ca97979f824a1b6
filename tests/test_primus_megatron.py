"""zbpipe's schedules in Primus' Megatron backend: tables, settings, and pipelines of a stand-in on the CPU."""

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import primus_megatron as benchmark
import primus_megatron_job as job
import pytest
from commands import process
from data import assert_refused, expectations, refusals
from hypothesis import given
from hypothesis import strategies as st

import zbpipe
from zbpipe.costs import CostModel, JobCosts, dump_costs, load_costs
from zbpipe.frameworks import primus_megatron
from zbpipe.frameworks.primus_megatron import Choice
from zbpipe.schedule.ir import OpKind

PRIMUS = Path(__file__).parent.parent / "titan_integration" / "primus"
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 9))
NAMED = st.sampled_from(
    [("1F1B", 1), ("ZBH1", 1), ("ZBH2", 1), ("GPipe", 1), ("ZB", 1), ("ZBV", 2), ("ZB", 2), ("VHalf", 2), ("VMin", 2)]
    + [(name, stages) for name in ("ZBLoop", "Interleaved1F1B", "LoopedBFS") for stages in (1, 2, 3, 4)]
)


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    sys.path.insert(0, str(job.STAND_IN))
    yield
    sys.path.remove(str(job.STAND_IN))
    for name in [name for name in sys.modules if name.split(".")[0] in ("primus", "megatron", "zbpipe_patch")]:
        del sys.modules[name]


def table_of(choice: Choice, ranks: int, stages: int, microbatches: int) -> Any:
    made: Any = primus_megatron.class_of(choice)(ranks, stages, microbatches)
    return made, made.generate_schedule_table()


@given(NAMED, SIZES, st.booleans())
def test_tables_are_complete_and_never_wait_in_a_cycle(
    named: tuple[str, int], size: tuple[int, int], blocking: bool
) -> None:
    """Neither as Primus communicates, nor where every message blocks its ranks."""
    (name, stages), (ranks, microbatches) = named, size
    base = importlib.import_module("primus.core.pipeline_parallel.scheduler.algorithms.base")
    made, table = table_of(Choice.of(name, blocking=blocking), ranks, stages, microbatches)
    ran = Counter((rank, node.chunk, node.func_type.name) for rank, row in enumerate(table) for node in row)
    for rank in range(ranks):
        for chunk in range(stages):
            backwards = ran[rank, chunk, "BW"] + ran[rank, chunk, "B"]
            assert ran[rank, chunk, "F"] == backwards == microbatches
            assert ran[rank, chunk, "B"] == ran[rank, chunk, "W"]
            for letter in "FB":
                there = made.direction_map(rank, chunk, base.FuncType[letter])
                assert ran[rank, chunk, f"R{letter}"] == (0 if there["prev"][0] is None else microbatches)
                assert ran[rank, chunk, f"S{letter}"] == (0 if there["next"][0] is None else microbatches)
    times = (1 / stages,) * 3
    assert benchmark.makespan(table, times, 0.1, blocking=blocking) > 0
    for rank, row in enumerate(table):
        for before, node in pairwise([None, *row]):
            if node.args:
                sends = node.func_type.name.startswith("S")
                assert rank == node.args["from_pp_rank" if sends else "to_pp_rank"]
                node.args["time_step"] = object()
                if not sends and rank == node.args["from_pp_rank"]:  # a result that stays on its rank
                    assert (before.func_type.name[0], before.chunk) == ("S", node.args["recv_from_chunk"])
    assert benchmark.makespan(table, times, 0.1, blocking=True) > 0


def test_first_and_last_stage() -> None:
    wave, loop = (table_of(Choice.of(name), 4, 2, 3)[0] for name in ("ZBV", "ZBLoop"))
    assert (wave.first_pp_stage_rank(), wave.last_pp_stage_rank()) == (0, 0)
    assert (loop.first_pp_stage_rank(), loop.last_pp_stage_rank()) == (0, 3)


@pytest.mark.long
def test_pipelines_have_the_gradients_of_the_whole_model(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    said = process(*torchrun, Path(job.__file__), folder=tmp_path, OMP_NUM_THREADS="1").stdout
    assert said.count(f"{len(job.CASES)} pipelines with the gradients of the whole model") == 4


def settings(**more: Any) -> SimpleNamespace:
    fields = {"zbpipe_schedule": "ZBV", "pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2}
    return SimpleNamespace(**(job.FIELDS | {"global_batch_size": 8 * job.ROWS} | fields | more))


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.import_module("primus.core.pipeline_parallel.scheduler.schedule_table_factory")
    monkeypatch.setattr(found, "pp_algorithm_map", dict(found.pp_algorithm_map))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return found


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "zbv-formatted"),
        ({"zbpipe_schedule": None}, "zbv-formatted"),
        ({"zbpipe_schedule": "ZBH1", "num_virtual_stages_per_pipeline_rank": None}, "zero-bubble"),
        ({"zbpipe_schedule": "ZB", "num_virtual_stages_per_pipeline_rank": 3}, "zero-bubble"),
        ({"pp_algorithm": "zero-bubble"}, None),
        ({"global_batch_size": None, "zbpipe_memory_limit": "1.5x", "zbpipe_schedule": "ZB"}, "zbv-formatted"),
    ],
)
def test_what_primus_then_runs(factory: ModuleType, more: dict[str, Any], name: str | None) -> None:
    """Primus' own schedule with this placement is zbpipe's."""
    before, params = dict(factory.pp_algorithm_map), settings(**more)
    primus_megatron.plug_in(params)
    replaced = [each for each in before if factory.pp_algorithm_map[each] is not before[each]]
    assert replaced == ([] if name is None else [name])
    assert params.pp_algorithm == (name or "zero-bubble")


@pytest.mark.parametrize(("given", "words"), refusals("primus"))
def test_refused_before_the_model_is_built(factory: ModuleType, given: str, words: str) -> None:
    before, more = dict(factory.pp_algorithm_map), eval(f"dict({given})")
    params = settings(**more)
    assert_refused(lambda: primus_megatron.plug_in(params), words)
    assert factory.pp_algorithm_map == before
    assert params.pp_algorithm == settings(**more).pp_algorithm


def test_refused_tables(factory: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's stages read their batches in order, each on its own."""
    monkeypatch.chdir(tmp_path)
    Path("mixed.csv").write_text("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1")
    fields = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": None}
    with pytest.raises(ValueError, match=r"stage 1 of mixed.csv takes microbatches in the order \[1, 0\]"):
        primus_megatron.plug_in(settings(**fields, zbpipe_schedule="mixed.csv", global_batch_size=2 * job.ROWS))
    with pytest.raises(ValueError, match="table for 2 microbatches, but the job has 8"):
        primus_megatron.plug_in(settings(**fields, zbpipe_schedule="mixed.csv"))


def test_the_settings_of_the_page(factory: ModuleType) -> None:
    yaml = pytest.importorskip("yaml")
    [block] = re.findall(r"```yaml\n(.*?)```", (PRIMUS / "megatron.md").read_text(), re.DOTALL)
    params = SimpleNamespace(**yaml.safe_load(block)["overrides"], micro_batch_size=1, global_batch_size=32)
    primus_megatron.plug_in(params)
    assert params.pp_algorithm == "zbv-formatted"


@pytest.mark.parametrize(("given", "stages"), expectations("stages per rank of Megatron"))
def test_stages_per_rank_as_megatron_takes_them(given: str, stages: str) -> None:
    fields = eval(f"dict({given})")
    assert primus_megatron.count_stages(SimpleNamespace(**fields)) == int(stages)


@pytest.mark.parametrize(
    ("world", "fields", "microbatches"),
    [
        ("8", {}, 16),
        ("32", {"tensor_model_parallel_size": 2, "context_parallel_size": 1}, 8),
        ("8", {"rampup_batch_size": [8, 8, 100]}, None),
    ],
)
def test_microbatches_of_a_step(
    monkeypatch: pytest.MonkeyPatch, world: str, fields: dict[str, Any], microbatches: int | None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    params = settings(global_batch_size=64, micro_batch_size=2, **fields)
    assert primus_megatron.count_microbatches(params) == microbatches


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PRIMUS)
    found = importlib.import_module("primus.core.patches")
    importlib.import_module("zbpipe_patch")
    return found


def test_the_patch(patches: ModuleType, factory: ModuleType) -> None:
    params = settings()
    patches.run_patches("megatron", "build_args", params)
    assert params.pp_algorithm == "zbv-formatted"
    with pytest.raises(SystemExit, match="zbpipe: unknown schedule 'ZBW'"):
        patches.run_patches("megatron", "build_args", settings(zbpipe_schedule="ZBW"))


def test_costs_from_times_of_primus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as Primus does, from a simulated step."""
    monkeypatch.syspath_prepend(PRIMUS)
    read_dump = importlib.import_module("costs_from_dump").read_dump
    costs = CostModel(f=(1, 2, 3, 4), i=(5, 6, 7, 8), w=(1.5, 2.5, 3.5, 4.5), activations=(1,) * 4)
    schedule = zbpipe.generate("ZBV", 2, 4)
    row_of = schedule.placement.stages_on
    for rank, row in enumerate(zbpipe.simulate(schedule, costs).spans):
        step: dict[str, list[Any]] = {}
        for name, kinds in {"fwd": [OpKind.F], "bwd": [OpKind.I, OpKind.B], "wgrad": [OpKind.W]}.items():
            ran = [span for span in row if span.op.kind in kinds]
            step |= {
                f"{name}_start": [1000 * each.start for each in ran],
                f"{name}_end": [1000 * each.end for each in ran],
            }
            step[f"{name}_minibatch"] = [each.op.microbatch for each in ran]
            step[f"{name}_chunk"] = [row_of(rank).index(each.op.stage) for each in ran]
        slow = {name: [3 * each for each in values] if name[-1] in "td" else values for name, values in step.items()}
        (tmp_path / f"pp_rank_{rank}.json").write_text(json.dumps({"1": slow, "2": step, "3": step}))
    (tmp_path / "config.json").write_text(json.dumps({"pp_size": 2, "vp_size": 2}))
    found = read_dump(tmp_path, "ZBV")
    assert (found.placement, found.costs.f) == (schedule.placement, pytest.approx(costs.f))
    assert (found.costs.i, found.costs.w) == (pytest.approx(costs.i), pytest.approx(costs.w))
    dump_costs(found, tmp_path / "costs.toml")
    choice = Choice.of("ZB", costs_file=str(tmp_path / "costs.toml"))
    assert isinstance(load_costs(tmp_path / "costs.toml"), JobCosts)
    assert choice.make(2, 2, 4)[1].f == pytest.approx(costs.f)
    (tmp_path / "config.json").write_text(json.dumps({"pp_size": 2, "vp_size": 4}))
    with pytest.raises(ValueError, match="ZBV runs 2 stage"):
        read_dump(tmp_path, "ZBV")
