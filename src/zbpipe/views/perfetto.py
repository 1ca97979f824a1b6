"""Timelines as a trace-event file for ui.perfetto.dev and chrome://tracing: a process per rank."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from zbpipe.schedule.ir import OpKind, inputs
from zbpipe.simulator.timeline import Collective, Span, Timeline
from zbpipe.views.style import lanes, memory_profile, summary

_MICROSECONDS = 1e6

_Event = dict[str, Any]


def perfetto(timeline: Timeline, **others: Timeline) -> str:
    """JSON in the trace-event format, times in microseconds.

    Each rank is a process with an event per op, threads for copies and collectives, and a counter of activations in its
    share of one microbatch. Arrows lead from each op to the one on another rank that takes its result.
    `perfetto(planned, measured=...)` adds a row with the name `measured` below each rank.
    """
    every = {"": timeline, **others}
    rows = [_Row(each, name, nth, len(every)) for nth, (name, each) in enumerate(every.items())]
    events = [
        event for rank in range(len(timeline.spans)) for row in rows for event in (*_names(row, rank), *_ops(row, rank))
    ]
    return json.dumps(
        {
            "displayTimeUnit": "ms",
            "otherData": {name or "summary": summary(each) for name, each in every.items()},
            "traceEvents": [*events, *(event for row in rows for event in _transfers(row))],
        },
        separators=(",", ":"),
    )


def write_perfetto(file: str | Path, timeline: Timeline, **others: Timeline) -> None:
    """Write `perfetto(timeline, **others)` to a file, compressed to a tenth or less if its name ends in `.gz`."""
    data = perfetto(timeline, **others).encode()
    # No time of writing, so that the same timeline gives the same file.
    Path(file).write_bytes(gzip.compress(data, mtime=0) if Path(file).suffix == ".gz" else data)


class _Row(NamedTuple):
    timeline: Timeline
    name: str
    nth: int
    of: int

    def process(self, rank: int) -> int:
        return rank * self.of + self.nth


def _names(row: _Row, rank: int) -> Iterator[_Event]:
    process = row.process(rank)
    name = f"rank {rank} {row.name}".strip()
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    names = ("compute", *(name for name, _ in lanes(row.timeline, rank)))
    for thread, name in enumerate(names):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _ops(row: _Row, rank: int) -> Iterator[_Event]:
    other_boxes = (boxes for _, boxes in lanes(row.timeline, rank))
    for thread, boxes in enumerate((row.timeline.spans[rank], *other_boxes)):
        for box in boxes:
            times = {"ts": box.start * _MICROSECONDS, "dur": (box.end - box.start) * _MICROSECONDS}
            yield {"ph": "X", "pid": row.process(rank), "tid": thread, **times, **_describe(box)}
    for time, held in memory_profile(row.timeline, rank):
        counter = {"name": "activations", "ts": time * _MICROSECONDS, "args": {"held": held}}
        yield {"ph": "C", "pid": row.process(rank), **counter}


def _describe(box: Span | Collective) -> _Event:
    if isinstance(box, Span):
        stage, kind, microbatch = box.op
        about = {"stage": stage, "microbatch": microbatch, "kind": str(kind)}
        return {"name": str(box.op), "cat": str(kind), "args": about}
    return {"name": str(box), "cat": box.kind, "args": {"stage": box.stage, "kind": box.kind}}


def _transfers(row: _Row) -> Iterator[_Event]:
    """Two flow events per message between ranks. Each binds to the box at its time, so both use starts."""
    rank_of = row.timeline.schedule.placement.rank_of
    spans = {span.op: span for spans in row.timeline.spans for span in spans}
    messages = (
        (giver, span)
        for span in spans.values()
        for op in chain.from_iterable(inputs(span.op, len(rank_of)))
        if (giver := spans.get(op)) and rank_of[op.stage] != rank_of[span.op.stage]
    )
    for number, (giver, taker) in enumerate(messages):
        arrow = number * row.of + row.nth
        yield _flow("s", arrow, giver, row.process(rank_of[giver.op.stage]))
        yield _flow("f", arrow, taker, row.process(rank_of[taker.op.stage])) | {"bp": "e"}


def _flow(phase: str, number: int, span: Span, process: int) -> _Event:
    about = {"name": "activation" if span.op.kind is OpKind.F else "gradient", "cat": "transfer"}
    return {"ph": phase, "id": number, "pid": process, "tid": 0, **about, "ts": span.start * _MICROSECONDS}
