"""Compiled stages are compiled before the first message, and nothing else of that shows."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import WIDTH
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime import schedules

RANKS, MICROBATCHES, STEPS = 2, 4, 2


class Counting(nn.Module):
    """Has a buffer that every forward changes, and draws random numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.seen += 1
        return x + self.dropout(self.down(torch.relu(self.up(x)))) * scale


class Compiler:
    """Makes nothing faster, and counts the graphs that it was given."""

    def __init__(self) -> None:
        self.graphs = 0
        self.backend = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return make_boxed_func(graph.forward)


def train(shapes_are_given: bool, is_sharded: bool) -> tuple[list[Any], dict[str, Tensor], int, int]:
    """Losses, gradients and buffers; and how many graphs were compiled before the first action, and in all."""
    torch.compiler.reset()
    rank, compiler = dist.get_rank(), Compiler()
    modules = {index: Counting(index) for index in zbpipe.stage_indices("ZBV", rank=rank, num_ranks=RANKS)}
    stages = []
    for index, module in modules.items():
        module.compile(backend=compiler.backend, fullgraph=True)
        if is_sharded:
            meshes = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
            fully_shard(module, mesh=meshes["dp"])
        given: dict[str, Any] = {}
        if shapes_are_given:
            given["input_args"] = torch.empty(2, WIDTH, requires_grad=index > 0)
            given["output_args"] = torch.empty(2, WIDTH, requires_grad=True)
        stages.append(PipelineStage(module, index, 2 * RANKS, torch.device("cpu"), **given))
    schedule: Any = zbpipe.build_pipeline_schedule("ZBV", stages, MICROBATCHES, nn.functional.mse_loss)
    before: list[int] = []
    for stage in schedule._stages:
        forward = stage.forward_one_chunk
        stage.forward_one_chunk = lambda *args, forward=forward, **kwargs: (
            before.append(compiler.graphs),
            forward(*args, **kwargs),
        )[1]
    torch.manual_seed(7 + rank)
    x, losses = torch.linspace(-1, 1, 2 * MICROBATCHES * WIDTH).view(-1, WIDTH), []
    for step in range(STEPS):
        found: list[Tensor] = []
        schedule.step(
            *([x] if 0 in modules else []),
            target=x.flip(0) if 0 in modules else None,
            losses=found,
            scale=torch.full((2 * MICROBATCHES, 1), 1.0 + step),
        )
        losses += [loss.detach() for loss in found]
    values = {f"{n}.{name}": buffer for n, module in modules.items() for name, buffer in module.named_buffers()}
    for n, module in modules.items():
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            values[f"{n}.{name}"] = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return losses, values, before[0], compiler.graphs


def train_in_all_ways() -> list[tuple[Any, Any]]:
    """With and without a warm-up: torch infers the shapes; or they are given, and FSDP2 is around the stages."""
    found = []
    for way in ((False, False), (True, True)):
        warm = train(*way)
        with mock.patch.object(schedules, "warm_up"):
            found.append((warm, train(*way)))
    return found


@pytest.mark.long
@pytest.mark.versions
def test_compiled_before_the_first_message() -> None:
    for found in run_ranks(RANKS, train_in_all_ways):
        for warm, cold in found:
            (losses, values, before, graphs), (cold_losses, cold_values, cold_before, cold_graphs) = warm, cold
            assert before == graphs == cold_graphs
            assert cold_before < graphs
            assert len(losses) in (0, STEPS * MICROBATCHES)
            torch.testing.assert_close((losses, values), (cold_losses, cold_values), rtol=0, atol=0)
