"""Calculate, before a job is launched, the memory that it needs on its GPUs, for Llama models.

    python -m titan_integration.memory --gpus 512 --module titan_integration.llama3 --config llama3_405b
    python -m titan_integration.memory --gpus 512 --job.config_file titan_integration/titan02/llama3_405b.toml

(the second with TorchTitan 0.2) prints a line for each pipeline rank. It takes all of TorchTitan's arguments after
`--gpus`, so that you can first try a change of degrees, schedule or checkpointing here. It builds nothing and needs no
GPU.

It counts what lives long: weights, gradients, optimizer, and the activations that the schedule holds at its worst
moment. It does not count what an op needs while it runs (recomputing one block, the logits of one chunk), the buffers
of the communication library, or fragmentation. `USABLE` leaves room for these.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zbpipe.costs import CostModel
from zbpipe.ir import Schedule
from zbpipe.layer_costs import even_sizes, split_of
from zbpipe.registry import generate, lookup
from zbpipe.simulation import simulate
from zbpipe.titan import command_line, cpu

GIB = 2**30
GPUS = {"H100": 79, "H200": 139, "MI300X": 192, "MI325X": 256, "MI355X": 288}
"""GiB, as torch sees them."""
USABLE = 0.85
"""The share of a GPU's memory that can be used."""

_BF16, _FP32 = 2, 4
_SIZES = {"bfloat16": _BF16, "float32": _FP32}


@dataclass(frozen=True)
class Need:
    """Bytes on each GPU of one pipeline rank."""

    parameters: int
    """The number of parameters in the rank's stages, over all GPUs that share them."""
    weights: float
    """Bytes of parameters, gradients and optimizer."""
    activations: float
    """Bytes at the worst moment of a step, with what waits for W."""

    @property
    def total(self) -> float:
        return self.weights + self.activations


def needs(config: Any, num_gpus: int, memory_limit: float | None = None) -> list[Need]:
    """By pipeline rank, for the config of a Llama model: a `Trainer.Config`, or with TorchTitan 0.2 a `JobConfig`.

    With the schedule `Auto`, what its plan may use: `memory_limit` as in `--zbpipe.memory-limit`.

    Raises:
        ValueError: the GPUs are not a multiple of the product of the other degrees, checkpointing is neither selective
            nor full, or the job would run in float32.
    """
    parallelism, tp = config.parallelism, config.parallelism.tensor_parallel_degree
    ranks = parallelism.pipeline_parallel_degree
    each = ranks * tp * parallelism.data_parallel_replicate_degree
    fsdp, rest = divmod(num_gpus, each)
    if rest or not fsdp:
        raise ValueError(
            f"{num_gpus} GPUs are not a multiple of PP x TP x replicas = {each}: use {max(fsdp, 1) * each} or"
            f" {(fsdp + 1) * each}"
        )
    algorithm = lookup(parallelism.pipeline_parallel_schedule)
    microbatches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    schedule = generate(algorithm.name, ranks, microbatches)
    model = _Model.of(config)
    bytes_each = model.bytes_per_parameter(fsdp)
    stages = _stages(model, parallelism, config.training.seq_len, schedule.placement.num_stages)
    peaks = _peaks(schedule, stages)
    if algorithm.name == "Auto":
        room = (ranks if memory_limit is None else memory_limit) * _share(stages, ranks)
        peaks = tuple(max(peak, room) for peak in peaks)
    found = []
    for rank in range(ranks):
        parameters = sum(stages[stage].parameters for stage in schedule.placement.stages_on(rank))
        found.append(Need(parameters, parameters / tp * bytes_each, peaks[rank]))
    return found


def unit_of_memory_limit(config: Any) -> float:
    """Bytes on each GPU that F keeps of one microbatch in an average rank's layers."""
    parallelism = config.parallelism
    ranks = parallelism.pipeline_parallel_degree
    placement = lookup(parallelism.pipeline_parallel_schedule).place(ranks)
    stages = _stages(_Model.of(config), parallelism, config.training.seq_len, placement.num_stages)
    return _share(stages, ranks)


def _share(stages: Sequence[_Stage], ranks: int) -> float:
    return sum(stage.kept_by_f for stage in stages) / ranks


@dataclass(frozen=True)
class _Stage:
    parameters: int
    kept_by_f: float
    """Bytes from F to I, of one microbatch on one GPU."""
    kept_by_i: float
    """Bytes from I to W: x and dY of all linear layers."""


def _stages(model: _Model, parallelism: Any, seq_len: int, num_stages: int) -> list[_Stage]:
    block, tp = model.block, parallelism.tensor_parallel_degree
    tokens = seq_len * parallelism.pipeline_parallel_microbatch_size
    kept_by_f = _BF16 * tokens * block.kept_by_f(model.checkpointing, tp)
    kept_by_i = _BF16 * tokens * block.kept_by_i(tp)
    embedding = model.vocab_size * block.dim
    stages = []
    last = model.num_layers + 1  # the embedding is number 0, norm and head together are the last
    for numbers in split_of(even_sizes(last + 1, num_stages)):
        blocks = len(set(numbers) - {0, last})
        parameters = (
            blocks * block.parameters + embedding * (0 in numbers) + (embedding + block.dim) * (last in numbers)
        )
        head_f, head_i = (tokens * each for each in model.kept_by_head(tp)) if last in numbers else (0, 0)
        stages.append(_Stage(parameters, blocks * kept_by_f + head_f, blocks * kept_by_i + head_i))
    return stages


@dataclass(frozen=True)
class _Model:
    """The model of a config."""

    block: _Block
    num_layers: int
    vocab_size: int
    checkpointing: str
    """As the config says it; only "selective" and "full" can be calculated."""
    size: int
    """Bytes of a parameter in `training.dtype`."""
    is_titan_02: bool

    @classmethod
    def of(cls, config: Any) -> _Model:
        size = _SIZES[config.training.dtype]
        if hasattr(config, "model_spec"):
            model, policy = config.model_spec.model, config.activation_checkpoint
            kinds = {"FullAC.Config": "full", "SelectiveAC.Config": "selective"}
            checkpointing = kinds.get(type(policy).__qualname__, repr(policy))
            return cls(_Block.of(model.layers[0]), len(model.layers), model.vocab_size, checkpointing, size, False)
        from torchtitan.protocols.train_spec import get_train_spec

        if config.experimental.custom_import:
            importlib.import_module(config.experimental.custom_import)  # where the model may come from
        spec, how = get_train_spec(config.model.name), config.activation_checkpoint
        args = spec.model_args[config.model.flavor]
        with torch.device("meta"):
            block = spec.model_cls(replace(args, n_layers=1)).layers["0"]
        by_layers = how.mode == "selective" and how.selective_ac_option != "op"
        checkpointing = f"selective by layers ({how.selective_ac_option})" if by_layers else how.mode
        return cls(_Block.of_titan_02(block), args.n_layers, args.vocab_size, checkpointing, size, True)

    def bytes_per_parameter(self, fsdp: int) -> float:
        """For each parameter that a GPU shares with `fsdp - 1` others.

        A pipeline keeps its stages gathered for the whole step (`fsdp_reshard_after_forward` "default"), and FSDP2 adds
        the gradients up in float32 before it reduces them. What is cut into shards is the parameter, its reduced
        gradient and the two moments of AdamW. TorchTitan 0.2 uses FSDP only if `fsdp` is above 1.
        """
        if fsdp > 1 or not self.is_titan_02:
            return _BF16 + _FP32 + 4 * self.size / fsdp
        if self.size != _BF16:
            raise ValueError(
                "TorchTitan 0.2 has mixed precision only with FSDP, and these degrees leave no GPUs for FSDP, so all"
                " would run in float32: take twice as many GPUs, or --training.dtype bfloat16"
            )
        return 4 * _BF16

    def kept_by_head(self, tp: int) -> tuple[float, float]:
        """Bytes for each token from F to I, and from I to W, of head and loss."""
        dim = self.block.dim
        if not self.is_titan_02:
            # The chunked loss keeps the last hidden states' gradient, in float32, and the hidden states.
            return dim * (_FP32 + _BF16), 0
        # All logits, and their log-softmax in float32. The head's dW waits like that of any other linear layer.
        logits = self.vocab_size / tp
        return logits * (_BF16 + _FP32), _BF16 * (dim + logits)


@dataclass(frozen=True)
class _Block:
    """The widths of a Llama block. What it keeps is counted in elements for each token."""

    dim: int
    queries: int
    keys_and_values: int
    hidden: int
    is_titan_02: bool = False

    @classmethod
    def of(cls, block: Any) -> _Block:
        """Of a block's config in TorchTitan 0.3."""
        queries = block.attention.wo.in_features
        qkv = block.attention.qkv_linear.wqkv.out_features
        return cls(block.attention.dim, queries, qkv - queries, block.feed_forward.w1.out_features)

    @classmethod
    def of_titan_02(cls, block: Any) -> _Block:
        """Of a block of TorchTitan 0.2 itself."""
        attention, hidden = block.attention, block.feed_forward.w1.out_features
        dim, queries = attention.wq.in_features, attention.wq.out_features
        return cls(dim, queries, 2 * attention.wk.out_features, hidden, is_titan_02=True)

    @property
    def parameters(self) -> int:
        products = (2 * self.queries + self.keys_and_values) * self.dim + 3 * self.dim * self.hidden
        return products + 2 * self.dim

    def kept_by_f(self, checkpointing: str, tp: int) -> float:
        """With sequence parallelism, the input of a block is cut by TP."""
        if checkpointing == "full":
            return self.dim / tp
        if checkpointing != "selective":
            raise ValueError(f"activation_checkpoint is {checkpointing}: only selective and full can be calculated")
        # Of the products every second one is recomputed. Of five in TorchTitan 0.3, wqkv, w1 and w2 stay, wo and w3 go;
        # of seven in 0.2, wq, wv, w1 and w2 stay. TP does not cut the result of w2, which is a summand. What else stays
        # is the input and the result of the attention, and in 0.2 what TP's two reduce-scatters give.
        keys_and_values = self.keys_and_values / 2 if self.is_titan_02 else self.keys_and_values
        products = (self.queries + keys_and_values + self.hidden) / tp + self.dim
        scattered = 2 * self.dim / tp if self.is_titan_02 and tp > 1 else 0
        return self.dim / tp + products + self.queries / tp + scattered

    def kept_by_i(self, tp: int) -> float:
        """TP cuts one side of each product: x of q, k and v (one tensor), x of w1 and w3, dY of wo and w2 are whole."""
        return 4 * self.dim + (2 * self.queries + self.keys_and_values + 3 * self.hidden) / tp


def _peaks(schedule: Schedule, stages: Sequence[_Stage]) -> tuple[float, ...]:
    """By rank, the peak of what lives; it depends only on the order of the ops."""
    times = (1.0,) * len(stages)
    kept = tuple(stage.kept_by_f for stage in stages)
    freed = tuple(1 - stage.kept_by_i / stage.kept_by_f if stage.kept_by_f else 0.0 for stage in stages)
    return simulate(schedule, CostModel(times, times, times, kept, freed)).peak_memory


def main() -> None:
    """Print the table for TorchTitan's command line."""
    parser = argparse.ArgumentParser(prog="titan_integration.memory", allow_abbrev=False)
    parser.add_argument("--gpus", type=int, required=True, help="of the whole job")
    known, rest = parser.parse_known_args()
    chosen, rest = command_line.parse(rest)
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
