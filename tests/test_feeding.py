"""What feeds an op: one rule, those who repeat it, and the ranks that wait for what it says."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from zbpipe import CostModel, Op, OpKind, Placement, Schedule, simulate
from zbpipe.planner.problem import Problem
from zbpipe.schedule.event_loop import EventLoop
from zbpipe.schedule.ir import inputs, users
from zbpipe.simulator import lower_bound as bound
from zbpipe.testing import cost_models, placements, runnable_schedules


def all_ops(num_stages: int) -> list[Op]:
    return [Op(stage, kind, microbatch) for stage in range(num_stages) for kind in OpKind for microbatch in (0, 1)]


@given(st.integers(1, 6))
def test_users_are_inputs_the_other_way_round(num_stages: int) -> None:
    ops = all_ops(num_stages)
    fed = {(feeder, op) for op in ops for feeder in chain.from_iterable(inputs(op, num_stages))}
    assert fed == {(op, user) for op in ops for user in users(op, num_stages)}
    assert {op for pair in fed for op in pair} <= set(ops)


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
    path = bound._alone(placement, costs)
    for span in chain.from_iterable(timeline.spans):
        if span.op.kind is OpKind.F:
            assert (span.start, span.end) == (path.forward_start[span.op.stage], path.forward_end[span.op.stage])
        if span.op.kind is OpKind.I:
            assert (span.start, span.end) == (path.input_start[span.op.stage], path.input_end[span.op.stage])


@given(runnable_schedules(), st.sampled_from([None, "static", "dynamic"]))
def test_each_item_has_its_turn_after_its_inputs(schedule: Schedule, priority: str | None) -> None:
    num_stages = schedule.placement.num_stages
    seen: set[Op] = set()
    orders = {"static": lambda rank, position: -rank, "dynamic": lambda rank, position: (len(seen) + rank) % 3}
    loop = EventLoop(schedule.ops, lambda op: inputs(op, num_stages), orders[priority] if priority else None)
    done: list[list[Op]] = [[] for _ in schedule]
    for rank, op, feeders in loop:
        assert seen.issuperset(feeders)
        assert all(feeder in group for feeder, group in zip(feeders, inputs(op, num_stages), strict=True))
        seen.add(op)
        done[rank].append(op)
    assert tuple(map(tuple, done)) == schedule.ops
    assert not loop.waiting
    assert loop.position == [len(ops) for ops in schedule]


def test_of_those_that_can_go_on_the_first_by_priority_does() -> None:
    rows = [["a", "b"], ["c", "d"], ["e"]]
    needs = {"a": [["d"]], "e": [["b", "c"]]}
    order = [item for _, item, _ in EventLoop(rows, lambda item: needs.get(item, []), lambda rank, position: -rank)]
    assert order == ["c", "e", "d", "a", "b"]


def test_who_waits_for_what_never_comes() -> None:
    rows = [["a", "b"], ["c"], ["d"]]
    needs = {"b": [["a"], ["c", "x"]], "c": [["b"]], "d": [["a"]]}
    loop = EventLoop(rows, lambda item: needs.get(item, []))
    assert [item for _, item, _ in loop] == ["a", "d"]
    assert loop.waiting == {0: ["c", "x"], 1: ["b"]}
    assert loop.position == [1, 0, 1]


def test_a_rank_that_several_items_could_wake_wakes_once() -> None:
    """Otherwise it would have two turns when `a` is done, and `z` would come before `e`."""
    rows = [["a", "z"], ["b", "c"], ["d"], ["e"]]
    needs = {"a": [["b", "c"], ["d"]], "d": [["c"]], "e": [["a"]]}
    loop = EventLoop(rows, lambda item: needs.get(item, []), lambda rank, position: 5 if rank else 10 * position)
    assert [item for _, item, _ in loop] == ["b", "c", "d", "a", "e", "z"]


@given(st.lists(st.lists(st.integers()).map(sorted), max_size=6))
def test_priorities_merge_rows(rows: list[list[int]]) -> None:
    items = [[(number, rank, position) for position, number in enumerate(row)] for rank, row in enumerate(rows)]
    loop = EventLoop(items, lambda item: [], lambda rank, position: items[rank][position])
    assert [item for _, item, _ in loop] == sorted(chain.from_iterable(items))
