"""The private names of TorchTitan that zbpipe stands on, all in this one file. Written for torchtitan 0.3.0.

TorchTitan looks schedules up in a table inside torch, places stages by comparing classes, and knows which rank has the
loss by the string "ZBVZeroBubble". Here these three places learn to ask zbpipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch.distributed as dist
import torchtitan.trainer
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torchtitan.components import metrics
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims, pipeline_parallel
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger

from zbpipe.registry import Traits, lookup
from zbpipe.runtime import _torch, agreement, job
from zbpipe.runtime.build import require_splittable
from zbpipe.runtime.options import Options
from zbpipe.runtime.products import GROUPED_MM
from zbpipe.titan import monitor
from zbpipe.titan.check import NAMES_FOR_TITANS_CSV

PipeliningFunction = Callable[..., tuple[_torch.PipelineSchedule, list[Any], bool, bool]]


def pipeline_with(pipelining_fn: PipeliningFunction, options: Options) -> PipeliningFunction:
    """A model's `pipelining_fn` that also takes zbpipe's schedules; with torch's names it is the model's own.

    It raises a `PipelineError` on all ranks of the job if their schedules differ.
    """

    def pipeline(model: Any, *, parallelism: ParallelismConfig, **kwargs: Any) -> Any:
        traits = _known(parallelism.pipeline_parallel_schedule)
        helpers = {} if traits is None else _helpers(traits, options)
        with _in_place(helpers):
            built = pipelining_fn(model, parallelism=parallelism, **kwargs)
        if traits is None or traits.source == "torch":
            require_splittable(built[0], parallelism.pipeline_parallel_schedule)
        # Of all ranks, whatever they run: of one that has torch's 1F1B, one that has ZBV would wait for messages.
        agreement.require_same(built[0], parallelism.pipeline_parallel_schedule, None, kwargs["device"])
        job.attach(built[0], options)
        add_metrics(monitor.PipelineMetrics(built[0]), parallelism.pipeline_parallel_schedule)
        return built

    return pipeline


@contextmanager
def _in_place(helpers: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """While a model is cut into stages, these stand in the place of TorchTitan's helpers."""
    originals = {name: getattr(pipeline_parallel, name) for name in helpers}
    try:
        for name, helper in helpers.items():
            setattr(pipeline_parallel, name, helper)
        yield
    finally:
        for name, original in originals.items():
            setattr(pipeline_parallel, name, original)


def _helpers(traits: Traits, options: Options) -> dict[str, Callable[..., Any]]:
    """What cuts the model, places its stages and builds the schedule as the registry says.

    With torch's names TorchTitan does so itself, unless it would not pass on an option.
    """

    def metadata(
        parallel_dims: ParallelDims, parallelism: ParallelismConfig, model_config: Any
    ) -> tuple[int, int, int, int]:
        num_layers = len(model_config.layers)
        first = parallelism.pipeline_parallel_first_stage_less_layers
        last = parallelism.pipeline_parallel_last_stage_less_layers
        num_stages = traits.place(parallel_dims.pp).num_stages
        per_stage = parallelism.pipeline_parallel_layers_per_stage
        if per_stage is not None:
            # TorchTitan counts embedding and head as so many layers more.
            cut = math.ceil((num_layers + first + last) / per_stage)
            if cut != num_stages:
                raise ValueError(
                    f"pipeline_parallel_layers_per_stage={per_stage} cuts the model's {num_layers} layers into {cut}"
                    f" stages, but {traits.name} on {parallel_dims.pp} ranks has {num_stages}: leave the field out"
                )
        return num_stages, num_layers, first, last

    def stages_on(pp_rank: int, pp_degree: int, pp_schedule: str, num_stages: int) -> tuple[int, ...]:
        placement = traits.place(pp_degree)
        if num_stages != placement.num_stages:
            raise ValueError(
                f"{traits.name} on {pp_degree} ranks has {placement.num_stages} stages, but"
                f" module_fqns_per_model_part lists {num_stages}"
            )
        return placement.stages_on(pp_rank)

    def build(
        *,
        parallelism: ParallelismConfig,
        local_batch_size: int,
        stages: list[PipelineStage],
        loss_fn: Callable[..., tuple[Tensor, Any]],
        backward_requires_autograd: bool = True,
    ) -> _torch.PipelineSchedule:
        n_microbatches = local_batch_size // parallelism.pipeline_parallel_microbatch_size
        logger.info(f"Using {traits.source}'s pipeline schedule {traits.name} with {n_microbatches} microbatches")
        if n_microbatches < stages[0].num_stages:
            logger.warning(
                f"{n_microbatches} microbatches are less than the {stages[0].num_stages} stages, so the pipeline never"
                " fills: raise training.local_batch_size, or lower parallelism.pipeline_parallel_microbatch_size"
            )
        built = job.build(
            traits,
            stages,
            n_microbatches,
            lambda *args, **kwargs: loss_fn(*args, **kwargs)[0],
            options,
            scale_grads=False,
            backward_requires_autograd=backward_requires_autograd,
        )
        if getattr(built, "receives_late", False):
            logger.info("Messages are received late, shortly before they are needed")
        return built

    if traits.source == "torch":
        return {"_build_pipeline_schedule": build} if options.for_torch.given() else {}
    return {
        "_get_pipeline_metadata": metadata,
        "_get_pp_rank_to_stage_indices_mapping": stages_on,
        "_build_pipeline_schedule": build,
    }


def report_loss_where_it_is() -> None:
    """Make TorchTitan report loss and metrics from the rank with the last stage, wherever a schedule places it."""
    get_rank, ensure_visible = metrics._get_metrics_rank, metrics.ensure_pp_loss_visible

    def get_metrics_rank(*, parallel_dims: ParallelDims, pp_schedule: str) -> int:
        traits = _known(pp_schedule)
        if traits is None or not parallel_dims.pp_enabled:
            return int(get_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule))
        # The pipeline is the outermost dimension of TorchTitan's mesh.
        ranks_per_stage = parallel_dims.world_size // parallel_dims.pp
        return int(ranks_per_stage * traits.place(parallel_dims.pp).rank_of[-1])

    def ensure_pp_loss_visible(*, parallel_dims: ParallelDims, pp_schedule: str, color: Any) -> None:
        if get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule) > 0:
            ensure_visible(parallel_dims=parallel_dims, pp_schedule=pp_schedule, color=color)

    metrics._get_metrics_rank = get_metrics_rank
    torchtitan.trainer.ensure_pp_loss_visible = ensure_pp_loss_visible


def add_metrics(pipeline: monitor.PipelineMetrics, pp_schedule: str) -> None:
    """Have the steps that TorchTitan logs looked at, and put what is found among its metrics and on the console."""
    should_log, log = MetricsProcessor.should_log, MetricsProcessor.log
    watching = ref(pipeline)  # of the schedule, which has to go before the interpreter does

    def armed_where_logged(self: Any, step: int) -> bool:
        is_logged: bool = should_log(self, step)
        if pipeline := watching():
            pipeline.armed = is_logged
        return is_logged

    def log_with_pipeline(self: Any, step: int, *args: Any, extra_metrics: dict[str, Any] | None = None) -> None:
        pipeline = watching()
        found = pipeline.collect() if pipeline else {}
        log(self, step, *args, extra_metrics={**(extra_metrics or {}), **found})
        if found and dist.get_rank() == rank_with_loss(self.parallel_dims, pp_schedule):
            logger.info(monitor.in_words(found))

    MetricsProcessor.should_log = armed_where_logged
    MetricsProcessor.log = log_with_pipeline


def defer_experts() -> None:
    """Let the grouped experts of TorchTitan's MoE models put their weight gradients off."""
    GroupedExperts.weight_products = {_torch.grouped_mm: GROUPED_MM}


def rank_with_loss(parallel_dims: ParallelDims, pp_schedule: str) -> int:
    """The rank that reports loss and metrics."""
    return int(metrics._get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule))


def _known(schedule: str) -> Traits | None:
    """None for what TorchTitan wants beside its own CSV field; `zbpipe.titan.check` has refused the rest."""
    return None if schedule in NAMES_FOR_TITANS_CSV else lookup(schedule)
