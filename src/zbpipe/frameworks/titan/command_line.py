"""zbpipe's command line arguments, in addition to those of TorchTitan. All begin with `--zbpipe.`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zbpipe.frameworks.options import Options, add_arguments, from_arguments

_PREFIX = "--zbpipe."


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """zbpipe's options, and the remaining arguments for TorchTitan.

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
    return from_arguments(parser, vars(found)), rest


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
    add_arguments(parser, _PREFIX, steps_optimizer=True)
    return parser
