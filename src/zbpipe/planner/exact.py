"""The optimum of small cases, or a better bound, with OR-Tools CP-SAT (extra `solver`).

The solver needs integers. Times and activations are rounded down, so its proofs also hold for the real numbers. An
order that it finds is simulated again, and its memory checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any, NamedTuple

from zbpipe.costs.model import ROUNDING, CostModel
from zbpipe.planner.kernel import NEVER, starts
from zbpipe.planner.problem import Problem
from zbpipe.planner.search import Found
from zbpipe.schedule.ir import OpKind

_PARTS = 10_000
"""Number of parts to which the largest number is rounded, unless fewer make all numbers whole. Chosen by hand."""


@dataclass(frozen=True)
class Proof:
    """The solver's answer for one problem."""

    order: tuple[int, ...] | None
    """An order within the limits. None if it found none."""
    lower_bound: float
    """Lower bound of the step, in seconds."""


def prove(found: Mapping[str, Found]) -> tuple[Found, dict[str, float]]:
    """The best order and the bound of each placement, improved from the best known order on each of them."""
    best = min(found.values(), key=lambda each: each.length)
    bounds = {name: each.problem.lower_bound for name, each in found.items()}
    for name, each in sorted(found.items(), key=lambda pair: pair[1].length):
        problem = each.problem
        if bounds[name] >= best.length * (1 - ROUNDING):
            continue
        proof = solve(problem, each.order)
        bounds[name] = max(bounds[name], proof.lower_bound)
        if proof.order is not None:
            length = problem.length(proof.order)
            if length < best.length * (1 - ROUNDING):
                best = Found(problem, proof.order, length, "CP-SAT")
    return best, bounds


def solve(problem: Problem, known: Sequence[int], effort: float = 20.0) -> Proof:
    """Search for the shortest makespan or period until it is proven, or for `effort` deterministic seconds."""
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
        # Ops whose time is rounded down to zero may start together: a dependency then precedes its op. They also
        # precede longer ops with the same start, which may need the memory that they free.
        order = tuple(sorted(model.start, key=lambda op: (*model.span(op, solver), model.depth(op))))
        order = tuple(model.code(op, solver) for op in order)
        # To the solver, an op that takes no time needs no memory either.
        if not problem.fits(problem.schedule("", order)):
            order = None
    return Proof(order, solver.best_objective_bound * model.second)


class _Model:
    """The problem as the solver's variables and constraints."""

    def __init__(self, cp_model: Any, problem: Problem, known: float) -> None:
        self.job = job = problem.job
        self.microbatches = microbatches = job.microbatches
        self.model = cp_model.CpModel()
        self.second = _unit([seconds for node in job.nodes for seconds in (node.seconds, node.whole, node.lag)])
        nodes = range(len(job.nodes))
        self.seconds = [floor(node.seconds / self.second + 1e-6) for node in job.nodes]
        self.whole = [floor(node.whole / self.second + 1e-6) for node in job.nodes]
        self.lag = [floor(node.lag / self.second + 1e-6) for node in job.nodes]
        self.length = floor(known / self.second) + 1
        # For the period, a rank may begin its step so late that it ends after that time of the first rank.
        self.horizon = (2 if problem.by_period else 1) * self.length
        self.num_ops = len(nodes) * microbatches
        self.start = {op: self.model.new_int_var(0, self.horizon, "") for op in range(self.num_ops)}
        self.full = {
            op: self.model.new_bool_var("") for node in nodes if job.nodes[node].full < NEVER for op in self.ops(node)
        }
        """For each I that may be part of a B, whether it is one. Its W then starts at any time, and takes none."""
        self.end = {op: self.end_of(op) for op in self.start}
        for rank in range(job.ranks):
            mine = [node for node in nodes if job.nodes[node].rank == rank]
            self.model.add_no_overlap(
                interval for node in mine for op in self.ops(node) for interval in self.intervals(op)
            )
            self.limit_memory(problem, rank)
        for node in nodes:
            feeder = job.nodes[node].feeder
            if feeder >= 0:
                for op, fed_by in zip(self.ops(node), self.ops(feeder), strict=True):
                    fed = self.model.add(self.start[op] >= self.end[fed_by] + self.lag[node])
                    if (full := self.full_of(op)) is not None and node % 3 == 2:
                        fed.only_enforce_if(~full)
            # All microbatches are alike, so running them in order on each stage loses nothing.
            for earlier, later in zip(self.ops(node), self.ops(node)[1:], strict=False):
                self.model.add(self.start[later] >= self.end[earlier])
        length = self.model.new_int_var(floor(problem.lower_bound / self.second - 1e-6), self.length, "")
        # Steps can follow each other at any interval in which each rank completes all of its work for one.
        first = {
            rank: self.start[self.ops(node)[0]]
            for node, rank in reversed(list(enumerate(node.rank for node in job.nodes)))
        }
        for node in nodes:
            begin = first[job.nodes[node].rank] if problem.by_period else 0
            self.model.add(length >= self.end[self.ops(node)[-1]] - begin)
        self.model.minimize(length)

    def full_of(self, op: int) -> Any:
        """Whether the I, or the W, is part of a B. None where no backward is one."""
        node = op // self.microbatches
        return self.full.get(op - self.microbatches if node % 3 == 2 else op)

    def end_of(self, op: int) -> Any:
        """End of the op."""
        node, full = op // self.microbatches, self.full_of(op)
        if full is None:
            return self.start[op] + self.seconds[node]
        if node % 3 == 2:
            return self.start[op] + self.seconds[node] * ~full
        return self.start[op] + self.seconds[node] + (self.whole[node] - self.seconds[node]) * full

    def intervals(self, op: int) -> list[Any]:
        """Busy interval of its rank: one interval, or two of which one counts."""
        node, full, start = op // self.microbatches, self.full_of(op), self.start[op]
        if full is None:
            return [self.model.new_fixed_size_interval_var(start, self.seconds[node], "")]
        apart = self.model.new_optional_fixed_size_interval_var(start, self.seconds[node], ~full, "")
        if node % 3 == 2:
            return [apart]
        return [apart, self.model.new_optional_fixed_size_interval_var(start, self.whole[node], full, "")]

    def ops(self, node: int) -> range:
        return range(node * self.microbatches, (node + 1) * self.microbatches)

    def limit_memory(self, problem: Problem, rank: int) -> None:
        """Keep the memory of each rank within its limit: from F to W, F to I, I to W, and during each op."""
        stages = problem.placement.stages_on(rank)
        fillings = [
            filling for stage in stages for filling in _list_fillings(problem.costs, stage, problem.merges[stage])
        ]
        unit = _unit([filling.size for filling in fillings])
        held, sizes = [], []
        for since, until, size, full in fillings:
            for begin, end in zip(self.ops(since), self.ops(until), strict=True):
                length = self.model.new_int_var(0, self.horizon, "")
                stop = self.model.new_int_var(0, self.horizon, "")
                present = self.full_of(begin if since % 3 else end) if full is not None else None
                counts = True if present is None else present if full else ~present
                stops = self.model.add(stop == self.end[end])
                if present is not None:
                    stops.only_enforce_if(counts)
                held.append(self.model.new_optional_interval_var(self.start[begin], length, stop, counts, ""))
                sizes.append(floor(size / unit + 1e-6))
        self.model.add_cumulative(held, sizes, floor(problem.limits[rank] / unit + 1e-6))

    def hint(self, order: Sequence[int]) -> None:
        """Start the solver from a known order."""
        rounded = [
            replace(node, seconds=seconds, whole=whole, lag=lag)
            for node, seconds, whole, lag in zip(self.job.nodes, self.seconds, self.whole, self.lag, strict=True)
        ]
        job = self.job._replace(nodes=rounded, origin=[0] * self.job.ranks)
        for code, begin in zip(order, starts(job, list(order)), strict=True):
            full, op = divmod(code, self.num_ops)
            if full and op not in self.full:  # a W that is part of a B
                continue
            self.model.add_hint(self.start[op], int(begin))
            if op in self.full:
                self.model.add_hint(self.full[op], full)

    def span(self, op: int, solver: Any) -> tuple[int, int]:
        """Start and end of an op in the solver's result."""
        return solver.value(self.start[op]), solver.value(self.end[op])

    def code(self, op: int, solver: Any) -> int:
        """Number of the op in an order."""
        full = self.full_of(op)
        return op + self.num_ops if full is not None and solver.value(full) else op

    def depth(self, op: int) -> int:
        """Number of earlier ops of the same microbatch."""
        node, depth = op // self.microbatches, 0
        while self.job.nodes[node].feeder >= 0:
            node, depth = self.job.nodes[node].feeder, depth + 1
        return depth


class _Filling(NamedTuple):
    """Part of a stage's memory for one microbatch: the nodes at whose start and end it lives, and its size."""

    since: int
    until: int
    size: float
    full: bool | None = None
    """Whether it applies only with a B, or only without one."""


def _list_fillings(costs: CostModel, stage: int, merges: bool) -> Iterator[_Filling]:
    """All fillings with a size."""
    f, i, w = 3 * stage, 3 * stage + 1, 3 * stage + 2
    size, waits = costs.activations[stage], costs.waits(stage)
    split = False if merges else None
    all_fillings = [
        _Filling(f, i, max(size - waits, 0.0), split),
        _Filling(f, w, min(size, waits), split),
        _Filling(i, w, max(waits - size, 0.0), split),
        _Filling(f, f, costs.working_of(stage, OpKind.F)),
        _Filling(i, i, costs.working_of(stage, OpKind.I), split),
        _Filling(w, w, costs.working_of(stage, OpKind.W), split),
    ]
    if merges:
        all_fillings += [_Filling(f, i, size, True), _Filling(i, i, costs.working_of(stage, OpKind.B), True)]
    return (filling for filling in all_fillings if filling.size > 0)


def _unit(numbers: Sequence[float]) -> float:
    """The largest unit of which all numbers are whole multiples, if there is one."""
    most = max(numbers) or 1.0
    for parts in range(1, 1001):
        if all(abs(number * parts / most - round(number * parts / most)) < 1e-6 for number in numbers):
            return most / parts
    return most / _PARTS
