"""The cut of a model into stages before any measurement: their number, their placement, and the layers of each.

Layers: the shortest simulated step on a usual GPU. Tensor and expert parallelism lengthen the blocks but not the head,
layers are whole, and the place of the longer stages matters. So neither equal products nor equal work are best.

Stages per rank, in a loop or a wave: the shortest simulated step of that cut. More stages shorten the bubble, but add
overhead, and few layers make uneven stages. A wave needs less memory than a loop, but has the first and the last stage
on one rank. All ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zbpipe.algorithms.zb import Timed, find_shortest, is_searched, list_leanest
from zbpipe.costs.job import JobCosts, MemoryLimit, as_cost_model
from zbpipe.costs.layers import Layer, LayerCosts, Sizes, Split, balance, even_sizes, move_layer, split_of
from zbpipe.costs.model import SENDS, CostModel, Transport
from zbpipe.costs.transformer import Checkpointing, Work, usual_costs
from zbpipe.estimation.rates import USUAL
from zbpipe.estimation.workload import Workload
from zbpipe.schedule.ir import OpKind, Placement, Schedule
from zbpipe.schedule.registry import Algorithm, resolve, stages_for
from zbpipe.simulator.lower_bound import lower_bound
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.time_graph import TimeGraph, last_end
from zbpipe.simulator.timeline import Timeline

_GIVERS = 12
"""Number of stages, those with the most work, from which a layer may move."""
_MOVES = 50
_ROUNDS = 4
"""Most microbatches per rank that are simulated: more hardly change the best cut."""
_SHORTER = 1 - 1e-6
"""Relative difference from which a step is shorter, so that rounding does not decide."""
_FINALISTS = 2
"""Number of cuts for which the schedule is searched, too. The search can gain 2 % over the filled orders."""
_DIGITS = 6
"""Decimal digits of a step relative to another, so that rounding does not decide."""
_GPU = USUAL.device
"""Its ops have 0.3 milliseconds of overhead: 2.5 % of F if that has 7e12 operations."""


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

    def list_leanest(self, placement: Placement, costs: CostModel) -> Iterator[Timeline]:
        return list_leanest(placement, self.workload.microbatches, costs.alike)

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
        number = min(microbatches, _ROUNDS * placement.num_ranks)

        def costs(sizes: Sizes) -> CostModel:
            """Times in units of the work of all layers."""
            return usual_costs(placement, checkpointing, tensor, layers.times(split_of(sizes)))

        def fill(sizes: Sizes) -> Timed:
            return find_shortest("ZB", placement, number, costs(sizes), search=False)

        starts = {balance(layers, placement), even_sizes(len(layers.layers), placement.num_stages)}
        filled: dict[Sizes, Timed] = {}
        for bound, sizes in sorted((lower_bound(placement, costs(each), number), each) for each in starts):
            if all(bound <= each.makespan for each in filled.values()):
                filled[sizes] = fill(sizes)
        best = min(filled, key=lambda sizes: (filled[sizes].makespan, sizes))
        moved = _move_layers(layers, best, filled[best].schedule)
        if moved in filled or fill(moved).makespan > filled[best].makespan * _SHORTER:
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


class Cut(Protocol):
    """A model, and how it is cut into stages."""

    @property
    def num_layers(self) -> int: ...

    @property
    def products(self) -> float:
        """Multiplications per token in the whole model."""

    def work(self, placement: Placement) -> Work:
        """The work of each stage. ValueError if the model has no such cut."""


@dataclass(frozen=True)
class Choice:
    algorithm: Algorithm
    placement: Placement
    tell: Callable[[], str] = field(default=str, repr=False, compare=False)

    @property
    def words(self) -> str:
        """The choice and its reason, for the log. Empty if there was none."""
        return self.tell()


# More than seven parameters: a choice depends on everything that the schedule is made for.
def choose(
    algorithm: Algorithm,
    ranks: int,
    microbatches: int,
    cut: Cut,
    checkpointing: Checkpointing = Checkpointing.NONE,
    *,
    tensor: int = 1,
    tokens: float = 0.0,
    measured: JobCosts | CostModel | Sequence[float] | None = None,
    stages_per_rank: int | None = None,
    memory_limit: MemoryLimit | None = None,
    transport: Transport | None = None,
) -> Choice:
    """The number of stages per rank with the shortest step, with ZBLoop instead of ZB if that is shorter.

    Schedules other than ZB, ZBLoop and Auto keep their placement and number of stages. Each stage has at least one
    layer, unless the user sets `stages_per_rank`. With `measured` costs only the placement is chosen. `tensor` is the
    degree of tensor parallelism. `tokens` are those of a microbatch on each of the GPUs that share it; 0 ignores the
    overhead of ops.

    ValueError if the model has no such cut, the costs are of other stages, or the limit is too low.
    """
    model = measured.costs if isinstance(measured, JobCosts) else measured
    if stages_per_rank is None and algorithm.chooses_stages and isinstance(model, CostModel):
        stages_per_rank = model.num_stages // ranks
    if not algorithm.chooses_stages:
        return Choice(algorithm, algorithm.place(ranks, stages_per_rank))
    seconds = 2 * cut.products * tokens / ranks / (_GPU.products * _GPU.peak)

    @cache
    def costs(placement: Placement) -> CostModel:
        if measured is None:
            usual = usual_costs(placement, checkpointing, tensor, cut.work(placement))
            return replace(usual, overhead=_GPU.overhead / seconds if seconds else 0.0)
        if isinstance(measured, JobCosts) and measured.placement not in (None, placement):
            raise ValueError(f"the measured stages are not placed as those of {algorithm.name}: measure with that one")
        return as_cost_model(measured, placement)

    kinds = [algorithm, resolve("ZBLoop")] if algorithm.name == "ZB" else [algorithm]
    forms: dict[Placement, Algorithm] = {}
    for number in stages_for(cut.num_layers, ranks) if stages_per_rank is None else (stages_per_rank,):
        for kind in kinds:
            forms.setdefault(kind.place(ranks, number), kind)
    refusals: list[ValueError] = []

    def step(placement: Placement, *, search: bool) -> float:
        """Seconds of a step; infinite if it cannot run."""
        size, more = (algorithm.name, placement, microbatches), (memory_limit, transport)
        try:
            return find_shortest(*size, costs(placement), *more, search=search).makespan
        except ValueError as error:
            refusals.append(error)
            return inf

    for placement in forms:
        with suppress(ValueError):  # told below
            costs(placement)  # its fillings would displace others, which the searches repeat
    filled = {placement: step(placement, search=False) for placement in forms}
    finalists = [each for each in sorted(forms, key=filled.__getitem__) if filled[each] < inf][:_FINALISTS]
    if not finalists:
        raise refusals[-1]
    steps = {
        each: step(each, search=True) if is_searched(each, microbatches) else filled[each]
        for each in forms
        if each in finalists
    }
    best, *others = sorted(steps, key=lambda each: round(steps[each] / filled[finalists[0]], _DIGITS))

    def tell() -> str:
        words = f"{algorithm.name} runs {describe(best)}"
        with suppress(ValueError):  # the costs may be of other stages
            loop, how = resolve("1F1B").make(ranks, microbatches), transport or Transport.IDEAL
            usual = simulate(loop, costs(loop.placement), transport=how).makespan
            words += f": {_compare(steps[best], usual)} than 1F1B as simulated for this cut"
            words += "".join(f"; {describe(each)}: {_compare(steps[each], usual)}" for each in others)
        return words

    return Choice(forms[best], best, tell)


def describe(placement: Placement) -> str:
    """The number of stages per rank, and their placement.

    >>> [describe(Placement(each)) for each in ((0, 1), (0, 1, 0, 1), (0, 1, 1, 0))]
    ['1 stage per rank', '2 stages per rank in a loop', '2 stages per rank in a wave']
    >>> describe(Placement((0, 1, 1, 0, 0, 1)))
    'stages on ranks 0-1-1-0-0-1'
    """
    ranks, number = placement.num_ranks, placement.num_stages // placement.num_ranks
    for how, usual in (("loop", Placement.loop), ("wave", Placement.wave)):
        if placement == usual(ranks, max(number, 1)):
            return f"{number} stages per rank in a {how}" if number > 1 else "1 stage per rank"
    return f"stages on ranks {'-'.join(map(str, placement.rank_of))}"


def _compare(step: float, usual: float) -> str:
    return f"{abs(1 - step / usual):.1%} {'longer' if step > usual else 'shorter'}"
