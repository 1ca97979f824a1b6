"""Models of TorchTitan's command lines, for tools that do not train, and their workload for `zbpipe.estimate`.

Its operations and bytes are counted on meta tensors.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.distributed import activation_checkpoint
from torchtitan.tools import utils as titan_utils

from zbpipe.costs.transformer import Checkpointing
from zbpipe.estimation.workload import ASYNC_TENSOR, Degrees, ParameterBytes, Workload
from zbpipe.frameworks import layer_work
from zbpipe.frameworks.layer_work import (
    CountedLayer,
    CountedModel,
    by_products,
    count_blocks,
    count_head,
    count_parameters,
)
from zbpipe.frameworks.titan import batches, cpu, layer_split, versions
from zbpipe.frameworks.titan.batches import checkpointing_of
from zbpipe.frameworks.titan.layer_split import Model

HAS_JOB_CONFIG = versions.has_job_config()
_NO_CUDA_GRAPHS = "--training.disable_cuda_graphs"
_SIZES = {"bfloat16": 2, "float32": 4}
"""Bytes per number."""

STYLE_OF_BLOCKS = {"fused_qkv": not HAS_JOB_CONFIG, "keeps_scattered": HAS_JOB_CONFIG}
"""Differences of a Llama block between versions; see `zbpipe.costs.transformer.Block`."""
HEAD = ("norm", "output" if HAS_JOB_CONFIG else "lm_head")
PARTS = ("tok_embeddings", "layers", *HEAD)
"""A decoder."""


def parse_config(arguments: list[str], *, allow_float8: bool = False) -> Any:
    """TorchTitan's config from its command line. Its parser's output goes to standard error. `allow_float8`: also
    without a device that has float8, for which TorchTitan 0.3 asks."""
    if allow_float8 and not HAS_JOB_CONFIG:
        float8: Any = importlib.import_module("torchtitan.components.quantization.float8")
        float8.has_cuda_capability = lambda *capability: True
    if not HAS_JOB_CONFIG and not any(each.startswith(_NO_CUDA_GRAPHS) for each in arguments):
        arguments = [_NO_CUDA_GRAPHS, *arguments]  # no pipeline has CUDA graphs, and estimates do not depend on them
    try:
        return ConfigManager().parse_args(arguments)
    except SystemExit:
        raise ValueError(f"TorchTitan refuses the arguments {' '.join(arguments)}: see its message above") from None
    except ValueError as error:
        unknown = re.match(r"Config function '(.*)' not found in ([\w.]+)\.", str(error))
        if unknown is None:
            raise
        name, module = unknown.groups()
        configs = ", ".join(_list_configs(module))
        raise ValueError(f"--config: {module} has no config {name!r}; it has {configs}") from None


def _list_configs(module: str) -> Iterator[str]:
    """The names of a module's configs: its public functions without parameters."""
    for name, each in vars(sys.modules[module]).items():
        is_own = inspect.isfunction(each) and each.__module__ == module and name[0] != "_"
        if is_own and not inspect.signature(each).parameters:
            yield name


class Sizes(NamedTuple):
    computed: int
    """Bytes per number of an activation."""
    parameters: ParameterBytes


def sizes(config: Any, fsdp: int) -> Sizes:
    """Sizes of a job's numbers, with each parameter sharded over `fsdp` GPUs. A pipeline keeps its stages gathered for
    the whole step (`fsdp_reshard_after_forward` "default"). FSDP2 accumulates gradients in the dtype in which it
    reduces them. TorchTitan 0.2 uses FSDP only if `fsdp` is above 1."""
    training = config.training
    stored = _SIZES[training.dtype]
    if fsdp > 1 or not HAS_JOB_CONFIG:
        computed = _SIZES[training.mixed_precision_param]
        return Sizes(computed, ParameterBytes(computed, _SIZES[training.mixed_precision_reduce], stored))
    if training.dtype != training.mixed_precision_param:
        raise ValueError(
            "TorchTitan 0.2 has mixed precision only with FSDP, and these degrees leave no GPUs for FSDP, so all"
            f" numbers would be in {training.dtype}: use twice as many GPUs, or --training.dtype"
            f" {training.mixed_precision_param}"
        )
    return Sizes(stored, ParameterBytes(0, 0, stored))


def build_on_meta(config: Any) -> Model:
    """The whole model of a job, built on the meta device as by its `Trainer`."""
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    if not HAS_JOB_CONFIG:
        model_config = config.model_spec.model
        cpu.use_causal_attention(config.model_spec, batches.length(config.training))
        with _refusals():
            model_config.update_from_config(config=config)
        with torch.device("meta"), titan_utils.set_default_dtype(dtype), _sharing_rotations():
            return Model(model_config.build(), model_config, batches.length(config.training))
    from torchtitan.protocols.train_spec import get_train_spec

    if config.experimental.custom_import:
        importlib.import_module(config.experimental.custom_import)  # it may register the model
    spec = get_train_spec(config.model.name)
    model_args = cpu.ask_for_causal_attention(copy(spec.model_args[config.model.flavor]))
    with _refusals():
        model_args.update_from_config(config)
    with torch.device("meta"), titan_utils.set_default_dtype(dtype):
        return Model(spec.model_cls(model_args), model_args, batches.length(config.training))


@contextmanager
def _sharing_rotations() -> Iterator[None]:
    """Context in which blocks share a table of rotations. To make one for each block is most of a model's time."""
    name, made, makers = "_precompute_cache", dict[str, Any](), dict[Any, Any]()
    with suppress(ImportError, AttributeError):  # another version has other tables
        rope: Any = importlib.import_module("torchtitan.models.common.rope")
        makers = {kind: vars(kind)[name] for kind in rope.RoPE.__subclasses__() if name in vars(kind)}

    def sharing(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def share(module: Any) -> Any:
            key = repr(module.config)
            if key not in made:
                made[key] = make(module)
            return made[key]

        return share

    try:
        for kind, make in makers.items():
            setattr(kind, name, sharing(make))
        yield
    finally:
        for kind, make in makers.items():
            setattr(kind, name, make)


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert TorchTitan's errors about a job into ValueErrors."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"TorchTitan refuses this job: {error}") from error


def sends_once(config: Any, model: nn.Module) -> bool:
    """Whether expert parallelism sends a token once to each node. In 0.2 parallelism has the option."""
    backend = getattr(config.parallelism, "expert_parallel_comm_backend", "standard")
    found = {type(getattr(each, "token_dispatcher", None)).__name__ for each in model.modules()}
    return backend != "standard" or not found.isdisjoint(("DeepEPTokenDispatcher", "HybridEPTokenDispatcher"))


def require_decoder(model: nn.Module) -> None:
    """Raise ValueError for a model that is not a stack of blocks between an embedding and a head."""
    if missing := [name for name in PARTS if getattr(model, name, None) is None]:
        raise ValueError(
            f"{type(model).__name__} has no {', '.join(missing)}: only TorchTitan's decoders can be counted; describe"
            " other models in a file of --layers"
        )


def take_float8(config: Any, model: nn.Module) -> bool:
    """Whether the blocks' products are in float8. Replaces their layers by plain ones, which meta tensors can run. Both
    have the same number of operations."""
    if HAS_JOB_CONFIG:
        return any("float8" in each for each in config.model.converters)
    found = [each for each in model.get_submodule("layers").modules() if type(each).__name__.startswith("Float8")]
    for layer in found:
        if isinstance(layer, nn.Linear):
            layer.__class__ = nn.Linear
    return bool(found)


def key_heads(model_config: Any) -> int:
    """Number of key-value heads. 0 if the model does not show it."""
    attention = getattr(model_config, "first_attention", None) or model_config
    return getattr(attention, "n_kv_heads", None) or getattr(attention, "n_heads", None) or 0


def with_checkpointing(config: Any, how: Checkpointing) -> Any:
    """The config with another activation checkpointing, with that kind's defaults."""
    if HAS_JOB_CONFIG:
        return replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode=str(how)))
    if how is Checkpointing.NONE:
        return replace(config, activation_checkpoint=None)
    is_full = how is Checkpointing.FULL
    policy = activation_checkpoint.FullAC if is_full else activation_checkpoint.SelectiveAC
    return replace(config, activation_checkpoint=policy.Config())


def apply_checkpointing(config: Any, model: nn.Module) -> Checkpointing:
    """Wrap the model's blocks as the job does. ValueError if the compiler chooses the kept tensors."""
    policy = config.activation_checkpoint
    if HAS_JOB_CONFIG:
        if policy.mode not in list(Checkpointing):
            ways = ", ".join(Checkpointing)
            raise ValueError(f"activation_checkpoint is {policy.mode}: only {ways} can be calculated")
        if policy.mode != Checkpointing.NONE:
            activation_checkpoint.apply_ac(model, policy)
    elif policy is not None:
        policy.build(dump_folder="").apply(model)
    return checkpointing_of(policy)


def arguments_of_blocks(model: nn.Module) -> tuple[Any, ...]:
    return (model.freqs_cis, None, None) if HAS_JOB_CONFIG else (None,)


def workload_of(config: Any, degrees: Degrees, name: str) -> Workload:
    """The workload of TorchTitan's config on these degrees. `Workload.on` converts it to others."""
    count = _counter(config)
    own = count(config)

    @cache
    def counted(how: Checkpointing) -> _Counted:
        return own if how is own.checkpointing else count(with_checkpointing(config, how))

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
    stored, (option, size) = sizes(config, degrees.shards), batches.batch_option(config)
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
        counted.work(tokens, degrees, stored.computed, stored.parameters.summed, compiled),
        degrees,
        microbatches,
        tokens,
        message_bytes=stored.computed * tokens * counted.dim / degrees.sharing,
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
        parameter_bytes=replace(stored.parameters, accumulates=rounds > 1),
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
    first = [name for name in of_modules if name not in (*blocks, *HEAD)]
    for names in (first, *([name] for name in blocks), HEAD):
        yield tuple(map(sum, zip(*(of_modules[name] for name in names), strict=True)))


def _counter(config: Any) -> Callable[[Any], _Counted]:
    """Function that counts the embedding, each block, and norm with head, with the checkpointing of a config. Identical
    blocks are counted only once, and the model is built only once."""
    whole = build_on_meta(config)
    model, tokens = whole.module, prod(batches.shape(config))
    require_decoder(model)
    float8, layers = take_float8(config, model), model.get_submodule("layers")
    plain = dict(layers.named_children())
    before = layer_split.read_shapes(whole, max(len(plain), 1))._replace(is_float8=float8)
    per_token = float(whole.config.get_nparams_and_flops(model, whole.seq_len)[1])
    shapes = {name: before.of_modules[f"layers.{name}"] for name in plain}
    chunks, (norm, output) = batches.chunks_of_loss(config), map(model.get_submodule, HEAD)
    in_head = count_parameters(norm) + count_parameters(output)

    def call_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, dtype = (*batches.shape(config), whole.config.dim), next(plain[name].parameters()).dtype
        return (torch.empty(hidden, device="meta", dtype=dtype, requires_grad=True), *arguments_of_blocks(model)), {}

    def count(config: Any) -> _Counted:
        how = apply_checkpointing(config, model)
        blocks = dict(layers.named_children())
        for name, block in plain.items():
            layers.register_module(name, block)
        return _Counted(
            embedding=_first_layer(model, tokens),
            blocks=count_blocks(blocks, call_of, shapes, tokens, how, before.attention),
            head=count_head(HEAD, layer_work.products(output), in_head, tokens, chunks),
            chunks=chunks,
            dim=whole.config.dim,
            key_heads=key_heads(whole.config),
            checkpointing=how,
            style=STYLE_OF_BLOCKS,
            ties_weights=bool(getattr(whole.config, "enable_weight_tying", False)),
            float8=float8,
            sends_once=sends_once(config, model),
            operations=per_token,
            shapes=before,
        )

    return count


def _first_layer(model: nn.Module, tokens: int) -> CountedLayer:
    """The embedding, and encoders of images, which run on the first stage. Each token is one patch."""
    encoders = {name: each for name, each in model.named_children() if name not in PARTS and count_parameters(each)}
    modules = {"tok_embeddings": model.get_submodule("tok_embeddings"), **encoders}
    return CountedLayer(
        tuple(modules),
        by_products(sum(map(layer_work.products, modules.values())), tokens, Checkpointing.NONE),
        sum(map(count_parameters, modules.values())),
    )
