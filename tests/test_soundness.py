"""Fast checks say of every table what the checks that list its faults say, whose words are slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from broken import Broken, broken_schedules
from hypothesis import given
from test_actions import lowered_runtime

from zbpipe import Op, Schedule, generate, testing, validate
from zbpipe.runtime._torch.pipelining import rows_of
from zbpipe.simulator.actions import COMPUTE, Rows, parse
from zbpipe.simulator.message_checks import are_sound, find_blocked_queues, validate_lowered
from zbpipe.simulator.passes import add_messages, add_waits
from zbpipe.simulator.validation import _find_faults, _is_sound


@given(testing.runnable_schedules())
def test_what_runs_is_sound(schedule: Schedule) -> None:
    assert _is_sound(schedule)
    for rows in (add_messages(schedule), add_waits(add_messages(schedule)), rows_of(lowered_runtime(schedule))):
        assert are_sound(rows, schedule)
        assert validate_lowered(rows) + find_blocked_queues(rows) == []


@given(broken_schedules())
def test_what_is_broken_is_not(broken: Broken) -> None:
    if broken.rule != "memory":
        assert not _is_sound(broken.schedule), broken.rule


def changed_rows(rows: Rows | tuple[tuple[Op, ...], ...]) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """Each item lost, doubled at each place, or changed with each other one of its rank."""
    for rank, row in enumerate(rows):
        for place, item in enumerate(row):
            lost = (*row[:place], *row[place + 1 :])
            doubled = [(*row[:other], item, *row[other:]) for other in range(len(row) + 1)]
            moved = [(*lost[:other], item, *lost[other:]) for other in range(len(row))]
            for each in (lost, *doubled, *moved):
                yield (*rows[:rank], each, *rows[rank + 1 :])


@pytest.mark.parametrize(("name", "microbatches"), [("ZBV", 2), ("1F1B", 3)])
def test_ops_that_are_lost_doubled_or_moved(name: str, microbatches: int) -> None:
    schedule = generate(name, 2, microbatches)
    seen = set()
    for rows in changed_rows(schedule.ops):
        other = Schedule("other", schedule.placement, microbatches, rows)
        assert _is_sound(other) == (not list(_find_faults(other))), rows
        assert bool(validate(other)) == bool(list(_find_faults(other)))
        seen.add(_is_sound(other))
    assert seen == {True, False}


@pytest.mark.parametrize(("name", "microbatches"), [("ZBV", 1), ("1F1B", 2)])
def test_messages_that_are_lost_doubled_or_moved(name: str, microbatches: int) -> None:
    schedule = generate(name, 2, microbatches)
    seen = set()
    computed = [[each for each in row if each.kind in COMPUTE] for row in add_messages(schedule)]
    for rows in changed_rows(rows_of(lowered_runtime(schedule))):
        words = findings_of_messages(rows)
        is_another = [[each for each in row if each.kind in COMPUTE] for row in rows] != computed
        assert are_sound(rows, schedule) == (not words and not is_another), words
        seen.add(are_sound(rows, schedule))
    assert seen == {True, False}


def findings_of_messages(rows: Rows) -> list[Any]:
    try:
        return validate_lowered(rows) or find_blocked_queues(rows)
    except ValueError as error:  # it is no schedule
        return [error]


@pytest.mark.parametrize(
    "doubled",
    [("0SEND_F0", "1RECV_F0"), ("0SEND_B1", "1RECV_B1"), ("1SEND_F0", "0RECV_F0"), ("0SEND_F5", "1RECV_F5")],
)
def test_messages_that_are_doubled_or_foreign_at_both_ends(doubled: tuple[str, str]) -> None:
    schedule = generate("1F1B", 2, 2)
    rows = tuple(
        (*row, *parse(each)[0])
        for row, each in zip(add_messages(schedule), sorted(doubled, key=lambda each: each[0]), strict=True)
    )
    assert validate_lowered(rows)
    assert not are_sound(rows, schedule)


def test_messages_that_wait_in_a_cycle() -> None:
    """Each rank sends before it receives, which sends that block nobody would survive."""
    table = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    rows, schedule = parse(table), generate("1F1B", 2, 2)
    assert validate_lowered(rows) == []
    assert find_blocked_queues(rows)
    assert not are_sound(rows, schedule)
