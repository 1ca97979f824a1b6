"""What a job keeps on its GPUs, worked out before it is launched, for Llama models.

    python -m titan_integration.memory --gpus 512 --module titan_integration.llama3 --config llama3_405b

prints a line for each pipeline rank. It takes all of TorchTitan's arguments after `--gpus`, so that a change of
degrees, schedule or checkpointing can be tried here first. Nothing is built, and no GPU is needed.

Counted is what lives long: weights, gradients, optimizer, and the activations that the schedule holds at its worst
moment. Not counted is what an op needs while it runs (recomputing one block, the logits of one chunk), the buffers of
the communication library and fragmentation. `USABLE` leaves room for these.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zbpipe.costs import CostModel
from zbpipe.ir import Schedule
from zbpipe.layers import even_sizes, split_of
from zbpipe.registry import generate, lookup
from zbpipe.simulate import simulate
from zbpipe.titan import cpu, options

GIB = 2**30
GPUS = {"H100": 79, "H200": 139, "MI300X": 192, "MI325X": 256, "MI355X": 288}
"""GiB that torch sees."""
USABLE = 0.85
"""The share of a GPU that may be counted on."""

_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Need:
    """Bytes on each GPU of one pipeline rank."""

    parameters: int
    """How many (not bytes) the rank's stages have, over all GPUs that share them."""
    weights: float
    """Parameters, gradients, optimizer."""
    activations: float
    """At the worst moment of a step, with what waits for W."""

    @property
    def total(self) -> float:
        return self.weights + self.activations


def needs(config: Any, num_gpus: int, memory_limit: float | None = None) -> list[Need]:
    """By pipeline rank, for a `Trainer.Config` of a Llama model on so many GPUs.

    With the schedule `Auto`, what its plan may take: `memory_limit` as in `--zbpipe.memory-limit`.

    Raises:
        ValueError: the GPUs are no multiple of what the other degrees take, or checkpointing is neither selective nor
            full.
    """
    parallelism, tp = config.parallelism, config.parallelism.tensor_parallel_degree
    ranks = parallelism.pipeline_parallel_degree
    each = ranks * tp * parallelism.data_parallel_replicate_degree
    fsdp, rest = divmod(num_gpus, each)
    if rest or not fsdp:
        raise ValueError(
            f"{num_gpus} GPUs are no multiple of PP x TP x replicas = {each}: use {max(fsdp, 1) * each} or"
            f" {(fsdp + 1) * each}"
        )
    traits = lookup(parallelism.pipeline_parallel_schedule)
    microbatches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    schedule = generate(traits.name, ranks, microbatches)
    stages = _stages(config, schedule.placement.num_stages)
    peaks = _peaks(schedule, stages)
    if traits.name == "Auto":
        room = (ranks if memory_limit is None else memory_limit) * _share(stages, ranks)
        peaks = tuple(max(peak, room) for peak in peaks)
    found = []
    for rank in range(ranks):
        parameters = sum(stages[stage].parameters for stage in schedule.placement.stages_on(rank))
        found.append(Need(parameters, parameters / tp * bytes_per_parameter(fsdp), peaks[rank]))
    return found


def unit_of_memory_limit(config: Any) -> float:
    """Bytes on each GPU of what F keeps of one microbatch in an average rank's layers."""
    ranks = config.parallelism.pipeline_parallel_degree
    placement = lookup(config.parallelism.pipeline_parallel_schedule).place(ranks)
    return _share(_stages(config, placement.num_stages), ranks)


def _share(stages: Sequence[_Stage], ranks: int) -> float:
    return sum(stage.kept_by_f for stage in stages) / ranks


def bytes_per_parameter(fsdp: int) -> float:
    """Of each parameter that a GPU shares with `fsdp - 1` others.

    A pipeline keeps its stages gathered for the whole step (`fsdp_reshard_after_forward` "default"), and FSDP2 adds the
    gradients up in float32 before it reduces them. What is cut into shards is the float32 parameter, its reduced
    gradient and the two moments of AdamW.
    """
    return _BF16 + _FP32 + 4 * _FP32 / fsdp


@dataclass(frozen=True)
class _Stage:
    parameters: int
    kept_by_f: float
    """Bytes from F to I, of one microbatch on one GPU."""
    kept_by_i: float
    """Bytes from I to W: x and dY of all linear layers."""


def _stages(config: Any, num_stages: int) -> list[_Stage]:
    model, parallelism = config.model_spec.model, config.parallelism
    block = _Block.of(model.layers[0])
    tokens = config.training.seq_len * parallelism.pipeline_parallel_microbatch_size
    kept_by_f = _BF16 * tokens * block.kept_by_f(config.activation_checkpoint, parallelism.tensor_parallel_degree)
    kept_by_i = _BF16 * tokens * block.kept_by_i(parallelism.tensor_parallel_degree)
    embedding = model.vocab_size * model.dim
    # The chunked loss keeps the last hidden states' gradient, in float32, and the hidden states.
    loss = tokens * model.dim * (_FP32 + _BF16)
    stages = []
    last = len(model.layers) + 1  # the embedding is number 0, norm and head together are the last
    for numbers in split_of(even_sizes(last + 1, num_stages)):
        blocks = len(set(numbers) - {0, last})
        parameters = (
            blocks * block.parameters + embedding * (0 in numbers) + (embedding + model.dim) * (last in numbers)
        )
        stages.append(_Stage(parameters, blocks * kept_by_f + loss * (last in numbers), blocks * kept_by_i))
    return stages


@dataclass(frozen=True)
class _Block:
    """Widths of a Llama block; what it keeps is in elements for each token."""

    dim: int
    queries: int
    keys_and_values: int
    hidden: int

    @classmethod
    def of(cls, block: Any) -> _Block:
        queries = block.attention.wo.in_features
        qkv = block.attention.qkv_linear.wqkv.out_features
        return cls(block.attention.dim, queries, qkv - queries, block.feed_forward.w1.out_features)

    @property
    def parameters(self) -> int:
        products = (2 * self.queries + self.keys_and_values) * self.dim + 3 * self.dim * self.hidden
        return products + 2 * self.dim

    def kept_by_f(self, checkpointing: Any, tp: int) -> float:
        """With sequence parallelism, the input of a block is cut by TP."""
        kind = type(checkpointing).__qualname__
        if kind == "FullAC.Config":
            return self.dim / tp
        if kind != "SelectiveAC.Config":
            raise ValueError(f"activation_checkpoint is {checkpointing!r}: only selective and full can be worked out")
        # Of the five products every second one is recomputed: wqkv, w1 and w2 stay, wo and w3 go. TP does not cut the
        # result of w2, which is a summand. What else stays is the input and the result of the attention.
        products = (self.queries + self.keys_and_values + self.hidden) / tp + self.dim
        return self.dim / tp + products + self.queries / tp

    def kept_by_i(self, tp: int) -> float:
        """TP cuts one side of each product: x of wqkv, x of w1 and w3 (one tensor), dY of wo and of w2 are whole."""
        return 4 * self.dim + (2 * self.queries + self.keys_and_values + 3 * self.hidden) / tp


def _peaks(schedule: Schedule, stages: Sequence[_Stage]) -> tuple[float, ...]:
    """By rank, the most that lives at a time; it depends on the order of the ops only."""
    times = (1.0,) * len(stages)
    kept = tuple(stage.kept_by_f for stage in stages)
    freed = tuple(1 - stage.kept_by_i / stage.kept_by_f if stage.kept_by_f else 0.0 for stage in stages)
    return simulate(schedule, CostModel(times, times, times, kept, freed)).peak_memory


def main() -> None:
    """The table, for TorchTitan's command line."""
    parser = argparse.ArgumentParser(prog="titan_integration.memory", allow_abbrev=False)
    parser.add_argument("--gpus", type=int, required=True, help="of the whole job")
    known, rest = parser.parse_known_args()
    chosen, rest = options.parse(rest)
    if cpu.is_needed():
        cpu.stand_in()  # TorchTitan asks for a device when it is imported
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(rest)
    found = needs(config, known.gpus, chosen.memory_limit)
    print("rank  parameters  weights  activations  total (GiB on each GPU)")
    for rank, need in enumerate(found):
        figures = (need.weights, need.activations, need.total)
        print(f"{rank:4}  {need.parameters / 1e9:9.2f}B  " + "  ".join(f"{figure / GIB:7.1f}" for figure in figures))
    worst = max(need.total for need in found) / GIB
    fits = [name for name, memory in GPUS.items() if worst <= USABLE * memory]
    unit = unit_of_memory_limit(config) / GIB
    print(f"a microbatch of an average rank's share, the unit of --zbpipe.memory-limit: {unit:.2f} GiB")
    print(f"worst rank: {worst:.1f} GiB, which with {1 - USABLE:.0%} left free fits: {', '.join(fits) or 'no GPU'}")


if __name__ == "__main__":
    main()
