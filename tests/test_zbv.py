"""ZB-V against its definition, for any number of ranks and microbatches."""

import pytest
from hypothesis import HealthCheck, given, settings
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

from zbpipe import OpKind, Schedule, generate
from zbpipe.costs import CostModel
from zbpipe.simulation import simulate
from zbpipe.testing import check_schedule, schedules
from zbpipe.timeline import Timeline

# The search for few microbatches takes a while on a busy machine, which is no failure.
patient = settings(suppress_health_check=[HealthCheck.too_slow])
zbv = schedules("ZBV", max_ranks=12, max_microbatches=40)


def in_thirds(schedule: Schedule) -> Timeline:
    """Every op of a stage takes one unit, which makes 6 of them for a rank's microbatch."""
    return simulate(schedule, CostModel.uniform(schedule.placement, 2, 2, 2))


@patient
@given(zbv)
def test_valid(schedule: Schedule) -> None:
    check_schedule(schedule, memory_limit=schedule.num_ranks)
    assert all(len(ops) == 6 * schedule.num_microbatches for ops in schedule)


@patient
@given(zbv)
def test_torch_finds_it_valid_too(schedule: Schedule) -> None:
    num_stages = schedule.placement.num_stages
    actions = {rank: [_Action.from_str(str(op)) for op in ops] for rank, ops in enumerate(schedule)}
    mapping = _validate_schedule(actions, schedule.num_ranks, num_stages, schedule.num_microbatches)
    assert tuple(mapping[stage] for stage in range(num_stages)) == schedule.placement.rank_of


@patient
@given(zbv)
def test_no_bubble_but_the_skew_at_the_start(schedule: Schedule) -> None:
    """The paper's figure for T_F = T_I = T_W: the last rank begins p - 1 units late and never idles after that."""
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    if microbatches >= 2 * ranks - 1:
        timeline = in_thirds(schedule)
        assert timeline.makespan == 6 * microbatches + ranks - 1
        assert [sum(idle) - idle.warmup for idle in timeline.idle] == list(reversed(range(ranks)))


@patient
@given(zbv)
def test_memory_of_1f1b(schedule: Schedule) -> None:
    assert max(in_thirds(schedule).peak_activations) <= schedule.num_ranks


@pytest.mark.parametrize("rank", range(4))
def test_warm_up_forwards(rank: int) -> None:
    """2p - 1 in all before the first backward can start: 2p - r of the first stage, r - 1 of the second (r from 1)."""
    ops = generate("ZBV", 4, 8).ops[rank]
    warm_up = ops[: next(position for position, op in enumerate(ops) if op.kind is OpKind.I)]
    first, second = rank, 7 - rank
    # The backward follows the forward of the second stage that closes the warm-up.
    assert [sum(op.stage == stage for op in warm_up[:-1]) for stage in (first, second)] == [8 - (rank + 1), rank]


@given(schedules("1F1B", max_ranks=12, max_microbatches=40))
def test_1f1b_is_valid_and_as_long_as_the_paper_says(schedule: Schedule) -> None:
    check_schedule(schedule)
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    timeline = simulate(schedule, CostModel.uniform(schedule.placement))
    assert timeline.peak_activations == tuple(min(ranks - rank, microbatches) for rank in range(ranks))
    assert timeline.makespan == 3 * (microbatches + ranks - 1)
