"""What `Auto` begins with: as lean as 1F1B, with all that is to be measured."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpipe import OpKind, Placement, Schedule, generate, simulate
from zbpipe.algorithms.auto import mix_backwards
from zbpipe.costs.transformer import Checkpointing, typical_costs
from zbpipe.testing import check_schedule, cost_models, schedules

F, I, W, B = OpKind.F, OpKind.I, OpKind.W, OpKind.B  # noqa: E741


def measured(schedule: Schedule) -> dict[int, Counter[OpKind]]:
    """By stage how many ops of each kind there are behind the first microbatch, or of the only one."""
    found: dict[int, Counter[OpKind]] = {stage: Counter() for stage in range(schedule.placement.num_stages)}
    for ops in schedule:
        for op in ops:
            if op.microbatch or schedule.num_microbatches == 1:
                found[op.stage][op.kind] += 1
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 16])
def test_every_kind_is_there_on_every_stage(ranks: int, microbatches: int) -> None:
    schedule = generate("Auto", ranks, microbatches, stages_per_rank=(ranks + microbatches) % 4 + 1)
    check_schedule(schedule)
    for kinds in measured(schedule).values():
        assert kinds[I] == kinds[W] >= 1
        assert kinds[B] >= (1 if microbatches > 2 else 0)


@settings(deadline=None, max_examples=60)
@given(schedules(max_ranks=4, max_microbatches=8), st.integers(1, 3), st.data())
def test_any_schedule_can_be_measured(schedule: Schedule, samples: int, data: st.DataObject) -> None:
    some = mix_backwards(schedule, data.draw(cost_models(schedule.placement)), samples)
    check_schedule(some)
    number = schedule.num_microbatches - 1 or 1
    for kinds in measured(some).values():
        assert kinds[I] == kinds[W] >= min(samples, (number + 1) // 2)
        assert kinds[B] >= min(samples, number // 2)


def test_what_is_there_stays() -> None:
    """Where there are samples, and where there are none where the rank holds least."""
    costs = typical_costs(Placement.loop(1), "full")
    both = Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1,0F2,0B2")
    assert mix_backwards(both, costs) == both
    whole = Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0F3,0F4,0B2,0B3,0B4")
    row = "0F0 0F1 0F2 0B0 0B1 0F3 0F4 0B2 0B3 0I4 0W4"
    assert " ".join(map(str, mix_backwards(whole, costs).ops[0])) == row


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("checkpointing", Checkpointing)
def test_it_is_as_lean_as_1f1b(checkpointing: Checkpointing, ranks: int) -> None:
    """Without knowing the checkpointing. Under full, what one stage keeps for W may be more than 1F1B holds."""
    start, of_1f1b = (generate(name, ranks, 4 * ranks) for name in ("Auto", "1F1B"))
    costs, usual = (typical_costs(each.placement, checkpointing) for each in (start, of_1f1b))
    alone = max(costs.of(stage, I).needs for stage in range(costs.num_stages)) + 1
    held, least = (max(simulate(*each).peak_memory) for each in ((start, costs), (of_1f1b, usual)))
    assert held <= max(1.03 * least, alone * (1 + 1e-9))


def test_a_limit() -> None:
    limited, usual = generate("Auto", 4, 8, memory_limit=2), generate("Auto", 4, 8)
    costs = typical_costs(usual.placement, "none")
    assert max(simulate(limited, costs).peak_activations) < 2.1
    assert max(simulate(usual, costs).peak_activations) > 3.9
    with pytest.raises(
        ValueError, match=r"memory_limit = 0.9 is too small for Auto: one microbatch peaks at 1 on rank"
    ):
        generate("Auto", 4, 8, memory_limit=0.9)
