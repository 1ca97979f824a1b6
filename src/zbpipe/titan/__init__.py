"""zbpipe in TorchTitan: `python -m zbpipe.titan.train` in place of `python -m torchtitan.train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbpipe.frameworks.options import Options

_plugged: list[Options] = []


def plug_in(options: Options | None = None) -> None:
    """Make zbpipe's schedules known to TorchTitan in this process, for programs that start its `Trainer` directly.

        options, rest = zbpipe.frameworks.titan.command_line.parse(["--zbpipe.trace", "trace.json"])
        zbpipe.titan.plug_in(options)

    Afterwards `parallelism.pipeline_parallel_schedule` also takes zbpipe's names, CSV files and `Auto`. Call it once on
    every rank, before the `Trainer` is constructed. Without an accelerator it also makes TorchTitan run on the CPU, if
    TorchTitan has not been imported yet.

    With torchtitan 0.2, settings that cannot run are refused before the model is cut into stages. TorchTitan's
    `ConfigManager`, if used, refuses them earlier. With 0.3 the program has to use `ConfigManager`.

    Args:
        options: zbpipe's options, as returned by `zbpipe.frameworks.titan.command_line.parse`.

    Raises:
        ImportError: TorchTitan is not installed, it lacks a name that zbpipe uses, or torch is too old for it.
        ValueError: `options` has another type.
        RuntimeError: it was called before.
    """
    import os
    import sys

    from zbpipe.frameworks.options import Options
    from zbpipe.frameworks.titan import cpu, versions

    if options is not None and not isinstance(options, Options):
        raise ValueError(f"plug_in takes options from zbpipe.frameworks.titan.command_line.parse, got {options!r}")
    if _plugged:
        raise RuntimeError("zbpipe is already plugged into TorchTitan: call zbpipe.titan.plug_in only once")
    versions.find_installed()
    on_cpu = cpu.is_needed()
    if on_cpu:
        if os.environ.get("RANK", "0") == "0":
            print(cpu.NOTICE, file=sys.stderr, flush=True)
        cpu.stand_in()
    versions.require_names()
    _plugged.append(options or Options())
    from zbpipe.frameworks.titan import plug  # late: TorchTitan chooses its device at import

    plug.plug_in(_plugged[0], on_cpu)
