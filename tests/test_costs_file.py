"""Cost files: what is written is read as equal, and what is wrong is named."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Arguments are drawn by name.

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from documents import blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zbpipe import CostModel, OpKind, Placement, load_costs
from zbpipe.costs import JobCosts, Layer, LayerCosts, Link, dump_costs
from zbpipe.costs.file import from_data
from zbpipe.costs.job import as_cost_model
from zbpipe.costs.memory_limit import MemoryLimit
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import COMPUTATIONS
from zbpipe.testing import placements

transports = st.sampled_from([None, *Transport])
amounts = st.floats(0, 1e12)
spelled = st.sampled_from(["1.2x", "3 microbatches", "6.5GiB", float("inf")])
links = st.builds(Link, amounts, st.just(float("inf")) | st.floats(1e-3, 1e15))
shared = st.fixed_dictionaries(
    {},
    optional={
        "freed_by_i": st.floats(-4, 1),
        "link": links,
        "links": st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 1)), links, max_size=3),
        "message_bytes": amounts,
        "host": links,
        "working": st.dictionaries(st.sampled_from(COMPUTATIONS), amounts),
    },
)
names = st.lists(
    st.sampled_from(["norm", "lm_head", "layers.0", "layers.1", "layers.2", "layers.02", "3", 'a "b" \\ é\x7f\n']),
    min_size=1,
    max_size=2,
).map(tuple)
few_costs = st.sampled_from([0.0, 1.5])
layers = st.lists(st.builds(Layer, names, few_costs, amounts, few_costs, few_costs), min_size=1, max_size=8).map(tuple)


@st.composite
def jobs(draw: st.DrawFn) -> JobCosts:
    common = draw(shared)
    if draw(st.booleans()):
        limit = draw(st.none() | amounts | st.tuples(amounts) | spelled)
        return JobCosts(LayerCosts(draw(layers), **common), None, limit, draw(transports))
    placement = draw(placements(max_ranks=4).filter(lambda placement: placement.num_ranks > 1))
    stages, ranks = placement.num_stages, placement.num_ranks
    columns = [tuple(draw(st.lists(amounts, min_size=stages, max_size=stages))) for _ in range(4)]
    memory = draw(st.none() | amounts | spelled | st.lists(amounts, min_size=ranks, max_size=ranks).map(tuple))
    if draw(st.booleans()):
        common["working"] = {OpKind.I: draw(amounts), OpKind.F: tuple(draw(amounts) for _ in range(stages))}
        common["freed_by_i"] = tuple(draw(st.lists(st.floats(-4, 1), min_size=stages, max_size=stages)))
        common["reduce"] = draw(amounts | st.lists(amounts, min_size=stages, max_size=stages).map(tuple))
    return JobCosts(CostModel(*columns, **common), draw(st.sampled_from([None, placement])), memory, draw(transports))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=jobs(), ending=st.sampled_from(["toml", "json"]))
def test_what_is_written_is_read_as_equal(tmp_path: Path, job: JobCosts, ending: str) -> None:
    file = tmp_path / f"costs.{ending}"
    dump_costs(job, file)
    assert load_costs(file) == job


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_byte_order_mark_is_no_mistake(tmp_path: Path, ending: str) -> None:
    job = JobCosts(CostModel((1,), (1,), (1,), (1,)))
    dump_costs(job, tmp_path / f"a.{ending}")
    (tmp_path / f"b.{ending}").write_bytes(b"\xef\xbb\xbf" + (tmp_path / f"a.{ending}").read_bytes())
    assert load_costs(tmp_path / f"b.{ending}") == job


def test_costs_alone_can_be_written(tmp_path: Path) -> None:
    layers = LayerCosts((Layer(("a",), 1, 1, 1, 1),))
    dump_costs(layers, tmp_path / "a.toml")
    with pytest.raises(UnicodeEncodeError):
        dump_costs(LayerCosts((Layer(("\ud800",), 1, 1, 1, 1),)), tmp_path / "a.toml")
    assert load_costs(tmp_path / "a.toml") == JobCosts(layers), "as before the error"
    with pytest.raises(TypeError, match=re.escape("a job cannot have costs = (1, 1, 1): give a zbpipe.CostModel")):
        dump_costs((1, 1, 1), tmp_path / "b.toml")  # type: ignore[arg-type]
    dump_costs(JobCosts(layers, memory_limit="1.2x"), tmp_path / "c.toml")
    assert 'memory_limit = "1.2x"' in (tmp_path / "c.toml").read_text()


@pytest.mark.parametrize("path", [None, 3, b"costs.toml"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(TypeError, match=f"a cost file is named by its path, got {path!r}"):
        load_costs(path)


def test_a_job_has_costs_for_the_stages_of_a_placement() -> None:
    layers = LayerCosts(tuple(Layer((f"layers.{n}",), 1, 1, 1, 1) for n in range(3)))
    assert as_cost_model(JobCosts(layers), Placement.loop(2)).f == (2, 1)
    stages = CostModel((1, 1), (1, 1), (1, 1), (1, 1))
    assert as_cost_model(JobCosts(stages, transport="one queue"), Placement.loop(2)) == stages


def test_the_page_shows_files_that_can_be_read(tmp_path: Path) -> None:
    for name, block in zip(("stages", "layers"), blocks("docs/costs-file.md", "toml")[:2], strict=True):
        (tmp_path / f"{name}.toml").write_text(block.code)
    stages, layered = load_costs(tmp_path / "stages.toml"), load_costs(tmp_path / "layers.toml")
    assert stages.placement == Placement.v(2)
    assert isinstance(stages.costs, CostModel)
    assert stages.costs.f == (0.021, 0.020, 0.020, 0.027)
    assert stages.costs.transfer(0, 1) == pytest.approx(33554432 / 1e11)
    assert stages.costs.transfer(1, 0) == pytest.approx(1e-5 + 33554432 / 2.5e10)
    assert stages.memory_limit == MemoryLimit.parse((6.5e9, 8e9))
    assert isinstance(layered.costs, LayerCosts)
    assert len(layered.costs.layers) == 18
    assert layered.costs.layers[16].modules == ("layers.15",)


STAGES = {"f": [1, 1], "i": [1, 1], "w": [1, 1], "activations": [1, 1]}
LAYER = {"modules": ["layers.0"], "f": 1, "i": 1, "w": 1, "activations": 1}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([1], "the file has to be a table of keys and values, got [1]"),
        ({}, "it needs either a table [stages] or tables [[layers]]"),
        ({"stages": STAGES, "layers": [LAYER]}, "not both"),
        ({"stages": 3}, "[stages] has to be a table of keys and values, got 3"),
        ({"layers": LAYER}, "expected a list of tables, in TOML [[layers]]"),
        ({"stages": STAGES, "message_byte": 3}, "message_byte = 3: unknown key; did you mean message_bytes?"),
        (
            {"stages": STAGES | {"zz": 3}},
            "[stages] zz = 3: unknown key; known are rank_of, gather, reduce, f, i, w, act",
        ),
        ({"stages": {"f": [1]}}, "[stages] i is missing"),
        ({"stages": STAGES | {"w": [1]}}, "need one number for each stage, got {'f': 2, 'i': 2, 'w': 1"),
        ({"stages": STAGES | {"i": [1, True]}}, "the costs of stages cannot have i = True: give a number"),
        ({"stages": STAGES | {"rank_of": [0, 2]}}, "a placement needs a stage on every rank, got the ranks (0, 2)"),
        ({"stages": STAGES | {"rank_of": [0, 10**20]}}, "a stage on every rank, got the ranks (0, 1000"),
        ({"stages": STAGES | {"rank_of": [0]}}, "rank_of = [0] places 1 stages, but the costs are of 2"),
        ({"stages": STAGES | {"rank_of": [0, 1.0]}}, "[stages] rank_of = [0, 1.0]: expected a list with the rank"),
        ({"stages": STAGES, "transport": "wire"}, "transport='wire' is unknown: use one of 'ideal', 'one-queue'"),
        ({"stages": STAGES, "freed_by_i": 2}, "cannot have freed_by_i = 2: give a number up to 1"),
        (
            {"layers": [LAYER], "freed_by_i": [0, 0]},
            "freed_by_i has to be one number, or one for each layer: got 2 for 1",
        ),
        ({"stages": STAGES, "memory_limit": [1, "x"]}, "memory_limit = 'x' is not an amount: write 1.2x"),
        ({"stages": STAGES | {"rank_of": [0, 1]}, "memory_limit": [1]}, "one for each rank, got 1 for 2 ranks"),
        ({"stages": STAGES, "link": {"bandwidth": 0}}, "bandwidth = 0: give a number above 0"),
        ({"stages": STAGES, "working": {"X": 1}}, "[working] X = 1: unknown key; known are F, I, W, B"),
        ({"stages": STAGES, "links": [{"from": 0}]}, "[[links]] number 1 to is missing"),
        ({"stages": STAGES, "links": [{"from": 0, "to": 1}] * 2}, "2 from = 0, to = 1: this link is already given"),
        (
            {"stages": STAGES | {"rank_of": [0, 1]}, "links": [{"from": 0, "to": 2}]},
            "links has one from 0 to 2, but the ranks are 0 to 1",
        ),
        ({"layers": [LAYER, LAYER | {"f": -1}]}, "the layer layers.0 cannot have f = -1: give a number from 0"),
        ({"layers": [LAYER | {"count": 0}]}, "count has to be a whole number from 1 on, got 0"),
        (
            {"layers": [LAYER | {"count": 2, "modules": ["norm"]}]},
            "one name that ends in a number, for example ['layers.0'",
        ),
        ({"layers": [LAYER | {"count": 10**20}]}, "a model of more than 10000 layers cannot be cut"),
        ({"layers": [LAYER | {"name": "x"}]}, "[[layers]] number 1 name = 'x': unknown key"),
    ],
)
def test_what_is_wrong_is_named(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        from_data(data)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "", "has to end in .toml or .json"),
        ("a.toml", "f = [", "is not valid TOML: "),
        ("a.json", "{", "is not valid JSON: "),
        ("a.toml", "f = 3", "f = 3: unknown key"),
        ("a.toml", "f = " + "[" * 10**5, "is nested too deeply"),
        ("a.json", "[" * 10**5, "is nested too deeply"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"cost file .*a\.") as error:
        load_costs(tmp_path / name)
    assert words in str(error.value)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_costs(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="has to end in"):
        dump_costs(JobCosts(CostModel((1,), (1,), (1,), (1,))), tmp_path / "a.csv")
