"""The jobs of the tests: a language model, one that sees, one cut by functions of its own, and one with a runtime."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineSchedule, get_schedule_class

from torchtitan.distributed.pipeline_parallel import (
    _build_pipeline_schedule,
    _generate_llm_fqn_per_model_part,
    _pipeline_module_split,
    pipeline_llm,
    pipeline_vlm,
)
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

WIDTH = 8


class Model(nn.Module):
    def __init__(self, num_layers: int, sees: bool) -> None:
        super().__init__()
        self.vision_encoder = nn.Linear(WIDTH, 8 * WIDTH, bias=False) if sees else None
        self.tok_embeddings = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(num_layers)})
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        if self.vision_encoder is not None:
            x = x + self.vision_encoder(x).unflatten(-1, (8, WIDTH)).sum(-2)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x if self.lm_head is None else self.lm_head(self.norm(x))


class ModelConfig:
    def __init__(self, sees: bool = False) -> None:
        self.layers, self.sees = [None] * 6, sees

    def build(self) -> Model:
        return Model(len(self.layers), self.sees)


def generate_llm_fqn_per_model_part(*sizes: int) -> list[list[str]]:
    return _generate_llm_fqn_per_model_part(*sizes)


def pipeline_module_split(*args: Any, **kwargs: Any) -> tuple[list[PipelineStage], list[nn.Module]]:
    return _pipeline_module_split(*args, **kwargs)


def pipeline_by_own_functions(model: nn.Module, **given: Any) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    parallelism, name = given["parallelism"], given["parallelism"].pipeline_parallel_schedule
    per_rank = 1 if issubclass(get_schedule_class(name), PipelineScheduleSingle) else 2
    names = generate_llm_fqn_per_model_part(per_rank * parallelism.pipeline_parallel_degree, 6, 1, 1)
    mesh = given["parallel_dims"].get_mesh("pp")
    stages, parts = pipeline_module_split(model, mesh, name, given["device"], names)
    number, loss_fn = parallelism.num_pp_microbatches, given["loss_fn"]
    schedule = _build_pipeline_schedule(
        parallelism=parallelism, num_microbatches=number, stages=stages, loss_fn=loss_fn
    )
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
    class Config(Trainer.Config):  # type: ignore[misc]
        pass

    def train_step(self, data_iterator: Any) -> None:
        raise NotImplementedError("of another library")


class EngineTrainer(Trainer):  # type: ignore[misc]
    has_engine = True

    class Config(Trainer.Config):  # type: ignore[misc]
        pass


def job(pipelining_fn: Callable[..., Any], sees: bool = False, kind: type[Trainer] = Trainer) -> Callable[[], Any]:
    return lambda: kind.Config(model_spec=ModelSpec(ModelConfig(sees), pipelining_fn, lambda part: part))


llm, vlm = job(pipeline_llm), job(pipeline_vlm, sees=True)
own_functions, runtime = job(pipeline_by_own_functions), job(pipeline_by_runtime)
own_trainer = job(pipeline_llm, kind=OwnTrainer)
with_engine = job(pipeline_llm, kind=EngineTrainer)
