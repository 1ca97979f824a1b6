"""zbpipe in TorchTitan: the patches that its trainer needs in addition to `zbpipe.install`.

TorchTitan asks torch for schedules by name, so it gets zbpipe's from `zbpipe.install`. This module replaces the cut of
the model into stages, their placement if it is neither a loop nor a V, and the metrics. Names and signatures identify
the version of TorchTitan; see `zbpipe.frameworks.titan.versions`.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, get_args

import torch
import torchtitan.config
import torchtitan.train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torchtitan.components import metrics
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager
from torchtitan.distributed import pipeline_parallel
from torchtitan.distributed import utils as dist_utils
from torchtitan.train import Trainer

from zbpipe.costs import file as costs_file
from zbpipe.costs.job import MemoryLimit
from zbpipe.costs.transformer import Checkpointing
from zbpipe.estimation.cut import Choice, choose
from zbpipe.estimation.workload import ASYNC_TENSOR
from zbpipe.frameworks import installation
from zbpipe.frameworks.installation import is_placed_by_frameworks
from zbpipe.frameworks.options import Options
from zbpipe.frameworks.titan import batches, cpu, layer_split, monitor, steps, versions
from zbpipe.frameworks.titan.batches import checkpointing_of
from zbpipe.frameworks.titan.check import check, check_stages, depends_on_model, require_processes
from zbpipe.frameworks.titan.command_line import asks_for_help, shared_degrees
from zbpipe.frameworks.titan.layer_split import LayerSplit
from zbpipe.frameworks.titan.start_log import log_pipeline
from zbpipe.runtime._torch import autograd, pipelining
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime.build import require_splittable
from zbpipe.runtime.ranks import agreement
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.split.products import GROUPED_MM
from zbpipe.schedule.registry import Algorithm

HAS_JOB_CONFIG = versions.has_job_config()
_CUT, _BUILD = (
    name if HAS_JOB_CONFIG else f"_{name}" for name in ("generate_llm_fqn_per_model_part", "pipeline_module_split")
)
"""TorchTitan's functions that cut a model into lists of modules, and that build a rank's stages from these."""

PipeliningFunction = Callable[..., tuple[Any, list[Any], bool, bool]]
"""Cuts a model. Returns the schedule or its runner, the model parts, and whether this rank has the first and the last
stage."""

logger = logging.getLogger(__name__)


def plug_in(options: Options, on_cpu: bool) -> None:
    """Make zbpipe's schedules known to TorchTitan in this process. Make it run on the CPU if `on_cpu`."""
    installation.install_with(options, torchs_too=True)
    manager = _config_manager(options, on_cpu)
    torchtitan.config.ConfigManager = torchtitan.train.ConfigManager = manager  # programs import it from either
    if HAS_JOB_CONFIG:
        _replace_train_specs(options, on_cpu)
    _show_loss_on_all_ranks()
    if options.optimizer_step == "validated":
        field = "job_config" if HAS_JOB_CONFIG else "config"
        steps.validate_steps(Trainer, dist_utils, lambda trainer: getattr(trainer, field).training.max_norm)
    # TorchTitan's grouped experts defer their weight gradients.
    moe = "torchtitan.models.moe.moe" if HAS_JOB_CONFIG else "torchtitan.models.common.moe"
    import_module(moe).GroupedExperts.weight_products = {autograd.grouped_mm: GROUPED_MM}


def train() -> None:
    """Run TorchTitan's `train.py` with the remaining command line."""
    torchtitan.train.main(*([Trainer] if HAS_JOB_CONFIG else []))


def _config_manager(options: Options, on_cpu: bool) -> type[Any]:
    class PluggedConfigManager(ConfigManager):  # type: ignore[misc]
        def _load_config(self, args: list[str]) -> tuple[Any, list[str]]:  # 0.3 calls it from `parse_args`
            if asks_for_help(args) and not {"--module", "--config"} <= {each.partition("=")[0] for each in args}:
                print("TorchTitan's own options depend on the model: add --module and --config to see them.")
                raise SystemExit(0)
            config, rest = super()._load_config(args)
            if on_cpu:
                cpu.adapt(config)
            return config, rest

        def parse_args(self, args: list[str] | None = None) -> Any:
            # 0.2 has the command line of the import as the default.
            config = super().parse_args(sys.argv[1:] if args is None else args)
            if on_cpu and HAS_JOB_CONFIG:
                # torch's DualPipeV overlaps by GPU streams, also without expert parallelism.
                config.parallelism.pipeline_parallel_expert_parallel_overlap = False
            # Before the ranks meet.
            if number := os.environ.get("WORLD_SIZE"):
                require_processes(config, int(number))
            check(config, _find_algorithm(config.parallelism), options)
            if options.optimizer_step == "validated":
                steps.require_own_steps(Trainer if HAS_JOB_CONFIG else type(config)._owner)
            if not HAS_JOB_CONFIG and config.model_spec is not None:
                spec, name = config.model_spec, config.parallelism.pipeline_parallel_schedule
                if spec.pipelining_fn is not None and config.parallelism.pipeline_parallel_degree > 1:
                    require_schedule_of(spec.pipelining_fn, name, options)
                config.model_spec = _add_pipelining(spec, options, config)
            return config

    return PluggedConfigManager


def _find_algorithm(parallelism: Any) -> Algorithm | None:
    return installation.find_algorithm(parallelism.pipeline_parallel_schedule)


def _add_pipelining(spec: Any, options: Options, config: Any = None) -> Any:
    """A `ModelSpec` or `TrainSpec` that also takes zbpipe's schedules, if it supports pipelines."""
    if spec.pipelining_fn is None:
        return spec
    return replace(spec, pipelining_fn=make_pipelining(spec.pipelining_fn, options, config))


def _replace_train_specs(options: Options, on_cpu: bool) -> None:
    from torchtitan.protocols import train_spec

    get_train_spec = train_spec.get_train_spec

    def get_plugged_train_spec(name: str) -> Any:
        spec = get_train_spec(name)
        return _add_pipelining(cpu.train_spec(spec) if on_cpu else spec, options)

    train_spec.get_train_spec = get_plugged_train_spec


# The pipeline.


class _Job(NamedTuple):
    """Arguments of TorchTitan's call of a function that cuts a model."""

    parallelism: Any
    training: Any
    checkpointing: Checkpointing
    model_config: Any
    device: torch.device
    compile: Any

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> _Job:
        if HAS_JOB_CONFIG:
            _, config, device, model_config, *_ = args
            how = checkpointing_of(config.activation_checkpoint)
            return cls(config.parallelism, config.training, how, model_config, device, config.compile)
        how = checkpointing_of(kwargs.get("ac_config"))
        own = kwargs["parallelism"], kwargs["training"]
        return cls(*own, how, kwargs["model_config"], kwargs["device"], kwargs.get("compile_config"))


def make_pipelining(pipelining_fn: PipeliningFunction, options: Options, config: Any = None) -> PipeliningFunction:
    """A model's `pipelining_fn` that also takes zbpipe's schedules. With torch's names it is the model's own. `config`
    is the job's; 0.2 passes it to the function. The function raises ValueError for settings that cannot run, and
    PipelineError on all ranks if their schedules differ."""

    def pipeline(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        job = _Job.of(args, kwargs)
        name, algorithm = job.parallelism.pipeline_parallel_schedule, _find_algorithm(job.parallelism)
        if HAS_JOB_CONFIG:
            check(args[1], algorithm, options)  # not checked yet if another program started the trainer
        is_zbpipes = algorithm is not None and algorithm.source == "zbpipe"
        with ExitStack() as stack:
            if algorithm is not None and is_zbpipes:
                chosen, split = _choose(pipelining_fn, algorithm, model, job, options)
                if depends_on_model(chosen.algorithm):
                    check_stages(args[1] if HAS_JOB_CONFIG else config, chosen.algorithm, chosen.placement, options)
                stack.enter_context(replaced(installation, of_model=_adapt_to(job, chosen, split, options)))
                for module, helpers in _helpers(pipelining_fn, chosen, split):
                    stack.enter_context(replaced(module, **helpers))
                # TorchTitan's rules for the number of stages know only its own schedules.
                asked = {"schedule": chosen.algorithm.name, "layers_per_stage": None}
                own = _changed(job.parallelism, **{f"pipeline_parallel_{name}": value for name, value in asked.items()})
                if HAS_JOB_CONFIG:
                    args = (args[0], _changed(args[1], parallelism=own), *args[2:])
                else:
                    kwargs["parallelism"] = own
            built = pipelining_fn(model, *args, **kwargs)
        schedule = built[0]
        if is_zbpipes:
            if not isinstance(schedule, RegisteredSchedule):
                raise ValueError(
                    f"{name} cannot run this model, which {_name_of(pipelining_fn)} cuts into stages without asking"
                    " torch for the schedule by its name: use one of torch's schedules"
                )
            log_pipeline(schedule, chosen, split, job.parallelism.tensor_parallel_degree)
        if isinstance(schedule, pipelining.PipelineSchedule):
            complete(schedule, name, job)
        else:
            logger.info("%s runs %s by its own %s", _name_of(pipelining_fn), name, type(schedule).__qualname__)
        return built

    return pipeline


def _adapt_to(job: _Job, chosen: Choice, split: LayerSplit, options: Options) -> dict[str, Any]:
    """Arguments of a schedule that adapts to the checkpointing, in a job without measured costs."""
    if not chosen.algorithm.by_checkpointing or options.costs_file is not None:
        return {}
    # From the config, not from each rank's modules, so that all ranks make one schedule.
    tensor = job.parallelism.tensor_parallel_degree
    return {"checkpointing": job.checkpointing, "tensor": tensor, "work": split.work(chosen.placement)}


def _changed(config: Any, **fields: Any) -> Any:
    changed = copy(config)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def require_schedule_of(pipelining_fn: PipeliningFunction, name: str, options: Options) -> None:
    """Refuse zbpipe's schedules and options if the function's signature shows that it runs no schedule."""
    algorithm, result = installation.find_algorithm(name), _schedule_of(pipelining_fn)
    asks_for_zbpipe = options != Options() or (algorithm is not None and algorithm.source == "zbpipe")
    if asks_for_zbpipe and not issubclass(result, pipelining.PipelineSchedule):
        raise ValueError(
            f"{_name_of(pipelining_fn)} runs this model by its own {result.__qualname__}, which ignores"
            f" zbpipe's schedules and options, but the schedule is {name}: use one of torch's schedules"
            " without zbpipe's options, or a model whose pipelining_fn is pipeline_llm"
        )


def _schedule_of(pipelining_fn: PipeliningFunction) -> type[Any]:
    """The class that the function returns instead of a schedule, if its signature names one."""
    try:
        result = get_args(inspect.signature(pipelining_fn, eval_str=True).return_annotation)
    except (NameError, TypeError, ValueError):  # annotations may use names that only type checkers import
        result = ()
    return result[0] if result and isinstance(result[0], type) else pipelining.PipelineSchedule


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)


def _modules_of(pipelining_fn: PipeliningFunction) -> list[ModuleType]:
    """Modules with the functions that `pipelining_fn` may call to cut a model and to place its stages. A model with its
    own function may define them too, or import TorchTitan's by name."""
    own = sys.modules.get(getattr(pipelining_fn, "__module__", ""), pipeline_parallel)
    return [pipeline_parallel] if own is pipeline_parallel else [pipeline_parallel, own]


def _choose(
    pipelining_fn: PipeliningFunction, algorithm: Algorithm, model: nn.Module, job: _Job, options: Options
) -> tuple[Choice, LayerSplit]:
    """The schedule to run, the placement of its stages, and the cut of the model. ValueError if the user's cut has
    another number of stages, or if a cut lacks a module."""
    parallelism, ranks = job.parallelism, job.parallelism.pipeline_parallel_degree
    by_hand, stages = parallelism.module_fqns_per_model_part, None
    if by_hand is not None:
        stages = algorithm.stages_of_cut(ranks, len(by_hand), "module_fqns_per_model_part lists")
        _require_known(model, by_hand)
        _require_all(model, by_hand)
    elif (number := layer_split.count_stages(parallelism, _num_layers(job))) is not None:
        field = f"pipeline_parallel_layers_per_stage={parallelism.pipeline_parallel_layers_per_stage}"
        cut = f"{field} cuts the model's {_num_layers(job)} layers into"
        stages = algorithm.stages_of_cut(ranks, number, cut)
    # The model's own function comes first.
    *_, titans = (getattr(each, _CUT) for each in _modules_of(pipelining_fn) if hasattr(each, _CUT))
    whole = layer_split.Model(model, job.model_config, batches.length(job.training))
    degrees, tokens, microbatches = shared_degrees(parallelism), prod(batches.shape(job)), batches.microbatches(job)
    of_layers = layer_split.Job(
        microbatches,
        tokens,
        degrees,
        job.checkpointing,
        compiled=batches.compiles_blocks(job),
        hidden_tensor=ASYNC_TENSOR * batches.has_async_tensor(job),
    )
    split = LayerSplit(titans, _num_layers(job), parallelism, whole, of_layers)
    chosen = choose(
        algorithm,
        ranks,
        microbatches,
        split,
        job.checkpointing,
        tensor=degrees.tensor,
        tokens=0.0 if job.device.type == "cpu" else tokens / degrees.sharing,
        measured=None if options.costs_file is None else costs_file.load_costs(options.costs_file),
        stages_per_rank=stages,
        memory_limit=MemoryLimit.parse(options.memory_limit),
        transport=options.transport,
    )
    return chosen, split


def _helpers(
    pipelining_fn: PipeliningFunction, chosen: Choice, split: LayerSplit
) -> Iterator[tuple[ModuleType, dict[str, Callable[..., Any]]]]:
    """Replacements of each module's functions, which cut the model and place the stages for the schedule."""
    inside: list[bool] = []
    modules = _modules_of(pipelining_fn)
    for module in modules:
        helpers: dict[str, Callable[..., Any]] = {}
        if cut := getattr(module, _CUT, None):
            helpers[_CUT] = _outermost(cut, lambda *sizes, **more: split.parts(chosen.placement), inside)
        if build := getattr(module, _BUILD, None):
            is_titans = build is getattr(pipeline_parallel, _BUILD)
            own = partial(_build_stages, build, chosen, modules, split.by_hand is None and is_titans)
            helpers[_BUILD] = _outermost(build, own, inside)
        yield module, helpers


def _outermost(original: Callable[..., Any], replacement: Callable[..., Any], inside: list[bool]) -> Callable[..., Any]:
    """`replacement`, but `original` while a function with the same `inside` runs. A model's own function may call
    TorchTitan's, and both are replaced."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if inside:
            return original(*args, **kwargs)
        inside.append(True)
        try:
            return replacement(*args, **kwargs)
        finally:
            inside.clear()

    return call


def _num_layers(job: _Job) -> int:
    config = job.model_config
    return len(config.layers) if hasattr(config, "layers") else int(getattr(config, "n_layers", 1))


def _require_known(model: nn.Module, modules: Sequence[Sequence[str]]) -> None:
    if unknown := {name for part in modules for name in part} - layer_split.modules_of(model).keys():
        raise ValueError(
            f"module_fqns_per_model_part names {sorted(unknown)}, which the model does not have: the head is 'output'"
            " in torchtitan 0.2, and 'lm_head' in 0.3"
        )


def _require_all(model: nn.Module, modules: Sequence[Sequence[str]]) -> None:
    """Refuse stages that lack a module with weights, because TorchTitan would train without it."""
    named, known = {name for part in modules for name in part}, layer_split.modules_of(model)
    if left := [name for name, each in known.items() if name not in named and any(True for _ in each.parameters())]:
        raise ValueError(
            f"no stage has {left}, and TorchTitan would train the model without them: give each stage's modules, with"
            " these, in parallelism.module_fqns_per_model_part"
        )


def _build_stages(
    titans: Callable[..., tuple[list[PipelineStage], list[nn.Module]]],
    chosen: Choice,
    modules: Sequence[ModuleType],
    requires_all: bool,
    # The arguments of TorchTitan's function.
    whole_model: nn.Module,
    pp_mesh: DeviceMesh,
    pp_schedule: str,
    device: torch.device,
    module_names_per_stage: list[list[str]],
    **more: Any,
) -> tuple[list[PipelineStage], list[nn.Module]]:
    """Build a rank's stages in any placement. TorchTitan's function may call functions in `modules`."""
    if requires_all:
        _require_all(whole_model, module_names_per_stage)
    build = partial(titans, whole_model, **more)
    arguments = pp_schedule, device, module_names_per_stage
    if is_placed_by_frameworks(chosen.algorithm, chosen.placement):
        return build(pp_mesh, *arguments)
    as_one_stage = {"logger": _SILENT, "get_schedule_class": lambda name: PipelineScheduleMulti}
    stages, parts = [], []
    for index in chosen.placement.stages_on(pp_mesh.get_local_rank()):
        mesh = _as_rank(index, chosen.placement.num_stages, pp_mesh)
        with ExitStack() as stack:
            for module in modules:
                names = as_one_stage.keys() & vars(module).keys()
                stack.enter_context(replaced(module, **{each: as_one_stage[each] for each in names}))
            (stage,), (part,) = build(mesh, *arguments)
        stages.append(stage)
        parts.append(part)
    return stages, parts


def _as_rank(stage: int, num_stages: int, mesh: DeviceMesh) -> Any:
    """A pipeline mesh with one rank per stage, seen from the rank of `stage`: TorchTitan builds this stage for it."""
    return SimpleNamespace(get_local_rank=lambda: stage, size=lambda: num_stages, get_group=mesh.get_group)


_SILENT = logging.Logger("silent", logging.CRITICAL)
"""Replaces TorchTitan's logger while a stage runs in place of a rank, because it would log that rank."""


def complete(schedule: pipelining.PipelineSchedule, name: str, job: _Job) -> None:
    """Adapt this rank's schedule to TorchTitan, compare the schedules of all ranks, and add the pipeline's metrics.
    PipelineError on all ranks if their schedules differ. `name` is the value of TorchTitan's schedule field."""
    if isinstance(schedule, RegisteredSchedule):
        schedule.sizes.keywords_are_alike = True  # TorchTitan passes the positions of all tokens to all ranks
    else:
        require_splittable(schedule, name)
    # Also with torch's schedules: a rank with ZBV would wait for a rank with torch's 1F1B.
    agreement.require_same(schedule, name, None, job.device)
    # 0.2 asks after a step whether it is logged.
    pipeline = monitor.PipelineMetrics(schedule, armed=HAS_JOB_CONFIG)
    monitor.report(pipeline, MetricsProcessor, 1 if HAS_JOB_CONFIG else 0)


# The loss.


def _show_loss_on_all_ranks() -> None:
    """Replace TorchTitan's functions that find the rank with the loss by the schedule's name."""
    ensure_visible, find_rank = metrics.ensure_pp_loss_visible, metrics._get_metrics_rank

    @wraps(find_rank)  # also its signature, which `versions.require_names` reads
    def get_metrics_rank(*args: Any, **kwargs: Any) -> int:
        given = inspect.signature(find_rank).bind(*args, **kwargs).arguments
        name = given.get("pp_schedule") or given["job_config"].parallelism.pipeline_parallel_schedule
        algorithm = installation.find_algorithm(name)
        is_zbpipes = algorithm is not None and algorithm.source == "zbpipe"
        return 0 if is_zbpipes else find_rank(*args, **kwargs)

    @wraps(ensure_visible)
    def ensure_pp_loss_visible(*args: Any, **kwargs: Any) -> None:
        if not monitor.find_reported(MetricsProcessor):
            ensure_visible(*args, **kwargs)

    metrics._get_metrics_rank = get_metrics_rank
    sys.modules[Trainer.__module__].ensure_pp_loss_visible = ensure_pp_loss_visible  # type: ignore[attr-defined]
