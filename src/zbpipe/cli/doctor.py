"""`doctor`: all facts for a bug report, as one text."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

import click

from zbpipe.cli.base import EXISTING, Command, OutputFile

_PACKAGES = ("zbpipe", "torch", "torchtitan", "nemo-automodel", "triton", "numpy", "numba")
_VARIABLES = (
    *("MASTER_", "NNODES", "NODE_RANK", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "TORCH", "PYTORCH_", "SLURM_"),
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "CUDA_", "HIP_", "ROCR_", "HSA_", "GPU_", "OMP_", "PYTHONPATH"),
)
"""Prefixes of environment variables that affect a job. No others are printed, because those may hold secrets."""
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_LAST_LINES = 200
_PLUG = "import zbpipe.titan; zbpipe.titan.plug_in(); print('the plug fits')"
_PLUG_SECONDS = 180


@click.command(cls=Command)
@click.option("-o", "--output", type=OutputFile(), metavar="FILE", help="Write the report, to attach it to an issue.")
@click.option(
    "--log",
    type=EXISTING,
    metavar="FILE",
    help=f"Add the last {_LAST_LINES} lines of a job's log.",
)
def doctor(output: Path | None, log: Path | None) -> None:
    """Print the facts for a bug report.

    Lists versions, devices, whether zbpipe fits the installed TorchTitan, and the environment variables of torchrun,
    NCCL, RCCL and gloo. On GPUs it also trains tiny pipelines, to try what GPUs run differently from CPUs. Run it where
    the job runs. Read the report before you send it: it has host names and paths.

    \b
    Example:
      zbpipe doctor -o report.txt --log job.log
    """
    text = "\n".join(_lines(log)) + "\n"
    click.echo(text, nl=False)
    if output is not None:
        output.write_text(text, encoding="utf-8")
        click.echo(f"wrote {output}: send it to {_issues()}")


def _lines(log: Path | None) -> Iterator[str]:
    yield "# Versions"
    yield f"Python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"
    yield "\n# Devices"
    yield from _devices()
    yield "\n# TorchTitan"
    yield _plug()
    yield "\n# Environment"
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRETS):
            yield f"{name}={value}"
    if log is not None:
        yield f"\n# The last lines of {log}"
        with log.open(encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n") for line in deque(file, _LAST_LINES))


def _devices() -> Iterator[str]:
    try:
        import torch
    except (ImportError, OSError) as error:  # the report includes a broken installation
        yield f"torch cannot be imported: {error}"
        return
    yield f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, {torch.accelerator.device_count()} devices"
    from zbpipe.runtime.measure.transport import find_known

    known = find_known(torch.__version__, os.environ, rocm=torch.version.hip is not None)
    yield f"Messages between GPUs: {str(known.transport)!r}. {known.reason}"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return
    module: Any = torch.get_device_module(accelerator)
    for index in range(torch.accelerator.device_count()):
        found = module.get_device_properties(index)
        yield f"{index}: {found.name}, {found.total_memory / 2**30:.1f} GiB"
    if hasattr(module, "nccl"):
        yield f"NCCL or RCCL {module.nccl.version()}"
    from zbpipe.runtime.verify import on_device

    yield "\n# Tried on the GPUs"
    failed = False
    for result in on_device.try_out(accelerator.type):
        failed |= result.failed
        yield str(result)
    if failed:
        yield f"Run the job with {on_device.WAY_OUT}, and send this report to {_issues()}"


def _plug() -> str:
    """Whether the plug fits, tried in a separate process, because it changes torch and TorchTitan."""
    from zbpipe.frameworks.titan.versions import find_installed

    try:
        find_installed()
    except ImportError as error:
        return str(error)
    command = [sys.executable, "-c", _PLUG]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_PLUG_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"the plug timed out after {_PLUG_SECONDS} seconds"
    return tried.stdout.strip() if tried.returncode == 0 else f"the plug does not fit:\n{tried.stderr.strip()}"


def _issues() -> str:
    urls = dict(each.split(", ", 1) for each in metadata("zbpipe").get_all("Project-URL") or ())
    return str(urls.get("Issues", "where you got zbpipe from"))
