"""What a job costs: its stages or layers, where they are, what a rank can hold, and what its messages wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zbpipe.costs.layers import LayerCosts
from zbpipe.costs.memory_limit import MemoryLimit, MemoryLimitLike
from zbpipe.costs.model import CostModel, as_cost_model, set_fields
from zbpipe.costs.transport import Transport
from zbpipe.schedule.ir import Placement


@dataclass(frozen=True)
class JobCosts:
    """What `zbpipe.Profiler` measures, a cost file holds, and `zbpipe.plan` takes.

        >>> stages = CostModel(f=(1, 1), i=(1, 1), w=(1, 1), activations=(2e9, 1e9))
        >>> job = JobCosts(stages, Placement.loop(2), memory_limit=4e9, transport="one queue")
        >>> job.transport
        <Transport.ONE_QUEUE: 'one queue'>

    Raises:
        TypeError: something else than such costs, a Placement, numbers and a transport.
        ValueError: a placement with another number of stages than the costs, or with costs of layers; limits for
            another number of ranks than the placement has, or that are none; an unknown transport.
    """

    costs: CostModel | LayerCosts
    """Of the stages, or of the layers from which stages are cut."""
    placement: Placement | None = None
    """Where the stages are, if the costs are those of one placement only."""
    memory_limit: MemoryLimitLike | None = None
    """What a rank, or each of them, can hold: a `MemoryLimit` once it is parsed; None: any."""
    transport: Transport | None = None
    """What messages wait for; None where that is not known."""

    def __post_init__(self) -> None:
        _require(self.costs, "costs", (CostModel, LayerCosts), "a zbpipe.CostModel or zbpipe.costs.LayerCosts")
        _require(self.placement, "placement", (Placement, type(None)), "a zbpipe.Placement, or None")
        _require(self.transport, "transport", (str, type(None)), f"one of {Transport.names()}, or None")
        transport = None if self.transport is None else Transport.parse(self.transport)
        set_fields(self, memory_limit=MemoryLimit.parse(self.memory_limit), transport=transport)
        if self.placement is None:
            return
        placed = f"rank_of = {list(self.placement.rank_of)} places"
        if isinstance(self.costs, LayerCosts):
            raise ValueError(f"{placed} stages, but the costs are of layers: leave the placement out")
        if self.placement.num_stages != self.costs.num_stages:
            stages, known = self.placement.num_stages, self.costs.num_stages
            raise ValueError(f"{placed} {stages} stages, but the costs are of {known}")
        self.require_ranks(self.placement.num_ranks)

    def require_ranks(self, ranks: int) -> None:
        """Refuse a placement or limits for another number of ranks, and links to ranks that there are not."""
        if self.placement is not None and self.placement.num_ranks != ranks:
            raise ValueError(
                f"the costs have the placement rank_of = {list(self.placement.rank_of)}, which is for"
                f" {self.placement.num_ranks} ranks, got {ranks}: use {self.placement.num_ranks}, or leave the"
                " placement out of the costs"
            )
        if limit := MemoryLimit.parse(self.memory_limit):
            limit.require_ranks(ranks)
        for sender, receiver in self.costs.links:
            if max(sender, receiver) >= ranks:
                raise ValueError(f"links has one from {sender} to {receiver}, but the ranks are 0 to {ranks - 1}")

    def on(self, placement: Placement) -> CostModel:
        """The costs of a placement's stages; of layers, with TorchTitan's even split."""
        if isinstance(self.costs, LayerCosts):
            return self.costs.even(placement)
        return as_cost_model(self.costs, placement)


def _require(value: Any, name: str, kinds: tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kinds):
        raise TypeError(f"a job cannot have {name} = {value!r}: give {expected}")
