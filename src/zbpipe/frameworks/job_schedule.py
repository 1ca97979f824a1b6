"""Schedules for jobs: by name, with zbpipe's options in addition to the job's own config."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe.costs import file as costs_file
from zbpipe.costs.job import JobCosts, MemoryLimit, require_room
from zbpipe.costs.model import CostModel
from zbpipe.frameworks.options import Options
from zbpipe.runtime import checks
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.adaptive import COMPARED_FROM, USUAL_STEPS, AutoSchedule, compare_in_turn
from zbpipe.runtime.build import build_pipeline_schedule, require_options
from zbpipe.runtime.measure.profiler import WARM_UP, Profiler, log_costs, log_visibly, write_trace
from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.verify.gradient_check import GradientCheck
from zbpipe.schedule.ir import OpKind, Placement
from zbpipe.schedule.registry import Algorithm, resolve
from zbpipe.simulator.offloading import Offload

logger = logging.getLogger(__name__)


def require_sense(algorithm: Algorithm, options: Options, spell: checks.Spell, *, will_run: bool = True) -> None:
    """Refuse options that do not fit the schedule, or that name an unwritable file."""
    # A job without a pipeline (not `will_run`) writes no file.
    name = algorithm.name
    require_options(algorithm, options.select_for("torch"))
    if options.memory_limit is not None:
        algorithm.require_limits(spell("memory_limit"))
    if algorithm.source == "torch" and options.select_for("zbpipe", "job of zbpipe"):
        raise ValueError(
            f"torch's {name} takes only the options that torch also has: omit the others, such as"
            f" {spell('split_backward')}, {spell('defer_loss')} and {spell('check_gradients')}, or use one of zbpipe's"
            " schedules, for example ZB, which stays within 1F1B's memory"
        )
    checks.read_receives(options.receives, options.select_for("torch"))
    if not will_run:
        return
    if options.costs_out and not (options.profile_steps or algorithm is AutoSchedule.algorithm):
        raise ValueError(
            f"{spell('costs_out')} {options.costs_out} needs measured costs: set {spell('profile_steps')} to the number"
            f" of steps to measure with {name}, or use the schedule Auto"
        )
    _require_files(options, spell)
    if options.offload:
        _require_offload(algorithm, options, spell)
    if options.compare_with is not None:
        compared = algorithm, resolve(options.compare_with)
        if options.profile_steps or AutoSchedule.algorithm in compared:
            raise ValueError(
                f"{spell('compare_with')} {options.compare_with} times whole steps: omit {spell('profile_steps')}, and"
                " name another schedule than Auto, which measures by itself"
            )


def require_size(
    algorithm: Algorithm, options: Options, placement: Placement, n_microbatches: int, spell: checks.Spell
) -> None:
    """Raise ValueError for a memory limit that is too low for this size, a cost file for other stages, or a schedule
    without I and W to time."""
    num_ranks = placement.num_ranks
    known = None if options.costs_file is None else costs_file.load_costs(options.costs_file)
    if known:
        _require_stages(known, options, placement, spell)
    if limit := MemoryLimit.parse(options.memory_limit):
        # Without a cost file, working memory is unknown until the schedule is built. So refuse only a limit below the
        # activations.
        costs = known.on(placement) if known else CostModel.uniform(placement)
        with limit.explain(costs, num_ranks, n_microbatches):
            require_room(placement, costs, limit.resolve(costs, num_ranks, n_microbatches), f" for {algorithm.name}")
    if options.profile_steps:
        schedule = algorithm.make_on(placement, n_microbatches)
        if schedule is not None and OpKind.I not in schedule.kinds:
            raise ValueError(
                f"{spell('profile_steps')} times I and W, but {algorithm.name} runs whole backwards: measure with Auto,"
                " which needs about 1F1B's memory"
            )


def require_steps(algorithm: Algorithm, options: Options, steps: int, spell: checks.Spell) -> None:
    timed = options.profile_steps
    if timed is None and algorithm is AutoSchedule.algorithm and options.costs_out:
        timed = USUAL_STEPS
    steps_needed = {
        "profile_steps": timed + WARM_UP + 1 if timed else 0,
        "trace_step": options.trace_step if options.trace else 0,
        "check_gradients": options.check_gradients or 0,
        "compare_with": COMPARED_FROM + 2 * options.compare_steps if options.compare_with else 0,
    }
    for option, needed in steps_needed.items():
        if needed > steps:
            raise ValueError(
                f"{spell(option)} needs {needed} steps, but training.steps={steps}: lower it, or train longer"
            )


def _require_offload(algorithm: Algorithm, options: Options, spell: checks.Spell) -> None:
    asked = f"{spell('offload')} {options.offload}"
    if options.optimizer_step == "validated":
        raise ValueError(
            f"{asked} and {spell('optimizer_step')} validated exclude each other: schedules with copies to the host"
            " cannot run ahead of an optimizer step; omit one of them"
        )
    checks.require_offload(Offload.read(options.offload), options.split_backward, spell)
    if options.costs_file is None and algorithm is not AutoSchedule.algorithm:
        raise ValueError(
            f"{asked} needs the times of the stages and of copies to the host: give {spell('costs_file')} a file that"
            f" {spell('costs_out')} has written, or use the schedule Auto, which measures them itself"
        )


def _require_stages(found: JobCosts, options: Options, placement: Placement, spell: checks.Spell = str) -> None:
    named = f"{spell('costs_file')} {options.costs_file}"
    if not isinstance(found.costs, CostModel):
        raise ValueError(
            f"{named} has the costs of layers, and a schedule needs those of its stages: measure the job with"
            f" {spell('profile_steps')} and {spell('costs_out')}, or plan for the layers (`zbpipe plan --costs-file`)"
            " and use the plan's CSV file as the schedule"
        )
    theirs = found.placement.rank_of if found.placement else None
    if found.costs.num_stages != placement.num_stages or theirs not in (None, placement.rank_of):
        where = f"stages on the ranks {list(theirs)}" if theirs else f"{found.costs.num_stages} stages"
        raise ValueError(
            f"{named} is for {where}, but the schedule has its stages on the ranks {list(placement.rank_of)}: measure"
            " with a schedule that has this placement"
        )
    if options.offload and found.costs.host is None:
        raise ValueError(
            f"{named} has no bandwidth to the host, which {spell('offload')} needs: measure it again with"
            f" {spell('costs_out')}, or add [host] and a line such as bandwidth = 25e9, in bytes per second"
        )


def _require_files(options: Options, spell: checks.Spell) -> None:
    files = {"costs_out": options.costs_out, "trace": options.trace}
    for option, file in files.items():
        if file is None:
            continue
        try:
            if option == "costs_out":
                costs_file.require_ending(file)
            # Only the first rank writes. Other machines may lack that folder.
            if os.environ.get("RANK", "0") == "0":
                checks.require_writable(file)
        except ValueError as error:
            raise ValueError(f"{spell(option)}: {error}") from None


def build(
    algorithm: Algorithm,
    stages: PipelineStage | Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Tensor] | None,
    options: Options,
    **more: Any,
) -> pipelining.PipelineSchedule:
    """The schedule with `options`. The job's arguments, `more`, take precedence."""
    own = options.select_for("torch", "zbpipe")
    if options.costs_file is not None:
        stages, placement = checks.place_stages(stages, algorithm)
        known = costs_file.load_costs(options.costs_file)
        _require_stages(known, options, placement)
        own = {"transport": known.transport, **own, "costs": known.costs}
    if algorithm is AutoSchedule.algorithm:
        own |= options.select_for("auto")
        own["measured"] = partial(log_costs, file=options.costs_out)
    return build_pipeline_schedule(algorithm, stages, n_microbatches, loss_fn, **own | more)


def attach(schedule: pipelining.PipelineSchedule, options: Options) -> None:
    """Attach the tools in `options`: a profiler (not to `AutoSchedule`, which has its own), a trace, a gradient check,
    and a comparison."""
    if options.check_gradients:
        GradientCheck(schedule, options.check_gradients)
    if options.profile_steps and not isinstance(schedule, AutoSchedule):
        Profiler(schedule, options.profile_steps, done=partial(log_costs, file=options.costs_out))
    if options.compare_with is not None:
        assert isinstance(schedule, RegisteredSchedule), "the option is refused for torch's"
        compare_in_turn(schedule, resolve(options.compare_with), options.compare_steps)
    if options.trace:
        write_trace(schedule, options.trace, options.trace_step, done=partial(log_visibly, logger))
