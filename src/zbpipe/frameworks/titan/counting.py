"""Workload of a TorchTitan config for `zbpipe.estimate`: operations counted on meta tensors, bytes, and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn

from zbpipe.costs.transformer import Checkpointing
from zbpipe.estimation.workload import ASYNC_TENSOR, Degrees, Workload
from zbpipe.frameworks import layer_work
from zbpipe.frameworks.layer_work import (
    CountedLayer,
    CountedModel,
    by_products,
    count_blocks,
    count_head,
    count_parameters,
)
from zbpipe.frameworks.titan import batches, layer_split, models


def workload_of(config: Any, degrees: Degrees, name: str) -> Workload:
    """The workload of TorchTitan's config on these degrees. `Workload.on` converts it to others."""
    own = _count(config)

    @cache
    def counted(how: Checkpointing) -> _Counted:
        return own if how is own.checkpointing else _count(models.with_checkpointing(config, how))

    def make(degrees: Degrees, how: Checkpointing | None) -> Workload:
        return _workload(config, degrees, name=name, counted=counted(how or own.checkpointing))

    return replace(make(degrees, None), remade=make)


@dataclass(frozen=True, kw_only=True)
class _Counted(CountedModel):
    ties_weights: bool
    """Whether embedding and head share their weights, which TorchTitan refuses in a pipeline."""
    float8: bool
    sends_once: bool
    operations: float
    """Floating-point operations per token, by TorchTitan's formula for MFU."""
    shapes: layer_split.Shapes
    """The job's knowledge of the model before its launch."""


def _workload(config: Any, degrees: Degrees, *, name: str, counted: _Counted) -> Workload:
    parallelism, tokens, compiled = config.parallelism, prod(batches.shape(config)), batches.compiles_blocks(config)
    if counted.ties_weights and degrees.pipeline > 1:
        raise ValueError("TorchTitan refuses a pipeline whose embedding and head share their weights")
    counted.require_shares(degrees, batches.length(config.training))
    sizes, (option, size) = models.sizes(config, degrees.shards), batches.batch_option(config)
    # Layers by stage, if the config names each stage's modules.
    parts = parallelism.module_fqns_per_model_part or ()
    cut = tuple(sum(layer.modules[0] in part for layer in counted.layers) for part in parts) or None
    hidden_tensor = ASYNC_TENSOR * batches.has_async_tensor(config)
    microbatches, rounds = batches.microbatches(config), batches.rounds(config, degrees.data)
    job = layer_split.Job(microbatches, tokens, degrees, counted.checkpointing, compiled, hidden_tensor)
    words = counted.words(degrees)
    if encoders := counted.embedding.modules[1:]:
        words += f"; {', '.join(encoders)} from the weights, with one patch per token and without activations"
    return Workload(
        name,
        counted.work(tokens, degrees, sizes.computed, sizes.parameters.summed, compiled),
        degrees,
        microbatches,
        tokens,
        message_bytes=sizes.computed * tokens * counted.dim / degrees.sharing,
        operations=counted.operations,
        words=words,
        deferred=counted.deferred,
        schedule=parallelism.pipeline_parallel_schedule,
        checkpointing=counted.checkpointing,
        compiled=compiled,
        float8=counted.float8,
        hidden_tensor=hidden_tensor,
        sends_once=counted.sends_once,
        times=tuple(_times_of_layers(layer_split.times_of_modules(counted.shapes, job))),
        parameter_bytes=replace(sizes.parameters, accumulates=rounds > 1),
        rounds=rounds,
        ends=layer_split.ends_of_user(parallelism),
        cut=cut,
        num_stages=len(cut) if cut else layer_split.count_stages(parallelism, len(counted.blocks)),
        microbatch_size=size,
        batch_option=option,
    )


def _times_of_layers(of_modules: dict[str, tuple[float, float, float]]) -> Iterator[tuple[float, ...]]:
    """F, I and W of all modules before the blocks, of each block, and of norm and head."""
    blocks = [name for name in of_modules if name.startswith("layers.")]
    first = [name for name in of_modules if name not in (*blocks, *models.HEAD)]
    for names in (first, *([name] for name in blocks), models.HEAD):
        yield tuple(map(sum, zip(*(of_modules[name] for name in names), strict=True)))


def _count(config: Any) -> _Counted:
    """Count the embedding, each block, and norm with head. Identical blocks are counted only once."""
    whole = models.build_on_meta(config)
    model, tokens = whole.module, prod(batches.shape(config))
    models.require_decoder(model)
    float8 = models.take_float8(config, model)
    blocks = dict(model.get_submodule("layers").named_children())
    before = layer_split.read_shapes(whole, max(len(blocks), 1))._replace(is_float8=float8)
    per_token = float(whole.config.get_nparams_and_flops(model, whole.seq_len)[1])
    how, hidden = models.apply_checkpointing(config, model), (*batches.shape(config), whole.config.dim)

    def call_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = next(blocks[name].parameters()).dtype
        x = torch.empty(hidden, device="meta", dtype=dtype, requires_grad=True)
        return (x, *models.arguments_of_blocks(model)), {}

    blocks = dict(model.get_submodule("layers").named_children())
    shapes = {name: before.of_modules[f"layers.{name}"] for name in blocks}
    chunks, (norm, output) = batches.chunks_of_loss(config), map(model.get_submodule, models.HEAD)
    in_head = count_parameters(norm) + count_parameters(output)
    return _Counted(
        embedding=_first_layer(model, tokens),
        blocks=count_blocks(blocks, call_of, shapes, tokens, how, before.attention),
        head=count_head(models.HEAD, layer_work.products(output), in_head, tokens, chunks),
        chunks=chunks,
        dim=whole.config.dim,
        key_heads=models.key_heads(whole.config),
        checkpointing=how,
        style=models.STYLE_OF_BLOCKS,
        ties_weights=bool(getattr(whole.config, "enable_weight_tying", False)),
        float8=float8,
        sends_once=models.sends_once(config, model),
        operations=per_token,
        shapes=before,
    )


def _first_layer(model: nn.Module, tokens: int) -> CountedLayer:
    """The embedding, and encoders of images, which run on the first stage. Each token is one patch."""
    encoders = {
        name: each for name, each in model.named_children() if name not in models.PARTS and count_parameters(each)
    }
    modules = {"tok_embeddings": model.get_submodule("tok_embeddings"), **encoders}
    return CountedLayer(
        tuple(modules),
        by_products(sum(map(layer_work.products, modules.values())), tokens, Checkpointing.NONE),
        sum(map(count_parameters, modules.values())),
    )
