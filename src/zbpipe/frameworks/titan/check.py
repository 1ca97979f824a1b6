"""Checks of a TorchTitan job before any process group exists. Imports no torchtitan."""

from __future__ import annotations

import logging
from functools import cache
from math import prod
from typing import Any

from zbpipe.costs.transformer import has_torchs_split
from zbpipe.estimation.workload import few_microbatches
from zbpipe.frameworks.job_schedule import require_sense, require_size
from zbpipe.frameworks.options import Options
from zbpipe.frameworks.titan import batches
from zbpipe.schedule.registry import Algorithm
from zbpipe.simulator.passes import default_costs
from zbpipe.simulator.post_validation import LEAST_GAIN, gain
from zbpipe.simulator.validation import require_valid

_DEFAULT_SECONDS = 300
"""TorchTitan's default limit for the first step."""
_MANY_STAGES = 4
"""With this many stages, each has 75 seconds to compile forward and backward."""

_VALIDATED = Options(optimizer_step="validated")

logger = logging.getLogger(__name__)


def check(config: Any, algorithm: Algorithm | None, options: Options) -> None:
    """Refuse settings of TorchTitan's config that cannot run, and options of zbpipe that would have no effect."""
    if algorithm is None:
        if options != Options():
            name = config.parallelism.pipeline_parallel_schedule
            raise ValueError(
                f"zbpipe's options have no effect on TorchTitan's own {name}: give the CSV file as the schedule instead"
            )
        return
    has_pipeline = config.parallelism.pipeline_parallel_degree > 1
    if not has_pipeline and algorithm.source == "torch" and options not in (Options(), _VALIDATED):
        raise ValueError(  # without the name of the schedule, which may be TorchTitan's default
            "zbpipe's options have no effect without a pipeline: omit them, or set"
            " --parallelism.pipeline_parallel_degree and one of zbpipe's schedules"
        )
    require_sense(algorithm, options, _spell, will_run=has_pipeline)
    if options.optimizer_step == "validated":
        _check_validated_step(algorithm, config)
    if has_pipeline:
        _check_schedule(algorithm, config)
        _check_torchs_split(algorithm, options, config)
        if config.comm.mode == "fake_backend":
            _require_no_measuring(algorithm, options)
        ranks, steps = config.parallelism.pipeline_parallel_degree, config.training.steps
        require_size(algorithm, options, ranks, batches.microbatches(config), steps, _spell)
        _warn_of_idle_ranks(config)
        _warn_of_first_step(algorithm, config)


def require_processes(config: Any, number: int) -> None:
    """Refuse degrees of parallelism that do not fit the number of processes, which TorchTitan only asserts."""
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


def _check_validated_step(algorithm: Algorithm, config: Any) -> None:
    what = f"{_spell('optimizer_step')} validated"
    ranks = config.parallelism.pipeline_parallel_degree
    if ranks < 2:
        raise ValueError(f"{what} avoids a wait for other pipeline ranks, but this job has none: omit it")
    if algorithm.source == "torch":
        raise ValueError(
            f"{what} needs one of zbpipe's schedules, and {algorithm.name} is torch's own: use ZBV, or omit it"
        )
    if algorithm.name == "Auto":
        return
    schedule = algorithm.make(ranks, batches.microbatches(config), runs_ahead=True)
    saved = gain(schedule, default_costs(schedule.placement))
    if saved < LEAST_GAIN:
        raise ValueError(
            f"{what} gains nothing ({saved:.1%} of a step) with {algorithm.name} on {ranks} ranks: use ZBV or ZB2P with"
            f" at least {2 * ranks} microbatches, or omit it"
        )


def _require_no_measuring(algorithm: Algorithm, options: Options) -> None:
    """Refuse for a dry run what needs the other ranks."""
    measuring = [_spell(each) for each in _MEASURING if getattr(options, each) is not None]
    if algorithm.name == "Auto":
        measuring.append("the schedule Auto")
    if measuring:
        raise ValueError(
            f"{' and '.join(measuring)} measures all ranks, and with --comm.mode fake_backend there is one: leave it"
            " out, or use another schedule"
        )


_MEASURING = ("check_gradients", "profile_steps", "costs_out", "trace")


def _check_schedule(algorithm: Algorithm, config: Any) -> None:
    table = config.parallelism.pipeline_parallel_schedule_csv
    batches.require_whole_microbatches(config)
    algorithm.place(config.parallelism.pipeline_parallel_degree)
    if algorithm.source == "zbpipe" and table:
        raise ValueError(
            f"pipeline_parallel_schedule_csv={table!r} and the schedule {algorithm.name} exclude each other: omit"
            " one of them"
        )
    if algorithm.placement == "table":
        require_valid(algorithm.make(config.parallelism.pipeline_parallel_degree, batches.microbatches(config)))


def _check_torchs_split(algorithm: Algorithm, options: Options, config: Any) -> None:
    """Refuse torch's split with a loss in chunks, or warn of it with torch's own schedules."""
    # Such a loss frees the parameters that FSDP has gathered for the head. torch's split then looks for the sharded
    # ones in the autograd graph (seen with TorchTitan 0.3.0 on torch 2.14).
    if not batches.chunks_of_loss(config):
        return
    lost = "loses gradients of the stage with the head, because TorchTitan's ChunkedLossWrapper runs a backward in F"
    if options.split_backward == "autograd":
        raise ValueError(
            f"{_spell('split_backward')} autograd {lost}: omit the option (zbpipe's split loses none), or set"
            " config.loss to CrossEntropyLoss.Config()"
        )
    if algorithm.source != "torch":  # others are not made here: some need a search
        return
    schedule = algorithm.make(config.parallelism.pipeline_parallel_degree, batches.microbatches(config))
    if has_torchs_split(schedule, algorithm.source):
        _warn_once(
            f"torch's {algorithm.name} {lost}: use one of zbpipe's schedules, or set config.loss to"
            " CrossEntropyLoss.Config()"
        )


def _warn_of_idle_ranks(config: Any) -> None:
    option, size = batches.batch_option(config)
    ranks = config.parallelism.pipeline_parallel_degree
    if words := few_microbatches(ranks, batches.microbatches(config), size, option):
        _warn_once(words)


def _warn_of_first_step(algorithm: Algorithm, config: Any) -> None:
    """Warn if TorchTitan's timeout of the first step may end while ranks wait for others that compile."""
    seconds, placement = config.comm.init_timeout_seconds, algorithm.place(config.parallelism.pipeline_parallel_degree)
    # With zbpipe's schedules all ranks compile at the same time; see `zbpipe.runtime.ranks.warm_up`.
    in_turn = placement.num_stages // (placement.num_ranks if algorithm.source == "zbpipe" else 1)
    if config.compile.enable and in_turn >= _MANY_STAGES and seconds <= _DEFAULT_SECONDS:
        _warn_once(
            f"{algorithm.name} compiles {in_turn} stages one after the other in the first step. If that takes more than"
            f" comm.init_timeout_seconds={seconds}, the job ends: set --comm.init_timeout_seconds 1800"
        )


@cache
def _warn_once(words: str) -> None:
    """Log it once: with TorchTitan 0.2 the settings are checked twice."""
    logger.warning(words)
