"""What is refused in a TorchTitan job before any process group exists. Imports no torchtitan."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from zbpipe.estimation.workload import few_microbatches
from zbpipe.frameworks.installation import find_algorithm
from zbpipe.runtime.job import require_sense, require_size
from zbpipe.runtime.options import Options
from zbpipe.schedule.registry import Algorithm
from zbpipe.simulator.passes import default_costs
from zbpipe.simulator.post_validation import LEAST_GAIN, gain
from zbpipe.simulator.validation import require_valid

BATCH_OPTION = "--training.local_batch_size"
_DEFAULT_SECONDS = 300
"""TorchTitan's default limit for the first step."""
_MANY_STAGES = 4
"""With this many stages, each has 75 seconds to compile forward and backward."""

logger = logging.getLogger(__name__)


def check(config: Any, options: Options) -> None:
    """Refuse settings of TorchTitan's config that cannot run, and options of zbpipe that would have no effect."""
    name = config.parallelism.pipeline_parallel_schedule
    algorithm = find_algorithm(name)
    if algorithm is None:
        if options != Options():
            raise ValueError(
                f"zbpipe's options have no effect on TorchTitan's own {name}: give the CSV file as the schedule instead"
            )
        return
    has_pipeline = config.parallelism.pipeline_parallel_degree > 1
    require_sense(algorithm, options, _spell, will_run=has_pipeline)
    if options.optimizer_step == "validated":
        _check_validated_step(algorithm, config)
    if has_pipeline:
        _check_schedule(algorithm, config)
        ranks, steps = config.parallelism.pipeline_parallel_degree, config.training.steps
        require_size(algorithm, options, ranks, _microbatches(config), steps, _spell)
        _warn_of_idle_ranks(config)
        _warn_of_first_step(algorithm, config)


def _spell(option: str) -> str:
    return f"--zbpipe.{option.replace('_', '-')}"


def _check_validated_step(algorithm: Algorithm, config: Any) -> None:
    what = f"{_spell('optimizer_step')} validated"
    ranks = config.parallelism.pipeline_parallel_degree
    if ranks < 2:
        raise ValueError(f"{what} saves a wait for other pipeline ranks, and this job has none: leave it out")
    if algorithm.source == "torch":
        raise ValueError(
            f"{what} needs one of zbpipe's schedules, and {algorithm.name} is torch's own: use ZBV, or leave it out"
        )
    if algorithm.name == "Auto":
        return
    schedule = algorithm.make(ranks, _microbatches(config), runs_ahead=True)
    saved = gain(schedule, default_costs(schedule.placement))
    if saved < LEAST_GAIN:
        raise ValueError(
            f"{what} gains nothing ({saved:.1%} of a step) with {algorithm.name} on {ranks} ranks: use ZBV or ZB2P, or"
            " leave it out"
        )


def _check_schedule(algorithm: Algorithm, config: Any) -> None:
    table = config.parallelism.pipeline_parallel_schedule_csv
    batch, microbatch = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if batch % microbatch:
        raise ValueError(
            f"training.local_batch_size={batch} is not a multiple of"
            f" parallelism.pipeline_parallel_microbatch_size={microbatch}: change one of them"
        )
    algorithm.place(config.parallelism.pipeline_parallel_degree)
    if algorithm.source == "zbpipe" and table:
        raise ValueError(
            f"pipeline_parallel_schedule_csv={table!r} and the schedule {algorithm.name} exclude each other: leave one"
            " of them out"
        )
    if algorithm.placement == "table":
        require_valid(algorithm.make(config.parallelism.pipeline_parallel_degree, _microbatches(config)))


def _warn_of_idle_ranks(config: Any) -> None:
    parallelism = config.parallelism
    ranks, size = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_microbatch_size
    if words := few_microbatches(ranks, _microbatches(config), size, BATCH_OPTION):
        _warn_once(words)


def _warn_of_first_step(algorithm: Algorithm, config: Any) -> None:
    """While other ranks compile their stages, a rank waits, and TorchTitan's limit for the first step runs."""
    seconds, placement = config.comm.init_timeout_seconds, algorithm.place(config.parallelism.pipeline_parallel_degree)
    # With zbpipe's schedules all ranks compile at the same time; see `zbpipe.runtime.warm_up`.
    in_turn = placement.num_stages // (placement.num_ranks if algorithm.source == "zbpipe" else 1)
    if config.compile.enable and in_turn >= _MANY_STAGES and seconds <= _DEFAULT_SECONDS:
        _warn_once(
            f"{algorithm.name} compiles {in_turn} stages one after the other in the first step, which"
            f" comm.init_timeout_seconds={seconds} ends if they take longer: set --comm.init_timeout_seconds 1800"
        )


@cache
def _warn_once(words: str) -> None:
    """Log it once: with TorchTitan 0.2 the settings are checked twice."""
    logger.warning(words)


def _microbatches(config: Any) -> int:
    return int(config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size)
