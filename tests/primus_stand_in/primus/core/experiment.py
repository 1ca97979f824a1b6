"""How an experiment becomes TorchTitan's `JobConfig`, as Primus (commit fd1eeab) does it, in a few lines.

The presets of the module and the model, over these the experiment's overrides, and all that over TorchTitan's defaults.
Keys that TorchTitan does not have become attributes; nobody complains of them.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "pre_trainer.yaml": {
        "compile": {"enable": True, "components": ["model", "loss"]},
        "parallelism": {"pipeline_parallel_degree": 1, "pipeline_parallel_schedule": "1F1B"},
        "primus_turbo": {"enable_primus_turbo": True},
        "training": {"mock_data": True, "steps": 10000},
    },
    "llama3.1_8B.yaml": {"model": {"name": "llama3", "flavor": "8B", "converters": ["primus_turbo"]}},
}
"""What matters in tests of Primus' files with these names."""


def load(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The experiment's module as it is in the file, and all its sections."""
    import yaml

    module = yaml.safe_load(file.read_text())["modules"]["pre_trainer"]
    return module, merged(merged(PRESETS[module["config"]], PRESETS[module["model"]]), module["overrides"])


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(deepcopy(base))
    for name, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else value
    return result


def namespace(value: Any) -> Any:
    """What patches see."""
    if isinstance(value, Mapping):
        return SimpleNamespace(**{name: namespace(inner) for name, inner in value.items()})
    return value


def job_config(sections: Mapping[str, Any]) -> Any:
    from torchtitan.config import JobConfig

    return _as_dataclass(JobConfig, merged(JobConfig().to_dict(), sections))


def _as_dataclass(kind: type, values: Mapping[str, Any]) -> Any:
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    own = {
        name: _as_dataclass(types[name], value) if is_dataclass(types[name]) and isinstance(value, Mapping) else value
        for name, value in values.items()
        if name in types
    }
    made = kind(**own)
    for name in values.keys() - types:
        setattr(made, name, values[name])
    return made
