"""Work of a model's layers before any measurement: multiplications with the weights, and bytes per GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from zbpipe.costs.transformer import LLAMA_3_8B, Block, Checkpointing
from zbpipe.estimation.workload import Degrees, LayerWork
from zbpipe.runtime._torch.attributes import plain_attribute
from zbpipe.runtime._torch.autograd import tree_leaves
from zbpipe.runtime.measure.counts import LayerBytes, Operations, count_bytes, count_operations
from zbpipe.runtime.split.work import percent
from zbpipe.schedule.ir import COMPUTATIONS, OpKind

ON_META = (RuntimeError, NotImplementedError, TypeError)
"""Errors of modules that read values, which meta tensors lack, and of ops that torch does not have for these."""

_IN_BLOCK = 4
"""Collectives of tensor parallelism in a block: two gather the sequence, two scatter it."""
_AGAIN = {Checkpointing.NONE: 0, Checkpointing.SELECTIVE: 2, Checkpointing.FULL: 4}
"""Number of these that I repeats; selective checkpointing keeps the scattered results."""
_BF16 = 2


def products(module: nn.Module, *, recurse: bool = True) -> float:
    """Weight elements with which each token is multiplied. Only the experts that a token visits count.

    Without `recurse`, submodules do not count.

    >>> products(nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 16), nn.LayerNorm(16)))
    128.0
    """
    modules = list(module.modules()) if recurse else [module]
    chosen = next(filter(None, (plain_attribute(each, "top_k") for each in modules)), None)
    return float(
        sum(
            parameter.numel() * (chosen / len(parameter) if chosen and parameter.dim() == _GROUPED else 1.0)
            for each in modules
            if not isinstance(each, nn.Embedding)
            for parameter in each.parameters(recurse=False)
            if parameter.dim() > 1
        )
    )


_GROUPED = 3
"""Dimensions of expert weights, with the experts first."""


def by_products(products: float, tokens: int, how: Checkpointing, attention: float = 0.0) -> Operations:
    """Operations for this number of weights per token: two each. Attention has none in W."""
    forward, in_f = 2 * products * tokens, 2 * attention * tokens
    in_i = (2.5 + (how is Checkpointing.FULL)) * in_f
    again = 1 + LLAMA_3_8B.recomputed(how)
    return Operations(forward + in_f, again * forward + in_i, forward, attention=(in_f, in_i))


class Shape(NamedTuple):
    """Numbers of a layer that its operations do not show."""

    products: float = 0.0
    """Weight elements with which each token is multiplied. Only the experts that a token visits count."""
    heads_share: float = 0.5
    """Key-value heads per query head."""
    experts_per_token: int = 0
    """Number of routed experts that compute each token."""
    num_experts: int = 0
    in_experts: float = 0.0
    """Number of weights in all of them."""

    @property
    def visited(self) -> float:
        """Number of weights in the routed experts that compute a token."""
        return self.in_experts * self.experts_per_token / max(self.num_experts, 1)


NO_SHAPE = Shape()


def shape_of(block: nn.Module) -> Shape:
    found = (plain_attribute(module, "top_k") for module in block.modules())
    experts = next((each for each in found if isinstance(each, int)), 0)
    grouped = [each for each in block.parameters() if each.dim() == _GROUPED and experts]
    number = len(grouped[0]) if grouped else 0
    return Shape(products(block), _heads_share(block), experts, number, float(sum(each.numel() for each in grouped)))


def as_block(work: LayerWork, shape: Shape, dim: int, tokens: int, how: Checkpointing, compiled: bool) -> LayerWork:
    """A block's work with everything besides products: communication, norms and activation functions. `dim` is the
    width of the hidden states."""
    in_f, in_i = as_llama(dim, shape).traffic(how, compiled)
    return replace(
        work,
        transfers=(_IN_BLOCK, _IN_BLOCK + _AGAIN[how]),
        traffic=(_BF16 * tokens * in_f, _BF16 * tokens * in_i),
        keys=_BF16 * tokens * 2 * dim * shape.heads_share,
        routed=_BF16 * tokens * dim * shape.experts_per_token,
        num_experts=shape.num_experts,
        in_experts=shape.in_experts,
        in_routed=shape.visited / shape.products if shape.products else 0.0,
    )


def as_llama(dim: int, shape: Shape, **style: Any) -> Block:
    keys_and_values = round(2 * dim * shape.heads_share)
    hidden = max(shape.products - dim * (2 * dim + keys_and_values), 0) / (3 * dim)
    return Block(dim, dim, keys_and_values, round(hidden), **style)


def _heads_share(block: nn.Module) -> float:
    """Key-value heads per query head; Llama's ratio if the block does not show it."""
    for module in block.modules():
        keys, queries, queries_a_key = (plain_attribute(module, name) for name in ("n_kv_heads", "n_heads", _FUSED))
        if queries_a_key:
            return float(1 / queries_a_key)
        if keys and queries:
            return float(keys / queries)
    return LLAMA_3_8B.keys_and_values / 2 / LLAMA_3_8B.queries


_FUSED = "heads_per_kv"
"""Attribute of the fused product for queries, keys and values in TorchTitan 0.3."""


@dataclass(frozen=True)
class CountedLayer:
    """A layer's work for one microbatch without tensor parallelism."""

    modules: tuple[str, ...]
    operations: Operations
    parameters: int
    shape: Shape = NO_SHAPE
    bytes: LayerBytes | None = None
    """None if the layer was not run."""


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A model, counted once for all degrees."""

    embedding: CountedLayer
    blocks: tuple[CountedLayer, ...]
    head: CountedLayer
    chunks: int = 0
    """Number of chunks in which the loss runs the head's whole backward in F. 0 if the head runs like other layers."""
    dim: int
    """Dimension of the hidden states."""
    key_heads: int
    """Number of key-value heads. 0 if unknown."""
    checkpointing: Checkpointing
    style: Mapping[str, bool] = field(default_factory=dict)
    """Differences between its blocks and Llama's (`zbpipe.costs.transformer.Block`)."""

    @property
    def layers(self) -> tuple[CountedLayer, ...]:
        return (self.embedding, *self.blocks, self.head)

    @property
    def deferred(self) -> float | None:
        """Share of the blocks' weight gradients that W computes. None if they were not run."""
        in_w, in_i = (sum(getattr(each.operations, name) for each in self.blocks) for name in ("w", "in_i"))
        return in_w / (in_w + in_i or 1) if self.on_meta else None

    @property
    def on_meta(self) -> bool:
        return all(block.bytes is not None for block in self.blocks)

    def words(self, degrees: Degrees) -> str:
        """Sources of operations and bytes, as text."""
        share = self.deferred
        counts = "operations from the weights, as if W computed the weight gradients of all layers"
        if share is not None:
            counts = f"operations of F, I and W counted on meta tensors ({percent(share)} of weight gradients in W)"
        how = self.checkpointing
        how_much = f"{counts}, with {how} checkpointing" if how is not Checkpointing.NONE else counts
        words = "bytes counted on meta tensors" + (", shared by TP as in Llama" if degrees.tensor > 1 else "")
        if not self.on_meta:
            words = "bytes of Llama blocks of the same width and weights in use: these do not run on meta tensors"
        return f"{how_much}; {words}"

    def require_shares(self, degrees: Degrees, length: int) -> None:
        """Raise ValueError for degrees that cannot share its heads, or sequences of this length."""
        if self.key_heads % degrees.tensor:
            raise ValueError(f"TP {degrees.tensor} cannot share {self.key_heads} key-value heads")
        if length % (degrees.tensor * (2 * degrees.context if degrees.context > 1 else 1)):
            raise ValueError(f"TP {degrees.tensor} and CP {degrees.context} cannot share sequences of {length} tokens")

    def work(
        self, tokens: int, degrees: Degrees, computed: int, summed: float, compiled: bool
    ) -> tuple[LayerWork, ...]:
        """Work of all layers on these degrees. `computed`: bytes per number of an activation, `summed`: of a sum of
        gradients."""
        sizes = _OnOneGpu(self, tokens // degrees.context, degrees, computed, summed).layers()
        return tuple(self._work(*each, tokens, compiled) for each in zip(self.layers, sizes, strict=True))

    def _work(self, layer: CountedLayer, found: LayerBytes, tokens: int, compiled: bool) -> LayerWork:
        each, working = layer.operations, tuple(found.working.items())
        sizes = each.f, each.i, each.w, layer.parameters, found.activations, found.waits
        work = LayerWork(layer.modules, *sizes, working, (1, 1), each.attention)
        return as_block(work, layer.shape, self.dim, tokens, self.checkpointing, compiled) if work.is_block else work


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block, on the meta device: the hidden states come first."""


def count_blocks(
    blocks: Mapping[str, nn.Module],
    call_of: Callable[[str], Call | None],
    shapes: Mapping[str, Shape],
    tokens: int,
    how: Checkpointing,
    attention: float,
) -> tuple[CountedLayer, ...]:
    """Counts of blocks by name, checkpointed as in the job. Identical blocks are counted once. `attention` are the
    multiplications per token of a block that cannot run."""
    known: dict[str, tuple[Operations, LayerBytes | None]] = {}
    found = []
    for name, block in blocks.items():
        args, kwargs = call = call_of(name) or ((), {})
        tensors = [*block.parameters(), *(each for each in tree_leaves(call) if isinstance(each, Tensor))]
        kind = f"{block} {[tuple(each.shape) for each in tensors]}"
        if kind not in known:
            on_meta = count_on_meta(block, *args, **kwargs) if args else None
            known[kind] = on_meta or (by_products(shapes[name].products, tokens, how, attention), None)
        found.append(
            CountedLayer((f"layers.{name}",), known[kind][0], count_parameters(block), shapes[name], known[kind][1])
        )
    return tuple(found)


def count_on_meta(block: nn.Module, x: Any, *args: Any, **kwargs: Any) -> tuple[Operations, LayerBytes] | None:
    """Counts on meta tensors; None if the block cannot run there."""
    try:
        return count_operations(block, x, *args, **kwargs), count_bytes(block, x, *args, **kwargs)
    except ON_META:
        return None


def count_head(
    modules: tuple[str, ...], products: float, parameters: int, tokens: int, chunks: int = 0
) -> CountedLayer:
    """Norm and head. A loss in chunks runs the head's whole backward in F."""
    forward = 2.0 * products * tokens
    counts = Operations(3 * forward, 0, 0) if chunks else Operations(forward, forward, forward)
    return CountedLayer(modules, counts, parameters, Shape(products))


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class _OnOneGpu:
    counted: CountedModel
    tokens: int
    degrees: Degrees
    computed: int
    """Bytes per number of an activation; `summed` of a sum of gradients."""
    summed: float

    def layers(self) -> list[LayerBytes]:
        head = self._head_in_chunks() if self.counted.chunks else self._head_in_one()
        return [self._embedding(), *map(self._block, self.counted.blocks), head]

    def _embedding(self) -> LayerBytes:
        """The embedding. Its output counts for the first block, and I computes its whole gradient."""
        gradient = self._gradient(self.counted.embedding)
        return LayerBytes(0, 0, {OpKind.F: self._hidden, OpKind.I: gradient, OpKind.B: gradient})

    def _block(self, layer: CountedLayer) -> LayerBytes:
        """The counted bytes, sharded over TP like a Llama block of that width. Without counts, that block's bytes."""
        alike = as_llama(self.counted.dim, layer.shape, **self.counted.style)
        whole, shared = (self._llama(alike, each) for each in (1, self.degrees.tensor))
        return shared if layer.bytes is None else _scale(layer.bytes, whole, shared, self.degrees.context)

    def _llama(self, block: Block, tensor: int) -> LayerBytes:
        how = self.counted.checkpointing
        size = self.computed * self.tokens
        working = {kind: int(size * max(block.working(how, kind, tensor), 0)) for kind in COMPUTATIONS}
        return LayerBytes(int(size * block.kept_by_f(how, tensor)), int(size * block.kept_by_i(tensor)), working)

    def _head_in_chunks(self) -> LayerBytes:
        """Bytes of a head whose whole backward runs in F, on one chunk of tokens at a time. F keeps the norm's input,
        the norm's result, which is whole on all GPUs of TP, and the result's gradient. It accumulates that gradient in
        float32. I begins with it."""
        result, logits = self._hidden, self._num_logits // self.counted.chunks
        kept = result // self.degrees.tensor + 2 * result
        # torch's cross-entropy, or TorchTitan's over the shards of TP.
        each = self.computed + (3 if self.degrees.tensor == 1 else 4) * _FP32
        # The logits and their gradient are alive while the head's weight gradient is computed.
        most = max(each * logits, 2 * self.computed * logits + self._gradient(self.counted.head))
        accumulated = _FP32 * self.tokens * self.counted.dim
        return LayerBytes(
            kept, 0, {OpKind.F: accumulated + max(most, result) - result, OpKind.I: result, OpKind.B: result}
        )

    def _head_in_one(self) -> LayerBytes:
        """Bytes of a head that runs like any other layer. F keeps the norm's input and result, all logits, and their
        log-softmax in float32. The head's dW is deferred like any linear layer's, with its x and the logits'
        gradient."""
        result, logits = self._hidden, self._num_logits
        kept_by_f = result // self.degrees.tensor + result + (self.computed + _FP32) * logits
        kept_by_i = result + self.computed * logits
        # Logits in float32, and two gradients of that size. The last is freed before the gradients of head and norm.
        in_f, in_i = _FP32 * logits, 2 * _FP32 * logits
        in_b = max(in_i, self._gradient(self.counted.head))
        return LayerBytes(kept_by_f, kept_by_i, {OpKind.F: in_f, OpKind.I: in_i, OpKind.B: in_b})

    @property
    def _hidden(self) -> int:
        return self.computed * self.tokens * self.counted.dim

    @property
    def _num_logits(self) -> int:
        return int(self.tokens * self.counted.head.shape.products / self.counted.dim / self.degrees.tensor)

    def _gradient(self, layer: CountedLayer) -> int:
        """Bytes of the embedding's or head's gradient, both as computed and as accumulated."""
        return int((self.computed + self.summed) * layer.parameters / self.degrees.tensor)


_FP32 = 4


def _scale(counted: LayerBytes, whole: LayerBytes, shared: LayerBytes, context: int) -> LayerBytes:
    """Bytes counted on one GPU, scaled to one GPU of TP and CP. `whole` and `shared` are a Llama block's bytes on one
    GPU and on one of TP."""

    def scaled(size: int, whole: int, shared: int) -> int:
        return size * shared // (whole * context) if whole else 0

    working = {kind: scaled(size, whole.working[kind], shared.working[kind]) for kind, size in counted.working.items()}
    activations = scaled(counted.activations, whole.activations, shared.activations)
    return LayerBytes(activations, scaled(counted.waits, whole.waits, shared.waits), working)
