"""Work of a job before it is cut into stages: operations, parameters and bytes of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zbpipe.costs.job import ENOUGH, MemoryLimit
from zbpipe.costs.layers import Split
from zbpipe.costs.model import CostModel, FillWaits
from zbpipe.costs.transformer import Checkpointing
from zbpipe.schedule.ir import COMPUTATIONS, OpKind, Placement, count_noun

ASYNC_TENSOR = 0.48
"""Share of TP's communication that torch's asynchronous TP hides. TorchTitan, June 2025: with TP 8, it shortens steps
of Llama 3 8B and 70B by 9 and 8 %."""
_LAUNCHES = {False: 1.0, True: 2.1}
"""Launches of a block, by whether it has experts. TorchTitan 0.3, F and B: 100 operations that are no views in Llama 3,
215 in Qwen 3 with experts, 202 in GPT-OSS."""


@dataclass(frozen=True)
class Degrees:
    """Sizes of the parallel dimensions."""

    pipeline: int = 1
    tensor: int = 1
    fsdp: int = 1
    """Number of groups with different data that share parameters, gradients and optimizer."""
    replicas: int = 1
    context: int = 1
    """Number of GPUs that share each sequence. They also hold shards."""
    experts: int = 1
    """Number of GPUs over which a block's experts are spread. They also share sequences or shards."""

    @property
    def gpus(self) -> int:
        return self.pipeline * self.tensor * self.context * self.fsdp * self.replicas

    @property
    def data(self) -> int:
        """Number of GPUs, or groups of GPUs, with different data."""
        return self.fsdp * self.replicas

    @property
    def shards(self) -> int:
        """Number of GPUs that share parameters, gradients and optimizer of a tensor-parallel part."""
        return self.fsdp * self.context

    @property
    def sharing(self) -> int:
        """Number of GPUs that share a layer's operations on a microbatch."""
        return self.tensor * self.context

    @property
    def without_pipeline(self) -> Degrees:
        """FSDP on all GPUs that do not share sequences."""
        return Degrees(1, self.tensor, self.gpus // self.sharing, 1, self.context, self.experts)

    def __str__(self) -> str:
        names = ("PP", self.pipeline), ("TP", self.tensor), ("CP", self.context), ("FSDP", self.fsdp)
        shown = (*names, ("replicas", self.replicas), ("EP", self.experts))
        return " x ".join(f"{name} {size}" for name, size in shown if size > 1) or "1 GPU"


class Held(NamedTuple):
    """Parameters with which each GPU computes."""

    number: float
    shards: int
    """Number of GPUs that share them."""
    apart: int
    """Number of GPUs from one of these to the next."""

    @property
    def own(self) -> float:
        """Number of parameters whose optimizer runs on one GPU."""
        return self.number / self.shards


class Spelling(NamedTuple):
    """How a job's options are written."""

    schedule: str = "schedule {}"
    memory_limit: str = "memory-limit {}"
    checkpointing: str = "checkpointing {}"
    batch: str = ""
    """From the three numbers of `Workload.batch`."""
    degrees: tuple[tuple[str, str], ...] = (("pipeline", "degree {}"),)
    fill_waits: str = 'fill_waits="{}"'


@dataclass(frozen=True)
class ParameterBytes:
    """Memory of a GPU for each parameter of its stages.

    A pipeline reduces each gradient in place of its sum. Reduced gradients need memory of their own only if they remain
    from an earlier pipeline step.

        >>> ParameterBytes().total(shards=8), ParameterBytes(accumulates=True).total(shards=8)
        (7.5, 8.0)
    """

    gathered: float = 2.0
    """Copy for products, whole during a pipeline's step."""
    summed: float = 4.0
    """Sum of the gradients of all microbatches, before reduction."""
    stored: float = 4.0
    """A parameter, a reduced gradient, or one of the optimizer's two moments. Each is sharded."""
    accumulates: bool = False
    """Whether an optimizer step consists of several pipeline steps."""

    def weights(self, shards: int) -> float:
        return self.gathered + self.stored / shards

    def optimizer(self, shards: int) -> float:
        reduced = self.stored / shards
        gradients = self.summed + reduced if self.accumulates else max(self.summed, reduced)
        return gradients + 2 * reduced

    def total(self, shards: int) -> float:
        return self.weights(shards) + self.optimizer(shards)


@dataclass(frozen=True)
class LayerWork:
    """Work of a piece of the model that stays on one stage, for one microbatch. Bytes are per GPU."""

    modules: tuple[str, ...]
    f: float
    """Floating-point operations of F, summed over all GPUs that share the layer."""
    i: float
    """Operations of I, with any recomputation."""
    w: float
    parameters: float
    """Number of parameters, summed over all GPUs that share them."""
    activations: float
    """Bytes kept from F to I; `waits` from I to W."""
    waits: float
    working: tuple[tuple[OpKind, float], ...] = ()
    """Working memory of ops, in bytes."""
    transfers: tuple[int, int] = (0, 0)
    """Number of tensor-parallel collectives over one hidden state, in F and in I."""
    attention: tuple[float, float] = (0.0, 0.0)
    """Operations of attention in `f` and in `i`. All others are products."""
    traffic: tuple[float, float] = (0.0, 0.0)
    """Bytes that norms, activation functions and sums read and write in F and in I, summed over all GPUs."""
    keys: float = 0.0
    """Bytes of keys and values, which context parallelism gathers."""
    num_experts: int = 0
    """Number of routed experts, with `in_experts` of the parameters in all of them."""
    in_experts: float = 0.0
    routed: float = 0.0
    """Bytes of hidden states, once per expert that computes them. Expert parallelism sends them there and back."""
    in_routed: float = 0.0
    """Share of the products that routed experts compute."""

    @property
    def is_block(self) -> bool:
        return self.modules[0].startswith("layers.")


@dataclass(frozen=True)
class Workload:
    """Work of a job in one step, and its degrees.

    Source: `zbpipe.frameworks.titan.models.workload_of` (a TorchTitan config), `load_layers` (a file).
    """

    name: str
    layers: tuple[LayerWork, ...]
    degrees: Degrees
    microbatches: int
    """Number of microbatches in the step of one pipeline."""
    tokens: int
    """Tokens of one microbatch."""
    message_bytes: float
    """Bytes sent from a stage to the next for one microbatch, from GPU to GPU."""
    operations: float
    """Floating-point operations of the model per token, without recomputation, for MFU."""
    words: str
    """Source of operations and bytes."""
    schedule: str = "1F1B"
    checkpointing: Checkpointing | None = None
    """Activation checkpointing, for schedules that adapt to it. None if unknown."""
    compiled: bool = False
    float8: bool = False
    """Whether the products of blocks are in float8."""
    hidden_tensor: float = 0.0
    """Share of TP's communication that overlaps products. See `ASYNC_TENSOR`."""
    fill_waits: FillWaits = "off"
    """Which waits for collectives run W's products. Not those of compiled blocks."""
    sends_once: bool = False
    """Whether expert parallelism sends a token only once to each node, as DeepEP does."""
    overlaps_fsdp: bool = False
    """Whether gathers and reductions overlap computation in torch's schedules, too, as in Megatron."""
    parameter_bytes: ParameterBytes = field(default_factory=ParameterBytes)
    times: tuple[tuple[float, ...], ...] | None = None
    """Seconds of F, I and W of each layer on a usual GPU, for the cut before launch. None if only the work is known."""
    cut: tuple[int, ...] | None = None
    """The user's layers per stage, for placements with this number of stages."""
    num_stages: int | None = None
    """The user's number of stages."""
    ends: tuple[int, int] | None = None
    """Number of layers that embedding and head count as, if the user wants an even split."""
    remade: Callable[[Degrees, Checkpointing | None], Workload] | None = None
    """Function that makes the same job with other degrees and another checkpointing."""
    microbatch_size: int = 1
    rounds: int = 1
    """Number of pipeline steps before each step of the optimizer."""
    deferred: float | None = None
    """Share of the weight gradients that W computes. None if unknown."""
    batch_option: str = "microbatches"
    """Option for a larger batch, in sequences of one pipeline's step."""
    memory_limit: MemoryLimit | None = None
    """Memory limit of the job, for schedules that adapt to one."""
    options: Spelling = field(default_factory=Spelling)

    @property
    def warnings(self) -> list[str]:
        """Sentences for jobs with few microbatches, less than 80 % of the weight gradients in W, or filled waits."""
        found = few_microbatches(self.degrees.pipeline, self.microbatches, self.microbatch_size, self.batch_option)
        in_i = (
            f"W computes only {self.deferred:.0%} of the weight gradients, so schedules with I and W gain less: the"
            " job's log names the layers"
            if self.deferred is not None and self.deferred < ENOUGH
            else None
        )
        how = "changes nothing: its blocks are compiled" if self.compiled else "is untried on GPUs: halve its gain"
        fills = None if self.fill_waits == "off" else f"--zbpipe.fill-waits {self.fill_waits} {how}"
        return [each for each in (found, in_i, fills) if each]

    @property
    def global_tokens(self) -> int:
        return self.tokens * self.microbatches * self.rounds * self.degrees.data

    @property
    def batch(self) -> tuple[int, int, int]:
        """Sequences of a pipeline at a time, of the whole job, and of a pipeline in the step."""
        at_once = self.microbatches * self.microbatch_size
        return at_once, at_once * self.rounds * self.degrees.data, at_once * self.rounds

    @property
    def parameters(self) -> float:
        return sum(layer.parameters for layer in self.layers)

    @property
    def width(self) -> float:
        """Width of the hidden states, in numbers of two bytes."""
        return self.message_bytes * self.degrees.sharing / (2 * self.tokens)

    def having(self, float8: bool, async_tensor: bool) -> Workload:
        hidden = ASYNC_TENSOR if async_tensor else self.hidden_tensor
        return replace(self, float8=float8 or self.float8, hidden_tensor=hidden)

    def on(self, degrees: Degrees, checkpointing: Checkpointing | None = None) -> Workload:
        """The same step and tokens on other degrees. ValueError if they are not supported, or cannot share the step."""
        checkpointing = checkpointing or self.checkpointing
        if (degrees, checkpointing) == (self.degrees, self.checkpointing):
            return self
        sequences = self.microbatches * self.degrees.data
        microbatches, rest = divmod(sequences, degrees.data)
        if rest or not microbatches:
            raise ValueError(
                f"{sequences} microbatches of a step cannot be shared by {degrees.data} groups with different data:"
                f" {degrees}"
            )
        if self.remade is not None:
            made = self.remade(degrees, checkpointing)
            kept = {
                name: getattr(self, name)
                for name in ("float8", "hidden_tensor", "fill_waits", "memory_limit", "options", "rounds")
            }
            return replace(made, microbatches=microbatches, **kept)
        mine = self.degrees.tensor, self.degrees.context, self.checkpointing
        if (degrees.tensor, degrees.context, checkpointing) != mine:
            raise ValueError(f"these layers have costs for {self.degrees}: give others for {degrees}")
        return replace(self, degrees=degrees, microbatches=microbatches, cut=None, num_stages=None)

    def layer_costs(self, times: Callable[[LayerWork], tuple[float, float, float]]) -> CostModel:
        """Costs of the layers, each as a stage, in bytes. `times` returns the times of F, I and W."""
        layers = self.layers
        working = [dict(layer.working) for layer in layers]
        f, i, w = zip(*map(times, layers), strict=True)
        return CostModel(
            *(f, i, w),
            tuple(layer.activations for layer in layers),
            freed_by_i=tuple(1 - layer.waits / layer.activations if layer.activations else 0.0 for layer in layers),
            message_bytes=self.message_bytes,
            working={kind: tuple(each.get(kind, 0.0) for each in working) for kind in COMPUTATIONS},
        )

    def launches_by_stage(self, split: Split) -> list[float]:
        """Launches of the host, relative to those of a block without experts."""
        layers = ((self.layers[layer] for layer in stage) for stage in split)
        return [sum(_LAUNCHES[each.num_experts > 0] for each in some if each.is_block and each.w) for some in layers]

    def held(self, layers: Iterable[int]) -> tuple[Held, ...]:
        """What a GPU holds of these layers. TP cuts their weights. With EP it does not cut experts: each is whole, on
        one of `experts` GPUs, as in TorchTitan."""
        degrees = self.degrees
        spread = degrees.experts if degrees.experts > 1 else 0
        routed = sum(self.layers[layer].in_experts for layer in layers) if spread else 0.0
        others = sum(self.layers[layer].parameters for layer in layers) - routed
        own = Held(others / degrees.tensor, degrees.shards, degrees.tensor)
        if not routed:
            return (own,)
        return (own, Held(routed / spread, max(degrees.shards * degrees.tensor // spread, 1), spread))

    def held_by_rank(self, placement: Placement, split: Split) -> list[tuple[Held, ...]]:
        ranks = range(placement.num_ranks)
        return [self.held([each for stage in placement.stages_on(rank) for each in split[stage]]) for rank in ranks]


def few_microbatches(ranks: int, microbatches: int, microbatch_size: int, option: str) -> str | None:
    """A warning for fewer than 2p microbatches, with the `option` for a larger batch. None for other jobs.

    >>> few_microbatches(4, 4, 1, "--batch")
    'with 4 microbatches, 4 pipeline ranks are idle for much of each step: set --batch 8 or more (a larger batch)'
    """
    if ranks < 2 or microbatches >= 2 * ranks:
        return None
    return (
        f"with {count_noun(microbatches, 'microbatch')}, {ranks} pipeline ranks are idle for much of each step:"
        f" set {option} {2 * ranks * microbatch_size} or more (a larger batch)"
    )
