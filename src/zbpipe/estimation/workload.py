"""What a job trains, before it is cut into stages: operations, parameters and bytes of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from zbpipe.costs.balance import balance
from zbpipe.costs.layers import Layer, LayerCosts, Split, even_sizes, join_stages, split_of
from zbpipe.costs.model import CostModel, Link
from zbpipe.costs.transformer import Checkpointing
from zbpipe.estimation.devices import Device
from zbpipe.schedule.ir import COMPUTATIONS, OpKind, Placement
from zbpipe.schedule.registry import Algorithm


@dataclass(frozen=True)
class Degrees:
    """How many GPUs share what.

    >>> Degrees(pipeline=4, tensor=8, fsdp=2).gpus
    64
    """

    pipeline: int = 1
    tensor: int = 1
    fsdp: int = 1
    """Shards of parameters, gradients and optimizer."""
    replicas: int = 1

    @property
    def gpus(self) -> int:
        return self.pipeline * self.tensor * self.fsdp * self.replicas

    @property
    def data(self) -> int:
        """GPUs, or groups of them, that see data of their own."""
        return self.fsdp * self.replicas

    def __str__(self) -> str:
        names = (("PP", self.pipeline), ("TP", self.tensor), ("FSDP", self.fsdp), ("replicas", self.replicas))
        return " x ".join(f"{name} {size}" for name, size in names if size > 1) or "1 GPU"


@dataclass(frozen=True)
class ParameterBytes:
    """What a GPU holds for each parameter of its stages.

    A pipeline reduces its gradients when its activations have gone, layer after layer, each in the place of its sum. So
    reduced gradients count besides sums only if they are there from an earlier pipeline step.

        >>> ParameterBytes().total(shards=8), ParameterBytes(accumulates=True).total(shards=8)
        (7.5, 8.0)
    """

    gathered: float = 2.0
    """The copy that its products use, which a pipeline keeps whole for the step."""
    summed: float = 4.0
    """Gradients of all microbatches, before they are reduced."""
    stored: float = 4.0
    """A parameter, a reduced gradient, or one of the optimizer's two moments: each is cut into shards."""
    accumulates: bool = False
    """Whether an optimizer step has several pipeline steps."""

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
    """A piece of the model that stays on one stage, for one microbatch. Bytes are those of one GPU."""

    modules: tuple[str, ...]
    f: float
    """Floating-point operations of the forward, on all GPUs together that share it."""
    i: float
    """Of the backward for the input, with any recomputation."""
    w: float
    """Of the backward for the weights."""
    parameters: float
    """On all GPUs together that share them."""
    activations: float
    """Bytes that F leaves for I."""
    waits: float
    """Bytes that I leaves for W."""
    working: tuple[tuple[OpKind, float], ...] = ()
    """Bytes that an op needs only while it runs."""
    transfers: tuple[int, int] = (0, 0)
    """Collectives of tensor parallelism over one hidden state, in F and in I."""


@dataclass(frozen=True)
class Workload:
    """What a job trains in one step, and on which degrees.

    `zbpipe.frameworks.titan.workload.read_config` makes it of a TorchTitan config, `load_layers` of a file.
    """

    name: str
    layers: tuple[LayerWork, ...]
    """From the embedding to the head."""
    degrees: Degrees
    microbatches: int
    """Of one pipeline's step."""
    tokens: int
    """Of one microbatch."""
    message_bytes: float
    """What one stage hands to the next of one microbatch, from one GPU to one GPU."""
    operations: float
    """The model's floating-point operations for each token, by which MFU is counted: without recomputation."""
    words: str
    """Where operations and bytes come from."""
    schedule: str = "1F1B"
    """The job's own."""
    checkpointing: Checkpointing | None = None
    """For schedules that adapt to it; None where it is not known."""
    compiled: bool = False
    """Whether torch.compile runs the layers."""
    parameter_bytes: ParameterBytes = field(default_factory=ParameterBytes)
    cut: tuple[int, ...] | None = None
    """Layers by stage if the user gave them, which holds for placements with their number of stages."""
    ends: tuple[int, int] | None = None
    """As how many layers embedding and head count, if the user wants the layers to be cut evenly."""
    remade: Callable[[Degrees], Workload] | None = None
    """Makes the same job on other degrees; None where that is not possible."""
    microbatch_size: int = 1
    """Sequences of a microbatch."""
    batch_option: str = "microbatches"
    """What the user sets for a larger batch, in sequences of one pipeline's step."""

    @property
    def too_few_microbatches(self) -> str | None:
        """The sentence of `few_microbatches` for this job."""
        return few_microbatches(self.degrees.pipeline, self.microbatches, self.microbatch_size, self.batch_option)

    @property
    def global_tokens(self) -> int:
        """Tokens of a step, on all GPUs."""
        return self.tokens * self.microbatches * self.degrees.data

    @property
    def parameters(self) -> float:
        return sum(layer.parameters for layer in self.layers)

    def on(self, degrees: Degrees) -> Workload:
        """The same step on other degrees: as many tokens, so more or fewer microbatches.

        ValueError if the job is not known on others, or its batch cannot be shared so.
        """
        if degrees == self.degrees:
            return self
        sequences = self.microbatches * self.degrees.data
        microbatches, rest = divmod(sequences, degrees.data)
        if rest or not microbatches:
            raise ValueError(
                f"{sequences} microbatches of a step cannot be shared by {degrees.data} groups with data of their own:"
                f" {degrees}"
            )
        if self.remade is not None:
            return replace(self.remade(degrees), microbatches=microbatches)
        if degrees.tensor != self.degrees.tensor:
            raise ValueError(
                f"the costs of these layers are those of TP {self.degrees.tensor}: for TP {degrees.tensor} give others"
            )
        return replace(self, degrees=degrees, microbatches=microbatches, cut=None)

    def split(self, placement: Placement, algorithm: Algorithm | None = None) -> Split:
        """By stage the layers: as TorchTitan cuts for torch's schedules, and zbpipe for its own and for plans."""
        if self.cut is not None and len(self.cut) == placement.num_stages:
            return split_of(self.cut)
        if self.ends is not None or (algorithm is not None and algorithm.source == "torch"):
            return split_of(even_sizes(len(self.layers), placement.num_stages, self.ends or (1, 1)))
        costs = LayerCosts(tuple(Layer(each.modules, each.f, each.i, each.w, 0.0) for each in self.layers))
        return split_of(balance(costs, placement))

    def layer_costs(self, times: Callable[[LayerWork], tuple[float, float, float]]) -> CostModel:
        """The costs of the layers as if each were a stage, in bytes; `times` gives the times of F, I and W."""
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

    def parameters_by_rank(self, placement: Placement, split: Split) -> tuple[float, ...]:
        """By rank, the parameters of its stages, over all GPUs that share them."""
        stages = [sum(self.layers[layer].parameters for layer in stage) for stage in split]
        return placement.sum_by_rank(stages)


def few_microbatches(ranks: int, microbatches: int, microbatch_size: int, option: str) -> str | None:
    """A sentence for jobs with fewer than 2p microbatches, with the `option` that sets their batch; None for others.

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
    """How fast operations and bytes go."""

    operations: float
    """Floating-point operations per second of one GPU."""
    device: Device
    """With the bandwidths that count."""

    def layer_costs(self, workload: Workload) -> CostModel:
        """The costs of the layers as if each were a stage, in seconds and bytes."""
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
        """The costs of the stages, with the links between neighbours."""
        stages = join_stages(self.layer_costs(workload), split)
        links = dict(self._links(workload, placement))
        slowest = min(links.values(), key=lambda link: link.bandwidth, default=Link())
        return replace(stages, link=slowest, links=links)

    def _links(self, workload: Workload, placement: Placement) -> Iterator[tuple[tuple[int, int], Link]]:
        """The links as TorchTitan numbers GPUs: the pipeline is outermost, so its ranks are far apart."""
        apart = workload.degrees.gpus // workload.degrees.pipeline
        node = self.device.gpus_per_node
        for one, other in placement.hops:
            together = one * apart // node == other * apart // node
            bandwidth = self.device.inside if together else self.device.between
            yield (one, other), Link(self.device.latency, bandwidth)


def rates(device: Device, tflops: Any = None, link: Any = None) -> Rates:
    """The device's rates, with what the user knows better: see `zbpipe.estimate` for `tflops` and `link`."""
    bandwidths = () if link is None else tuple(link) if isinstance(link, (tuple, list)) else (link,)
    for name, value in (("tflops", tflops), *(("link", each) for each in bandwidths)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < 1e9):
            raise ValueError(
                f"{name} = {value!r} is no rate: give a number above 0, for example 400 TFLOP/s or 50 GB/s"
            )
    if len(bandwidths) > 2:
        raise ValueError(f"link = {link!r}: give one number for links between nodes, or two: inside,between")
    if bandwidths:
        inside = bandwidths[0] * 1e9 if len(bandwidths) == 2 else device.inside
        device = replace(device, inside=inside, between=bandwidths[-1] * 1e9)
    return Rates(device.sustained if tflops is None else tflops * 1e12, device)
