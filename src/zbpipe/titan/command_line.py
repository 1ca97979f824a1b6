"""zbpipe's own command line arguments beside TorchTitan's: all begin with `--zbpipe.`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zbpipe.runtime.options import Options, add_arguments, from_arguments

_PREFIX = "--zbpipe."


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """zbpipe's options, and what is left for TorchTitan.

    An unknown argument that begins with `--zbpipe.` ends the program with an error, as TorchTitan's parser does.
    """
    parser = argparse.ArgumentParser(prog="zbpipe.titan.train", allow_abbrev=False, add_help=False)
    add_arguments(parser, _PREFIX)
    found, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if argument.startswith(_PREFIX):
            parser.error(f"unknown argument {argument}")
    return from_arguments(vars(found)), rest
