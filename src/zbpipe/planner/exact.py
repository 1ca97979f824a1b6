"""The optimum of small cases, or a better bound, with OR-Tools CP-SAT (extra `solver`).

The solver needs whole numbers. Times and activations are rounded down, so what it proves also holds for the real
numbers; an order that it finds is simulated again, and its memory checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from zbpipe.costs import CostModel
from zbpipe.planner.problem import Problem
from zbpipe.planner.search import Found

_PARTS = 10_000
"""The largest number counts as so many, if no smaller number of parts makes all numbers whole. Chosen by hand."""


@dataclass(frozen=True)
class Proof:
    """The solver's answer for one problem."""

    order: tuple[int, ...] | None
    """A sound order; None if it found none."""
    lower_bound: float
    """Seconds below which no schedule can be."""


def prove(found: Mapping[str, Found], effort: float = 20.0) -> tuple[Found, dict[str, float]]:
    """Improve the order and the bounds, for every placement on which something better may exist.

    Args:
        found: by name of the placement the best known order, which the solver starts from.
        effort: for each placement, in CP-SAT's deterministic seconds.

    Returns:
        The best order, and the bounds by name of the placement.

    Raises:
        ValueError: OR-Tools is not installed, or the objective is the longest span of a rank.
    """
    best = min(found.values(), key=lambda each: each.length)
    bounds = {name: each.problem.lower_bound for name, each in found.items()}
    for name, each in sorted(found.items(), key=lambda pair: pair[1].length):
        problem = each.problem
        if bounds[name] >= best.length * (1 - 1e-9):
            continue
        proof = solve(problem, each.order, effort)
        bounds[name] = max(bounds[name], proof.lower_bound)
        if proof.order is not None and problem.fits(problem.schedule("", proof.order)):
            length = problem.length(proof.order)
            if length < best.length * (1 - 1e-9):
                best = Found(problem, proof.order, length, "CP-SAT")
    return best, bounds


def solve(problem: Problem, known: Sequence[int], effort: float = 20.0) -> Proof:
    """Search for the shortest makespan until it is proven, or for `effort` deterministic seconds.

    Raises:
        ValueError: OR-Tools is not installed, or the objective is the longest span of a rank.
    """
    if problem.by_span:
        raise ValueError("the exact solver minimises the makespan only: use objective='makespan', or exact=False")
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ValueError("exact=True needs OR-Tools: pip install 'zbpipe[solver]'") from None
    model = _Model(cp_model, problem, problem.length(known))
    model.hint(known)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = effort
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model.model)
    order = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        # Ops whose time is rounded down to zero may start together: the one that feeds the other goes first. They also
        # go before longer ops that start with them, which may need the room that they free.
        order = tuple(sorted(model.start, key=lambda op: (*model.span(op, solver), model.depth(op))))
    return Proof(order, solver.best_objective_bound * model.second)


class _Model:
    """The problem as the solver's variables and constraints."""

    def __init__(self, cp_model: Any, problem: Problem, known: float) -> None:
        self.job = job = problem.job
        self.microbatches = microbatches = job.microbatches
        self.model = cp_model.CpModel()
        self.second = _unit((*job.seconds, *job.lag))
        nodes = range(len(job.rank))
        self.seconds = [floor(seconds / self.second + 1e-6) for seconds in job.seconds]
        self.lag = [floor(lag / self.second + 1e-6) for lag in job.lag]
        self.horizon = floor(known / self.second) + 1
        self.start = {op: self.model.new_int_var(0, self.horizon, "") for op in range(len(nodes) * microbatches)}
        for rank in range(job.ranks):
            mine = [node for node in nodes if job.rank[node] == rank]
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(self.start[op], self.seconds[node], "")
                for node in mine
                for op in self.ops(node)
            )
            self.limit_memory(problem, rank)
        for node in nodes:
            feeder = job.feeder[node]
            if feeder >= 0:
                for op, fed_by in zip(self.ops(node), self.ops(feeder), strict=True):
                    self.model.add(self.start[op] >= self.start[fed_by] + self.seconds[feeder] + self.lag[node])
            # All microbatches are alike, so nothing is lost if each stage runs them in their order.
            for earlier, later in zip(self.ops(node), self.ops(node)[1:], strict=False):
                self.model.add(self.start[later] >= self.start[earlier] + self.seconds[node])
        makespan = self.model.new_int_var(floor(problem.lower_bound / self.second - 1e-6), self.horizon, "")
        for node in nodes:
            self.model.add(makespan >= self.start[self.ops(node)[-1]] + self.seconds[node])
        self.model.minimize(makespan)

    def ops(self, node: int) -> range:
        return range(node * self.microbatches, (node + 1) * self.microbatches)

    def limit_memory(self, problem: Problem, rank: int) -> None:
        """A rank holds activations from F to W, from F to I, or from I to W, and never more than its limit."""
        stages = problem.placement.stages_on(rank)
        fillings = [filling for stage in stages for filling in _fillings(problem.costs, stage)]
        unit = _unit([size for _, _, size in fillings])
        held, sizes = [], []
        for since, until, size in fillings:
            for begin, end in zip(self.ops(since), self.ops(until), strict=True):
                length = self.model.new_int_var(0, self.horizon, "")
                stop = self.start[end] + self.seconds[until]
                held.append(self.model.new_interval_var(self.start[begin], length, stop, ""))
                sizes.append(floor(size / unit + 1e-6))
        self.model.add_cumulative(held, sizes, floor(problem.limits[rank] / unit + 1e-6))

    def hint(self, order: Sequence[int]) -> None:
        """Let the solver start from a known order."""
        clock = [0] * self.job.ranks
        end: dict[int, int] = {}
        for op in order:
            node, microbatch = divmod(op, self.microbatches)
            feeder, rank = self.job.feeder[node], self.job.rank[node]
            begin = clock[rank]
            if feeder >= 0:
                begin = max(begin, end[feeder * self.microbatches + microbatch] + self.lag[node])
            self.model.add_hint(self.start[op], begin)
            clock[rank] = end[op] = begin + self.seconds[node]

    def span(self, op: int, solver: Any) -> tuple[int, int]:
        """When the solver starts and ends an op."""
        start = solver.value(self.start[op])
        return start, start + self.seconds[op // self.microbatches]

    def depth(self, op: int) -> int:
        """How many ops of the same microbatch come before it."""
        node, depth = op // self.microbatches, 0
        while self.job.feeder[node] >= 0:
            node, depth = self.job.feeder[node], depth + 1
        return depth


def _fillings(costs: CostModel, stage: int) -> list[tuple[int, int, float]]:
    """What a stage keeps of one microbatch: from the start of which node to the end of which, and how much."""
    f, i, w = 3 * stage, 3 * stage + 1, 3 * stage + 2
    size, waits = costs.activations[stage], costs.waits(stage)
    if waits <= size:
        return [(f, i, size - waits), (f, w, waits)]
    return [(f, w, size), (i, w, waits - size)]


def _unit(numbers: Sequence[float]) -> float:
    """The largest unit of which all numbers are whole multiples, if there is one."""
    most = max(numbers) or 1.0
    for parts in range(1, 1001):
        if all(abs(number * parts / most - round(number * parts / most)) < 1e-6 for number in numbers):
            return most / parts
    return most / _PARTS
