"""Steps where times vary: the same as the simulator's where nothing does, and by hand where something does."""

from dataclasses import replace
from operator import mul
from typing import Any

import numpy as np
import pytest
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st

from zbpipe import CostModel, Schedule, generate, simulate, testing
from zbpipe.costs import Link
from zbpipe.simulator.jitter import Jitter, step_times

pytestmark = pytest.mark.usefixtures("short_search")

ONE = generate("GPipe", 1, 1)
"""An F and a B, which takes 2 seconds."""


def seconds(schedule: Schedule, costs: Any, jitter: Jitter, samples: int = 2000) -> np.ndarray[Any, Any]:
    return step_times(schedule, costs, jitter, samples=samples).seconds


@given(testing.runnable_schedules(), st.data())
def test_where_nothing_varies_it_is_the_simulator(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(testing.cost_models(schedule.placement))
    assert seconds(schedule, costs, Jitter(), samples=3) == pytest.approx(simulate(schedule, costs).makespan)


@draw_fewer(2)
@given(testing.runnable_schedules(), st.data())
def test_what_is_always_slow_is_as_if_the_costs_said_so(schedule: Schedule, data: st.DataObject) -> None:
    costs = replace(data.draw(testing.cost_models(schedule.placement)), overhead=0.0)
    ranks = range(schedule.num_ranks)
    jitter = Jitter(
        slow_ranks={rank: data.draw(st.sampled_from([1.0, 1.5, 3.0])) for rank in ranks},
        slow_links={(one, other): data.draw(st.sampled_from([0.0, 0.25])) for one in ranks for other in range(one)},
    )
    factors = [jitter.slow_ranks[rank] for rank in schedule.placement.rank_of]
    times: Any = {kind: tuple(map(mul, getattr(costs, kind), factors)) for kind in ("f", "i", "w")}
    links = {
        (one, other): Link(latency=costs.transfer(one, other) + jitter.late_by(one, other))
        for one in ranks
        for other in ranks
        if one != other
    }
    expected = simulate(schedule, replace(costs, links=links, **times)).makespan
    assert seconds(schedule, costs, jitter, samples=2) == pytest.approx(expected)


def test_ops_vary_around_their_times() -> None:
    found = seconds(ONE, (1, 0.5, 0.5), Jitter(ops=0.3), samples=20_000)
    assert found.mean() == pytest.approx(2, rel=0.01)
    assert found.std() == pytest.approx(0.3 * 2**0.5, rel=0.05)  # two ops of a second each
    assert found.min() > 0


def test_messages_vary_around_theirs() -> None:
    two = generate("GPipe", 2, 1)
    costs = CostModel.uniform(two.placement, comm=2)
    both = Jitter(ops=0.3, delay=0.5)  # of which neither follows the other
    for jitter, deviation in ((Jitter(delay=0.5), 0.5), (both, 0.834)):
        found = seconds(two, costs, jitter, samples=20_000) - 6
        assert found.mean() == pytest.approx(5, rel=0.01)
        assert found.std() == pytest.approx(deviation * 2**0.5, rel=0.05)


def test_a_seed_gives_the_same_luck_again() -> None:
    schedule, jitter = generate("ZBV", 2, 4), Jitter(ops=0.2)
    first, again, other = (step_times(schedule, (1, 1, 1), jitter, samples=50, seed=seed) for seed in (1, 1, 2))
    assert (first.seconds == again.seconds).all()
    assert not (first.seconds == other.seconds).any()


def test_other_orders_have_the_same_luck() -> None:
    """What GPipe and 1F1B take differs by their orders alone, and on one rank not at all."""
    jitter = Jitter(ops=0.3)
    gpipe, usual = (seconds(generate(name, 1, 6), (1, 1, 1), jitter, samples=20) for name in ("GPipe", "1F1B"))
    assert gpipe == pytest.approx(usual)


@draw_fewer(2)
@given(testing.runnable_schedules())
def test_on_average_jitter_makes_nothing_shorter(schedule: Schedule) -> None:
    usual = simulate(schedule, (1, 1, 1)).makespan
    times = step_times(schedule, (1, 1, 1), Jitter(ops=0.2, delay=0.1), samples=4000)
    assert times.mean >= 0.98 * usual
    assert times.p50 <= times.p95 <= times.p99 == times.quantile(0.99)
