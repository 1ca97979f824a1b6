"""The private names of TorchTitan 0.2 that zbpipe uses, all in this one file. Written for torchtitan 0.2.2."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.attention import SDPBackend
from torchtitan.components import metrics
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims, pipeline_parallel
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols import train_spec
from torchtitan.protocols.train_spec import BaseModelArgs, TrainSpec

from zbpipe.registry import Algorithm
from zbpipe.runtime import _torch
from zbpipe.runtime.options import Options
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.split.products import GROUPED_MM
from zbpipe.runtime.substitution import replaced
from zbpipe.titan import cpu, cut, plug, steps
from zbpipe.titan.check import check
from zbpipe.transformer import Checkpointing

logger = logging.getLogger(__name__)


def plug_in(options: Options, on_cpu: bool) -> None:
    """Make zbpipe's schedules known to TorchTitan in this process, and make it run on the CPU if `on_cpu`."""
    get_train_spec = train_spec.get_train_spec

    class PluggedConfigManager(ConfigManager):  # type: ignore[misc]
        def parse_args(self, args: list[str] | None = None) -> Any:
            # TorchTitan's own default is the command line as it was when TorchTitan was imported.
            config = super().parse_args(sys.argv[1:] if args is None else args)
            if on_cpu:
                # torch's DualPipeV would overlap by streams of a GPU, also without expert parallelism.
                config.parallelism.pipeline_parallel_expert_parallel_overlap = False
            check(config, options)  # now, before the ranks meet
            return config

    def get_plugged_train_spec(name: str) -> TrainSpec:
        spec = get_train_spec(name)
        if on_cpu:
            spec = _adapted_to_cpu(spec)
        if spec.pipelining_fn is None:
            return spec
        return replace(spec, pipelining_fn=pipeline_with(spec.pipelining_fn, options))

    _report_loss_where_it_is()
    if options.optimizer_step == "validated":
        steps.validate_steps(torchtitan.train.Trainer, dist_utils, lambda trainer: trainer.job_config.training.max_norm)
    # The grouped experts of TorchTitan's MoE models defer their weight gradients.
    GroupedExperts.weight_products = {_torch.grouped_mm: GROUPED_MM}
    train_spec.get_train_spec = get_plugged_train_spec
    torchtitan.train.ConfigManager = PluggedConfigManager


def train() -> None:
    """Run TorchTitan's `train.py` with the rest of the command line."""
    torchtitan.train.main(torchtitan.train.Trainer)


def pipeline_with(pipelining_fn: plug.PipeliningFunction, options: Options) -> plug.PipeliningFunction:
    """A model's `pipelining_fn` that also takes zbpipe's schedules; with torch's names it is the model's own.

    It raises `ValueError` for settings that cannot run, and `PipelineError` on all ranks if their schedules differ.
    """

    def pipeline(
        model: nn.Module,
        parallel_dims: ParallelDims,
        job_config: JobConfig,
        device: torch.device,
        model_args: BaseModelArgs,
        *more: Any,
    ) -> Any:
        # In a trainer that another program has started nobody has called this yet.
        check(job_config, options)
        name = job_config.parallelism.pipeline_parallel_schedule
        algorithm = plug.known(name)
        config = job_config
        if algorithm is not None and algorithm.source == "zbpipe":
            whole = cut.Model(model, model_args, job_config.training.seq_len)
            modules = _modules_of_stages(algorithm, job_config, whole)
            _require_modules(model, modules)
            config = _cut_by_hand(job_config, modules)
        with replaced(pipeline_parallel, **({} if algorithm is None else _helpers(algorithm, options))):
            built = pipelining_fn(model, parallel_dims, config, device, model_args, *more)
        if config is not job_config and not isinstance(built[0], RegisteredSchedule):
            raise ValueError(
                f"{name} cannot run this model, which {pipelining_fn.__module__}.{pipelining_fn.__qualname__} cuts into"
                " stages, and not TorchTitan's own pipeline_llm: use one of torch's schedules"
            )
        plug.complete(built[0], name, options, device, MetricsProcessor, rank_with_loss, asks_ahead=False)
        return built

    return pipeline


def _modules_of_stages(algorithm: Algorithm, job_config: JobConfig, model: cut.Model) -> list[list[str]]:
    """The names of the modules in each stage: the user's own, or cut by work."""
    parallelism = job_config.parallelism
    number = plug.num_stages(algorithm, parallelism, model.config.n_layers)
    by_hand: list[list[str]] | None = parallelism.module_fqns_per_model_part
    if by_hand is not None:
        return by_hand
    titans: cut.Cut = pipeline_parallel.generate_llm_fqn_per_model_part
    placement = algorithm.place(parallelism.pipeline_parallel_degree)
    generate = cut.cutting(titans, placement, parallelism, model, _checkpointing_of(job_config))
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    return generate(number, model.config.n_layers, first, last)


def _checkpointing_of(job_config: JobConfig) -> Checkpointing:
    """What a job's config says. A budget of the compiler's keeps some activations and recomputes others."""
    mode = job_config.activation_checkpoint.mode
    return Checkpointing(mode) if mode in list(Checkpointing) else Checkpointing.SELECTIVE


def _require_modules(model: nn.Module, modules: Sequence[Sequence[str]]) -> None:
    """Refuse a list that leaves out a module: TorchTitan would train without it."""
    named = {name for part in modules for name in part}
    unknown = named - {name for name, _ in model.named_modules()}
    left = {name for name, module in model.named_children() if not _is_named(name, module, named)}
    if unknown or left:
        raise ValueError(
            f"module_fqns_per_model_part names {sorted(unknown)}, which the model does not have, and leaves out"
            f" {sorted(left)}: torchtitan 0.2 calls the head 'output'"
        )


def _is_named(name: str, module: nn.Module, named: set[str]) -> bool:
    if isinstance(module, (nn.ModuleDict, nn.ModuleList)):
        return all(f"{name}.{key}" in named for key, _ in module.named_children())
    return name in named


def _cut_by_hand(job_config: JobConfig, modules: Sequence[Sequence[str]]) -> JobConfig:
    """A copy in which the stages are listed, so that TorchTitan does not ask torch how many this schedule has."""
    config = copy(job_config)
    config.parallelism = copy(job_config.parallelism)
    config.parallelism.module_fqns_per_model_part = modules
    config.parallelism.pipeline_parallel_layers_per_stage = None
    config.parallelism.pipeline_parallel_schedule = _ANY_ONE_STAGE_SCHEDULE
    return config


_ANY_ONE_STAGE_SCHEDULE = "1F1B"


def _helpers(algorithm: Algorithm, options: Options) -> Mapping[str, Callable[..., Any]]:
    """Functions that replace TorchTitan's, to place the stages and build the schedule as the registry says.

    For torch's schedules TorchTitan does so itself, except that it does not pass on options.
    """
    titans_split = pipeline_parallel.pipeline_module_split

    def split(
        whole_model: nn.Module,
        pp_mesh: DeviceMesh,
        pp_schedule: str,
        device: torch.device,
        module_names_per_stage: list[list[str]],
    ) -> tuple[list[PipelineStage], list[nn.Module]]:
        rank, num_stages = pp_mesh.get_local_rank(), len(module_names_per_stage)
        stages, parts = [], []
        for index in plug.stages_on(algorithm, rank, pp_mesh.size(), num_stages):
            logger.info(
                "PP rank %d is building stage_idx %d with modules %s", rank, index, module_names_per_stage[index]
            )
            mesh = _ARankAStage(pp_mesh, index, num_stages)
            with replaced(pipeline_parallel, logger=_SILENT):
                (stage,), (part,) = titans_split(whole_model, mesh, pp_schedule, device, module_names_per_stage)
            stages.append(stage)
            parts.append(part)
        return stages, parts

    def build(
        job_config: JobConfig, stages: list[PipelineStage], loss_fn: Callable[..., Tensor]
    ) -> _torch.PipelineSchedule:
        parallelism = job_config.parallelism
        n_microbatches = job_config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        how = _checkpointing_of(job_config)
        built = plug.build(algorithm, stages, n_microbatches, loss_fn, options, how)
        overlaps = parallelism.pipeline_parallel_expert_parallel_overlap
        if overlaps and isinstance(built, pipeline_parallel.ScheduleDualPipeV):
            built.register_custom_function(pipeline_parallel.OVERLAP_F_B, pipeline_parallel.overlap_callback)
        return built

    if algorithm.source == "torch":
        return {"build_pipeline_schedule": build} if options.for_torch() else {}
    return {"pipeline_module_split": split, "build_pipeline_schedule": build}


class _ARankAStage:
    """Stands in for the mesh of the pipeline, as if each stage had a rank of its own and this were that of `stage`.

    So TorchTitan builds this stage and no other, whatever the rank.
    """

    def __init__(self, mesh: DeviceMesh, stage: int, num_stages: int) -> None:
        self._mesh = mesh
        self._stage = stage
        self._num_stages = num_stages

    def get_local_rank(self) -> int:
        return self._stage

    def size(self) -> int:
        return self._num_stages

    def get_group(self, *which: Any) -> torch.distributed.ProcessGroup:
        return self._mesh.get_group(*which)


_SILENT = logging.Logger("silent", logging.CRITICAL)
"""Replaces TorchTitan's logger while it takes a stage for a rank, and would log the wrong rank."""


def _report_loss_where_it_is() -> None:
    """Make TorchTitan report loss and metrics from the rank with the last stage, wherever that is."""
    get_rank, ensure_visible = metrics._get_metrics_rank, metrics.ensure_pp_loss_visible

    def get_metrics_rank(parallel_dims: ParallelDims, job_config: JobConfig) -> int:
        algorithm = plug.known(job_config.parallelism.pipeline_parallel_schedule)
        if algorithm is None or not parallel_dims.pp_enabled:
            return int(get_rank(parallel_dims, job_config))
        return plug.first_rank_of_last_stage(algorithm, parallel_dims)

    def ensure_pp_loss_visible(parallel_dims: ParallelDims, job_config: JobConfig, color: Any) -> None:
        if get_metrics_rank(parallel_dims, job_config) > 0:
            ensure_visible(parallel_dims, job_config, color)

    metrics._get_metrics_rank = get_metrics_rank
    torchtitan.train.ensure_pp_loss_visible = ensure_pp_loss_visible


def rank_with_loss(parallel_dims: ParallelDims, pp_schedule: str) -> int:
    """The rank that reports loss and metrics."""
    parallelism = SimpleNamespace(pipeline_parallel_schedule=pp_schedule)
    return int(metrics._get_metrics_rank(parallel_dims, SimpleNamespace(parallelism=parallelism)))


def _adapted_to_cpu(spec: TrainSpec) -> TrainSpec:
    """The model, changed to what the CPU can run."""
    ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    torch.histc = _histogram
    model_args = {flavor: _with_causal_attention(args) for flavor, args in spec.model_args.items()}
    return replace(spec, model_args=model_args, parallelize_fn=cpu.summing(spec.parallelize_fn))


def _histogram(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.histc`, with which experts count their tokens; on the CPU torch has it for floating point only."""
    return _titans_histogram(input.float(), *args, **kwargs).to(input.dtype)


_titans_histogram = torch.histc


def _with_causal_attention(args: BaseModelArgs) -> BaseModelArgs:
    if getattr(args, "attn_type", "sdpa") == "sdpa":
        return args
    changed = copy(args)
    changed.attn_type, changed.attn_mask_type = "sdpa", "causal"
    return changed
