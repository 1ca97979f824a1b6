"""What all pictures share: colours, words, numbers, and the line that sums a timeline up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zbpipe.ir import OpKind, Placement
from zbpipe.timeline import Timeline

KIND_WORDS = {
    OpKind.F: "forward",
    OpKind.I: "backward for the input",
    OpKind.W: "backward for the weights",
    OpKind.B: "full backward",
}
UNIT_OF_ACTIVATIONS = "1 = a rank's share of one microbatch"

_Rgb = tuple[int, int, int]
# Apart from each other with every common kind of colour blindness, and in grey.
_BASE: dict[OpKind, _Rgb] = {
    OpKind.F: (44, 107, 178),
    OpKind.I: (240, 158, 46),
    OpKind.W: (33, 145, 106),
    OpKind.B: (170, 62, 134),
}
_PALEST = 0.5
"""How far the last stage of a rank fades towards white."""


class Paint(NamedTuple):
    """The colours of a box as #rrggbb."""

    fill: str
    text: str


def paint(kind: OpKind, nth: int, of: int) -> Paint:
    """The colours of an op of the `nth` (from 0) `of` so many stages of its rank: the later, the paler."""
    fade = _PALEST * nth / (of - 1) if of > 1 else 0.0
    red, green, blue = (round(part + (255 - part) * fade) for part in _BASE[kind])
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    return Paint(f"#{red:02x}{green:02x}{blue:02x}", "#1c1c1c" if luminance > 140 else "#ffffff")


def paints(timeline: Timeline) -> dict[tuple[int, OpKind], Paint]:
    """The colours of all ops by stage and kind."""
    placement = timeline.schedule.placement
    of, present = most_stages(placement), kinds(timeline)
    return {(stage, kind): paint(kind, nth, of) for stage, nth in enumerate(nth_stage(placement)) for kind in present}


def nth_stage(placement: Placement) -> tuple[int, ...]:
    """By stage: which of its rank's stages it is, from 0."""
    return tuple(placement.stages_on(rank).index(stage) for stage, rank in enumerate(placement.rank_of))


def most_stages(placement: Placement) -> int:
    """How many stages the rank with the most has."""
    return max(len(placement.stages_on(rank)) for rank in range(placement.num_ranks))


def kinds(timeline: Timeline) -> tuple[OpKind, ...]:
    """The kinds of ops that occur."""
    present = {op.kind for ops in timeline.schedule for op in ops}
    return tuple(kind for kind in OpKind if kind in present)


def number(value: float) -> str:
    """Six digits at most, none to spare: `25.5`, `4`."""
    return f"{value:.6g}"


def memory(value: float) -> str:
    """In the unit of the costs' activations: `3.5`, or `6.05 GiB`. A mebibyte and more can only be bytes."""
    return f"{value / 2**30:.3g} GiB" if value >= 2**20 else number(value)


def percent(share: float) -> str:
    """`5.9%`; a share that rounding errors took below zero is zero."""
    return f"{max(share, 0.0):.1%}"


def counted(count: int, thing: str) -> str:
    """`1 rank`, `4 ranks`, `8 microbatches`."""
    plural = "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{'' if count == 1 else plural}"


def size(timeline: Timeline) -> str:
    """`4 ranks, 8 microbatches`, how many stages a rank where it is not one, and how messages go unless ideally."""
    schedule = timeline.schedule
    stages = most_stages(schedule.placement)
    per_rank = f", {stages} stages per rank" if stages > 1 else ""
    messages = "" if timeline.receives is None else f", {timeline.transport} with {timeline.receives} receives"
    ranks, microbatches = counted(schedule.num_ranks, "rank"), counted(schedule.num_microbatches, "microbatch")
    return f"{ranks}, {microbatches}{per_rank}{messages}"


def outcome(timeline: Timeline) -> str:
    """Makespan, bubble, and the peak of activations on the worst rank."""
    return (
        f"makespan {number(timeline.makespan)}, bubble {percent(timeline.bubble)},"
        f" peak activations {number(max(timeline.peak_activations))} ({UNIT_OF_ACTIVATIONS})"
    )


def summary(timeline: Timeline) -> str:
    """One line: the schedule, its size, and its outcome."""
    return f"{timeline.schedule.name}, {size(timeline)}: {outcome(timeline)}"


def memory_profile(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """(from when on, how much) activations `rank` holds, in its share of one microbatch; one entry per moment."""
    stages = timeline.schedule.placement.stages_on(rank)
    share = sum(timeline.costs.activations[stage] for stage in stages) or 1.0
    # Of several changes at one moment only the outcome is to be seen.
    return [(time, held / share) for time, held in dict(timeline.memory(rank)).items()]


def shortest_to_show(timeline: Timeline) -> float:
    """Seconds of the shortest op that a picture makes room for; one that is far below the longest gets no say."""
    lengths = {span.end - span.start for spans in timeline.spans for span in spans}
    longest = max(lengths, default=0.0) or 1.0
    return min((length for length in lengths if length >= longest / 6), default=longest)


def ticks(until: float, most: int) -> Sequence[float]:
    """At most `most` + 1 round times from 0 to `until`, evenly apart."""
    if until <= 0:
        return (0.0,)
    rough = until / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= rough * (1 - 1e-9))
    return tuple(step * n for n in range(math.floor(until / step * (1 + 1e-9)) + 1))
