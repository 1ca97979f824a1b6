"""Tools for tests of your own schedules: hypothesis strategies, and a check that lists all faults.

    from hypothesis import given, strategies as st
    from zbpipe.simulator.simulation import simulate
    from zbpipe.testing import check_schedule, cost_models, schedules

    @given(ranks=st.integers(1, 8), microbatches=st.integers(1, 32))
    def test_my_schedule_holds_its_promise(ranks, microbatches):
        check_schedule(my_schedule(ranks, microbatches), memory_limit=ranks)

    @given(st.data())
    def test_my_search_beats_1f1b_whatever_the_costs(data):
        known = data.draw(schedules("1F1B", max_ranks=8))
        costs = data.draw(cost_models(known.placement))
        found = my_search(known.num_ranks, known.num_microbatches, costs)
        assert simulate(found, costs).makespan <= simulate(known, costs).makespan

Everything shrinks towards one rank, one microbatch, a plain schedule and times of 1/8 second. All numbers are short
binary fractions, so that sums are exact and tests can compare times with `==`. Only this module needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from zbpipe.costs.job import MemoryLimitLike
from zbpipe.costs.model import CostModel, Link
from zbpipe.schedule import registry
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule, inputs
from zbpipe.simulator.validation import validate

try:
    from hypothesis import strategies as st
except ImportError:
    raise ImportError("zbpipe.testing needs hypothesis, which is not installed: pip install hypothesis") from None

_MOST_STAGES_PER_RANK = 4


def check_schedule(
    schedule: Schedule, memory_limit: MemoryLimitLike | None = None, costs: CostModel | None = None
) -> None:
    """Assert that `schedule` can run, and that it fits the memory limit.

        check_schedule(my_schedule(ranks=4, microbatches=8), memory_limit=4)

    The arguments are those of `zbpipe.validate`. The AssertionError has all findings, one per line.
    """
    findings = [str(finding) for finding in validate(schedule, memory_limit, costs)]
    if findings:
        # Raised by hand, because `python -O` omits `assert`.
        raise AssertionError("\n  ".join([f"schedule {schedule.name}, {len(findings)} finding(s):", *findings]))


@st.composite
def placements(
    draw: st.DrawFn, *, ranks: int | None = None, stages_per_rank: int | None = None, max_ranks: int = 8
) -> Placement:
    """Placements: loops, Vs, and stages in any order, on some ranks more than on others.

        @given(placements(ranks=4))
        def test_every_stage_has_a_rank(placement): ...

    By default there are 1 to `max_ranks` ranks with 1 to 4 stages, different between ranks.
    """
    num_ranks = draw(st.integers(1, max_ranks)) if ranks is None else ranks
    stages = draw(st.integers(1, _MOST_STAGES_PER_RANK)) if stages_per_rank is None else stages_per_rank
    shape = draw(st.sampled_from(["loop", "v", "any"]))
    if shape == "loop":
        return Placement.loop(num_ranks, stages)
    if shape == "v":
        return Placement.v(num_ranks, stages)
    rank_of = [*range(num_ranks)] * stages
    if stages_per_rank is None:
        rank_of += draw(st.lists(st.integers(0, num_ranks - 1), max_size=num_ranks))
    return Placement(tuple(draw(st.permutations(rank_of))))


@st.composite
def schedules(
    draw: st.DrawFn,
    name: str | None = None,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    max_ranks: int = 16,
    max_microbatches: int = 64,
) -> Schedule:
    """Registered schedules, also yours, of all sizes.

        @given(schedules("MySchedule", max_ranks=8))
        def test_my_schedule_is_valid(schedule):
            check_schedule(schedule, memory_limit=schedule.num_ranks)

    Args:
        name: name of the schedule. Default: any registered one.
        ranks: default: 1 to `max_ranks`.
        microbatches: default: 1 to `max_microbatches`.
        stages_per_rank: stages on every rank. Default: 1 to 4 if the schedule leaves the choice. Without `name`, only
            schedules that run with this number are drawn.

    ValueError for an unknown name, and for numbers that the schedule does not support.
    """
    algorithm = draw(st.sampled_from(_candidates(stages_per_rank))) if name is None else registry.resolve(name)
    num_ranks = draw(st.integers(1, max_ranks)) if ranks is None else ranks
    num_microbatches = draw(st.integers(1, max_microbatches)) if microbatches is None else microbatches
    if stages_per_rank is None and algorithm.any_stages_per_rank:
        stages_per_rank = draw(st.integers(1, _MOST_STAGES_PER_RANK))
    return _generate(algorithm, num_ranks, num_microbatches, stages_per_rank)


@lru_cache(maxsize=4096)
def _generate(algorithm: registry.Algorithm, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    """Cached, because hypothesis asks for small schedules repeatedly, and some take a search."""
    return algorithm.make(ranks, microbatches, stages_per_rank=stages_per_rank)


def _candidates(stages_per_rank: int | None) -> list[registry.Algorithm]:
    """Schedules that run with this number of stages per rank, plain ones first, because hypothesis shrinks to these."""
    known = registry.schedules().values()
    fitting = [x for x in known if stages_per_rank in (None, x.stages_per_rank) or x.any_stages_per_rank]
    if not fitting:
        raise ValueError(f"no registered schedule runs {stages_per_rank} stages per rank")
    return sorted(fitting, key=lambda each: (each.stages_per_rank, each.placement, each.name.lower()))


@st.composite
def runnable_schedules(draw: st.DrawFn, placement: Placement | None = None, *, max_microbatches: int = 6) -> Schedule:
    """Valid schedules in any runnable order, with full and with split backwards. Most of them are slow.

        @given(runnable_schedules())
        def test_my_tool_copes_with_whatever_can_run(schedule): ...

    The placement defaults to any of up to 4 ranks.
    """
    if placement is None:
        placement = draw(placements(max_ranks=4))
    num_microbatches = draw(st.integers(1, max_microbatches))
    ops: list[Op] = []
    for stage in range(placement.num_stages):
        for microbatch in range(num_microbatches):
            backward = (OpKind.I, OpKind.W) if draw(st.booleans()) else (OpKind.B,)
            ops += [Op(stage, kind, microbatch) for kind in (OpKind.F, *backward)]
    rows: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    for op in _any_order(draw, ops, placement.num_stages):
        rows[placement.rank_of[op.stage]].append(op)
    return Schedule("any order", placement, num_microbatches, tuple(map(tuple, rows)))


def _any_order(draw: st.DrawFn, ops: list[Op], num_stages: int) -> Iterator[Op]:
    """An order of all ops, each after its dependencies. Lists that agree with one order cannot deadlock."""
    unmet = {op: len(inputs(op, num_stages)) for op in ops}
    users: dict[Op, list[Op]] = {op: [] for op in ops}
    for op in ops:
        for choice in chain.from_iterable(inputs(op, num_stages)):
            if choice in users:
                users[choice].append(op)
    ready = [op for op in ops if not unmet[op]]
    while ready:
        op = ready.pop(draw(st.integers(0, len(ready) - 1)))
        yield op
        for user in users[op]:
            unmet[user] -= 1
            if not unmet[user]:
                ready.append(user)


_times = st.integers(1, 32).map(lambda eighths: eighths / 8)
_times_or_none = st.integers(1, 33).map(lambda eighths: eighths % 33 / 8)  # zero is no simpler than 1/8
_working_kinds = st.sampled_from([OpKind.F, OpKind.I, OpKind.W, OpKind.B])
_links = st.builds(Link, latency=st.integers(0, 16).map(lambda eighths: eighths / 8), bandwidth=st.sampled_from([8, 1]))


@st.composite
def cost_models(draw: st.DrawFn, placement: Placement) -> CostModel:
    """Costs for the stages of `placement`, different for each stage and for some links between ranks.

        @given(st.data())
        def test_my_schedule_under_any_costs(data):
            schedule = data.draw(schedules("MySchedule"))
            timeline = simulate(schedule, data.draw(cost_models(schedule.placement)))
            assert timeline.makespan >= timeline.lower_bound

    Forwards take 1/8 to 4 seconds. I and W may take no time. I may free all activations, or leave up to twice their
    bytes. Some kinds of ops need working memory.
    """

    def by_stage(numbers: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(numbers) for _ in placement.rank_of)

    shares = st.sampled_from([0.0, 0.5, 0.25, 1.0, -0.5, -1.0])
    f, i, w = by_stage(_times), by_stage(_times_or_none), by_stage(_times_or_none)
    return CostModel(
        f,
        i,
        w,
        activations=by_stage(_times),
        freed_by_i=draw(shares | st.tuples(*(shares for _ in placement.rank_of))),
        link=draw(_links),
        links=draw(st.dictionaries(st.sampled_from(placement.hops), _links, max_size=4)) if placement.hops else {},
        message_bytes=draw(st.integers(0, 16)),
        working=draw(st.dictionaries(_working_kinds, _times | st.tuples(*(_times_or_none for _ in f)))),
        overhead=draw(st.sampled_from([0.0, 0.125])),
    )
