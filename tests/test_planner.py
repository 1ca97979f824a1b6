"""Plans are valid, within their limits, never below the bound, and as good as the best known schedules."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Wrong arguments are what it tries.

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import pytest
from determinism import draw_fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from planner import Cell, cells

from zbpipe import CostModel, Op, OpKind, Placement, Schedule, generate, simulate
from zbpipe.algorithms.zb import find_best
from zbpipe.costs import JobCosts, Layer, LayerCosts
from zbpipe.costs.job import least_room, memory_of_1f1b
from zbpipe.costs.model import ROUNDING, Transport
from zbpipe.costs.transformer import typical_costs
from zbpipe.planner.engine import PLAIN, Engine, fastest
from zbpipe.planner.kernel import NEVER, link, replay
from zbpipe.planner.plan import plan
from zbpipe.planner.problem import Problem, fit_within, make_leanest
from zbpipe.planner.request import PLACEMENTS, Request
from zbpipe.planner.search import ListScheduler, PriorityParams
from zbpipe.planner.stages import make_problem
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.lower_bound import lower_bound, period_bound
from zbpipe.simulator.simulation import period
from zbpipe.testing import check_schedule, cost_models, placements, runnable_schedules, schedules

pytestmark = pytest.mark.usefixtures("short_search")

LITTLE = 2e5
"""A budget for tests that look at whether plans are right, not at how good they are."""


def microbatches_of(number: float, placement: Placement, costs: CostModel) -> tuple[float, ...]:
    return tuple(number * share for share in placement.sum_by_rank(costs.activations))


def problem(placement: Placement, costs: CostModel | None = None, microbatches: int = 4, limit: float = 2.0) -> Problem:
    costs = costs or CostModel.uniform(placement)
    limits = tuple(map(max, microbatches_of(limit, placement, costs), least_room(placement, costs)))
    return Problem("tested", placement, costs, microbatches, limits)


def assert_sound(tested: Problem, order: list[int], length: float) -> Schedule:
    """A valid schedule within the limits, whose length the inner loops know, and which is not below the bound."""
    schedule = tested.schedule("tested", order)
    check_schedule(schedule)
    assert tested.fits(schedule)
    assert length == pytest.approx(tested.length(order), rel=1e-6)
    assert tested.lower_bound <= length * (1 + 1e-9)
    return schedule


@draw_fewer(2)
@given(st.data())
def test_searches_keep_orders_sound_within_the_limit_and_above_the_bound(data: st.DataObject) -> None:
    """Neither justifying nor annealing makes an order longer, and justifying keeps the microbatches sorted."""
    placement = data.draw(placements(max_ranks=4))
    limit = data.draw(st.sampled_from([1.0, 1.5, 2.0, 3.5, 99.0]))
    tested = problem(placement, data.draw(cost_models(placement)), data.draw(st.integers(1, 7)), limit)
    scheduler = ListScheduler(tested, PLAIN)
    plain = scheduler.run(PriorityParams.plain(scheduler.legs))
    for before, order in (plain, *scheduler.list_by_kind()):
        assert_sound(tested, order, before)
        justified, moved = scheduler.justify(order)
        assert tested.length(moved) <= justified * (1 + 1e-6)
        assert justified <= before
        for ops in assert_sound(tested, moved, tested.length(moved)):
            by_stage = sorted(ops, key=lambda op: (op.stage, op.kind))
            assert by_stage == sorted(ops, key=lambda op: (op[:2], op.microbatch))
    annealed, better, _ = PLAIN.anneal(tested.job, plain[1], 0.0, 0.2, 20_000, data.draw(st.integers(1, 99)))
    assert_sound(tested, better, annealed)
    assert annealed <= plain[0]


@settings(max_examples=150)
@given(st.data())
def test_no_schedule_beats_the_bound_for_the_memory_that_it_takes(data: st.DataObject) -> None:
    schedule = data.draw(schedules(max_ranks=6, max_microbatches=12) | runnable_schedules())
    costs = data.draw(cost_models(schedule.placement))
    timeline = simulate(schedule, costs)
    arguments = schedule.placement, costs, schedule.num_microbatches, timeline.peak_memory
    assert lower_bound(*arguments) <= timeline.makespan * (1 + 1e-9)
    assert period_bound(*arguments) <= period(schedule, costs) * (1 + 1e-9)


@given(st.data())
def test_list_scheduling_never_gets_stuck_where_one_microbatch_fits(data: st.DataObject) -> None:
    """Ops that only F takes memory for, and limits with hardly any room to spare: an F too early would end it."""
    placement = data.draw(st.builds(Placement.v, st.integers(1, 4), st.integers(1, 4)))
    stages = range(placement.num_stages)
    f, i, w = (tuple(data.draw(st.sampled_from([0.1, 0.5, 1.0, 3.0])) for _ in stages) for _ in range(3))
    sizes = tuple(data.draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in stages)
    costs = CostModel(f, i, w, sizes, freed_by_i=data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    room = tuple(least + data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])) for least in least_room(placement, costs))
    tested = Problem("tested", placement, costs, data.draw(st.integers(1, 6)), room)
    scheduler = ListScheduler(tested, PLAIN)
    for seed in range(5):
        length, order = scheduler.run(replace(PriorityParams.random(scheduler.legs, Random(seed)), spare=0.0))
        assert length < NEVER
        assert tested.fits(tested.schedule("listed", order))


def test_list_scheduling_fills_the_limit_if_another_microbatch_can_go_on() -> None:
    """4 ranks with room for 2 microbatches: it took 35 when each F kept room for its own microbatch."""
    scheduler = ListScheduler(tested := problem(Placement.v(4), microbatches=8, limit=2), PLAIN)
    assert (scheduler.run(PriorityParams.plain(scheduler.legs))[0], tested.lower_bound) == (30, 29.5)


@pytest.mark.parametrize(
    ("name", "costs", "makespan"),
    # ZBV fills the time before its first I with F for all its memory, and that is too little if I takes long.
    [("ZBV", (1, 1, 1), 99.5), ("ZBV", (1, 1.2, 0.8), 100.2), ("ZBV", (1, 2, 1), 135), ("ZBH1", (1, 1, 1), 103)],
)
def test_the_bound_is_reached(name: str, costs: tuple[float, float, float], makespan: float) -> None:
    schedule = generate(name, 8, 32)
    model = CostModel.uniform(schedule.placement, *costs)
    bound = lower_bound(schedule.placement, model, 32, microbatches_of(8, schedule.placement, model))
    assert bound == pytest.approx(makespan)
    assert simulate(schedule, model).makespan == pytest.approx(makespan)


def test_the_bound_knows_warm_up_cool_down_and_littles_law() -> None:
    """8 ranks, 32 microbatches, half of the memory of 1F1B; the numbers are worked out by hand.

    On rank 7 of a V its first I starts after 8 (all F) and 7 steps of 0.6; 11 F of 0.5 fit before. After its last F,
    at least 3.5 + 9.6 + 0.4 are to come, and only 11 I and W, of 1.0 each, are left to do. The rest is work, 96.
    """
    v, single = Placement.v(8), Placement.loop(8)
    costs = CostModel.uniform(v, 1, 1.2, 0.8)
    bound = lower_bound(v, costs, 32, microbatches_of(5.5, v, costs))
    assert bound == pytest.approx(96 + (8 + 7 * 0.6 - 5.5) + (3.5 + 9.6 + 0.4 - 11))
    # Rank 0 holds a microbatch from its F over 7 F and 8 I elsewhere and its own to its W, and only 5 at a time.
    costs = CostModel.uniform(single, 1, 2, 1)
    bound = lower_bound(single, costs, 32, microbatches_of(5.5, single, costs))
    assert bound == pytest.approx(32 * (8 + 8 * 2 + 1) / 5)


@draw_fewer(2)
@given(st.data())
def test_plans_are_valid_and_keep_to_the_limit(data: st.DataObject) -> None:
    placement = data.draw(placements(max_ranks=4))
    costs = data.draw(cost_models(placement))
    ranks = placement.num_ranks
    drawn = data.draw(st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.5]), min_size=ranks, max_size=ranks))
    drawn = [limit * share for limit, share in zip(drawn, placement.sum_by_rank(costs.activations), strict=True)]
    limits = list(map(max, drawn, least_room(placement, costs)))
    microbatches = data.draw(st.integers(1, 7))
    found = plan(ranks, microbatches, costs, limits, placements=[placement], budget=LITTLE)
    check_schedule(found.schedule)
    assert (found.schedule.num_ranks, found.schedule.num_microbatches) == (ranks, microbatches)
    assert all(peak <= limit + 1e-6 for peak, limit in zip(found.timeline.peak_memory, limits, strict=True))
    assert found.timeline == simulate(found.schedule, costs)
    assert found.lower_bound <= found.makespan * (1 + 1e-9)


@draw_fewer(2)
@given(st.sampled_from(["1F1B", "ZBH1", "Interleaved1F1B", "ZBV", "VHalf", "VMin"]), st.data())
def test_plans_are_never_longer_than_named_schedules_in_the_same_memory(name: str, data: st.DataObject) -> None:
    known = data.draw(schedules(name, max_ranks=4, max_microbatches=8))
    costs, transport = data.draw(cost_models(known.placement)), data.draw(st.sampled_from(Transport))
    limits, size = list(simulate(known, costs).peak_memory), (known.num_ranks, known.num_microbatches)
    found = plan(*size, costs, limits, placements=[known.placement], budget=LITTLE, transport=transport)
    check_schedule(found.schedule)
    assert found.timeline.transport is transport
    assert found.makespan == simulate(found.schedule, costs, transport=transport).makespan
    # Of two ways to receive that differ by less than a thousandth the one that is usually better is taken.
    close = 1e-9 if transport is Transport.IDEAL else 1e-3
    assert found.makespan <= simulate(known, costs, transport=transport).makespan * (1 + close)
    assert found.lower_bound <= found.makespan * (1 + 1e-9)


def test_a_transport_can_ask_for_another_schedule() -> None:
    queued, shared = (plan(4, 16, (1, 1.2, 0.8), transport=each) for each in ("one queue", "shared with compute"))
    assert (queued.placement, queued.timeline.receives, shared.placement) == ("wave", "timed", "v")


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell))
        for cell in cells()
        if (cell.ranks == 4 or cell.limit == 5.5) and cell.times == (1, 1.2, 0.8) and cell.comm
    ],
)
def test_no_peer_is_better(cell: Cell) -> None:
    """On 8 ranks where the peers' V-Half is next to the bound. The whole grid is `benchmarks/planner.py`."""
    if not fastest().compiled:
        pytest.skip("too slow without numba")
    how: dict[str, Any] = {"placements": PLACEMENTS, "budget": 1e7} if cell.ranks == 4 else {"budget": 1e8}
    found = plan(cell.ranks, cell.microbatches, cell.costs, cell.limit, **how)
    check_schedule(found.schedule, memory_limit=cell.limit)
    assert found.makespan <= cell.peer + 1e-9
    assert found.lower_bound <= cell.peer


def test_the_placement_with_the_shortest_step_is_chosen() -> None:
    found = plan(4, 8, (1, 1, 1), 4, placements=["single", "v"], budget=LITTLE)
    assert (found.placement, found.makespan, found.optimal) == ("v", 25.5, True)
    assert found.bounds == {"single": 27, "v": 25.5}
    assert found.schedule.placement == Placement.v(4)
    waves = plan(4, 8, (1, 1, 1), 4, placements=PLACEMENTS, budget=5e6)
    assert (waves.placement, waves.makespan) == ("wave", 24.75)
    assert waves.schedule.placement == Placement.v(4, 4)


def test_the_period_can_be_the_objective() -> None:
    """Without a limit and synchronisation nothing has to be lost: the work is 24."""
    found = plan(4, 8, (1, 1, 1), placements=["single"], objective="period", budget=2e6)
    assert found.period == found.lower_bound == 24
    assert found.optimal
    assert found.makespan >= 27
    # With queues the longest time of a rank stands for the period.
    costs = CostModel.uniform(Placement.v(2), comm=0.1)
    queued = plan(2, 4, costs, placements=["v"], objective="period", transport="one queue", budget=LITTLE)
    assert queued.period == queued.timeline.longest_rank_span


def test_the_bound_of_the_period_knows_what_other_ranks_do_meanwhile() -> None:
    """8 ranks, 32 microbatches on a V, in 1F1B's memory; worked out by hand.

    The first F takes 3.5 to rank 7, which then waits 0.7 for its first I: 8 microbatches are not enough to bridge that.
    From there its last I takes 4.2 and a W to rank 0. In between rank 7 has to do all but the 8 W that may wait.
    """
    v = Placement.v(8)
    costs = CostModel.uniform(v, 1, 1.2, 0.8)
    bound = period_bound(v, costs, 32, microbatches_of(8, v, costs))
    assert bound == pytest.approx(3.5 + 0.7 + (96 - 8 * 0.8) + 4.2 + 0.4)


@pytest.mark.parametrize(("placement", "gap"), [("single", 0.001), ("v", 0.001), ("wave", 0.01)])
def test_plans_come_within_a_percent_of_the_best_period(placement: str, gap: float) -> None:
    pytest.importorskip("numba")
    limit = 16 if placement == "single" else 8
    found = plan(8, 32, (1, 1.2, 0.8), limit, placements=[placement], objective="period", budget=3e7)
    assert found.gap < gap
    assert found.period < found.makespan
    assert max(found.timeline.peak_memory) <= limit * (1 + 1e-9)


@draw_fewer(4)
@given(st.data())
def test_the_inner_loops_never_count_less_than_the_period(data: st.DataObject) -> None:
    """On loops and Vs they count the longest time from a rank's first op to its last."""
    placement = data.draw(placements(max_ranks=4))
    costs = data.draw(cost_models(placement))
    tested = replace(problem(placement, costs, data.draw(st.integers(1, 6))), by_period=True)
    scheduler = ListScheduler(tested, PLAIN)
    for _, order in scheduler.list_by_kind():
        length, better, _ = PLAIN.anneal(tested.job, order, 0.0, 0.2, 2_000, 1)
        timeline = simulate(tested.schedule("", better), costs)
        begin = [spans[0].start for spans in timeline.spans]
        if placement in [place(placement.num_ranks) for place in PLACEMENTS.values()]:
            assert length == pytest.approx(timeline.longest_rank_span, rel=1e-6)
            assert tested.job.origin == pytest.approx(begin, rel=1e-6)
        assert all(origin <= start * (1 + 1e-6) for origin, start in zip(tested.job.origin, begin, strict=True))
        assert tested.lower_bound <= tested.length(better) * (1 + 1e-9)
        assert tested.length(better) <= length * (1 + 1e-6)
        justified, moved = scheduler.justify(better)
        assert justified <= length * (1 + 1e-9)
        assert tested.length(moved) <= justified * (1 + 1e-6)


def test_same_seed_and_budget_same_plan() -> None:
    def schedule(seed: int) -> Schedule:
        return plan(3, 6, (1, 1.2, 0.8), 2, placements=["v"], budget=3e5, seed=seed).schedule

    assert schedule(1) == schedule(1)
    assert len({schedule(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("of_layers", [False, True])
def test_progress_goes_from_nothing_to_all_and_the_time_falls(of_layers: bool) -> None:
    calls: list[tuple[float, float]] = []
    costs = LayerCosts(tuple(Layer((f"layers.{n}",), 1, 1.2, 0.8, 1) for n in range(8))) if of_layers else (1, 1.2, 0.8)
    limit, budget = (None, 3e4) if of_layers else (2, 1e6)
    found = plan(3, 6, costs, limit, budget=budget, progress=lambda share, best: calls.append((share, best)))
    shares, best = zip(*calls, strict=True)
    assert list(shares) == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    if not of_layers:  # else each search has its own
        assert list(best) == sorted(best, reverse=True)
        assert best[-1] == pytest.approx(found.makespan, rel=ROUNDING)  # that of the inner loops


@pytest.mark.parametrize("freed_by_i", [0.0, -2.0])
def test_machine_code_gives_the_same_results(freed_by_i: float) -> None:
    pytest.importorskip("numba")
    costs = CostModel.uniform(Placement.v(4), 1, 1.2, 0.8, comm=0.05, freed_by_i=freed_by_i)
    tested = problem(Placement.v(4), costs, 8, 3.5)
    assert all(tested.merges) == (freed_by_i < 0)

    def results(engine: Engine) -> tuple[object, ...]:
        job = engine.prepare(tested.job)
        scheduler = ListScheduler(tested, engine)
        length, order = scheduler.run(PriorityParams.plain(scheduler.legs))
        annealed = engine.anneal(job, engine.integers(order), 0.0, 0.1, 100_000, 7)
        return length, order, scheduler.justify(order), annealed

    assert results(fastest()) == results(PLAIN)


def test_what_an_op_needs_while_it_runs_has_to_fit() -> None:
    """Two F of 1 fit into 4.5, and so does an F that needs 2 more; but not an I that needs 3 more behind two F."""
    costs = CostModel((1,), (1,), (1,), (1,), working={OpKind.F: 2, OpKind.I: 3, OpKind.B: 3})
    tested = Problem("tested", Placement.loop(1), costs, 3, (4.5,))
    scheduler = ListScheduler(tested, PLAIN)
    for _, order in scheduler.list_by_kind():
        for found in (order, scheduler.justify(order)[1], PLAIN.anneal(tested.job, order, 0.0, 1.0, 2_000, 1)[1]):
            (ops,) = tested.schedule("", found)
            text = " ".join(map(str, ops))
            assert "F0 0F1" not in text
            assert "F1 0F2" not in text
    # W waits behind an F, which needs 3 of 4.5, but no more than one W.
    order = tested.order(Schedule.from_csv("0F0,0I0,0F1,0W0,0I1,0W1,0F2,0I2,0W2\n"))
    assert tested.fits(tested.schedule("", order))
    moves = {tuple(PLAIN.anneal(tested.job, order, 0.0, 9.0, 200, seed)[1]) for seed in range(1, 20)}
    assert all(tested.fits(tested.schedule("", each)) for each in moves)


checkpointed = partial(typical_costs, checkpointing="full")


def test_under_full_checkpointing_a_full_backward_fits_where_i_and_w_do_not() -> None:
    """In 1F1B's memory: 17 times as much waits for W as F keeps. Without a limit no plan has a full backward."""
    limit = memory_of_1f1b(checkpointed, 4, 8)
    found, free = (plan(4, 8, checkpointed, *each, placements=["v"], budget=LITTLE) for each in ((limit,), ()))
    check_schedule(found.schedule, limit, checkpointed(found.schedule.placement))
    assert found.makespan < simulate(generate("1F1B", 4, 8), checkpointed(Placement.loop(4))).makespan
    assert max(simulate(in_two(found.schedule), checkpointed(found.schedule.placement)).peak_memory) > limit
    assert OpKind.B not in kinds_of(free.schedule)
    assert free.makespan < simulate(generate("ZBV", 4, 8), checkpointed(Placement.v(4))).makespan


def kinds_of(schedule: Schedule) -> set[OpKind]:
    return {op.kind for ops in schedule for op in ops}


@pytest.mark.parametrize("limit", [1.0, 1.15])
def test_b_in_some_places_makes_steps_shorter(limit: float) -> None:
    """Selective checkpointing: some W wait, and others run with their I for more F in the same memory."""

    def dear(placement: Placement) -> CostModel:
        return replace(costs(placement), working={**costs(placement).working, OpKind.B: 99.0})

    costs = partial(typical_costs, checkpointing="selective")
    most = limit * memory_of_1f1b(costs, 4, 8)
    found, apart = (plan(4, 8, each, most, placements=["v"], budget=1e6) for each in (costs, dear))
    check_schedule(found.schedule, most, costs(found.schedule.placement))
    assert kinds_of(found.schedule) == {OpKind.F, OpKind.I, OpKind.W, OpKind.B}
    assert OpKind.B not in kinds_of(apart.schedule)
    assert found.makespan < apart.makespan


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("name", ["ZB", "ZBLoop"])
def test_plans_are_no_longer_than_zb_in_its_memory(name: str, checkpointing: str) -> None:
    costs = partial(typical_costs, checkpointing=checkpointing)
    placement = resolve(name).place(4)
    known = simulate(generate(name, 4, 8, costs=costs(placement)), costs(placement))
    found = plan(4, 8, costs, list(known.peak_memory), placements=[placement], budget=2e6)
    check_schedule(found.schedule, list(known.peak_memory), costs(placement))
    assert found.makespan <= known.makespan * (1 + 1e-9)


def test_what_fits_is_asked_of_the_ops_that_run() -> None:
    """A B that needs more than I and W runs as these."""
    for limit, fits in ((2, True), (1.5, False)):
        costs = CostModel((1,), (1,), (1,), (1,), working={OpKind.B: 9})
        tested = Problem("tested", Placement.loop(1), costs, 2, (limit,))
        assert tested.fits(Schedule.from_csv("0F0,0F1,0B0,0B1")) == fits


@pytest.mark.parametrize("name", ["VHalf", "1F1B"])
def test_annealing_makes_and_parts_full_backwards(name: str) -> None:
    """In the memory of a schedule without B that gains room by some, and in that of one that needs them not all."""
    known = generate(name, 4, 8)
    costs = CostModel.uniform(known.placement, 1, 2, 1, freed_by_i=-0.5)
    tested = Problem("tested", known.placement, costs, 8, simulate(known, costs).peak_memory)
    order = tested.order(known)
    assert tested.schedule(known.name, order) == known
    length, better, _ = PLAIN.anneal(tested.job, order, 0.0, 0.2, 20_000, 1)
    schedule = assert_sound(tested, better, length)
    assert length < tested.length(order)
    assert kinds_of(schedule) == {OpKind.F, OpKind.I, OpKind.W, OpKind.B}


def test_justifying_fills_gaps_from_both_ends() -> None:
    """Put as late as it can be, the W on rank 1 comes after the F and the I that others wait for, and stays there."""
    tested = problem(Placement.loop(2), microbatches=2, limit=2)
    scheduler = ListScheduler(tested, PLAIN)
    order = tested.order(Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"))
    length, justified = scheduler.justify(order)
    assert tested.length(order) == 8
    assert length == tested.lower_bound == 7
    assert " ".join(map(str, tested.schedule("", justified).ops[1])) == "1F0 1I0 1F1 1I1 1W0 1W1"


@given(schedules(max_ranks=5, max_microbatches=8) | runnable_schedules(), st.booleans())
def test_orders_and_schedules_are_the_same_thing(schedule: Schedule, merges: bool) -> None:
    costs = CostModel.uniform(schedule.placement, freed_by_i=-1.0 if merges else 0.0)
    tested = Problem("tested", schedule.placement, costs, schedule.num_microbatches, (1.9,) * schedule.num_ranks)
    back = tested.schedule(schedule.name, tested.order(schedule))
    check_schedule(back)
    assert all(tested.merges) == merges
    assert back == (schedule if merges else in_two(schedule))


@given(runnable_schedules() | schedules(max_ranks=5, max_microbatches=8), st.sampled_from(Transport), st.data())
def test_the_inner_loops_have_the_times_of_the_graph(
    schedule: Schedule, transport: Transport, data: st.DataObject
) -> None:
    costs = data.draw(cost_models(schedule.placement))
    limits = (data.draw(st.sampled_from([0.0, 1e9])),) * schedule.num_ranks
    tested = Problem("tested", schedule.placement, costs, schedule.num_microbatches, limits)
    order = tested.order(schedule)
    own = tested.schedule("", order)
    ends, unused, last = [0.0] * len(order), [0.0] * len(order), len(order) - 1
    replay(tested.job, link(tested.job, order), ends, unused, unused, 0, last, last, NEVER)
    found = {op: ends[n % len(order)] for n in order for op in chain.from_iterable(tested.schedule("", [n]))}
    for rank, spans in enumerate(simulate(own, costs).spans):
        assert [span.end for span in spans] == [found[op] for op in own.ops[rank]]
    for spans in simulate(own, costs, transport=transport).spans:
        assert all(span.end >= found[span.op] for span in spans)


def in_two(schedule: Schedule) -> Schedule:
    kinds = {OpKind.B: (OpKind.I, OpKind.W)}
    rows = [[op._replace(kind=kind) for op in ops for kind in kinds.get(op.kind, (op.kind,))] for ops in schedule]
    return replace(schedule, ops=tuple(map(tuple, rows)))


def test_what_a_job_costs_has_the_defaults_of_a_plan() -> None:
    placement = Placement.v(2)
    costs = CostModel((1,) * 4, (1,) * 4, (1,) * 4, (2e9,) * 4)
    job = JobCosts(costs, placement, (6e9, 8e9), "one queue")
    found = plan(2, 6, job, budget=LITTLE)
    assert (found.schedule.placement, found.limits) == (placement, (6e9, 8e9))
    assert found.timeline.transport is Transport.ONE_QUEUE
    assert found == plan(2, 6, costs, [6e9, 8e9], placements=placement, transport="one queue", budget=LITTLE)
    other = plan(2, 6, job, 5e9, placements="loop", transport="ideal", budget=LITTLE)
    assert (other.placement, other.limits, other.timeline.transport) == ("loop", (5e9, 5e9), Transport.IDEAL)
    with pytest.raises(ValueError, match="is for 2 ranks, got 3: use 2, or omit the placement from the costs"):
        plan(3, 6, job)


def test_a_limit_above_all_microbatches_is_none() -> None:
    for limit in (None, float("inf"), 1e9):
        assert plan(2, 3, (1, 1, 1), limit, placements=["single"], budget=LITTLE).makespan == 10
        request = Request(2, 3, {"single": Placement.loop(2)}, limit and (limit, limit))
        made = make_problem(request, "single", Placement.loop(2), CostModel.uniform(Placement.loop(2)))
        assert max(made.limits) <= 1e9


@pytest.mark.parametrize("table", ["1F0,1I0,1W0", "0F0,0I0,0W0,0W0", "0I0,0F0,0W0"])
def test_a_schedule_that_cannot_run_has_no_order(table: str) -> None:
    rows = tuple(tuple(map(Op.parse, row.split(","))) for row in (table, "1F0,1I0,1W0"))
    with pytest.raises(ValueError, match="schedule x cannot run"):
        problem(Placement.loop(2), microbatches=1).order(Schedule("x", Placement.loop(2), 1, rows))


def order_of(schedule: Schedule) -> list[list[tuple[int, str, int]]]:
    """Of each rank's F, and of its I and B, which count as the same."""
    return [[(op.stage, op.kind.replace("B", "I"), op.microbatch) for op in ops if op.kind != "W"] for ops in schedule]


def peaks(schedule: Schedule, costs: CostModel) -> tuple[float, ...]:
    return simulate(schedule, costs).peak_memory


def keeps_to(limits: Sequence[float], schedule: Schedule, costs: CostModel) -> bool:
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks(schedule, costs), limits, strict=True))


@given(schedules(max_ranks=5, max_microbatches=10), st.data())
def test_leanest_takes_least(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(cost_models(schedule.placement))
    lean = make_leanest(schedule, costs)
    check_schedule(lean)
    assert order_of(lean) == order_of(schedule)
    limits = peaks(lean, costs)
    for other in (schedule, fit_within(schedule, costs, limits=[1e9] * schedule.num_ranks)):
        assert all(least <= peak * (1 + 1e-9) for least, peak in zip(limits, peaks(other, costs), strict=True))


@given(schedules(max_ranks=5, max_microbatches=10), st.floats(1, 3), st.data())
def test_within_keeps_to_limits_and_order(schedule: Schedule, more: float, data: st.DataObject) -> None:
    """It leaves alone what fits."""
    costs = data.draw(cost_models(schedule.placement))
    limits = [more * peak for peak in peaks(make_leanest(schedule, costs), costs)]
    fitted = fit_within(schedule, costs, limits)
    check_schedule(fitted)
    assert order_of(fitted) == order_of(schedule)
    assert keeps_to(limits, fitted, costs)
    if not any(op.kind == OpKind.B for ops in schedule for op in ops):
        assert fit_within(schedule, costs, [peak + 10 for peak in peaks(schedule, costs)]) == schedule


def test_w_waits_as_long_as_there_is_room() -> None:
    """It runs sooner only where the next op would not fit, and then I and W are one op only where I does not fit."""
    some = Schedule.from_csv("0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2")
    costs = CostModel((1,), (1,), (1,), activations=(1,), freed_by_i=-1)
    assert " ".join(map(str, fit_within(some, costs, [5]).ops[0])) == "0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2"
    hungry = CostModel((1,), (1,), (1,), activations=(1,), freed_by_i=0.5, working={OpKind.B: 9})
    assert " ".join(map(str, fit_within(some, hungry, [3]).ops[0])) == "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"
    assert " ".join(map(str, make_leanest(some, hungry).ops[0])) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    # Where both ways take the same, the stage before need not wait for W.
    assert make_leanest(some, CostModel.uniform(some.placement)) == make_leanest(some, hungry)


@given(schedules(max_ranks=4, max_microbatches=8), st.floats(1, 4), st.data())
def test_the_quick_search_fits_any_placement_costs_and_limit(form: Schedule, more: float, data: st.DataObject) -> None:
    """With room for one microbatch at its leanest it comes to an end: no rank fills up with what cannot go on."""
    costs = data.draw(cost_models(form.placement))
    limits = [more * room for room in least_room(form.placement, costs)]
    schedule = find_best("found", [form], costs, limits, Transport.IDEAL)
    check_schedule(schedule)
    assert schedule.placement == form.placement
    assert keeps_to(limits, schedule, costs)
