"""Messages that a rank holds: how many there are at a time, by its list and in a run."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpipe import Schedule, generate, simulate, testing
from zbpipe.costs.model import Receives
from zbpipe.simulator.actions import Action, Rows, other_end
from zbpipe.simulator.passes import (
    add_messages,
    add_waits,
    default_costs,
    free_sends_early,
    messages_held,
    place_receives,
)
from zbpipe.simulator.validation import validate_lowered


@st.composite
def lists(draw: st.DrawFn) -> tuple[Schedule, Rows]:
    """Of any schedule in any order, with receives in any place, as the runtime would have them."""
    schedule = draw(testing.runnable_schedules())
    timeline = simulate(schedule, draw(testing.cost_models(schedule.placement)))
    rows = place_receives(add_messages(schedule), draw(st.sampled_from(Receives)), timeline)
    rows = add_waits(rows)
    return schedule, free_sends_early(rows, schedule.placement) if draw(st.booleans()) else rows


def lists_of(name: str, ranks: int, microbatches: int, receives: Receives = Receives.EARLY) -> Rows:
    schedule = generate(name, ranks, microbatches)
    timeline = simulate(schedule, default_costs(schedule.placement))
    return free_sends_early(add_waits(place_receives(add_messages(schedule), receives, timeline)), schedule.placement)


def lives(schedule: Schedule, rows: Rows) -> Iterator[tuple[int, int, int]]:
    """For each message: a rank, and the first and the last place in its list where it holds the message."""
    places = {each: (rank, n) for rank, row in enumerate(rows) for n, each in enumerate(row)}
    rank_of = schedule.placement.rank_of

    def backward(stage: int, microbatch: int) -> Action:
        return next(each for kind in "IB" if (each := Action(stage, kind, microbatch)) in places)

    for here, (rank, place) in places.items():
        stage, kind, microbatch = here
        step = {"F": 1, "I": -1, "B": -1}.get(kind, 0)
        if not step or not 0 <= stage + step < len(rank_of):
            continue
        taker = Action(stage + 1, "F", microbatch) if step > 0 else backward(stage - 1, microbatch)
        rank_there, taken = places[taker]
        last = taken - 1
        if rank_there == rank:
            yield rank, place + 1, last
            continue
        way = "F" if step > 0 else "B"
        yield rank, place + 1, places[Action(stage, f"WAIT_SEND_{way}", microbatch)][1]
        yield rank_there, places[other_end(Action(stage, f"SEND_{way}", microbatch))][1], last


@given(lists())
def test_every_message_counts_while_it_lives(drawn: tuple[Schedule, Rows]) -> None:
    schedule, rows = drawn
    assert validate_lowered(rows) == []
    expected = [[0] * len(row) for row in rows]
    for rank, first, last in lives(schedule, rows):
        for place in range(first, last + 1):
            expected[rank][place] += 1
    assert messages_held(rows) == tuple(map(tuple, expected))


@pytest.mark.parametrize(("name", "most"), [("ZBV", 8), ("VHalf", 5), ("VMin", 4), ("ZBH1", 5)])
def test_messages_held_do_not_grow_with_the_microbatches(name: str, most: int) -> None:
    for microbatches in (16, 64):
        assert max(map(max, messages_held(lists_of(name, 4, microbatches)))) == most
    # Without early waits the sent ones stay.
    schedule = generate(name, 4, 16)
    assert max(map(max, messages_held(add_messages(schedule)))) >= 16


@given(lists())
def test_waits_are_added_once(drawn: tuple[Schedule, Rows]) -> None:
    _, rows = drawn
    assert add_waits(rows) == rows
