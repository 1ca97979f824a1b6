"""Workload of a TorchTitan config for `zbpipe.estimate`: operations counted on meta tensors, bytes, and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import nn

from zbpipe.costs.transformer import Block, Checkpointing
from zbpipe.estimation.workload import ASYNC_TENSOR, Degrees, LayerWork, Workload
from zbpipe.frameworks import layer_work
from zbpipe.frameworks.layer_work import NO_SHAPE, Shape, as_block, as_llama, by_products
from zbpipe.frameworks.titan import batches, layer_split, models
from zbpipe.runtime.measure.counts import LayerBytes, Operations, count_bytes, count_operations
from zbpipe.runtime.split.work import percent
from zbpipe.schedule.ir import COMPUTATIONS, OpKind

_ON_META = (RuntimeError, NotImplementedError, TypeError)
"""Errors of modules that read values, which meta tensors lack."""


def workload_of(config: Any, degrees: Degrees, name: str) -> Workload:
    """The workload of TorchTitan's config on these degrees. `Workload.on` returns it for others."""
    own = _count(config)

    @cache
    def counted(how: Checkpointing) -> _Counted:
        return own if how is own.checkpointing else _count(models.with_checkpointing(config, how))

    def make(degrees: Degrees, how: Checkpointing | None) -> Workload:
        return _workload(config, degrees, name=name, counted=counted(how or own.checkpointing))

    return replace(make(degrees, None), remade=make)


@dataclass(frozen=True)
class _Layer:
    """A layer's work for one microbatch without tensor parallelism."""

    modules: tuple[str, ...]
    operations: Operations
    parameters: int
    shape: Shape = NO_SHAPE
    bytes: LayerBytes | None = None
    """None if the layer was not run."""


@dataclass(frozen=True)
class _Counted:
    """A model, counted once for all degrees."""

    embedding: _Layer
    blocks: tuple[_Layer, ...]
    head: _Layer
    """Norm and head."""
    chunks: int
    """Number of chunks in which the loss runs the head's whole backward in F; 0 if the head runs like any other
    layer."""
    dim: int
    """Dimension of the hidden states."""
    key_heads: int
    """Number of key-value heads. 0 if unknown."""
    ties_weights: bool
    """Whether embedding and head share their weights, which TorchTitan refuses in a pipeline."""
    float8: bool
    """Whether the products of blocks are in float8."""
    checkpointing: Checkpointing
    operations: float
    """Operations of the model per token, as TorchTitan counts them for MFU."""
    shapes: layer_split.Shapes
    """What the job knows of the model before its launch."""

    @property
    def layers(self) -> tuple[_Layer, ...]:
        return (self.embedding, *self.blocks, self.head)

    @property
    def deferred(self) -> float | None:
        """Share of the blocks' weight gradients that W computes. None if they were not run."""
        in_w, in_i = (sum(getattr(each.operations, name) for each in self.blocks) for name in ("w", "in_i"))
        return in_w / (in_w + in_i or 1) if self.on_meta else None

    @property
    def on_meta(self) -> bool:
        """Whether all blocks ran on meta tensors."""
        return all(block.bytes is not None for block in self.blocks)


def _workload(config: Any, degrees: Degrees, *, name: str, counted: _Counted) -> Workload:
    parallelism, tokens, compiled = config.parallelism, prod(batches.shape(config)), batches.compiles_blocks(config)
    _require_shares(config, degrees, counted)
    sizes, (option, size) = models.sizes(config, degrees.shards), batches.batch_option(config)
    # Layers by stage, if the config names each stage's modules.
    parts = parallelism.module_fqns_per_model_part or ()
    cut = tuple(sum(layer.modules[0] in part for layer in counted.layers) for part in parts) or None
    hidden_tensor = ASYNC_TENSOR * batches.has_async_tensor(config)
    microbatches, rounds = batches.microbatches(config), batches.rounds(config, degrees.data)
    job = layer_split.Job(microbatches, tokens, degrees, counted.checkpointing, compiled, hidden_tensor)
    on_one_gpu = _OnOneGpu(tokens // degrees.context, counted, degrees.tensor, degrees.context, sizes).layers()
    return Workload(
        name,
        tuple(map(partial(_work, counted, tokens, compiled), counted.layers, on_one_gpu)),
        degrees,
        microbatches,
        tokens,
        message_bytes=sizes.computed * tokens * counted.dim / degrees.sharing,
        operations=counted.operations,
        words=_words(counted, degrees),
        deferred=counted.deferred,
        schedule=parallelism.pipeline_parallel_schedule,
        checkpointing=counted.checkpointing,
        compiled=compiled,
        float8=counted.float8,
        hidden_tensor=hidden_tensor,
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
    """F, I and W of all before the blocks, of each block, and of norm and head."""
    blocks = [name for name in of_modules if name.startswith("layers.")]
    first = [name for name in of_modules if name not in (*blocks, *models.HEAD)]
    for names in (first, *([name] for name in blocks), models.HEAD):
        yield tuple(map(sum, zip(*(of_modules[name] for name in names), strict=True)))


def _require_shares(config: Any, degrees: Degrees, counted: _Counted) -> None:
    """Refuse degrees by which TorchTitan cannot share heads, sequence or weights, with a ValueError."""
    if counted.ties_weights and degrees.pipeline > 1:
        raise ValueError("TorchTitan refuses a pipeline whose embedding and head share their weights")
    if counted.key_heads % degrees.tensor:
        raise ValueError(f"TP {degrees.tensor} cannot share {counted.key_heads} key-value heads")
    length = batches.length(config.training)
    if length % (degrees.tensor * (2 * degrees.context if degrees.context > 1 else 1)):
        raise ValueError(f"TP {degrees.tensor} and CP {degrees.context} cannot share sequences of {length} tokens")


def _words(counted: _Counted, degrees: Degrees) -> str:
    """Sources of operations and bytes, in words."""
    share = counted.deferred
    counts = "operations from the weights, as if W computed the weight gradients of all layers"
    if share is not None:
        counts = f"operations of F, I and W counted on meta tensors ({percent(share)} of weight gradients in W)"
    how = counted.checkpointing
    how_much = f"{counts}, with {how} checkpointing" if how is not Checkpointing.NONE else counts
    words = "bytes counted on meta tensors" + (", shared by TP as in Llama" if degrees.tensor > 1 else "")
    if not counted.on_meta:
        words = "bytes of Llama blocks of the same width and weights in use, because these blocks read values"
    if encoders := counted.embedding.modules[1:]:
        words += f"; {', '.join(encoders)} from the weights, with one patch per token and without activations"
    return f"{how_much}; {words}"


@dataclass(frozen=True)
class _OnOneGpu:
    """Bytes of the layers of one microbatch on one GPU."""

    tokens: int
    counted: _Counted
    tensor: int
    context: int
    sizes: models.Sizes

    def layers(self) -> list[LayerBytes]:
        head = self._head_in_chunks() if self.counted.chunks else self._head_in_one()
        return [self._embedding(), *map(self._block, self.counted.blocks), head]

    def _embedding(self) -> LayerBytes:
        """Bytes of the embedding, whose output counts for the first block. I computes its whole gradient, which cannot
        be deferred."""
        gradient = self._gradient(self.counted.embedding)
        return LayerBytes(0, 0, {OpKind.F: self._hidden, OpKind.I: gradient, OpKind.B: gradient})

    def _block(self, layer: _Layer) -> LayerBytes:
        """The counted bytes, sharded over tensor parallelism like a Llama block of that width. Without counts, that
        block's bytes."""
        alike = as_llama(self.counted.dim, layer.shape, **models.STYLE_OF_BLOCKS)
        whole, shared = (self._llama(alike, each) for each in (1, self.tensor))
        return shared if layer.bytes is None else _scale(layer.bytes, whole, shared, self.context)

    def _llama(self, block: Block, tensor: int) -> LayerBytes:
        how = self.counted.checkpointing
        size = self.sizes.computed * self.tokens
        working = {kind: int(size * max(block.working(how, kind, tensor), 0)) for kind in COMPUTATIONS}
        return LayerBytes(int(size * block.kept_by_f(how, tensor)), int(size * block.kept_by_i(tensor)), working)

    def _head_in_chunks(self) -> LayerBytes:
        """Bytes of a head whose whole backward runs in F, on one chunk of tokens at a time.

        F keeps the norm's input, the norm's result, which is whole on all GPUs of TP, and the result's gradient. It
        accumulates that gradient in float32. I begins with it.
        """
        result, logits = self._hidden, self._num_logits // self.counted.chunks
        kept = result // self.tensor + 2 * result
        # torch's cross-entropy, or TorchTitan's over the shards of TP.
        each = self.sizes.computed + (3 if self.tensor == 1 else 4) * _FP32
        # The logits and their gradient are alive while the head's weight gradient is computed.
        most = max(each * logits, 2 * self.sizes.computed * logits + self._gradient(self.counted.head))
        accumulated = _FP32 * self.tokens * self.counted.dim
        return LayerBytes(
            kept, 0, {OpKind.F: accumulated + max(most, result) - result, OpKind.I: result, OpKind.B: result}
        )

    def _head_in_one(self) -> LayerBytes:
        """Bytes of a head that runs like any other layer.

        F keeps the norm's input and result, all logits, and their log-softmax in float32. The head's dW is deferred
        like any linear layer's, with its x and the logits' gradient.
        """
        result, logits = self._hidden, self._num_logits
        kept_by_f = result // self.tensor + result + (self.sizes.computed + _FP32) * logits
        kept_by_i = result + self.sizes.computed * logits
        # Logits in float32, and two gradients of that size. The last one is freed before the gradients of head and
        # norm.
        in_f, in_i = _FP32 * logits, 2 * _FP32 * logits
        in_b = max(in_i, self._gradient(self.counted.head))
        return LayerBytes(kept_by_f, kept_by_i, {OpKind.F: in_f, OpKind.I: in_i, OpKind.B: in_b})

    @property
    def _hidden(self) -> int:
        """Bytes of a hidden state."""
        return self.sizes.computed * self.tokens * self.counted.dim

    @property
    def _num_logits(self) -> int:
        return int(self.tokens * self.counted.head.shape.products / self.counted.dim / self.tensor)

    def _gradient(self, layer: _Layer) -> int:
        """Bytes of the embedding's or head's gradient, both as computed and as accumulated."""
        return int((self.sizes.computed + self.sizes.parameters.summed) * layer.parameters / self.tensor)


_FP32 = 4


def _scale(counted: LayerBytes, whole: LayerBytes, shared: LayerBytes, context: int) -> LayerBytes:
    """Bytes counted on one GPU, scaled to one GPU of TP and CP. `whole` and `shared` are a Llama block's bytes on one
    GPU and on one of TP."""

    def scaled(size: int, whole: int, shared: int) -> int:
        return size * shared // (whole * context) if whole else 0

    working = {kind: scaled(size, whole.working[kind], shared.working[kind]) for kind, size in counted.working.items()}
    activations = scaled(counted.activations, whole.activations, shared.activations)
    return LayerBytes(activations, scaled(counted.waits, whole.waits, shared.waits), working)


def _work(counted: _Counted, tokens: int, compiled: bool, layer: _Layer, found: LayerBytes) -> LayerWork:
    each = layer.operations
    work = LayerWork(
        layer.modules,
        each.f,
        each.i,
        each.w,
        layer.parameters,
        found.activations,
        found.waits,
        tuple(found.working.items()),
        (1, 1),
        each.attention,
    )
    return as_block(work, layer.shape, counted.dim, tokens, counted.checkpointing, compiled) if work.is_block else work


def _count(config: Any) -> _Counted:
    """Count the embedding, each block, and norm with head. Identical blocks are counted once."""
    whole = models.build_on_meta(config)
    model, tokens = whole.module, prod(batches.shape(config))
    models.require_decoder(model)
    float8 = models.take_float8(config, model)
    blocks = dict(model.get_submodule("layers").named_children())
    before = layer_split.read_shapes(whole, max(len(blocks), 1))._replace(is_float8=float8)
    per_token = float(whole.config.get_nparams_and_flops(model, whole.seq_len)[1])
    parameters = {name: _parameters(block) for name, block in blocks.items()}
    how = models.apply_checkpointing(config, model)
    known: dict[str, tuple[Operations, LayerBytes | None]] = {}
    found = []
    for name, block in model.get_submodule("layers").named_children():
        shape = before.of_modules[f"layers.{name}"]
        kind = f"{block} {[tuple(each.shape) for each in block.parameters()]}"
        if kind not in known:
            dtype = next(block.parameters()).dtype
            x = torch.empty((*batches.shape(config), whole.config.dim), device="meta", dtype=dtype, requires_grad=True)
            known[kind] = _on_meta(block, x, *models.arguments_of_blocks(model)) or (
                by_products(shape.products, tokens, how, before.attention),
                None,
            )
        operations, size = known[kind]
        found.append(_Layer((f"layers.{name}",), operations, parameters[name], shape, size))
    embedding = _first_layer(model, tokens)
    chunks = batches.chunks_of_loss(config)
    head = _head(model, models.HEAD, tokens, chunks)
    heads, is_tied = models.key_heads(whole.config), bool(getattr(whole.config, "enable_weight_tying", False))
    about = chunks, whole.config.dim, heads, is_tied, float8, how, per_token
    return _Counted(embedding, tuple(found), head, *about, before)


def _first_layer(model: nn.Module, tokens: int) -> _Layer:
    """The embedding, and encoders of images, which run on the first stage. Each token is one patch."""
    encoders = {name: each for name, each in model.named_children() if name not in models.PARTS and _parameters(each)}
    modules = {"tok_embeddings": model.get_submodule("tok_embeddings"), **encoders}
    return _Layer(
        tuple(modules),
        by_products(sum(map(layer_work.products, modules.values())), tokens, Checkpointing.NONE),
        sum(map(_parameters, modules.values())),
    )


def _on_meta(block: nn.Module, x: torch.Tensor, *args: Any) -> tuple[Operations, LayerBytes] | None:
    """Counts on meta tensors; None if the block cannot run there."""
    try:
        return count_operations(block, x, *args), count_bytes(block, x, *args)
    except _ON_META:
        return None


def _head(model: nn.Module, names: tuple[str, str], tokens: int, chunks: int) -> _Layer:
    """Norm and head. A loss in chunks runs the head's whole backward in F."""
    products = layer_work.products(model.get_submodule(names[1]))
    forward = 2.0 * products * tokens
    counts = Operations(3 * forward, 0, 0) if chunks else Operations(forward, forward, forward)
    return _Layer(names, counts, sum(_parameters(model.get_submodule(name)) for name in names), Shape(products))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
