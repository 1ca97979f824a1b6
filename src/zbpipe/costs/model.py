"""Costs of ops: seconds per stage for F, I and W, seconds per message, bytes of activations.

All memory is in the unit of `CostModel.activations`: bytes if measured. In costs that are equal on every rank
(`CostModel.uniform`) the unit is a rank's share of one microbatch, so 1F1B on p ranks holds p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from typing import Any, SupportsFloat

from zbpipe.schedule.frozendict import FrozenDict
from zbpipe.schedule.ir import COMPUTATIONS, OpKind, Placement

MOST = 1e100
"""Largest cost. No sum or product of such numbers is infinite."""
ROUNDING = 1e-9
"""Relative tolerance for the rounding of sums of times or memory."""


def is_amount(number: float) -> bool:
    """Whether the value is a valid cost: a number from 0 to 1e100."""
    return 0 <= number <= MOST


def amount(what: str, name: str, value: Any) -> float:
    """`value` as a cost. The TypeError or ValueError for invalid values names `what`, `name` and the value."""
    refusal = f"{what} cannot have {name} = {value!r}: give a number from 0 to {MOST:g}"
    found = number(value, refusal)
    if not is_amount(found):
        raise ValueError(refusal)
    return found


def amounts(what: str, name: str, values: Any, each: str) -> tuple[float, ...]:
    """Several costs, a number for `each` item."""
    values = as_python(values)
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} cannot have {name} = {values!r}: give one number for each {each}, for example (1, 1)")
    return tuple(amount(what, name, value) for value in values)


def as_python(values: Any) -> Any:
    """The numbers of an array of numpy or torch, as a list. All else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def share(what: str, value: Any) -> float:
    """`value` as the share of the activations that I frees, at most 1. Raises as `amount` does."""
    refusal = f"{what} cannot have freed_by_i = {value!r}: give a number up to 1"
    found = number(value, refusal)
    if not -MOST <= found <= 1:
        raise ValueError(refusal)
    return found


def number(value: Any, refusal: str) -> float:
    """`value` as a float, infinite for integers of hundreds of digits. Else a TypeError with `refusal`."""
    if type(value) is float:  # nearly always, and the checks below take 30 times as long
        return value
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        raise TypeError(refusal)
    try:
        return float(value)
    except TypeError:  # an array
        raise TypeError(refusal) from None
    except OverflowError:
        return inf


@dataclass(frozen=True)
class Link:
    """The link from one rank to another: a message of n bytes takes `latency + n / bandwidth` seconds.

        >>> Link(latency=1e-5, bandwidth=1e9).seconds(2e6)
        0.00201

    Raises:
        TypeError: a field is not a number.
        ValueError: the latency is negative or not finite, or the bandwidth is not positive.
    """

    latency: float = 0.0
    bandwidth: float = inf
    """Bytes per second."""

    def __post_init__(self) -> None:
        set_fields(self, latency=amount("a link", "latency", self.latency))
        refusal = f"a link cannot have bandwidth = {self.bandwidth!r}: give a number above 0"
        bandwidth = number(self.bandwidth, refusal)
        if not bandwidth >= 1 / MOST:
            raise ValueError(refusal)
        set_fields(self, bandwidth=bandwidth)

    def seconds(self, num_bytes: float) -> float:
        """Time of a message, in seconds."""
        return self.latency + num_bytes / self.bandwidth


Links = Mapping[tuple[int, int], Link]
"""Links by (from rank, to rank)."""
Working = Mapping[OpKind, float | tuple[float, ...]]
"""Working memory by kind of op: one number for all stages, or one per stage."""
COLUMNS = ("f", "i", "w", "activations")
"""Fields with one number per stage or layer."""
OF_DATA_PARALLELISM = ("gather", "reduce")
"""Fields with one number for all stages or layers, or one for each."""


def check_messages(what: str, link: Any, links: Any, message_bytes: Any, host: Any) -> dict[str, Any]:
    """Fields for messages of a frozen dataclass, checked, with a copy of `links`."""
    if not isinstance(link, Link):
        raise TypeError(f"{what} cannot have link = {link!r}: give a zbpipe.costs.Link")
    if not isinstance(links, Mapping):
        raise TypeError(f"{what} cannot have links = {links!r}: give zbpipe.costs.Links by (from rank, to rank)")
    for key, each in links.items():
        is_pair = isinstance(key, tuple) and len(key) == 2 and all(type(rank) is int and rank >= 0 for rank in key)
        if not is_pair or not isinstance(each, Link):
            raise TypeError(
                f"{what} cannot have links = {{{key!r}: {each!r}}}: give a zbpipe.costs.Link for each pair of ranks"
            )
    if not isinstance(host, (Link, type(None))):
        raise TypeError(
            f"{what} cannot have host = {host!r}: give a zbpipe.costs.Link, for example Link(bandwidth=25e9)"
        )
    return {"links": FrozenDict(links), "message_bytes": amount(what, "message_bytes", message_bytes)}


def check_working(what: str, working: Any, count: int, each: str) -> FrozenDict[OpKind, tuple[float, ...]]:
    """Working memory by kind of op, with a number for `each` of `count` stages or layers."""
    if not isinstance(working, Mapping) or not all(
        isinstance(kind, OpKind) and kind in COMPUTATIONS for kind in working
    ):
        raise TypeError(
            f"{what} cannot have working = {working!r}: give numbers by zbpipe.OpKind F, I, W or B, for example"
            " {OpKind.I: 2e9}"
        )
    found = {}
    for kind in working:
        name, given = f"working[{kind}]", as_python(working[kind])
        if isinstance(given, (tuple, list)):
            found[kind] = amounts(what, name, given, each)
            if len(found[kind]) != count:
                raise ValueError(
                    f"{name} has to be one number, or one for each {each}: got {len(found[kind])} for {count}"
                )
        else:
            found[kind] = (amount(what, name, given),) * count
    return FrozenDict(found)


def set_fields(instance: object, **fields: Any) -> None:
    """Set fields of a frozen dataclass while it is initialised."""
    for name, value in fields.items():
        object.__setattr__(instance, name, value)


@dataclass(frozen=True)
class CostModel:
    """Costs per stage. Times are seconds per microbatch, memory is the activations of one microbatch.

        >>> costs = CostModel(f=(1, 1), i=(1, 1), w=(1, 2), activations=(3e9, 1e9), freed_by_i=0.25)
        >>> costs.num_stages, costs.adds(0, OpKind.I)
        (2, -750000000.0)

    Raises:
        TypeError: a field is not a number or list of numbers.
        ValueError: lists have different lengths, or a number is negative or not finite.
    """

    f: tuple[float, ...]
    """Seconds of the forward, one number per stage."""
    i: tuple[float, ...]
    """Seconds of the backward for the input (dI), with any recomputation."""
    w: tuple[float, ...]
    """Seconds of the backward for the weights (dW)."""
    activations: tuple[float, ...]
    """Memory kept of one microbatch after F, in bytes or shares of a rank's microbatch. The unit of all memory."""
    freed_by_i: float | tuple[float, ...] = 0.0
    """Share of the activations that I frees, at most 1: one number for all stages, or one per stage.

    W frees the rest. Negative if more is kept for W than F kept. Under activation checkpointing F keeps a checkpoint,
    and I keeps the inputs and gradients of all layers for their dW. These count from the start of I.
    """
    link: Link = field(default_factory=Link)
    """Default link between two ranks."""
    links: Links = field(default_factory=lambda: FrozenDict({}))
    """Other links, by (from rank, to rank)."""
    message_bytes: float = 0.0
    """Bytes of one microbatch sent from a stage to the next, and received back as a gradient."""
    working: Working = field(default_factory=lambda: FrozenDict({}))
    """Working memory of ops, by kind: one number for all stages, or one per stage. Missing kinds need none.

    It adds to the memory held before the op and to what the op adds. Under activation checkpointing, I and B recompute
    one block at a time, so `working` is the memory of one block and its gradients.
    """
    host: Link | None = None
    """Link between a rank and the memory of its host, for copies in each direction. None if unknown.

    A copy takes its size divided by the bandwidth, in the unit of the activations per second. Ranks that share a link
    to one host each have a part of it.
    """
    gather: float | tuple[float, ...] = 0.0
    """Seconds in which data-parallel ranks gather the parameters of a stage, once a step: one number for all stages, or
    one per stage.

    A step begins with the gathers, in the order in which the rank needs its stages. A stage's first F runs beside the
    gather, and ends no earlier.
    """
    reduce: float | tuple[float, ...] = 0.0
    """Seconds in which data-parallel ranks reduce the gradients of a stage, once a step: one number for all stages, or
    one per stage.

    The reduction runs beside the computations, from the start of the stage's last W or B.
    """
    overhead: float = 0.0
    """Seconds that each op takes besides its computation: Python, launches, gaps between kernels. B has it once.

    `zbpipe.Profiler` measures it. It lengthens schedules with more ops: I and W apart, several stages per rank. With
    Megatron on A100 GPUs about 1 ms fits the published steps (docs/hardware.md). The default counts none.
    """
    in_bytes: bool = field(default=True, compare=False, repr=False)
    """Whether memory is in bytes. False if 1 is a rank's share of one microbatch."""

    def __post_init__(self) -> None:
        what = "the costs of stages"
        columns = {name: amounts(what, name, getattr(self, name), "stage") for name in COLUMNS}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"f, i, w and activations need one number for each stage, got {lengths}")
        if not columns["f"]:
            raise ValueError("the costs of stages need at least one stage: f, i, w and activations are empty")
        shared: dict[str, Callable[[Any], float]] = {"freed_by_i": partial(share, what)}
        shared |= {name: partial(amount, what, name) for name in OF_DATA_PARALLELISM}
        set_fields(
            self,
            **columns,
            **{name: _one_or_each(name, getattr(self, name), lengths["f"], read) for name, read in shared.items()},
            overhead=amount(what, "overhead", self.overhead),
            working=check_working(what, self.working, lengths["f"], "stage"),
            **check_messages(what, self.link, self.links, self.message_bytes, self.host),
        )

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
        working: Working | None = None,
        host: Link | None = None,
        overhead: float = 0.0,
    ) -> CostModel:
        """Equal costs on every rank. The unit of memory is a rank's share of one microbatch.

            >>> CostModel.uniform(Placement.v(1), w=0.5).w
            (0.25, 0.25)

        Args:
            placement: placement of the schedule. The time of a rank is shared equally by its stages.
            f: seconds that a rank spends on the forward of one microbatch, over all its stages; `i` and `w`
                accordingly.
            comm: seconds from one rank to another.
            freed_by_i: share of the activations that I frees, negative if it allocates more.
            working: working memory by kind of op, in units of a rank's share of one microbatch.
            host: link to the memory of the host, with a bandwidth in a rank's shares of one microbatch per second.
            overhead: seconds that each op takes besides its computation.

        Raises:
            TypeError: the placement is not a Placement, or another argument is not a number.
            ValueError: a number is negative or not finite.
        """
        if not isinstance(placement, Placement):
            raise TypeError(f"uniform costs need a zbpipe.Placement, for example Placement.loop(4), got {placement!r}")
        parts = [1 / len(placement.stages_on(rank)) for rank in placement.rank_of]

        def shared(name: str, time: float) -> tuple[float, ...]:
            seconds = amount("uniform costs", name, time)
            return tuple(seconds * part for part in parts)

        link = Link(amount("uniform costs", "comm", comm))
        return cls(
            shared("f", f),
            shared("i", i),
            shared("w", w),
            tuple(parts),
            freed_by_i,
            link,
            working=working or {},
            host=host,
            overhead=overhead,
            in_bytes=False,
        )

    @property
    def num_stages(self) -> int:
        return len(self.f)

    def seconds(self, stage: int, kind: OpKind) -> float:
        """Seconds of one op. A copy takes no time if the link to the host is unknown."""
        match kind:
            case OpKind.F:
                return self.f[stage] + self.overhead
            case OpKind.I:
                return self.i[stage] + self.overhead
            case OpKind.W:
                return self.w[stage] + self.overhead
            case OpKind.B:
                return self.i[stage] + self.w[stage] + self.overhead
            case OpKind.OF | OpKind.RF | OpKind.OI | OpKind.RI:
                return 0.0 if self.host is None else self.host.seconds(abs(self.adds(stage, kind)))

    @property
    def has_fsdp(self) -> bool:
        """Whether data-parallel ranks gather parameters or reduce gradients."""
        return bool(self.gather or self.reduce)

    def gathering(self, stage: int) -> float:
        """Seconds of the gather of a stage's parameters."""
        return _of_stage(self.gather, stage)

    def reduction(self, stage: int) -> float:
        """Seconds of the reduction of a stage's gradients."""
        return _of_stage(self.reduce, stage)

    def needs(self, stage: int, kind: OpKind) -> float:
        """Memory that has to be free on the rank before an op: the memory that it adds, and its working memory.

        >>> costs = CostModel((1,), (1,), (1,), activations=(4,), freed_by_i=-0.5, working={OpKind.I: 3})
        >>> costs.needs(0, OpKind.F), costs.needs(0, OpKind.I), costs.needs(0, OpKind.W)
        (4.0, 5.0, 0.0)
        """
        return self._needs[kind][stage]

    @cached_property
    def _needs(self) -> dict[OpKind, list[float]]:
        """Cached, because simulations and searches ask often."""
        stages = range(self.num_stages)
        return {
            kind: [max(self.adds(stage, kind), 0.0) + self.working_of(stage, kind) for stage in stages]
            for kind in OpKind
        }

    def working_of(self, stage: int, kind: OpKind) -> float:
        """Working memory of an op."""
        working = self.working.get(kind)
        return working[stage] if isinstance(working, tuple) else 0.0

    def freed_share(self, stage: int) -> float:
        """Share of a stage's activations that I frees."""
        return _of_stage(self.freed_by_i, stage)

    def adds(self, stage: int, kind: OpKind) -> float:
        """Memory that one op adds to its rank: from its start if positive, else at its end."""
        return self._adds[kind][stage]

    @cached_property
    def _adds(self) -> dict[OpKind, list[float]]:
        size = list(self.activations)
        freed = [each * self.freed_share(stage) for stage, each in enumerate(size)]
        less, by_i = [-each for each in size], [-each for each in freed]
        by_w = [one - each for one, each in zip(freed, size, strict=True)]
        again = [each - one for one, each in zip(freed, size, strict=True)]
        return {
            **dict.fromkeys((OpKind.F, OpKind.RF), size),
            **dict.fromkeys((OpKind.B, OpKind.OF), less),
            **dict.fromkeys((OpKind.W, OpKind.OI), by_w),
            OpKind.I: by_i,
            OpKind.RI: again,
        }

    def waits(self, stage: int) -> float:
        """Deferred gradients of a stage for one microbatch, from I to W."""
        return -self.adds(stage, OpKind.W)

    def saves_by_b(self, stage: int) -> bool:
        """Whether B needs less memory than I and then W, so that it may replace them.

        >>> costs = CostModel((1, 1), (1, 1), (1, 1), activations=(1, 1), freed_by_i=(0.0, -2.0))
        >>> [costs.saves_by_b(stage) for stage in range(2)]
        [False, True]
        """
        return self._peaks(stage)[0] < self._peaks(stage)[1]

    def fits_by_b(self, stage: int) -> bool:
        """Whether B needs no more memory than I and then W."""
        return self._peaks(stage)[0] <= self._peaks(stage)[1]

    def _peaks(self, stage: int) -> tuple[float, float]:
        """Memory that has to be free for B, and for I and then W."""
        i, w, b = (self.needs(stage, kind) for kind in (OpKind.I, OpKind.W, OpKind.B))
        return b, max(i, self.adds(stage, OpKind.I) + w)

    def least_backward(self, stage: int) -> tuple[OpKind, ...]:
        """The kinds of ops with the least peak memory for a backward that is not deferred."""
        return (OpKind.B,) if self.saves_by_b(stage) else (OpKind.I, OpKind.W)

    def transfer(self, sender: int, receiver: int) -> float:
        """Seconds from the end of an op on one rank to the arrival of its result on another. 0 on the same rank."""
        if sender == receiver:
            return 0.0
        return self.links.get((sender, receiver), self.link).seconds(self.message_bytes)


def _one_or_each(name: str, given: Any, stages: int, read: Callable[[Any], float]) -> float | tuple[float, ...]:
    """One number for all stages, or one for each."""
    given = as_python(given)
    if not isinstance(given, (tuple, list)):
        return read(given)
    if len(given) != stages:
        raise ValueError(f"{name} has to be one number, or one for each stage: got {len(given)} for {stages}")
    return tuple(map(read, given))


def _of_stage(given: float | tuple[float, ...], stage: int) -> float:
    return given[stage] if isinstance(given, tuple) else given


def least_room(placement: Placement, costs: CostModel) -> tuple[float, ...]:
    """Peak memory of each rank for one microbatch that runs alone, in the unit of `costs.activations`."""
    return tuple(_peak(costs, placement.stages_on(rank)) for rank in range(placement.num_ranks))


def too_small(least: Sequence[float], limits: Sequence[float]) -> list[int]:
    """Ranks that cannot hold one microbatch, which needs `least` there."""
    return [rank for rank, needed in enumerate(least) if not limits[rank] >= needed * (1 - ROUNDING)]


class LimitTooSmallError(ValueError):
    """Error for a memory limit that cannot hold even one microbatch.

    Its arguments are the limit and the least sufficient one (numbers, or text in the user's unit), the rank, and an
    addition to the message. Pickle copies them.
    """

    def __str__(self) -> str:
        limit, least, rank, more = self.args
        limit, least = (each if isinstance(each, str) else f"{each:.12g}" for each in (limit, least))
        return (
            f"memory_limit = {limit} is too small{more}: one microbatch peaks at {least} on rank {rank}; give at least"
            " that, or cut the batch into more microbatches"
        )


def require_room(placement: Placement, costs: CostModel, limits: Sequence[float], more: str = "") -> None:
    """Raise LimitTooSmallError, with the least sufficient limit, if a limit is too small for one microbatch.

    Args:
        placement: placement of the stages.
        costs: costs of the stages.
        limits: memory limit of each rank, in the unit of `costs.activations`.
        more: addition to the message.
    """
    least = least_room(placement, costs)
    if short := too_small(least, limits):
        rank = max(short, key=least.__getitem__)
        raise LimitTooSmallError(limits[rank], least[rank], rank, more)


def most_room(placement: Placement, costs: CostModel, num_microbatches: int) -> tuple[float, ...]:
    """Upper bound of each rank's memory in any order of its ops, in the unit of `costs.activations`."""

    def most(stages: tuple[int, ...]) -> float:
        kept = sum(max(costs.activations[stage], costs.waits(stage)) for stage in stages)
        return num_microbatches * kept + max(costs.needs(stage, kind) for stage in stages for kind in COMPUTATIONS)

    return tuple(most(placement.stages_on(rank)) for rank in range(placement.num_ranks))


def _peak(costs: CostModel, stages: tuple[int, ...]) -> float:
    """Peak of F of all stages, then each backward. No other order needs less."""
    forward = [(stage, OpKind.F) for stage in stages]
    backward = [(stage, kind) for stage in reversed(stages) for kind in costs.least_backward(stage)]
    return highest(costs, (*forward, *backward))


def highest(costs: CostModel, ops: Iterable[tuple[int, OpKind]]) -> float:
    """Peak of a rank that runs ops of these stages and kinds in this order, starting with no memory."""
    held = most = 0.0
    for stage, kind in ops:
        most = max(most, held + costs.needs(stage, kind))
        held += costs.adds(stage, kind)
    return most


def rank_shares(placement: Placement, costs: CostModel) -> tuple[float, ...]:
    """Memory that each rank keeps of one microbatch after all its F, in the unit of `costs.activations`."""
    return placement.sum_by_rank(costs.activations)
