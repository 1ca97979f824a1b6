"""What is refused of a TorchTitan job before any process group exists. Imports no torchtitan."""

from __future__ import annotations

from typing import Any

from zbpipe.registry import Traits, lookup
from zbpipe.runtime.job import require_sense, require_size
from zbpipe.runtime.options import Options
from zbpipe.validate import require_valid

NAMES_FOR_TITANS_CSV = ("PipelineScheduleSingle", "PipelineScheduleMulti")
"""What TorchTitan's schedule field says beside its `pipeline_parallel_schedule_csv`."""


def check(config: Any, options: Options) -> None:
    """Refuse pipeline settings that cannot run, and options of zbpipe's that would be without effect.

    Args:
        config: TorchTitan's.
        options: those beside it.

    Raises:
        ValueError: the schedule is unknown, does not fit the job, or stands beside TorchTitan's own CSV field; or an
            option stands beside a schedule or a number of steps for which it is not made, or names a file that cannot
            be written.
    """
    name = config.parallelism.pipeline_parallel_schedule
    if name in NAMES_FOR_TITANS_CSV:
        if options != Options():
            raise ValueError(
                f"zbpipe's options do not reach TorchTitan's own {name}: give the CSV file as the schedule instead"
            )
        return
    traits = lookup(name)
    has_pipeline = config.parallelism.pipeline_parallel_degree > 1
    require_sense(traits, options, _spell, will_run=has_pipeline)
    if has_pipeline:
        _check_schedule(traits, config)
        ranks, steps = config.parallelism.pipeline_parallel_degree, config.training.steps
        require_size(traits, options, ranks, _microbatches(config), steps, _spell)


def _spell(option: str) -> str:
    return f"--zbpipe.{option.replace('_', '-')}"


def _check_schedule(traits: Traits, config: Any) -> None:
    table = config.parallelism.pipeline_parallel_schedule_csv
    batch, microbatch = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if batch % microbatch:
        raise ValueError(
            f"training.local_batch_size={batch} is no multiple of"
            f" parallelism.pipeline_parallel_microbatch_size={microbatch}: change one of them"
        )
    traits.place(config.parallelism.pipeline_parallel_degree)
    if traits.source == "zbpipe" and table:
        raise ValueError(
            f"pipeline_parallel_schedule_csv={table!r} and the schedule {traits.name} exclude each other: leave one of"
            " them out"
        )
    if traits.placement == "table":
        require_valid(traits.generate(config.parallelism.pipeline_parallel_degree, _microbatches(config)))


def _microbatches(config: Any) -> int:
    return int(config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size)
