"""The names that zbpipe uses from TorchTitan, with the parameters that it passes. Imports torchtitan only to look them
up.

One list for all versions: " or " separates the old and the new place of a name or a parameter.
"""

from __future__ import annotations

import inspect
from pkgutil import resolve_name
from typing import Any, NamedTuple

from zbpipe.frameworks.titan.versions import KNOWN, WAY_WITHOUT_NAMES, describe_installed


class Needed(NamedTuple):
    """A name in TorchTitan."""

    place: str
    """Path below `torchtitan`, as module:attribute."""
    parameters: tuple[str, ...] = ()
    """Parameters of a function, or fields of a dataclass."""

    def find(self) -> Any:
        """The object with this name; None if there is none. The ImportError of another package passes."""
        for place in self.place.split(OR):
            try:
                return resolve_name(f"torchtitan.{place}")
            except AttributeError:
                continue
            except ImportError as error:
                if not (error.name or "torchtitan").startswith("torchtitan"):
                    raise
        return None

    def list_missing(self) -> list[str]:
        """Names that TorchTitan lacks, in words; empty if it has everything."""
        found = self.find()
        if found is None:
            return [self.place.replace(":", ".")]
        parameters = inspect.signature(found).parameters if self.parameters else {}
        missing = [each for each in self.parameters if not parameters.keys() & set(each.split(OR))]
        return [f"{each} of {self.place.split(OR)[0].replace(':', '.')}" for each in missing]


OR = " or "
NEEDED = (
    Needed("train:main"),
    Needed("train:Trainer"),
    Needed("train:Trainer.train"),
    Needed("train:Trainer.train_step", ("data_iterator",)),
    Needed("config:ConfigManager.parse_args", ("args",)),
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
    """Refuse a TorchTitan that lacks something of `NEEDED`.

    Raises:
        ImportError: TorchTitan, or a package that it needs, lacks a name. The message names the package to install.
    """
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
