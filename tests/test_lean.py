"""Lean schedules: W waits only where there is room, and B takes the place of I and W where there is none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st
from searching import searching_little

from zbpipe import CostModel, OpKind, Placement, Schedule, generate, simulate, validate
from zbpipe.algorithms import _lean
from zbpipe.algorithms._lean import find_best
from zbpipe.algorithms.zbv_lean import zbv_lean
from zbpipe.costs.memory_limit import MemoryLimit, memory_of_1f1b
from zbpipe.costs.model import least_room
from zbpipe.costs.transformer import Checkpointing, typical_costs, usual_costs
from zbpipe.costs.transport import Transport
from zbpipe.planner import search
from zbpipe.planner.engine import PLAIN, at_hand, fastest
from zbpipe.planner.lean import fit_within, make_leanest
from zbpipe.schedule.registry import resolve
from zbpipe.testing import check_schedule, cost_models, schedules

LEAN = {"ZBVLean": "ZBV", "ZBH1Lean": "ZBH1", "VHalfLean": "VHalf", "VMinLean": "VMin"}


def order(schedule: Schedule) -> list[list[tuple[int, str, int]]]:
    """Of each rank's F, and of its I and B, which count as the same."""
    return [[(op.stage, op.kind.replace("B", "I"), op.microbatch) for op in ops if op.kind != "W"] for ops in schedule]


def peaks(schedule: Schedule, costs: CostModel) -> tuple[float, ...]:
    return simulate(schedule, costs).peak_memory


def keeps_to(schedule: Schedule, costs: CostModel, limits: Sequence[float]) -> bool:
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks(schedule, costs), limits, strict=True))


@pytest.mark.parametrize("name", [*LEAN, "ZB1P", "ZB2P"])
def test_compiled_loops_make_the_same_schedules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it makes no difference whether a plan has loaded them before."""
    compiled = fastest()
    found = generate(name, 4, 8)
    assert at_hand() is compiled
    for module in (_lean, search):
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


@pytest.mark.parametrize("name", LEAN)
def test_lean_schedules_fit_any_costs(name: str) -> None:
    """Never longer than the form with the least memory, within its memory or the limit, and the same each time."""

    @draw_fewer(4)
    @given(st.integers(1, 5), st.integers(1, 9), st.data())
    def check(ranks: int, microbatches: int, data: st.DataObject) -> None:
        form = generate(LEAN[name], ranks, microbatches)
        costs = data.draw(cost_models(form.placement))
        with searching_little():
            schedule = generate(name, ranks, microbatches, costs=costs)
            assert generate(name, ranks, microbatches, costs=costs) == schedule
        check_schedule(schedule)
        least, timeline = simulate(make_leanest(form, costs), costs), simulate(schedule, costs)
        allowed = max(1.02 * memory_of_1f1b(costs, ranks, ranks), *least_room(form.placement, costs))
        if max(least.peak_memory) <= allowed:
            assert max(timeline.peak_memory) <= allowed * (1 + 1e-9)
        if name == "ZBH1Lean" and max(least.peak_memory) <= allowed:
            assert timeline.makespan <= least.makespan * (1 + 1e-9)

    check()


@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [(1, 3), (2, 8), (4, 16), *(pytest.param(*size, marks=pytest.mark.long) for size in [(7, 9), (8, 24)])],
)
def test_in_1f1bs_memory_and_shorter(ranks: int, microbatches: int, checkpointing: Checkpointing) -> None:
    """Those two take 1F1B's memory under every checkpointing, and no step is longer than 1F1B's."""

    def run(name: str) -> tuple[float, float]:
        costs = typical_costs(resolve(name).place(ranks), checkpointing)
        timeline = simulate(generate(name, ranks, microbatches, costs=costs), costs)
        return timeline.makespan, max(timeline.peak_memory)

    usual = run("1F1B")
    for name in ("ZBVLean", "ZBH1Lean"):
        length, peak = run(name)
        assert length <= usual[0] * (1 + 1e-9)
        assert peak <= 1.02 * usual[1]


FIGURES = {
    ("ZBVLean", "none"): (0.872, 1.01),
    ("ZBVLean", "selective"): (0.900, 1.02),
    ("ZBVLean", "full"): (0.957, 1.00),
    ("ZBH1Lean", "selective"): (0.965, 1.02),
    ("VHalfLean", "none"): (0.910, 0.77),
    ("VHalfLean", "selective"): (0.975, 0.79),
    ("VHalfLean", "full"): (1.08, 0.89),
    ("VMinLean", "none"): (1.05, 0.52),
    ("VMinLean", "selective"): (1.33, 0.56),
    ("VMinLean", "full"): (1.42, 0.75),
}
"""At most so long a step and so much memory, relative to 1F1B under the same typical costs, at p = 4 and m = 16."""


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        pytest.param(*each, marks=[] if "ZBVLean" in each or "selective" in each else pytest.mark.long)
        for each in FIGURES
    ],
)
def test_figures(name: str, checkpointing: str) -> None:
    costs = typical_costs(resolve(name).place(4), checkpointing)
    schedule = generate(name, 4, 16, costs=costs)
    found = simulate(schedule, costs)
    usual = simulate(generate("1F1B", 4, 16), typical_costs(Placement.loop(4), checkpointing))
    length, memory = FIGURES[name, checkpointing]
    assert found.makespan / usual.makespan <= length
    assert max(found.peak_memory) / max(usual.peak_memory) <= memory
    if checkpointing == "selective":
        assert generate(name, 4, 16) == schedule, "these are the costs that it assumes"


def test_more_memory_makes_steps_shorter() -> None:
    """Within 1.15 of 1F1B's memory (selective) and 1.3 (full), a step is nearly as short as with no limit at all."""
    for checkpointing, more, longer in (("selective", 1.15, 1.02), ("full", 1.3, 1.04)):
        costs = typical_costs(Placement.v(4), checkpointing)
        room = more * memory_of_1f1b(costs, 4, 16)
        lean = simulate(zbv_lean(4, 16, costs, MemoryLimit.parse(room)), costs)
        assert lean.makespan <= longer * simulate(generate("ZBV", 4, 16), costs).makespan
        assert max(lean.peak_memory) <= room * (1 + 1e-9)


@pytest.mark.parametrize("name", ["ZBVLean", "ZBH1Lean"])
def test_lean_schedules_are_told_what_messages_hold_up(name: str) -> None:
    """Where messages hold up both of their ranks, the search chooses another order, in the same memory."""
    algorithm = resolve(name)
    costs = typical_costs(algorithm.place(8), "selective", comm=0.05)
    usual, told = (algorithm.make(8, 16, costs=costs, transport=each) for each in (None, Transport.SHARED))
    lengths = [simulate(each, costs, transport=Transport.SHARED).makespan for each in (usual, told)]
    assert lengths[1] < 0.99 * lengths[0]
    assert max(peaks(told, costs)) <= 1.02 * memory_of_1f1b(costs, 8, 16) * (1 + 1e-9)


def test_a_limit_below_one_microbatch() -> None:
    """It is raised to what that takes."""
    costs = typical_costs(Placement.v(3), "full")
    schedule = find_best("tight", [generate("ZBV", 3, 5)], costs, limits=[0] * 3)
    assert validate(schedule, least_room(Placement.v(3), costs), costs) == []


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_under_tensor_parallelism_there_is_less_room_for_deferred_gradients(checkpointing: Checkpointing) -> None:
    """Made for one GPU a stage, ZBVLean takes more than 1F1B's memory; made for the job's degree it does not."""
    placement, usual = resolve("ZBVLean").place(4), resolve("1F1B")
    costs = usual_costs(placement, checkpointing, 8)
    room = max(simulate(usual.make(4, 16), usual_costs(usual.place(4), checkpointing, 8)).peak_memory)

    def memory(tensor: int) -> float:
        made = resolve("ZBVLean").make(4, 16, costs=usual_costs(placement, checkpointing, tensor))
        return max(simulate(made, costs).peak_memory) / room

    assert memory(1) > 1.1
    assert memory(8) <= 1.021
