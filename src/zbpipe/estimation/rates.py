"""Times of a job's parts: three rates (products, attention, memory traffic), communication, and the optimizer.

    seconds = operations of products / g peak + operations of attention / a peak + bytes / memory bandwidth

With one rate, W would be as long as F. Measured W takes 0.50 to 0.74 of F.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from typing import Any

from zbpipe.costs.layers import Split, join_stages
from zbpipe.costs.model import CostModel, Link
from zbpipe.estimation.devices import Device, find
from zbpipe.estimation.workload import LayerWork, Workload
from zbpipe.schedule.ir import OpKind, Placement

FLOAT8 = 1.6
"""Speed of float8 products relative to bfloat16, casts included. TorchTitan, December 2024 and June 2025: with float8
(tensorwise), Llama 3 8B trains 1.28 times as fast, 70B 1.36 times."""
_CASTS = 1.75
"""Memory traffic of a block in float8 relative to bfloat16: each factor of a product is read twice and cast."""
_RING = 0.08
"""Relative slowdown of attention per further GPU of context parallelism. TorchTitan, December 2024: Llama 3 8B on 8
H100, 32k to 262k tokens with CP 1 to 8."""
_TILE = 64
"""Width by which a product is longer than its operations: tensor parallelism cuts it into narrower ones."""
HOST = {False: (5.6e-4, 3.1e-4), True: (4.3e-4, 3.9e-4)}
"""Seconds of the host for a block's F and backward of one microbatch, and how much more it takes with I and W apart, by
whether blocks are compiled: benchmarks/README.md, for a block's linear layers alone, so a GPU's host takes longer."""
_LINKS = (0.6, 1.15)
"""Least and largest plausible bandwidths, relative to the likely ones. They depend on other traffic, topology and the
communication library's tuning."""
_EXPERTS = (0.5, 1.5)
"""Least and largest plausible speeds of routed experts, relative to the likely one: Transformer Engine's grouped layers
take twice as long as single ones on B300 (its issue 2939), and grouped products alone are 1.5 times as fast."""
_MEASURED_EXPERTS = 2048 * 7168 / (2048 + 7168)
"""Operations per byte in the experts for which `Device.experts` was measured: DeepSeek V3's, 2048 wide. Narrower ones
take as much longer as their further bytes do. DeepGEMM on H800 (its pull request 74): an inner width of 512 instead of
16,384 halves the rate, as by these bytes."""
_OPTIMIZER_BYTES = 32.0
"""Bytes that AdamW in float32 moves per parameter: parameter and both moments twice, the gradient twice."""
_STRAGGLERS = {False: 0.006, True: 0.003}
"""Growth of the step per doubling of GPUs beyond a node, by whether there is a pipeline. Published: 0.6 to 1.1 %
without one (TorchTitan from 8 to 128 H100, MaxText from 64 to 256), 0.3 to 0.5 % with one (NeMo from 64 to 2048)."""


@dataclass(frozen=True)
class Rates:
    device: Device
    speed: float = 1.0
    """Speed of computation relative to the device's."""
    extremes: tuple[Rates, ...] = ()
    """These rates at the least and the largest plausible speeds of computation and of links. Empty if the speed of
    computation is given."""

    def layer_costs(self, workload: Workload) -> CostModel:
        """Costs of the layers, each as a stage, in seconds and bytes."""
        degrees, device, tensor = workload.degrees, self.device, workload.degrees.tensor
        hidden = workload.message_bytes * tensor
        collective = device.collective(hidden, tensor) * (1 - workload.hidden_tensor)
        narrow = 1 + _TILE * (tensor - 1) / workload.width if workload.width else 1.0

        def communication(layer: LayerWork) -> tuple[float, float]:
            keys = device.collective(layer.keys / tensor, degrees.context, apart=tensor)
            copies = max(layer.routed / (hidden * degrees.context), 1.0) if workload.sends_once else 1.0
            routed = 2 * device.exchange(layer.routed / degrees.sharing, degrees.experts, copies)  # there and back
            in_f, in_i = (count * collective + routed for count in layer.transfers)
            return in_f + keys, in_i + 2 * keys  # I also reduces the gradients of keys and values

        def seconds(layer: LayerWork, operations: float, attention: float, traffic: float) -> float:
            products = (operations - attention) * narrow * (1 + layer.in_routed * (1 / device.experts - 1))
            if workload.float8 and layer.is_block:
                products, traffic = products / FLOAT8, traffic * _CASTS
            computing = products / device.products / device.peak + traffic / device.memory
            return computing / degrees.sharing / self.speed + attending(attention)

        def attending(operations: float) -> float:
            ring = 1 + _RING * (degrees.context - 1)
            return ring * operations / device.attention / device.peak / degrees.sharing / self.speed

        def operands(layer: LayerWork) -> float:
            """Bytes that the three products of narrow routed experts read and write beyond those of measured ones."""
            if not (layer.routed and layer.num_experts):
                return 0.0
            width = layer.in_experts / (3 * layer.num_experts * workload.width)
            return 3 * layer.routed * max(1 + width / workload.width - width / _MEASURED_EXPERTS, 0.0)

        def times(layer: LayerWork) -> tuple[float, float, float]:
            f, i = zip((layer.f, layer.i), layer.attention, layer.traffic, strict=True)
            in_f, in_i = communication(layer)
            moved = seconds(layer, 0.0, 0.0, operands(layer))
            of_w = seconds(layer, layer.w, 0.0, 0.0)
            return seconds(layer, *f) + in_f + moved, seconds(layer, *i) + in_i + moved, of_w + moved

        costs = workload.layer_costs(times)
        both = zip(workload.layers, costs.f, costs.i, strict=True)
        shares = (attending(sum(layer.attention)) / ((f + i) or 1.0) for layer, f, i in both)
        tokens, sequences = workload.tokens, workload.microbatch_size
        of_f, of_i = zip(*map(communication, workload.layers), strict=True)
        return replace(
            costs,
            attention=tuple(min(each, 1.0) for each in shares),
            of_size=(tokens, tokens**2 / sequences),
            waits={OpKind.F: of_f, OpKind.I: of_i} if any((*of_f, *of_i)) else {},
        )

    def costs(self, workload: Workload, layers: CostModel, placement: Placement, split: Split) -> CostModel:
        """Costs of the stages, from those of the layers and the links between neighbours."""
        stages, links = join_stages(layers, split), {}
        # In TorchTitan's numbering of GPUs the pipeline is outermost, so its ranks are far apart.
        apart, node = workload.degrees.gpus // workload.degrees.pipeline, self.device.gpus_per_node
        for one, other in placement.hops:
            together = one * apart // node == other * apart // node
            links[one, other] = Link(self.device.latency, self.device.inside if together else self.device.between)
        slowest = min(links.values(), key=lambda link: link.bandwidth, default=Link())
        return replace(stages, link=slowest, links=links, overhead=self.device.overhead)

    def with_overheads(self, seconds: float, workload: Workload, parameters: float) -> float:
        """A step of `seconds` plus stragglers and the optimizer, for this number of parameters on each GPU."""
        degrees = workload.degrees
        doublings = max(log2(degrees.gpus / self.device.gpus_per_node), 0.0)
        optimizer = _OPTIMIZER_BYTES * parameters / self.device.memory
        return (seconds + optimizer) * (1 + _STRAGGLERS[degrees.pipeline > 1] * doublings)


USUAL = Rates(find("H100"))
"""Rates that cut models before any measurement, the same on all GPUs and in all commands."""


def rates(device: Device, tflops: Any = None, link: Any = None) -> Rates:
    """Rates of the device, or the user's: see `zbpipe.estimate` for `tflops` and `link`."""
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
        share = tflops * 1e12 / device.peak
        return Rates(replace(device, products=share, attention=share * device.attention / device.products))
    of_links = (1.0, 1.0) if bandwidths else _LINKS
    extremes = []
    for speed, links, experts in zip(device.range or (), of_links, _EXPERTS, strict=False):
        other = replace(device, inside=device.inside * links, between=device.between * links)
        extremes.append(Rates(replace(other, experts=device.experts * experts), speed))
    return Rates(device, extremes=tuple(extremes))
