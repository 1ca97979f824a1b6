"""Costs of a job: its stages or layers, their placement, memory limits, and the transport of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from zbpipe.costs.layers import LayerCosts
from zbpipe.costs.memory_limit import MemoryLimit, MemoryLimitLike
from zbpipe.costs.model import CostModel, set_fields
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Placement

ENOUGH = 0.8
"""Share of weight gradients in W below which people are warned."""


@dataclass(frozen=True)
class JobCosts:
    """Costs as `zbpipe.Profiler` measures them, a cost file stores them, and `zbpipe.plan` takes them.

        >>> stages = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(2e9, 1e9))
        >>> job = JobCosts(stages, Placement.loop(2), memory_limit=4e9, transport="one queue")
        >>> job.transport
        <Transport.ONE_QUEUE: 'one queue'>

    Raises TypeError or ValueError for invalid fields, and for those that do not fit the placement.
    """

    costs: CostModel | LayerCosts
    """Costs of the stages, or of the layers from which stages are cut."""
    placement: Placement | None = None
    """Placement of the stages, if the costs are those of one placement."""
    memory_limit: MemoryLimitLike | None = None
    """Memory limit of each rank, a `MemoryLimit` once parsed. None means no limit."""
    transport: Transport | None = None
    """Transport of messages, None if unknown."""

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "costs": ((CostModel, LayerCosts), "a zbpipe.CostModel or zbpipe.costs.LayerCosts"),
            "placement": ((Placement, type(None)), "a zbpipe.Placement, or None"),
            "transport": ((str, type(None)), f"one of {Transport.names()}, or None"),
        }
        for name, (kind, expected) in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"a job cannot have {name} = {value!r}: give {expected}")
        transport = None if self.transport is None else Transport.parse(self.transport)
        set_fields(self, memory_limit=MemoryLimit.parse(self.memory_limit), transport=transport)
        if self.placement is None:
            return
        placed = f"rank_of = {list(self.placement.rank_of)} places"
        if isinstance(self.costs, LayerCosts):
            raise ValueError(f"{placed} stages, but the costs are of layers: omit the placement")
        if self.placement.num_stages != self.costs.num_stages:
            raise ValueError(
                f"{placed} {self.placement.num_stages} stages, but the costs are of {self.costs.num_stages}"
            )
        self.require_ranks(self.placement.num_ranks)

    def require_ranks(self, ranks: int) -> None:
        """Raise for a placement or limits with another number of ranks, and for links to unknown ranks."""
        if self.placement is not None and self.placement.num_ranks != ranks:
            raise ValueError(
                f"the costs have the placement rank_of = {list(self.placement.rank_of)}, which is for"
                f" {self.placement.num_ranks} ranks, got {ranks}: use {self.placement.num_ranks}, or omit"
                " the placement from the costs"
            )
        if limit := MemoryLimit.parse(self.memory_limit):
            limit.require_ranks(ranks)
        for sender, receiver in self.costs.links:
            if max(sender, receiver) >= ranks:
                raise ValueError(f"links has one from {sender} to {receiver}, but the ranks are 0 to {ranks - 1}")

    def on(self, placement: Placement) -> CostModel:
        """Costs of the stages on a placement. Layers are split evenly, as in TorchTitan."""
        if isinstance(self.costs, LayerCosts):
            return self.costs.even(placement)
        return as_cost_model(self.costs, placement)


def as_cost_model(costs: CostModel | JobCosts | Sequence[float], placement: Placement) -> CostModel:
    """`costs` itself, those of a job on this placement, or for `(f, i, w)` equal costs on every rank."""
    if isinstance(costs, JobCosts):
        return costs.on(placement)
    if isinstance(costs, CostModel):
        if costs.num_stages != placement.num_stages:
            raise ValueError(
                f"the costs are for {costs.num_stages} stages, but the placement has {placement.num_stages}: give one"
                " number per stage"
            )
        return costs
    # A TypeError with the way out, for untyped values from callers.
    numbers = tuple(costs) if isinstance(costs, (tuple, list)) else ()
    if len(numbers) != 3 or not all(isinstance(each, (int, float)) and type(each) is not bool for each in numbers):
        if isinstance(costs, (str, PathLike)):
            raise TypeError(f"costs = {costs!r} names a file: read it with zbpipe.load_costs({str(costs)!r})")
        raise TypeError(
            "costs have to be a zbpipe.CostModel, a zbpipe.costs.JobCosts, for zbpipe.plan also"
            f" zbpipe.costs.LayerCosts, or three numbers (f, i, w), for example (1, 1, 1), got {costs!r}"
        )
    return CostModel.uniform(placement, *numbers)
