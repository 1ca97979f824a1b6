"""The options of a job. A field of `Options` defines each once, with its help text and its command-line form."""

# ruff: noqa: RUF009 -- `_option` is `dataclasses.field` with this project's metadata

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from functools import partial
from typing import Any, Literal, get_args

from zbpipe.costs.job import AS_1F1B, SPELLINGS, MemoryLimit, MemoryLimitLike
from zbpipe.costs.model import FillWaits, Receives, Transport
from zbpipe.costs.numbers import set_fields
from zbpipe.runtime import checks
from zbpipe.runtime._torch.fsdp2 import FsdpMode
from zbpipe.runtime.split.stage import SplitBackward
from zbpipe.schedule.ir import require_whole
from zbpipe.schedule.registry import resolve
from zbpipe.schedule.user_code import import_modules
from zbpipe.simulator.offloading import Offload

OptimizerSteps = Literal["synchronous", "validated"]
"""Optimizer steps: all ranks wait for the norm of all gradients, or continue and validate it later."""

_Taker = Literal["torch", "zbpipe", "auto", "job", "job of zbpipe", "trainer"]
"""User of an option: torch's and zbpipe's schedules, zbpipe's only, `Auto` only, `job_schedule`, or a plug with the
job's trainer. `job_schedule` builds the schedule and attaches its tools, some only to zbpipe's schedules.
docs/options.md lists the fields in this order."""


def _option(taker: _Taker, text: str, *, default: Any = None, check: Any = None, **how: Any) -> Any:
    """A field of `Options`.

    Args:
        taker: see `_Taker`.
        text: help text, with `{prefix}` before names of options.
        default: default of the field.
        check: function of name and value that raises ValueError.
        how: arguments for argparse.
    """
    return field(default=default, metadata={"taker": taker, "text": text, "check": check, "how": how})


_torchs = partial(_option, "torch")
_zbpipes = partial(_option, "zbpipe")
_autos = partial(_option, "auto")
_jobs = partial(_option, "job")
_trainers = partial(_option, "trainer")


def _list_words(kind: type[StrEnum]) -> list[str]:
    return [each.replace(" ", "-") for each in kind]


def _one_of(kind: Any) -> dict[str, Any]:
    words = get_args(kind)
    return {"choices": words, "check": partial(checks.require_one_of, known=words)}


def _require_count(name: str, value: object) -> None:
    if value is not None:
        require_whole(1, **{name: value})


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _parse_positive(text: str) -> int:
    if not _parse_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _parse_lookahead(text: str) -> str | tuple[int, ...]:
    return text if text in ("full", "auto") else tuple(map(_parse_count, text.split(",")))


_COUNT: Mapping[str, Any] = {"metavar": "N", "type": _parse_count}
_FLAG: Mapping[str, Any] = {"action": "store_true", "check": checks.require_yes_or_no}
_FILE: Mapping[str, Any] = {"metavar": "FILE", "check": checks.require_path}
_STEPS: Mapping[str, Any] = {"metavar": "N", "type": _parse_positive, "check": _require_count}


@dataclass(frozen=True)
class Options:
    """The options of a job's schedule, besides the schedule's name. None selects the schedule's default.

    Raises:
        TypeError: a value of another type.
        ValueError: an invalid value. torch checks the values of its own options when the schedule is built.
    """

    split_backward: SplitBackward = _zbpipes(
        "The backward split: zbpipe's (deferred), the same with an error for stages that defer nothing (strict), or"
        " torch's own (autograd).",
        default="deferred",
        **_one_of(SplitBackward),
    )
    defer_loss: bool = _zbpipes(
        "Defer to W also the weight gradients of a backward that the loss runs, such as a chunked loss's LM head. The"
        " gradients of all logits of a microbatch stay in memory until then.",
        default=False,
        **_FLAG,
    )
    check_gradients: int | None = _option(
        "job of zbpipe",
        "Compare the split's gradients with those of an ordinary backward in the first N steps (docs/the-split.md).",
        **_STEPS,
    )
    profile_steps: int | None = _autos(
        "Measure times and memory of the stages in N steps, and log a table. Needs a schedule with I and W. For Auto,"
        " the number of steps that it times.",
        **_STEPS,
    )
    costs_out: str | None = _jobs(
        "Write the measured costs, with links and the bandwidth to the host, to this .json or .toml file for `zbpipe"
        " plan` (docs/costs-file.md).",
        **_FILE,
    )
    compare_with: str | None = _option(
        "job of zbpipe",
        "Alternate this schedule and the job's own step by step, and log both times and the difference. Both need the"
        " same stages on each rank. Losses stay the same (docs/logs.md).",
        metavar="NAME",
        check=lambda name, value: value is None or resolve(value),
    )
    compare_steps: int = _jobs("Timed steps of each schedule for {prefix}compare-with.", default=5, **_STEPS)
    memory_limit: MemoryLimitLike | None = _zbpipes(
        f"For ZB, ZBLoop and Auto, the memory limit of a rank: {SPELLINGS}. Without a cost file, only the first two"
        f" forms are known. Default: {AS_1F1B.written}; more"
        " where the step would be longer than Interleaved1F1B's (docs/choosing.md).",
        metavar="X",
    )
    trace: str | None = _jobs("Write a trace of one step, with all ranks, to this file for ui.perfetto.dev.", **_FILE)
    trace_step: int = _jobs("Number of the step that {prefix}trace records, from 1.", default=3, **_STEPS)
    costs_file: str | None = _option(
        "job of zbpipe",
        "Make the schedule for the stages' costs in this file, which an earlier job has measured and written. Only"
        " `zbpipe plan` uses the file's memory_limit (docs/costs-file.md).",
        **_FILE,
    )
    offload: Offload | str | bool | None = _zbpipes(
        "Offload deferred gradients (pairs), activations, or both (all) to host memory, as much as fits without slowing"
        " the step. Needs {prefix}costs-file, or the schedule Auto (docs/memory.md).",
        choices=_list_words(Offload),
        check=lambda name, value: Offload.read(value),
    )
    receives: str | None = _zbpipes(
        "When ranks post their receives. Default: as in the shortest simulated step (docs/messages.md).",
        choices=_list_words(Receives),
    )
    transport: Transport | None = _zbpipes(
        "Which messages wait for each other. Default: measured after the first step (docs/messages.md).",
        choices=_list_words(Transport),
    )
    max_outstanding_sends: int | None = _torchs(
        "torch's option: the number of unfinished sends that a rank may have.",
        **_COUNT,
    )
    optimizer_step: OptimizerSteps = _trainers(
        "When ranks step the optimizer: synchronous waits for the norm of all gradients. validated steps at once, and"
        " validates the norm while the next step begins (docs/optimizer-step.md).",
        default="synchronous",
        **_one_of(OptimizerSteps),
    )
    fsdp_mode: FsdpMode = _zbpipes(
        "When FSDP communicates. overlap: gather during the stage's first F, reduce during its last W or B. torch:"
        " gather before the first F, and reduce after the last W or B. reshard: gather each module for each F and"
        " backward, and free it afterwards.",
        default="overlap",
        **_one_of(FsdpMode),
    )
    max_active_stages: int | None = _torchs(
        "torch's option: the number of stages whose weights FSDP keeps gathered at a time.",
        **_COUNT,
    )
    unshard_lookahead: str | tuple[int, ...] | None = _torchs(
        "torch's option: the number of stages for which FSDP gathers weights ahead: full, auto, or a number per rank.",
        type=_parse_lookahead,
        metavar="N,N,...",
    )
    defer_reduce_grad_wait: bool | None = _torchs(
        "torch's option: delay the wait for FSDP's reduction of a stage until the next stage reduces.",
        action="store_true",
    )
    fill_waits: FillWaits = _zbpipes(
        "While an op waits for a collective of tensor, expert or context parallelism, run products of W. own: in I and"
        " B, those of the op's stage. all: also in F, those of all the rank's stages. Not in compiled blocks;"
        " untried on GPUs (docs/the-split.md).",
        default="off",
        **_one_of(FillWaits),
    )
    plain: bool = _zbpipes(
        "To find a fault, turn off what GPUs run differently from CPUs: events after computations, fused W, W of"
        " compiled regions, FSDP during computations, and offload (docs/trouble.md).",
        default=False,
        **_FLAG,
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            if check := each.metadata["check"]:
                check(each.name, getattr(self, each.name))
        limit = MemoryLimit.parse(self.memory_limit, costs_are_known=self.costs_file is not None)
        transport = None if self.transport is None else Transport.parse(self.transport)
        set_fields(self, memory_limit=limit, transport=transport)

    def select_for(self, *takers: _Taker) -> dict[str, Any]:
        """Keyword arguments for these takers that differ from the defaults."""
        taken = (each for each in fields(self) if each.metadata["taker"] in takers)
        given = {each.name: (getattr(self, each.name), each.default) for each in taken}
        return {name: value for name, (value, default) in given.items() if value != default}


def list_options(*, steps_optimizer: bool) -> Iterator[Field[Any]]:
    """The options as fields. Trainer options are included only if the plug steps the job's optimizer."""
    return (each for each in fields(Options) if steps_optimizer or each.metadata["taker"] != "trainer")


def help_of(option: Field[Any], prefix: str) -> str:
    default = f" Default: {option.default}." if option.default not in (None, False) else ""
    return str(option.metadata["text"]).format(prefix=prefix) + default


IMPORT_HELP = "Import this module first, which registers schedules; it may be in the current folder."


def add_arguments(parser: argparse.ArgumentParser, prefix: str = "--", *, steps_optimizer: bool = False) -> None:
    """Add an argument for each option to `parser`, in a group of their own."""
    group = parser.add_argument_group("zbpipe's options")
    for each in list_options(steps_optimizer=steps_optimizer):
        group.add_argument(
            f"{prefix}{each.name.replace('_', '-')}",
            dest=each.name,
            default=each.default,
            help=help_of(each, prefix).replace("%", "%%"),
            **each.metadata["how"],
        )
    group.add_argument(
        f"{prefix}import", dest="imported", action="append", default=[], metavar="MODULE", help=IMPORT_HELP
    )


def from_arguments(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> Options:
    """The options among a parser's `values` (see `add_arguments`). Imports the modules that they name."""
    # Invalid values end the program with an error.
    try:
        import_modules(values["imported"])
        return Options(**{each.name: values[each.name] for each in fields(Options) if each.name in values})
    except (TypeError, ValueError) as error:
        parser.error(str(error))
