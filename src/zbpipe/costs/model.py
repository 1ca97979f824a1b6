"""Costs of ops: seconds per stage for F, I and W, seconds per message, bytes of activations; transports of messages.

All memory is in the unit of `CostModel.activations`: bytes if measured. In costs that are equal on every rank
(`CostModel.uniform`) the unit is the activations of one microbatch on one rank, so 1F1B on p ranks holds p.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from itertools import repeat
from math import inf
from operator import mul
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self, get_args

from zbpipe.costs.numbers import MOST, FrozenDict, Size, amount, number, one_or_each, read_column, set_fields, share
from zbpipe.schedule.ir import COMPUTATIONS, Op, OpKind, Placement

ROUNDING = 1e-9
"""Relative tolerance for the rounding of sums of times or memory."""


@dataclass(frozen=True)
class Link:
    """The link from one rank to another: a message of n bytes takes `latency + n / bandwidth` seconds.

    >>> Link(latency=1e-5, bandwidth=1e9).seconds(2e6)
    0.00201

    Raises TypeError or ValueError for invalid numbers.
    """

    latency: float = 0.0
    bandwidth: float = inf
    """Bytes per second."""

    def __post_init__(self) -> None:
        latency = amount("a link", "latency", self.latency)
        refusal = f"a link cannot have bandwidth = {self.bandwidth!r}: give a number above 0"
        bandwidth = number(self.bandwidth, refusal)
        if not bandwidth >= 1 / MOST:
            raise ValueError(refusal)
        set_fields(self, latency=latency, bandwidth=bandwidth)

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


Links = Mapping[tuple[int, int], Link]
COLUMNS = ("f", "i", "w", "activations")
"""Fields with one number per stage or layer."""
SENDS = ("SEND_F", "SEND_B")
"""Messages with the result of a forward, and of a backward, named like torch's actions."""
GATHER, REDUCE = "UNSHARD", "REDUCE_GRAD"
"""Collectives of a stage, named like torch's actions."""
FillWaits = Literal["off", "own", "all"]
"""Waits with products of W: none; those of I and B, with products of the op's stage; also those of F, with products of
all the rank's stages."""
OF_DATA_PARALLELISM = ("gather", "reduce")
"""Fields with one number for all stages or layers, or one for each."""


class Named(StrEnum):
    @classmethod
    def parse(cls, text: str) -> Self:
        """The member called `text`, with spaces, dashes or underscores between the words.

        >>> Transport.parse("one-queue") is Transport.ONE_QUEUE
        True
        """
        names = f"use one of {cls.names()}"
        if not isinstance(text, str):
            raise TypeError(f"{cls.__name__.lower()}={text!r} is not a string: {names}")
        try:
            return cls(text.lower().replace("-", " ").replace("_", " "))
        except ValueError:
            raise ValueError(f"{cls.__name__.lower()}={text!r} is unknown: {names}") from None

    @classmethod
    def names(cls) -> str:
        return ", ".join(repr(each.value.replace(" ", "-")) for each in cls)


class Transport(Named):
    """Which messages wait for each other."""

    IDEAL = "ideal"
    """None: each message leaves when its computation ends."""
    ONE_QUEUE = "one queue"
    """One queue per rank. A message starts when both ends have reached it, as with NCCL and RCCL."""
    QUEUE_PER_PEER = "queue per peer"
    """One queue per pair of ranks, as with a communicator or process group for each pair."""
    SHARED = "shared with compute"
    """One queue for messages and computations: a waiting message delays its rank. Some drivers and environment
    variables make streams share the hardware's queues."""
    BLOCKING = "blocking"
    """An op ends when its message has arrived, as in Megatron's interleaved schedules without overlap."""

    @property
    def has_queues(self) -> bool:
        """Whether the time when a rank posts its receives matters."""
        return self not in (Transport.IDEAL, Transport.BLOCKING)


class Receives(Named):
    """When a rank posts its receives."""

    EARLY = "early"
    """As in torch: where the other rank sends if all computations take the same time."""
    LATE = "late"
    """Before the computation that needs the message, or before the next message of the rank."""
    TIMED = "timed"
    """Before the computation during which the message starts, according to a simulation."""
    NEAREST = "nearest"
    """Between the two computations nearest to that start, so that the rank waits little."""
    RENDEZVOUS = "rendezvous"
    """Between computations, where both ranks are free first. In the simulation each message blocks both ranks."""


class OpCosts(NamedTuple):
    """Costs of one op, message or collective."""

    seconds: float = 0.0
    """Seconds that it takes. For a message see `CostModel.transfer`."""
    adds: float = 0.0
    """Memory added to the rank: at the op's start if positive, else at its end."""
    working: float = 0.0
    """Working memory while it runs."""
    message: float = 0.0
    """Bytes of a message."""
    hides: float = 0.0
    """Most seconds of W's products that run in its waits for collectives."""

    @property
    def needs(self) -> float:
        """Free memory that it needs: the memory that it adds, and its working memory."""
        return max(self.adds, 0.0) + self.working

    @property
    def frees(self) -> float:
        return -self.adds


@dataclass(frozen=True, kw_only=True)
class CommonCosts:
    """Common fields of the costs of stages and of layers."""

    freed_by_i: float | tuple[float, ...] = 0.0
    """Share of the activations that I frees, at most 1: one number for all stages or layers, or one for each.

    W frees the rest. Negative if W needs more than F kept, as under activation checkpointing. That memory counts from
    the start of I.
    """
    link: Link = field(default_factory=Link)
    """Default link between two ranks."""
    links: Links = field(default_factory=lambda: FrozenDict({}))
    """Other links, by (from rank, to rank)."""
    message_bytes: float = 0.0
    """Bytes of one microbatch sent from a stage to the next, and received back as a gradient."""
    working: Mapping[OpKind, float | tuple[float, ...]] = field(default_factory=lambda: FrozenDict({}))
    """Working memory of ops, by kind: one number for all stages or layers, or one for each. Missing kinds need none.

    It adds to the memory held and added. With checkpointing, I and B recompute one block at a time."""
    waits: Mapping[OpKind, float | tuple[float, ...]] = field(default_factory=lambda: FrozenDict({}))
    """Seconds of F and of I in which they wait for collectives (of tensor, expert or context parallelism), by kind: one
    number for all stages or layers, or one for each. Missing kinds do not wait. F and I include them."""
    fill_waits: FillWaits = "off"
    """Which of these waits run products of W, as the job's option says. W and B then take less time."""
    host: Link | None = None
    """Link from a rank to its host's memory, and back, in the unit of the activations per second. None if unknown."""
    overhead: float = 0.0
    """Seconds of each op of a stage besides its computation: Python, launches, gaps between kernels. B has it once.
    `zbpipe.Profiler` measures it. On A100 GPUs about 1 ms fits Megatron's published steps (docs/hardware.md)."""
    attention: float | tuple[float, ...] = 0.0
    """Share of F and of I that attention takes: one number for all stages or layers, or one for each. With `sizes` it
    grows with the squared lengths of samples, and everything else but `overhead` with tokens."""
    sizes: tuple[Any, ...] = ()
    """Size of each microbatch of a step: its tokens (in samples of usual length), or a pair of its tokens and the sum
    of its samples' squared lengths; a `Size` once parsed. Empty if all are alike. Memory limits hold for the largest
    one, in any order."""
    of_size: Any = None
    """Size of the microbatch that all other fields are for: a pair, or the tokens of one sample. Default: the mean."""

    def check_common(self, what: str, seconds: Mapping[OpKind, Sequence[float]], each: str) -> None:
        """Check these fields for stages or layers with these times, and set them in their usual form."""
        count = len(seconds[OpKind.F])
        ways: dict[str, Any] = {"link": self.link, "host": self.host or self.link}
        for name, given in ways.items():
            if not isinstance(given, Link):
                raise TypeError(_cannot(what, name, given, "a zbpipe.costs.Link, for example Link(bandwidth=25e9)"))
        if not isinstance(self.links, Mapping):
            raise TypeError(_cannot(what, "links", self.links, "zbpipe.costs.Links by (from rank, to rank)"))
        for key, link in self.links.items():
            is_pair = isinstance(key, tuple) and len(key) == 2 and all(type(rank) is int and rank >= 0 for rank in key)
            if not is_pair or not isinstance(link, Link):
                raise TypeError(_cannot(what, "links", {key: link}, "a zbpipe.costs.Link for each pair of ranks"))
        set_fields(
            self,
            links=FrozenDict(self.links),
            message_bytes=amount(what, "message_bytes", self.message_bytes),
            working=_check_by_kind(what, "working", self.working, count, each),
            waits=_check_by_kind(what, "waits", self.waits, count, each, tuple(seconds)),
            freed_by_i=one_or_each(what, "freed_by_i", self.freed_by_i, count, each, share),
            overhead=amount(what, "overhead", self.overhead),
            attention=one_or_each(what, "attention", self.attention, count, each, partial(share, least=0.0)),
            of_size=None if self.of_size is None else Size.parse(what, self.of_size),
        )
        set_fields(self, sizes=self._check_sizes(what))
        if self.fill_waits not in get_args(FillWaits):
            raise ValueError(f"{what} cannot have fill_waits = {self.fill_waits!r}: use 'off', 'own' or 'all'")
        for kind, waits in self.waits.items():
            for place, (wait, whole) in enumerate(zip(_each(waits, count), seconds[kind], strict=True)):
                if wait > whole * (1 + ROUNDING):
                    reason = f"its {kind} takes {whole!r}, waits included"
                    raise ValueError(f"{what} cannot have waits[{kind}] = {wait!r} for {each} {place}: {reason}")

    def _check_sizes(self, what: str) -> tuple[Size, ...]:
        given = self.sizes.tolist() if hasattr(self.sizes, "tolist") else self.sizes
        if not isinstance(given, (tuple, list)):
            raise TypeError(_cannot(what, "sizes", given, "the tokens of each microbatch, like (4096, 2048)"))
        if self.of_size is None and len({isinstance(each, (tuple, list)) for each in given}) > 1:
            raise ValueError(
                f"{what} cannot have sizes = {given!r}, of numbers and pairs: give pairs for all microbatches"
            )
        length = self.of_size.squares / self.of_size.tokens if self.of_size else 1.0
        return tuple(Size.parse(what, each, length) for each in given)

    @property
    def varies(self) -> bool:
        """Whether microbatches differ in size."""
        return len(set(self.sizes)) > 1

    def require_microbatches(self, microbatches: int) -> None:
        if self.sizes and len(self.sizes) != microbatches:
            raise ValueError(
                f"the costs have the sizes of {len(self.sizes)} microbatches, but the step has {microbatches}: give one"
                " size for each"
            )


@dataclass(frozen=True)
class CostModel(CommonCosts):
    """Costs per stage. Times are seconds per microbatch, memory is the activations of one microbatch.

        >>> costs = CostModel(f=(1, 1), i=(1, 1), w=(1, 2), activations=(3e9, 1e9), freed_by_i=0.25)
        >>> costs.num_stages, costs.of(0, OpKind.I)
        (2, OpCosts(seconds=1.0, adds=-750000000.0, working=0.0, message=0.0, hides=0.0))

    Raises TypeError or ValueError for invalid numbers, and for lists of different lengths.
    """

    f: tuple[float, ...]
    """Seconds of the forward, one number per stage."""
    i: tuple[float, ...]
    """Seconds of the backward for the input (dI), with any recomputation."""
    w: tuple[float, ...]
    """Seconds of the backward for the weights (dW)."""
    activations: tuple[float, ...]
    """Memory kept of one microbatch after F, in bytes or shares of a rank's microbatch. The unit of all memory."""
    _: KW_ONLY
    gather: float | tuple[float, ...] = 0.0
    """Seconds in which data-parallel ranks gather a stage's parameters once a step: one number for all stages, or one
    for each. A step begins with the gathers. A stage's first F overlaps its gather, and ends no earlier."""
    reduce: float | tuple[float, ...] = 0.0
    """As `gather`, for the reduction of gradients. It overlaps computations from the stage's last W or B on."""
    in_bytes: bool = field(default=True, compare=False, repr=False)
    """Whether memory is in bytes. Otherwise the unit is one microbatch on one rank."""

    def __post_init__(self) -> None:
        what = "the costs of stages"
        columns: dict[str, Any] = {name: read_column(what, name, getattr(self, name)) for name in COLUMNS}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"f, i, w and activations need one number for each stage, got {lengths}")
        if not columns["f"]:
            raise ValueError("the costs of stages need at least one stage: f, i, w and activations are empty")
        for name in OF_DATA_PARALLELISM:
            columns[name] = one_or_each(what, name, getattr(self, name), lengths["f"], "stage")
        set_fields(self, **columns)
        self.check_common(what, {OpKind.F: columns["f"], OpKind.I: columns["i"]}, "stage")

    @classmethod
    def uniform(
        cls, placement: Placement, f: float = 1.0, i: float = 1.0, w: float = 1.0, *, comm: float = 0.0, **others: Any
    ) -> CostModel:
        """Equal costs on every rank. The unit of memory is one microbatch's activations on one rank.

            >>> CostModel.uniform(Placement.v(1), w=0.5).w
            (0.25, 0.25)

        `f`, `i` and `w` are the seconds of a rank for one microbatch, shared equally by its stages, `comm` those of a
        message, and `others` fields of the costs, such as `freed_by_i`. TypeError or ValueError for invalid ones.
        """
        if not isinstance(placement, Placement):
            raise TypeError(f"uniform costs need a zbpipe.Placement, for example Placement.loop(4), got {placement!r}")
        parts = [1 / len(placement.stages_on(rank)) for rank in placement.rank_of]
        seconds = (amount("uniform costs", name, each) for name, each in (("f", f), ("i", i), ("w", w)))
        columns = (tuple(each * part for part in parts) for each in (*seconds, 1.0))
        return cls(*columns, link=Link(amount("uniform costs", "comm", comm)), in_bytes=False, **others)

    @property
    def num_stages(self) -> int:
        return len(self.f)

    @property
    def has_fsdp(self) -> bool:
        return bool(self.gather or self.reduce)

    def of(self, stage: int, kind: str, microbatch: int = -1) -> OpCosts:
        """Costs of an op, of a message in `SENDS`, or of a stage's collective `GATHER` or `REDUCE`: `costs.of(*op)`.

            >>> costs = CostModel((1,), (1,), (1,), activations=(4,), freed_by_i=-0.5, working={OpKind.I: 3})
            >>> [costs.of(0, kind).needs for kind in (OpKind.F, OpKind.I, OpKind.W)]
            [4.0, 5.0, 0.0]

        -1 stands for any microbatch. If their sizes differ, that has their mean times, and the largest one's memory.
        """
        return self._of[microbatch if self.sizes else -1][kind][stage]

    @cached_property
    def by_microbatch(self) -> tuple[CostModel, ...]:
        """Costs of steps in which all microbatches have the size of the first, the second, and so on."""
        return tuple(map(self._scaled, *self._ratios)) if self.sizes else ()

    @cached_property
    def alike(self) -> CostModel:
        """Costs of a step whose microbatches all have the mean times, and the largest one's memory and messages."""
        if not self.varies:
            return self.by_microbatch[0] if self.sizes else self
        mean, largest = self._scaled(*map(fmean, self._ratios)), self._scaled(*map(max, self._ratios))
        return replace(largest, f=mean.f, i=mean.i, w=mean.w, waits=mean.waits)

    @property
    def least(self) -> CostModel:
        """Costs that no microbatch is below."""
        return self._scaled(*map(min, self._ratios)) if self.sizes else self

    @property
    def _ratios(self) -> list[list[float]]:
        """Tokens and squares of each microbatch, relative to the one that the costs are of."""
        own = self.of_size or self.sizes[0]
        if self.of_size is None and self.varies:  # else rounding would change equal costs
            own = Size(*map(fmean, zip(*self.sizes, strict=True)))
        return [
            [each / unit for each in column] for column, unit in zip(zip(*self.sizes, strict=True), own, strict=True)
        ]

    def _scaled(self, tokens: float, squares: float) -> CostModel:
        by_squares = [tokens + share * (squares - tokens) for share in self.by_stage(self.attention)]

        def scale(given: Any, factors: Iterable[float]) -> Any:
            if isinstance(given, Mapping):
                return {kind: scale(each, factors) for kind, each in given.items()}
            return tuple(map(mul, given, factors))

        scaled = {name: scale(getattr(self, name), by_squares) for name in ("f", "i", "waits")}
        scaled |= {name: scale(getattr(self, name), repeat(tokens)) for name in ("w", "activations", "working")}
        return replace(self, **scaled, message_bytes=self.message_bytes * tokens, sizes=())

    @cached_property
    def _of(self) -> list[dict[str, list[OpCosts]]]:
        """Costs by microbatch, and last those of any. Cached, because simulations and searches ask often."""
        return [each._table() for each in (*self.by_microbatch, self.alike)]

    def _table(self) -> dict[str, list[OpCosts]]:
        size = self.activations
        by_i = [each * part for each, part in zip(size, self.by_stage(self.freed_by_i), strict=True)]
        deferred = [each - freed for each, freed in zip(size, by_i, strict=True)]
        host = self.host or Link()

        def op(kind: OpKind, seconds: Sequence[float], frees: Sequence[float]) -> list[OpCosts]:
            working = self.by_stage(self.working.get(kind, 0.0))
            fills = self.fill_waits == "all" or (self.fill_waits == "own" and kind is not OpKind.F)
            waits = self.by_stage(self.waits.get(OpKind.I if kind is OpKind.B else kind, 0.0) if fills else 0.0)
            columns = zip(seconds, frees, working, waits, strict=True)
            return [OpCosts(time + self.overhead, -freed, used, 0.0, wait) for time, freed, used, wait in columns]

        def copy(adds: Sequence[float]) -> list[OpCosts]:
            return [OpCosts(host.seconds(abs(each)) if self.host else 0.0, each) for each in adds]

        less, by_w = [-each for each in size], [-each for each in deferred]
        whole = [i + w for i, w in zip(self.i, self.w, strict=True)]
        return {
            OpKind.F: op(OpKind.F, self.f, less),
            OpKind.I: op(OpKind.I, self.i, by_i),
            OpKind.W: op(OpKind.W, self.w, deferred),
            OpKind.B: op(OpKind.B, whole, size),
            OpKind.OF: copy(less),
            OpKind.RF: copy(size),
            OpKind.OI: copy(by_w),
            OpKind.RI: copy(deferred),
            **dict.fromkeys(SENDS, [OpCosts(message=self.message_bytes)] * self.num_stages),
            GATHER: [OpCosts(each) for each in self.by_stage(self.gather)],
            REDUCE: [OpCosts(each) for each in self.by_stage(self.reduce)],
        }

    def by_stage(self, given: float | tuple[float, ...]) -> tuple[float, ...]:
        return _each(given, self.num_stages)

    def transfer(self, sender: int, receiver: int, message: float | None = None) -> float:
        """Seconds of a message (its bytes, default `message_bytes`) from one rank to another. 0 on the same rank."""
        if sender == receiver:
            return 0.0
        link = self.links.get((sender, receiver), self.link)
        return link.seconds(self.message_bytes if message is None else message)

    def saved_by_b(self, stage: int) -> float:
        """Memory that B needs less than I and then W. Negative if B needs more."""
        i, w, b = (self.of(stage, kind) for kind in (OpKind.I, OpKind.W, OpKind.B))
        return max(i.needs, i.adds + w.needs) - b.needs

    def least_backward(self, stage: int) -> tuple[OpKind, ...]:
        """Op kinds of the backward with the least peak memory, without deferral."""
        return (OpKind.B,) if self.saved_by_b(stage) > 0 else (OpKind.I, OpKind.W)


def _cannot(what: str, name: str, given: object, way_out: str) -> str:
    return f"{what} cannot have {name} = {given!r}: give {way_out}"


def _check_by_kind(
    what: str, field: str, given: Any, count: int, each: str, kinds: Sequence[OpKind] = COMPUTATIONS
) -> FrozenDict[OpKind, tuple[float, ...]]:
    """Numbers by op kind, one for `each` of `count` stages or layers."""
    if not isinstance(given, Mapping) or not all(isinstance(kind, OpKind) and kind in kinds for kind in given):
        raise TypeError(
            f"{what} cannot have {field} = {given!r}: give numbers by zbpipe.OpKind"
            f" {', '.join(kinds[:-1])} or {kinds[-1]}, for example {{OpKind.I: 2}}"
        )
    found = {kind: one_or_each(what, f"{field}[{kind}]", given[kind], count, each) for kind in given}
    return FrozenDict({kind: _each(read, count) for kind, read in found.items()})


def _each(given: float | tuple[float, ...], count: int) -> tuple[float, ...]:
    return given if isinstance(given, tuple) else (given,) * count


def highest(costs: CostModel, ops: Iterable[Op | tuple[int, OpKind]]) -> float:
    """Peak of a rank that runs these ops, or any of these stages and kinds, starting with no memory."""
    held = most = 0.0
    for op in ops:
        cost = costs.of(*op)
        most = max(most, held + cost.needs)
        held += cost.adds
    return most
