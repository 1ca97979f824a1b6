"""Command lines of jobs: zbpipe's arguments, which all begin with `--zbpipe.`, and those of TorchTitan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from zbpipe.costs.job import MemoryLimit
from zbpipe.estimation.workload import Degrees, Spelling, Workload
from zbpipe.frameworks.options import Options, add_arguments, from_arguments, list_options
from zbpipe.frameworks.titan import cpu
from zbpipe.frameworks.titan.batches import counts_tokens
from zbpipe.frameworks.titan.versions import find_installed, require_names
from zbpipe.schedule.ir import require_whole
from zbpipe.schedule.user_code import import_from_here

_PREFIX = "--zbpipe."


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """zbpipe's options, and the remaining arguments for TorchTitan.

    >>> options, rest = parse(["--training.steps", "10", "--zbpipe.trace", "step.json"])
    >>> options.trace, rest
    ('step.json', ['--training.steps', '10'])

    Unknown arguments that begin with `--zbpipe.` end the program with an error, as in TorchTitan's parser. The modules
    of `--zbpipe.import` are imported.
    """
    parser = _parser()
    found, rest = parser.parse_known_args(arguments)
    for argument in (each for each in rest if each.startswith(_PREFIX)):
        known = [each.name.replace("_", "-") for each in list_options(steps_optimizer=True)]
        (near,) = get_close_matches(argument.removeprefix(_PREFIX), known, n=1, cutoff=0.0)
        parser.error(f"unknown argument {argument}: did you mean {_PREFIX}{near}? See docs/options.md")
    return from_arguments(parser, vars(found)), rest


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether TorchTitan's parser will show its help and end the program."""
    return "-h" in arguments or "--help" in arguments


def help_text() -> str:
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


def read_workload(arguments: Sequence[str], gpus: int) -> Workload:
    """The workload of a TorchTitan job, from its command line. `Workload.on` converts it to other degrees.

        job = ["--module", "titan_integration.llama3", "--config", "llama3_70b"]
        workload = zbpipe.frameworks.titan.command_line.read_workload(job, gpus=64)
        zbpipe.estimate(workload, "MI300X")

    Args:
        arguments: TorchTitan's arguments only. For 0.2, for example ["--job.config_file", "job.toml"].
        gpus: GPUs of the whole job. FSDP uses those that the other degrees leave.

    Raises:
        ImportError: TorchTitan is missing, or zbpipe does not know its version.
        ValueError: TorchTitan or zbpipe refuses the job: an unknown module or config, GPUs that are not a multiple of
            the degrees, a checkpointing that the compiler chooses.
    """
    with cpu.compiling_late():
        config = read_config(arguments, allow_float8=True)
    from zbpipe.frameworks.titan.models import workload_of  # not before: TorchTitan chooses its device at import

    name = " ".join(value for flag, value in pairwise(arguments) if flag in _NAMING)
    degrees = dict(_DEGREES)
    if config.parallelism.data_parallel_shard_degree == -1:  # FSDP uses what is left
        del degrees["fsdp"]
    checkpointing, own = " ".join(find_installed().checkpointing).removesuffix("{}"), parse(arguments)[0]
    return replace(
        workload_of(config, degrees_of(config, gpus), name),
        memory_limit=MemoryLimit.parse(own.memory_limit),
        fill_waits=own.fill_waits,
        options=Spelling(
            "--parallelism.pipeline_parallel_schedule {}",
            f"{_PREFIX}memory-limit {{}}",
            f"{checkpointing}{{}}",
            "" if counts_tokens(config) else "--training.local_batch_size {0} --training.global_batch_size {1}",
            tuple((name, f"--parallelism.{each}_degree {{}}") for name, each in degrees.items()),
            f"{_PREFIX}fill-waits {{}}",
        ),
    )


_SHARED = {each: f"{each}_parallel" for each in ("pipeline", "tensor", "context")} | {"experts": "expert_parallel"}
_DEGREES = {**_SHARED, "replicas": "data_parallel_replicate", "fsdp": "data_parallel_shard"}
"""Fields of TorchTitan's config without `_degree`, by parallel dimension. `_SHARED`: those of `shared_degrees`."""
_NAMING = ("--module", "--config", "--job.config_file", "--model.name", "--model.flavor")
"""TorchTitan's arguments that name a job."""


def read_config(arguments: Sequence[str], *, allow_float8: bool = False) -> Any:
    """TorchTitan's config of a command line, whose module may be in the current folder. Errors: see `read_workload`.
    `allow_float8`: also without a device that has float8."""
    import_from_here()
    find_installed()
    if cpu.is_needed():
        cpu.stand_in()  # TorchTitan asks for a device when it is imported
    require_names()
    from zbpipe.frameworks.titan import models

    try:
        return models.parse_config(parse(arguments)[1], allow_float8=allow_float8)
    except ImportError as error:
        raise ValueError(f"--module: {error}") from None


def degrees_of(config: Any, num_gpus: int) -> Degrees:
    """Parallel degrees of the config. FSDP uses the GPUs that the other degrees leave."""
    (num_gpus,) = require_whole(1, gpus=num_gpus)
    parallelism = config.parallelism
    shared, replicas = shared_degrees(parallelism), parallelism.data_parallel_replicate_degree
    each = shared.gpus * replicas
    fsdp, rest = divmod(num_gpus, each)
    if rest or not fsdp:
        fitting = " or ".join(str(shards * each) for shards in (fsdp, fsdp + 1) if shards)
        raise ValueError(
            f"{num_gpus} GPUs are not a multiple of PP x TP x CP x replicas = {each}: use {fitting}, or other degrees"
        )
    return replace(shared, fsdp=fsdp, replicas=replicas)


def shared_degrees(parallelism: Any) -> Degrees:
    return Degrees(**{name: getattr(parallelism, f"{each}_degree") for name, each in _SHARED.items()})
