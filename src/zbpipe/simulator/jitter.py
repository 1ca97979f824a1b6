"""Step times under jitter: many simulations with random times.

Random factors multiply the times of ops, and random delays add to those of messages. All samples have the schedule's
order of ops, and are simulated at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log1p, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbpipe.costs.job import JobCosts, as_cost_model
from zbpipe.costs.model import SENDS, CostModel
from zbpipe.costs.numbers import FrozenDict, amount, set_fields
from zbpipe.schedule.ir import KINDS, Schedule, require_whole
from zbpipe.simulator.actions import other_end
from zbpipe.simulator.time_graph import TimeGraph, durations, last_end
from zbpipe.simulator.validation import require_runnable, require_schedule

Seconds = NDArray[np.floating[Any]]
"""One number for each sample."""

_MOST_SAMPLES = 100_000


@dataclass(frozen=True)
class Jitter:
    """The random variation of times, by default none. TypeError or ValueError for invalid numbers."""

    ops: float = 0.0
    """Relative standard deviation of an op's time. Lognormal, with the costs as the mean."""
    delay: float = 0.0
    """Mean extra seconds of a message. Exponential, as behind other traffic."""
    slow_ranks: Mapping[int, float] = field(default_factory=lambda: FrozenDict({}))
    """Factor on the ops of a rank in all steps, by rank."""
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=lambda: FrozenDict({}))
    """Extra seconds of a message between two ranks, in either direction, in all steps."""

    def __post_init__(self) -> None:
        def numbers(name: str) -> dict[Any, float]:
            return {key: amount("jitter", f"{name}[{key}]", value) for key, value in getattr(self, name).items()}

        links = numbers("slow_links")
        set_fields(
            self,
            ops=amount("jitter", "ops", self.ops),
            delay=amount("jitter", "delay", self.delay),
            slow_ranks=FrozenDict(numbers("slow_ranks")),
            slow_links=FrozenDict({(min(ranks), max(ranks)): seconds for ranks, seconds in links.items()}),
        )
        if min(self.slow_ranks.values(), default=1.0) <= 0:
            raise ValueError("with a jitter's factor of 0 ops would take no time: give more than 0")

    def late_by(self, one: int, other: int) -> float:
        return self.slow_links.get((min(one, other), max(one, other)), 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class StepTimes:
    """The step times of many samples: their mean and quantiles, in seconds.

    >>> from zbpipe.simulator.jitter import Jitter, step_times
    >>> times = step_times(zbpipe.generate("ZBV", 4, 8), (1, 1, 1), Jitter(ops=0.1), samples=200)
    >>> times.p50 < times.p95 < times.p99
    True
    """

    seconds: Seconds
    """Step time of each sample."""

    @property
    def mean(self) -> float:
        return float(self.seconds.mean())

    def quantile(self, share: float) -> float:
        """Seconds that this share of all steps does not exceed."""
        return float(np.quantile(self.seconds, share))

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p95(self) -> float:
        return self.quantile(0.95)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)

    def record(self) -> dict[str, float]:
        return {"mean": self.mean, "p50": self.p50, "p95": self.p95, "p99": self.p99}

    def __repr__(self) -> str:
        return f"StepTimes({', '.join(f'{name}={value:.6g}' for name, value in self.record().items())})"


def step_times(
    schedule: Schedule,
    costs: CostModel | JobCosts | Sequence[float],
    jitter: Jitter,
    *,
    samples: int = 1000,
    seed: int = 0,
) -> StepTimes:
    """Synchronous step times of all samples, with the ideal transport.

    An op gets the same factors in all schedules with its stage. FSDP's collectives do not vary.

    Args:
        schedule: a valid schedule that copies nothing to the host.
        costs: as for `zbpipe.simulate`.
        jitter: the variation.
        samples: number of steps to simulate.
        seed: seed of the random times.

    ValueError for no samples or too many, a rank that does not exist, or a schedule that cannot run.
    """
    require_schedule(schedule)
    if not isinstance(jitter, Jitter):
        raise TypeError(f"jitter = {jitter!r} is not a zbpipe.simulator.jitter.Jitter")
    require_whole(1, samples=samples)
    require_whole(0, seed=seed)
    if samples > _MOST_SAMPLES:
        raise ValueError(f"samples = {samples} has to be from 1 to {_MOST_SAMPLES}")
    if schedule.has_copies:
        raise ValueError(f"{schedule.name} copies to the host, of which jitter has no model: omit the offload")
    named = {*jitter.slow_ranks, *(rank for link in jitter.slow_links for rank in link)}
    if strangers := sorted(named - set(range(schedule.num_ranks))):
        raise ValueError(f"jitter names rank {strangers[0]}, but there are ranks 0 to {schedule.num_ranks - 1}")
    costs = as_cost_model(costs, schedule.placement, schedule.num_microbatches)
    require_runnable(schedule)
    graph, rank_of = TimeGraph(schedule, has_fsdp=costs.has_fsdp), schedule.placement.rank_of
    usual = durations(graph, costs)

    def seconds(number: int) -> Seconds | float:
        """Random seconds of a node, independent of other samples and nodes."""
        (stage, kind, microbatch), known = graph.nodes[number], usual[number]
        if kind in KINDS:
            known *= jitter.slow_ranks.get(rank_of[stage], 1.0)
            if not known or not jitter.ops:
                return known
            random = np.random.default_rng([seed, 0, stage, "FIWB".index(kind), microbatch])
            variance = log1p(jitter.ops**2)
            return known * np.exp(random.normal(-variance / 2, sqrt(variance), samples))
        if kind not in SENDS:
            return known
        taker = other_end(graph.nodes[number]).stage
        known += jitter.late_by(rank_of[stage], rank_of[taker])
        if not jitter.delay:
            return known
        random = np.random.default_rng([seed, 1, taker, SENDS.index(kind), microbatch])
        return known + random.exponential(jitter.delay, samples)

    latest = last_end(graph, seconds, np.maximum)
    return StepTimes(np.broadcast_to(latest, (samples,)).astype(np.float64))
