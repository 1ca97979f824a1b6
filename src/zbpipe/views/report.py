"""Timelines in numbers: records for JSON, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from zbpipe.costs.job import JobCosts
from zbpipe.costs.model import ROUNDING, CostModel
from zbpipe.costs.transformer import NOTE, Checkpointing, has_torchs_split, runs_torchs_split
from zbpipe.schedule.registry import schedules
from zbpipe.simulator.simulation import exposed_fsdp, period_of, price_of_resharding
from zbpipe.simulator.timeline import Timeline
from zbpipe.views.style import memory, most_stages, number, percent, summary


def record(timeline: Timeline, baseline: float | None = None, *, with_period: bool = True) -> dict[str, Any]:
    """A timeline in numbers: times in seconds, peaks by rank, memory in the unit of the costs' activations. Computing
    the period takes longer than the rest. `memory_to_1f1b` is the worst rank's peak relative to `baseline`."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "stages_per_rank": most_stages(schedule.placement),
        "transport": str(timeline.transport),
        "receives": None if timeline.receives is None else str(timeline.receives),
        "makespan": timeline.makespan,
        "bubble": max(timeline.bubble, 0.0),
        "peak_activations": list(timeline.peak_activations),
        "peak_memory": list(timeline.peak_memory),
        "memory_to_1f1b": max(timeline.peak_memory) / baseline if baseline else None,
        "lower_bound": timeline.lower_bound,
        "exposed_fsdp": exposed_fsdp(timeline),
        **({"period": period_of(timeline)} if with_period else {}),
        "idle": [idle._asdict() for idle in timeline.idle],
    }


def report(timeline: Timeline, baseline: float | None = None) -> str:
    """The summary, the memory relative to 1F1B, the bounds, and a table of the ranks.

    >>> print(report(zbpipe.simulate(zbpipe.generate("ZBV", 4, 8), (1, 1, 1))).splitlines()[0])
    ZBV, 4 ranks, 8 microbatches, 2 stages per rank: makespan 25.5, bubble 5.9%, ...
    """
    compared = ComparedSchedule.of(timeline, None, baseline)
    peaks = timeline.peak_memory
    rows = [
        (f"rank {rank}", number(busy), *(number(round(time, 9)) for time in idle), memory(peak))
        for rank, (busy, idle, peak) in enumerate(zip(timeline.busy, timeline.idle, peaks, strict=True))
    ]
    to_1f1b = f", {compared.memory} of 1F1B's worst rank ({memory(baseline)})" if baseline else ""
    return "\n".join(
        [
            summary(timeline),
            f"memory: the worst rank holds {memory(max(peaks))}{to_1f1b}",
            f"lower bound of the makespan {number(timeline.lower_bound)}, gap {percent(compared.gap)};"
            f" period with zbpipe.OptimizerStep {number(compared.figures['period'])}",
            *tell_fsdp(timeline),
            "",
            *table(("", "busy", "idle: warm-up", "steady", "cool-down", "peak"), rows),
        ]
    )


def tell_fsdp(timeline: Timeline) -> Iterator[str]:
    """A sentence on FSDP's collectives, and one on resharding, if there are collectives."""
    if any(timeline.collectives):
        busiest = max(sum(each.end - each.start for each in row) for row in timeline.collectives)
        exposed = exposed_fsdp(timeline)
        yield f"FSDP's collectives on the busiest rank: {number(busiest)}, exposed {number(exposed)}"
    if any(timeline.gathers):
        price = max(price_of_resharding(timeline), 0.0)
        yield f"without gathered parameters between ops (--zbpipe.fsdp-mode reshard): at least {price:.1%} longer"


def costs(job: JobCosts) -> str:
    """Measured costs of stages as a table: milliseconds, and MiB of one microbatch on a stage."""
    model = job.costs
    assert isinstance(model, CostModel), "layers have no ranks"
    mebibyte = 2.0**20
    rows = [
        (
            *(str(stage), str(job.placement.rank_of[stage]) if job.placement else ""),
            *(f"{1e3 * column[stage]:.3f}" for column in (model.f, model.i, model.w)),
            *(f"{size / mebibyte:.2f}" for size in (model.activations[stage], model.of(stage, "W").frees)),
        )
        for stage in range(model.num_stages)
    ]
    ways = {f"rank {one} to {other}": link for (one, other), link in model.links.items() if one < other}
    if model.host:
        ways["to the host"] = model.host
    words = [f"{model.message_bytes / mebibyte:.2f} MiB per message"]
    words += [f"{way}: {1e6 * link.latency:.0f} us + {link.bandwidth / 1e9:.2f} GB/s" for way, link in ways.items()]
    if model.overhead:
        words.append(f"{1e3 * model.overhead:.3f} ms between ops")
    for verb, given in (("gathers", model.gather), ("reduces", model.reduce)):
        if given:
            words.append(f"FSDP {verb} a stage in up to {1e3 * max(model.by_stage(given)):.3f} ms")
    head = ("stage", "rank", "F ms", "I ms", "W ms", "MiB after F", "after I")
    return "\n".join([*table(head, rows), "; ".join(words)])


@dataclass(frozen=True)
class ComparedSchedule:
    """A table's figures of one schedule. None as checkpointing means unknown."""

    figures: Mapping[str, Any]
    """Its `record`, because many timelines would take too much memory."""
    limits: tuple[float, ...] | None
    """Memory limit of each rank, in the unit of the costs' activations."""
    source: str
    """Owner of the class that runs it: "torch" or "zbpipe"."""
    has_torchs_split: bool
    runs: bool
    """Whether it can run with the job's checkpointing, as fast as simulated."""

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        limits: tuple[float, ...] | None,
        baseline: float | None = None,
        checkpointing: Checkpointing | None = None,
        *,
        with_period: bool = True,
    ) -> ComparedSchedule:
        algorithm = schedules().get(timeline.schedule.name.lower())
        source = "zbpipe" if algorithm is None else algorithm.source
        torchs = has_torchs_split(timeline.schedule, source)
        runs = not torchs or runs_torchs_split(checkpointing)
        figures = record(timeline, baseline, with_period=with_period)
        return cls(figures, limits, source, torchs, runs)

    @property
    def peak(self) -> float:
        """Peak of the worst rank, in the unit of the costs' activations."""
        return float(max(self.figures["peak_memory"]))

    @property
    def memory(self) -> str:
        """The peak relative to that of 1F1B's worst rank: `1.94x`."""
        share = self.figures["memory_to_1f1b"]
        return "" if share is None else f"{share:.2f}x"

    @property
    def gap(self) -> float:
        """makespan / lower bound - 1."""
        bound: float = self.figures["lower_bound"]
        return max(self.figures["makespan"] / bound - 1, 0.0) if bound else 0.0

    @property
    def broken(self) -> float | None:
        """The limit that is exceeded by the most. None if all are kept."""
        excess = [
            (peak - limit, limit)
            for peak, limit in zip(self.figures["peak_memory"], self.limits or (), strict=bool(self.limits))
            if peak > limit * (1 + ROUNDING)
        ]
        return max(excess)[1] if excess else None

    @property
    def sort_key(self) -> tuple[bool, bool, float, float, bool, str]:
        """Key for sorting, best first: schedules that can run, then fit, then short, small, and with zbpipe's split."""
        makespan, peak = float(f"{self.figures['makespan']:.9g}"), float(f"{self.peak:.9g}")
        name = self.figures["schedule"].lower()
        return not self.runs, self.broken is not None, makespan, peak, self.has_torchs_split, name

    @property
    def is_within(self) -> bool:
        """Whether it can run within the limits. Without limits: in about 1F1B's memory."""
        share = self.figures["memory_to_1f1b"]
        fits = self.broken is None if self.limits else share is not None and share <= _AS_SMALL * (1 + ROUNDING)
        return self.runs and fits

    def record(self) -> dict[str, Any]:
        own = {"source": self.source, "gap": self.gap, "fits": self.broken is None, "runs": self.runs}
        return {**self.figures, **own}


def records(compared: Sequence[ComparedSchedule]) -> list[dict[str, Any]]:
    """Sorted schedules for JSON: figures, steps relative to the baselines, and which one is recommended."""
    chosen, steps = recommend(compared), _steps(compared)

    def relative(step: float) -> dict[str, float | None]:
        return {f"step_to_{name.lower()}": step / steps[name] if steps.get(name) else None for name in _BASELINES}

    relatives = (relative(each.figures["makespan"]) | {"recommended": each is chosen} for each in compared)
    return [each.record() | more for each, more in zip(compared, relatives, strict=True)]


def recommend(compared: Iterable[ComparedSchedule]) -> ComparedSchedule | None:
    """The shortest that is within its limits, or ZB if it is about as short. `compared` has the best first."""
    within = [each for each in compared if each.is_within]
    shortest = [each for each in within if each.sort_key[2] <= _AS_SMALL * within[0].sort_key[2]]
    return next((each for each in shortest if each.figures["schedule"] == "ZB"), next(iter(within), None))


def _steps(compared: Iterable[ComparedSchedule]) -> dict[str, float]:
    return {each.figures["schedule"]: each.figures["makespan"] for each in compared}


_AS_SMALL = 1.02
"""Memory relative to 1F1B's, or a step relative to the shortest, that still counts as the same."""
_BASELINES = ("1F1B", "Interleaved1F1B")


def comparison(compared: Iterable[ComparedSchedule], plan: ComparedSchedule | None = None) -> Iterator[str]:
    """Table lines, the best schedule first. With a `plan`, they show how much longer the other schedules take.
    Otherwise they show the steps relative to the baselines, and the recommended schedule."""
    best_first = sorted(compared, key=lambda each: each.sort_key)
    steps = _steps(best_first)
    chosen = recommend(best_first) if plan is None else None

    def cells(each: ComparedSchedule) -> Iterator[str]:
        yield each.figures["schedule"]
        yield each.source + "*" * each.has_torchs_split
        yield str(each.figures["stages_per_rank"])
        yield number(each.figures["makespan"])
        if plan is None:
            yield from (longer(each.figures["makespan"], steps[name]) if name in steps else "" for name in _BASELINES)
        else:
            yield "" if each is plan else longer(each.figures["makespan"], plan.figures["makespan"])
            yield number(each.figures["period"])
        yield percent(each.figures["bubble"])
        yield each.memory
        yield memory(each.peak)
        if plan is None:
            yield percent(each.gap)
        if each.broken is not None:
            yield f"  over the limit of {memory(each.broken)}"
        elif each is chosen:
            yield "  recommended"

    if plan is None:
        heads = (*(f"vs {name}" for name in _BASELINES), "bubble", "memory", "peak", "gap")
        more = "gap: distance from the lower bound; vs: the step relative to that of 1F1B or Interleaved1F1B"
    else:
        heads = ("to the plan", "period", "bubble", "memory", "peak")
        more = "period: from step to step with zbpipe.OptimizerStep"
    heads = ("schedule", "from", "stages", "makespan", *heads)
    yield from table(heads, [tuple(cells(each)) for each in best_first], left=2)
    yield ""
    yield f"{_LEGEND}; {more}"
    if chosen is not None:
        within = "the memory limit" if chosen.limits else f"{_AS_SMALL}x of 1F1B's memory"
        yield f"recommended: the shortest step within {within}; ZB if it is at most {_AS_SMALL - 1:.0%} longer"
    if any(each.has_torchs_split for each in best_first):
        yield NOTE


_LEGEND = (
    "from: whose class runs it; stages: per rank (--stages-per-rank in other commands); memory: of the worst rank,"
    " relative to 1F1B; peak: the same in the unit of --memory-limit"
)


def longer(time: float, than: float) -> str:
    """Relative excess of a time: `+3.1%`. Empty if nothing takes time."""
    return f"{round(time / than - 1, 9) + 0.0:+.1%}" if than else ""  # no -0.0%


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Aligned lines: the first `left` columns to the left, others to the right. Cells beyond `head` stay unchanged.

    >>> print(*table(("name", "time"), [("ZBV", "25.5")]), sep="\\n")
    name  time
    ZBV   25.5
    """
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def align(line: Sequence[str]) -> Iterator[str]:
        for column, (cell, width) in enumerate(zip(line, chain(widths, repeat(0)), strict=False)):
            yield cell.ljust(width) if column < left else cell.rjust(width)

    return ["  ".join(align(line)).rstrip() for line in lines]
