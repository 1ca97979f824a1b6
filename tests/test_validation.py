"""Every way to break a schedule is found, under its own name and at its place."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from broken import RULES, Broken, broken_schedules
from determinism import draw_fewer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zbpipe import Op, OpKind, Placement, Schedule, generate, simulate, validate
from zbpipe.simulator.validation import Rule
from zbpipe.testing import cost_models, runnable_schedules, schedules

pytestmark = pytest.mark.usefixtures("short_search")

Rows = list[list[Op]]
any_schedule = schedules(max_ranks=6, max_microbatches=10)


def changed(schedule: Schedule, change: Callable[[Rows], object]) -> Schedule:
    rows = [list(ops) for ops in schedule]
    change(rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(map(tuple, rows)))


any_order = runnable_schedules().filter(lambda s: s.num_ranks > 1 and s.num_microbatches > 1)


@pytest.mark.parametrize("base", [None, any_order], ids=["by name", "in any order"])
@pytest.mark.parametrize("rule", RULES)
def test_one_fault_gets_one_name_at_its_place(rule: Rule, base: st.SearchStrategy[Schedule] | None) -> None:
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
    schedule = changed(generate("1F1B", 2, 3), lambda rows: rows[1].append(Op.parse(half)))
    assert [(f.rule, str(f.op)) for f in validate(schedule)] == [("foreign", half)]


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


@given(any_schedule, st.data())
def test_memory_is_measured_as_the_simulator_does(schedule: Schedule, data: st.DataObject) -> None:
    """At the peak nothing is wrong; below it, every rank that needs more is named, with the op that takes it over."""
    costs = data.draw(cost_models(schedule.placement))
    costs = replace(costs, working={**costs.working, OpKind.W: data.draw(st.sampled_from([0.0, 2.0]))})
    peaks = simulate(schedule, costs).peak_memory
    assert validate(schedule, max(peaks), costs) == validate(schedule, peaks, costs) == []
    low = data.draw(st.sets(st.integers(0, schedule.num_ranks - 1)))
    findings = validate(schedule, [peak - 1 / 16 * (rank in low) for rank, peak in enumerate(peaks)], costs)
    assert [(finding.rule, finding.rank) for finding in findings] == [("memory", rank) for rank in sorted(low)]
    for finding in findings:
        assert isinstance(finding.op, Op)
        assert schedule.ops[finding.rank].index(finding.op) == finding.position


def test_all_findings_come_at_once() -> None:
    def break_it(rows: Rows) -> None:
        rows[0].remove(Op(0, OpKind.W, 1))
        rows[1].append(rows[1][0])
        rows[1].insert(0, rows[1].pop(rows[1].index(Op(1, OpKind.W, 0))))

    rules = [finding.rule for finding in validate(changed(generate("ZBV", 2, 3), break_it))]
    assert sorted(rules) == ["doubled", "missing", "order"]


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
