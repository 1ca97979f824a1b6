"""The simulator against a second, slow and plain one, and against what must hold for any schedule and any costs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from broken import Broken, broken_schedules
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st

from zbpipe import Op, OpKind, Placement, Schedule, generate, plan
from zbpipe.costs.job import least_room
from zbpipe.costs.model import CostModel
from zbpipe.simulator.lower_bound import lower_bound
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.time_graph import TimeGraph, durations, longest_path
from zbpipe.simulator.timeline import Idle, Span, Timeline
from zbpipe.testing import cost_models, runnable_schedules, schedules

pytestmark = pytest.mark.usefixtures("short_search")


class Run(NamedTuple):
    """A schedule, and costs for its stages in short binary fractions, so that all times are exact."""

    schedule: Schedule
    costs: CostModel

    def simulate(self) -> Timeline:
        return simulate(self.schedule, self.costs)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    schedule = draw(schedules(max_ranks=6, max_microbatches=10) | runnable_schedules())
    return Run(schedule, draw(cost_models(schedule.placement)))


Event = tuple[int, Op]


def plain_starts(run: Run, num_steps: int, synchronous: bool) -> dict[Event, float]:
    """When everything starts, by the definition: starts are pushed until none is before what it waits for."""
    lists = [[(step, op) for step in range(num_steps) for op in ops] for ops in run.schedule.ops]
    events = {event: rank for rank, row in enumerate(lists) for event in row}
    waits = {event: plain_inputs(event, events, run) for event in events}
    for row in lists:
        for earlier, event in pairwise(row):
            waits[event][earlier] = 0.0
    if synchronous:
        for (step, _), inputs in waits.items():
            inputs.update({(before, op): 0.0 for before, op in events if before == step - 1})
    start = dict.fromkeys(events, 0.0)
    moved = True
    while moved:
        moved = False
        for event, inputs in waits.items():
            ready = max(
                (start[other] + seconds_of(run.costs, other) + delay for other, delay in inputs.items()), default=0.0
            )
            if ready > start[event]:
                start[event], moved = ready, True
    return start


def plain_inputs(event: Event, events: dict[Event, int], run: Run) -> dict[Event, float]:
    step, (stage, kind, microbatch) = event
    wanted = {
        OpKind.F: [(stage - 1, "F")],
        OpKind.W: [(stage, "I")],
        OpKind.I: [(stage, "F"), (stage + 1, "I"), (stage + 1, "B")],
        OpKind.B: [(stage, "F"), (stage + 1, "I"), (stage + 1, "B")],
    }[kind]
    inputs = [(step, Op(other, OpKind(letter), microbatch)) for other, letter in wanted]
    return {other: sending(run.costs, events[other], events[event], microbatch) for other in inputs if other in events}


def sending(costs: CostModel, one: int, other: int, microbatch: int) -> float:
    link = costs.links.get((one, other), costs.link)
    tokens, _ = ratios(costs, microbatch)
    return 0.0 if one == other else link.latency + tokens * costs.message_bytes / link.bandwidth


def ratios(costs: CostModel, microbatch: int) -> tuple[float, float]:
    """Of a microbatch's tokens, and of their squares in each sample, to those that the costs are of."""
    if not costs.sizes:
        return 1.0, 1.0
    own = costs.of_size or np.mean(costs.sizes, axis=0)
    tokens, squares = costs.sizes[microbatch]
    return tokens / own[0], squares / own[1]


def seconds_of(costs: CostModel, event: Event) -> float:
    stage, kind, microbatch = event[1]
    (tokens, squares), share = ratios(costs, microbatch), costs.by_stage(costs.attention)[stage]
    f, i = (each[stage] * ((1 - share) * tokens + share * squares) for each in (costs.f, costs.i))
    w = costs.w[stage] * tokens
    return {"F": f, "I": i, "W": w, "B": i + w}[kind] + costs.overhead


def starts(timeline: Timeline) -> dict[Event, float]:
    return {(0, span.op): span.start for spans in timeline.spans for span in spans}


def steps_in_a_row(schedule: Schedule, costs: CostModel, ahead: Sequence[int], number: int) -> list[dict[Op, Span]]:
    """The ops of each step, where ranks may start so many of them before all ranks are done with the one before."""
    graph, found = TimeGraph(schedule, ahead=ahead, has_fsdp=costs.has_fsdp), []
    seconds = durations(graph, costs)
    for _ in range(number):
        begun, ends = longest_path(graph, seconds)
        for begin, lasts in graph.begins.items():
            seconds[begin] = max(ends[each] for each in lasts)
        ops = chain.from_iterable(schedule)
        found.append({op: Span(op, *times) for op, *times in zip(ops, begun, ends, strict=False)})
    return found


@given(runs())
def test_a_plain_simulator_gets_the_same_times(run: Run) -> None:
    timeline = run.simulate()
    assert starts(timeline) == plain_starts(run, 1, True)
    assert all(
        span.end == span.start + seconds_of(run.costs, (0, span.op)) for spans in timeline.spans for span in spans
    )


@draw_fewer(2)
@given(st.data(), st.integers(1, 3), st.booleans())
def test_a_plain_simulator_gets_the_same_times_over_steps(
    data: st.DataObject, num_steps: int, synchronous: bool
) -> None:
    schedule = data.draw(schedules(max_ranks=3, max_microbatches=4) | runnable_schedules(max_microbatches=2))
    run = Run(schedule, data.draw(cost_models(schedule.placement)))
    steps = steps_in_a_row(*run, [0 if synchronous else len(row) for row in schedule], num_steps)
    found = {(n, op): span.start for n, step in enumerate(steps) for op, span in step.items()}
    assert found == plain_starts(run, num_steps, synchronous)
    timeline = run.simulate()
    for ops, spans in zip(schedule, timeline.spans, strict=True):
        assert tuple(span.op for span in spans) == ops
        assert all(one.end <= other.start for one, other in pairwise(spans))
    assert timeline.longest_rank_span <= timeline.makespan == max(spans[-1].end for spans in timeline.spans)


@given(runs())
def test_time_is_either_busy_or_idle_and_nothing_beats_the_lower_bound(run: Run) -> None:
    timeline = run.simulate()
    for busy, idle in zip(timeline.busy, timeline.idle, strict=True):
        assert busy + sum(idle) == timeline.makespan
        assert min(idle) >= 0
    work = run.schedule.num_microbatches * sum(map(sum, (run.costs.f, run.costs.i, run.costs.w)))
    assert sum(timeline.busy) == work + run.costs.overhead * sum(map(len, run.schedule))
    bound = lower_bound(run.schedule.placement, run.costs, run.schedule.num_microbatches)
    assert max(*timeline.busy, bound) <= timeline.lower_bound <= timeline.makespan
    assert 0 <= timeline.bubble < 1


@given(schedules(ranks=1, stages_per_rank=3, max_microbatches=2), st.data())
def test_on_one_rank_the_lower_bound_is_its_work(schedule: Schedule, data: st.DataObject) -> None:
    timeline = Run(schedule, data.draw(cost_models(schedule.placement))).simulate()
    split = timeline.costs.overhead * sum(op.kind is OpKind.W for op in schedule.ops[0])  # a B would save it
    assert lower_bound(schedule.placement, timeline.costs, schedule.num_microbatches) == timeline.makespan - split
    assert timeline.bubble == 0


@given(runs(), st.data())
def test_the_critical_path_has_no_gap_and_what_is_on_it_counts(run: Run, data: st.DataObject) -> None:
    timeline = run.simulate()
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    rank_of = run.schedule.placement.rank_of
    for one, other in pairwise(path):
        assert other.start == one.end + run.costs.transfer(rank_of[one.op.stage], rank_of[other.op.stage])
    assert all(span in timeline.spans[rank_of[span.op.stage]] for span in path)
    stage, kind, _ = data.draw(st.sampled_from(path)).op
    name = "i" if kind is OpKind.B else kind.value.lower()
    slower: dict[str, Any] = {name: tuple(time + (s == stage) for s, time in enumerate(getattr(run.costs, name)))}
    assert Run(run.schedule, replace(run.costs, **slower)).simulate().makespan >= timeline.makespan + 1


@given(runs())
def test_memory_is_taken_and_given_back(run: Run) -> None:
    timeline = run.simulate()
    for rank, spans in enumerate(timeline.spans):
        times, held = zip(*timeline.memory(rank), strict=True)
        assert (times[0], held[0], held[-1]) == (0, 0, 0)
        assert list(times) == sorted(times)
        assert min(held) == 0
        assert (
            max(held)
            == timeline.peak_memory[rank]
            == max(plain_memory(run, spans[n].op, n, rank) for n in range(len(spans)))
        )


HUNGRY: dict[str, Any] = {"freed_by_i": -0.5, "working": {OpKind.F: 0.5, OpKind.I: (4.0,), OpKind.B: 2}}


def plain_memory(run: Run, op: Op, position: int, rank: int) -> float:
    """What a rank holds while it runs the op at that position, from what it has run before."""
    ops = run.schedule.ops[rank]
    before = {*ops[:position]}
    live = [each for each in {*before, op} if each.kind is OpKind.F]
    whole = sum(run.costs.activations[stage] for stage, _, m in live if Op(stage, OpKind.I, m) not in before)
    halves = sum(
        run.costs.of(stage, OpKind.W).frees
        for stage, _, m in live
        if Op(stage, OpKind.I, m) in before and Op(stage, OpKind.W, m) not in before
    )
    if op.kind is OpKind.I:  # it holds the more of what it finds and what it leaves
        halves += max(run.costs.of(op.stage, OpKind.W).frees - run.costs.activations[op.stage], 0)
    freed = sum(run.costs.activations[stage] for stage, _, m in live if Op(stage, OpKind.B, m) in before)
    working = run.costs.working.get(op.kind, 0.0)
    return whole + halves - freed + (working[op.stage] if isinstance(working, tuple) else working)


def test_two_ranks_by_hand() -> None:
    """1F1B, F 1 s, I 2 s, W 1 s, half a second from rank to rank."""
    schedule = generate("1F1B", 2, 2)
    timeline = simulate(schedule, CostModel.uniform(schedule.placement, 1, 2, 1, comm=0.5, freed_by_i=0.25))
    assert [[(str(span.op), span.start, span.end) for span in spans] for spans in timeline.spans] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 6, 9), ("0B1", 10, 13)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 5.5), ("1F1", 5.5, 6.5), ("1B1", 6.5, 9.5)],
    ]
    assert timeline.makespan == 13
    assert timeline.busy == (8, 8)
    assert timeline.bubble == 1 - 16 / 26
    assert timeline.idle == (Idle(4, 0, 1), Idle(1.5, 0, 3.5))
    one_by_one = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1")
    assert simulate(one_by_one, timeline.costs).idle == (Idle(5, 0, 5), Idle(1.5, 5, 3.5))
    assert timeline.longest_rank_span == 13
    assert timeline.memory(0) == [(0, 0), (0, 1), (1, 2), (9, 1), (13, 0)]
    assert timeline.peak_activations == (2, 1)
    assert [str(span.op) for span in timeline.critical_path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert timeline.lower_bound == 1 + 0.5 + 1 + 3 + 0.5 + 3 + 2


@pytest.mark.parametrize(
    ("table", "costs", "memory"),
    [
        # I frees its share.
        ("0F0,0I0,0F1,0I1,0W0,0W1", {"freed_by_i": 0.25}, "0:0 0:1 2:0.75 2:1.75 4:1.5 5:0.75 6:0"),
        # More may wait for W than F has left: I takes what it adds when it starts, and W frees all.
        ("0F0,0F1,0I0,0I1,0W0,0W1", {"freed_by_i": -0.5}, "0:0 0:1 1:2 2:2.5 3:3 5:1.5 6:0"),
        # Another share on each stage.
        ("0F0,1F0,1I0,1W0,0B0", {"freed_by_i": (-1.0, 0.5)}, "0:0 0:0.5 0.5:1 1.5:0.75 2:0.5 3:0"),
        # Ops hold more while they run: I needs 4 on top of what waits after it, B 2 and what it frees.
        ("0F0,0I0,0W0", HUNGRY, "0:0 0:1.5 1:1 1:5.5 2:1.5 3:0"),
        ("0F0,0B0", HUNGRY, "0:0 0:1.5 1:1 1:3 3:0"),
    ],
)
def test_memory_by_hand(table: str, costs: dict[str, Any], memory: str) -> None:
    schedule = Schedule.from_csv(table)
    found = simulate(schedule, CostModel.uniform(schedule.placement, **costs)).memory(0)
    assert " ".join(f"{time:g}:{held:g}" for time, held in found) == memory


def test_the_least_room_is_what_one_microbatch_takes_alone() -> None:
    placement = Placement.v(2)
    costs = CostModel(*((1.0,) * 4,) * 3, activations=(4, 1, 1, 2), freed_by_i=(-1.0, -0.5, 0.5, -2.0))
    assert least_room(placement, costs) == (6, 2)  # a full backward on all stages but the third
    assert least_room(placement, replace(costs, working={OpKind.B: 7})) == (10, 2)
    assert least_room(Placement.loop(1), CostModel.uniform(Placement.loop(1), **HUNGRY)) == (3,)


def test_activations_are_counted_without_working_memory() -> None:
    costs = CostModel((1,), (1,), (1,), (2,), working={OpKind.F: 1, OpKind.B: 6})
    timeline = simulate(Schedule.from_csv("0F0,0F1,0I0,0W0,0B1\n"), costs)
    assert (timeline.peak_memory, timeline.peak_activations) == ((8,), (2,))


def test_a_schedule_without_microbatches_takes_no_time() -> None:
    timeline = simulate(Schedule("nothing", Placement.loop(2), 0, ((), ())), CostModel.uniform(Placement.loop(2)))
    assert (timeline.makespan, timeline.bubble, timeline.busy) == (0, 0, (0, 0))


@given(broken_schedules(["deadlock", "order"]))
def test_what_cannot_run_is_refused(broken: Broken) -> None:
    costs = CostModel.uniform(broken.schedule.placement)
    with pytest.raises(ValueError, match=rf"cannot run, \d finding\(s\):\n  {broken.rule}"):
        simulate(broken.schedule, costs)


def test_a_plan_has_no_w_of_its_own_where_each_op_has_an_overhead() -> None:
    found = plan(1, 4, CostModel.uniform(Placement.loop(1), overhead=0.5), placements="single", budget=1e4)
    assert {op.kind for op in found.schedule.ops[0]} == {OpKind.F, OpKind.B}
    assert found.optimal
