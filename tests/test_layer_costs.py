"""Layer splits are partitions, keep to the limit, and never make a longer step than TorchTitan's even split."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Arguments are drawn by name.

import pytest
from determinism import draw_fewer
from hypothesis import assume, given
from hypothesis import strategies as st
from titan_jobs import require_titan

from zbpipe import Placement, plan, simulate, validate
from zbpipe.costs import Link
from zbpipe.costs.job import least_room
from zbpipe.costs.layers import Layer, LayerCosts, Split, balance, even_sizes, split_of
from zbpipe.planner import stages
from zbpipe.planner.request import PLACEMENTS

LITTLE = 3e4


def llm(blocks: int, head: float) -> LayerCosts:
    """Equal blocks, next to no embedding, and a head that is worth `head` blocks."""
    embedding, last = Layer(("tok_embeddings",), 0.1, 0.0, 0.1, 0.0), Layer(("norm", "lm_head"), *(head,) * 4)
    equal = (Layer((f"layers.{number}",), 1.0, 1.2, 0.8, 1.0) for number in range(blocks))
    return LayerCosts((embedding, *equal, last), link=Link(0.05))


amounts = st.sampled_from([0.0, 0.5, 1.0, 1.7, 4.0])
layer_costs = st.lists(
    st.builds(Layer, st.just(("a",)), amounts, amounts, amounts, amounts), min_size=2, max_size=12
).map(lambda layers: LayerCosts(tuple(layers), freed_by_i=0.25, link=Link(0.1)))


def assert_partition(split: Split, placement: Placement, costs: LayerCosts) -> None:
    assert len(split) == placement.num_stages
    assert all(split), "no stage is empty"
    assert [layer for stage in split for layer in stage] == list(range(len(costs.layers)))


def work(split: Split, placement: Placement, costs: LayerCosts) -> list[float]:
    stages, ranks = costs.stages(split), range(placement.num_ranks)
    return [sum(stages.f[s] + stages.i[s] + stages.w[s] for s in placement.stages_on(rank)) for rank in ranks]


@draw_fewer(4)
@given(
    costs=layer_costs,
    ranks=st.integers(1, 4),
    name=st.sampled_from(sorted(PLACEMENTS)),
    microbatches=st.integers(1, 4),
    limit=st.sampled_from([None, 1.0, 2.5]),
)
def test_a_split_is_a_partition_and_its_plan_no_longer_than_the_even_splits(
    costs: LayerCosts, ranks: int, name: str, microbatches: int, limit: float | None
) -> None:
    placement = PLACEMENTS[name](ranks)
    assume(placement.num_stages <= len(costs.layers))
    assume(any(layer.seconds for layer in costs.layers))
    assert_partition(split_of(balance(costs, placement)), placement, costs)
    even = costs.even(placement)
    room = None if limit is None else limit * sum(layer.activations for layer in costs.layers) / ranks
    assume(room is None or room >= max(least_room(placement, even)))
    found = plan(ranks, microbatches, costs, room, placements=[name], budget=LITTLE)
    assert found.split is not None
    assert_partition(found.split, placement, costs)
    stages = costs.stages(found.split)
    timeline = simulate(found.schedule, stages)
    assert validate(found.schedule) == []
    assert timeline.makespan == pytest.approx(found.makespan)
    rival = plan(ranks, microbatches, even, room, placements=[placement], budget=LITTLE)
    assert found.makespan <= rival.makespan * (1 + 1e-9)
    if room is not None:
        assert max(timeline.peak_memory) <= room * (1 + 1e-6)


@given(costs=layer_costs, ranks=st.integers(1, 4), name=st.sampled_from(sorted(PLACEMENTS)))
def test_balance_lightens_the_heaviest_rank(costs: LayerCosts, ranks: int, name: str) -> None:
    placement = PLACEMENTS[name](ranks)
    assume(placement.num_stages <= len(costs.layers))
    even = split_of(even_sizes(len(costs.layers), placement.num_stages))
    heaviest = max(work(split_of(balance(costs, placement)), placement, costs))
    assert heaviest <= max(work(even, placement, costs)) * (1 + 1e-8)


@pytest.mark.parametrize(
    ("blocks", "head", "ranks", "by_stage"),
    [(6, 0.55, 2, "3 1 2 2"), (32, 2.4, 8, "3 3 3 2 2 2 2 2 2 2 2 2 2 2 2 1"), (6, 0.55, 4, "1 1 1 1 1 1 1 1")],
)
def test_a_v_has_the_head_where_the_embedding_is(blocks: int, head: float, ranks: int, by_stage: str) -> None:
    assert " ".join(map(str, balance(llm(blocks, head), Placement.v(ranks)))) == by_stage


@given(costs=layer_costs, data=st.data())
def test_stages_cost_what_their_layers_cost(costs: LayerCosts, data: st.DataObject) -> None:
    sizes = even_sizes(len(costs.layers), data.draw(st.integers(1, len(costs.layers))))
    stages = costs.stages(split_of(sizes))
    for name in ("f", "i", "w", "activations"):
        assert sum(getattr(stages, name)) == pytest.approx(sum(getattr(layer, name) for layer in costs.layers))
    assert (stages.link, stages.freed_by_i) == (costs.link, costs.freed_by_i)


@given(
    num_layers=st.integers(1, 40),
    num_stages=st.integers(2, 20),
    ends=st.tuples(st.integers(0, 3), st.integers(0, 3)) | st.just((1, 1)),
)
def test_the_even_split_is_torchtitans(num_layers: int, num_stages: int, ends: tuple[int, int]) -> None:
    require_titan("0.3.0")
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    assume(num_stages <= num_layers + 2)
    costs = llm(num_layers, 1)
    try:
        titans = _generate_llm_fqn_per_model_part(num_stages, num_layers, *ends)
    except ValueError:
        with pytest.raises(ValueError, match="layers"):
            even_sizes(num_layers + 2, num_stages, ends)
        return
    assert costs.modules(split_of(even_sizes(num_layers + 2, num_stages, ends))) == titans


@pytest.mark.parametrize("name", ["single", "v"])
def test_a_heavy_head_has_few_layers_beside_it(name: str) -> None:
    """The even split gives its rank as many blocks as the others, which wait for it."""
    costs = llm(16, 4.0)
    found = plan(4, 16, costs, placements=[name], budget=1e6)
    assert found.even is not None
    assert found.split is not None
    assert found.makespan < 0.85 * found.even.makespan
    loads = work(found.split, found.schedule.placement, costs)
    assert max(loads) < 1.3 * sum(loads) / len(loads)
    parts = found.module_fqns_per_model_part
    assert parts is not None
    assert parts[0][0] == "tok_embeddings"
    assert parts[-1][-2:] == ["norm", "lm_head"]
    assert len(parts) == found.schedule.placement.num_stages


def test_placements_with_more_stages_than_layers_are_left_out() -> None:
    found = plan(3, 4, llm(3, 1), placements=["single", "v"], budget=LITTLE)
    assert found.bounds.keys() == {"single"}
    with pytest.raises(ValueError, match="5 layers cannot be cut into 12 stages, one layer each at least"):
        plan(6, 4, llm(3, 1), placements=["v"])


def test_the_even_split_wins_where_short_searches_chose_a_worse_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "split_layers", lambda *_, **__: split_of((7, 1)))
    found = plan(2, 4, llm(6, 1.0), placements=["single"], budget=LITTLE)
    assert found.even is not None
    assert (found.split, found.makespan) == (split_of((4, 4)), found.even.makespan)


def test_an_even_split_that_does_not_fit_is_no_rival() -> None:
    """Its last rank keeps more than there is room for; with fewer layers there it works."""
    costs = llm(7, 3.0)
    found = plan(2, 4, costs, 5.5, placements=["single"], budget=LITTLE)
    assert found.even is None
    assert max(found.timeline.peak_memory) <= 5.5 * (1 + 1e-6)
    with pytest.raises(ValueError, match=r"memory_limit = 3.5 is too small: one microbatch peaks at \d on rank"):
        plan(2, 4, costs, 3.5, placements=["single"], budget=LITTLE)
    of_stages = plan(2, 2, (1, 1, 1), placements=["single"], budget=LITTLE)
    nothing = (of_stages.layers, of_stages.split, of_stages.even, of_stages.module_fqns_per_model_part)
    assert nothing == (None,) * 4
