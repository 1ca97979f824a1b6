"""The private names of TorchTitan 0.3 that zbpipe uses, all in this one file. Written for torchtitan 0.3.0."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
import torchtitan.train
import torchtitan.trainer
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.nn.attention import SDPBackend
from torchtitan.components import metrics
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager, ParallelismConfig
from torchtitan.distributed import ParallelDims, pipeline_parallel
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.trainer import Trainer

from zbpipe.registry import Algorithm
from zbpipe.runtime import _torch
from zbpipe.runtime.optimizer.step import OptimizerStep
from zbpipe.runtime.options import Options
from zbpipe.runtime.split.products import GROUPED_MM
from zbpipe.runtime.substitution import replaced
from zbpipe.titan import cpu, cut, plug
from zbpipe.titan.check import check
from zbpipe.titan.command_line import asks_for_help
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
        _validate_steps()
    # The grouped experts of TorchTitan's MoE models defer their weight gradients.
    GroupedExperts.weight_products = {_torch.grouped_mm: GROUPED_MM}
    torchtitan.train.ConfigManager = PluggedConfigManager


logger = logging.getLogger(__name__)


class _Steps:
    """The optimizer steps of a `Trainer`: it clips, steps and sets gradients to None by this object."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = ref(trainer)
        self._clip_as: Callable[[], Tensor] = _nothing  # type: ignore[assignment]
        self.step = OptimizerStep(
            trainer.pp_schedule,
            list(trainer.optimizers.optimizers),
            max_norm=trainer.config.training.max_norm,
            lr_schedulers=trainer.lr_schedulers,
            clip=self._clip_now,
            step=self._step_containers,
        )

    def train_step(self, run: Callable[[], None]) -> None:
        """Run TorchTitan's own step, which calls one after the other what this does at once."""
        trainer, clip, norms = self._trainer(), dist_utils.clip_grad_norm_, []
        assert trainer is not None

        def clip_and_step(*args: Any, **kwargs: Any) -> Tensor:
            self._clip_as = lambda: clip(*args, **kwargs)
            with replaced(dist_utils, clip_grad_norm_=clip):
                norms.append(self.step(now=trainer.metrics_processor.should_log(trainer.step)))
            return torch.tensor(norms[-1] or 0.0)

        with (
            replaced(dist_utils, clip_grad_norm_=clip_and_step),
            replaced(trainer.optimizers, step=_nothing, zero_grad=_nothing),
            replaced(trainer.lr_schedulers, step=_nothing),
        ):
            run()

    def _clip_now(self) -> Tensor:
        return self._clip_as()

    def _step_containers(self) -> None:
        trainer = self._trainer()
        assert trainer is not None
        trainer.checkpointer.maybe_wait_for_staging()
        type(trainer.optimizers).step(trainer.optimizers)
        type(trainer.lr_schedulers).step(trainer.lr_schedulers)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _validate_steps() -> None:
    """Make TorchTitan's trainer step when a rank is done, and validate the norm of the gradients later."""
    train, train_step = Trainer.train, Trainer.train_step

    def with_steps(self: Any) -> None:
        steps = _Steps(self)
        save, validate = self.checkpointer.save, self.validator.validate if self.config.validator.enable else None

        def finished(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            steps.step.finish()
            return call(*args, **kwargs)

        def save_finished(step: int, last_step: bool = False) -> bool:
            # Others save in places of their own.
            is_due = getattr(self.checkpointer, "_should_save", lambda *args: True)
            if self.checkpointer.enable and is_due(step, last_step):
                steps.step.finish()
            return bool(save(step, last_step))

        with replaced(self.checkpointer, save=save_finished), replaced(self, _zbpipe_steps=steps):
            if validate is None:
                train(self)
            else:
                with replaced(self.validator, validate=partial(finished, validate)):
                    train(self)
        steps.step.finish()
        logger.info("Optimizer steps: %s", ", ".join(f"{n} {way}" for way, n in asdict(steps.step.counts).items() if n))

    def in_steps(self: Any, data_iterator: Any) -> None:
        self._zbpipe_steps.train_step(lambda: train_step(self, data_iterator))

    Trainer.train, Trainer.train_step = with_steps, in_steps


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
        return {"_build_pipeline_schedule": build} if options.for_torch.given() else {}
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
