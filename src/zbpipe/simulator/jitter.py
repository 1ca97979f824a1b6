"""Step times under jitter: many simulations with random times.

An op takes its time from the costs, times a random factor. A message arrives after the link's time plus a random delay.
Every sample keeps the schedule's order of ops, as torch runs it. All samples are simulated at once, op by op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import log1p, sqrt
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbpipe.costs.job import JobCosts, as_cost_model
from zbpipe.costs.model import SENDS, CostModel, amount, set_fields
from zbpipe.schedule.frozendict import FrozenDict
from zbpipe.schedule.ir import KINDS, Schedule, require_whole
from zbpipe.schedule.tables import Cell
from zbpipe.simulator.actions import other_end
from zbpipe.simulator.time_graph import TimeGraph, durations, last_ends
from zbpipe.simulator.timeline import Timeline
from zbpipe.simulator.validation import require_runnable, require_schedule

Seconds = NDArray[np.floating[Any]]
"""One number for each sample."""

_MOST_SAMPLES = 100_000


@dataclass(frozen=True)
class Jitter:
    """The random variation of times. Default: none.

    >>> Jitter(ops=0.1, delay=0.5) == Jitter.parse("ops=0.1,delay=0.5")
    True

    Raises:
        TypeError: an argument is not a number.
        ValueError: a number is negative, a chance is above 1, or a factor is not positive.
    """

    ops: float = 0.0
    """Standard deviation of an op's time, as a share of it. Lognormal, with the mean of the costs."""
    links: float = 0.0
    """Standard deviation of a message's time, as a share of it. Lognormal, with the mean of the costs."""
    delay: float = 0.0
    """Mean extra seconds of a message. Exponential, as behind the traffic of others."""
    burst: float = 0.0
    """Probability that a rank, or a link, is slow for a step."""
    burst_factor: float = 1.0
    """Factor on the ops of such a rank."""
    burst_delay: float = 0.0
    """Extra seconds of a message on such a link."""
    slow_ranks: Mapping[int, float] = field(default_factory=lambda: FrozenDict({}))
    """Factor on the ops of a rank in all steps, by rank."""
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=lambda: FrozenDict({}))
    """Extra seconds of a message between two ranks, in either direction, in all steps."""
    factors: Sequence[float] = ()
    """Measured factors, from which each op draws one, in place of `ops`."""

    def __post_init__(self) -> None:
        links = _numbers("slow_links", self.slow_links)
        set_fields(
            self,
            slow_ranks=FrozenDict(_numbers("slow_ranks", self.slow_ranks)),
            slow_links=FrozenDict({_link(*ranks): seconds for ranks, seconds in links.items()}),
            factors=tuple(amount("jitter", "factors", factor) for factor in self.factors),
            **{name: amount("jitter", name, getattr(self, name)) for name in _WORDS.values()},
        )
        if self.burst > 1:
            raise ValueError(f"jitter's burst = {self.burst:g} is a chance: give at most 1")
        if min([self.burst_factor, *self.slow_ranks.values(), *self.factors]) <= 0:
            raise ValueError("with a jitter's factor of 0 ops would take no time: give more than 0")
        if self.factors and self.ops:
            raise ValueError("jitter's ops and factors exclude each other: measured factors are used as they are")

    def late_by(self, one: int, other: int) -> float:
        """Extra seconds of a message between two ranks in all steps.

        >>> Jitter(slow_links={(0, 1): 0.5}).late_by(1, 0)
        0.5
        """
        return self.slow_links.get(_link(one, other), 0.0)

    @classmethod
    def from_timelines(cls, timelines: Iterable[Timeline]) -> Jitter:
        """Jitter of steps measured by `zbpipe.Profiler`: each op's seconds by the median of its stage and kind.

        >>> timeline = zbpipe.simulate(zbpipe.generate("ZBV", 2, 4), (1, 1, 1))
        >>> set(Jitter.from_timelines([timeline]).factors)
        {1.0}
        """
        seconds: dict[tuple[int, int, Any], list[float]] = {}
        for number, timeline in enumerate(timelines):
            for span in (span for row in timeline.spans for span in row):
                seconds.setdefault((number, span.op.stage, span.op.kind), []).append(span.end - span.start)
        factors = [each / median(group) for group in seconds.values() if median(group) > 0 for each in group]
        if not factors:
            raise ValueError("no op of these timelines took any time: give those of measured steps")
        return cls(factors=tuple(factor for factor in factors if factor > 0))

    @classmethod
    def parse(cls, text: str) -> Jitter:
        """Parse the words of the command line.

        >>> Jitter.parse("ops=0.1,slow-rank=3:1.2,slow-link=0-1:0.3").slow_links
        FrozenDict({(0, 1): 0.3})
        """
        numbers: dict[str, Any] = {}
        ranks: dict[int, float] = {}
        links: dict[tuple[int, int], float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.strip().partition("=")
            try:
                if name == "slow-rank":
                    rank, factor = value.split(":")
                    ranks[int(rank)] = float(factor)
                elif name == "slow-link":
                    pair, seconds = value.split(":")
                    first, second = pair.split("-")
                    links[int(first), int(second)] = float(seconds)
                elif name in _WORDS:
                    numbers[_WORDS[name]] = float(value)
                else:
                    raise ValueError
            except ValueError:
                known = ", ".join(f"{word}=X" for word in _WORDS)
                raise ValueError(
                    f"jitter {part!r} is not understood; it takes {known}, slow-rank=RANK:FACTOR, slow-link=A-B:SECONDS"
                ) from None
        return cls(slow_ranks=ranks, slow_links=links, **numbers)


_WORDS = {name.replace("_", "-"): name for name in ("ops", "links", "delay", "burst", "burst_factor", "burst_delay")}


def _numbers(name: str, values: Mapping[Any, Any]) -> dict[Any, float]:
    return {key: amount("jitter", f"{name}[{key}]", value) for key, value in values.items()}


def _link(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


@dataclass(frozen=True, eq=False, repr=False)
class StepTimes:
    """The step times of many samples.

    >>> from zbpipe.simulator.jitter import Jitter, step_times
    >>> times = step_times(zbpipe.generate("ZBV", 4, 8), (1, 1, 1), Jitter(ops=0.1), samples=200)
    >>> times.p50 < times.p95 < times.p99
    True
    """

    seconds: Seconds
    """Step time of each sample."""

    @property
    def mean(self) -> float:
        """Mean, in seconds."""
        return float(self.seconds.mean())

    def quantile(self, share: float) -> float:
        """Seconds that this share of all steps does not exceed."""
        return float(np.quantile(self.seconds, share))

    @property
    def p50(self) -> float:
        """The median, in seconds."""
        return self.quantile(0.5)

    @property
    def p95(self) -> float:
        """Seconds that 95 % of the steps do not exceed."""
        return self.quantile(0.95)

    @property
    def p99(self) -> float:
        """Seconds that 99 % of the steps do not exceed."""
        return self.quantile(0.99)

    def record(self) -> dict[str, float]:
        """Mean and quantiles by name, in seconds."""
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
    """Synchronous step times in each of the samples, with the ideal transport.

    An op gets the same factors in all schedules that have its stage, so the comparison uses the same random times.
    FSDP's collectives take their time of the costs.

    Args:
        schedule: a valid schedule that copies nothing to the host.
        costs: as for `zbpipe.simulate`.
        jitter: the variation.
        samples: number of steps to simulate.
        seed: seed of the random times.

    Raises:
        TypeError: an argument has another type.
        ValueError: there are no samples or too many, a rank does not exist, or the schedule cannot run.
    """
    require_schedule(schedule)
    if not isinstance(jitter, Jitter):
        raise TypeError(f"jitter = {jitter!r} is not a zbpipe.simulator.jitter.Jitter")
    require_whole(1, samples=samples)
    require_whole(0, seed=seed)
    if samples > _MOST_SAMPLES:
        raise ValueError(f"samples = {samples} has to be from 1 to {_MOST_SAMPLES}")
    if schedule.has_copies:
        raise ValueError(f"{schedule.name} copies to the host, which varies in a way that is not known")
    _require_ranks(schedule.num_ranks, jitter)
    costs = as_cost_model(costs, schedule.placement)
    return StepTimes(_simulate(schedule, costs, RandomTimes(schedule.placement.rank_of, jitter, samples, seed)))


def _require_ranks(num_ranks: int, jitter: Jitter) -> None:
    named = {*jitter.slow_ranks, *(rank for link in jitter.slow_links for rank in link)}
    if strangers := sorted(rank for rank in named if rank not in range(num_ranks)):
        raise ValueError(f"jitter names rank {strangers[0]}, but there are ranks 0 to {num_ranks - 1}")


class RandomTimes:
    """The random times of all samples. Each op and message has its own, independent of other samples."""

    def __init__(self, rank_of: Sequence[int], jitter: Jitter, samples: int, seed: int) -> None:
        self._rank_of = rank_of
        self._jitter = jitter
        self.samples = samples
        self._seed = seed
        self._factors = np.array(jitter.factors)
        self._rank = [self._of_rank(rank) for rank in range(max(rank_of) + 1)]
        self._burst_of_link: dict[tuple[int, int], Seconds | float] = {}

    def seconds(self, node: Cell, usual: float) -> Seconds | float:
        """Seconds of a node of a `TimeGraph`, which takes `usual` seconds without jitter."""
        stage, kind, microbatch = node
        if kind in KINDS:
            return usual * self._factor(self._rank_of[stage], (0, stage, "FIWB".index(kind), microbatch), usual)
        if kind in SENDS:
            taker = other_end(node).stage
            key = (1, taker, SENDS.index(kind), microbatch)
            return self._message(key, (self._rank_of[stage], self._rank_of[taker]), usual)
        return usual

    def _factor(self, rank: int, key: tuple[int, ...], usual: float) -> Seconds | float:
        """Factor on the seconds of an op."""
        jitter, factor = self._jitter, self._rank[rank]
        if usual and jitter.factors:
            factor = factor * self._random(key).choice(self._factors, self.samples)
        elif usual and jitter.ops:
            factor = factor * _lognormal(self._random(key), jitter.ops, self.samples)
        return factor

    def _message(self, key: tuple[int, ...], ranks: tuple[int, int], usual: float) -> Seconds | float:
        """Seconds of a message between two ranks."""
        jitter = self._jitter
        link = _link(*ranks)
        seconds: Seconds | float = usual + jitter.late_by(*ranks)
        random = self._random(key) if jitter.links or jitter.delay else None
        if random is not None and jitter.links:
            seconds = seconds * _lognormal(random, jitter.links, self.samples)
        if random is not None and jitter.delay:
            seconds = seconds + random.exponential(jitter.delay, self.samples)
        if jitter.burst and jitter.burst_delay:
            if link not in self._burst_of_link:
                self._burst_of_link[link] = jitter.burst_delay * self._bursts(3, *link)
            seconds = seconds + self._burst_of_link[link]
        return seconds

    def _of_rank(self, rank: int) -> Seconds | float:
        """Factor on a rank's ops in each sample."""
        jitter = self._jitter
        slow = jitter.slow_ranks.get(rank, 1.0)
        if not jitter.burst or jitter.burst_factor == 1:
            return slow
        return slow * (1 + (jitter.burst_factor - 1) * self._bursts(2, rank))

    def _bursts(self, *key: int) -> NDArray[np.bool_]:
        return np.random.default_rng([self._seed, *key]).random(self.samples) < self._jitter.burst

    def _random(self, key: tuple[int, ...]) -> np.random.Generator:
        return np.random.default_rng([self._seed, *key])


def _lognormal(random: np.random.Generator, deviation: float, samples: int) -> Seconds:
    """Random factors with a mean of 1."""
    variance = log1p(deviation**2)
    return np.exp(random.normal(-variance / 2, sqrt(variance), samples))


def _simulate(schedule: Schedule, costs: CostModel, times: RandomTimes) -> Seconds:
    """The ends of a step: as in `zbpipe.simulate`, with an array in place of each time."""
    require_runnable(schedule)
    graph = TimeGraph(schedule, has_fsdp=costs.has_fsdp)
    usual = durations(graph, costs)
    ends = last_ends(graph, lambda node: times.seconds(graph.nodes[node], usual[node]), np.maximum)
    return np.broadcast_to(reduce(np.maximum, ends), (times.samples,)).astype(np.float64)
