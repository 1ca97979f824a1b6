"""The options of a schedule besides its name, in Python and on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, get_args

from zbpipe.ir import require_whole
from zbpipe.offloading import Offload
from zbpipe.runtime import arguments
from zbpipe.runtime.split.stage import SplitBackward
from zbpipe.transport import Receives, Transport

OptimizerSteps = Literal["synchronous", "validated"]
"""How a job steps its optimizer: all ranks wait for the norm of all gradients, or go on and validate it later."""


@dataclass(frozen=True)
class ForTorch:
    """Options that both torch's schedules and zbpipe's have; None leaves the schedule's default."""

    max_active_stages: int | None = None
    unshard_lookahead: str | tuple[int, ...] | None = None
    defer_reduce_grad_wait: bool | None = None
    max_outstanding_sends: int | None = None

    def given(self) -> dict[str, Any]:
        """The options that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Options:
    """The options of a job's schedule, besides the schedule's name.

    Raises:
        ValueError: a value of the wrong kind. torch judges the values of `for_torch` when the schedule is built.
    """

    split_backward: SplitBackward = "deferred"
    """How I and W share the backward."""
    defer_loss: bool = False
    """Whether weight gradients of backwards that the loss runs itself wait for W, too."""
    receives: str | None = None
    """When ranks post their receives; None for what is best with the transport."""
    transport: str | None = None
    """What messages wait for; None for what is usual on the device."""
    for_torch: ForTorch = field(default_factory=ForTorch)
    """The options that torch's schedules have, too."""
    profile_steps: int | None = None
    """The number of steps to time; None measures nothing, or with `Auto` its usual number."""
    costs_out: str | None = None
    """The file for the measured costs."""
    memory_limit: float | str | None = None
    """For `ZBVLean`, `ZBH1Lean` and `Auto`: what a rank may hold, in microbatches of an average rank's share of the
    model, or as a multiple of 1F1B's memory, such as "1.2x"."""
    costs_file: str | None = None
    """The file with measured costs, for which the schedule is made."""
    offload: Offload | str | bool | None = None
    """What goes to the host's memory while it waits; None for nothing."""
    trace: str | None = None
    """The file for a trace of one step."""
    trace_step: int = 3
    """The step to trace, counted from 1."""
    check_gradients: int | None = None
    """The number of steps in which the split is compared with an ordinary backward; None compares nothing."""
    plan_out: str | None = None
    """For `Auto`: the CSV file for a plan that places stages otherwise, if that would be faster."""
    optimizer_step: OptimizerSteps = "synchronous"
    """Whether all ranks wait for each other in the optimizer step; a framework's plug may have the other way."""

    def __post_init__(self) -> None:
        if self.split_backward not in get_args(SplitBackward):
            known = ", ".join(map(repr, get_args(SplitBackward)))
            raise ValueError(f"split_backward={self.split_backward!r} is unknown: use one of {known}")
        if self.optimizer_step not in get_args(OptimizerSteps):
            known = " or ".join(map(repr, get_args(OptimizerSteps)))
            raise ValueError(f"optimizer_step={self.optimizer_step!r} is unknown: use {known}")
        arguments.require_yes_or_no("defer_loss", self.defer_loss)
        arguments.require_path("costs_out", self.costs_out)
        arguments.require_path("costs_file", self.costs_file)
        arguments.require_path("plan_out", self.plan_out)
        Offload.parse(self.offload)
        arguments.require_path("trace", self.trace)
        steps = {"profile_steps": self.profile_steps, "check_gradients": self.check_gradients}
        given = {name: number for name, number in steps.items() if number is not None}
        require_whole(1, trace_step=self.trace_step, **given)
        arguments.limit(self.memory_limit)

    def for_zbpipe(self) -> dict[str, Any]:
        """The keyword arguments that only zbpipe's schedules have."""
        names = ("split_backward", "defer_loss", "receives", "transport", "memory_limit", "offload")
        return {name: getattr(self, name) for name in names}

    def for_auto(self) -> dict[str, Any]:
        """The keyword arguments that only `Auto` has."""
        names = ("profile_steps", "plan_out")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def need_zbpipes_schedule(self) -> bool:
        """Whether an option is set that torch's own schedules do not have."""
        given = (self.check_gradients, self.costs_file)
        return self.for_zbpipe() != Options().for_zbpipe() or any(each is not None for each in given)


IMPORTED: Mapping[str, Any] = {
    "dest": "imported",
    "action": "append",
    "default": [],
    "metavar": "MODULE",
    "help": "Import this module first, which registers schedules; it may be in the current folder.",
}
"""The argument of both command lines that names modules of the user's."""


def from_arguments(values: Mapping[str, Any]) -> Options:
    """The options among the parsed `values` of a parser that has `add_arguments`."""
    for_torch = ForTorch(**{each.name: values[each.name] for each in fields(ForTorch)})
    own = {each.name: values[each.name] for each in fields(Options) if each.name in values}
    return Options(**own, for_torch=for_torch)


def add_arguments(parser: argparse.ArgumentParser, prefix: str = "--") -> Callable[..., Any]:
    """Make `parser` take an argument for each option, in a group of its own; returns what adds more to it."""
    group = parser.add_argument_group("zbpipe's options")

    def add(name: str, **how: Any) -> None:
        group.add_argument(f"{prefix}{name.replace('_', '-')}", dest=name, **how)

    add(
        "split_backward",
        choices=get_args(SplitBackward),
        default=Options.split_backward,
        help="How I and W share the backward: zbpipe's split (deferred), the same but an error for a stage with nothing"
        " to defer (strict), or torch's own split (autograd). Default: %(default)s.",
    )
    add(
        "defer_loss",
        action="store_true",
        help="Defer to W also the weight gradients of backwards that the loss runs, such as a chunked loss's LM head.",
    )
    add(
        "receives",
        choices=_words(Receives),
        help="Where ranks post their receives. Default: where the simulated step is the shortest.",
    )
    add(
        "transport",
        choices=_words(Transport),
        help="What messages wait for. Default: what is usual on the device.",
    )
    _add_torchs(add)
    _add_measurements(add, prefix)
    return group.add_argument


def _add_measurements(add: Callable[..., None], prefix: str) -> None:
    add("profile_steps", type=_positive, metavar="N", help="Measure times and memory of the stages in N steps.")
    add("costs_out", metavar="FILE", help="Write the measured costs to this .json or .toml file, for `zbpipe plan`.")
    add(
        "memory_limit",
        type=_limit,
        metavar="X",
        help="For ZBVLean, ZBH1Lean and Auto: what a rank may hold, as a multiple of 1F1B's memory, such as 1.2x, or in"
        " microbatches of an average rank's share of the model.",
    )
    add(
        "check_gradients",
        type=_positive,
        metavar="N",
        help="Compare the split's gradients with those of an ordinary backward in the first N steps.",
    )
    add(
        "costs_file",
        metavar="FILE",
        help="Make the schedule for the stages' costs in this file, as an earlier job has measured and written them.",
    )
    add(
        "offload",
        choices=_words(Offload),
        help="Copy to the host's memory what waits for W (pairs), for I (activations), or both (all). It needs"
        f" {prefix}costs-file, or the schedule Auto.",
    )
    add(
        "plan_out",
        metavar="FILE",
        help="For Auto: if another placement of the stages would be faster, write its plan to this CSV file, which the"
        " next start takes as its schedule.",
    )
    add("trace", metavar="FILE", help="Write what every rank did in one step to this file, for ui.perfetto.dev.")
    add(
        "trace_step",
        type=_positive,
        default=Options.trace_step,
        metavar="N",
        help=f"The step that {prefix}trace records, counted from 1. Default: %(default)s.",
    )


def _add_torchs(add: Callable[..., None]) -> None:
    add(
        "max_active_stages",
        type=_count,
        metavar="N",
        help="torch's option: the number of stages whose weights FSDP holds gathered at a time.",
    )
    add(
        "unshard_lookahead",
        type=_lookahead,
        metavar="full|auto|N,N,...",
        help="torch's option: how many stages ahead FSDP gathers weights, on each rank.",
    )
    add(
        "defer_reduce_grad_wait",
        action="store_true",
        default=None,
        help="torch's option: wait for FSDP's reduction of a stage only when the next stage reduces.",
    )
    add(
        "max_outstanding_sends",
        type=_count,
        metavar="N",
        help="torch's option: the number of sends that a rank may have under way.",
    )


def _words(kind: type[StrEnum]) -> list[str]:
    return [each.replace(" ", "-") for each in kind]


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _limit(text: str) -> float | str:
    try:
        found = arguments.limit(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor such a multiple as 1.2x") from None
    return found.amount if found and not found.unit else text


def _lookahead(text: str) -> str | tuple[int, ...]:
    return text if text in ("full", "auto") else tuple(map(_count, text.split(",")))
