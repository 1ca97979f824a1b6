"""Steps with microbatches of different sizes on sleeping ranks: padded, first come, and packed and ordered by zbpipe.

The lengths of samples are lognormal. Microbatches in the order of the samples have an equal number of them. Padded,
each takes as long as the longest. `zbpipe.pack` makes as many microbatches of nearly equal time, in the order with the
shortest simulated step. Each round draws new lengths and runs all three, and each step is compared with its simulation.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import truediv
from typing import Any

from harness import JSON, markdown, parser, write_json
from ranks import run_ranks
from sleeping import Runner
from wall_clock import GOAL, TIMEOUT, message_seconds, overhead_of

import zbpipe
from zbpipe import CostModel, simulate
from zbpipe.costs.numbers import Size
from zbpipe.schedule.registry import resolve

WAYS = ("padded", "first come", "packed")
_TIMES = (1.0, 1.2, 0.8)
_ATTENTION = 0.1
"""Share of F and I that attention takes in a microbatch of mean size."""


@dataclass(frozen=True)
class Job:
    ranks: int
    microbatches: int
    samples: int
    """Samples of a microbatch, on average."""
    unit: float
    """Mean seconds of a rank's F."""
    rounds: int
    schedules: tuple[str, ...]
    sigmas: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    schedule: str
    sigma: float
    measured: dict[str, list[float]]
    """Seconds of a step in each round, by way."""
    simulated: dict[str, list[float]]
    with_overhead: dict[str, list[float]]
    """Simulated with the median time of an op beside its sleep."""

    def shorter(self, way: str, other: str) -> float:
        """Median over the rounds of the share by which a step is shorter."""
        pairs = zip(self.measured[way], self.measured[other], strict=True)
        return statistics.median(1 - one / two for one, two in pairs)

    def ratio(self, way: str, simulated: dict[str, list[float]]) -> float:
        return statistics.median(map(truediv, self.measured[way], simulated[way]))


def sizes_by_way(
    job: Job, sigma: float, schedule: zbpipe.Schedule, usual: CostModel, seed: int = 0
) -> dict[str, CostModel]:
    """The costs with the sizes of microbatches, by way."""
    drawn = random.Random(seed)
    lengths = [max(round(drawn.lognormvariate(7, sigma)), 1) for _ in range(job.microbatches * job.samples)]
    in_turn = [lengths[at : at + job.samples] for at in range(0, len(lengths), job.samples)]
    first = [Size(sum(own), sum(each**2 for each in own)) for own in in_turn]
    costs = replace(usual, of_size=tuple(map(statistics.fmean, zip(*first, strict=True))))
    longest = max(first, key=lambda size: replace(costs, sizes=(size,)).alike.f[0])
    (packed,) = zbpipe.pack(lengths, schedule=schedule, costs=costs)
    sizes = [longest] * len(first), first, [each.size for each in packed]
    return {way: replace(costs, sizes=tuple(each)) for way, each in zip(WAYS, sizes, strict=True)}


def on_this_rank(job: Job) -> list[Result]:
    latency, results = message_seconds(), []
    for name in job.schedules:
        placement = resolve(name).place(job.ranks)
        usual = CostModel.uniform(placement, *(job.unit * each for each in _TIMES), comm=latency, attention=_ATTENTION)
        schedule = zbpipe.generate(name, job.ranks, job.microbatches, costs=usual)
        for sigma in job.sigmas:
            draws = [sizes_by_way(job, sigma, schedule, usual, number) for number in range(job.rounds)]
            runner = Runner(name, usual, job.microbatches)
            measured: dict[str, list[float]] = {way: [] for way in WAYS}
            ran: list[Any] = []
            for number, costs in enumerate(draws):
                for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                    runner.costs = costs[way]
                    measured[way].append(runner.seconds())
                    ran.append(list(runner.ran))
            overhead = overhead_of(ran)
            simulated, longer = (
                {
                    way: [simulate(schedule, replace(each[way], overhead=more)).makespan for each in draws]
                    for way in WAYS
                }
                for more in (0.0, overhead)
            )
            results.append(Result(name, sigma, measured, simulated, longer))
    return results


def table(results: Sequence[Result]) -> str:
    heads = ["schedule", "sigma", *WAYS, "than padded", "than first come", "measured / simulated", "overhead counted"]
    return markdown(heads, map(_cells, results))


def _cells(result: Result) -> list[str]:
    seconds = {way: statistics.median(each) for way, each in result.measured.items()}
    return [
        result.schedule,
        f"{result.sigma:g}",
        *(f"{seconds[way]:.3f}" for way in WAYS),
        *(f"{-100 * result.shorter('packed', other):+.1f} %" for other in ("padded", "first come")),
        *(", ".join(f"{result.ratio(way, to):.3f}" for way in WAYS) for to in (result.simulated, result.with_overhead)),
    ]


def missed(result: Result) -> bool:
    """Whether a simulated step is off by more than the goal, or a step with packed microbatches is not shorter."""
    goal = 0.25 if result.sigma <= 0.5 else 0.0
    off = any(abs(result.ratio(way, result.simulated) - 1) > GOAL for way in WAYS)
    return off or result.shorter("packed", "padded") < goal or result.shorter("packed", "first come") < 0.05


def main() -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--ranks", type=int, default=8)
    add("--microbatches", type=int, default=32)
    add("--samples", type=int, default=4, help="of a microbatch, on average")
    add("--unit", type=float, default=0.05, help="mean seconds of a rank's F")
    add("--steps", type=int, default=5, help="measured in each way, each with lengths of its own")
    add("--schedules", nargs="+", default=["1F1B", "ZB"], metavar="NAME")
    add("--sigmas", nargs="+", type=float, default=[0.5, 1.0], help="of the logarithm of a sample's length")
    add("--json", **JSON)
    asked = arguments.parse_args()
    size = asked.ranks, asked.microbatches, asked.samples, asked.unit, asked.steps
    job = Job(*size, tuple(asked.schedules), tuple(asked.sigmas))
    results: list[Result] = run_ranks(job.ranks, on_this_rank, job, timeout=TIMEOUT)[0]
    print(table(results))
    write_json(asked.json, "cpu", results)
    return int(any(map(missed, results)))


if __name__ == "__main__":
    sys.exit(main())
