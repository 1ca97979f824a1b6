"""Steps where times vary: the same as the simulator's where nothing does, and by hand where something does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st

from zbpipe import CostModel, Placement, Schedule, cli, generate, plan, simulate, testing, validate
from zbpipe.costs.model import least_room
from zbpipe.planner import robust
from zbpipe.planner.engine import PLAIN, fastest
from zbpipe.planner.request import Request
from zbpipe.planner.robust import add_slack
from zbpipe.planner.stages import make_problem
from zbpipe.simulator.jitter import Jitter, StepTimes, step_times

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
    """Slow ranks and links; and a plan's slack counts the same, but for the overhead of slow ranks."""
    costs = replace(data.draw(testing.cost_models(schedule.placement)), overhead=0.0)
    ranks = range(schedule.num_ranks)
    jitter = Jitter(
        slow_ranks={rank: data.draw(st.sampled_from([1.0, 1.5, 3.0])) for rank in ranks},
        slow_links={(one, other): data.draw(st.sampled_from([0.0, 0.25])) for one in ranks for other in range(one)},
    )
    expected = simulate(schedule, add_slack(schedule.placement, costs, jitter, slack=0)).makespan
    assert seconds(schedule, costs, jitter, samples=2) == pytest.approx(expected)


def test_slow_ones_by_hand() -> None:
    two = generate("GPipe", 2, 1)
    assert seconds(two, (1, 1, 1), Jitter(slow_ranks={1: 2}), samples=1) == pytest.approx(3 + 6)
    assert seconds(two, (1, 1, 1), Jitter(slow_links={(1, 0): 0.5}), samples=1) == pytest.approx(6 + 2 * 0.5)


def test_ops_vary_around_their_times() -> None:
    found = seconds(ONE, (1, 0.5, 0.5), Jitter(ops=0.3), samples=20_000)
    assert found.mean() == pytest.approx(2, rel=0.01)
    assert found.std() == pytest.approx(0.3 * 2**0.5, rel=0.05)  # two ops of a second each
    assert found.min() > 0


def test_messages_vary_around_theirs() -> None:
    two = generate("GPipe", 2, 1)
    costs = CostModel.uniform(two.placement, comm=2)
    both = Jitter(ops=0.3, links=0.3)  # of which neither follows the other
    for jitter, mean, deviation in ((Jitter(links=0.3), 4.0, 0.6), (Jitter(delay=0.5), 5.0, 0.5), (both, 4.0, 0.9)):
        found = seconds(two, costs, jitter, samples=20_000) - 6
        assert found.mean() == pytest.approx(mean, rel=0.01)
        assert found.std() == pytest.approx(deviation * 2**0.5, rel=0.05)


def test_bursts_last_for_a_step() -> None:
    found = seconds(ONE, (1, 1, 1), Jitter(burst=0.2, burst_factor=3), samples=20_000)
    assert set(np.round(found, 9)) == {3.0, 9.0}
    assert (found > 5).mean() == pytest.approx(0.2, rel=0.05)
    two = generate("GPipe", 2, 4)
    late = seconds(two, (1, 1, 1), Jitter(burst=0.5, burst_delay=1), samples=200)
    assert set(np.round(late, 9)) == {15.0, 17.0}  # one way and the other


def test_measured_factors_are_used_as_they_are() -> None:
    timeline = simulate(ONE, (1, 1, 1))
    ((f, b),) = timeline.spans
    slower = replace(timeline, spans=((f._replace(end=2.0), b._replace(start=2.0, end=4.0)),))
    assert Jitter.from_timelines([timeline, slower]).factors == (1.0,) * 4
    assert set(seconds(ONE, (1, 1, 1), Jitter(factors=(0.5, 2)))) <= {1.5, 3, 4.5, 6}
    many = simulate(generate("GPipe", 1, 3), (1, 1, 1))
    row = [span._replace(end=span.end + 0.5 * (span.op.microbatch == 2)) for span in many.spans[0]]
    assert sorted(Jitter.from_timelines([replace(many, spans=(tuple(row),))]).factors) == [1, 1, 1, 1, 1.25, 1.5]


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


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Jitter(ops=-0.1), "jitter cannot have ops = -0.1: give a number from 0"),
        (lambda: Jitter(burst=1.5), "burst = 1.5 is a chance: give at most 1"),
        (lambda: Jitter(burst_factor=0), "a jitter's factor of 0"),
        (lambda: Jitter(slow_ranks={1: float("nan")}), r"slow_ranks\[1\] = nan: give a number from 0"),
        (lambda: Jitter(ops=0.1, factors=(1.0,)), "exclude each other"),
        (lambda: Jitter.parse("ops=0.1,lag=2"), "'lag=2' is not understood; it takes ops=X, links=X, delay=X"),
        (lambda: Jitter.parse("slow-rank=1"), "'slow-rank=1' is not understood"),
        (
            lambda: step_times(ONE, (1, 1, 1), Jitter(slow_ranks={1: 2.0})),
            "jitter names rank 1, but there are ranks 0 to 0",
        ),
        (lambda: step_times(ONE, (1, 1, 1), Jitter(), samples=0), "samples has to be a whole number from 1 on, got 0"),
        (lambda: step_times(ONE, (1, 1, 1), Jitter(), seed=-1), "seed has to be a whole number from 0 on, got -1"),
        (lambda: plan(2, 4, (1, 1, 1), robust=Jitter(), quantile=1.0), "quantile = 1.0 has to be between 0 and 1"),
        (lambda: plan(2, 4, (1, 1, 1), robust=Jitter(), most_loss=-0.1), "most_loss = -0.1 has to be 0 or more"),
        (lambda: plan(2, 4, (1, 1, 1), most_loss=0.1), "most_loss = 0.1 is for plans that tolerate jitter"),
        (lambda: plan(2, 4, (1, 1, 1), robust=Jitter(), exact=True), "omit objective, transport and exact"),
        (lambda: plan(2, 4, (1, 1, 1), robust=Jitter(), offload="all"), "omit offload"),
    ],
)
def test_what_cannot_be(make: Callable[[], object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make()


def test_what_is_something_else() -> None:
    with pytest.raises(TypeError, match="jitter cannot have ops = 'much': give a number from 0"):
        Jitter(ops="much")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jitter = 0.1 is not a zbpipe\.simulator\.jitter\.Jitter"):
        step_times(ONE, (1, 1, 1), 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"robust = 0.1 is not a zbpipe\.simulator\.jitter\.Jitter"):
        plan(2, 4, (1, 1, 1), robust=0.1)  # type: ignore[arg-type]


def test_what_was_parsed() -> None:
    text = "ops=0.1, links=0.5,delay=0.2,burst=0.01,burst-factor=2,burst-delay=1,slow-rank=3:1.2,slow-link=1-0:0.5"
    numbers = {"ops": 0.1, "links": 0.5, "delay": 0.2, "burst": 0.01, "burst_factor": 2.0, "burst_delay": 1.0}
    assert Jitter.parse(text) == Jitter(**numbers, slow_ranks={3: 1.2}, slow_links={(0, 1): 0.5})  # type: ignore[arg-type]


def test_slack_is_more_time_on_links() -> None:
    placement = Placement.loop(2)
    costs = CostModel.uniform(placement, comm=0.5)
    jitter = Jitter(ops=0.1, links=0.2, delay=0.3, burst=0.5, burst_factor=3, burst_delay=1)
    none, some = (add_slack(placement, costs, jitter, slack) for slack in (0, 2))
    assert none.transfer(0, 1) == 0.5
    assert some.transfer(1, 0) == pytest.approx(0.5 + 2 * (0.1 + 0.2 * 0.5 + 0.3 + 0.5 * (1 + 2)))
    assert (some.f, some.i, some.w) == (costs.f, costs.i, costs.w)


LATE = Jitter(ops=0.05, delay=1.0)


def test_a_robust_plan_is_the_best_that_is_known() -> None:
    """Within the limit, and where links are late better than a plan that does not know, and the named schedules."""
    limit, costs = 4.0, (1, 1.2, 0.8)
    found = plan(4, 8, costs, limit, robust=LATE, budget=3e6)
    assert validate(found.schedule, limit) == []
    assert found.step_times is not None
    named = [generate(name, 4, 8) for name in ("1F1B", "ZBV", "ZBH1", "Interleaved1F1B")]
    rivals = [plan(4, 8, costs, limit, budget=3e6).schedule, *(each for each in named if not validate(each, limit))]
    assert len(rivals) >= 4

    def p95(schedule: Schedule) -> float:
        return step_times(schedule, costs, LATE, samples=2000, seed=5).p95

    assert found.step_times.p95 == pytest.approx(p95(found.schedule), rel=0.03)
    assert p95(found.schedule) < 0.985 * min(map(p95, rivals))
    assert found.lower_bound <= found.makespan


@pytest.mark.long
def test_a_robust_plan_may_lose_only_so_much_without_jitter() -> None:
    costs = partial(CostModel.uniform, f=1, i=1.2, w=0.8, comm=0.02)
    free, bound = (
        plan(4, 16, costs, 8.0, robust=LATE, budget=1e7, placements=["single", "v"], most_loss=most)
        for most in (None, 0.01)
    )
    best = plan(4, 16, costs, 8.0, budget=1e7, placements=["v"])
    assert free.makespan > 1.02 * best.makespan
    assert bound.makespan <= 1.01 * best.makespan
    assert free.step_times is not None
    assert bound.step_times is not None
    assert free.step_times.p95 < bound.step_times.p95
    zbv = step_times(generate("ZBV", 4, 16), costs(Placement.v(4)), LATE, samples=2000, seed=1)
    assert bound.step_times.mean < 0.79 * zbv.mean  # without annealing in samples 0.80


OPS_VARY = Jitter(ops=0.2, links=0.1, delay=0.3, slow_links={(0, 1): 0.5})
RANKS_VARY = Jitter(burst=0.3, burst_factor=2, burst_delay=0.5, slow_ranks={0: 1.5})
"""Where all ops of a rank vary alike, a B takes what its I and its W take."""


@draw_fewer(2)
@given(st.data())
def test_annealing_counts_what_the_simulation_counts(data: st.DataObject) -> None:
    """The mean and the deviation over its samples; the order keeps to the limits; both engines do the same."""
    placement = data.draw(testing.placements(max_ranks=3).filter(lambda each: each.num_ranks > 1))
    costs = data.draw(testing.cost_models(placement))
    room = tuple(data.draw(st.sampled_from([1.0, 2.5])) * each for each in least_room(placement, costs))
    request = Request(placement.num_ranks, 4, {"tested": placement}, room)
    problem = make_problem(request, "tested", placement, costs)
    jitter = RANKS_VARY if any(problem.merges) else data.draw(st.sampled_from([OPS_VARY, RANKS_VARY]))
    start = problem.schedule("start", problem.list_one_by_one())
    most = data.draw(st.sampled_from([1.0, 1.2])) * simulate(start, costs).makespan
    search = robust.Annealing(request, jitter, 0.9, most, lambda share, best: None)
    orders = [search.order(problem, start, engine, 50_000) for engine in (PLAIN, fastest())]
    assert orders[0] == orders[1]
    schedule = problem.schedule("annealed", orders[0][1])
    testing.check_schedule(schedule)
    assert problem.fits(schedule)
    assert simulate(schedule, costs).makespan <= most * (1 + 1e-6)
    before, after = (
        step_times(each, costs, jitter, samples=robust.ANNEALING_SAMPLES, seed=robust.ANNEALING_SEED).seconds
        for each in (start, schedule)
    )
    assert orders[0][0] == pytest.approx(after.mean() + NormalDist().inv_cdf(0.9) * after.std())
    assert orders[0][0] <= (before.mean() + NormalDist().inv_cdf(0.9) * before.std()) * (1 + 1e-9)


def test_a_robust_plan_may_lose_nothing_without_jitter() -> None:
    """Where it would lose 2 % if it might."""
    costs = partial(CostModel.uniform, f=1, i=1.2, w=0.8, comm=0.02)
    usual = plan(4, 16, costs, 4.0, budget=1e7, placements=["single"]).makespan
    found = [
        plan(4, 16, costs, 4.0, robust=LATE, budget=1e7, placements=["single"], most_loss=most).makespan
        for most in (None, 0.0)
    ]
    assert found[0] > 1.01 * usual
    assert found[1] <= usual * (1 + 1e-9)


def test_without_jitter_a_robust_plan_is_as_good_as_another() -> None:
    usual, robust = (plan(2, 6, (1, 1.2, 0.8), 2, budget=1e6, robust=each) for each in (None, Jitter()))
    assert robust.makespan == pytest.approx(usual.makespan)
    assert isinstance(robust.step_times, StepTimes)


def test_all_schedules_by_the_quantile() -> None:
    words = "ops=0.1,delay=0.5"
    run = CliRunner().invoke(
        cli.main, ["compare", "-p", "2", "-m", "4", "--costs", "1,1,1", "--jitter", words, "--json"]
    )
    rows = json.loads(run.stdout)
    by_hand = step_times(generate("ZBV", 2, 4), (1, 1, 1), Jitter.parse(words))
    (zbv,) = (row for row in rows if row["schedule"] == "ZBV")
    assert zbv["jitter"] == pytest.approx(by_hand.record())
    p95s = [row["jitter"]["p95"] for row in rows if row["runs"]]
    assert p95s == sorted(p95s)
    table = CliRunner().invoke(cli.main, ["compare", "-p", "2", "-m", "4", "--jitter", words]).output
    assert table.splitlines()[2].split()[-2:] == ["p50", "p95"]
    one = CliRunner().invoke(cli.main, ["simulate", "ZBV", "-p", "2", "-m", "4", "--costs", "1,1,1", "--jitter", words])
    assert f"where times vary, 1000 steps: mean {by_hand.mean:.6g}"[:-3] in one.output


def test_a_robust_plan_on_the_command_line() -> None:
    arguments = ["plan", "-p", "2", "-m", "4", "--jitter", "delay=1", "--budget", "1e5"]
    run = CliRunner().invoke(cli.main, [*arguments, "--json"])
    found = json.loads(run.stdout)
    assert found["jitter"]["p95"] <= min(row["jitter"]["p95"] for row in found["named"] if row["fits"])
    assert "p95" in CliRunner().invoke(cli.main, arguments).output
    bound = json.loads(CliRunner().invoke(cli.main, [*arguments, "--json", "--most-loss", "0"]).stdout)
    shortest = min(row["makespan"] for row in bound["named"] if row["fits"])
    assert bound["makespan"] <= shortest


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["compare", "-p", "2", "-m", "4", "--jitter", "lag=1"], "'lag=1' is not understood"),
        (["compare", "-p", "2", "-m", "4", "--jitter", "ops=1", "--transport", "one-queue"], "omit --transport"),
        (["simulate", "ZBV", "-p", "2", "-m", "4", "--jitter", "ops=1", "--steps", "2"], "one synchronous step"),
        (["simulate", "ZBV", "-p", "2", "-m", "4", "--jitter", "slow-rank=2:2"], "names rank 2"),
    ],
)
def test_what_the_command_line_refuses(arguments: list[str], error: str) -> None:
    run = CliRunner().invoke(cli.main, arguments)
    assert run.exit_code != 0
    assert error in " ".join(run.output.split())
