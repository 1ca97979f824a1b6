"""Queues of messages like NCCL's: what the checks call blocked is what hangs, and nothing else.

tests/test_interleavings.py trains all schedules on the queues of benchmarks/fifo.py, tests/test_gpu.py real processes.
"""

import pytest
import torch
from fifo import BACKENDS, spoil
from hypothesis import example, given, settings
from queued_messages import gets_stuck, tables

from zbpipe import Schedule
from zbpipe.costs.model import Transport
from zbpipe.simulator.actions import Rows, parse
from zbpipe.simulator.time_graph import TimeGraph
from zbpipe.simulator.validation import find_blocked_queues, validate_lowered

pytestmark = pytest.mark.long

ONE_QUEUE, PER_PEER, PER_EDGE = BACKENDS
TURNS = parse(
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
)
"""Each rank sends before it receives: gloo runs that, and so do queues per edge."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool])
def test_whatever_is_received_can_be_spoiled(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    spoil(tensor)
    assert not (tensor == 0).any()


def test_what_is_called_blocked_gets_stuck_and_nothing_else() -> None:
    """Of tables that are sound without queues. With a queue for each edge none gets stuck."""
    seen: list[bool] = []

    @settings(max_examples=200)
    @example(TURNS)
    @given(tables())
    def compare(rows: Rows) -> None:
        assert validate_lowered(rows) == []
        seen.append(gets_stuck(rows, ONE_QUEUE))
        assert bool(find_blocked_queues(rows)) == seen[-1]
        graph = TimeGraph(Schedule.from_actions(rows, ""), Transport.QUEUE_PER_PEER, rows)
        assert bool(graph.find_cycle()) == gets_stuck(rows, PER_PEER)
        assert not gets_stuck(rows, PER_EDGE)

    compare()
    assert 3 < sum(seen) < len(seen) - 3
