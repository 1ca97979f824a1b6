"""What the commands share: one-line errors, options, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from zbpipe.costs import MOST, is_amount
from zbpipe.transport import Transport

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _UserError(click.ClickException):
    """What the user can put right: one line, exit code 2."""

    exit_code = 2


@contextmanager
def in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """The one place where errors of these kinds become messages. A broken pipe is none: click ends quietly on it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        raise _UserError(_message(error)) from None


def _message(error: Exception) -> str:
    if isinstance(error, click.UsageError):
        where = f" See `{error.ctx.command_path} --help`." if error.ctx else ""
        return one_line(error.format_message()).removesuffix(".") + "." + where
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; name a file in a folder that exists and is yours to write to"
    return one_line(str(error))


def one_line(text: str) -> str:
    return " ".join(text.split())


class Group(click.Group):
    """A group that reports misuse of itself and its commands in one line."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with in_one_line(click.UsageError):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with in_one_line(click.UsageError):
            return super().invoke(ctx)


class Command(click.Command):
    """A command that ends with one line if the library refuses what it was given."""

    def invoke(self, ctx: click.Context) -> Any:
        with in_one_line(ValueError, OSError):
            return super().invoke(ctx)


class Times(NamedTuple):
    """What a rank takes for one microbatch, in seconds."""

    f: float
    i: float
    w: float


def _times(context: click.Context, option: click.Parameter, text: str) -> Times:
    """What `--costs` says."""
    try:
        times = Times(*map(float, text.split(",")))
    except (TypeError, ValueError):
        raise click.BadParameter(f"{text!r} is not three numbers; write for example 1,1,0.8") from None
    # Pictures divide by the longest.
    if not all(map(is_amount, times)) or max(times) < 1 / MOST:
        raise click.BadParameter(
            f"{text!r} has no three times from zero to {MOST:g}, one above zero; write for example 1,1,0.8"
        )
    return times


def _transport(context: click.Context, option: click.Parameter, text: str) -> Transport:
    """What `--transport` says."""
    try:
        return Transport.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def amount(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not is_amount(value):
        raise click.BadParameter(f"{value} is no amount; write a number from zero to {MOST:g}, for example 0.5")
    return value


def options(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Several options as one decorator, in the order in which `--help` lists them."""

    def add(command: _Function) -> _Function:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class OutputFile(click.Path):
    """A file to write when all work is done: refused before it begins if that cannot be."""

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
                self.fail(f"{str(file)!r} is in no folder that exists and is yours to write to", param, ctx)
        except OSError as error:
            self.fail(f"{str(file)!r} cannot be written: {error.strerror}", param, ctx)
        return file


COUNT = click.IntRange(min=1)
name_argument = click.argument("name")
size_options = options(
    click.option("-p", "--ranks", type=COUNT, metavar="P", help="Pipeline ranks. A CSV file says it itself."),
    click.option(
        "-m", "--microbatches", type=COUNT, metavar="M", help="Microbatches per step. A CSV file says it itself."
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
    help="Stages on each rank, for the schedules that take any number; default: the schedule's own.",
)
cost_options = options(
    click.option(
        "--costs",
        metavar="F,I,W",
        callback=_times,
        default="1,1,1",
        show_default=True,
        help="Seconds (or any one unit) that a rank takes for F, I and W of one microbatch.",
    ),
    click.option(
        "--comm",
        type=float,
        callback=amount,
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
    " (AMD's worst case). Receives stand where they are best.",
)
memory_limit_option = click.option(
    "--memory-limit",
    type=float,
    callback=amount,
    metavar="X",
    help="The most activations that a rank can hold; 1 is its share of one microbatch, 1F1B holds p.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))
