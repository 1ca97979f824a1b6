"""Workload of a causal model of transformers for `zbpipe.estimate`, from its config: without weights and without a GPU.

transformers builds the model on the meta device and runs it there once, which shows the arguments of each block.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zbpipe.costs.transformer import Checkpointing
from zbpipe.estimation.workload import Degrees, ParameterBytes, Spelling, Workload
from zbpipe.frameworks import layer_work
from zbpipe.frameworks.layer_work import CountedModel
from zbpipe.frameworks.whole_model.anatomy import find_blocks, first_argument, refuse_by_config
from zbpipe.schedule.ir import require_whole

_PRECISION = {"float32": ParameterBytes(), "bfloat16": ParameterBytes(2, 2, 2)}
"""Bytes by the dtype of the weights. Products are in bfloat16; float32 weights have copies for them."""
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
"""Required fields of a config. Without them transformers would use another model's sizes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job with a model of transformers."""

    gpus: int
    """GPUs of the whole job. FSDP takes those that the other degrees leave."""
    pp: int = 1
    """Degrees of pipeline, tensor, context and expert parallelism."""
    tp: int = 1
    cp: int = 1
    ep: int = 1
    batch: int | None = None
    """Sequences of one pipeline's step, each a microbatch. Default: 4 for each rank."""
    seq_len: int = 8192
    checkpointing: Checkpointing = Checkpointing.FULL
    """FULL is what `model.gradient_checkpointing_enable()` does; SELECTIVE keeps every second product."""
    dtype: str = "float32"
    """Dtype of the weights, gradients and moments: "float32", for FSDP2 with a MixedPrecisionPolicy, or "bfloat16"."""
    compiled: bool = False
    """Whether torch.compile runs the blocks."""
    schedule: str = "1F1B"
    """The schedule that the job runs now."""


def read_workload(config: Any, job: Job) -> Workload:
    """The workload of a job with a causal model of transformers. `Workload.on` returns it for other degrees.

        zbpipe.estimate(read_workload("config.json", Job(gpus=64, pp=8)), "H100")

    Args:
        config: path of a config.json, or a config of transformers.
        job: all else.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the config is not one of a causal model, or lacks a field; or a degree that cannot share the model.
    """
    counts = {name: getattr(job, name) for name in ("gpus", "pp", "tp", "cp", "ep", "seq_len")}
    require_whole(1, **counts, batch=4 * job.pp if job.batch is None else job.batch)
    degrees = Degrees(job.pp, job.tp, context=job.cp, experts=job.ep)
    if job.gpus % degrees.gpus:
        raise ValueError(f"{job.gpus} GPUs are not a multiple of PP x TP x CP = {degrees.gpus}: change one of them")
    if job.dtype not in _PRECISION:
        raise ValueError(f"dtype = {job.dtype!r}: give {' or '.join(_PRECISION)}")
    name, library = type(config).__name__, _transformers()
    if isinstance(config, (str, Path)):
        name = str(config)
        config = _load(library, Path(config))
    _require_causal(library, config, name)
    counted = cache(partial(_count, library, config, job.seq_len))

    def make(degrees: Degrees, how: Checkpointing | None) -> Workload:
        return _workload(counted(how or job.checkpointing), job, degrees, name)

    return replace(make(replace(degrees, fsdp=job.gpus // degrees.gpus), None), remade=make)


def _workload(counted: CountedModel, job: Job, degrees: Degrees, name: str) -> Workload:
    tokens, each = job.seq_len, _PRECISION[job.dtype]
    if degrees.shards == 1 and job.dtype == "bfloat16":  # products use the weights themselves
        each = replace(each, gathered=0.0)
    counted.require_shares(degrees, tokens)
    layers = counted.work(tokens, degrees, _BF16, each.summed, job.compiled)
    message = _BF16 * tokens * counted.dim / degrees.sharing
    # For MFU the attention counts as if it saw the whole sequence, as TorchTitan counts it.
    operations = 3 * sum(layer.f + layer.attention[0] for layer in layers) / tokens
    size, words = (job.batch or 4 * degrees.pipeline, tokens, message, operations), counted.words(degrees)
    known = Workload(name, layers, degrees, *size, words, job.schedule, counted.checkpointing, job.compiled)
    names = (("pipeline", "--pp {}"), ("tensor", "--tp {}"), ("context", "--cp {}"), ("experts", "--ep {}"))
    options = Spelling('schedule="{}"', 'memory_limit="{}"', "--gradient-checkpointing {}", "--batch {2}", names)
    return replace(known, deferred=counted.deferred, parameter_bytes=each, batch_option="--batch", options=options)


_BF16 = 2


def _load(library: Any, path: Path) -> Any:
    """The config in a file, which has all sizes of the model."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind is None:
        raise ValueError(f"{path} has no field model_type, which names the model in transformers: add it")
    if kind not in library.CONFIG_MAPPING:
        raise ValueError(f"{path}: transformers {library.__version__} has no model_type {kind!r}: try a newer one")
    made = library.CONFIG_MAPPING[kind]
    usual, aliases = made(), getattr(made, "attribute_map", {})
    for name in _NEEDED:
        alias = aliases.get(name, name)
        if hasattr(usual, alias) and not {name, alias} & fields.keys():
            raise ValueError(f"{path} has no field {alias}, which a {kind} needs: add it")
    try:
        return made.from_dict(fields)
    except Exception as error:  # it has classes of its own
        raise ValueError(f"{path}: transformers refuses it: {error}") from None


def _require_causal(library: Any, config: Any, name: str) -> None:
    """Refuse a model without a causal head."""
    if not isinstance(config, library.PreTrainedConfig):
        raise TypeError(f"a config is the path of a config.json, or a config of transformers, got {config!r}")
    heads = library.MODEL_FOR_CAUSAL_LM_MAPPING
    causal = heads[type(config)].__name__ if type(config) in heads else None
    asked = (config.architectures or [causal or config.model_type])[0]
    if asked != causal:
        way = "give the text_config of it in a file" if hasattr(config, "text_config") else "use a file of --layers"
        raise ValueError(f"{name}: {asked} has no causal head of transformers: {way}")


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        words = "transformers is not installed, which reads a config.json: pip install transformers"
        raise ImportError(words) from None


def _count(library: Any, config: Any, length: int, how: Checkpointing) -> CountedModel:
    with torch.device("meta"):
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    refuse_by_config(model)
    name, container = find_blocks(model)
    blocks = dict(container.named_children())
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no blocks: give a number of hidden layers above 0")
    calls, before = _run(model, blocks, length)
    outside = {each: part for each, part in model.named_modules() if not f"{each}.".startswith(f"{name}.")}
    ends = [[part for each, part in outside.items() if (each in before) is side] for side in (True, False)]
    # A tied weight counts at each end.
    parameters = [sum(each.numel() for part in parts for each in part.parameters(recurse=False)) for parts in ends]
    products = [sum(layer_work.products(part, recurse=False) for part in parts) for parts in ends]
    heads = getattr(config, "num_attention_heads", 0)
    keys = getattr(config, "num_key_value_heads", None) or heads
    share = keys / max(heads, 1)
    shapes = {each: layer_work.shape_of(block)._replace(heads_share=share) for each, block in blocks.items()}
    checkpointed = {each: _Checkpointed(block, how) for each, block in blocks.items()}
    # Attention is two products over half of the sequence on average.
    attention = float(length * config.hidden_size)
    before_blocks = layer_work.by_products(products[0], length, Checkpointing.NONE)
    return CountedModel(
        embedding=layer_work.CountedLayer(("embedding",), before_blocks, parameters[0]),
        blocks=layer_work.count_blocks(checkpointed, calls.get, shapes, length, how, attention),
        head=layer_work.count_head(("head",), products[1], parameters[1], length),
        dim=config.hidden_size,
        key_heads=keys,
        checkpointing=how,
        style={"fused_qkv": False},
    )


class _Certain(TorchFunctionMode):
    """Conditions on values of meta tensors hold, because transformers checks whether masks are needed; they are not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def _run(model: nn.Module, blocks: Mapping[str, nn.Module], length: int) -> tuple[dict[str, layer_work.Call], set[str]]:
    """Arguments of each block for a sequence, and names of the modules that run before the first one. Blocks after one
    that reads values stay unknown."""
    places = {block: each for each, block in blocks.items()}
    calls: dict[str, layer_work.Call] = {}
    before: set[str] = set()

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in places:
            hidden = first_argument(args, kwargs).detach().requires_grad_()
            calls[places[module]] = (hidden, *args[1:]), kwargs if args else dict([*kwargs.items()][1:])
        elif not calls:
            before.add(name)

    handles = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    with suppress(*layer_work.ON_META), _Certain(), torch.no_grad():
        model.train()(input_ids=torch.empty(1, length, dtype=torch.long, device="meta"), use_cache=False)
    for handle in handles:
        handle.remove()
    return calls, before


class _Checkpointed(nn.Module):
    """A block as the job checkpoints it."""

    def __init__(self, block: nn.Module, how: Checkpointing) -> None:
        super().__init__()
        self.block, self.how = block, how

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.how is Checkpointing.NONE:
            return self.block(*args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        if self.how is Checkpointing.SELECTIVE:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _every_second_product())
        return checkpoint(self.block, *args, **options, **kwargs)


def _every_second_product() -> Callable[..., CheckpointPolicy]:
    """TorchTitan's choice: keep every second product and the attention's result, and recompute the rest."""
    seen = {False: 0, True: 0}

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        seen[context.is_recompute] += is_product
        kept = seen[context.is_recompute] % 2 if is_product else "attention" in str(operation)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose
