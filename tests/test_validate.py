"""Every way to break a schedule is found, under its own name and at its place."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpipe import Finding, Op, OpKind, Schedule, generate, validate
from zbpipe.validate import require_valid

Rows = list[list[Op]]
sizes = {"ranks": st.integers(1, 6), "microbatches": st.integers(1, 10), "data": st.data()}


def changed(schedule: Schedule, change: Callable[[Rows], None]) -> Schedule:
    rows = [list(ops) for ops in schedule]
    change(rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(map(tuple, rows)))


def draw_op(data: st.DataObject, schedule: Schedule) -> tuple[int, int]:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    return rank, data.draw(st.integers(0, len(schedule.ops[rank]) - 1))


@given(**sizes)
def test_a_missing_op(ranks: int, microbatches: int, data: st.DataObject) -> None:
    schedule = generate("ZBV", ranks, microbatches)
    rank, position = draw_op(data, schedule)
    lost = schedule.ops[rank][position]
    findings = validate(changed(schedule, lambda rows: rows[rank].pop(position)))
    assert [(f.rule, f.rank, f.position, f.op) for f in findings] == [("missing", rank, None, lost)]


@given(**sizes)
def test_a_doubled_op(ranks: int, microbatches: int, data: st.DataObject) -> None:
    schedule = generate("ZBV", ranks, microbatches)
    rank, position = draw_op(data, schedule)
    twice = schedule.ops[rank][position]
    findings = validate(changed(schedule, lambda rows: rows[rank].append(twice)))
    assert [(f.rule, f.rank, f.position, f.op) for f in findings] == [("doubled", rank, len(schedule.ops[rank]), twice)]


@given(**sizes)
def test_foreign_ops(ranks: int, microbatches: int, data: st.DataObject) -> None:
    schedule = generate("ZBV", ranks, microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    stranger = data.draw(st.sampled_from([Op(2 * ranks, OpKind.F, 0), Op(rank, OpKind.F, microbatches)]))
    findings = validate(changed(schedule, lambda rows: rows[rank].insert(0, stranger)))
    assert ("foreign", rank, 0, stranger) in [(f.rule, f.rank, f.position, f.op) for f in findings]


def test_a_full_backward_beside_its_halves() -> None:
    findings = validate(changed(generate("ZBV", 2, 2), lambda rows: rows[0].append(Op(0, OpKind.B, 1))))
    assert sorted(str(f.op) for f in findings if f.rule == "foreign") == ["0I1", "0W1"]


@given(**sizes)
def test_a_stage_on_two_ranks(ranks: int, microbatches: int, data: st.DataObject) -> None:
    schedule = generate("ZBV", ranks + 1, microbatches)
    rank, position = draw_op(data, schedule)
    moved = schedule.ops[rank][position]
    other = (rank + 1) % (ranks + 1)

    def move(rows: Rows) -> None:
        rows[rank].pop(position)
        rows[other].append(moved)

    findings = validate(changed(schedule, move))
    place = ("placement", other, len(schedule.ops[other]), moved)
    assert place in [(f.rule, f.rank, f.position, f.op) for f in findings]


@given(**sizes)
def test_w_before_i_and_i_before_f(ranks: int, microbatches: int, data: st.DataObject) -> None:
    schedule = generate("ZBV", ranks, microbatches)
    stage = data.draw(st.integers(0, 2 * ranks - 1))
    microbatch = data.draw(st.integers(0, microbatches - 1))
    early, late = data.draw(st.sampled_from([(OpKind.W, OpKind.I), (OpKind.I, OpKind.F)]))
    rank = schedule.placement.rank_of[stage]
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


def test_each_circle_is_told_once_and_those_who_merely_wait_are_not() -> None:
    table = "0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n2F0,2B0,2F1,2B1\n"
    assert [finding.rule for finding in validate(Schedule.from_csv(table))] == ["deadlock"]


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


def test_a_finding_reads_well() -> None:
    finding = Finding("order", 2, 7, Op(3, OpKind.W, 0), "it needs 3I0")
    assert str(finding) == "order: rank 2, position 7, 3W0: it needs 3I0"
