"""Search within a memory limit: W waits only where there is room, and where there is none, B replaces I and W."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st
from searching import searching_little

from zbpipe import CostModel, OpKind, Placement, Schedule, generate, simulate
from zbpipe.algorithms import _search
from zbpipe.algorithms._search import find_best
from zbpipe.costs.memory_limit import MemoryLimit, memory_of_1f1b
from zbpipe.costs.model import least_room
from zbpipe.costs.transformer import Checkpointing, typical_costs, usual_costs
from zbpipe.costs.transport import Transport
from zbpipe.planner import search
from zbpipe.planner.engine import PLAIN, at_hand, fastest
from zbpipe.planner.lean import fit_within, make_leanest
from zbpipe.schedule.registry import resolve
from zbpipe.testing import check_schedule, cost_models, schedules


def order(schedule: Schedule) -> list[list[tuple[int, str, int]]]:
    """Of each rank's F, and of its I and B, which count as the same."""
    return [[(op.stage, op.kind.replace("B", "I"), op.microbatch) for op in ops if op.kind != "W"] for ops in schedule]


def peaks(schedule: Schedule, costs: CostModel) -> tuple[float, ...]:
    return simulate(schedule, costs).peak_memory


def keeps_to(schedule: Schedule, costs: CostModel, limits: Sequence[float]) -> bool:
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks(schedule, costs), limits, strict=True))


@pytest.mark.parametrize("name", ["ZB", "ZBLoop", "ZB1P", "ZB2P"])
def test_compiled_loops_make_the_same_schedules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it makes no difference whether a plan has loaded them before."""
    compiled = fastest()
    found = generate(name, 4, 8)
    assert at_hand() is compiled
    for module in (_search, search):
        monkeypatch.setattr(module, "at_hand", lambda: PLAIN)
    assert generate(name, 4, 8) == found


# --- the passes ---


@given(schedules(max_ranks=5, max_microbatches=10), st.data())
def test_leanest_takes_least(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(cost_models(schedule.placement))
    lean = make_leanest(schedule, costs)
    check_schedule(lean)
    assert order(lean) == order(schedule)
    limits = peaks(lean, costs)
    for other in (schedule, fit_within(schedule, costs, limits=[1e9] * schedule.num_ranks)):
        assert all(least <= peak * (1 + 1e-9) for least, peak in zip(limits, peaks(other, costs), strict=True))


@given(schedules(max_ranks=5, max_microbatches=10), st.floats(1, 3), st.data())
def test_within_keeps_to_limits_and_order(schedule: Schedule, more: float, data: st.DataObject) -> None:
    """It leaves alone what fits."""
    costs = data.draw(cost_models(schedule.placement))
    limits = [more * peak for peak in peaks(make_leanest(schedule, costs), costs)]
    fitted = fit_within(schedule, costs, limits)
    check_schedule(fitted)
    assert order(fitted) == order(schedule)
    assert keeps_to(fitted, costs, limits)
    if not any(op.kind == OpKind.B for ops in schedule for op in ops):
        assert fit_within(schedule, costs, [peak + 10 for peak in peaks(schedule, costs)]) == schedule


def test_w_waits_as_long_as_there_is_room() -> None:
    """It runs sooner only where the next op would not fit, and then I and W are one op only where I does not fit."""
    some = Schedule.from_csv("0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2")
    costs = CostModel((1,), (1,), (1,), activations=(1,), freed_by_i=-1)
    assert " ".join(map(str, fit_within(some, costs, [5]).ops[0])) == "0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2"
    assert " ".join(map(str, fit_within(some, costs, [3]).ops[0])) == "0F0 0F1 0F2 0B0 0I1 0W1 0I2 0W2"
    hungry = CostModel((1,), (1,), (1,), activations=(1,), freed_by_i=0.5, working={OpKind.B: 9})
    assert " ".join(map(str, fit_within(some, hungry, [3]).ops[0])) == "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"
    assert " ".join(map(str, make_leanest(some, hungry).ops[0])) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    # Where both ways take the same, the stage before need not wait for W.
    assert make_leanest(some, CostModel.uniform(some.placement)) == make_leanest(some, hungry)


# --- the search ---


@given(schedules(max_ranks=4, max_microbatches=8), st.floats(1, 4), st.data())
def test_the_search_fits_any_placement_costs_and_limit(form: Schedule, more: float, data: st.DataObject) -> None:
    """With room for one microbatch at its leanest it comes to an end: no rank fills up with what cannot go on."""
    costs = data.draw(cost_models(form.placement))
    limits = [more * room for room in least_room(form.placement, costs)]
    with searching_little():
        schedule = find_best("found", [form], costs, limits)
    check_schedule(schedule)
    assert schedule.placement == form.placement
    assert keeps_to(schedule, costs, limits)


# --- the schedules ---


@draw_fewer(8)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.data())
def test_zb_fits_any_costs(ranks: int, microbatches: int, stages: int, data: st.DataObject) -> None:
    """Within 1F1B's memory, or that of one microbatch, and the same each time."""
    placement = Placement.wave(ranks, stages)
    costs = data.draw(cost_models(placement))
    with searching_little():
        schedule = generate("ZB", ranks, microbatches, stages_per_rank=stages, costs=costs)
        assert generate("ZB", ranks, microbatches, stages_per_rank=stages, costs=costs) == schedule
    check_schedule(schedule)
    allowed = max(memory_of_1f1b(costs, ranks, ranks), *least_room(placement, costs))
    assert max(peaks(schedule, costs)) <= allowed * (1 + 1e-9)


SHARES = {"none": (0.52, 1.05), "selective": (0.56, 1.36), "full": (0.75, 1.42)}
"""By checkpointing: memory to 1F1B's, and the step's at most, to 1F1B's, at 4 x 16."""


@pytest.mark.parametrize("checkpointing", SHARES)
def test_below_1f1bs_memory(checkpointing: str) -> None:
    share, length = SHARES[checkpointing]
    costs = typical_costs(Placement.v(4), checkpointing)
    limit = MemoryLimit.parse(f"{share}x")
    found = simulate(resolve("ZB").make(4, 16, costs=costs, memory_limit=limit), costs)
    usual = simulate(generate("1F1B", 4, 16), typical_costs(Placement.loop(4), checkpointing))
    assert found.makespan / usual.makespan <= length
    assert max(found.peak_memory) / max(usual.peak_memory) <= share * (1 + 1e-9)
    assert generate("ZB", 4, 16, costs=typical_costs(Placement.v(4), "selective")) == generate("ZB", 4, 16)


def test_more_memory_makes_steps_shorter() -> None:
    """Within 1.15 of 1F1B's memory (selective) and 1.3 (full), a step is nearly as short as with no limit at all."""
    for checkpointing, more, longer in (("selective", 1.15, 1.02), ("full", 1.3, 1.04)):
        costs = typical_costs(Placement.v(4), checkpointing)
        room = more * memory_of_1f1b(costs, 4, 16)
        found = simulate(resolve("ZB").make(4, 16, costs=costs, memory_limit=MemoryLimit.parse(room)), costs)
        assert found.makespan <= longer * simulate(generate("ZBV", 4, 16), costs).makespan
        assert max(found.peak_memory) <= room * (1 + 1e-9)


@pytest.mark.parametrize("stages", [1, 2])
def test_zb_is_told_what_messages_hold_up(stages: int) -> None:
    """Where messages hold up both of their ranks, another order is the shortest, in the same memory."""
    algorithm = resolve("ZB")
    costs = typical_costs(algorithm.place(8, stages), "selective", comm=0.05)
    usual, told = (
        algorithm.make(8, 16, stages_per_rank=stages, costs=costs, transport=each) for each in (None, Transport.SHARED)
    )
    lengths = [simulate(each, costs, transport=Transport.SHARED).makespan for each in (usual, told)]
    assert lengths[1] < 0.99 * lengths[0]
    assert max(peaks(told, costs)) <= memory_of_1f1b(costs, 8, 16) * (1 + 1e-9)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_under_tensor_parallelism_there_is_less_room_for_deferred_gradients(checkpointing: Checkpointing) -> None:
    """Made for one GPU a stage, ZB takes more than 1F1B's memory; made for the job's degree it does not."""
    placement, usual = resolve("ZB").place(4), resolve("1F1B")
    costs = usual_costs(placement, checkpointing, 8)
    room = max(simulate(usual.make(4, 16), usual_costs(usual.place(4), checkpointing, 8)).peak_memory)

    def memory(tensor: int) -> float:
        made = resolve("ZB").make(4, 16, costs=usual_costs(placement, checkpointing, tensor))
        return max(simulate(made, costs).peak_memory) / room

    assert memory(1) > 1.1
    assert memory(8) <= 1 + 1e-9
