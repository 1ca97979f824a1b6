"""Shared code of the commands: one-line errors, options, JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from zbpipe.costs.model import Transport
from zbpipe.schedule.registry import USUAL_STAGES, schedules
from zbpipe.schedule.user_code import NEEDS_TORCH

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _UserError(click.ClickException):
    """An error that the user can fix: one line, exit code 2."""

    exit_code = 2


@contextmanager
def in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into one-line messages. A broken pipe is left to click, which exits quietly."""
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
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"this command {NEEDS_TORCH}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; name a file in a folder that exists and that you can write to"
    if isinstance(error, ImportError):
        return one_line("; because: ".join(dict.fromkeys(map(str, _with_causes(error)))))
    return one_line(str(error))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it: lazy imports name the module, and their causes what is broken."""
    yield error
    if (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        yield from _with_causes(cause)


def one_line(text: str) -> str:
    return " ".join(text.split())


class Group(click.Group):
    """A group of commands that reports each usage error in one line."""

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


class JobCommand(Command):
    """A command that leaves unknown options to the job's trainer."""

    ignore_unknown_options = True


def parse_with(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """An option's callback that converts its value with `parse`, which raises ValueError for a bad one."""

    def parse_value(context: click.Context, option: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(one_line(str(error)), context, option) from None

    return parse_value


def options(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:

    def add(command: _Function) -> _Function:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def options_of(name: str, kind: type[Any], *added: Any) -> Callable[..., Any]:
    """Decorator for options that the command gets as one argument `name`, of the dataclass `kind`."""

    def add(command: Callable[..., Any]) -> Any:
        @wraps(command)
        def call(**given: Any) -> Any:
            return command(**{name: kind(**{each.name: given.pop(each.name) for each in fields(kind)})}, **given)

        return options(*added)(call)

    return add


EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


class OutputFile(click.Path):
    """A file to write at the end. A path that cannot be written raises an error at the start."""

    def __init__(self, ending: str = "") -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self.ending = ending
        """File name suffix that readers of the file need."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        file = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not str(file).lower().endswith(self.ending):
            self.fail(f"{str(file)!r} has to end in {self.ending}, the suffix of schedule files")
        try:
            file.stat()
        except (FileNotFoundError, NotADirectoryError):
            if not os.access(file.absolute().parent, os.W_OK | os.X_OK):
                self.fail(f"{str(file)!r} cannot be written: its folder is missing or read-only", param, ctx)
        except OSError as error:
            self.fail(f"{str(file)!r} cannot be written: {error.strerror}", param, ctx)
        return file


COUNT = click.IntRange(min=1)
COUNT.name = "whole number"


def complete_name(context: click.Context, option: click.Parameter, typed: str) -> list[CompletionItem]:
    fitting = [each for name, each in schedules().items() if name.startswith(typed.lower())]
    files = [CompletionItem(typed, type="file")] if typed else []
    return [*(CompletionItem(each.name, help=each.summary) for each in fitting), *files]


name_argument = click.argument("name", shell_complete=complete_name)
size_options = options(
    click.option(
        "-p", "--ranks", type=COUNT, metavar="P", help="Pipeline ranks. A CSV file, a cost file or a job has its own."
    ),
    click.option(
        "-m", "--microbatches", type=COUNT, metavar="M", help="Microbatches per step. A CSV file or a job has its own."
    ),
)
stages_option = click.option(
    "--stages-per-rank",
    type=COUNT,
    metavar="V",
    help=f"Stages on each rank, for schedules that take any number. Default: {USUAL_STAGES} for ZB and ZBLoop, or those"
    " of the cost file; the least number for others.",
)
transport_option = click.option(
    "--transport",
    callback=parse_with(Transport.parse),
    metavar="NAME",
    show_default="that of the cost file or the device, else ideal",
    help="Which messages wait for each other: ideal, one-queue (as NCCL and RCCL send), queue-per-peer,"
    " shared-with-compute (AMD's worst case), or blocking (Megatron's interleaved schedule). Receives are posted where"
    " they are best.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A function that replaces the previous progress line, if this is a terminal."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    erase = "\033[K"
    try:
        # The cursor returns to its start, so that the next output overwrites it.
        yield lambda line: click.echo(f"{erase}{line}\r", nl=False, err=True)
    finally:
        click.echo(erase, nl=False, err=True)


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2))
