"""Costs of stages, layers and jobs refuse what is no cost, and nobody changes them afterwards."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Wrong arguments are what it tries.

import pickle
import re
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zbpipe import CostModel, OpKind, Placement, load_costs
from zbpipe.costs import JobCosts, Layer, LayerCosts, Link, dump_costs
from zbpipe.costs.job import MemoryLimit, as_cost_model
from zbpipe.costs.model import Transport
from zbpipe.costs.numbers import FrozenDict
from zbpipe.schedule.ir import COMPUTATIONS
from zbpipe.testing import placements

ONES = dict.fromkeys(("f", "i", "w", "activations"), (1, 1))


@pytest.mark.parametrize("name", [*ONES, "gather", "reduce", "message_bytes", "overhead"])
@pytest.mark.parametrize("wrong", ["1", None, True, b"1", 1j, [1], -1, nan, inf, 1e200, 10**400])
def test_what_is_no_number_is_refused(name: str, wrong: Any) -> None:
    words = f"the costs of stages cannot have {name} = {wrong!r}: give a number from 0 to 1e+100"
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        CostModel(**ONES | {name: wrong if name in ("message_bytes", "overhead") else (1, wrong)})


LAYERS = (Layer(("norm",), 1, 1, 1, 1),)


@pytest.mark.parametrize("array", [np.array, lambda values: pytest.importorskip("torch").tensor(values)])
def test_arrays_are_lists_of_numbers(array: Callable[[Any], Any]) -> None:
    given, several = array([1.0, 1.0]), array([0.5, 0.25])
    costs = CostModel(given, given, given, given, freed_by_i=several, working={OpKind.I: several}, gather=several)
    more = {"freed_by_i": (0.5, 0.25), "working": {OpKind.I: (0.5, 0.25)}, "gather": (0.5, 0.25)}
    assert costs == CostModel(**ONES, **more)
    for wrong in (array([[1.0, 1.0]]), array(1.0)):
        with pytest.raises(TypeError, match=r"the costs of stages cannot have f = \[?(\[1.0, 1.0\]|1.0)"):
            CostModel(wrong, given, given, given)


def test_costs_do_not_change_with_what_they_were_made_of() -> None:
    f, links = [1, 1], {(0, 1): Link(0.5)}
    costs = CostModel(f, (1, 1), (1, 1), (1, 1), links=links)  # type: ignore[arg-type]
    f[0], links[0, 1] = 9, Link(9)
    assert (costs.f, costs.transfer(0, 1)) == ((1, 1), 0.5)
    with pytest.raises(TypeError, match="does not support item assignment"):
        costs.links[0, 1] = Link()  # type: ignore[index]
    with pytest.raises(AttributeError):
        costs.f = (2, 2)  # type: ignore[misc]


LINKS = {(0, 1): Link(0.5), (1, 0): Link(1)}


@pytest.mark.parametrize(
    "made",
    [
        lambda links: CostModel(**ONES, links=links),
        lambda links: LayerCosts(LAYERS, links=links),
        lambda links: JobCosts(CostModel([1, 1], (1, 1), (1, 1), (1, 1), links=links), Placement.loop(2), [1, 2]),
    ],
)
def test_equal_costs_have_equal_hashes(made: Callable[[Any], Any]) -> None:
    given = dict(LINKS)
    costs, same = made(given), made(dict(reversed(LINKS.items())))
    given.clear()
    assert costs == same
    assert hash(costs) == hash(same)
    assert pickle.loads(pickle.dumps(costs)) == costs
    assert {costs: "found"}[same] == "found"
    assert costs != made({})


def test_a_frozen_mapping_equals_any_other() -> None:
    assert FrozenDict({1: 2}) == {1: 2} != FrozenDict({1: 3})
    assert hash(FrozenDict({1: 2, 3: 4})) == hash(FrozenDict({3: 4, 1: 2}))
    assert repr(FrozenDict({1: 2})) == "FrozenDict({1: 2})"


def test_shares_are_what_a_rank_keeps_of_a_microbatch() -> None:
    costs = CostModel((1,) * 4, (1,) * 4, (1,) * 4, (1, 2, 3, 5))
    assert Placement.v(2).sum_by_rank(costs.activations) == (6, 5)
    assert Placement.v(2).sum_by_rank(CostModel.uniform(Placement.v(2)).activations) == (1, 1)
    assert costs.of(3, OpKind.F).adds == 5


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
