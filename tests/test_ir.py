"""Ops, placements and schedules as text and as torch's CSV."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from zbpipe import Op, OpKind, Placement, Schedule, generate
from zbpipe.schedule.ir import COMPUTATIONS

ops = st.builds(Op, st.integers(0, 200), st.sampled_from(COMPUTATIONS), st.integers(0, 999))


@given(ops)
def test_an_op_is_written_as_torch_writes_it(op: Op) -> None:
    assert Op.parse(str(op)) == op
    assert repr(_Action.from_str(str(op))) == str(op)


@pytest.mark.parametrize(
    "text", ["", "F0", "3F", "3X0", "3F0 1", "-1F0", "3SEND_F0", "\u0663F\u0660", "3F1.5", "3F" + 20 * "9"]
)
def test_what_is_no_op_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an op.*for example 3F0") as error:
        Op.parse(text)
    assert repr(text) in str(error.value)


@given(st.integers(1, 9), st.integers(1, 4))
def test_a_loop_goes_round_and_a_v_comes_back(ranks: int, stages_per_rank: int) -> None:
    loop = Placement.loop(ranks, stages_per_rank)
    assert [loop.rank_of[stage] for stage in range(loop.num_stages)] == [
        stage % ranks for stage in range(ranks * stages_per_rank)
    ]
    v = Placement.v(ranks, stages_per_rank)
    assert v.num_ranks == loop.num_ranks == ranks
    assert all(abs(a - b) <= 1 for a, b in zip(v.rank_of, v.rank_of[1:], strict=False))
    for placement in (loop, v):
        assert all(len(placement.stages_on(rank)) == stages_per_rank for rank in range(ranks))


@pytest.mark.parametrize("rank_of", [(), (0, 2), (1,), (-1, 0), (0, 10**20)])
def test_a_placement_without_a_stage_on_some_rank_is_refused(rank_of: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a placement needs a stage on every rank"):
        Placement(rank_of)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0,0Q0\n", r"row 1 \(rank 0\), column 2: '0Q0' is not an op.*for example 3F0.*empty cells"),
        ("", "the table is empty"),
        ("0F0,0B0\n,\n", "rank 1 has no ops"),
        ("0F0,2F0\n", "rank 0 runs 2F0, but no rank runs stage 1"),
        ("0F0,0B0\n999999999999999F0\n", "rank 1 runs 999999999999999F0, but no rank runs stage 1"),
        (
            "0F0,0F99999999,0B0\n1F0,1B0\n",
            r"rank 0 runs 0F99999999, but 5 op\(s\) are far too few for 100000000 microbatches on 2 stage",
        ),
        ("0F" + 9999 * "9", r"row 1 \(rank 0\), column 1: '0F999\d*\.\.\.9*' is not an op"),
        (200_000 * "0", "the table is not valid CSV: field larger"),
        ("0F0;0B0\n", "';' separates the cells of the table: save it with commas"),
        ("0F0\t0B0\n", "'\\\\t' separates the cells"),
        ("0F0 0B0\n", "' ' separates the cells"),
    ],
)
def test_a_csv_that_is_no_schedule_is_refused(table: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.from_csv(table)


def test_what_excel_adds_is_taken() -> None:
    table = generate("1F1B", 2, 2).to_csv()
    for ends in ("\r\n", "\r"):
        assert Schedule.from_csv("\ufeff" + table.replace("\n", ends), "1F1B") == generate("1F1B", 2, 2)


@pytest.mark.parametrize("op", [Op(-1, OpKind.F, 0), Op(0, OpKind.F, -1)])
def test_rows_with_numbers_below_zero_are_refused(op: Op) -> None:
    with pytest.raises(ValueError, match=f"rank 0 runs {op}, but"):
        Schedule.from_rows([[Op(0, OpKind.F, 0), op, Op(0, OpKind.B, 0)]], "x")


@pytest.mark.parametrize("place", [Placement.loop, Placement.v])
def test_placements_have_an_end(place: Callable[[int, int], Placement]) -> None:
    assert place(256, 4).num_stages == 1024
    with pytest.raises(ValueError, match=r"10{20} ranks with 1 stage\(s\) each has 10{20} stages, but at most 1024"):
        place(10**20, 1)
    with pytest.raises(ValueError, match="1025 ranks"):
        place(1025, 1)
