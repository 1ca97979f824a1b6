"""The number of stages per rank of a job's schedule, in a loop or a wave: the shortest simulated step of the job's cut.

More stages per rank shorten the bubble, but add overhead, and few layers make uneven stages. A wave needs less memory
than a loop, but has the first and the last stage on one rank. All ranks choose alike without any measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import NamedTuple, Protocol

from zbpipe.algorithms.zb import find_shortest, is_searched
from zbpipe.costs.job import JobCosts, MemoryLimit, as_cost_model
from zbpipe.costs.model import CostModel, Transport
from zbpipe.costs.transformer import Checkpointing, Work, usual_costs
from zbpipe.estimation.rates import USUAL
from zbpipe.schedule.ir import Placement, Schedule
from zbpipe.schedule.registry import Algorithm, resolve, stages_for
from zbpipe.simulator.simulation import simulate

_FINALISTS = 2
"""Number of cuts for which the schedule is searched, too. The search can gain 2 % over the filled orders."""
_DIGITS = 6
"""Decimal digits of a step relative to another, so that rounding does not decide."""
_GPU = USUAL.device
"""Its ops have 0.3 milliseconds of overhead: 2.5 % of F if that has 7e12 operations."""


class Cut(Protocol):
    """A model, and how it is cut into stages."""

    @property
    def num_layers(self) -> int: ...

    @property
    def products(self) -> float:
        """Multiplications per token in the whole model."""

    def work(self, placement: Placement) -> Work:
        """The work of each stage. ValueError if the model has no such cut."""


class Choice(NamedTuple):
    algorithm: Algorithm
    placement: Placement
    words: str = ""
    """The choice and its reason, for the log. Empty if there was none."""


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

    Args:
        algorithm: schedules other than ZB, ZBLoop and Auto keep their placement and number of stages.
        ranks: number of pipeline ranks.
        microbatches: number of microbatches in a step.
        cut: cuts the model. Each stage has at least one layer, unless the user sets the number of stages.
        checkpointing: activation checkpointing of the layers.
        tensor: degree of tensor parallelism.
        tokens: tokens of a microbatch on each of the GPUs that share it. 0 ignores the overhead of ops.
        measured: measured costs; then only the placement is chosen.
        stages_per_rank: the user's number.
        memory_limit: limit of the schedule.
        transport: transport of messages.

    Raises:
        ValueError: the model has no such cut, the costs are of other stages, or the limit is too low.
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

    def step(placement: Placement, make: Callable[[CostModel], Schedule]) -> float:
        """Seconds of a step; infinite if it cannot run."""
        try:
            known = costs(placement)
            return simulate(make(known), known, transport=transport or Transport.IDEAL).makespan
        except ValueError as error:
            refusals.append(error)
            return inf

    def find_step(placement: Placement, *, search: bool) -> float:
        size, more = (algorithm.name, placement, microbatches), (memory_limit, transport)
        return step(placement, lambda known: find_shortest(*size, known, *more, search=search))

    filled = {placement: find_step(placement, search=False) for placement in forms}
    finalists = [each for each in sorted(forms, key=filled.__getitem__) if filled[each] < inf][:_FINALISTS]
    if not finalists:
        raise refusals[-1]
    usual = step(Placement.loop(ranks), lambda known: resolve("1F1B").make(ranks, microbatches))
    steps = {
        each: find_step(each, search=True) if is_searched(each, microbatches) else filled[each]
        for each in forms
        if each in finalists
    }
    best, *others = sorted(steps, key=lambda each: round(steps[each] / filled[finalists[0]], _DIGITS))
    words = f"{forms[best].name} runs {describe(best)}"
    if usual < inf:
        words += f": {_compare(steps[best], usual)} than 1F1B as simulated for this cut"
        words += "".join(f"; {describe(each)}: {_compare(steps[each], usual)}" for each in others)
    return Choice(forms[best], best, words)


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
