"""zbpipe's schedules in Primus: give this file to primus-cli instead of its own script.

    primus-cli direct --script .../zbpipe_patch.py -- train pretrain --config experiment.yaml

With TorchTitan, the experiment's `parallelism.pipeline_parallel_schedule` then takes zbpipe's names, and a new key
`zbpipe`, besides TorchTitan's sections, takes a line with zbpipe's arguments. With Megatron, `pp_algorithm: zbpipe`
runs the schedule in `zbpipe_schedule`.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from primus.cli.main import main
from primus.core.patches import PatchContext, get_args, get_param, register_patch

from zbpipe import titan
from zbpipe.frameworks import primus_megatron
from zbpipe.frameworks.options import Options
from zbpipe.frameworks.titan import command_line

_LAST = 1000
"""Primus' own patches have 50. They have to run before TorchTitan is imported, so this one comes last."""


@register_patch(  # type: ignore[untyped-decorator]
    "torchtitan.zbpipe.schedules",
    backend="torchtitan",
    phase="setup",
    priority=_LAST,
    description="zbpipe's schedules for parallelism.pipeline_parallel_schedule",
)
def plug_in(ctx: PatchContext) -> None:
    """Called in every process before TorchTitan's trainer is made.

    Raises:
        SystemExit: the arguments are wrong, or zbpipe does not know this TorchTitan.
    """
    # Primus shows the log of every library, and numba logs each step of its compiler when Auto plans.
    logging.getLogger("numba").setLevel(logging.WARNING)
    with ending_the_job():
        titan.plug_in(chosen(get_param(ctx, "zbpipe", "")))


@register_patch(  # type: ignore[untyped-decorator]
    "megatron.zbpipe.schedules",
    backend="megatron",
    phase="build_args",
    priority=_LAST,
    description="zbpipe's schedules for pp_algorithm: zbpipe",
)
def plug_into_megatron(ctx: PatchContext) -> None:
    """Called in every process once Primus has built its arguments.

    Raises:
        SystemExit: the schedule or its settings cannot run.
    """
    with ending_the_job():
        primus_megatron.plug_in(get_args(ctx))


@contextmanager
def ending_the_job() -> Iterator[None]:
    """Primus logs the exception of a patch and trains without it. In this context an exception ends the job."""
    try:
        yield
    except Exception as error:
        raise SystemExit(f"zbpipe: {error}") from error


def chosen(line: object) -> Options:
    """zbpipe's options by `line`, such as "--zbpipe.trace step.json --zbpipe.trace-step 5"."""
    found, rest = command_line.parse(shlex.split(str(line)))
    if rest:
        raise ValueError(f"the experiment's key zbpipe has to be a line such as --zbpipe.trace-step 5, got {line!r}")
    return found


if __name__ == "__main__":
    main()
