"""zbpipe's own command line arguments, besides TorchTitan's: all begin with `--zbpipe.`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

from zbpipe.runtime.options import IMPORTED, OptimizerSteps, Options, add_arguments, from_arguments
from zbpipe.user_code import import_modules

_PREFIX = "--zbpipe."


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """zbpipe's options, and the arguments that are left for TorchTitan.

    >>> options, rest = parse(["--training.steps", "10", "--zbpipe.trace", "step.json"])
    >>> options.trace, rest
    ('step.json', ['--training.steps', '10'])

    An unknown argument that begins with `--zbpipe.` ends the program with an error, as in TorchTitan's parser. Modules
    that `--zbpipe.import` names are imported.
    """
    parser = _parser()
    found, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if argument.startswith(_PREFIX):
            parser.error(f"unknown argument {argument}")
    try:
        import_modules(found.imported)
    except ValueError as error:
        parser.error(str(error))
    return from_arguments(vars(found)), rest


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether TorchTitan's parser will show its help and end the program."""
    return "-h" in arguments or "--help" in arguments


def help_text() -> str:
    """zbpipe's options, each with a sentence."""
    return _parser().format_help()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=f"python -m zbpipe.titan.train [{_PREFIX}OPTION ...] [TorchTitan's arguments]",
        description="Train with TorchTitan, whose pipeline_parallel_schedule also takes zbpipe's names, CSV files and"
        " Auto.",
        allow_abbrev=False,
        add_help=False,
    )
    add = add_arguments(parser, _PREFIX)
    add(f"{_PREFIX}import", **IMPORTED)
    add(
        f"{_PREFIX}optimizer-step",
        dest="optimizer_step",
        choices=get_args(OptimizerSteps),
        default=Options.optimizer_step,
        help="Whether all ranks wait for the norm of the gradients before they step the optimizer (synchronous), or"
        " step when they are done, and validate the norm while the next step begins (validated). Default: %(default)s.",
    )
    return parser
