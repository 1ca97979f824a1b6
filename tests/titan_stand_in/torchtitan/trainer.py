import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.metrics import MetricsProcessor, ensure_pp_loss_visible
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.config import JobFields
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_spec import ModelSpec


class TrainingEngine:
    """Has parts that were the trainer's, since September 2026."""

    def __init__(self, spec: ModelSpec, job: dict[str, Any]) -> None:
        self.step = 0
        self.pp_schedule, self.model_parts, self.has_first, self.has_last = spec.pipelining_fn(  # type: ignore[misc]
            spec.model.build(), **job
        )
        self.optimizers = OptimizersContainer(self.model_parts)
        self.lr_schedulers = LRSchedulersContainer(self.optimizers)


class Trainer:
    has_engine: ClassVar[bool] = False
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
        self.config, spec = config, config.model_spec
        assert spec is not None
        pp, name = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule
        self.parallel_dims = ParallelDims(pp, int(os.environ["WORLD_SIZE"]))
        self.metrics_processor = MetricsProcessor(self.parallel_dims, name)
        torch.manual_seed(0)
        job = {"parallel_dims": self.parallel_dims, "training": config.training, "parallelism": config.parallelism}
        job |= {"ac_config": None, "device": torch.device("cpu"), "loss_fn": cross_entropy}
        job |= {"model_config": spec.model, "parallelize_fn": spec.parallelize_fn}
        engine = TrainingEngine(spec, job)
        if self.has_engine:
            self.engine = engine
        else:
            vars(self).update(vars(engine))
        self.checkpointer = BaseCheckpointManager()
        ensure_pp_loss_visible(parallel_dims=self.parallel_dims, pp_schedule=name, color=None)

    def train(self) -> None:
        self.trained.append(self)
        generator = torch.Generator().manual_seed(1)
        count = self.config.parallelism.num_pp_microbatches
        size = self.config.training.num_tokens_per_microbatch_per_dp_rank
        parts = self.engine if self.has_engine else self
        while parts.step < self.config.training.steps:
            parts.step += 1
            self.train_step(torch.randint(0, 16, (2, size), generator=generator).unbind() for _ in range(count))

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        inputs, targets = zip(*data_iterator, strict=True)
        losses: list[Tensor] = []
        parts = self.engine if self.has_engine else self
        parts.optimizers.zero_grad()
        parts.pp_schedule.step(
            arg_mbs=[(each,) for each in inputs] if parts.has_first else None,
            kwarg_mbs=[{} for _ in inputs],
            target_mbs=list(targets) if parts.has_last else None,
            losses=losses if parts.has_last else None,
            return_outputs=False,
        )
        parameters = [each for part in parts.model_parts for each in part.parameters()]
        dist_utils.clip_grad_norm_(parameters, self.config.training.max_norm)
        parts.optimizers.step()
        parts.lr_schedulers.step()
        if self.metrics_processor.should_log(parts.step):
            self.metrics_processor.log(parts.step, torch.stack(losses).sum().item() if losses else -1.0)


Trainer.Config._owner = Trainer
