"""What is refused of a TorchTitan job before any process group exists. Imports no torchtitan."""

from __future__ import annotations

import os
from typing import Any

from zbpipe import costs_file
from zbpipe.ir import OpKind
from zbpipe.registry import Traits, lookup
from zbpipe.runtime.auto import USUAL_STEPS, AutoSchedule, start_within
from zbpipe.runtime.build import require_options
from zbpipe.runtime.checks import require_writable
from zbpipe.runtime.options import Options
from zbpipe.runtime.profiler import WARM_UP
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
    require_options(name, options.for_torch.given())
    if traits.source == "torch" and options.need_zbpipes_schedule():
        raise ValueError(
            f"of zbpipe's options only those that torch has, too, fit torch's {name}: leave the others out, such as"
            " --zbpipe.split-backward, --zbpipe.defer-loss and --zbpipe.check-gradients, or use one of zbpipe's"
            " schedules, for example ZBH1, which has the memory of 1F1B"
        )
    if config.parallelism.pipeline_parallel_degree <= 1:
        return
    _check_schedule(traits, config)
    _check_auto(traits, config, options)
    _check_measuring(traits, config, options)
    _check_files(options)


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


def _check_auto(traits: Traits, config: Any, options: Options) -> None:
    if options.memory_limit is None:
        return
    if traits.name != AutoSchedule.schedule_name:
        raise ValueError(f"--zbpipe.memory-limit is for the schedule Auto, not for {traits.name}: leave it out")
    placement = traits.place(config.parallelism.pipeline_parallel_degree)
    start_within(options.memory_limit, placement, _microbatches(config))


def _check_measuring(traits: Traits, config: Any, options: Options) -> None:
    is_auto = traits.name == AutoSchedule.schedule_name
    if options.costs_out and not (options.profile_steps or is_auto):
        raise ValueError(
            f"--zbpipe.costs-out {options.costs_out} has nothing to write with {traits.name}: say with"
            " --zbpipe.profile-steps how many steps to measure, or use the schedule Auto"
        )
    if options.profile_steps and not _runs_i_and_w(traits, config):
        raise ValueError(
            f"--zbpipe.profile-steps times I and W, but {traits.name} runs whole backwards: measure with one of"
            " zbpipe's schedules, for example ZBH1, which has the memory of 1F1B"
        )
    timed = options.profile_steps or (USUAL_STEPS if is_auto and options.costs_out else 0)
    needed = {
        "--zbpipe.profile-steps": timed + WARM_UP + 1 if timed else 0,
        "--zbpipe.trace-step": options.trace_step if options.trace else 0,
        "--zbpipe.check-gradients": options.check_gradients or 0,
    }
    for option, steps in needed.items():
        if steps > config.training.steps:
            raise ValueError(
                f"{option} needs {steps} steps, but training.steps={config.training.steps}: lower it, or train longer"
            )


def _check_files(options: Options) -> None:
    files = {"--zbpipe.costs-out": options.costs_out, "--zbpipe.trace": options.trace}
    for option, file in files.items():
        if file is None:
            continue
        try:
            if option == "--zbpipe.costs-out":
                costs_file.require_ending(file)
            # The others write none, and may be on machines without that folder.
            if os.environ.get("RANK", "0") == "0":
                require_writable(file)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None


def _microbatches(config: Any) -> int:
    return int(config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size)


def _runs_i_and_w(traits: Traits, config: Any) -> bool:
    schedule = traits.generate(config.parallelism.pipeline_parallel_degree, _microbatches(config))
    return any(op.kind is OpKind.I for ops in schedule for op in ops)
