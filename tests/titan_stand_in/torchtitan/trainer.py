import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torchtitan.components.metrics import MetricsProcessor, ensure_pp_loss_visible
from torchtitan.config import JobFields
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_spec import ModelSpec


class Trainer:
    trained: ClassVar[list["Trainer"]] = []

    @dataclass
    class Config(JobFields):  # type: ignore[misc]
        _owner: ClassVar[type]
        model_spec: ModelSpec | None = None

        def build(self) -> "Trainer":
            return self._owner(self)

    def __init_subclass__(cls) -> None:
        cls.Config._owner = cls

    def __init__(self, config: Config) -> None:
        self.config, self.step, spec = config, 0, config.model_spec
        assert spec is not None
        pp, name = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule
        self.parallel_dims = ParallelDims(pp, int(os.environ["WORLD_SIZE"]))
        self.metrics_processor = MetricsProcessor(self.parallel_dims, name)
        torch.manual_seed(0)
        job = {"parallel_dims": self.parallel_dims, "training": config.training, "parallelism": config.parallelism}
        job |= {"ac_config": None, "device": torch.device("cpu"), "loss_fn": cross_entropy}
        job |= {"model_config": spec.model, "parallelize_fn": spec.parallelize_fn}
        self.pp_schedule, self.model_parts, self.has_first, self.has_last = spec.pipelining_fn(  # type: ignore[misc]
            spec.model.build(), **job
        )
        ensure_pp_loss_visible(parallel_dims=self.parallel_dims, pp_schedule=name, color=None)

    def train(self) -> None:
        self.trained.append(self)
        generator = torch.Generator().manual_seed(1)
        count = self.config.parallelism.num_pp_microbatches
        size = self.config.training.num_tokens_per_microbatch_per_dp_rank
        while self.step < self.config.training.steps:
            self.step += 1
            self.train_step(torch.randint(0, 16, (2, size), generator=generator).unbind() for _ in range(count))

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        inputs, targets = zip(*data_iterator, strict=True)
        losses: list[Tensor] = []
        self.pp_schedule.step(
            arg_mbs=[(each,) for each in inputs] if self.has_first else None,
            kwarg_mbs=[{} for _ in inputs],
            target_mbs=list(targets) if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        parameters = [each for part in self.model_parts for each in part.parameters()]
        dist_utils.clip_grad_norm_(parameters, self.config.training.max_norm)
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.grad)
                parameter.grad = None
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(self.step, torch.stack(losses).sum().item() if losses else -1.0)


Trainer.Config._owner = Trainer
