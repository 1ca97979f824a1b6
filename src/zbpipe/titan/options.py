"""zbpipe's own command line arguments beside TorchTitan's: all begin with `--zbpipe.`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from zbpipe.runtime.stages import SplitBackward


@dataclass(frozen=True)
class Options:
    """What a job says about zbpipe's schedules, beside the schedule's name."""

    split_backward: SplitBackward = "deferred"
    defer_loss: bool = False


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """zbpipe's options, and what is left for TorchTitan.

    An unknown argument that begins with `--zbpipe.` ends the program with an error, as TorchTitan's parser does.
    """
    parser = argparse.ArgumentParser(prog="zbpipe.titan.train", allow_abbrev=False, add_help=False)
    parser.add_argument(
        "--zbpipe.split-backward", dest="split_backward", choices=get_args(SplitBackward), default="deferred"
    )
    parser.add_argument("--zbpipe.defer-loss", dest="defer_loss", action="store_true")
    found, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if argument.startswith("--zbpipe."):
            parser.error(f"unknown argument {argument}; there are --zbpipe.split-backward and --zbpipe.defer-loss")
    return Options(**vars(found)), rest
