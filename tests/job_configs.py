"""Configs for TorchTitan's `--module`: jobs in which rank 1 goes wrong, with a plan's layers, of any sizes, with models
that cut themselves, and with the fields of TorchTitan's main branch."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import (
    _build_pipeline_schedule,
    _generate_llm_fqn_per_model_part,
    _pipeline_module_split,
    pipeline_llm,
)
from torchtitan.trainer import Trainer

from zbpipe.cli.demo.models03 import llama3_python_stdlib


def other_schedule() -> Trainer.Config:
    config = llama3_python_stdlib()
    config.parallelism.pipeline_parallel_schedule = "1F1B" if os.environ["RANK"] == "1" else "ZBV"
    return config


def killed_in_step_3() -> Trainer.Config:
    return _rank_1_in_step(3, lambda trainer: _in_forward(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def raises_in_step_2() -> Trainer.Config:
    return _rank_1_in_step(2, lambda trainer: _in_forward(_explode))


def nan_in_step_2() -> Trainer.Config:
    return _rank_1_in_step(2, _break_weights)


def _rank_1_in_step(number: int, fault: Callable[[Trainer], None]) -> Trainer.Config:
    train_step = Trainer.train_step

    def train_step_with_fault(trainer: Trainer, data: Any) -> None:
        if trainer.step == number:
            fault(trainer)
        train_step(trainer, data)

    if os.environ["RANK"] == "1":
        Trainer.train_step = train_step_with_fault
    return llama3_python_stdlib()


def _in_forward(fault: Callable[[], None]) -> None:
    """At the thirtieth call of any module: in the middle of a step."""
    calls = iter(range(30))

    def count(*args: Any) -> None:
        if next(calls, None) is None:
            fault()

    torch.nn.modules.module.register_module_forward_pre_hook(count)


def _explode() -> None:
    raise ArithmeticError("too much")


def _break_weights(trainer: Trainer) -> None:
    with torch.no_grad():
        for weight in trainer.model_parts[0].parameters():
            weight.fill_(float("nan"))


def llama3_split() -> Trainer.Config:
    """Cut by `plan.json` in the folder that the job writes into: TorchTitan's command line has no lists of lists."""
    folder, config = Path(sys.argv[sys.argv.index("--dump_folder") + 1]), llama3_python_stdlib()
    plan = json.loads((folder.parent / "plan.json").read_text())
    config.parallelism.module_fqns_per_model_part = plan["module_fqns_per_model_part"]
    return config


SIZES = {1: (4, 64), 2: (2, 64), 3: (6, 64), 4: (4, 32), 5: (6, 48), 6: (2, 48)}
"""By step how many sequences it has, and how long they are. The first ones are those of the command line."""
VALIDATED = 6
"""Sequences in a step of the validation: more than in the steps before and after it, and as many as in a later one."""


class VaryingTrainer(Trainer):  # type: ignore[misc]
    """With a pipeline each sequence is a microbatch; without one it is a step of gradient accumulation."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        pass

    def train_step(self, data_iterator: Any) -> None:
        number, _ = SIZES[self.step]
        if self.parallel_dims.pp_enabled:
            self.num_pipeline_parallel_microbatches = number
        else:
            self.gradient_accumulation_steps = number
        super().train_step(data_iterator)

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        for inputs, labels in super().batch_generator(data_iterable):
            _, length = SIZES[self.step]
            yield {name: each[:, :length] for name, each in inputs.items()}, labels[:, :length]


class SmallValidator(Validator):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, local_batch_size: int, **kwargs: Any) -> None:
        super().__init__(config, local_batch_size=VALIDATED, **kwargs)


def varying() -> VaryingTrainer.Config:
    config = llama3_python_stdlib()
    config.validator = SmallValidator.Config(**_values(config.validator))
    return VaryingTrainer.Config(**_values(config))


def _values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def own_functions() -> Trainer.Config:
    return _cut_by(pipeline_by_own_functions)


def runtime() -> Trainer.Config:
    return _cut_by(pipeline_by_runtime)


def _cut_by(pipelining_fn: Callable[..., Any]) -> Trainer.Config:
    config = llama3_python_stdlib()
    config.model_spec = replace(config.model_spec, pipelining_fn=pipelining_fn)
    return config


def pipeline_by_own_functions(
    model: nn.Module, *, parallelize_fn: Any, **given: Any
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    """Takes TorchTitan's helpers into this module."""
    parallelism, mesh = given["parallelism"], given["parallel_dims"].get_mesh("pp")
    names = _generate_llm_fqn_per_model_part(4, len(given["model_config"].layers), 1, 1)
    name = parallelism.pipeline_parallel_schedule
    stages, parts = _pipeline_module_split(model, mesh, name, given["device"], names)
    for stage, part in zip(stages, parts, strict=True):
        keys = ("parallel_dims", "training", "parallelism", "compile_config", "ac_config", "dump_folder")
        stage.submod = parallelize_fn(part, **{key: given[key] for key in keys})
    batch, loss_fn = given["training"].local_batch_size, given["loss_fn"]
    schedule = _build_pipeline_schedule(parallelism=parallelism, local_batch_size=batch, stages=stages, loss_fn=loss_fn)
    return schedule, parts, any(each.is_first for each in stages), any(each.is_last for each in stages)


class Runtime:
    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def step(self, **given: Any) -> None:
        self.schedule.step(**given)


def pipeline_by_runtime(model: nn.Module, **given: Any) -> tuple[Runtime, list[nn.Module], bool, bool]:
    schedule, *rest = pipeline_llm(model, **given)
    return Runtime(schedule), *rest  # type: ignore[return-value]


class OwnTrainer(Trainer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        pass

    def train_step(self, data_iterator: Any) -> None:
        raise NotImplementedError("of another library")


def own_trainer() -> OwnTrainer.Config:
    return OwnTrainer.Config(**_values(llama3_python_stdlib()))


@dataclass(kw_only=True, slots=True)
class MainParallelism(ParallelismConfig):  # type: ignore[misc]
    num_pp_microbatches: int = 4


@dataclass(kw_only=True, slots=True)
class MainTraining(TrainingConfig):  # type: ignore[misc]
    num_tokens_per_microbatch_per_dp_rank: int = 64
    max_context_length: int = 64
    num_tokens_per_train_step: int = -1


def counting_tokens() -> Trainer.Config:
    """The fields that zbpipe reads of TorchTitan's main branch, beside those that 0.3 reads."""
    config = llama3_python_stdlib()
    config.parallelism = MainParallelism(**_values(config.parallelism))
    config.training = MainTraining(**_values(config.training))
    return config
