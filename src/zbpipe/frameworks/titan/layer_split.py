"""Split of a TorchTitan model into stages with about equal work on all ranks, unless the user sets the split.

TorchTitan counts the embedding as one block, and norm and head together as one. With a large vocabulary the head costs
one to three blocks, the embedding almost nothing, and in a V both are on rank 0. Here each counts with its time on a
usual GPU, including communication. Imports no torchtitan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from torch import nn

from zbpipe.costs.layers import Layer, LayerCosts, Split
from zbpipe.costs.transformer import Checkpointing, Work
from zbpipe.estimation.cut import cutting, usual_times
from zbpipe.estimation.workload import Degrees, LayerWork, Workload
from zbpipe.frameworks.layer_work import Shape, as_block, by_products, shape_of
from zbpipe.schedule.ir import Placement

Cut = Callable[..., list[list[str]]]
"""TorchTitan's function: from the numbers of stages and blocks, and of blocks that embedding and head count as, to the
modules by stage."""


class Model(NamedTuple):
    module: nn.Module
    """The whole model; it may be on the meta device."""
    config: Any
    seq_len: int
    """Tokens per sequence."""


class Job(NamedTuple):
    microbatches: int
    """Number of microbatches in a step."""
    tokens: int
    """Tokens of one."""
    degrees: Degrees = Degrees()
    checkpointing: Checkpointing = Checkpointing.NONE
    compiled: bool = False
    hidden_tensor: float = 0.0
    """Share of TP's communication that overlaps products."""


class LayerSplit:
    """The stages of a TorchTitan model on any placement: by work, or as TorchTitan or the user cuts it."""

    def __init__(self, titans: Cut, num_layers: int, parallelism: Any, model: Model, job: Job) -> None:
        """`titans` is TorchTitan's function, which also cuts the model if the user has set its ends."""
        self.by_hand: list[list[str]] | None = parallelism.module_fqns_per_model_part
        """The user's modules of each stage."""
        self._titans, self.num_layers, self._job, self.checkpointing = titans, num_layers, job, job.checkpointing
        self._ends = ends_of_user(parallelism)
        known = read_shapes(model, num_layers)
        self._times, self.products = times_of_modules(known, job), known.products

    @cached_property
    def _everywhere(self) -> list[str]:
        """Modules that TorchTitan puts into every stage, such as the rotary embedding of some models."""
        first, last = self._titans(2, self.num_layers)
        return [name for name in first if name in last]

    @cached_property
    def _costs(self) -> LayerCosts:
        """Layers: all modules before the blocks, each block, and all modules after them."""
        (listed,) = self._titans(1, self.num_layers)
        names = [name for name in listed if name not in self._everywhere]
        blocks = [number for number, name in enumerate(names) if name.startswith(_BLOCKS)]
        first, behind = blocks[0], blocks[-1] + 1
        groups = [names[:first], *([name] for name in names[first:behind]), names[behind:]]
        works = [self._work_of([*names[:first], *self._left_by([listed])]), *map(self._work_of, groups[1:])]
        pairs = zip(groups, works, strict=True)
        return LayerCosts(tuple(Layer(tuple(group), *work, 0.0) for group, work in pairs if group))

    @cached_property
    def _cut(self) -> Callable[[Placement], Split]:
        return cutting(self._costs, self._job.microbatches, self._job.checkpointing, self._job.degrees.tensor)

    def _left_by(self, parts: Sequence[Sequence[str]]) -> list[str]:
        """Modules with work that are not in these parts, such as image encoders. They are on the first stage."""
        named = {name for part in parts for name in part}
        return [name for name, times in self._times.items() if any(times) and name not in named]

    def _work_of(self, names: Sequence[str]) -> tuple[float, float, float]:
        f, i, w = (sum(self._times[name][n] for name in names if name in self._times) for n in range(3))
        return f, i, w

    def parts(self, placement: Placement) -> list[list[str]]:
        if self.by_hand is not None and len(self.by_hand) == placement.num_stages:
            return self.by_hand
        if self._ends is not None:
            return self._titans(placement.num_stages, self.num_layers, *self._ends)
        return [[*part, *self._everywhere] for part in self._costs.modules(self._cut(placement))]

    def work(self, placement: Placement) -> Work:
        first, *others = parts = self.parts(placement)
        return [self._work_of(part) for part in ([*first, *self._left_by(parts)], *others)]

    def describe(self, placement: Placement) -> str:
        parts, how = self.parts(placement), "by work"
        if parts is self.by_hand:
            how = "as listed"
        elif self._ends is not None:
            how = "the embedding counts as {} and the head as {} blocks".format(*self._ends)
        else:
            *blocks, head = self._costs.layers[1:]
            average = sum(each.seconds for each in blocks) / len(blocks) or 1
            ends = {"+".join(head.modules): head.seconds}
            # One image patch per token.
            ends |= {f"{name} on the first stage": sum(self._times[name]) for name in self._left_by(parts)}
            how += "".join(f"; {name} counts as {each / average:.2g} blocks" for name, each in ends.items())
        return f"({how}): {' | '.join(map(describe, parts))}"


def count_stages(parallelism: Any, num_layers: int) -> int | None:
    """The number of stages by TorchTitan's `pipeline_parallel_layers_per_stage`, or None if that is not set."""
    per_stage, ends = parallelism.pipeline_parallel_layers_per_stage, ends_of_user(parallelism) or ()
    # TorchTitan counts embedding and head as further layers.
    return None if per_stage is None else ceil((num_layers + sum(ends)) / per_stage)


def ends_of_user(parallelism: Any) -> tuple[int, int] | None:
    """Numbers of blocks that embedding and head count as in the user's even cut. None for a cut by work."""
    ends = (parallelism.pipeline_parallel_first_stage_less_layers, parallelism.pipeline_parallel_last_stage_less_layers)
    return None if ends == (1, 1) and parallelism.pipeline_parallel_layers_per_stage is None else ends


def describe(names: Sequence[str]) -> str:
    """A stage's modules, with consecutive blocks as a range.

    >>> describe(["tok_embeddings", "layers.0", "layers.1", "layers.2"]), describe(["layers.3", "norm", "lm_head"])
    ('tok_embeddings layers.0-2', 'layers.3 norm lm_head')
    """
    blocks = [name for name in names if name.startswith(_BLOCKS)]
    if len(blocks) < 2:
        return " ".join(names)
    first, last = names.index(blocks[0]), names.index(blocks[-1])
    return " ".join([*names[:first], f"{blocks[0]}-{blocks[-1].removeprefix(_BLOCKS)}", *names[last + 1 :]])


_BLOCKS = "layers."


class Shapes(NamedTuple):
    of_modules: dict[str, Shape]
    """Weights per token, by the names of the modules that TorchTitan assigns to stages."""
    attention: float
    """Multiplications per token in one block's attention."""
    dim: int
    is_float8: bool

    @property
    def products(self) -> float:
        return sum(each.products + self.attention * _is_block(name) for name, each in self.of_modules.items())


def read_shapes(model: Model, num_layers: int) -> Shapes:
    modules = modules_of(model.module)
    parts = (part for name, each in modules.items() if _is_block(name) for part in each.modules())
    is_float8 = any(type(part).__name__.startswith("Float8") for part in parts)
    shapes = {name: shape_of(each) for name, each in modules.items()}
    return Shapes(shapes, attention_products(model) / num_layers, _width(model), is_float8)


def times_of_modules(known: Shapes, job: Job) -> dict[str, tuple[float, float, float]]:
    """Seconds of F, I and W of each module on a usual GPU."""
    tokens, how, layers = job.tokens, job.checkpointing, []
    for name, shape in known.of_modules.items():
        own = (how, known.attention) if _is_block(name) else (Checkpointing.NONE, 0.0)
        each = by_products(shape.products, tokens, *own)
        work = LayerWork((name,), each.f, each.i, each.w, 0.0, 0.0, 0.0, attention=each.attention)
        if _is_block(name):
            work = as_block(work, shape, known.dim, tokens, how, job.compiled)
        elif shape.products:
            work = replace(work, transfers=(1, 1))
        layers.append(work)
    whole = Workload(
        "",
        tuple(layers),
        job.degrees,
        job.microbatches,
        tokens,
        message_bytes=_BF16 * tokens * known.dim / job.degrees.sharing,
        operations=0.0,
        words="",
        float8=known.is_float8,
        hidden_tensor=job.hidden_tensor,
    )
    return dict(zip(known.of_modules, usual_times(whole), strict=True))


def _is_block(name: str) -> bool:
    return name.startswith(_BLOCKS)


_BF16 = 2


def _width(model: Model) -> int:
    found = (each.embedding_dim for each in model.module.modules() if isinstance(each, nn.Embedding))
    return getattr(model.config, "dim", None) or next(found, 1)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that TorchTitan assigns to stages: a model's children, and the blocks in its containers.

    >>> list(modules_of(nn.ModuleDict({"layers": nn.ModuleList([nn.ReLU(), nn.ReLU()]), "norm": nn.ReLU()})))
    ['layers.0', 'layers.1', 'norm']
    """
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            found |= {f"{name}.{block}": each for block, each in child.named_children()}
        else:
            found[name] = child
    return found


def attention_products(model: Model) -> float:
    """Multiplications per token in the attention of all blocks, which sees half of the sequence on average.
    TorchTitan's FLOP estimate has 12 operations per multiplication and counts the whole sequence. The attention of a
    custom model without an estimate counts as zero."""
    if not hasattr(model.config, "get_nparams_and_flops"):
        return 0.0
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # some models log their counts
    try:
        (_, with_attention), (_, without) = (
            model.config.get_nparams_and_flops(model.module, length) for length in (model.seq_len, 0)
        )
    finally:
        logging.disable(before)
    return float(with_attention - without) / 12
