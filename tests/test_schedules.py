"""Every registered schedule: valid at any size, as good as its definition says, and fit for torch's runtime."""

from collections.abc import Callable, Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed.pipelining.schedules as pipelining
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, get_schedule_class

from zbpipe import Op, Placement, Schedule, generate
from zbpipe.costs.job import least_room
from zbpipe.costs.model import CostModel
from zbpipe.planner.search import find_best_within
from zbpipe.runtime._torch.pipelining import lower
from zbpipe.schedule import registry
from zbpipe.simulator.simulation import period, simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.testing import check_schedule, cost_models, placements, schedules

pytestmark = pytest.mark.usefixtures("short_search")

NAMES = sorted(algorithm.name for algorithm in registry.schedules().values())
ANY_STAGES = [name for name in NAMES if registry.resolve(name).any_stages_per_rank]


def uniform(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Timeline:
    """The schedule with T_F = T_I = T_W = 1 and no communication."""
    schedule = generate(name, ranks, microbatches, stages_per_rank=stages_per_rank)
    return simulate(schedule, CostModel.uniform(schedule.placement))


CORNERS = [(1, 1), (1, 5), (5, 1), (16, 1), (3, 2), (5, 7), (7, 16), (8, 9), (16, 64)]
"""One microbatch, one rank, odd ranks, microbatches that the ranks do not divide, and the largest size."""


@pytest.mark.parametrize("name", NAMES)
def test_valid_at_any_size(name: str) -> None:
    @draw_fewer(2)
    @given(schedules(name, max_ranks=8, max_microbatches=24))
    def check(schedule: Schedule) -> None:
        check_schedule(schedule)
        assert schedule.name == name

    check()
    for size in CORNERS:
        schedule = generate(name, *size)
        check_schedule(schedule)
        assert (schedule.num_ranks, schedule.num_microbatches) == size
    for stages, size in product((1, 3, 5) if name in ANY_STAGES else (), ((1, 3), (3, 1), (3, 6), (4, 7), (5, 13))):
        schedule = generate(name, *size, stages_per_rank=stages)
        check_schedule(schedule)
        assert schedule.placement.num_stages == size[0] * stages


Figure = Callable[[int, int, int], tuple[float, float]]
"""Bubble (makespan less 3m) and the most activations on a rank, both from p, m, v."""
FIGURES: dict[str, Figure] = {
    "GPipe": lambda p, m, v: (3 * (p - 1), m),
    "1F1B": lambda p, m, v: (3 * (p - 1), min(p, m)),
    "Interleaved1F1B": lambda p, m, v: (3 * (p - 1) / v, p + (p - 1) / v),
    "LoopedBFS": lambda p, m, v: (3 * (p - 1) / v, m),
    "InterleavedZeroBubble": lambda p, m, v: ((p - 1) / v, p if v == 2 else p + (p - 1) / v),
    "ZBH1": lambda p, m, v: (p - 1, p),
    "ZBH2": lambda p, m, v: (p - 1, 2 * p - 1),
    "ZBV": lambda p, m, v: ((p - 1) / 2, p),
    "DualPipeV": lambda p, m, v: ((0.5 if m >= 2 * p else 1.5) * (p - 1), p + 0.5),
    "VMin": lambda p, m, v: (2 * p - 2.5, (p + 4) // 3),
    # Half of 1F1B's bubble of 3 (p - 1), at the most 7/13 of it (p = 14), 23.5/45 on 16 ranks.
    "VHalf": lambda p, m, v: (7 / 13 * 3 * (p - 1), (p + 2) // 2),
}


@pytest.mark.parametrize("name", FIGURES)
def test_bubble_and_memory(name: str) -> None:
    sizes = product((2, 3, 4, 5, 8, 14), (1, 2, 4), (None,))
    for ranks, rounds, v in product((2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4)) if name in ANY_STAGES else sizes:
        timeline = uniform(name, ranks, rounds * ranks, v)
        bubble, most = FIGURES[name](ranks, rounds * ranks, v or 2)
        found, held = timeline.makespan - 3 * rounds * ranks, max(timeline.peak_activations)
        assert found <= bubble + 1e-9 if name == "VHalf" else found == pytest.approx(bubble), (ranks, rounds, v)
        is_exact = name in ("GPipe", "1F1B", "LoopedBFS")
        assert held == pytest.approx(most) if is_exact else held <= most + 1e-9, (ranks, rounds, v)


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


@pytest.mark.parametrize("name", ["ZBH2", "ZBV"])
@given(st.integers(1, 10), st.integers(1, 40))
def test_no_bubble_but_the_skew_at_the_start(name: str, ranks: int, microbatches: int) -> None:
    """From 2p - 1 microbatches on a rank idles only before its first F, and after its last W until all are done."""
    if microbatches >= 2 * ranks - 1:
        timeline = uniform(name, ranks, microbatches)
        assert timeline.longest_rank_span == 3 * microbatches
        assert period(timeline.schedule, timeline.costs) == 3 * microbatches
        assert timeline.makespan == timeline.lower_bound
        skew = 1 if name == "ZBH2" else 0.5
        assert [(idle.warmup, idle.steady) for idle in timeline.idle] == [(skew * rank, 0) for rank in range(ranks)]


@pytest.mark.parametrize("rank", range(4))
def test_warm_up_forwards_of_zbv(rank: int) -> None:
    """2p - 1 in all before the first backward can start: 2p - r of the first stage, r - 1 of the second (r from 1)."""
    ops = generate("ZBV", 4, 8).ops[rank]
    warm_up = ops[: next(position for position, op in enumerate(ops) if op.kind == "I")]
    # The backward follows the forward of the second stage that closes the warm-up.
    assert [sum(op.stage == stage for op in warm_up[:-1]) for stage in (rank, 7 - rank)] == [8 - (rank + 1), rank]


@draw_fewer(2)
@given(st.integers(1, 12), st.integers(1, 40))
def test_memory_with_any_number_of_microbatches(ranks: int, microbatches: int) -> None:
    peaks = uniform("1F1B", ranks, microbatches).peak_activations
    assert peaks == tuple(min(ranks - rank, microbatches) for rank in range(ranks))
    for name in ("VHalf", "VMin", "ZBV", "DualPipeV"):
        held = max(uniform(name, ranks, microbatches).peak_activations)
        assert held <= FIGURES[name](ranks, microbatches, 2)[1], name


@draw_fewer(2)
@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_searched_schedules_fit_any_costs(ranks: int, microbatches: int, data: st.DataObject) -> None:
    placement = generate("ZBH1", ranks, 1).placement
    for costs in (CostModel.uniform(placement), data.draw(cost_models(placement))):
        for searched, handcrafted, limit in (("ZB1P", ("ZBH1",), ranks), ("ZB2P", ("ZBH1", "ZBH2"), 2 * ranks)):
            found = generate(searched, ranks, microbatches, costs=costs)
            check_schedule(found)
            makespan = require_within(limit, found, costs).makespan
            for name in handcrafted:
                known = simulate(generate(name, ranks, microbatches), costs)
                if max(in_shares(known)) <= limit:
                    assert makespan <= known.makespan


def in_shares(timeline: Timeline) -> list[float]:
    """By rank the most that it holds, working memory included, in units of its own share of one microbatch."""
    shares = timeline.schedule.placement.sum_by_rank(timeline.costs.activations)
    return [peak / share if share else 0.0 for peak, share in zip(timeline.peak_memory, shares, strict=True)]


def require_within(limit: float, schedule: Schedule, costs: CostModel) -> Timeline:
    """No rank holds more than the limit, or than what one microbatch takes."""
    timeline, placement = simulate(schedule, costs), schedule.placement
    least, shares = least_room(placement, costs), placement.sum_by_rank(costs.activations)
    # A rank that keeps nothing could hold any number.
    most = [max(limit, room / share if share else 1.0) for room, share in zip(least, shares, strict=True)]
    assert all(peak <= room + 1e-9 for peak, room in zip(in_shares(timeline), most, strict=True))
    return timeline


@draw_fewer(2)
@given(placements(max_ranks=4), st.integers(1, 6), st.sampled_from([1, 1.5, 2, 5]), st.data())
def test_the_search_fits_any_placement_costs_and_limit(
    placement: Placement, microbatches: int, limit: float, data: st.DataObject
) -> None:
    costs = data.draw(cost_models(placement))
    found = find_best_within("searched", placement, microbatches, limit, costs)
    check_schedule(found)
    require_within(limit, found, costs)


def stub_stages(ranks: int, stages_per_rank: int) -> list[Any]:
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
    schedule = generate(name, ranks, microbatches)
    runtime = _PipelineScheduleRuntime(stub_stages(ranks, schedule.placement.num_stages // ranks), microbatches)
    lower(runtime, schedule)
    assert tuple(runtime.stage_index_to_group_rank[s] for s in range(schedule.placement.num_stages)) == (
        schedule.placement.rank_of
    )
    of_fsdp = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # which torch's dry run does not know
    rows = runtime.pipeline_order_with_comms.items()
    talk = {rank: [each for each in row if not str(each.computation_type).endswith(of_fsdp)] for rank, row in rows}
    place = schedule.placement.rank_of.__getitem__
    ran = pipelining._simulate_comms_compute(talk, place, schedule.placement.num_stages)
    computed = [[op for op in ran[rank] if op is not None and op.is_compute_op] for rank in range(ranks)]
    assert [tuple(flat(actions)) for actions in computed] == list(schedule.ops)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 4), (2, 2), (3, 7), (4, 4), (4, 9), (8, 16)])
def test_one_stage_a_rank_as_torch_runs_it(name: str, ranks: int, microbatches: int) -> None:
    """torch's list for display is another and not always complete."""
    rows = [recorded(name, rank, ranks, microbatches) for rank in range(ranks)]
    assert generate(name, ranks, microbatches) == Schedule.from_rows(rows, name)


LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS")


@pytest.mark.parametrize(
    ("name", "stages_per_rank"), [*product(LOOPED, (2, 3)), ("ZBVZeroBubble", 2), ("DualPipeV", 2)]
)
def test_multi_stage_schedules_as_torch_lists_them(name: str, stages_per_rank: int) -> None:
    """With microbatches that torch takes: for looped ones a multiple of m // p, for DualPipeV 2p or more."""
    for ranks, microbatches in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 16, 18)):
        if name in LOOPED and microbatches % max(1, microbatches // ranks):
            continue
        if name == "DualPipeV" and microbatches < 2 * ranks:
            continue
        ours = generate(name, ranks, microbatches, stages_per_rank=stages_per_rank)
        assert ours == torch_lists(name, ranks, microbatches, stages_per_rank), (ranks, microbatches)


def test_zbv_is_no_slower_than_torchs() -> None:
    for ranks, microbatches in ((p, m) for p in (1, 2, 3, 4, 6) for m in range(1, 2 * p + 2)):
        assert uniform("ZBV", ranks, microbatches).makespan <= uniform("ZBVZeroBubble", ranks, microbatches).makespan
