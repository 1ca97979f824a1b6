"""The private names of TorchTitan 0.3 that zbpipe uses, all in this one file. Written for torchtitan 0.3.0."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torchtitan.train
import torchtitan.trainer
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.nn.attention import SDPBackend
from torchtitan.components import metrics
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, ParallelismConfig
from torchtitan.distributed import ParallelDims, pipeline_parallel
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools import utils as titan_utils
from torchtitan.trainer import Trainer

from zbpipe.registry import Algorithm
from zbpipe.runtime import _torch
from zbpipe.runtime.options import Options
from zbpipe.runtime.split.products import GROUPED_MM
from zbpipe.runtime.substitution import replaced
from zbpipe.titan import cpu, cut, plug, steps
from zbpipe.titan.check import check
from zbpipe.titan.command_line import asks_for_help
from zbpipe.titan.part import Part
from zbpipe.transformer import Checkpointing


def plug_in(options: Options, on_cpu: bool) -> None:
    """Make zbpipe's schedules known to TorchTitan in this process, and make it run on the CPU if `on_cpu`."""

    class PluggedConfigManager(ConfigManager):  # type: ignore[misc]
        def _load_config(self, args: list[str]) -> tuple[Any, list[str]]:
            if asks_for_help(args) and not {"--module", "--config"} <= {each.partition("=")[0] for each in args}:
                print("TorchTitan's own options depend on the model: add --module and --config to see them.")
                raise SystemExit(0)
            config, rest = super()._load_config(args)
            if on_cpu:
                adapt_to_cpu(config)
            return config, rest

        def parse_args(self, args: list[str] | None = None) -> Any:
            config = super().parse_args(sys.argv[1:] if args is None else args)
            check(config, options)
            spec = config.model_spec
            if spec is not None and spec.pipelining_fn is not None:
                config.model_spec = replace(spec, pipelining_fn=pipeline_with(spec.pipelining_fn, options))
            return config

    _report_loss_where_it_is()
    if options.optimizer_step == "validated":
        steps.validate_steps(Trainer, dist_utils, lambda trainer: trainer.config.training.max_norm)
    # The grouped experts of TorchTitan's MoE models defer their weight gradients.
    GroupedExperts.weight_products = {_torch.grouped_mm: GROUPED_MM}
    torchtitan.train.ConfigManager = PluggedConfigManager


def train() -> None:
    """Run TorchTitan's `train.py` with the rest of the command line."""
    torchtitan.train.main()


def pipeline_with(pipelining_fn: plug.PipeliningFunction, options: Options) -> plug.PipeliningFunction:
    """A model's `pipelining_fn` that also takes zbpipe's schedules; with torch's names it is the model's own.

    It raises `PipelineError` on all ranks if their schedules differ.
    """

    def pipeline(model: Any, *, parallelism: ParallelismConfig, **kwargs: Any) -> Any:
        algorithm = plug.known(parallelism.pipeline_parallel_schedule)
        how = checkpointing_of(kwargs.get("ac_config"))
        helpers = {} if algorithm is None else _helpers(algorithm, options, how)
        if algorithm is not None and algorithm.source == "zbpipe":
            whole = cut.Model(model, kwargs["model_config"], kwargs["training"].seq_len)
            placement = algorithm.place(parallelism.pipeline_parallel_degree)
            helpers["_generate_llm_fqn_per_model_part"] = cut.cutting(
                pipeline_parallel._generate_llm_fqn_per_model_part, placement, parallelism, whole, how
            )
        with replaced(pipeline_parallel, **helpers):
            built = pipelining_fn(model, parallelism=parallelism, **kwargs)
        name = parallelism.pipeline_parallel_schedule
        plug.complete(built[0], name, options, kwargs["device"], MetricsProcessor, rank_with_loss, asks_ahead=True)
        return built

    return pipeline


def checkpointing_of(config: Any) -> Checkpointing:
    """What a job's config says. A budget, or a policy of the user's own, keeps some activations and not others."""
    if config is None:
        return Checkpointing.NONE
    return Checkpointing.FULL if isinstance(config, FullAC.Config) else Checkpointing.SELECTIVE


def _helpers(algorithm: Algorithm, options: Options, checkpointing: Checkpointing) -> dict[str, Callable[..., Any]]:
    """Functions that replace TorchTitan's, to cut the model, place the stages and build the schedule.

    For torch's schedules TorchTitan does so itself, except that it does not pass on options.
    """

    def metadata(
        parallel_dims: ParallelDims, parallelism: ParallelismConfig, model_config: Any
    ) -> tuple[int, int, int, int]:
        num_layers = len(model_config.layers)
        first = parallelism.pipeline_parallel_first_stage_less_layers
        last = parallelism.pipeline_parallel_last_stage_less_layers
        return plug.num_stages(algorithm, parallelism, num_layers), num_layers, first, last

    def stages_on(pp_rank: int, pp_degree: int, pp_schedule: str, num_stages: int) -> tuple[int, ...]:
        return plug.stages_on(algorithm, pp_rank, pp_degree, num_stages)

    def build(
        *,
        parallelism: ParallelismConfig,
        local_batch_size: int,
        stages: list[PipelineStage],
        loss_fn: Callable[..., tuple[Tensor, Any]],
        backward_requires_autograd: bool = True,
    ) -> _torch.PipelineSchedule:
        n_microbatches = local_batch_size // parallelism.pipeline_parallel_microbatch_size
        return plug.build(
            algorithm,
            stages,
            n_microbatches,
            lambda *args, **kwargs: loss_fn(*args, **kwargs)[0],
            options,
            checkpointing,
            backward_requires_autograd=backward_requires_autograd,
        )

    if algorithm.source == "torch":
        return {"_build_pipeline_schedule": build} if options.for_torch() else {}
    return {
        "_get_pipeline_metadata": metadata,
        "_get_pp_rank_to_stage_indices_mapping": stages_on,
        "_build_pipeline_schedule": build,
    }


def _report_loss_where_it_is() -> None:
    """Make TorchTitan report loss and metrics from the rank with the last stage, wherever that is."""
    get_rank, ensure_visible = metrics._get_metrics_rank, metrics.ensure_pp_loss_visible

    def get_metrics_rank(*, parallel_dims: ParallelDims, pp_schedule: str) -> int:
        algorithm = plug.known(pp_schedule)
        if algorithm is None or not parallel_dims.pp_enabled:
            return int(get_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule))
        return plug.first_rank_of_last_stage(algorithm, parallel_dims)

    def ensure_pp_loss_visible(*, parallel_dims: ParallelDims, pp_schedule: str, color: Any) -> None:
        if get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule) > 0:
            ensure_visible(parallel_dims=parallel_dims, pp_schedule=pp_schedule, color=color)

    metrics._get_metrics_rank = get_metrics_rank
    torchtitan.trainer.ensure_pp_loss_visible = ensure_pp_loss_visible


def rank_with_loss(parallel_dims: ParallelDims, pp_schedule: str) -> int:
    """The rank that reports loss and metrics."""
    return int(metrics._get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule))


def adapt_to_cpu(config: Any) -> None:
    """Change a TorchTitan `Trainer.Config` to what the CPU can run, in place."""
    config.training.disable_cuda_graphs = True
    if config.model_spec is not None:
        _use_causal_attention(config.model_spec)
        config.model_spec = replace(config.model_spec, parallelize_fn=cpu.summing(config.model_spec.parallelize_fn))


def _use_causal_attention(model_spec: Any) -> None:
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    for masked in (FlexAttention.Config, VarlenAttention.Config):
        for _, _, owner, attribute in list(model_spec.traverse(masked)):
            if isinstance(owner, list):
                owner[attribute] = ScaledDotProductAttention.Config()
            else:
                setattr(owner, attribute, ScaledDotProductAttention.Config())


_NO_CUDA_GRAPHS = "--training.disable_cuda_graphs"


def parsed(arguments: list[str]) -> Any:
    """A `Trainer.Config` from TorchTitan's command line, for what trains nothing.

    Raises:
        ValueError: TorchTitan refuses the arguments; what its parser prints goes to standard error.
    """
    if not any(each.startswith(_NO_CUDA_GRAPHS) for each in arguments):
        arguments = [_NO_CUDA_GRAPHS, *arguments]  # which it refuses in a pipeline, and which make no difference here
    try:
        return ConfigManager().parse_args(arguments)
    except SystemExit:
        raise ValueError(f"TorchTitan refuses the arguments {' '.join(arguments)}: it says why above") from None


def built_on_meta(config: Any) -> Any:
    """The whole model of a `Trainer.Config`, as its `Trainer` would build it, without any weight."""
    model_config = config.model_spec.model
    _use_causal_attention(config.model_spec)
    model_config.update_from_config(config=config)
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.mixed_precision_param]):
        return model_config.build()


def part(config: Any, names: list[str], device: torch.device) -> Part:
    """One stage of a job, with these modules of the model, built as its `Trainer` builds it for one GPU."""
    parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=1,
        tensor_parallel_degree=1,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=1,
        fsdp_reshard_after_forward="never",  # as in a pipeline
    )
    dims, training = ParallelDims.from_config(parallelism, 1), config.training
    dims.build_mesh()
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = config.model_spec.model.build()
    _prune(model, names)
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss = config.loss.build(compile_config=config.compile)
    if isinstance(loss, ChunkedLossWrapper) and model.lm_head is not None:
        loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    sizes = (parallelism.pipeline_parallel_microbatch_size, training.seq_len)
    tokens = torch.tensor(float(sizes[0] * sizes[1]), device=device)
    return Part(
        model,
        device,
        sizes,
        config.model_spec.model.vocab_size,
        (config.model_spec.model.dim, TORCH_DTYPE_MAP[training.mixed_precision_param]),
        _keywords(model, sizes, device),
        lambda output, target: loss(output, target, tokens)[0],
    )


def _prune(model: Any, names: list[str]) -> None:
    """Leave these modules alone, as TorchTitan cuts its models."""
    for name, child in list(model.named_children()):
        if isinstance(child, torch.nn.ModuleDict):
            for block in [each for each in child if f"{name}.{each}" not in names]:
                del child[block]
        elif name not in names:
            setattr(model, name, None)


def _keywords(model: Any, sizes: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Positions, and a mask where the attention takes one."""
    positions = torch.arange(sizes[1], device=device).expand(sizes)
    try:
        masks = model.get_attention_masks(positions)
    except TypeError:
        masks = None
    return {"positions": positions, "attention_masks": masks}
