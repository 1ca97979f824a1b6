"""What a TorchTitan config trains, for `zbpipe.estimate`: operations counted on meta tensors, bytes, and parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zbpipe.estimation.workload import Degrees, LayerWork, ParameterBytes, Workload
from zbpipe.ir import COMPUTATIONS, OpKind
from zbpipe.runtime.measure.layer_bytes import LayerBytes, layer_bytes
from zbpipe.runtime.measure.operations import Operations, operations
from zbpipe.titan import cpu, cut, memory
from zbpipe.titan.versions import installed
from zbpipe.transformer import LLAMA_3_8B, Block, Checkpointing

_BF16 = 2
_ON_META = (RuntimeError, NotImplementedError, TypeError)
"""What modules raise that look at values, which meta tensors have not."""
_IN_BLOCK = 4
"""Collectives of tensor parallelism in a block: two gather the sequence, two scatter it."""
_AGAIN = {Checkpointing.NONE: 0, Checkpointing.SELECTIVE: 2, Checkpointing.FULL: 4}
"""Of these, how many I repeats: selective checkpointing keeps what was scattered."""


def read(
    module: str, config: str, gpus: int, arguments: Sequence[str] = (), *, degrees: Degrees | None = None
) -> Workload:
    """The workload of a TorchTitan job, as `--module`, `--config` and TorchTitan's other arguments say it.

        workload = zbpipe.titan.workload.read("titan_integration.llama3", "llama3_70b", gpus=64)
        zbpipe.estimate(workload, "MI300X")

    Args:
        module: TorchTitan's `--module`.
        config: its `--config`.
        gpus: of the whole job; FSDP uses those that the other degrees leave.
        arguments: further ones, for example ["--parallelism.pipeline_parallel_degree", "8"].
        degrees: others than those of the config.

    Raises:
        ImportError: TorchTitan is not installed, or a version whose configs this does not read.
        ValueError: what TorchTitan or zbpipe refuses: an unknown module or config, GPUs that are not a multiple of the
            degrees, a checkpointing of the user's own.
    """
    found = parse(module, config, arguments)
    return of_config(found, memory.degrees_of(found, gpus) if degrees is None else degrees, f"{module} {config}")


def parse(module: str, config: str, arguments: Sequence[str]) -> Any:
    """The `Trainer.Config` of a command line; see `read` for what it raises."""
    if installed().name != "0.3.0":
        raise ImportError(
            f"zbpipe reads the configs of torchtitan 0.3 here, and this is {installed().name}: describe the model with"
            " --layers FILE"
        )
    if cpu.is_needed():
        cpu.stand_in()  # TorchTitan asks for a device when it is imported
    from zbpipe.titan import _titan03

    try:
        return _titan03.parsed(["--module", module, "--config", config, *arguments])
    except ImportError as error:
        raise ValueError(f"--module {module}: {error}") from None


def of_config(config: Any, degrees: Degrees, name: str) -> Workload:
    """The workload of a `Trainer.Config` on these degrees; see `read`."""
    from zbpipe.titan import _titan03

    built = _titan03.built_on_meta(config)
    how = _titan03.checkpointing_of(config.activation_checkpoint)
    counted = _counted(built, config, how)
    make = partial(_workload, config, name=name, how=how, counted=counted)
    return replace(make(degrees), remade=make)


@dataclass(frozen=True)
class _Layer:
    """A layer without tensor parallelism, of one microbatch."""

    modules: tuple[str, ...]
    operations: Operations
    parameters: int
    products: float
    """Weights with which each token is multiplied; of experts those to which it goes."""
    bytes: LayerBytes | None
    """None where it was not run."""


@dataclass(frozen=True)
class _Counted:
    """A model, counted once for all degrees."""

    layers: tuple[_Layer, ...]
    operations: float
    """Of the model, for each token, as TorchTitan counts them for MFU."""
    on_meta: bool
    """Whether its blocks ran on meta tensors."""


def _workload(config: Any, degrees: Degrees, *, name: str, how: Checkpointing, counted: _Counted) -> Workload:
    parallelism, training = config.parallelism, config.training
    tokens = _tokens(config)
    layers, words = _with_bytes(config, degrees, how, counted)
    return Workload(
        name,
        layers,
        degrees,
        training.local_batch_size // parallelism.pipeline_parallel_microbatch_size,
        tokens,
        message_bytes=memory.SIZES[training.mixed_precision_param]
        * tokens
        * config.model_spec.model.dim
        / degrees.tensor,
        operations=counted.operations,
        words=words,
        schedule=parallelism.pipeline_parallel_schedule,
        checkpointing=how,
        parameter_bytes=ParameterBytes(
            memory.SIZES[training.mixed_precision_param],
            memory.SIZES[training.mixed_precision_reduce],
            memory.SIZES[training.dtype],
            memory.accumulates(config, degrees),
        ),
        ends=cut.ends_of_user(parallelism),
        cut=_cut(parallelism.module_fqns_per_model_part, [layer.modules for layer in layers]),
    )


def _cut(parts: Sequence[Sequence[str]] | None, layers: Sequence[tuple[str, ...]]) -> tuple[int, ...] | None:
    """Layers by stage, where the config names the modules of each."""
    if not parts:
        return None
    return tuple(sum(layer[0] in part for layer in layers) for part in parts)


def _with_bytes(
    config: Any, degrees: Degrees, how: Checkpointing, counted: _Counted
) -> tuple[tuple[LayerWork, ...], str]:
    """The layers on one GPU, and in words where this comes from."""
    counts = "operations of F, I and W counted on meta tensors" if counted.on_meta else "operations from the weights"
    how_much = f"{counts}, with {how} checkpointing" if how is not Checkpointing.NONE else counts
    if _is_llama(config):
        there = copy.copy(config)
        there.parallelism = replace(config.parallelism, tensor_parallel_degree=degrees.tensor)
        costs = memory.layer_costs(memory.Model.of(there), there)
        found = [
            LayerBytes(
                int(costs.activations[n]), int(costs.waits(n)), {k: int(costs.working_of(n, k)) for k in COMPUTATIONS}
            )
            for n in range(costs.num_stages)
        ]
        words = "bytes as zbpipe.titan.memory calculates them"
    else:
        found = [
            _as_llama(config, layer.products, how, degrees.tensor)
            if layer.bytes is None
            else _shared(layer.bytes, degrees.tensor)
            for layer in counted.layers
        ]
        words = "bytes counted on meta tensors" + (", roughly shared by TP" if degrees.tensor > 1 else "")
        if any(layer.bytes is None for layer in counted.layers):
            words = "bytes of Llama blocks as wide with as many weights in use, because these look at values"
    return tuple(map(partial(_work, how), counted.layers, found)), f"{how_much}; {words}"


def _is_llama(config: Any) -> bool:
    """Whether `zbpipe.titan.memory` knows its bytes: it counts in bfloat16."""
    is_known = type(config.model_spec.model.layers[0]).__qualname__.startswith("Llama3")
    return is_known and config.training.mixed_precision_param == "bfloat16"


def _as_llama(config: Any, products: float, how: Checkpointing, tensor: int) -> LayerBytes:
    """What one of `tensor` GPUs would hold of a Llama block as wide, with as many weights for each token."""
    dim = config.model_spec.model.dim
    attention = LLAMA_3_8B.dim * (2 * LLAMA_3_8B.queries + LLAMA_3_8B.keys_and_values) * (dim / LLAMA_3_8B.dim) ** 2
    hidden = max(products - attention, 0) / (3 * dim)
    block = Block(dim, dim, dim * LLAMA_3_8B.keys_and_values // LLAMA_3_8B.dim, round(hidden))
    size = memory.SIZES[config.training.mixed_precision_param] * _tokens(config)
    working = {kind: int(size * max(block.working(how, kind, tensor), 0)) for kind in COMPUTATIONS}
    return LayerBytes(int(size * block.kept_by_f(how, tensor)), int(size * block.kept_by_i(tensor)), working)


def _tokens(config: Any) -> int:
    """Of a microbatch."""
    return int(config.training.seq_len * config.parallelism.pipeline_parallel_microbatch_size)


def _shared(found: LayerBytes, tensor: int) -> LayerBytes:
    """What one of `tensor` GPUs holds: sequences are cut, but x or dY of each product are whole."""
    working = {kind: int(size / tensor) for kind, size in found.working.items()}
    return LayerBytes(int(found.activations / tensor), int(found.waits * (1 + 1 / tensor) / 2), working)


def _work(how: Checkpointing, layer: _Layer, found: LayerBytes) -> LayerWork:
    is_block = layer.modules[0].startswith("layers.")
    transfers = (_IN_BLOCK, _IN_BLOCK + _AGAIN[how]) if is_block else (1, 1)
    each = layer.operations
    return LayerWork(
        layer.modules,
        each.f,
        each.i,
        each.w,
        layer.parameters,
        found.activations,
        found.waits,
        tuple(found.working.items()),
        transfers,
    )


def _counted(model: nn.Module, config: Any, how: Checkpointing) -> _Counted:
    """The embedding, each block, and norm with head. Blocks that look alike are counted once."""
    modules, training = dict(model.named_children()), config.training
    tokens = _tokens(config)
    dim = config.model_spec.model.dim
    whole = cut.Model(model, config.model_spec.model, training.seq_len)
    attention = cut.attention_products(whole) / max(len(list(modules["layers"].children())), 1)
    per_token = float(config.model_spec.model.get_nparams_and_flops(model, training.seq_len)[1])
    products = {name: cut.products(block) for name, block in modules["layers"].named_children()}
    parameters = {name: _parameters(block) for name, block in modules["layers"].named_children()}
    if config.activation_checkpoint is not None:
        config.activation_checkpoint.build(dump_folder="").apply(model)
    known: dict[str, tuple[Operations, LayerBytes | None]] = {}
    blocks = []
    for name, block in model.get_submodule("layers").named_children():
        kind = f"{block} {[tuple(each.shape) for each in block.parameters()]}"
        if kind not in known:
            x = torch.empty(
                tokens // training.seq_len,
                training.seq_len,
                dim,
                device="meta",
                dtype=next(block.parameters()).dtype,
                requires_grad=True,
            )
            known[kind] = _on_meta(block, x) or (
                _by_products(products[name] + attention, tokens, how),
                None,
            )
        blocks.append(_Layer((f"layers.{name}",), known[kind][0], parameters[name], products[name], known[kind][1]))
    head = _head(modules, tokens, getattr(config.loss, "num_chunks", 0))
    embedding = _Layer(
        ("tok_embeddings",), Operations(0, 0, 0), _parameters(modules["tok_embeddings"]), 0, LayerBytes(0, 0, {})
    )
    return _Counted((embedding, *blocks, head), per_token, all(found is not None for _, found in known.values()))


def _on_meta(block: nn.Module, x: torch.Tensor) -> tuple[Operations, LayerBytes] | None:
    """None if the block cannot run on meta tensors."""
    try:
        return operations(block, x, None), layer_bytes(block, x, None)
    except _ON_META:
        return None


def _by_products(products: float, tokens: int, how: Checkpointing) -> Operations:
    """From the weights that each token is multiplied with: two operations for each."""
    layer = cut.layer(["block"], 2 * products * tokens, how)
    return Operations(layer.f, layer.i, layer.w)


def _head(modules: dict[str, Any], tokens: int, chunks: int) -> _Layer:
    """Norm and head. A loss in chunks runs the head's whole backward in F; 0 chunks: it is in one."""
    forward = 2.0 * cut.products(modules["lm_head"]) * tokens
    counts = Operations(3 * forward, 0, 0) if chunks else Operations(forward, forward, forward)
    logits = forward / max(modules["lm_head"].in_features, 1)  # twice a logit: its bytes in bfloat16
    hidden = _BF16 * tokens * modules["lm_head"].in_features
    held = (
        LayerBytes(3 * hidden, 0, {OpKind.F: int(7 * logits / chunks)})
        if chunks
        else LayerBytes(
            int(2 * hidden + 3 * logits), int(hidden + logits), {OpKind.F: int(2 * logits), OpKind.I: int(4 * logits)}
        )
    )
    parameters = sum(_parameters(modules[name]) for name in ("norm", "lm_head"))
    return _Layer(("norm", "lm_head"), counts, parameters, cut.products(modules["lm_head"]), held)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
