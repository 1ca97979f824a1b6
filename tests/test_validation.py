"""Every way to break a schedule is found, under its own name and at its place."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from broken import RULES, Broken, broken_schedules
from determinism import draw_fewer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zbpipe import CostModel, Op, OpKind, Placement, Schedule, generate, simulate, validate
from zbpipe.simulator.validation import Rule, require_valid
from zbpipe.testing import cost_models, runnable_schedules, schedules

pytestmark = pytest.mark.usefixtures("short_search")

Rows = list[list[Op]]
any_schedule = schedules(max_ranks=6, max_microbatches=10)


def changed(schedule: Schedule, change: Callable[[Rows], object]) -> Schedule:
    rows = [list(ops) for ops in schedule]
    change(rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(map(tuple, rows)))


any_order = runnable_schedules().filter(lambda s: s.num_ranks > 1 and s.num_microbatches > 1)
"""With full and split backwards side by side."""


@pytest.mark.parametrize("base", [None, any_order], ids=["by name", "in any order"])
@pytest.mark.parametrize("rule", RULES)
def test_one_fault_gets_one_name_at_its_place(rule: Rule, base: st.SearchStrategy[Schedule] | None) -> None:
    """And nothing else is made of it."""

    @settings(draw_fewer(2), suppress_health_check=list(HealthCheck))
    @given(broken_schedules([rule], base))
    def check(broken: Broken) -> None:
        findings = validate(broken.schedule)
        assert {finding.rule for finding in findings} == {rule}
        assert broken.place in (None, *((f.rank, f.position, f.op) for f in findings))

    check()


def test_a_full_backward_beside_its_halves() -> None:
    findings = validate(changed(generate("ZBV", 2, 2), lambda rows: rows[0].append(Op(0, OpKind.B, 1))))
    assert sorted(str(f.op) for f in findings if f.rule == "foreign") == ["0I1", "0W1"]


@pytest.mark.parametrize("half", ["1I0", "1W0"])
def test_a_half_beside_a_full_backward_is_no_deadlock(half: str) -> None:
    """The gradient comes out of the B, whatever else stands there."""
    schedule = changed(generate("1F1B", 2, 3), lambda rows: rows[1].append(Op.parse(half)))
    assert [(f.rule, str(f.op)) for f in validate(schedule)] == [("foreign", half)]


@given(any_schedule, st.data())
def test_backwards_before_what_feeds_them(schedule: Schedule, data: st.DataObject) -> None:
    """W before I, or I or B before F."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    position = data.draw(st.integers(0, len(schedule.ops[rank]) - 1))
    stage, _, microbatch = schedule.ops[rank][position]
    kinds = [op.kind for op in schedule.ops[rank] if op[::2] == (stage, microbatch)]
    late, early = data.draw(st.sampled_from(list(pairwise(kinds))))
    first, second = (schedule.ops[rank].index(Op(stage, kind, microbatch)) for kind in (late, early))

    def swap(rows: Rows) -> None:
        rows[rank][first], rows[rank][second] = rows[rank][second], rows[rank][first]

    findings = validate(changed(schedule, swap))
    expected = ("order", rank, first, Op(stage, early, microbatch))
    assert expected in [(f.rule, f.rank, f.position, f.op) for f in findings]


def test_ranks_that_wait_for_each_other() -> None:
    """Rank 0 wants the backward of microbatch 0 before it sends microbatch 1; rank 1 starts with microbatch 1."""
    table = "0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n"
    (finding,) = validate(Schedule.from_csv(table))
    assert (finding.rule, finding.rank, finding.position, str(finding.op)) == ("deadlock", 0, 1, "0B0")
    assert "rank 0 (position 1, 0B0) waits for 1B0 on rank 1 (position 3)" in finding.message
    assert "rank 1 (position 0, 1F1) waits for 0F1 on rank 0 (position 2)" in finding.message


def test_each_cycle_is_told_once_and_those_who_merely_wait_are_not() -> None:
    table = "0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n2F0,2B0,2F1,2B1\n"
    assert [finding.rule for finding in validate(Schedule.from_csv(table))] == ["deadlock"]


@given(any_schedule, st.sampled_from([0.0, 0.5, 1.0, -0.5, -1.0]), st.sampled_from([0.0, 0.25, 2.0]))
def test_memory_is_measured_as_the_simulator_does(schedule: Schedule, freed: float, working: float) -> None:
    """At the peak nothing is wrong; below it, every rank that needs more is named, with the op that takes it over."""
    costs = CostModel.uniform(
        schedule.placement, freed_by_i=freed, working={OpKind.I: working, OpKind.W: working / 2, OpKind.B: working}
    )
    peaks = simulate(schedule, costs).peak_memory
    assert validate(schedule, max(peaks), costs) == validate(schedule, peaks, costs) == []
    limit = max(peaks) - 0.125
    findings = validate(schedule, limit, costs)
    assert [(f.rule, f.rank) for f in findings] == [
        ("memory", r) for r, peak in enumerate(peaks) if peak > limit + 1e-9
    ]
    for finding in findings:
        assert isinstance(finding.op, Op)
        assert finding.op.kind is OpKind.F or (finding.op.kind is OpKind.I and freed < 0) or working
        assert schedule.ops[finding.rank].index(finding.op) == finding.position


def test_all_findings_come_at_once() -> None:
    def break_it(rows: Rows) -> None:
        rows[0].remove(Op(0, OpKind.W, 1))
        rows[1].append(rows[1][0])
        rows[1].insert(0, rows[1].pop(rows[1].index(Op(1, OpKind.W, 0))))

    rules = [finding.rule for finding in validate(changed(generate("ZBV", 2, 3), break_it))]
    assert sorted(rules) == ["doubled", "missing", "order"]


def test_refusal_lists_the_findings() -> None:
    broken = changed(generate("1F1B", 2, 2), lambda rows: rows[1].pop())
    with pytest.raises(ValueError, match=r"schedule 1F1B cannot run, 1 finding\(s\):\n  missing: rank 1, 1B1"):
        require_valid(broken)


@pytest.mark.parametrize("stranger", [Op(-1, OpKind.F, 0), Op(0, OpKind.F, -1)])
def test_negative_numbers_are_foreign(stranger: Op) -> None:
    whole = generate("1F1B", 1, 1)
    findings = validate(Schedule("x", whole.placement, 1, ((stranger, *whole.ops[0]),)))
    assert ("foreign", 0, 0, stranger) in [(f.rule, f.rank, f.position, f.op) for f in findings]


def test_a_missing_op_does_not_hide_a_deadlock() -> None:
    """0B0 lacks its forward, and still it waits for 1B0 while rank 1 waits for 0F1."""
    table = "0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n"
    assert sorted({finding.rule for finding in validate(Schedule.from_csv(table))}) == ["deadlock", "missing"]


def test_missing_ops_are_not_listed_without_end() -> None:
    """One finding more than needed is no use, and a schedule may ask for any number."""
    findings = validate(Schedule("x", Placement.loop(1), 10**12, ((),)))
    assert {finding.rule for finding in findings} == {"missing"}
    assert len(findings) == 1000


def test_ops_that_stand_there_often_take_no_endless_time() -> None:
    """The work grows with the table and not with its square, of which this one has billions."""
    rows = tuple((Op(stage, OpKind.F, 0),) * 60_000 for stage in (0, 1))
    assert {finding.rule for finding in validate(Schedule("x", Placement.loop(2), 1, rows))} == {"doubled", "missing"}


@pytest.mark.long
def test_memory_is_counted_in_time_that_grows_with_the_table() -> None:
    schedule = generate("GPipe", 1, 40_000)
    assert validate(schedule, 40_000) == []


def test_a_row_that_no_stage_calls_for_has_no_memory() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n0F1,0B1\n")
    assert {finding.rule for finding in validate(schedule, 1.0)} == {"placement"}


@given(st.data())
def test_a_limit_is_in_the_unit_of_the_costs_and_may_differ_by_rank(data: st.DataObject) -> None:
    schedule = data.draw(any_schedule)
    costs = data.draw(cost_models(schedule.placement))
    peaks = simulate(schedule, costs).peak_memory
    assert validate(schedule, peaks, costs) == []
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    limits = tuple(peak - 1 / 16 * (each == rank) for each, peak in enumerate(peaks))
    assert [(finding.rule, finding.rank) for finding in validate(schedule, limits, costs)] == [("memory", rank)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ZBV",), r"'ZBV' is not a zbpipe.Schedule: make one with zbpipe.generate\('ZBV', 4, 8\)"),
        ((None,), "None is not a zbpipe.Schedule"),
        ((generate("1F1B", 2, 1), 2, (1, 1)), r"costs have to be .* for example \(1, 1, 1\), got \(1, 1\)"),
        ((generate("1F1B", 2, 1), 2, CostModel.uniform(Placement.loop(3))), "costs are for 3 stages, but the placem"),
    ],
)
def test_what_is_no_schedule_or_no_costs_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        validate(*arguments)
