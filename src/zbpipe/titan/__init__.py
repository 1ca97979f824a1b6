"""zbpipe in TorchTitan: `python -m zbpipe.titan.train` in place of `python -m torchtitan.train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbpipe.runtime.options import Options

_plugged: list[Options] = []


def plug_in(options: Options | None = None) -> None:
    """Teach TorchTitan in this process zbpipe's schedules, for programs that start TorchTitan's `Trainer` themselves.

    Afterwards `parallelism.pipeline_parallel_schedule` takes zbpipe's names, CSV files and `Auto` beside torch's names.
    Call it once, in every rank, before the `Trainer` is constructed. Without an accelerator it also makes the CPU do,
    if TorchTitan has not been imported yet.

    With torchtitan 0.2 settings that cannot run are refused before the model is cut into stages (and already by
    TorchTitan's `ConfigManager`, if the program uses it). With 0.3 the program has to use `ConfigManager`.

    Args:
        options: what stands beside TorchTitan's config. `zbpipe.titan.command_line.parse` makes it from command line
            arguments, such as `["--zbpipe.trace", "trace.json"]`.

    Raises:
        ImportError: TorchTitan is not installed, or zbpipe does not know this version, or torch is too old for it.
        ValueError: the options are something else.
        RuntimeError: it was called before.
    """
    import os
    import sys

    from zbpipe.runtime.options import Options
    from zbpipe.titan import cpu, versions

    if options is not None and not isinstance(options, Options):
        raise ValueError(f"plug_in takes options as zbpipe.titan.command_line.parse makes them, got {options!r}")
    if _plugged:
        raise RuntimeError("zbpipe is plugged into TorchTitan already: call zbpipe.titan.plug_in once")
    version = versions.installed()
    on_cpu = cpu.is_needed()
    if on_cpu:
        if os.environ.get("RANK", "0") == "0":
            print(cpu.NOTICE, file=sys.stderr, flush=True)
        cpu.stand_in()
    _plugged.append(options or Options())
    version.load().plug_in(_plugged[0], on_cpu)
