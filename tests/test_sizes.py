"""Microbatches of different sizes: their times, memory and bounds, and `zbpipe.pack`, which makes and orders them."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulation import Run, plain_starts, seconds_of

from zbpipe import CostModel, OpKind, Placement, Schedule, cli, generate, load_costs, pack, plan, simulate, validate
from zbpipe.costs import JobCosts, Layer, LayerCosts, dump_costs
from zbpipe.costs.transformer import typical_costs
from zbpipe.planner.packing import Microbatch
from zbpipe.simulator.lower_bound import lower_bound, period_bound
from zbpipe.simulator.memory import peak_bytes
from zbpipe.simulator.simulation import period
from zbpipe.testing import cost_models, runnable_schedules

pytestmark = pytest.mark.usefixtures("short_search")
TOKENS = st.integers(1, 64)
SIZES = TOKENS.flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(tokens, tokens**2)))


@st.composite
def sized(draw: st.DrawFn, schedule: Schedule) -> CostModel:
    sizes = draw(st.lists(SIZES, min_size=schedule.num_microbatches, max_size=schedule.num_microbatches))
    attention = draw(
        st.sampled_from([0.0, 0.25, 1.0]) | st.tuples(*[st.sampled_from([0.0, 0.5])] * len(schedule.placement.rank_of))
    )
    costs = draw(cost_models(schedule.placement))
    return replace(costs, attention=attention, sizes=tuple(sizes), of_size=draw(st.none() | SIZES))


@given(st.data())
def test_a_step_is_its_longest_path_and_above_the_bounds(data: st.DataObject) -> None:
    schedule = data.draw(runnable_schedules())
    costs = data.draw(sized(schedule))
    ends = [start + seconds_of(costs, event) for event, start in plain_starts(Run(schedule, costs), 1, False).items()]
    assert simulate(schedule, costs).makespan == pytest.approx(max(ends))
    size = schedule.placement, costs, schedule.num_microbatches
    assert simulate(schedule, costs).makespan >= lower_bound(*size) * (1 - 1e-9)
    assert period(schedule, costs) >= period_bound(*size) * (1 - 1e-9)


@given(st.data(), SIZES, st.booleans())
@settings(max_examples=15)
def test_equal_sizes_change_nothing(data: st.DataObject, size: tuple[int, int], given_size: bool) -> None:
    schedule = data.draw(runnable_schedules(Placement.v(2)))
    costs, number = replace(data.draw(cost_models(schedule.placement)), attention=0.3), schedule.num_microbatches
    equal = replace(costs, sizes=(size,) * number, of_size=size if given_size else None)
    one, other = simulate(schedule, costs), simulate(schedule, equal)
    assert (one.spans, one.peak_memory, one.lower_bound) == (other.spans, other.peak_memory, other.lower_bound)
    assert generate("ZB", 2, number, costs=costs) == generate("ZB", 2, number, costs=equal)
    plans = [plan(2, number, each, "1.5x", budget=1e3) for each in (costs, equal)]
    assert len({(each.schedule, each.makespan, each.lower_bound, each.limits) for each in plans}) == 1


LIMIT = "2.7 microbatches"
MAKERS: dict[str, Callable[[CostModel, int], Schedule]] = {
    "ZB": lambda costs, number: generate("ZB", 3, number, costs=costs, memory_limit=LIMIT),
    "Auto": lambda costs, number: generate("Auto", 3, number, costs=costs, memory_limit=LIMIT),
    "plan": lambda costs, number: plan(3, number, costs, LIMIT, budget=1e3).schedule,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(st.lists(TOKENS, min_size=4, max_size=7), st.randoms(use_true_random=False))
@settings(max_examples=8)
def test_limits_hold_for_the_largest_in_any_order(
    make: Callable[[CostModel, int], Schedule], sizes: list[int], random: Random
) -> None:
    costs = replace(typical_costs(Placement.v(3)), attention=0.2, sizes=tuple(sizes))
    schedule = make(costs, len(sizes))
    for other in (sizes, random.sample(sizes, len(sizes)), [max(sizes)] * len(sizes)):
        changed = replace(costs, sizes=tuple(other), of_size=(sum(sizes) / len(sizes),) * 2)
        most = 2.7 * max(sizes) * len(sizes) / sum(sizes)
        assert max(simulate(schedule, changed).peak_memory) <= most * (1 + 1e-9)
    assert not validate(schedule, LIMIT, costs)


def test_what_a_microbatch_takes_grows_with_its_tokens() -> None:
    one = CostModel((1,), (2,), (3,), (8,), freed_by_i=0.5, working={OpKind.F: 4}, message_bytes=6, overhead=0.5)
    costs = replace(one, attention=0.5, sizes=((3, 9), (1, 7)), of_size=(1, 1))
    assert [costs.of(0, kind, 0).seconds for kind in "FIWB"] == [6.5, 12.5, 9.5, 21.5]
    assert [costs.of(0, kind).seconds for kind in "FIW"] == [5.5, 10.5, 6.5]
    assert costs.of(0, "F", 1) == (4.5, 8, 4, 0, 0.0)
    assert costs.of(0, "F") == (5.5, 24, 12, 0, 0.0)
    assert costs.of(0, "SEND_F").message == 18
    schedule = generate("GPipe", 1, 2)
    assert peak_bytes(simulate(schedule, costs)) == (36.0,)


def test_joined_layers_keep_the_share_of_attention(tmp_path: Path) -> None:
    layers = (Layer(("a",), 1, 1, 1, 1), Layer(("b",), 3, 3, 1, 1))
    costs = LayerCosts(layers, attention=(0.0, 0.5), sizes=(4, 2), working={OpKind.F: 2}, of_size=4)
    stage = costs.stages((range(2),))
    assert stage.attention == (0.375,)
    assert (stage.sizes, stage.of_size) == (((4, 16), (2, 8)), (4, 16))
    assert stage.of(0, OpKind.F, 1).working == stage.of(0, OpKind.F, 0).working / 2 == 1.0
    for name in ("costs.toml", "costs.json"):
        dump_costs(costs, tmp_path / name)
        assert load_costs(tmp_path / name) == JobCosts(costs)


def work_of(microbatch: Microbatch, costs: CostModel) -> float:
    one = replace(costs, sizes=(microbatch.size,)).by_microbatch[0]
    return sum(map(sum, (one.f, one.i, one.w)))


def first_come(lengths: list[int], tokens: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for number, length in enumerate(lengths):
        if sum(lengths[each] for each in found[-1]) + length > tokens:
            found.append([])
        found[-1].append(number)
    return found


@given(st.lists(TOKENS, min_size=1, max_size=60), st.integers(64, 200), st.sampled_from([0.0, 0.4, 1.0]), st.data())
def test_packs_are_complete_within_the_budget_and_no_worse_than_first_come(
    lengths: list[int], tokens: int, attention: float, data: st.DataObject
) -> None:
    costs = CostModel((1,), (1,), (1,), (1,), attention=attention, of_size=32)
    usual = first_come(lengths, tokens)
    ranks = data.draw(st.sampled_from([n for n in range(1, 5) if len(usual) % n == 0]))
    found = pack(lengths, tokens=tokens, microbatches=len(usual) // ranks, ranks=ranks, costs=costs)
    assert [len(each) for each in found] == [len(usual) // ranks] * ranks
    packed = [each for of_rank in found for each in of_rank]
    assert sorted(n for each in packed for n in each.samples) == list(range(len(lengths)))
    others = [Microbatch(tuple(each), *(sum(lengths[n] ** k for n in each) for k in (1, 2))) for each in usual]
    for each in packed:
        own = [lengths[n] for n in each.samples]
        assert 0 < each.tokens == sum(own) <= tokens
        assert each.squares == sum(length**2 for length in own)
    assert max(work_of(each, costs) for each in packed) <= max(work_of(each, costs) for each in others) * (1 + 1e-9)
    (fewest,) = pack(np.array(lengths), tokens=tokens, costs=costs)  # type: ignore[arg-type]
    assert len(fewest) <= len(usual)


def test_most_packs_are_balanced() -> None:
    random = Random(0)
    for sigma in (0.5, 1.0):
        lengths = [max(int(random.lognormvariate(6, sigma)), 1) for _ in range(1024)]
        found = [each for of_rank in pack(lengths, microbatches=16, ranks=4) for each in of_rank]
        costs = CostModel((1,), (1,), (1,), (1,), attention=0.02)  # about the default at this length
        works = [work_of(each, replace(costs, of_size=(1, 600))) for each in found]
        assert max(works) < 1.02 * sum(works) / len(works)


@given(st.lists(TOKENS, min_size=5, max_size=5), st.sampled_from(["1F1B", "ZB", "ZBH1"]))
@settings(max_examples=15)
def test_few_microbatches_are_in_the_shortest_order(lengths: list[int], name: str) -> None:
    schedule = generate(name, 2, 5)
    costs = CostModel.uniform(schedule.placement, 1, 1.2, 0.8, comm=0.1, attention=0.3)
    (found,) = pack(lengths, schedule=schedule, costs=costs)

    def step(sizes: tuple[tuple[float, float], ...]) -> float:
        return simulate(schedule, replace(costs, sizes=sizes)).makespan

    shortest = min(map(step, permutations([each.size for each in found])))
    assert step(tuple(each.size for each in found)) == pytest.approx(shortest, rel=1e-3)


def test_many_microbatches_are_in_a_good_order() -> None:
    schedule, random = generate("1F1B", 4, 16), Random(1)
    costs = CostModel.uniform(schedule.placement)
    (found,) = pack([max(int(random.lognormvariate(5, 1)), 1) for _ in range(24)], schedule=schedule, costs=costs)
    sizes = [each.size for each in found]

    def step(*order: int) -> float:
        return simulate(schedule, replace(costs, sizes=tuple(sizes[each] for each in order))).makespan

    places = range(len(sizes))
    assert step(*places) < 0.95 * step(*random.sample(places, len(places)))
    for pair in combinations(places, 2):
        other = dict(zip(pair, pair[::-1], strict=True))
        assert step(*places) <= step(*(other.get(each, each) for each in places)) * 1.0002


def test_commands_take_sizes(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return json.loads(CliRunner().invoke(cli.main, [*arguments, "--json"], catch_exceptions=False).stdout)

    usual, equal = run("compare", "-p", "2", "-m", "3"), run("compare", "-p", "2", "--sizes", "7,7,7")
    assert equal == usual
    size = "-p", "2", "--sizes", "4:9,2:3,1:1"
    costs = replace(typical_costs(Placement.wave(2, 2)), sizes=((4, 9), (2, 3), (1, 1)))
    schedule = generate("ZB", 2, 3, costs=costs)
    two = "--stages-per-rank", "2"
    assert run("simulate", "ZB", "-m", "3", *size, *two)["makespan"] == simulate(schedule, costs).makespan
    dump_costs(JobCosts(costs, Placement.wave(2, 2)), tmp_path / "costs.toml")
    of_file = "-m", "3", "--costs-file", str(tmp_path / "costs.toml")
    one, other = (run("plan", "--budget", "1e4", *each) for each in ((*size, "--placement", "v"), of_file))
    assert one["makespan"] == other["makespan"] <= simulate(schedule, costs).makespan
