"""The cut of a model into stages before any measurement: the shortest simulated step on a usual GPU.

Tensor and expert parallelism lengthen the blocks but not the head, layers are whole, and the place of the longer stages
matters. So neither equal products nor equal work give the best cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbpipe.algorithms.zb import find_shortest
from zbpipe.costs.layers import Layer, LayerCosts, Sizes, Split, balance, even_sizes, move_layer, split_of
from zbpipe.costs.model import SENDS, CostModel
from zbpipe.costs.transformer import Checkpointing, Work, usual_costs
from zbpipe.estimation.rates import USUAL
from zbpipe.estimation.workload import Workload
from zbpipe.schedule.ir import OpKind, Placement, Schedule
from zbpipe.schedule.registry import Algorithm
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.time_graph import TimeGraph, last_end

_GIVERS = 12
"""Number of stages, those with the most work, from which a layer may move."""
_MOVES = 50
_ROUNDS = 4
"""Most microbatches per rank that are simulated: more hardly change the best cut."""
_SHORTER = 1 - 1e-6
"""Relative difference from which a step is shorter, so that rounding does not decide."""


class WorkloadCut:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.num_layers = sum(layer.is_block for layer in workload.layers)
        self.products = sum(layer.f for layer in workload.layers) / (2 * workload.tokens)
        times = zip(workload.layers, workload.times or _times_of_work(workload), strict=True)
        self.layers = LayerCosts(tuple(Layer(layer.modules, f, i, w, 0.0) for layer, (f, i, w) in times))
        how, tensor = workload.checkpointing or Checkpointing.NONE, workload.degrees.tensor
        self._cut = cutting(self.layers, workload.microbatches, how, tensor)

    def split(self, placement: Placement, algorithm: Algorithm | None = None) -> Split:
        """Layers of each stage: TorchTitan's split for torch's schedules, zbpipe's for its own and for plans."""
        workload = self.workload
        if workload.cut is not None and len(workload.cut) == placement.num_stages:
            return split_of(workload.cut)
        if workload.ends is not None or (algorithm is not None and algorithm.source == "torch"):
            return split_of(even_sizes(len(workload.layers), placement.num_stages, workload.ends or (1, 1)))
        return self._cut(placement)

    def work(self, placement: Placement) -> Work:
        return self.layers.times(self.split(placement))

    def usual_costs(self, algorithm: Algorithm, placement: Placement) -> CostModel | None:
        """Default costs of a schedule that adapts to the checkpointing. None for others, or if that is unknown."""
        how = self.workload.checkpointing
        if how is None or not algorithm.by_checkpointing:
            return None
        return usual_costs(placement, how, self.workload.degrees.tensor, self.work(placement))


def _times_of_work(workload: Workload) -> list[tuple[float, ...]]:
    """Only the sum of the head's times counts: a loss in chunks runs all of them in F, which the job does not know."""
    pairs = zip(workload.layers, usual_times(workload), strict=True)
    return [times if layer.is_block else (sum(times) / 3,) * 3 for layer, times in pairs]


def usual_times(workload: Workload) -> list[tuple[float, float, float]]:
    costs = USUAL.layer_costs(workload)
    return list(zip(costs.f, costs.i, costs.w, strict=True))


def cutting(
    layers: LayerCosts, microbatches: int, checkpointing: Checkpointing, tensor: int = 1
) -> Callable[[Placement], Split]:
    """A function that cuts layers for a placement: by their F, I and W, with typical memory."""

    @cache
    def cut(placement: Placement) -> Split:
        def fill(sizes: Sizes) -> tuple[float, Schedule]:
            """A step relative to the work of all layers, and its schedule."""
            costs = usual_costs(placement, checkpointing, tensor, layers.times(split_of(sizes)))
            number = min(microbatches, _ROUNDS * placement.num_ranks)
            schedule = find_shortest("ZB", placement, number, costs, search=False)
            return simulate(schedule, costs).makespan, schedule

        starts = {balance(layers, placement), even_sizes(len(layers.layers), placement.num_stages)}
        filled = {sizes: fill(sizes) for sizes in sorted(starts)}
        best = min(filled, key=lambda sizes: filled[sizes][0])
        moved = _move_layers(layers, best, filled[best][1])
        if moved in filled or fill(moved)[0] > filled[best][0] * _SHORTER:
            return split_of(best)
        return split_of(moved)

    return cut


def _move_layers(layers: LayerCosts, sizes: Sizes, schedule: Schedule) -> Sizes:
    """Sizes of stages from which no move of a layer shortens this schedule's step."""
    graph, stages = TimeGraph(schedule), range(len(sizes))
    seconds = [layer.seconds for layer in layers.layers]
    until = {
        kind: np.concatenate([[0.0], np.cumsum([getattr(layer, kind.lower()) for layer in layers.layers])])
        for kind in (OpKind.F, OpKind.I, OpKind.W)
    }

    def steps(trials: Sequence[Sizes]) -> NDArray[np.floating[Any]]:
        ends = np.cumsum(np.array(trials).T, axis=0)
        times = {str(kind): np.diff(each[ends], axis=0, prepend=0.0) for kind, each in until.items()}
        times["B"] = times["I"] + times["W"]

        def seconds_of(node: int) -> Any:
            stage, kind, _ = graph.nodes[node]
            return 0.0 if kind in SENDS else times[kind][stage]

        return np.asarray(last_end(graph, seconds_of, np.maximum))

    best, (length,) = sizes, steps([sizes])
    for _ in range(_MOVES):
        work = [sum(seconds[layer] for layer in stage) for stage in split_of(best)]
        givers = sorted(stages, key=lambda stage: -work[stage])[:_GIVERS]
        trials = list(move_layer(best, givers, stages))
        if not trials or (found := steps(trials)).min() >= length * _SHORTER:
            break
        best, length = trials[int(found.argmin())], found.min()
    return best
