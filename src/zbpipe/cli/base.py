"""What the commands share: one-line errors, options, JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from zbpipe.costs import MOST, is_amount
from zbpipe.transport import Transport

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _UserError(click.ClickException):
    """What the user can mend: one line, exit code 2."""

    exit_code = 2


@contextmanager
def in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into one-line messages; a broken pipe is left to click, which exits quietly."""
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        raise _UserError(_message(error)) from None


def _message(error: Exception) -> str:
    if isinstance(error, click.UsageError):
        where = f" See `{error.ctx.command_path} --help`." if error.ctx else ""
        message = one_line(error.format_message())
        return message + ("" if message.endswith((".", "?")) else ".") + where
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; name a file in a folder that exists and that you can write to"
    return one_line(str(error))


def one_line(text: str) -> str:
    return " ".join(text.split())


class Group(click.Group):
    """A group that reports wrong usage of itself and its commands in one line."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with in_one_line(click.UsageError):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with in_one_line(click.UsageError):
            return super().invoke(ctx)


class Command(click.Command):
    """A command that exits with one line if the library refuses an argument."""

    def invoke(self, ctx: click.Context) -> Any:
        with in_one_line(ValueError, OSError):
            return super().invoke(ctx)


class Times(NamedTuple):
    """How long a rank works on one microbatch, in seconds."""

    f: float
    i: float
    w: float


def _times(context: click.Context, option: click.Parameter, text: str) -> Times:
    """Parse `--costs`."""
    try:
        times = Times(*map(float, text.split(",")))
    except (TypeError, ValueError):
        if text.endswith((".toml", ".json")):
            raise click.BadParameter(f"{text!r} names a file; write `zbpipe plan --costs-file {text}`") from None
        raise click.BadParameter(f"{text!r} is not three numbers; write for example 1,1,0.8") from None
    # Pictures divide by the longest.
    if not all(map(is_amount, times)) or max(times) < 1 / MOST:
        raise click.BadParameter(
            f"{text!r} is not three times from zero to {MOST:g}, one of them above zero; write for example 1,1,0.8"
        )
    return times


def _transport(context: click.Context, option: click.Parameter, text: str) -> Transport:
    """Parse `--transport`."""
    try:
        return Transport.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _seconds(context: click.Context, option: click.Parameter, value: float) -> float:
    """Check `--comm`."""
    if not is_amount(value):
        raise click.BadParameter(f"{value} is no amount; write a number from zero to {MOST:g}, for example 0.5")
    return value


_BYTES = {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}


def _memory(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Parse `--memory-limit`: a number in the unit of the costs, or bytes where these are measured."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(.*?)\s*([kmg]i?b)?\s*", text, re.IGNORECASE)
    number, suffix = match.groups() if match else (text, None)
    try:
        amount = float(number) * _BYTES[(suffix or "").lower()]
    except ValueError:
        amount = -1.0
    if not is_amount(amount):
        raise click.BadParameter(f"{text!r} is no amount; write a number from zero to {MOST:g}, for example 5.5")
    if suffix and context.params.get("costs_file") is None:
        raise click.BadParameter(
            f"{text!r} is in bytes, but nothing here was measured in bytes: write a number, 1 is a rank's share of one"
            " microbatch, or use measured costs with `zbpipe plan --costs-file`"
        )
    return amount


def options(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Several options as one decorator, in the order in which `--help` lists them."""

    def add(command: _Function) -> _Function:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class OutputFile(click.Path):
    """A file to write at the end; a path that cannot be written is refused at the start."""

    def __init__(self, allow_dash: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=allow_dash, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        file = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self.allow_dash and str(file) == "-":
            return file
        try:
            file.stat()
        except (FileNotFoundError, NotADirectoryError):
            if not os.access(file.absolute().parent, os.W_OK | os.X_OK):
                self.fail(f"{str(file)!r} is in no folder that exists and that you can write to", param, ctx)
        except OSError as error:
            self.fail(f"{str(file)!r} cannot be written: {error.strerror}", param, ctx)
        return file


class _Count(click.IntRange):
    name = "whole number"


COUNT = _Count(min=1)
name_argument = click.argument("name")
size_options = options(
    click.option("-p", "--ranks", type=COUNT, metavar="P", help="Pipeline ranks. A CSV file has its own."),
    click.option(
        "-m", "--microbatches", type=COUNT, metavar="M", help="Microbatches per step. A CSV file has its own."
    ),
)
required_size = options(
    click.option("-p", "--ranks", type=COUNT, metavar="P", required=True, help="Pipeline ranks."),
    click.option("-m", "--microbatches", type=COUNT, metavar="M", required=True, help="Microbatches per step."),
)
stages_option = click.option(
    "--stages-per-rank",
    "stages_per_rank",
    type=COUNT,
    metavar="V",
    help="Stages on each rank, for schedules that take any number; default: the schedule's own.",
)
cost_options = options(
    click.option(
        "--costs",
        metavar="F,I,W",
        callback=_times,
        default="1,1,1",
        show_default=True,
        help="Seconds (or any other unit) that a rank takes for F, I and W of one microbatch.",
    ),
    click.option(
        "--comm",
        type=float,
        callback=_seconds,
        default=0.0,
        show_default=True,
        help="Seconds that a transfer between two ranks takes.",
    ),
)
transport_option = click.option(
    "--transport",
    callback=_transport,
    metavar="NAME",
    default="ideal",
    show_default=True,
    help="What messages wait for: ideal, one-queue (as NCCL and RCCL send), queue-per-peer, or shared-with-compute"
    " (AMD's worst case). Receives are posted where they are best.",
)
memory_limit_option = click.option(
    "--memory-limit",
    callback=_memory,
    metavar="X",
    help="Activations that a rank can hold, in the unit of the costs: 1 is a rank's share of one microbatch, of which"
    " 1F1B holds p. With measured costs (`plan --costs-file`) bytes, also as 6500MB or 6.5GiB.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))
