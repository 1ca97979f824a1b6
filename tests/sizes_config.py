"""A config for TorchTitan's `--module`: the debug model in a job whose steps have different sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torchtitan.components.validate import Validator
from torchtitan.trainer import Trainer

from zbpipe.cli.demo.models03 import llama3_python_stdlib

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
    """Validates on batches of a size of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, local_batch_size: int, **kwargs: Any) -> None:
        super().__init__(config, local_batch_size=VALIDATED, **kwargs)


def varying() -> VaryingTrainer.Config:
    config = llama3_python_stdlib()
    config.validator = SmallValidator.Config(**values(config.validator))
    return VaryingTrainer.Config(**values(config))


def values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}
