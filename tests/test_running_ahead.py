"""Where ranks may run ahead of the optimizer step's validation: the cut of their lists, checked without torch."""

from collections.abc import Iterator

import pytest
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st
from test_simulation import steps_in_a_row

import zbpipe
from zbpipe import CostModel, OpKind, Schedule, simulate
from zbpipe.costs import Link
from zbpipe.costs.model import Receives
from zbpipe.simulator import offload
from zbpipe.simulator.actions import Rows, dependencies, other_end
from zbpipe.simulator.passes import add_messages, add_waits, default_costs, free_sends_early, place_receives, wait_of
from zbpipe.simulator.simulation import RunAhead, ahead_of, gain, period, period_of
from zbpipe.simulator.validation import find_disordered, validate_lowered
from zbpipe.testing import cost_models

AHEAD = frozenset({"F", "SEND_F", "RECV_F", "WAIT_SEND_F", "UNSHARD", "RESHARD"})
NAMES = ("ZBV", "ZBH2", "ZB2P", "ZBH1", "VHalf", "DualPipeV", "1F1B", "InterleavedZeroBubble")


def lists_of(schedule: Schedule, receives: Receives) -> Rows:
    """As the runtime makes them."""
    timeline = simulate(schedule, default_costs(schedule.placement))
    rows = place_receives(add_messages(schedule), receives, timeline)
    return free_sends_early(add_waits(rows), schedule.placement)


def find_faults(cut: RunAhead) -> Iterator[str]:
    """Findings in words: something other than forwards runs ahead, or ranks would wait forever."""
    whole = [(*before, *after) for before, after in zip(cut.before, cut.after, strict=True)]
    rank_of = [rank for _, rank in sorted({(each.stage, rank) for rank, row in enumerate(whole) for each in row})]
    for rank, row in enumerate(cut.before):
        for each in row:
            if each.kind not in AHEAD or (each.kind == "F" and each.stage == len(rank_of) - 1):
                yield f"rank {rank} runs {each} ahead"
    # What runs ahead must need nothing from after the validation. Waits for sends may: the validation needs only votes.
    alone = tuple(tuple(each for each in row if not each.kind.startswith("WAIT")) for row in cut.before)
    drained = tuple((*before, *drain) for before, drain in zip(cut.before, cut.drain, strict=True))
    for rows in (alone, drained):
        places = {each: [(rank, n)] for rank, row in enumerate(rows) for n, each in enumerate(row)}
        for action, ((rank, _),) in places.items():
            for choices in dependencies(action, rank_of):
                if places.keys().isdisjoint(choices):
                    yield f"rank {rank} waits for {choices[0]}, which no rank runs ahead of the validation"
        yield from map(str, find_disordered(rows, lambda action: dependencies(action, rank_of)))
    for each in sorted(places):
        if each.kind.startswith("SEND") and not {other_end(each), wait_of(each)} <= places.keys():
            yield f"{each} is not received, or nobody waits for it"


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 10), st.sampled_from(list(Receives)), st.data())
def test_every_cut_is_sound(name: str, ranks: int, microbatches: int, receives: Receives, data: st.DataObject) -> None:
    """Only forwards run ahead, with all that feeds them. The period lies between running freely and waiting."""
    schedule = zbpipe.generate(name, ranks, microbatches)
    costs = data.draw(cost_models(schedule.placement))
    numbers = ahead_of(schedule, costs)
    rows = lists_of(schedule, receives)
    cut = RunAhead.of(rows, numbers)
    assert [*find_faults(cut)] == []
    whole = tuple((*before, *after) for before, after in zip(cut.before, cut.after, strict=True))
    assert [sorted(row) for row in whole] == [sorted(row) for row in rows]
    assert validate_lowered(whole) == []
    ahead = {op for row, number in zip(schedule, numbers, strict=True) for op in row[:number]}
    assert all(op.kind is OpKind.F and op.stage < schedule.placement.num_stages - 1 for op in ahead)
    assert all(op.stage == 0 or op._replace(stage=op.stage - 1) in ahead for op in ahead)
    timeline = simulate(schedule, costs)
    assert max(timeline.busy) * (1 - 1e-6) <= period(schedule, costs) <= timeline.makespan * (1 + 1e-6)
    assert period(schedule, costs, (0,) * ranks) == pytest.approx(timeline.makespan)


@draw_fewer(2)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 10), st.data())
def test_the_period_is_what_many_steps_take_and_the_validation_holds_up_nothing(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    schedule = zbpipe.generate(name, ranks, microbatches)
    costs = data.draw(cost_models(schedule.placement))
    seconds, ahead = period(schedule, costs), ahead_of(schedule, costs)
    assert period(schedule, costs, ahead) == pytest.approx(seconds, rel=1e-9)
    fewer = tuple(data.draw(st.integers(0, number)) for number in ahead)
    for numbers in (ahead, fewer):
        ends = [max(span.end for span in step.values()) for step in steps_in_a_row(schedule, costs, numbers, 30)]
        mean = (ends[-1] - ends[len(ends) // 2 - 1]) / (len(ends) // 2)
        assert mean == pytest.approx(period(schedule, costs, numbers), rel=1e-4)
        # The steps before all are alike are no longer, so steps in a row never fall behind.
        assert ends[-1] <= ends[0] + (len(ends) - 1) * period(schedule, costs, numbers) * (1 + 1e-9)


@pytest.mark.parametrize("placement", ["v", "wave"])
def test_plans_for_the_period_are_cut_where_they_may_be(placement: str) -> None:
    found = zbpipe.plan(3, 6, (1, 1.2, 0.8), 3, placements=[placement], objective="period", budget=2e5)
    ahead = ahead_of(found.schedule, found.timeline.costs)
    assert any(ahead)
    assert [*find_faults(RunAhead.of(lists_of(found.schedule, Receives.TIMED), ahead))] == []


def test_copies_wait_for_the_validation_and_queues_hide_the_period() -> None:
    schedule = zbpipe.generate("ZBV", 2, 4)
    alone = simulate(schedule, (1, 1, 1))
    assert period_of(alone) == period(schedule, alone.costs) < alone.makespan
    queued = simulate(schedule, (1, 1, 1), transport="one queue")
    assert period_of(queued) == queued.longest_rank_span
    host = Link(0.0, 16.0)
    copied = offload(schedule, CostModel.uniform(schedule.placement, host=host), what="all")
    assert copied.has_copies
    timeline = simulate(copied, CostModel.uniform(schedule.placement, host=host))
    assert period_of(timeline) == timeline.makespan


@pytest.mark.parametrize(
    ("name", "times", "ahead"),
    [("ZBV", (1, 1, 1), (3, 2, 1, 0)), ("ZBV", (1, 1.2, 0.8), (2, 1, 0, 0)), ("1F1B", (1, 1, 1), (0, 0, 0, 0))],
)
def test_no_more_runs_ahead_than_there_is_time_for(name: str, times: tuple[float, ...], ahead: tuple[int, ...]) -> None:
    schedule = zbpipe.generate(name, 4, 8)
    assert ahead_of(schedule, CostModel.uniform(schedule.placement, *times)) == ahead


@pytest.mark.parametrize(
    ("name", "times", "saved"),
    [
        ("ZBV", (1, 1, 1), 1.5 / 25.5),
        ("ZBH2", (1, 1, 1), 3 / 27),
        ("ZBV", (1, 1.2, 0.8), 0.6 / 25.8),
        ("1F1B", (1, 1, 1), 0),
        ("ZBH1", (1, 1, 1), 0),
        ("Interleaved1F1B", (1, 1, 1), 0),
    ],
)
def test_what_is_gained(name: str, times: tuple[float, ...], saved: float) -> None:
    schedule = zbpipe.generate(name, 4, 8)
    assert gain(schedule, CostModel.uniform(schedule.placement, *times)) == pytest.approx(saved, abs=1e-9)
