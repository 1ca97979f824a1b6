"""zbpipe's schedules in Primus' TorchTitan: give this file to primus-cli in place of its own script.

    primus-cli direct --script .../zbpipe_patch.py -- train pretrain --config experiment.yaml

The experiment's `parallelism.pipeline_parallel_schedule` then takes zbpipe's names, and beside TorchTitan's sections
`zbpipe` takes a line with zbpipe's arguments.
"""

from __future__ import annotations

import logging
import shlex

from primus.cli.main import main
from primus.core.patches import PatchContext, get_param, register_patch

from zbpipe import titan
from zbpipe.runtime.options import Options
from zbpipe.titan import command_line

_LAST = 1000
"""Primus' own have 50: TorchTitan must not be imported before they have put their parts into it."""


@register_patch(  # type: ignore[untyped-decorator]
    "torchtitan.zbpipe.schedules",
    backend="torchtitan",
    phase="setup",
    priority=_LAST,
    description="zbpipe's schedules for parallelism.pipeline_parallel_schedule",
)
def plug_in(ctx: PatchContext) -> None:
    """Runs in every process, before TorchTitan's trainer is made.

    Raises:
        SystemExit: the arguments are wrong, or this TorchTitan is none that zbpipe knows.
    """
    # Primus logs all that any library tells, and numba tells of every step of its compiler when Auto plans.
    logging.getLogger("numba").setLevel(logging.WARNING)
    try:
        titan.plug_in(chosen(get_param(ctx, "zbpipe", "")))
    except Exception as error:
        # Primus logs the exception of a patch and trains without it. This ends the job.
        raise SystemExit(f"zbpipe: {error}") from error


def chosen(line: object) -> Options:
    """zbpipe's options by `line`, such as "--zbpipe.trace step.json --zbpipe.trace-step 5"."""
    found, rest = command_line.parse(shlex.split(str(line)))
    if rest:
        raise ValueError(f"the experiment says zbpipe: {line}. It has to be a line such as --zbpipe.trace-step 5")
    return found


if __name__ == "__main__":
    main()
