"""`python -m zbpipe.titan.train`: TorchTitan's trainer, whose schedule field also takes zbpipe's names.

It takes the arguments of `torchtitan.train` and zbpipe's own, which `--help` shows:

    torchrun ... -m zbpipe.titan.train --module llama3 --config llama3_debugmodel \\
        --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZBV ...

torchtitan 0.2.2 takes `--job.config_file FILE` or `--model.name llama3` instead of module and config.
"""

from __future__ import annotations

import gc
import os
import sys
from itertools import pairwise

import zbpipe.titan
from zbpipe.schedule import registry, user_code
from zbpipe.schedule.garbage import importing

_SCHEDULE = "--parallelism.pipeline_parallel_schedule"


def main() -> None:
    """Train as `torchtitan.train` does, with zbpipe's schedules.

    Raises:
        ImportError: zbpipe does not know the installed TorchTitan.
        SystemExit: the command line names an unknown schedule.
        ValueError: TorchTitan or zbpipe refuses the job.
        PipelineError: a step or another rank failed. Other exceptions of the job pass as they are.
    """
    try:
        _require_known_schedule(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"ValueError: {error}")  # no traceback, because all ranks print the same
    user_code.require_torch("python -m zbpipe.titan.train")
    from torch.distributed.elastic.multiprocessing.errors import record  # not before: torch is imported for seconds

    from zbpipe.runtime.ranks.failures import end_at_once

    with end_at_once():
        record(_train)()  # writes torchrun's file with the error before the process ends


def _require_known_schedule(arguments: list[str]) -> None:
    given = dict(pairwise(arguments)) | dict(each.split("=", 1) for each in arguments if "=" in each)
    name = given.get(_SCHEDULE, "")
    # The user's modules may register schedules, and torch's abstract classes come with a file of TorchTitan's.
    if name and not ("--zbpipe.import" in given or "." in given.get("--module", "") or name.startswith("Pipeline")):
        registry.resolve(name)


def _train() -> None:
    from zbpipe.frameworks.titan.command_line import asks_for_help, help_text, parse
    from zbpipe.runtime.ranks.failures import share_with_other_ranks

    options, sys.argv[1:] = parse(sys.argv[1:])
    if asks_for_help(sys.argv) and os.environ.get("RANK", "0") == "0":
        print(help_text(), flush=True)  # TorchTitan's own help comes after it
    with importing():
        zbpipe.titan.plug_in(options)
        from zbpipe.frameworks.titan import plug  # late: TorchTitan chooses its device at import
    with share_with_other_ranks():
        plug.train()
    # TorchTitan turns garbage collection off and leaves its trainer in reference cycles. The interpreter would free the
    # process groups at its end, which sometimes aborts the process.
    gc.collect()


if __name__ == "__main__":
    main()
