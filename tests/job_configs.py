"""Configs for TorchTitan's `--module`: jobs in which rank 1 goes wrong, with a plan's layers, or of any sizes."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.validate import Validator
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
