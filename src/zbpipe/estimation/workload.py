"""Work of a job before it is cut into stages: operations, parameters and bytes of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from zbpipe.costs.balance import balance
from zbpipe.costs.layers import Layer, LayerCosts, Split, even_sizes, join_stages, split_of
from zbpipe.costs.model import CostModel, Link
from zbpipe.costs.transformer import Checkpointing, usual_costs
from zbpipe.estimation.devices import Device
from zbpipe.schedule.ir import COMPUTATIONS, OpKind, Placement
from zbpipe.schedule.registry import Algorithm

ENOUGH = 0.8
"""Share of weight gradients in W below which people are warned."""


@dataclass(frozen=True)
class Degrees:
    """Sizes of the parallel dimensions.

    >>> Degrees(pipeline=4, tensor=8, fsdp=2).gpus
    64
    """

    pipeline: int = 1
    tensor: int = 1
    fsdp: int = 1
    """Number of shards of parameters, gradients and optimizer."""
    replicas: int = 1

    @property
    def gpus(self) -> int:
        return self.pipeline * self.tensor * self.fsdp * self.replicas

    @property
    def data(self) -> int:
        """Number of GPUs, or groups of GPUs, with different data."""
        return self.fsdp * self.replicas

    def __str__(self) -> str:
        names = (("PP", self.pipeline), ("TP", self.tensor), ("FSDP", self.fsdp), ("replicas", self.replicas))
        return " x ".join(f"{name} {size}" for name, size in names if size > 1) or "1 GPU"


@dataclass(frozen=True)
class ParameterBytes:
    """Memory of a GPU for each parameter of its stages.

    A pipeline reduces its gradients after freeing its activations, layer after layer, each in place of its sum. So
    reduced gradients add to the sums only if they remain from an earlier pipeline step.

        >>> ParameterBytes().total(shards=8), ParameterBytes(accumulates=True).total(shards=8)
        (7.5, 8.0)
    """

    gathered: float = 2.0
    """Copy for products, which a pipeline keeps whole during the step."""
    summed: float = 4.0
    """Sum of the gradients of all microbatches, before reduction."""
    stored: float = 4.0
    """A parameter, a reduced gradient, or one of the optimizer's two moments. Each is sharded."""
    accumulates: bool = False
    """Whether an optimizer step consists of several pipeline steps."""

    def weights(self, shards: int) -> float:
        return self.gathered + self.stored / shards

    def optimizer(self, shards: int) -> float:
        """Gradients and moments."""
        reduced = self.stored / shards
        gradients = self.summed + reduced if self.accumulates else max(self.summed, reduced)
        return gradients + 2 * reduced

    def total(self, shards: int) -> float:
        return self.weights(shards) + self.optimizer(shards)


@dataclass(frozen=True)
class LayerWork:
    """Work of a piece of the model that stays on one stage, for one microbatch. Bytes are those of one GPU."""

    modules: tuple[str, ...]
    f: float
    """Floating-point operations of F, on all GPUs together that share the layer."""
    i: float
    """Floating-point operations of I, with any recomputation."""
    w: float
    """Floating-point operations of W."""
    parameters: float
    """Number of parameters, on all GPUs together that share them."""
    activations: float
    """Bytes kept from F to I."""
    waits: float
    """Bytes kept from I to W."""
    working: tuple[tuple[OpKind, float], ...] = ()
    """Working memory of ops, in bytes."""
    transfers: tuple[int, int] = (0, 0)
    """Number of tensor-parallel collectives over one hidden state, in F and in I."""


@dataclass(frozen=True)
class Workload:
    """Work of a job in one step, and its degrees.

    `zbpipe.frameworks.titan.workload.read_config` reads it from a TorchTitan config, `load_layers` from a file.
    """

    name: str
    layers: tuple[LayerWork, ...]
    """Layers from the embedding to the head."""
    degrees: Degrees
    microbatches: int
    """Number of microbatches in the step of one pipeline."""
    tokens: int
    """Tokens of one microbatch."""
    message_bytes: float
    """Bytes sent from one stage to the next for one microbatch, from one GPU to one GPU."""
    operations: float
    """Floating-point operations of the model per token, without recomputation, for MFU."""
    words: str
    """Source of operations and bytes."""
    schedule: str = "1F1B"
    """The job's own schedule."""
    checkpointing: Checkpointing | None = None
    """Activation checkpointing, for schedules that adapt to it. None if unknown."""
    compiled: bool = False
    """Whether torch.compile runs the layers."""
    parameter_bytes: ParameterBytes = field(default_factory=ParameterBytes)
    cut: tuple[int, ...] | None = None
    """Layers of each stage if set by the user, for placements with this number of stages."""
    ends: tuple[int, int] | None = None
    """Number of layers as which embedding and head count, if the user wants an even split."""
    remade: Callable[[Degrees], Workload] | None = None
    """Function that builds the same job on other degrees. None if that is impossible."""
    microbatch_size: int = 1
    """Sequences per microbatch."""
    deferred: float | None = None
    """Share of the weight gradients that W computes. None if unknown."""
    batch_option: str = "microbatches"
    """Name of the option for a larger batch, in sequences of one pipeline's step."""

    @property
    def too_few_microbatches(self) -> str | None:
        """The sentence of `few_microbatches` for this job."""
        return few_microbatches(self.degrees.pipeline, self.microbatches, self.microbatch_size, self.batch_option)

    @property
    def too_much_in_i(self) -> str | None:
        """A sentence for jobs in which W computes less than 80 % of the weight gradients. None for other jobs."""
        if self.deferred is None or self.deferred >= ENOUGH:
            return None
        return (
            f"W computes only {self.deferred:.0%} of the weight gradients, so schedules with I and W gain less: the"
            " job's log names the layers"
        )

    @property
    def global_tokens(self) -> int:
        """Tokens of a step, on all GPUs."""
        return self.tokens * self.microbatches * self.degrees.data

    @property
    def parameters(self) -> float:
        return sum(layer.parameters for layer in self.layers)

    def on(self, degrees: Degrees) -> Workload:
        """This step on other degrees: the number of tokens stays, that of microbatches changes.

        ValueError if other degrees are not supported, or its batch cannot be shared so.
        """
        if degrees == self.degrees:
            return self
        sequences = self.microbatches * self.degrees.data
        microbatches, rest = divmod(sequences, degrees.data)
        if rest or not microbatches:
            raise ValueError(
                f"{sequences} microbatches of a step cannot be shared by {degrees.data} groups with their own data:"
                f" {degrees}"
            )
        if self.remade is not None:
            return replace(self.remade(degrees), microbatches=microbatches)
        if degrees.tensor != self.degrees.tensor:
            raise ValueError(
                f"these layers have costs for TP {self.degrees.tensor}: give others for TP {degrees.tensor}"
            )
        return replace(self, degrees=degrees, microbatches=microbatches, cut=None)

    def split(self, placement: Placement, algorithm: Algorithm | None = None) -> Split:
        """Layers of each stage: TorchTitan's split for torch's schedules, zbpipe's for its own and for plans."""
        if self.cut is not None and len(self.cut) == placement.num_stages:
            return split_of(self.cut)
        if self.ends is not None or (algorithm is not None and algorithm.source == "torch"):
            return split_of(even_sizes(len(self.layers), placement.num_stages, self.ends or (1, 1)))
        costs = LayerCosts(tuple(Layer(each.modules, each.f, each.i, each.w, 0.0) for each in self.layers))
        return split_of(balance(costs, placement))

    def layer_costs(self, times: Callable[[LayerWork], tuple[float, float, float]]) -> CostModel:
        """Costs of the layers as if each were a stage, in bytes. `times` returns the times of F, I and W."""
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

    def usual_costs(self, algorithm: Algorithm, placement: Placement) -> CostModel | None:
        """Default costs of a schedule that adapts to the checkpointing. None for others, or if that is unknown."""
        if self.checkpointing is None or not algorithm.by_checkpointing:
            return None
        return usual_costs(placement, self.checkpointing, self.degrees.tensor)

    def parameters_by_stage(self, split: Split) -> list[float]:
        """Number of parameters in each stage, over all GPUs that share them."""
        return [sum(self.layers[layer].parameters for layer in stage) for stage in split]

    def parameters_by_rank(self, placement: Placement, split: Split) -> tuple[float, ...]:
        """Number of parameters in each rank's stages, over all GPUs that share them."""
        return placement.sum_by_rank(self.parameters_by_stage(split))


def few_microbatches(ranks: int, microbatches: int, microbatch_size: int, option: str) -> str | None:
    """A sentence for jobs with fewer than 2p microbatches, with the `option` for their batch. None for other jobs.

    >>> few_microbatches(4, 4, 1, "--training.local_batch_size")
    'with 4 microbatches, 4 pipeline ranks are idle for much of each step: set --training.local_batch_size 8 or more'
    """
    if ranks < 2 or microbatches >= 2 * ranks:
        return None
    return (
        f"with {microbatches} microbatches, {ranks} pipeline ranks are idle for much of each step:"
        f" set {option} {2 * ranks * microbatch_size} or more"
    )


@dataclass(frozen=True)
class Rates:
    """Rates of computation and communication."""

    operations: float
    """Floating-point operations per second of one GPU."""
    device: Device
    """Device whose bandwidths apply."""
    extremes: tuple[float, float] | None = None
    """Least and largest plausible rate in place of `operations`. None if it is given."""

    def layer_costs(self, workload: Workload) -> CostModel:
        """Costs of the layers as if each were a stage, in seconds and bytes."""
        tensor = workload.degrees.tensor
        hidden = workload.message_bytes * tensor
        way = self.device.bandwidth(tensor, apart=1)
        collective = hidden * (tensor - 1) / tensor / way + self.device.latency * (tensor > 1)

        def seconds(operations: float, transfers: int = 0) -> float:
            return operations / tensor / self.operations + transfers * collective

        def times(layer: LayerWork) -> tuple[float, float, float]:
            return seconds(layer.f, layer.transfers[0]), seconds(layer.i, layer.transfers[1]), seconds(layer.w)

        return workload.layer_costs(times)

    def costs(self, workload: Workload, placement: Placement, split: Split) -> CostModel:
        """Costs of the stages, with the links between neighbours."""
        stages = join_stages(self.layer_costs(workload), split)
        links = dict(self._links(workload, placement))
        slowest = min(links.values(), key=lambda link: link.bandwidth, default=Link())
        return replace(stages, link=slowest, links=links)

    def _links(self, workload: Workload, placement: Placement) -> Iterator[tuple[tuple[int, int], Link]]:
        """Links in TorchTitan's numbering of GPUs: the pipeline is outermost, so its ranks are far apart."""
        apart = workload.degrees.gpus // workload.degrees.pipeline
        node = self.device.gpus_per_node
        for one, other in placement.hops:
            together = one * apart // node == other * apart // node
            bandwidth = self.device.inside if together else self.device.between
            yield (one, other), Link(self.device.latency, bandwidth)


def rates(device: Device, tflops: Any = None, link: Any = None) -> Rates:
    """Rates of the device, unless the user overrides them: see `zbpipe.estimate` for `tflops` and `link`."""
    bandwidths = () if link is None else tuple(link) if isinstance(link, (tuple, list)) else (link,)
    for name, value in (("tflops", tflops), *(("link", each) for each in bandwidths)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < 1e9):
            raise ValueError(
                f"{name} = {value!r} is not a rate: give a number above 0, for example 400 TFLOP/s or 50 GB/s"
            )
    if len(bandwidths) > 2:
        raise ValueError(f"link = {link!r}: give one number for links between nodes, or two: inside,between")
    if bandwidths:
        inside = bandwidths[0] * 1e9 if len(bandwidths) == 2 else device.inside
        device = replace(device, inside=inside, between=bandwidths[-1] * 1e9)
    if tflops is not None:
        return Rates(tflops * 1e12, device)
    extremes = None if device.range is None else (device.range[0] * device.peak, device.range[1] * device.peak)
    return Rates(device.sustained, device, extremes)
