"""ZB-V against its definition, for any number of ranks and microbatches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

from zbpipe import Op, OpKind, Schedule, generate, validate
from zbpipe.validate import feeders

sizes = {"ranks": st.integers(1, 12), "microbatches": st.integers(1, 40)}


def unit_time_finish(schedule: Schedule) -> int:
    """When the last rank is done if every op takes one unit and communication none."""
    end: dict[Op, int] = {}
    clock = [0] * schedule.num_ranks
    position = [0] * schedule.num_ranks
    while any(position[rank] < len(ops) for rank, ops in enumerate(schedule)):
        for rank, ops in enumerate(schedule):
            while position[rank] < len(ops):
                op = ops[position[rank]]
                needed = [choice for choices in feeders(op, schedule.placement.num_stages) for choice in choices]
                needed = [choice for choice in needed if choice.kind is not OpKind.B]
                if any(choice not in end for choice in needed):
                    break
                clock[rank] = end[op] = 1 + max([clock[rank], *(end[choice] for choice in needed)])
                position[rank] += 1
    return max(clock)


def peak_activations(schedule: Schedule, rank: int) -> float:
    """The most microbatches that a rank holds at a time, each for both of its stages; one is freed by its W."""
    live = peak = 0
    for op in schedule.ops[rank]:
        live += (op.kind is OpKind.F) - (op.kind is OpKind.W)
        peak = max(peak, live)
    return peak / 2


@given(**sizes)
def test_valid(ranks: int, microbatches: int) -> None:
    schedule = generate("ZBV", ranks, microbatches)
    assert validate(schedule) == []
    assert schedule.num_microbatches == microbatches
    assert all(len(ops) == 6 * microbatches for ops in schedule)


@given(**sizes)
def test_torch_finds_it_valid_too(ranks: int, microbatches: int) -> None:
    schedule = generate("ZBV", ranks, microbatches)
    actions = {rank: [_Action.from_str(str(op)) for op in ops] for rank, ops in enumerate(schedule)}
    mapping = _validate_schedule(actions, ranks, 2 * ranks, microbatches)
    assert tuple(mapping[stage] for stage in range(2 * ranks)) == schedule.placement.rank_of


@given(**sizes)
def test_no_bubble_but_the_skew_at_the_start(ranks: int, microbatches: int) -> None:
    """The paper's figure for T_F = T_I = T_W: the last rank begins p - 1 units late and never idles after that."""
    if microbatches >= 2 * ranks - 1:
        assert unit_time_finish(generate("ZBV", ranks, microbatches)) == 6 * microbatches + ranks - 1


@given(**sizes)
def test_memory_of_1f1b(ranks: int, microbatches: int) -> None:
    schedule = generate("ZBV", ranks, microbatches)
    assert max(peak_activations(schedule, rank) for rank in range(ranks)) <= ranks


@pytest.mark.parametrize("rank", range(4))
def test_warm_up_forwards(rank: int) -> None:
    """2p - 1 in all before the first backward can start: 2p - r of the first stage, r - 1 of the second (r from 1)."""
    ops = generate("ZBV", 4, 8).ops[rank]
    warm_up = ops[: next(position for position, op in enumerate(ops) if op.kind is OpKind.I)]
    first, second = rank, 7 - rank
    # The backward follows the forward of the second stage that closes the warm-up.
    assert [sum(op.stage == stage for op in warm_up[:-1]) for stage in (first, second)] == [8 - (rank + 1), rank]


@given(**sizes)
def test_1f1b_is_valid_and_as_long_as_the_paper_says(ranks: int, microbatches: int) -> None:
    schedule = generate("1F1B", ranks, microbatches)
    assert validate(schedule) == []
    for rank, ops in enumerate(schedule):
        live = [sum(1 if op.kind is OpKind.F else -1 for op in ops[:position]) for position in range(len(ops) + 1)]
        assert max(live) == min(ranks - rank, microbatches)
