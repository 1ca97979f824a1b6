"""Timelines in numbers: records for JSON, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zbpipe.costs import CostModel
from zbpipe.job_costs import JobCosts
from zbpipe.timeline import Timeline
from zbpipe.views.style import UNIT_OF_ACTIVATIONS, memory, most_stages, number, percent, summary

_ROUNDING = 1e-9
"""What floating point may add to a sum of times or activations, as a share of it."""


def record(timeline: Timeline) -> dict[str, Any]:
    """A timeline in numbers: times in seconds, peaks by rank, memory in the unit of the costs' activations."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "stages_per_rank": most_stages(schedule.placement),
        "steps": timeline.num_steps,
        "transport": str(timeline.transport),
        "receives": None if timeline.receives is None else str(timeline.receives),
        "makespan": timeline.makespan,
        "bubble": max(timeline.bubble, 0.0),
        "peak_activations": list(timeline.peak_activations),
        "peak_memory": list(timeline.peak_memory),
        "lower_bound": timeline.lower_bound,
        "longest_rank_span": timeline.longest_rank_span,
        "idle": [idle._asdict() for idle in timeline.idle],
    }


def report(timeline: Timeline) -> str:
    """The record for people: the summary, what bounds the makespan, and a table of the ranks."""
    gap = Standing.of(timeline, None).gap
    rows = [
        (f"rank {rank}", number(busy), *map(_without_rounding, idle), number(peak))
        for rank, (busy, idle, peak) in enumerate(
            zip(timeline.busy, timeline.idle, timeline.peak_activations, strict=True)
        )
    ]
    return "\n".join(
        [
            summary(timeline),
            f"lower bound of the makespan {number(timeline.lower_bound)}, gap {percent(gap)};"
            f" longest time from a rank's first op to its last {number(timeline.longest_rank_span)}",
            "",
            *table(("", "busy", "idle: warm-up", "steady", "cool-down", "peak activations"), rows),
        ]
    )


def costs(job: JobCosts) -> str:
    """Measured costs of stages as a table: milliseconds, and MiB that a stage holds of one microbatch."""
    model = job.costs
    assert isinstance(model, CostModel), "layers have no ranks"
    mebibyte = 2.0**20
    rows = [
        (
            str(stage),
            str(job.placement.rank_of[stage]) if job.placement else "",
            *(f"{1e3 * column[stage]:.3f}" for column in (model.f, model.i, model.w)),
            f"{model.activations[stage] / mebibyte:.2f}",
            f"{model.waits(stage) / mebibyte:.2f}",
        )
        for stage in range(model.num_stages)
    ]
    links = [
        f"rank {sender} to {receiver}: {1e6 * link.latency:.0f} us + {link.bandwidth / 1e9:.2f} GB/s"
        for (sender, receiver), link in sorted(model.links.items())
        if sender < receiver
    ]
    head = ("stage", "rank", "F ms", "I ms", "W ms", "MiB after F", "after I")
    return "\n".join([*table(head, rows), f"{model.message_bytes / mebibyte:.2f} MiB a message; " + "; ".join(links)])


@dataclass(frozen=True)
class Standing:
    """A schedule in a comparison."""

    figures: Mapping[str, Any]
    """Its `record`: many timelines at a time would take too much memory."""
    limits: tuple[float, ...] | None
    """By rank the most activations that it may hold, in the unit of the costs' activations."""

    @classmethod
    def of(cls, timeline: Timeline, limits: tuple[float, ...] | None) -> Standing:
        return cls(record(timeline), limits)

    @property
    def peak(self) -> float:
        return float(max(self.figures["peak_activations"]))

    @property
    def gap(self) -> float:
        """makespan / lower bound - 1."""
        bound: float = self.figures["lower_bound"]
        return max(self.figures["makespan"] / bound - 1, 0.0) if bound else 0.0

    @property
    def fits(self) -> bool:
        return self.broken is None

    @property
    def broken(self) -> float | None:
        """The limit that is exceeded by the most, None if all are kept to."""
        excess = [
            (peak - limit, limit)
            for peak, limit in zip(self.figures["peak_memory"], self.limits or (), strict=bool(self.limits))
            if peak > limit * (1 + _ROUNDING)
        ]
        return max(excess)[1] if excess else None

    @property
    def rank(self) -> tuple[bool, float, float, str]:
        """The lower the better: what fits comes first, then what is short, then what takes little memory."""
        makespan = float(f"{self.figures['makespan']:.9g}")
        return not self.fits, makespan, float(f"{self.peak:.9g}"), self.figures["schedule"].lower()

    def record(self) -> dict[str, Any]:
        return {**self.figures, "gap": self.gap, "fits": self.fits}


def compare(timelines: Iterable[Timeline], limits: tuple[float, ...] | None) -> list[Standing]:
    """The best first; those that exceed the limit of a rank (in the costs' unit of memory) after all others."""
    return sorted((Standing.of(timeline, limits) for timeline in timelines), key=lambda standing: standing.rank)


def comparison(standings: Sequence[Standing]) -> Iterator[str]:
    """The lines of the table, with a mark at what does not fit."""
    rows = [
        (
            standing.figures["schedule"],
            str(standing.figures["stages_per_rank"]),
            number(standing.figures["makespan"]),
            percent(standing.figures["bubble"]),
            number(standing.peak),
            percent(standing.gap),
            *_mark(standing),
        )
        for standing in standings
    ]
    yield from table(("schedule", "stages", "makespan", "bubble", "peak", "gap"), rows)
    yield ""
    yield f"stages: per rank; peak: activations on the worst rank ({UNIT_OF_ACTIVATIONS}); gap: to the lower bound"


def _mark(standing: Standing) -> Iterator[str]:
    if standing.broken is not None:
        yield f"  over the limit of {memory(standing.broken)}"


def beside(plan: Standing, others: Sequence[Standing]) -> Iterator[str]:
    """The lines of a table of a plan among other schedules, with a mark at what does not fit."""
    rows = [
        (
            standing.figures["schedule"],
            str(standing.figures["stages_per_rank"]),
            number(standing.figures["makespan"]),
            "" if standing is plan else longer(standing.figures["makespan"], plan.figures["makespan"]),
            number(standing.figures["longest_rank_span"]),
            percent(standing.figures["bubble"]),
            number(standing.peak),
            *_mark(standing),
        )
        for standing in sorted((plan, *others), key=lambda standing: standing.rank)
    ]
    yield from table(("schedule", "stages", "makespan", "to the plan", "span", "bubble", "peak"), rows)
    yield ""
    yield (
        "stages: per rank; span: the longest time from a rank's first op to its last; peak: activations on the worst"
        f" rank ({UNIT_OF_ACTIVATIONS})"
    )


def longer(time: float, than: float) -> str:
    """By how much: `+3.1%`; nothing where nothing takes time."""
    return f"{time / than - 1:+.1%}" if than else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Aligned lines: the first `left` columns to the left, the others to the right; cells beyond `head` as they are."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return ["  ".join(_aligned(line, widths, left)).rstrip() for line in lines]


def _aligned(line: Sequence[str], widths: Sequence[int], left: int) -> Iterator[str]:
    for column, cell in enumerate(line):
        width = widths[column] if column < len(widths) else 0
        yield cell.ljust(width) if column < left else cell.rjust(width)


def _without_rounding(time: float) -> str:
    return number(round(time, 9))
