"""The installed TorchTitan, identified by names in its source files, and the names that zbpipe uses from it.

Version numbers are not reliable: a clone of TorchTitan's main branch calls itself 0.2.2. Only `require_names` imports
torchtitan.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

WAY_WITHOUT_NAMES = (
    "use zbpipe.install() in your program, or start it by `python -m zbpipe.run`: they need no private names of"
    " TorchTitan"
)


@dataclass(frozen=True)
class Version:
    name: str
    shown_by: tuple[str, str]
    """A source file, and a name in it that no other version has."""
    torch: tuple[int, int]
    checkpointing: tuple[str, ...]
    """Its arguments for activation checkpointing, with {} for the kind."""

    def checkpoint(self, kind: str) -> list[str]:
        return [argument.format(kind) for argument in self.checkpointing]


def find_installed() -> Version:
    """The version of TorchTitan that an import would find. ImportError with the remedy if zbpipe cannot use it."""
    found, torch = _find(), version("torch")
    titan = next((each for each in KNOWN if found.has(*each.shown_by)), None)
    if titan is None:
        ways = ", or ".join([*_fitting(), WAY_WITHOUT_NAMES])
        marks = ", ".join(f"`{each.shown_by[1]}` in {each.shown_by[0]} ({each.name})" for each in KNOWN)
        raise ImportError(f"{found} has none of the names by which zbpipe recognizes TorchTitan, {marks}: {ways}")
    if _numbers(torch) < titan.torch:
        needed = ".".join(map(str, titan.torch))
        ways = ", or ".join([*_fitting(), f"install torch {needed} or newer"])
        raise ImportError(f"{found} needs torch {needed} or newer, and this is torch {torch}: {ways}")
    return titan


def has_job_config() -> bool:
    """Whether all settings are in one `JobConfig` (0.2), or in a `Trainer.Config` with a `ModelSpec` (0.3)."""
    return find_installed() is KNOWN[0]


def describe_installed() -> str:
    return str(_find())


@dataclass(frozen=True)
class _Found:
    release: str
    folder: Path

    def has(self, file: str, name: str) -> bool:
        """Whether a source file has a line that begins with `name`."""
        path = self.folder / file
        return path.is_file() and re.search(rf"^\s*{name}\b", path.read_text(), re.MULTILINE) is not None

    def __str__(self) -> str:
        return f"torchtitan {self.release} in {self.folder}"


def _find() -> _Found:
    """A source tree on Python's path precedes the installed package."""
    spec = find_spec("torchtitan")
    if spec is None:
        raise ImportError(f"torchtitan is not installed: {(*_fitting(), 'install torch 2.11 or newer first')[0]}")
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    for folder in folders:
        release = folder.parent / "assets" / "version.txt"
        if release.is_file():
            return _Found(release.read_text().strip(), folder)
    try:
        release_of_pip = version("torchtitan")
    except PackageNotFoundError:
        release_of_pip = "of an unknown version"
    return _Found(release_of_pip, (folders or [Path("torchtitan")])[0])


def _fitting() -> list[str]:
    """The command that installs the newest known release for the installed torch, if there is one."""
    try:
        torch = _numbers(version("torch"))
    except PackageNotFoundError:
        return []
    releases = [each for each in KNOWN if _numbers(each.name) and each.torch <= torch]
    return [f"pip install torchtitan=={each.name}" for each in releases[-1:]]


def _numbers(release: str) -> tuple[int, ...]:
    """(2, 13, 0) for "2.13.0+cpu"; () if it is not a release."""
    digits = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, digits[0].split("."))) if digits else ()


# The newest comes last.
KNOWN = (
    Version(
        "0.2.2",
        shown_by=("config/job_config.py", "class JobConfig"),
        torch=(2, 11),
        checkpointing=("--activation_checkpoint.mode", "{}"),
    ),
    Version(
        "0.3.0",
        shown_by=("config/configs.py", "pipeline_parallel_microbatch_size"),
        torch=(2, 14),
        checkpointing=("activation-checkpoint:{}",),
    ),
    Version(
        "main of August 2026",
        shown_by=("config/configs.py", "num_pp_microbatches"),
        torch=(2, 14),
        checkpointing=("activation-checkpoint:{}",),
    ),
)


class Needed(NamedTuple):
    """A name that zbpipe uses from TorchTitan, with the parameters that it passes. " or " separates the old and the new
    place of a name or a parameter."""

    path: str
    """Path below `torchtitan`, as module:attribute."""
    parameters: tuple[str, ...] = ()
    """Parameters of a function, or fields of a dataclass."""
    parts: tuple[str, ...] = ()
    """Attributes and methods of a class, or of the engines in its module."""

    def find(self) -> Any:
        """The object with this name, or None. Passes the ImportError of another package."""
        for path in self.path.split(OR):
            try:
                return resolve_name(f"torchtitan.{path}")
            except AttributeError:
                continue
            except ImportError as error:
                if not (error.name or "torchtitan").startswith("torchtitan"):
                    raise
        return None

    def list_missing(self) -> list[str]:
        """Names that TorchTitan lacks, as text. Empty if it has all."""
        found = self.find()
        if found is None:
            return [self.path.replace(":", ".")]
        parameters = inspect.signature(found).parameters if self.parameters else {}
        missing = [each for each in self.parameters if not parameters.keys() & set(each.split(OR))]
        if self.parts:
            source = _read_source(found)  # instances have them, not the class
            missing += [
                each for each in self.parts if not re.search(rf"self\.{each}\b|^ +(def )?{each}[:(]", source, re.M)
            ]
        return [f"{each} of {self.path.split(OR)[0].replace(':', '.')}" for each in missing]


def _read_source(owner: type[Any]) -> str:
    """The source of a class, and of the engines in its module."""
    engines = [each for name, each in vars(sys.modules[owner.__module__]).items() if name.endswith("Engine")]
    return "\n".join(map(inspect.getsource, (owner, *engines)))


OR = " or "
NEEDED = (
    Needed("train:main"),
    Needed(
        "train:Trainer",
        parts=("pp_schedule", "optimizers", "lr_schedulers", "step", "checkpointer", "metrics_processor"),
    ),
    Needed("train:Trainer.train"),
    Needed("train:Trainer.train_step", ("data_iterator",)),
    Needed("config:ConfigManager.parse_args", ("args",)),
    Needed(
        "components.checkpointer:BaseCheckpointManager or components.checkpoint:CheckpointManager",
        parts=("enable", "save", "maybe_wait_for_staging"),
    ),
    Needed("components.optimizer:OptimizersContainer", parts=("optimizers", "step", "zero_grad")),
    Needed(
        "components.optimizer:LRSchedulersContainer or components.lr_scheduler:LRSchedulersContainer", parts=("step",)
    ),
    Needed("config:CommConfig or config.job_config:Comm", ("mode", "init_timeout_seconds")),
    Needed("config:CompileConfig or config.job_config:Compile", ("enable",)),
    Needed("config:ConfigManager._load_config or config.job_config:JobConfig"),
    Needed("train:Trainer.Config._owner or config.job_config:JobConfig"),
    Needed(
        "config:ParallelismConfig or config.job_config:Parallelism",
        (
            "pipeline_parallel_degree",
            "pipeline_parallel_schedule",
            "pipeline_parallel_schedule_csv",
            "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers",
            "module_fqns_per_model_part",
            "tensor_parallel_degree",
            "context_parallel_degree",
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "num_pp_microbatches or pipeline_parallel_microbatch_size",
        ),
    ),
    Needed(
        "config:TrainingConfig or config.job_config:Training",
        (
            "steps",
            "max_norm",
            "max_context_length or seq_len",
            "num_tokens_per_microbatch_per_dp_rank or local_batch_size",
        ),
    ),
    Needed("components.metrics:MetricsProcessor.should_log", ("step",)),
    Needed("components.metrics:MetricsProcessor.log", ("step", "extra_metrics")),
    Needed("components.metrics:ensure_pp_loss_visible", ("parallel_dims", "pp_schedule or job_config", "color")),
    Needed("components.metrics:_get_metrics_rank", ("parallel_dims", "pp_schedule or job_config")),
    Needed("distributed.utils:clip_grad_norm_"),
    Needed("distributed:ParallelDims", ("pp", "world_size")),
    Needed(
        "distributed.pipeline_parallel:pipeline_llm",
        ("model", "parallelism or job_config", "device", "model_config or model_args"),
    ),
    Needed(
        "distributed.pipeline_parallel:_generate_llm_fqn_per_model_part"
        " or distributed.pipeline_parallel:generate_llm_fqn_per_model_part",
        ("num_stages", "num_layers", "input_weight", "output_weight"),
    ),
    Needed(
        "distributed.pipeline_parallel:_pipeline_module_split or distributed.pipeline_parallel:pipeline_module_split",
        ("whole_model", "pp_mesh", "pp_schedule", "device", "module_names_per_stage"),
    ),
    Needed("distributed.pipeline_parallel:get_schedule_class"),
    Needed("protocols.model_spec:ModelSpec or protocols.train_spec:TrainSpec", ("pipelining_fn", "parallelize_fn")),
    Needed("models.common.moe:GroupedExperts or models.moe.moe:GroupedExperts"),
)


def require_names() -> None:
    """Raise ImportError if TorchTitan, or a package that it needs, lacks a name of `NEEDED`. The message names the
    package to install."""
    try:
        missing = [words for each in NEEDED for words in each.list_missing()]
    except ImportError as error:
        raise ImportError(f"{describe_installed()} cannot be imported: {error}: install its dependencies") from error
    if missing:
        known = ", ".join(each.name for each in KNOWN)
        raise ImportError(
            f"{describe_installed()} lacks {', '.join(missing)}, which zbpipe needs; it knows {known}:"
            f" {WAY_WITHOUT_NAMES}"
        )
