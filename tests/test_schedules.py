"""Every registered schedule: valid at any size, as good as its definition says, and fit for torch's runtime."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch.distributed.pipelining.schedules as pipelining
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, get_schedule_class

from zbpipe import Op, Placement, Schedule, generate
from zbpipe.costs.model import CostModel, least_room, rank_shares
from zbpipe.planner.search import find_best_within
from zbpipe.runtime._torch.pipelining import lower
from zbpipe.schedule import registry
from zbpipe.simulator.post_validation import period
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.testing import check_schedule, cost_models, placements, schedules

pytestmark = pytest.mark.usefixtures("short_search")

NAMES = sorted(algorithm.name for algorithm in registry.schedules().values())
ANY_STAGES = [name for name in NAMES if registry.resolve(name).any_stages_per_rank]


def uniform(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Timeline:
    """The schedule with T_F = T_I = T_W = 1 and no communication."""
    schedule = generate(name, ranks, microbatches, stages_per_rank=stages_per_rank)
    return simulate(schedule, CostModel.uniform(schedule.placement))


# --- valid at any size ---


@pytest.mark.parametrize("name", NAMES)
def test_valid_at_any_size(name: str) -> None:
    @draw_fewer(2)
    @given(schedules(name, max_ranks=8, max_microbatches=24))
    def check(schedule: Schedule) -> None:
        check_schedule(schedule)
        assert schedule.name == name
        assert all(
            len({op for op in ops if op.kind == "F"})
            == schedule.num_microbatches * len(schedule.placement.stages_on(rank))
            for rank, ops in enumerate(schedule)
        )

    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 1), (1, 5), (5, 1), (16, 1), (3, 2), (5, 7), (7, 16), (8, 9), (13, 40), (16, 64)]
)
def test_valid_at_the_corners(name: str, ranks: int, microbatches: int) -> None:
    """One microbatch, one rank, odd ranks, microbatches that the ranks do not divide, and the largest size."""
    schedule = generate(name, ranks, microbatches)
    check_schedule(schedule)
    assert (schedule.num_ranks, schedule.num_microbatches) == (ranks, microbatches)


@pytest.mark.parametrize("name", ANY_STAGES)
@pytest.mark.parametrize("stages_per_rank", [1, 3, 5])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (3, 1), (3, 6), (4, 7), (5, 13)])
def test_valid_for_any_number_of_stages(name: str, stages_per_rank: int, ranks: int, microbatches: int) -> None:
    schedule = generate(name, ranks, microbatches, stages_per_rank=stages_per_rank)
    check_schedule(schedule)
    assert schedule.placement.num_stages == ranks * stages_per_rank


# --- the figures of the papers ---

SIZES = [(ranks, rounds * ranks) for ranks in (2, 4, 8, 16) for rounds in (1, 2, 4)]
at_sizes = pytest.mark.parametrize(("ranks", "microbatches"), SIZES)


class Figure(NamedTuple):
    """Bubble (makespan less 3m) and the most activations on a rank, both from p and m."""

    bubble: Callable[[int, int], float]
    activations: Callable[[int, int], float]


FIGURES = {
    "GPipe": Figure(lambda p, m: 3 * (p - 1), lambda p, m: m),
    "1F1B": Figure(lambda p, m: 3 * (p - 1), min),
    "Interleaved1F1B": Figure(lambda p, m: 3 * (p - 1) / 2, lambda p, m: p + (p - 1) / 2),
    "LoopedBFS": Figure(lambda p, m: 3 * (p - 1) / 2, lambda p, m: m),
    "InterleavedZeroBubble": Figure(lambda p, m: (p - 1) / 2, lambda p, m: p),
    "ZBH1": Figure(lambda p, m: p - 1, lambda p, m: p),
    "ZBH2": Figure(lambda p, m: p - 1, lambda p, m: 2 * p - 1),
    "ZBV": Figure(lambda p, m: (p - 1) / 2, lambda p, m: p),
}
"""For synchronous steps; with m >= p the bubble is exactly this. A bubble of ZBH2 or ZBV is nothing but start skew."""


@at_sizes
@pytest.mark.parametrize("name", FIGURES)
def test_bubble_and_memory(name: str, ranks: int, microbatches: int) -> None:
    timeline = uniform(name, ranks, microbatches)
    figure = FIGURES[name]
    assert timeline.makespan - 3 * microbatches == figure.bubble(ranks, microbatches)
    held, most = max(timeline.peak_activations), figure.activations(ranks, microbatches)
    assert held == most if name in ("GPipe", "1F1B", "LoopedBFS") else held <= most


@pytest.mark.parametrize("stages_per_rank", [1, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 9), (4, 4), (4, 12), (8, 16)])
def test_more_stages_make_the_bubble_smaller(stages_per_rank: int, ranks: int, microbatches: int) -> None:
    for name, seconds in {"Interleaved1F1B": 3, "LoopedBFS": 3, "InterleavedZeroBubble": 1}.items():
        timeline = uniform(name, ranks, microbatches, stages_per_rank)
        bubble = timeline.makespan - 3 * microbatches
        assert bubble == pytest.approx(seconds * (ranks - 1) / stages_per_rank), name
        most = microbatches if name == "LoopedBFS" else ranks + (ranks - 1) / stages_per_rank
        assert max(timeline.peak_activations) <= most + 1e-9, name


@pytest.mark.parametrize("stages_per_rank", [2, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 4), (4, 5), (4, 6), (4, 11), (8, 12), (8, 31), (7, 40)])
def test_interleaved_where_ranks_do_not_divide_microbatches(
    ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    """The bubble stays; all but one of a rank's stages hold one more for each microbatch by which groups exceed p."""
    group = -(-microbatches // (microbatches // ranks))
    more = (group - ranks) * (stages_per_rank - 1) / stages_per_rank
    for name, seconds in {"Interleaved1F1B": 3, "InterleavedZeroBubble": 1}.items():
        timeline = uniform(name, ranks, microbatches, stages_per_rank)
        assert timeline.makespan - 3 * microbatches == seconds * (ranks - 1) / stages_per_rank, name
        assert max(timeline.peak_activations) <= ranks + (ranks - 1) / stages_per_rank + more, name


@at_sizes
def test_zbh2_and_zbv_have_no_bubble_within_a_rank(ranks: int, microbatches: int) -> None:
    """From 2p - 1 microbatches on; the first rank's first F to its last W, and so for each rank."""
    if microbatches >= 2 * ranks - 1:
        for name in ("ZBH2", "ZBV"):
            timeline = uniform(name, ranks, microbatches)
            assert timeline.longest_rank_span == 3 * microbatches
            assert period(timeline.schedule, timeline.costs) == 3 * microbatches
            assert timeline.makespan == timeline.lower_bound


@given(schedules("ZBV", max_ranks=8, max_microbatches=24))
def test_zbv_has_no_bubble_but_the_skew_at_the_start(schedule: Schedule) -> None:
    """The paper's figure for T_F = T_I = T_W: the last rank begins p - 1 units late and never idles after that."""
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    if microbatches >= 2 * ranks - 1:
        # 6 units for a rank's microbatch
        timeline = simulate(schedule, CostModel.uniform(schedule.placement, 2, 2, 2))
        assert timeline.makespan == 6 * microbatches + ranks - 1
        assert [sum(idle) - idle.warmup for idle in timeline.idle] == list(reversed(range(ranks)))


@pytest.mark.parametrize("rank", range(4))
def test_warm_up_forwards_of_zbv(rank: int) -> None:
    """2p - 1 in all before the first backward can start: 2p - r of the first stage, r - 1 of the second (r from 1)."""
    ops = generate("ZBV", 4, 8).ops[rank]
    warm_up = ops[: next(position for position, op in enumerate(ops) if op.kind == "I")]
    # The backward follows the forward of the second stage that closes the warm-up.
    assert [sum(op.stage == stage for op in warm_up[:-1]) for stage in (rank, 7 - rank)] == [8 - (rank + 1), rank]


@given(st.integers(1, 12), st.integers(1, 40))
def test_each_rank_of_1f1b_holds_what_the_paper_says(ranks: int, microbatches: int) -> None:
    peaks = uniform("1F1B", ranks, microbatches).peak_activations
    assert peaks == tuple(min(ranks - rank, microbatches) for rank in range(ranks))


@at_sizes
def test_searched_schedules_are_no_worse_than_handcrafted_ones(ranks: int, microbatches: int) -> None:
    for searched, handcrafted, limit in (("ZB1P", "ZBH1", ranks), ("ZB2P", "ZBH2", 2 * ranks)):
        found, known = uniform(searched, ranks, microbatches), uniform(handcrafted, ranks, microbatches)
        assert found.makespan <= known.makespan
        assert max(found.peak_activations) <= limit


@draw_fewer(2)
@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_searched_schedules_fit_any_costs(ranks: int, microbatches: int, data: st.DataObject) -> None:
    """Never longer than the handcrafted ones and never above the limit, whatever the times are."""
    costs = data.draw(cost_models(generate("ZBH1", ranks, 1).placement))
    for searched, handcrafted, limit in (("ZB1P", ("ZBH1",), ranks), ("ZB2P", ("ZBH1", "ZBH2"), 2 * ranks)):
        found = generate(searched, ranks, microbatches, costs=costs)
        check_schedule(found)
        timeline = simulate(found, costs)
        room = within(limit, found.placement, costs)
        assert all(peak <= most + 1e-9 for peak, most in zip(in_shares(timeline), room, strict=True))
        for name in handcrafted:
            known = simulate(generate(name, ranks, microbatches), costs)
            if max(in_shares(known)) <= limit:
                assert timeline.makespan <= known.makespan


def in_shares(timeline: Timeline) -> list[float]:
    """By rank the most that it holds, working memory included, in units of its own share of one microbatch."""
    shares = rank_shares(timeline.schedule.placement, timeline.costs)
    return [peak / share if share else 0.0 for peak, share in zip(timeline.peak_memory, shares, strict=True)]


def within(limit: float, placement: Placement, costs: CostModel) -> tuple[float, ...]:
    """The limit by rank, or what one microbatch takes."""
    # A rank that keeps nothing could hold any number.
    return tuple(
        max(limit, least / share if share else 1.0)
        for least, share in zip(least_room(placement, costs), rank_shares(placement, costs), strict=True)
    )


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [1, 1.5, 3])
def test_the_search_needs_no_more_than_one_microbatch(stages_per_rank: int, limit: float) -> None:
    """However many stages share a rank: what it admits can always come to its end."""
    for placement in (Placement.loop(2, stages_per_rank), Placement.v(3, stages_per_rank)):
        check_schedule(find_best_within("searched", placement, 3, limit), memory_limit=limit)


@draw_fewer(2)
@given(placements(max_ranks=4), st.integers(1, 6), st.sampled_from([1, 1.5, 2, 5]), st.data())
def test_the_search_fits_any_placement_costs_and_limit(
    placement: Placement, microbatches: int, limit: float, data: st.DataObject
) -> None:
    costs = data.draw(cost_models(placement))
    found = find_best_within("searched", placement, microbatches, limit, costs)
    check_schedule(found)
    peaks, room = in_shares(simulate(found, costs)), within(limit, placement, costs)
    assert all(peak <= most + 1e-9 for peak, most in zip(peaks, room, strict=True))


V_RANKS = [2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 16]


@pytest.mark.parametrize("ranks", V_RANKS)
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_v_half(ranks: int, rounds: int) -> None:
    """Half of 1F1B's bubble of 3 (p - 1), at the most 7/13 of it (p = 14), 23.5/45 on 16 ranks; half of its memory."""
    timeline = uniform("VHalf", ranks, rounds * ranks)
    bubble = timeline.makespan - 3 * rounds * ranks
    assert bubble <= 7 / 13 * 3 * (ranks - 1)
    assert max(timeline.peak_activations) <= (ranks + 2) // 2


@pytest.mark.parametrize("ranks", V_RANKS)
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_v_min(ranks: int, rounds: int) -> None:
    """2p - 5/2, less than 2/3 of 1F1B's bubble; a third of its memory."""
    timeline = uniform("VMin", ranks, rounds * ranks)
    bubble = timeline.makespan - 3 * rounds * ranks
    assert bubble == 2 * ranks - 2.5 < 2 / 3 * 3 * (ranks - 1)
    assert max(timeline.peak_activations) <= (ranks + 4) // 3


@given(st.integers(1, 12), st.integers(1, 32))
def test_controllable_memory_at_any_size(ranks: int, microbatches: int) -> None:
    assert max(uniform("VHalf", ranks, microbatches).peak_activations) <= (ranks + 2) // 2
    assert max(uniform("VMin", ranks, microbatches).peak_activations) <= (ranks + 4) // 3
    assert max(uniform("ZBV", ranks, microbatches).peak_activations) <= ranks
    assert max(uniform("DualPipeV", ranks, microbatches).peak_activations) <= ranks + 0.5


@at_sizes
def test_dualpipe_v(ranks: int, microbatches: int) -> None:
    """From 2p microbatches on its bubble is ZBV's, (p - 1) / 2; with p it is (p - 1) 3/2."""
    timeline = uniform("DualPipeV", ranks, microbatches)
    share = 0.5 if microbatches >= 2 * ranks else 1.5
    assert timeline.makespan - 3 * microbatches == share * (ranks - 1)
    assert max(timeline.peak_activations) <= ranks + 0.5


# --- torch ---


def stub_stages(ranks: int, stages_per_rank: int) -> list[Any]:
    """As much of a stage as torch's constructors look at."""
    stage = {"num_stages": ranks * stages_per_rank, "group_size": ranks, "group_rank": 0, "is_last": False}
    return [SimpleNamespace(**stage, submod=None) for _ in range(stages_per_rank)]


def torch_lists(name: str, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """What torch's own multi-stage class makes, with its overlapped pairs one after the other."""
    torchs: Any = get_schedule_class(name)(stub_stages(ranks, stages_per_rank), microbatches)
    return Schedule.from_rows([list(flat(torchs.pipeline_order[rank])) for rank in range(ranks)], name)


def flat(actions: Iterable[_Action | None]) -> Iterable[Op]:
    for action in actions:
        if action is not None:
            yield from (Op.parse(str(part)) for part in action.sub_actions or (action,))


def torch_single(name: str, ranks: int, microbatches: int) -> Schedule:
    """What torch's own single-stage class really runs; its list for display is another and not always complete."""
    return Schedule.from_rows([recorded(name, rank, ranks, microbatches) for rank in range(ranks)], name)


def recorded(name: str, rank: int, ranks: int, microbatches: int) -> list[Op]:
    ops: list[Op] = []
    stage = MagicMock(stage_index=rank, num_stages=ranks, is_first=False, is_last=False)
    for exchange in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, exchange).return_value = []
    stage.forward_one_chunk.side_effect = lambda m, *_, **__: ops.append(Op.parse(f"{rank}F{m}"))
    stage.backward_one_chunk.side_effect = lambda m, *_, **__: ops.append(Op.parse(f"{rank}B{m}"))
    torchs: Any = get_schedule_class(name)(stage, microbatches)
    torchs._initialize_stage = MagicMock()
    torchs._step_microbatches()
    return ops


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 4), (2, 3), (3, 2), (3, 7), (4, 4), (4, 8), (5, 11)])
def test_torch_lowers_it_and_runs_it_to_the_end(name: str, ranks: int, microbatches: int) -> None:
    """Through torch's validation, its passes for FSDP and communication, and its own dry run of sends and receives."""
    schedule = generate(name, ranks, microbatches)
    runtime = _PipelineScheduleRuntime(stub_stages(ranks, schedule.placement.num_stages // ranks), microbatches)
    lower(runtime, schedule)
    assert tuple(runtime.stage_index_to_group_rank[s] for s in range(schedule.placement.num_stages)) == (
        schedule.placement.rank_of
    )
    # torch's dry run knows no FSDP.
    talk = {
        rank: [
            action
            for action in actions
            if not str(action.computation_type).endswith(("UNSHARD", "RESHARD", "REDUCE_GRAD"))
        ]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    ran = pipelining._simulate_comms_compute(
        talk, schedule.placement.rank_of.__getitem__, schedule.placement.num_stages
    )
    computed = [[op for op in ran[rank] if op is not None and op.is_compute_op] for rank in range(ranks)]
    assert [tuple(flat(actions)) for actions in computed] == list(schedule.ops)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 4), (2, 2), (3, 7), (4, 4), (4, 9), (8, 16)])
def test_one_stage_a_rank_as_torch_runs_it(name: str, ranks: int, microbatches: int) -> None:
    assert generate(name, ranks, microbatches) == torch_single(name, ranks, microbatches)


@pytest.mark.parametrize("stages_per_rank", [2, 3])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"])
@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 3), (2, 2), (2, 3), (3, 2), (3, 6), (4, 4), (4, 6), (4, 10), (8, 3), (8, 16)]
)
def test_interleaved_as_torch_lists_it(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> None:
    ours = generate(name, ranks, microbatches, stages_per_rank=stages_per_rank)
    assert ours == torch_lists(name, ranks, microbatches, stages_per_rank)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (2, 3), (3, 4), (4, 4), (4, 9), (8, 7), (8, 32)])
def test_zbv_zero_bubble_as_torch_lists_it(ranks: int, microbatches: int) -> None:
    assert generate("ZBVZeroBubble", ranks, microbatches) == torch_lists("ZBVZeroBubble", ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (1, 5), (2, 4), (3, 7), (4, 8), (4, 13), (8, 16), (8, 32)])
def test_dualpipe_v_as_torch_lists_it(ranks: int, microbatches: int) -> None:
    assert generate("DualPipeV", ranks, microbatches) == torch_lists("DualPipeV", ranks, microbatches)


def compare_with_torch(name: str, torchs_name: str, ranks: int, microbatches: int) -> None:
    ours = uniform(name, ranks, microbatches)
    theirs = simulate(torch_lists(torchs_name, ranks, microbatches), ours.costs)
    assert ours.makespan <= theirs.makespan


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8])
def test_zbv_is_no_slower_than_torchs(ranks: int) -> None:
    for microbatches in range(1, 2 * ranks + 2):
        compare_with_torch("ZBV", "ZBVZeroBubble", ranks, microbatches)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"])
@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [(1, 1), (2, 1), (2, 2), (2, 6), (3, 2), (3, 9), (4, 3), (4, 4), (4, 6), (4, 8), (8, 5), (8, 8), (8, 12), (8, 18)],
)
def test_looped_schedules_are_no_slower_than_torchs(name: str, ranks: int, microbatches: int) -> None:
    """Wherever torch's run: with microbatches that are a multiple of m // p, the number of its groups."""
    compare_with_torch(name, name, ranks, microbatches)
