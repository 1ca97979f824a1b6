"""What feeds an op: one rule, those who repeat it, and the ranks that wait for what it says."""

from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from zbpipe import CostModel, Op, OpKind, Placement, Schedule, simulate
from zbpipe.planner.problem import Problem
from zbpipe.schedule.graph import CycleError, Graph
from zbpipe.schedule.ir import inputs
from zbpipe.simulator import lower_bound as bound
from zbpipe.testing import cost_models, placements, runnable_schedules


def users(op: Op, num_stages: int) -> list[Op]:
    """The ops of its microbatch that depend on it."""
    others = [Op(stage, kind, op.microbatch) for stage in range(num_stages) for kind in OpKind]
    return [other for other in others if op in chain.from_iterable(inputs(other, num_stages))]


def test_the_rule_in_words() -> None:
    def said(text: str) -> str:
        return " and ".join(" or ".join(map(str, group)) for group in inputs(Op.parse(text), num_stages=3))

    assert said("0F1") == ""
    assert said("2F1") == "1F1"
    assert said("1I1") == said("1B1") == "1F1 and 2I1 or 2B1"
    assert said("2I1") == said("2B1") == "2F1"
    assert said("1W1") == "1I1"


@given(placements(max_ranks=4))
def test_the_planner_repeats_the_rule(placement: Placement) -> None:
    """In flat numbers, with I and W only; that an I comes after its own F follows from the other stages."""
    num_stages, kinds = placement.num_stages, (OpKind.F, OpKind.I, OpKind.W)
    job = Problem("", placement, CostModel.uniform(placement), 1, (9.0,) * placement.num_ranks).job
    assert len(job.nodes) == 3 * num_stages
    for number, node in enumerate(job.nodes):
        stage, kind = divmod(number, 3)
        op = Op(stage, kinds[kind], 0)
        groups = inputs(op, num_stages)
        feeder = groups[-1][0] if groups else None
        assert node.feeder == (-1 if feeder is None else 3 * feeder.stage + kinds.index(feeder.kind))
        other = [user for user in users(op, num_stages) if user.kind in kinds and user.kind is not OpKind.W]
        takers = [user for user in other if inputs(user, num_stages)[-1][0] == op]
        assert [node.fed] == ([3 * each.stage + kinds.index(each.kind) for each in takers] or [-1])


@given(st.data())
def test_the_bound_repeats_the_rule(data: st.DataObject) -> None:
    """One microbatch alone, with its W last, is as fast as the simulator lets it be."""
    placement = data.draw(placements(max_ranks=4))
    costs = data.draw(cost_models(placement))
    rows: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    for kind in (OpKind.F, OpKind.I, OpKind.W):
        stages = range(placement.num_stages)
        for stage in stages if kind is OpKind.F else reversed(stages):
            rows[placement.rank_of[stage]].append(Op(stage, kind, 0))
    timeline = simulate(Schedule("alone", placement, 1, tuple(map(tuple, rows))), costs)
    path = bound._alone(placement, bound._as_possible(placement, costs, None))
    for span in chain.from_iterable(timeline.spans):
        if span.op.kind is OpKind.F:
            assert (span.start, span.end) == (path.forward_start[span.op.stage], path.forward_end[span.op.stage])
        if span.op.kind is OpKind.I:
            assert (span.start, span.end) == (path.input_start[span.op.stage], path.input_end[span.op.stage])


@given(runnable_schedules())
def test_each_op_and_message_comes_after_what_it_waits_for(schedule: Schedule) -> None:
    graph, num_stages = schedule.graph, schedule.placement.num_stages
    assert sorted(graph.order) == list(range(len(graph.nodes)))
    place = {graph.nodes[node]: n for n, node in enumerate(graph.order)}
    for row in schedule:
        assert [place[op] for op in row] == sorted(place[op] for op in row)
        for op in row:
            for group in inputs(op, num_stages):
                assert min(place[each] for each in group if each in place) < place[op]


@given(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=8, max_size=8))
def test_a_graph_has_an_order_or_a_cycle(before: list[list[int]]) -> None:
    graph = Graph(list(range(8)), before)
    try:
        order = graph.order
    except CycleError as error:
        for one, other in pairwise([*error.cycle, error.cycle[0]]):
            assert one in before[other]
    else:
        assert sorted(order) == list(range(8))
        assert all(order.index(each) < order.index(node) for node in order for each in before[node])
