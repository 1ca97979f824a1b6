"""`python -m zbpipe.titan.train`: TorchTitan's trainer, whose schedule field also takes zbpipe's names.

It takes the arguments of `torchtitan.train`, and those of `zbpipe.titan.options`:

    torchrun ... -m zbpipe.titan.train --module llama3 --config llama3_debugmodel \\
        --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZBV ...
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from zbpipe.runtime.failures import told_to_other_ranks
from zbpipe.titan import cpu
from zbpipe.titan.check import check
from zbpipe.titan.options import parse


@record
def main() -> None:
    """Train as `torchtitan.train.main` does, with zbpipe's schedules.

    Raises:
        PipelineError: a step failed, or another rank did; other exceptions of the job pass as they are.
    """
    on_cpu = cpu.is_needed()
    if on_cpu:
        if os.environ.get("RANK", "0") == "0":
            print(cpu.NOTICE, file=sys.stderr, flush=True)
        cpu.stand_in()
    plug_in(on_cpu)
    with told_to_other_ranks():
        importlib.import_module("torchtitan.train").main()


def plug_in(on_cpu: bool) -> None:
    """Teach `torchtitan.train` in this process zbpipe's schedules, and the CPU if `on_cpu`."""
    # Only now: torchtitan fixes its device when it is imported.
    import torchtitan.train
    from torchtitan.config import ConfigManager

    from zbpipe.titan import _torchtitan

    class PluggedConfigManager(ConfigManager):  # type: ignore[misc]
        def _load_config(self, args: list[str]) -> tuple[Any, list[str]]:
            config, rest = super()._load_config(args)
            if on_cpu:
                cpu.adapt(config)
            return config, rest

        def parse_args(self, args: list[str] | None = None) -> Any:
            options, rest = parse(sys.argv[1:] if args is None else args)
            config = super().parse_args(rest)
            check(config, options)
            spec = config.model_spec
            if spec is not None and spec.pipelining_fn is not None:
                config.model_spec = replace(spec, pipelining_fn=_torchtitan.pipeline_with(spec.pipelining_fn, options))
            return config

    _torchtitan.report_loss_where_it_is()
    _torchtitan.defer_experts()
    torchtitan.train.ConfigManager = PluggedConfigManager


if __name__ == "__main__":
    main()
