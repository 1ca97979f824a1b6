"""What a schedule's ops cost: seconds per stage for F, I and W, seconds per message, bytes of activations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from types import MappingProxyType

from zbpipe.ir import OpKind, Placement

MOST = 1e100
"""The largest cost: no sum or product of such numbers is infinite."""


def is_amount(number: float) -> bool:
    """Whether it can be a cost: a number from 0 to 1e100."""
    return 0 <= number <= MOST


def require_amounts(what: str, **amounts: Iterable[float]) -> None:
    """Refuse numbers that cannot be costs.

    Raises:
        ValueError: the first of them, by the name of its list.
    """
    for name, numbers in amounts.items():
        for number in numbers:
            if not is_amount(number):
                raise ValueError(f"{what} cannot have {name} = {number}: give a number from 0 to {MOST:g}")


def require_shares(what: str, freed_by_i: Iterable[float]) -> None:
    """Refuse numbers that cannot be the share of the activations that I frees.

    Raises:
        ValueError: the first of them.
    """
    for share in freed_by_i:
        if not -MOST <= share <= 1:
            raise ValueError(f"{what} cannot have freed_by_i = {share}: give a number up to 1")


@dataclass(frozen=True)
class Link:
    """The way from one rank to another: a message of n bytes takes `latency + n / bandwidth` seconds.

    Raises:
        ValueError: a latency that is negative or not finite, or a bandwidth that is not positive.
    """

    latency: float = 0.0
    """Seconds."""
    bandwidth: float = inf
    """Bytes per second."""

    def __post_init__(self) -> None:
        require_amounts("a link", latency=(self.latency,))
        if not self.bandwidth >= 1 / MOST:
            raise ValueError(f"a link cannot have bandwidth = {self.bandwidth}: give a number above 0")

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class CostModel:
    """Costs per stage. Times are seconds of one microbatch, memory is what one microbatch's forward keeps.

    Raises:
        ValueError: tuples of different lengths, or a number that is negative or not finite.
    """

    f: tuple[float, ...]
    """Seconds of the forward, one number a stage."""
    i: tuple[float, ...]
    """Seconds of the backward for the input (dI), with any recomputation."""
    w: tuple[float, ...]
    """Seconds of the backward for the weights (dW)."""
    activations: tuple[float, ...]
    """What a stage keeps of one microbatch after F: bytes, or shares of a rank's microbatch."""
    freed_by_i: float | tuple[float, ...] = 0.0
    """The share of the activations that I frees already, 1 at the most: of all stages, or one number a stage.

    W frees the rest. Less than zero means that more waits for W than F has left: under activation checkpointing F
    leaves a checkpoint, and I the inputs and gradients of all layers whose dW is still to come, which count from its
    start on.
    """
    link: Link = field(default_factory=Link)
    """The way between any two ranks."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=lambda: MappingProxyType({}))
    """Links that differ, by (from rank, to rank)."""
    message_bytes: float = 0.0
    """Bytes that one stage hands to the next for one microbatch, and gets back as a gradient."""

    def __post_init__(self) -> None:
        lengths = {len(self.f), len(self.i), len(self.w), len(self.activations)}
        if len(lengths) != 1:
            raise ValueError(f"f, i, w and activations need one number a stage each, got {sorted(lengths)} numbers")
        freed = self.freed_by_i if isinstance(self.freed_by_i, tuple) else (self.freed_by_i,) * len(self.f)
        if len(freed) != len(self.f):
            raise ValueError(f"freed_by_i has to be one number, or one a stage: got {len(freed)} for {len(self.f)}")
        columns = {"f": self.f, "i": self.i, "w": self.w, "activations": self.activations}
        require_amounts("a CostModel", **columns, message_bytes=(self.message_bytes,))
        require_shares("a CostModel", freed)

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        f: float = 1.0,
        i: float = 1.0,
        w: float = 1.0,
        *,
        comm: float = 0.0,
        freed_by_i: float | tuple[float, ...] = 0.0,
    ) -> CostModel:
        """The same costs on every rank.

        Args:
            placement: of the schedule; a rank's time is shared equally by its stages.
            f: seconds a rank spends on one microbatch's forward, over all its stages; likewise `i` and `w`.
            comm: seconds from one rank to another.
            freed_by_i: share of the activations that I frees; less than zero where it takes more.
        """
        shares = [1 / len(placement.stages_on(rank)) for rank in placement.rank_of]

        def shared(time: float) -> tuple[float, ...]:
            return tuple(time * share for share in shares)

        return cls(shared(f), shared(i), shared(w), tuple(shares), freed_by_i, Link(comm))

    @property
    def num_stages(self) -> int:
        return len(self.f)

    def seconds(self, stage: int, kind: OpKind) -> float:
        """How long one op runs."""
        match kind:
            case OpKind.F:
                return self.f[stage]
            case OpKind.I:
                return self.i[stage]
            case OpKind.W:
                return self.w[stage]
            case OpKind.B:
                return self.i[stage] + self.w[stage]

    def adds(self, stage: int, kind: OpKind) -> float:
        """What one op adds to the activations of its rank: from its start on if it is more than 0, else at its end."""
        size = self.activations[stage]
        freed = size * (self.freed_by_i[stage] if isinstance(self.freed_by_i, tuple) else self.freed_by_i)
        match kind:
            case OpKind.F:
                return size
            case OpKind.I:
                return -freed
            case OpKind.W:
                return freed - size
            case OpKind.B:
                return -size

    def waits(self, stage: int) -> float:
        """What a stage keeps of one microbatch from I to W."""
        return -self.adds(stage, OpKind.W)

    def transfer(self, sender: int, receiver: int) -> float:
        """Seconds from the end of an op on one rank to its result on another; none if they are the same."""
        if sender == receiver:
            return 0.0
        return self.links.get((sender, receiver), self.link).seconds(self.message_bytes)


def least_room(placement: Placement, costs: CostModel) -> tuple[float, ...]:
    """By rank, what it holds at a time of a microbatch that it has alone, in the unit of `costs.activations`."""
    return tuple(_peak(costs, placement.stages_on(rank)) for rank in range(placement.num_ranks))


def _peak(costs: CostModel, stages: tuple[int, ...]) -> float:
    """F of all stages, then I and W of one after the other: no other order takes less."""
    forward = [costs.adds(stage, OpKind.F) for stage in stages]
    backward = [costs.adds(stage, kind) for stage in reversed(stages) for kind in (OpKind.I, OpKind.W)]
    return max(accumulate((*forward, *backward)))


def shares_within(memory: float | Sequence[float], placement: Placement, costs: CostModel) -> tuple[float, ...]:
    """By rank, how many of its shares of one microbatch (what its stages keep of one) fit into `memory`.

    Args:
        memory: for all ranks or by rank, in the unit of `costs.activations`.
        placement: where the stages are.
        costs: of these stages.
    """
    ranks = range(placement.num_ranks)
    rooms = tuple(memory) if isinstance(memory, Sequence) else (memory,) * len(ranks)
    shares = [sum(costs.activations[stage] for stage in placement.stages_on(rank)) for rank in ranks]
    # One that keeps nothing could hold any number; 1 is the least that a limit can say.
    return tuple(room / share if share else 1.0 for room, share in zip(rooms, shares, strict=True))


def as_cost_model(costs: CostModel | Sequence[float], placement: Placement) -> CostModel:
    """`costs` itself, or for `(f, i, w)` the same costs on every rank, as `CostModel.uniform` makes them.

        >>> as_cost_model((1, 1, 2), Placement.loop(4)) == CostModel.uniform(Placement.loop(4), w=2)
        True

    Raises:
        TypeError: `costs` is neither.
        ValueError: a CostModel for another number of stages, or a number that cannot be a cost.
    """
    if isinstance(costs, CostModel):
        if costs.num_stages != placement.num_stages:
            raise ValueError(
                f"the costs are for {costs.num_stages} stages, but the placement has {placement.num_stages}: give one"
                " number a stage"
            )
        return costs
    # A TypeError with the way out for whatever callers hand in that has no types.
    numbers = tuple(costs) if isinstance(costs, (tuple, list)) else ()
    if len(numbers) != 3 or not all(isinstance(each, (int, float)) and type(each) is not bool for each in numbers):
        raise TypeError(
            f"costs have to be a zbpipe.CostModel or three numbers (f, i, w), for example (1, 1, 1), got {costs!r}"
        )
    return CostModel.uniform(placement, *numbers)
