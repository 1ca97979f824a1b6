"""Checks that lists with messages reach their end if messages go one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from zbpipe.costs.transport import Transport
from zbpipe.schedule import tables
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.actions import COMPUTE, RECEIVES, SENDS, Action, Rows, action_of, find_ungathered, sends_by_action
from zbpipe.simulator.graph import TimeGraph
from zbpipe.simulator.validation import Finding

_ENDS = frozenset((*SENDS, *RECEIVES))
_MESSAGES = frozenset(tables.MESSAGES)


def find_blocked_queues(rows: Rows) -> list[Finding]:
    """A cycle of messages that wait for each other if each rank sends and receives one at a time, in order.

    Each message begins when the computations before it are over, and lasts until both ends have met. The table must
    have no findings of `validate_lowered`.
    """
    cycle = TimeGraph(Schedule.from_actions(rows, ""), Transport.ONE_QUEUE, rows).find_cycle()
    if not cycle:
        return []
    rank = next(rank for rank, row in enumerate(rows) if cycle[0] in row)
    text = "messages wait for each other: " + " before ".join(map(str, cycle))
    return [Finding("deadlock", rank, rows[rank].index(cycle[0]), cycle[0], text)]


def are_sound(rows: Rows, schedule: Schedule) -> bool:
    """Whether `rows` are the valid `schedule` with messages, one queue per rank, and run to their end.

    Then `validate_lowered` and `find_blocked_queues` find nothing. They take ten times as long.
    """
    rank_of, microbatches = schedule.placement.rank_of, range(schedule.num_microbatches)
    sends = sends_by_action(rank_of)
    for rank, (row, ops) in enumerate(zip(rows, schedule, strict=True)):
        if [each for each in row if each.kind in COMPUTE] != list(map(action_of, ops)):
            return False
        mine = [(stage, kind) for stage, kind in sends if rank_of[stage] == rank and kind not in COMPUTE]
        expected = {(stage, kind, each) for stage, kind in mine for each in microbatches}
        found = [each for each in row if each.kind in _MESSAGES]
        there = set(found)
        if len(found) > len(there) or not there <= expected or any(each[1] in _ENDS for each in expected - there):
            return False
    if any(_sent_early(row) for row in rows):
        return False
    blocked = TimeGraph(schedule, Transport.ONE_QUEUE, rows).find_cycle()
    return not blocked and next(find_ungathered(rows), None) is None


def _sent_early(row: Sequence[Action]) -> bool:
    """Whether a result is sent before it is computed."""
    made: set[tuple[int, str, int]] = set()
    for stage, kind, microbatch in row:
        if kind in COMPUTE:
            if kind != "W":
                made.add((stage, "SEND_F" if kind == "F" else "SEND_B", microbatch))
        elif kind in SENDS and (stage, kind, microbatch) not in made:
            return True
    return False
