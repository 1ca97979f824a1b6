"""ZB: the closed form of its slots, and what is promised of the schedules made from it."""

from dataclasses import replace
from itertools import pairwise

import pytest
from determinism import draw_fewer
from hypothesis import example, given
from hypothesis import strategies as st
from searching import searching_little

from zbpipe import OpKind, Placement, generate, simulate
from zbpipe.algorithms import zb as zb_module
from zbpipe.algorithms.zb import Filler, Order, find_shortest, in_slots, list_leanest, with_short_warm_up
from zbpipe.costs.job import AS_1F1B, MemoryLimit, least_room, memory_of_1f1b
from zbpipe.costs.model import Transport
from zbpipe.costs.transformer import Checkpointing, typical_costs, usual_costs
from zbpipe.planner import search
from zbpipe.planner.engine import PLAIN, at_hand, fastest
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.timeline import Timeline
from zbpipe.testing import check_schedule, cost_models

sizes = st.tuples(st.integers(1, 6), st.integers(1, 13), st.integers(1, 4))
"""Ranks, microbatches, stages per rank."""


@st.composite
def orders(draw: st.DrawFn) -> tuple[Placement, int, Order]:
    """A placement, a number of microbatches, and an order of F and I."""
    ranks, microbatches, stages = draw(sizes)
    placement = draw(st.sampled_from([Placement.loop, Placement.v]))(ranks, stages)
    kinds = [in_slots(placement, microbatches, delay) for delay in (0, 1)]
    if placement == Placement.loop(ranks, stages):
        kinds.append(with_short_warm_up(placement, microbatches))
    return placement, microbatches, draw(st.sampled_from(kinds))


@pytest.mark.parametrize("placement", [Placement.loop(4, 2), Placement.loop(3, 3), Placement.v(4), Placement.v(3, 4)])
def test_slots_are_those_of_the_formula(placement: Placement) -> None:
    """Where p divides m: all ops of a rank have slots of their own, in this order, an F before an I."""
    ranks, stages, microbatches = placement.num_ranks, placement.num_stages, 2 * placement.num_ranks
    step = 1 if placement == Placement.loop(ranks, stages // ranks) else 2

    def slot(stage: int, kind: OpKind, microbatch: int) -> int:
        group, entered = divmod(microbatch, ranks)
        passed = stage if kind is OpKind.F else 2 * (stages - 1) - stage
        return group * stages + step * entered + passed

    for row in in_slots(placement, microbatches):
        keys = [(slot(*op), op.kind is OpKind.I) for op in row]
        assert len(keys) == 2 * microbatches * (stages // ranks)
        assert all(one < other for one, other in pairwise(keys))


@pytest.mark.parametrize("placement", [Placement.loop(4, 2), Placement.loop(3, 3), Placement.v(4), Placement.v(3, 4)])
@pytest.mark.parametrize("how", Checkpointing)
def test_zb_takes_no_less_memory_than_its_leanest_order(placement: Placement, how: Checkpointing) -> None:
    microbatches, costs = 3 * placement.num_ranks, typical_costs(placement, how)
    leanest = list(list_leanest(placement, microbatches, costs))
    assert all(each.schedule.kinds == {OpKind.F, OpKind.B} for each in leanest)
    least = min(max(each.peak_memory) for each in leanest)
    found = find_shortest("ZB", placement, microbatches, costs).schedule
    assert least <= max(simulate(found, costs).peak_memory) * (1 + 1e-9)
    if placement == Placement.v(4):  # V-Min: a third of 1F1B's memory, and constants
        assert least < 0.75 * memory_of_1f1b(costs, 4, microbatches)


def test_a_loop_has_the_order_of_interleaved_1f1b() -> None:
    for ranks, microbatches, stages in ((4, 8, 2), (3, 7, 3), (5, 2, 2)):
        placement = Placement.loop(ranks, stages)
        whole = [
            [op._replace(kind=OpKind.B) if op.kind is OpKind.I else op for op in row]
            for row in in_slots(placement, microbatches)
        ]
        assert whole == list(map(list, generate("Interleaved1F1B", ranks, microbatches, stages_per_rank=stages)))


@given(orders(), st.data())
def test_filled_orders_run_and_are_timed_as_simulated(drawn: tuple[Placement, int, Order], data: st.DataObject) -> None:
    """Also where memory makes a B of an I. Nothing exceeds the limit."""
    placement, microbatches, order = drawn
    costs = data.draw(cost_models(placement))
    limits = [data.draw(st.floats(1, 8)) * least for least in least_room(placement, costs)]
    filled = Filler("", placement, microbatches, costs, limits).fill(
        order, data.draw(st.integers(0, microbatches)), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    )
    if filled is None:
        return
    seconds, schedule = filled
    check_schedule(schedule)
    kept = [
        [op._replace(kind=OpKind.I) if op.kind is OpKind.B else op for op in row if op.kind is not OpKind.W]
        for row in schedule
    ]
    assert kept == list(map(list, order))
    timeline = simulate(schedule, replace(costs, gather=0.0, reduce=0.0))
    assert timeline.makespan == pytest.approx(seconds)
    assert all(peak <= limit * (1 + 1e-8) for peak, limit in zip(timeline.peak_memory, limits, strict=True))


@draw_fewer(2)
@given(
    sizes,
    st.sampled_from(list(Transport)),
    st.sampled_from(list(Checkpointing)),
    st.sampled_from([0.0, 0.05]),
    st.data(),
)
def test_a_loop_is_never_longer_than_interleaved_1f1b(
    size: tuple[int, int, int], transport: Transport, checkpointing: Checkpointing, comm: float, data: st.DataObject
) -> None:
    """In the memory of each rank of Interleaved1F1B, and without a limit in 1F1B's or Interleaved1F1B's."""
    ranks, microbatches, stages = size
    placement = Placement.loop(ranks, stages)
    costs = data.draw(st.one_of(st.just(typical_costs(placement, checkpointing, comm=comm)), cost_models(placement)))
    usual = simulate(
        generate("Interleaved1F1B", ranks, microbatches, stages_per_rank=stages), costs, transport=transport
    )
    most = max(*usual.peak_memory, memory_of_1f1b(costs, ranks, microbatches), *least_room(placement, costs))
    for limit, limits in ((MemoryLimit(usual.peak_memory, ""), usual.peak_memory), (None, (most,) * ranks)):
        found = resolve("ZBLoop").make(
            ranks, microbatches, stages_per_rank=stages, costs=costs, memory_limit=limit, transport=transport
        )
        timeline = simulate(found, costs, transport=transport)
        check_schedule(found)
        assert timeline.makespan <= usual.makespan * (1 + 1e-9)
        assert all(peak <= limit * (1 + 1e-8) for peak, limit in zip(timeline.peak_memory, limits, strict=True))


@draw_fewer(4)
@given(sizes, st.sampled_from(list(Checkpointing)), st.sampled_from(["ZB", "ZBLoop"]), st.floats(1, 3))
@example((3, 3, 2), Checkpointing.NONE, "ZB", 1.5)
def test_no_limit_above_the_default_makes_a_step_longer(
    size: tuple[int, int, int], how: Checkpointing, name: str, more: float
) -> None:
    ranks, microbatches, stages = size
    costs = typical_costs(resolve(name).place(ranks, stages), how)
    interleaved = simulate(generate("Interleaved1F1B", ranks, microbatches, stages_per_rank=stages), costs)
    most = more * max(*interleaved.peak_memory, memory_of_1f1b(costs, ranks, microbatches))
    within, usual = (
        resolve(name).make(ranks, microbatches, stages_per_rank=stages, costs=costs, memory_limit=limit)
        for limit in (MemoryLimit((most,) * ranks, ""), None)
    )
    assert simulate(within, costs).makespan <= simulate(usual, costs).makespan * (1 + 1e-9)


@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize("name", ["ZB", "ZBLoop"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 16), (3, 9)])
def test_without_a_limit_the_memory_is_1f1bs_unless_the_step_is_longer(
    ranks: int, microbatches: int, stages: int, name: str, checkpointing: Checkpointing
) -> None:
    """Where p divides m. Full checkpointing leaves no room for W, and a wave may be longer, so there is the loop."""
    algorithm = resolve(name)
    placement, loop = algorithm.place(ranks, stages), Placement.loop(ranks, stages)
    costs = typical_costs(placement, checkpointing)

    def time(limit: MemoryLimit | None) -> Timeline:
        made = algorithm.make(ranks, microbatches, stages_per_rank=stages, costs=costs, memory_limit=limit)
        return simulate(made, costs)

    interleaved = generate("Interleaved1F1B", ranks, microbatches, stages_per_rank=stages)
    usual = simulate(interleaved, typical_costs(loop, checkpointing))
    timeline, within = time(None), time(AS_1F1B)
    assert max(within.peak_memory) <= memory_of_1f1b(costs, ranks, microbatches) * (1 + 1e-8)
    if within.makespan <= usual.makespan * (1 + 1e-9) or stages == 1:
        assert timeline.schedule == within.schedule
    else:
        assert checkpointing is Checkpointing.FULL
        assert max(timeline.peak_memory) <= max(*usual.peak_memory, *within.peak_memory) * (1 + 1e-8)
        assert timeline.makespan <= within.makespan
        assert timeline.makespan <= usual.makespan * (1 + 1e-9) or placement != loop


@pytest.mark.parametrize("name", ["ZB", "ZBLoop", "ZB1P", "ZB2P"])
def test_compiled_loops_make_the_same_schedules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it makes no difference whether a plan has loaded them before."""
    compiled = fastest()
    found = generate(name, 4, 8)
    assert at_hand() is compiled
    for module in (zb_module, search):
        monkeypatch.setattr(module, "at_hand", lambda: PLAIN)
    assert generate(name, 4, 8) == found


@draw_fewer(8)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.data())
def test_zb_fits_any_costs(ranks: int, microbatches: int, stages: int, data: st.DataObject) -> None:
    """Within 1F1B's memory, Interleaved1F1B's or that of one microbatch, and the same each time."""
    placement = Placement.wave(ranks, stages)
    costs = data.draw(cost_models(placement))
    with searching_little():
        schedule = generate("ZB", ranks, microbatches, stages_per_rank=stages, costs=costs)
        assert generate("ZB", ranks, microbatches, stages_per_rank=stages, costs=costs) == schedule
    check_schedule(schedule)
    usual = simulate(generate("Interleaved1F1B", ranks, microbatches, stages_per_rank=stages), costs).peak_memory
    allowed = max(memory_of_1f1b(costs, ranks, ranks), *least_room(placement, costs), *usual)
    assert max(simulate(schedule, costs).peak_memory) <= allowed * (1 + 1e-9)


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
    assert generate("ZB", 4, 16, costs=typical_costs(Placement.wave(4, 4), "selective")) == generate("ZB", 4, 16)


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
    assert max(simulate(told, costs).peak_memory) <= memory_of_1f1b(costs, 8, 16) * (1 + 1e-9)


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
