"""A timeline as a trace-event file for ui.perfetto.dev and chrome://tracing: a process per rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from zbpipe.ir import Op, OpKind
from zbpipe.simulate import Span, Timeline
from zbpipe.views.style import memory_profile, summary

_MICROSECONDS = 1e6
"""In a second."""

_Event = dict[str, Any]


def perfetto(timeline: Timeline) -> str:
    """JSON in the trace-event format, times in microseconds.

    Per rank one process with a complete event per op, named in torch's text form (`3F0`), and a counter of the
    activations that it holds, in its share of one microbatch. Arrows lead from each op to the one on another rank that
    takes its result.
    """
    events = [
        event
        for rank in range(len(timeline.spans))
        for event in (*_names(rank), *_ops(timeline, rank), *_memory(timeline, rank))
    ]
    return json.dumps(
        {
            "displayTimeUnit": "ms",
            "otherData": {"summary": summary(timeline)},
            "traceEvents": [*events, *_transfers(timeline)],
        }
    )


def _names(rank: int) -> Iterator[_Event]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "compute"}}


def _ops(timeline: Timeline, rank: int) -> Iterator[_Event]:
    for span in timeline.spans[rank]:
        stage, kind, microbatch = span.op
        yield {
            "ph": "X",
            "pid": rank,
            "tid": 0,
            "name": str(span.op),
            "cat": str(kind),
            "ts": span.start * _MICROSECONDS,
            "dur": (span.end - span.start) * _MICROSECONDS,
            "args": {"stage": stage, "microbatch": microbatch, "kind": str(kind), "step": span.step},
        }


def _memory(timeline: Timeline, rank: int) -> Iterator[_Event]:
    for time, held in memory_profile(timeline, rank):
        yield {"ph": "C", "pid": rank, "name": "activations", "ts": time * _MICROSECONDS, "args": {"held": held}}


def _transfers(timeline: Timeline) -> Iterator[_Event]:
    """Two flow events per message between ranks. Each binds to the box in which it lies, hence the starts."""
    rank_of = timeline.schedule.placement.rank_of
    spans = {(span.step, span.op): span for row in timeline.spans for span in row}
    messages = (
        (span, taker)
        for span in spans.values()
        for op in _takers(span.op)
        if (taker := spans.get((span.step, op))) and rank_of[op.stage] != rank_of[span.op.stage]
    )
    for number, (giver, taker) in enumerate(messages):
        yield _flow("s", number, giver, rank_of[giver.op.stage])
        yield _flow("f", number, taker, rank_of[taker.op.stage]) | {"bp": "e"}


def _takers(op: Op) -> tuple[Op, ...]:
    """Which ops take what `op` hands to the neighbouring stage; of I and B a schedule has one."""
    match op.kind:
        case OpKind.F:
            return (Op(op.stage + 1, OpKind.F, op.microbatch),)
        case OpKind.I | OpKind.B:
            return tuple(Op(op.stage - 1, kind, op.microbatch) for kind in (OpKind.I, OpKind.B))
        case OpKind.W:
            return ()


def _flow(phase: str, number: int, span: Span, rank: int) -> _Event:
    name = "activation" if span.op.kind is OpKind.F else "gradient"
    return {
        "ph": phase,
        "id": number,
        "pid": rank,
        "tid": 0,
        "name": name,
        "cat": "transfer",
        "ts": span.start * _MICROSECONDS,
    }
