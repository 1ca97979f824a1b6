"""Calculate, before a job is launched, the memory that it needs on its GPUs, for Llama models.

    python -m zbpipe.titan.memory --gpus 512 --module titan_integration.llama3 --config llama3_405b
    python -m zbpipe.titan.memory --gpus 512 --job.config_file titan_integration/titan02/llama3_405b.toml

(the second with TorchTitan 0.2) prints a line for each pipeline rank. It takes all of TorchTitan's arguments after
`--gpus`, so that you can first try a change of degrees, schedule or checkpointing here. It builds nothing and needs no
GPU.

It counts weights, gradients, optimizer, and what the schedule holds at its worst moment: activations, what waits for
W, messages, and what an op needs while it runs: a block that is recomputed, logits, gradients of embedding and head.
That is of modules that are not compiled; compiled ones need less. It does not count buffers of the communication
library, copies that FSDP makes to reduce gradients at the end of a step, or fragmentation. `USABLE` leaves room for
these.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from zbpipe.balance import balanced
from zbpipe.costs import CostModel, rank_shares
from zbpipe.estimation import devices
from zbpipe.estimation.workload import Degrees, ParameterBytes
from zbpipe.ir import COMPUTATIONS, OpKind, Placement
from zbpipe.layer_costs import LayerCosts, Split, even_sizes, joined, split_of
from zbpipe.memory import peak_bytes
from zbpipe.memory_limit import MemoryLimit, MemoryLimitLike
from zbpipe.registry import generate, lookup
from zbpipe.runtime.auto import AutoSchedule, memory_limits
from zbpipe.simulation import simulate
from zbpipe.titan import command_line, cpu, cut
from zbpipe.transformer import Block, Checkpointing, usual_costs

GIB, USABLE = devices.GIB, devices.USABLE
GPUS = {name: device.gib for name, device in devices.DEVICES.items()}
"""GiB, as torch sees them."""

_BF16, _FP32 = 2, 4
SIZES = {"bfloat16": _BF16, "float32": _FP32}


@dataclass(frozen=True)
class Need:
    """Bytes on each GPU of one pipeline rank."""

    parameters: int
    """The number of parameters in the rank's stages, over all GPUs that share them."""
    weights: float
    """Bytes of parameters, gradients and optimizer."""
    activations: float
    """Bytes at the worst moment of a step, with what waits for W, messages, and what the op needs that runs then."""

    @property
    def total(self) -> float:
        return self.weights + self.activations


def needs(config: Any, num_gpus: int, memory_limit: MemoryLimitLike | None = None) -> list[Need]:
    """By pipeline rank, for the config of a Llama model: a `Trainer.Config`, or with TorchTitan 0.2 a `JobConfig`.

    With the schedule `Auto`, what its plan may use, and what it takes to measure: `memory_limit` as in
    `--zbpipe.memory-limit`.

    Raises:
        ValueError: the GPUs are not a multiple of the product of the other degrees, the checkpointing is none of
            zbpipe's three, or the job would run in float32.
    """
    parallelism, degrees = config.parallelism, degrees_of(config, num_gpus)
    ranks, tp = degrees.pipeline, degrees.tensor
    algorithm = lookup(parallelism.pipeline_parallel_schedule)
    microbatches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    model, placement, limit = Model.of(config), algorithm.place(ranks), MemoryLimit.parse(memory_limit)
    is_auto = algorithm.name == AutoSchedule.schedule_name
    made_for = usual_costs(placement, model.checkpointing) if algorithm.by_checkpointing else None
    schedule = generate(algorithm.name, ranks, microbatches, costs=made_for, memory_limit=limit)
    each = replace(model.parameter_bytes(degrees.fsdp), accumulates=accumulates(config, degrees))
    bytes_each = each.total(degrees.fsdp)
    split = _split(model, config, placement)
    costs = _costs(model, config, split)
    peaks = peak_bytes(simulate(schedule, costs))
    if is_auto:
        peaks = tuple(map(max, peaks, memory_limits(limit, costs, ranks, microbatches)))
    parameters = _parameters(model, placement, split)
    return [Need(count, count / tp * bytes_each, peak) for count, peak in zip(parameters, peaks, strict=True)]


def accumulates(config: Any, degrees: Degrees) -> bool:
    """Whether a job has several pipeline steps for each step of its optimizer."""
    return bool(config.training.global_batch_size > config.training.local_batch_size * degrees.data)


def degrees_of(config: Any, num_gpus: int) -> Degrees:
    """Those of the config; FSDP uses the GPUs that the others leave.

    Raises:
        ValueError: the GPUs are not a multiple of the product of the other degrees.
    """
    parallelism = config.parallelism
    pipeline, tensor = parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree
    each = pipeline * tensor * parallelism.data_parallel_replicate_degree
    fsdp, rest = divmod(num_gpus, each)
    if rest or not fsdp:
        raise ValueError(
            f"{num_gpus} GPUs are not a multiple of PP x TP x replicas = {each}: use {max(fsdp, 1) * each} or"
            f" {(fsdp + 1) * each}"
        )
    return Degrees(pipeline, tensor, fsdp, parallelism.data_parallel_replicate_degree)


def unit_of_memory_limit(config: Any) -> float:
    """Bytes on each GPU that F keeps of one microbatch in an average rank's layers."""
    parallelism = config.parallelism
    placement = lookup(parallelism.pipeline_parallel_schedule).place(parallelism.pipeline_parallel_degree)
    model = Model.of(config)
    return _unit(placement, _costs(model, config, _split(model, config, placement)))


def _unit(placement: Placement, costs: CostModel) -> float:
    return sum(rank_shares(placement, costs)) / placement.num_ranks


def _split(model: Model, config: Any, placement: Placement) -> Split:
    """By stage the layers: the embedding is number 0, then come the blocks; norm and head together are the last."""
    ends = cut.ends_of_user(config.parallelism)
    if ends is not None or lookup(config.parallelism.pipeline_parallel_schedule).source == "torch":
        return split_of(even_sizes(model.num_layers + 2, placement.num_stages, ends or (1, 1)))
    block = model.block
    # The weights of the norms multiply nothing.
    forward = block.parameters - 2 * block.dim + config.training.seq_len * block.queries
    costs = LayerCosts(
        (
            cut.layer(["tok_embeddings"], 0.0),
            *[cut.layer(["layers"], forward, model.checkpointing)] * model.num_layers,
            cut.layer(["head"], model.vocab_size * block.dim),
        )
    )
    return split_of(balanced(costs, placement))


def _parameters(model: Model, placement: Placement, split: Split) -> list[int]:
    """By rank."""
    embedding = model.vocab_size * model.block.dim
    layers = [embedding, *[model.block.parameters] * model.num_layers, embedding + model.block.dim]
    stages = [sum(layers[layer] for layer in stage) for stage in split]
    return [sum(stages[stage] for stage in placement.stages_on(rank)) for rank in range(placement.num_ranks)]


def _costs(model: Model, config: Any, split: Split) -> CostModel:
    """Of the stages."""
    return joined(layer_costs(model, config), split)


def layer_costs(model: Model, config: Any) -> CostModel:
    """Of the layers, in bytes of one microbatch on one GPU. Times make no difference to memory."""
    parallelism = config.parallelism
    tp = parallelism.tensor_parallel_degree
    tokens = config.training.seq_len * parallelism.pipeline_parallel_microbatch_size
    layers = [model.embedding(tokens, tp), *[model.each_block(tokens, tp)] * model.num_layers, model.head(tokens, tp)]
    ones = (1.0,) * len(layers)
    return CostModel(
        *(ones, ones, ones),
        activations=tuple(layer.kept_by_f for layer in layers),
        freed_by_i=tuple(1 - layer.kept_by_i / layer.kept_by_f if layer.kept_by_f else 0.0 for layer in layers),
        message_bytes=_BF16 * tokens * model.block.dim / tp,
        working={kind: tuple(layer.working(kind) for layer in layers) for kind in COMPUTATIONS},
    )


@dataclass(frozen=True)
class _Layer:
    """Bytes of one microbatch on one GPU."""

    kept_by_f: float
    """From F to I."""
    kept_by_i: float
    """From I to W: x and dY of all linear layers."""
    most_in_f: float
    """The most that lives during F, with what it keeps."""
    most_in_i: float
    """The most that lives during I, with what there was before and what it keeps."""
    most_in_b: float

    def working(self, kind: OpKind) -> float:
        """As in `CostModel.working`."""
        match kind:
            case OpKind.F:
                return self.most_in_f - self.kept_by_f
            case OpKind.I:
                return self.most_in_i - max(self.kept_by_f, self.kept_by_i)
            case OpKind.B:
                return self.most_in_b - self.kept_by_f
            case _:
                return 0.0


@dataclass(frozen=True)
class Model:
    """The model of a config."""

    block: Block
    num_layers: int
    vocab_size: int
    checkpointing: Checkpointing
    size: int
    """Bytes of a parameter in `training.dtype`."""
    is_titan_02: bool

    @classmethod
    def of(cls, config: Any) -> Model:
        size, policy = SIZES[config.training.dtype], config.activation_checkpoint
        if hasattr(config, "model_spec"):
            model = config.model_spec.model
            kinds = {"NoneType": "none", "FullAC.Config": "full", "SelectiveAC.Config": "selective"}
            checkpointing = _checkpointing(kinds.get(type(policy).__qualname__, repr(policy)))
            return cls(block_of(model.layers[0]), len(model.layers), model.vocab_size, checkpointing, size, False)
        from torchtitan.protocols.train_spec import get_train_spec

        if config.experimental.custom_import:
            importlib.import_module(config.experimental.custom_import)  # where the model may come from
        spec = get_train_spec(config.model.name)
        args = spec.model_args[config.model.flavor]
        with torch.device("meta"):
            block = spec.model_cls(replace(args, n_layers=1)).layers["0"]
        by_layers = policy.mode == "selective" and policy.selective_ac_option != "op"
        how = f"selective by layers ({policy.selective_ac_option})" if by_layers else policy.mode
        return cls(block_of_titan_02(block), args.n_layers, args.vocab_size, _checkpointing(how), size, True)

    def parameter_bytes(self, fsdp: int) -> ParameterBytes:
        """For each parameter that a GPU shares with `fsdp - 1` others.

        A pipeline keeps its stages gathered for the whole step (`fsdp_reshard_after_forward` "default"), and FSDP2 adds
        the gradients up in float32 before it reduces them. What is cut into shards is the parameter, its reduced
        gradient, which takes the place of the sum, and the two moments of AdamW. TorchTitan 0.2 uses FSDP only if
        `fsdp` is above 1.
        """
        if fsdp > 1 or not self.is_titan_02:
            return ParameterBytes(_BF16, _FP32, self.size)
        if self.size != _BF16:
            raise ValueError(
                "TorchTitan 0.2 has mixed precision only with FSDP, and these degrees leave no GPUs for FSDP, so all"
                " would run in float32: take twice as many GPUs, or --training.dtype bfloat16"
            )
        return ParameterBytes(0, 0, _BF16)

    def each_block(self, tokens: int, tp: int) -> _Layer:
        """Of all blocks alike."""
        scale, block = _BF16 * tokens, self.block
        kept_by_f, kept_by_i = block.kept_by_f(self.checkpointing, tp), block.kept_by_i(tp)
        working = {kind: max(block.working(self.checkpointing, kind, tp), 0.0) for kind in COMPUTATIONS}
        return _Layer(
            scale * kept_by_f,
            scale * kept_by_i,
            scale * (kept_by_f + working[OpKind.F]),
            scale * (max(kept_by_f, kept_by_i) + working[OpKind.I]),
            scale * (kept_by_f + working[OpKind.B]),
        )

    def embedding(self, tokens: int, tp: int) -> _Layer:
        """What it gives belongs to the first block. Its gradient is made whole in I, and cannot wait."""
        output, gradient = _BF16 * tokens * self.block.dim, self._gradient_of_embedding(tp)
        return _Layer(0.0, 0.0, output, gradient, gradient)

    def head(self, tokens: int, tp: int) -> _Layer:
        """Norm, head and loss."""
        return self._head_in_one(tokens, tp) if self.is_titan_02 else self._head_in_chunks(tokens, tp)

    def _head_in_chunks(self, tokens: int, tp: int) -> _Layer:
        """F runs the head's whole backward, for an eighth of the tokens at a time.

        F leaves the norm's input, its result, which all GPUs of TP have whole, and the result's gradient, which it adds
        up in float32. I begins with that gradient.
        """
        dim, chunk = self.block.dim, tokens / _CHUNKS
        result = _BF16 * tokens * dim
        kept = result / tp + 2 * result
        # The cross-entropy of torch, or that of TorchTitan over the parts of TP.
        each = _BF16 + (3 if tp == 1 else 4) * _FP32
        logits = chunk * self.vocab_size / tp
        # While the head's weight gradient is made, there are the logits and their gradient.
        most = max(each * logits, 2 * _BF16 * logits + self._gradient_of_embedding(tp))
        accumulated = _FP32 * tokens * dim
        in_f = result / tp + result + accumulated + max(most, _BF16 * tokens * dim)
        return _Layer(kept, 0.0, in_f, kept + result, kept + result)

    def _head_in_one(self, tokens: int, tp: int) -> _Layer:
        """F leaves the norm's input and result, all logits, and their log-softmax in float32.

        The head's dW waits like that of any other linear layer, with its x and the logits' gradient.
        """
        result, logits = _BF16 * tokens * self.block.dim, tokens * self.vocab_size / tp
        kept_by_f = result / tp + result + (_BF16 + _FP32) * logits
        kept_by_i = result + _BF16 * logits
        # Logits in float32; two gradients of such. The last of these goes, then come those of head and norm.
        in_f, in_i = kept_by_f + _FP32 * logits, kept_by_f + 2 * _FP32 * logits
        return _Layer(kept_by_f, kept_by_i, in_f, in_i, max(in_i, kept_by_f + self._gradient_of_embedding(tp)))

    def _gradient_of_embedding(self, tp: int) -> float:
        """Bytes of the gradient of embedding or head, in bfloat16, and in float32 while it is added up."""
        each = _BF16 + (_FP32 if self.size == _FP32 or not self.is_titan_02 else 0)
        return each * self.vocab_size * self.block.dim / tp


_CHUNKS = 8
"""Of TorchTitan's chunked loss, by default."""


def _checkpointing(name: str) -> Checkpointing:
    try:
        return Checkpointing.parse(name)
    except ValueError:
        ways = ", ".join(Checkpointing)
        raise ValueError(f"activation_checkpoint is {name}: only {ways} can be calculated") from None


def block_of(block: Any) -> Block:
    """Of a block's config in TorchTitan 0.3."""
    queries = block.attention.wo.in_features
    qkv = block.attention.qkv_linear.wqkv.out_features
    return Block(block.attention.dim, queries, qkv - queries, block.feed_forward.w1.out_features)


def block_of_titan_02(block: Any) -> Block:
    """Of a block of TorchTitan 0.2 itself."""
    attention, hidden = block.attention, block.feed_forward.w1.out_features
    dim, queries = attention.wq.in_features, attention.wq.out_features
    return Block(dim, queries, 2 * attention.wk.out_features, hidden, fused_qkv=False, keeps_scattered=True)


def main() -> None:
    """Print the table for TorchTitan's command line."""
    parser = argparse.ArgumentParser(prog="zbpipe.titan.memory", allow_abbrev=False)
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
    print(f"1 microbatch in --zbpipe.memory-limit: {unit:.2f} GiB")
    print(f"worst rank: {worst:.1f} GiB, which with {1 - USABLE:.0%} left free fits: {', '.join(fits) or 'no GPU'}")


if __name__ == "__main__":
    main()
