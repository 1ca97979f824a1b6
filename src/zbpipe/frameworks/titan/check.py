"""Checks of a TorchTitan job before any process group exists. Imports no torchtitan."""

from __future__ import annotations

import logging
from functools import cache
from math import prod
from typing import Any

from zbpipe.costs.file import load_costs
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import has_torchs_split
from zbpipe.estimation.estimate import require_torch_runs
from zbpipe.estimation.workload import few_microbatches
from zbpipe.frameworks.job_schedule import require_sense, require_size, require_steps
from zbpipe.frameworks.options import Options
from zbpipe.frameworks.titan import batches
from zbpipe.runtime.adaptive import require_comparable
from zbpipe.schedule.ir import Placement
from zbpipe.schedule.registry import Algorithm, resolve
from zbpipe.simulator.passes import default_costs
from zbpipe.simulator.simulation import LEAST_GAIN, gain
from zbpipe.simulator.validation import require_valid

_DEFAULT_SECONDS = 300
"""TorchTitan's default limit for the first step."""
_MANY_STAGES = 4
"""With this number of stages, each has 75 seconds to compile forward and backward."""

_VALIDATED = Options(optimizer_step="validated")

logger = logging.getLogger(__name__)


def check(config: Any, algorithm: Algorithm | None, options: Options) -> None:
    """Refuse settings of TorchTitan's config that cannot run, and options of zbpipe without effect."""
    if algorithm is None:
        if options != Options():
            name = config.parallelism.pipeline_parallel_schedule
            raise ValueError(
                f"zbpipe's options have no effect on TorchTitan's own {name}: give the CSV file as the schedule instead"
            )
        return
    has_pipeline = config.parallelism.pipeline_parallel_degree > 1
    if not has_pipeline and algorithm.source == "torch" and options not in (Options(), _VALIDATED):
        raise ValueError(  # without the schedule's name, which may be TorchTitan's default
            "zbpipe's options have no effect without a pipeline: omit them, or set"
            " --parallelism.pipeline_parallel_degree and one of zbpipe's schedules"
        )
    require_sense(algorithm, options, _spell, will_run=has_pipeline)
    if options.optimizer_step == "validated":
        _check_validated_step(algorithm, has_pipeline)
    if has_pipeline:
        if algorithm.source == "zbpipe" and not getattr(config.training, "disable_cuda_graphs", True):
            raise ValueError(
                f"training.disable_cuda_graphs=False would capture {algorithm.name} in a CUDA graph, which works"
                " only in your own loop (docs/the-split.md): set --training.disable_cuda_graphs"
            )
        _check_schedule(algorithm, config)
        _check_torchs_split(algorithm, options, config)
        if config.comm.mode == "fake_backend":
            raise ValueError(
                "--comm.mode fake_backend has no other ranks, whose messages a pipeline needs: omit it. `zbpipe"
                " estimate --ranks` shows the memory of each rank"
            )
        require_steps(algorithm, options, config.training.steps, _spell)
        placement = _find_placement(algorithm, config.parallelism.pipeline_parallel_degree, options)
        require_size(algorithm, options, placement, batches.microbatches(config), _spell)
        option, size = batches.batch_option(config)
        if words := few_microbatches(placement.num_ranks, batches.microbatches(config), size, option):
            _warn_once(words)
        if not depends_on_model(algorithm):
            check_stages(config, algorithm, placement, options)


def depends_on_model(algorithm: Algorithm) -> bool:
    return algorithm.any_stages_per_rank and algorithm.source == "zbpipe"


def check_stages(config: Any, algorithm: Algorithm, placement: Placement, options: Options) -> None:
    """Refuse validated steps that gain nothing, and comparisons that cannot run with these stages. Warn of a long first
    step."""
    if options.compare_with is not None:
        require_comparable(algorithm, resolve(options.compare_with), placement)
    if options.optimizer_step == "validated" and algorithm.name != "Auto":
        schedule = algorithm.make_on(placement, batches.microbatches(config))
        assert schedule is not None, "the placement is one of the schedule"
        saved = gain(schedule, default_costs(placement))
        if saved < LEAST_GAIN:
            ranks = placement.num_ranks
            raise ValueError(
                f"{_VALIDATED_STEP} gains nothing ({saved:.1%} of a step) with {algorithm.name} on {ranks} ranks: use"
                f" ZBV or ZB2P with at least {2 * ranks} microbatches, or omit it"
            )
    # zbpipe's schedules compile on all ranks at the same time; see `zbpipe.runtime.ranks.warm_up`.
    in_turn = placement.num_stages // (placement.num_ranks if algorithm.source == "zbpipe" else 1)
    seconds = config.comm.init_timeout_seconds
    if config.compile.enable and in_turn >= _MANY_STAGES and seconds <= _DEFAULT_SECONDS:
        _warn_once(
            f"{algorithm.name} compiles {in_turn} stages one after the other in the first step. If that takes more than"
            f" comm.init_timeout_seconds={seconds}, the job ends: set --comm.init_timeout_seconds 1800"
        )


def require_processes(config: Any, number: int) -> None:
    """Refuse degrees of parallelism that do not fit the number of processes. TorchTitan only asserts this."""
    degrees = {name: getattr(config.parallelism, name) for name in _DEGREES}
    needed = prod(degree for degree in degrees.values() if degree > 0)
    takes_the_rest = degrees["data_parallel_shard_degree"] < 0
    if config.comm.mode != "default" or (number % needed == 0 if takes_the_rest else number == needed):
        return
    product = " x ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
    many = f"a multiple of {needed}" if takes_the_rest else str(needed)
    raise ValueError(
        f"{product or 'a job without parallelism'} needs {many} processes, and this job has {number}: start torchrun"
        f" with {many}, or change a degree"
    )


_DEGREES = (
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
)


def _spell(option: str) -> str:
    return f"--zbpipe.{option.replace('_', '-')}"


_VALIDATED_STEP = f"{_spell('optimizer_step')} validated"


def _check_validated_step(algorithm: Algorithm, has_pipeline: bool) -> None:
    if not has_pipeline:
        raise ValueError(f"{_VALIDATED_STEP} avoids a wait for other pipeline ranks, but this job has none: omit it")
    if algorithm.source == "torch":
        raise ValueError(
            f"{_VALIDATED_STEP} needs one of zbpipe's schedules, and {algorithm.name} is torch's own: use ZBV, or omit"
            " it"
        )


def _find_placement(algorithm: Algorithm, ranks: int, options: Options) -> Placement:
    """The placement before the model is cut. It may depend on the cut; then the cost file's, or the usual one."""
    if options.costs_file is not None and algorithm.any_stages_per_rank:
        known = load_costs(options.costs_file)
        if isinstance(known.costs, CostModel):
            return known.placement or algorithm.place(ranks, max(known.costs.num_stages // ranks, 1))
    return algorithm.place(ranks)


def _check_schedule(algorithm: Algorithm, config: Any) -> None:
    table = config.parallelism.pipeline_parallel_schedule_csv
    batches.require_whole_microbatches(config)
    ranks, number = config.parallelism.pipeline_parallel_degree, batches.microbatches(config)
    algorithm.place(ranks)
    if algorithm.source == "zbpipe" and table:
        raise ValueError(
            f"pipeline_parallel_schedule_csv={table!r} and the schedule {algorithm.name} exclude each other: omit"
            " one of them"
        )
    fitting = ranks * algorithm.stages_per_rank if algorithm.table is None else algorithm.table.num_microbatches
    option, size = batches.batch_option(config)
    try:
        require_torch_runs(algorithm, ranks, algorithm.stages_per_rank, number)
        made = None if algorithm.table is None else algorithm.make(ranks, number)
    except ValueError as error:
        reason, _, way = str(error).rpartition(": ")
        raise ValueError(f"{reason}: set {option} {fitting * size}, or {way}") from None
    if made is not None:
        require_valid(made)


def _check_torchs_split(algorithm: Algorithm, options: Options, config: Any) -> None:
    """Refuse torch's split with a loss in chunks, or warn if torch's own schedule uses it."""
    # Such a loss frees the parameters that FSDP has gathered for the head. torch's split then looks for the sharded
    # ones in the autograd graph (TorchTitan 0.3.0, torch 2.14).
    if not batches.chunks_of_loss(config):
        return
    lost = "loses gradients of the stage with the head, because TorchTitan's ChunkedLossWrapper runs a backward in F"
    if options.split_backward == "autograd":
        raise ValueError(
            f"{_spell('split_backward')} autograd {lost}: omit the option (zbpipe's split loses none), or set"
            " config.loss to CrossEntropyLoss.Config()"
        )
    if algorithm.source != "torch":  # zbpipe's schedules are not made here, because some need a search
        return
    schedule = algorithm.make(config.parallelism.pipeline_parallel_degree, batches.microbatches(config))
    if has_torchs_split(schedule, algorithm.source):
        _warn_once(
            f"torch's {algorithm.name} {lost}: use one of zbpipe's schedules, or set config.loss to"
            " CrossEntropyLoss.Config()"
        )


@cache
def _warn_once(words: str) -> None:
    """Log it once. With TorchTitan 0.2 the settings are checked twice."""
    logger.warning(words)
