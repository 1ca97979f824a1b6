"""The installed TorchTitan, identified by names in its source files, and the names that zbpipe uses from it.

Version numbers are not reliable: a clone of TorchTitan's main branch calls itself 0.2.2. Only `require_names` imports
torchtitan.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

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
        way = (*_fitting(), "pip install '.[titan]' in a clone of zbpipe")[0]
        raise ImportError(f"torchtitan is not installed: {way}")
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


_SPLIT = "distributed.pipeline_parallel"
NEEDED = {
    "train:main": "",
    "train:Trainer": "pp_schedule optimizers lr_schedulers step checkpointer metrics_processor",
    "train:Trainer.train": "",
    "train:Trainer.train_step": "data_iterator",
    "config:ConfigManager.parse_args": "args",
    "components.checkpointer:BaseCheckpointManager|components.checkpoint:CheckpointManager": (
        "enable save maybe_wait_for_staging"
    ),
    "components.optimizer:OptimizersContainer": "optimizers step zero_grad",
    "components.optimizer:LRSchedulersContainer|components.lr_scheduler:LRSchedulersContainer": "step",
    "config:CommConfig|config.job_config:Comm": "mode init_timeout_seconds",
    "config:CompileConfig|config.job_config:Compile": "enable",
    "config:ConfigManager._load_config|config.job_config:JobConfig": "",
    "train:Trainer.Config._owner|config.job_config:JobConfig": "",
    "config:ParallelismConfig|config.job_config:Parallelism": (
        "pipeline_parallel_degree pipeline_parallel_schedule pipeline_parallel_schedule_csv"
        " pipeline_parallel_layers_per_stage pipeline_parallel_first_stage_less_layers"
        " pipeline_parallel_last_stage_less_layers module_fqns_per_model_part tensor_parallel_degree"
        " context_parallel_degree data_parallel_replicate_degree data_parallel_shard_degree"
        " num_pp_microbatches|pipeline_parallel_microbatch_size"
    ),
    "config:TrainingConfig|config.job_config:Training": (
        "steps max_norm max_context_length|seq_len num_tokens_per_microbatch_per_dp_rank|local_batch_size"
    ),
    "components.metrics:MetricsProcessor.should_log": "step",
    "components.metrics:MetricsProcessor.log": "step extra_metrics",
    "components.metrics:ensure_pp_loss_visible": "parallel_dims pp_schedule|job_config color",
    "components.metrics:_get_metrics_rank": "parallel_dims pp_schedule|job_config",
    "distributed.utils:clip_grad_norm_": "",
    "distributed:ParallelDims": "pp world_size",
    f"{_SPLIT}:pipeline_llm": "model parallelism|job_config device model_config|model_args",
    f"{_SPLIT}:_generate_llm_fqn_per_model_part|{_SPLIT}:generate_llm_fqn_per_model_part": (
        "num_stages num_layers input_weight output_weight"
    ),
    f"{_SPLIT}:_pipeline_module_split|{_SPLIT}:pipeline_module_split": (
        "whole_model pp_mesh pp_schedule device module_names_per_stage"
    ),
    f"{_SPLIT}:get_schedule_class": "",
    "protocols.model_spec:ModelSpec|protocols.train_spec:TrainSpec": "pipelining_fn parallelize_fn",
    "models.common.moe:GroupedExperts|models.moe.moe:GroupedExperts": "",
}
"""Names that zbpipe uses from TorchTitan, as module:attribute, with the parameters, fields or attributes that it uses
of each. "|" separates the new and the old place of a name or a parameter."""


def _list_missing(path: str, names: str) -> Iterator[str]:
    """Those of these names that TorchTitan lacks, as text. Passes the ImportError of another package."""
    found: Any = None
    for place in path.split("|"):
        try:
            found = found or resolve_name(f"torchtitan.{place}")
        except AttributeError:
            continue
        except ImportError as error:
            if not (error.name or "torchtitan").startswith("torchtitan"):
                raise
    if found is None:
        yield path.replace(":", ".").replace("|", " or ")
    elif names:
        is_plain = inspect.isclass(found) and not is_dataclass(found)
        known = _attributes(found) if is_plain else {*inspect.signature(found).parameters}
        for each in names.split():
            if not known & {*each.split("|")}:
                yield f"{each} of {path.partition('|')[0]}".replace(":", ".").replace("|", " or ")


def _attributes(owner: type[Any]) -> set[str]:
    """Attributes and methods in the source of a class, whose instances have them, and of the engines in its module."""
    engines = [each for name, each in vars(sys.modules[owner.__module__]).items() if name.endswith("Engine")]
    source = "\n".join(map(inspect.getsource, (owner, *engines)))
    return {name for pair in re.findall(r"self\.(\w+)|^ +(?:def )?(\w+)[:(]", source, re.MULTILINE) for name in pair}


def require_names() -> None:
    """Raise ImportError if TorchTitan, or a package that it needs, lacks a name of `NEEDED`. The message names the
    package to install."""
    try:
        missing = [words for path, names in NEEDED.items() for words in _list_missing(path, names)]
    except ImportError as error:
        raise ImportError(f"{describe_installed()} cannot be imported: {error}: install its dependencies") from error
    if missing:
        known = ", ".join(each.name for each in KNOWN)
        raise ImportError(
            f"{describe_installed()} lacks {', '.join(missing)}, which zbpipe needs; it knows {known}:"
            f" {WAY_WITHOUT_NAMES}"
        )
