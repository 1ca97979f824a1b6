"""Shared by all pictures: colours, words, numbers, and the line that summarises a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zbpipe.schedule.ir import OFFLOADS, RELOADS, OpKind, Placement, count_noun
from zbpipe.simulator.timeline import Collective, Span, Timeline

KIND_WORDS = {
    OpKind.F: "forward",
    OpKind.I: "backward for the input",
    OpKind.W: "backward for the weights",
    OpKind.B: "full backward",
    OpKind.OF: "offload for I",
    OpKind.RF: "reload for I",
    OpKind.OI: "offload for W",
    OpKind.RI: "reload for W",
}
COLLECTIVE_WORDS = {
    "gather": "gather of parameters",
    "reduce": "reduction of gradients",
    "fill": "weight gradients in a wait for a collective",
}
UNIT_OF_ACTIVATIONS = "unit: one microbatch on one rank"

_Rgb = tuple[int, int, int]
_SHADES: dict[OpKind, tuple[_Rgb, _Rgb]] = {
    OpKind.F: ((46, 58, 178), (126, 150, 248)),
    OpKind.I: ((178, 92, 0), (255, 226, 92)),
    OpKind.W: ((0, 112, 108), (138, 222, 170)),
    OpKind.B: ((102, 8, 60), (206, 160, 190)),
    OpKind.OF: ((110, 70, 40), (176, 140, 110)),
    OpKind.RF: ((70, 120, 200), (160, 200, 250)),
    OpKind.OI: ((40, 50, 60), (110, 122, 134)),
    OpKind.RI: ((150, 215, 190), (205, 240, 225)),
}
"""The colours of a rank's first and last stage. Colours of a picture stay distinct with every kind of colour blindness,
by hue or by lightness."""
_LANES = (("copies out", OFFLOADS), ("copies in", RELOADS))


@dataclass(frozen=True)
class Theme:
    paper: str
    ink: str
    faint: str
    """Colour of less important text."""
    line: str
    panel: str
    """Background of buttons, and below curves."""
    curve: str
    path: str
    idle: str
    stripe: str
    """Stripes across idle time, so that the bubble is visible at a glance, and distinct from ops without colours."""


LIGHT = Theme("#ffffff", "#1f2328", "#59636e", "#d1d9e0", "#eef1f4", "#2e3ab2", "#d1002f", "#dfe3e8", "#6e7781")
DARK = Theme("#0d1117", "#e6edf3", "#9da7b3", "#3d444d", "#1c232c", "#7e96f8", "#ff6b81", "#262c36", "#8b949e")


class Paint(NamedTuple):
    """The colours of a box as #rrggbb."""

    fill: str
    text: str


def paint(kind: OpKind, nth: int, of: int) -> Paint:
    """The colours of an op on stage `nth` (from 0) `of` its rank's stages. Later stages are paler."""
    share = nth / (of - 1) if of > 1 else 0.0
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(*_SHADES[kind], strict=True))
    fill = f"#{red:02x}{green:02x}{blue:02x}"
    return Paint(fill, max("#000000", "#ffffff", key=lambda text: contrast(fill, text)))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 to 21 (WCAG 2.2, "contrast ratio"). Text needs 4.5, other marks 3."""

    def luminance(colour: str) -> float:
        parts = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
        linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def paints(timeline: Timeline) -> dict[tuple[int, OpKind], Paint]:
    placement = timeline.schedule.placement
    of, present = most_stages(placement), kinds(timeline)
    return {(stage, kind): paint(kind, nth, of) for stage, nth in enumerate(nth_stage(placement)) for kind in present}


def nth_stage(placement: Placement) -> tuple[int, ...]:
    return tuple(placement.stages_on(rank).index(stage) for stage, rank in enumerate(placement.rank_of))


def most_stages(placement: Placement) -> int:
    return max(len(placement.stages_on(rank)) for rank in range(placement.num_ranks))


def kinds(timeline: Timeline) -> tuple[OpKind, ...]:
    return tuple(kind for kind in OpKind if kind in timeline.schedule.kinds)


def lanes(timeline: Timeline, rank: int) -> tuple[tuple[str, tuple[Span | Collective, ...]], ...]:
    """Parallel work of a rank, as (name, boxes): copies out and in, FSDP's collectives, and W's products in waits."""
    found: list[tuple[str, tuple[Span | Collective, ...]]] = []
    if timeline.copies:
        copies = timeline.copies[rank]
        found += [(name, tuple(span for span in copies if span.op.kind in kinds)) for name, kinds in _LANES]
    if any(timeline.collectives):
        found.append(("FSDP", timeline.collectives[rank]))
    if any(timeline.fills):
        found.append(("waits", timeline.fills[rank]))
    return tuple(found)


def kind_of(collective: Collective, timeline: Timeline) -> OpKind:
    """The kind of ops with a collective's colours: F for gathers, W (or B, if there is none) for others."""
    backward = OpKind.W if OpKind.W in kinds(timeline) else OpKind.B
    return OpKind.F if collective.kind == "gather" else backward


def number(value: float) -> str:
    """A number with at most six digits: `25.5`, `4`."""
    return f"{value:.6g}"


def memory(value: float) -> str:
    """Memory in the unit of the costs: `3.5`, or `6.05 GiB`. Values from a mebibyte on are taken as bytes."""
    return f"{value / 2**30:.3g} GiB" if value >= 2**20 else f"{value:.4g}"


def percent(share: float) -> str:
    """A share in percent: `5.9%`. A share below zero by rounding becomes zero."""
    return f"{max(share, 0.0):.1%}"


def size(timeline: Timeline) -> str:
    """`4 ranks, 8 microbatches`, with the stages per rank if several, and the transport if not the ideal one."""
    schedule = timeline.schedule
    stages = most_stages(schedule.placement)
    per_rank = f", {stages} stages per rank" if stages > 1 else ""
    messages = "" if timeline.receives is None else f", {timeline.transport} with {timeline.receives} receives"
    ranks, microbatches = count_noun(schedule.num_ranks, "rank"), count_noun(schedule.num_microbatches, "microbatch")
    return f"{ranks}, {microbatches}{per_rank}{messages}"


def outcome(timeline: Timeline) -> str:
    return (
        f"makespan {number(timeline.makespan)}, bubble {percent(timeline.bubble)},"
        f" peak activations {memory(max(timeline.peak_activations))} ({UNIT_OF_ACTIVATIONS})"
    )


def summary(timeline: Timeline) -> str:
    """One line: `1F1B, 2 ranks, 4 microbatches: makespan 15, bubble 20.0%, peak activations 2 (...)`."""
    return f"{timeline.schedule.name}, {size(timeline)}: {outcome(timeline)}"


def memory_profile(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Activations of `rank` as (start, activations) pairs, in its share of one microbatch, one entry per moment."""
    share = timeline.schedule.placement.sum_by_rank(timeline.costs.activations)[rank] or 1.0
    # Several changes at one moment count only with their result.
    return [(time, held / share) for time, held in dict(timeline.memory(rank)).items()]


def shortest_to_show(timeline: Timeline) -> float:
    """Seconds of the shortest op that a picture has room for. Much shorter ops do not count."""
    lengths = {span.end - span.start for spans in timeline.spans for span in spans}
    longest = max(lengths, default=0.0) or 1.0
    return min((length for length in lengths if length >= longest / 6), default=longest)


def ticks(until: float, most: int) -> Sequence[float]:
    """At most `most` + 1 round, evenly spaced times from 0 to `until`.

    >>> ticks(25.5, most=5)
    (0.0, 10.0, 20.0)
    """
    if until <= 0:
        return (0.0,)
    rough = until / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= rough * (1 - 1e-9))
    return tuple(step * n for n in range(math.floor(until / step * (1 + 1e-9)) + 1))
