"""Pipelines of Primus' Megatron backend on the CPU, with zbpipe's schedules. Each process is one rank.

    python -m torch.distributed.run --standalone --nproc-per-node 4 tests/primus_megatron_job.py [PATH OF PRIMUS]

Runner, handlers and the store of weight gradients are those of Primus at this path, by default the stand-in's. The few
functions of Megatron that they call are always the stand-in's. With a path, Primus' own tests of its schedules and
its runner run first, with zbpipe's schedules under their names.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbpipe
from zbpipe.frameworks import primus_megatron

STAND_IN = Path(__file__).parent / "primus_stand_in"
WIDTH, ROWS = 6, 3
FIELDS = {"patch_primus_pipeline": True, "pp_algorithm": "zbpipe", "micro_batch_size": ROWS}
CASES: list[tuple[str, int, int, int]] = [
    *(("ZBH1", 2, 1, 5), ("ZBH1", 4, 1, 3), ("1F1B", 4, 1, 6), ("ZB", 4, 1, 6)),
    *(("ZBV", 2, 2, 3), ("ZBV", 4, 2, 9), ("ZB", 4, 2, 6), ("ZB", 2, 2, 1), ("VMin", 4, 2, 6)),
    *(("ZBLoop", 2, 4, 4), ("ZBLoop", 4, 4, 8), ("Interleaved1F1B", 4, 2, 8), ("plan.csv", 4, 2, 7)),
]
"""Schedules with their ranks, stages per rank and microbatches."""


class Product(torch.autograd.Function):
    """A product whose weight gradient goes to Primus' store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        from primus.core.pipeline_parallel.handler.wgrad_handler import WGradRunningCache

        x, weight = ctx.saved_tensors

        def add() -> None:
            weight.grad = grad.T @ x if weight.grad is None else weight.grad + grad.T @ x

        WGradRunningCache.append(add)
        return grad @ weight, None


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Product.apply(x, self.weight))


def forward_step(data: Iterator[tuple[Tensor, Tensor]], stage: Stage, received: Tensor | None) -> tuple[Tensor, Any]:
    x, target = next(data)
    x = x.clone().requires_grad_() if received is None else received
    return stage(x), lambda output: (output - target).square().sum()


def train(rank: int, group: Any, name: str, stages_per_rank: int, microbatches: int) -> None:
    """Train a step on the pipeline, and compare this rank's gradients with those of the whole model."""
    from megatron.core import parallel_state
    from megatron.training import global_vars
    from primus.backends.megatron.core.pipeline_parallel.primuspipe import handlers, pipeline_launcher
    from primus.core.pipeline_parallel.handler.wgrad_handler import WGradRunningCache
    from primus.core.pipeline_parallel.scheduler.schedule_table_factory import produce_schedule_instance
    from primus.core.pipeline_parallel.scheduler.scheduler import ScheduleRunner

    ranks = group.size()
    params = SimpleNamespace(
        **FIELDS,
        zbpipe_schedule=name,
        pipeline_model_parallel_size=ranks,
        num_virtual_stages_per_pipeline_rank=stages_per_rank,
        global_batch_size=ROWS * microbatches,
    )
    primus_megatron.plug_in(params)
    parallel_state.pipeline.group, parallel_state.pipeline.stages_per_rank = group, stages_per_rank
    global_vars.args.pp_algorithm = params.pp_algorithm
    launcher: Any = pipeline_launcher.PrimusPipelineParallelLauncher()
    made = produce_schedule_instance(launcher.pp_algorithm, launcher.pp_size, launcher.vpp_size, microbatches)
    table = made.generate_schedule_table()
    torch.manual_seed(7)
    stages = [Stage() for _ in range(ranks * stages_per_rank)]
    batches = [tuple(torch.randn(2, ROWS, WIDTH, dtype=torch.float64)) for _ in range(microbatches)]
    own = [stages[stage] for stage in made.placement.stages_on(rank)]
    losses: list[Tensor] = []
    bind(
        table[rank],
        made,
        rank,
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in own],
        models=own,
        num_microbatches=microbatches,
        forward_data_store=losses,
        pp_group=group,
    )
    handlers.communication_handler.reset_pp_comm_caches()
    ScheduleRunner(handlers.megatron_primuspipe_handler_dict).run(table, rank)
    assert WGradRunningCache.is_empty()
    expected = [(reduce(run, stages, x) - target).square().sum() for x, target in batches]
    weights = [stage.weight for stage in own]
    torch.testing.assert_close([each.grad for each in weights], list(torch.autograd.grad(sum(expected), weights)))
    if rank == made.last_pp_stage_rank():
        torch.testing.assert_close(losses, [each.detach() for each in expected])
    assert len(losses) == (microbatches if rank == made.last_pp_stage_rank() else 0)


def run(x: Tensor, stage: Stage) -> Tensor:
    """A stage without zbpipe and Primus."""
    return torch.tanh(x @ stage.weight.T)


def bind(row: Sequence[Any], made: Any, rank: int, **given: Any) -> None:
    """Give the nodes what Primus' launcher gives them."""
    where = {"pp_size": made.pp_size, "vpp_size": made.vpp_size, "pp_rank": rank}
    constants = {
        "config": SimpleNamespace(deallocate_pipeline_outputs=False),
        "dtype": torch.float64,
        "model_type": None,
        "collect_non_loss_data": False,
        "is_last_stage": False,
        "cp_group_size": 1,
        "total_num_tokens": torch.tensor(0),
        "send_tensor_shapes": [(ROWS, WIDTH)],
        "recv_tensor_shapes": [(ROWS, WIDTH)],
    }
    for node in row:
        node.args = {**(node.args or {}), **constants, **given}
        node.meta = where | {"last_pp_stage_rank": made.last_pp_stage_rank()}


def on_the_cpu() -> None:
    """What Primus' own files import from Megatron and do not use here, and what they take from a GPU."""
    from megatron.core.pipeline_parallel import schedules

    torch.cuda.Stream = SimpleNamespace  # type: ignore[assignment, misc]
    torch.cuda.current_device = partial(torch.device, "cpu")  # type: ignore[assignment]
    for name in ("clear_embedding_activation_buffer", "finish_embedding_wgrad_compute", "get_tensor_shapes"):
        setattr(schedules, name, None)
    for name in ("enums", "utils", "process_groups_config", "pipeline_parallel.utils"):
        sys.modules[f"megatron.core.{name}"] = MagicMock()
    sys.modules["megatron.core.pipeline_parallel.p2p_communication"] = MagicMock()


UNDER_THEIR_NAMES = {
    "1f1b": "1F1B",
    "1f1b-interleaved": "Interleaved1F1B",
    "zero-bubble": "ZBH1",
    "zero-bubble-heuristic": "ZB",
    "zbv-formatted": "ZBV",
    "v-half": "VHalf",
    "v-min": "VMin",
}


def run_tests_of(primus: Path) -> None:
    """All but those that expect an AssertionError for a wrong number of stages, where ours is a ValueError."""
    import pytest
    from primus.core.pipeline_parallel.scheduler.schedule_table_factory import pp_algorithm_map

    for theirs, ours in UNDER_THEIR_NAMES.items():
        pp_algorithm_map[theirs] = primus_megatron.class_of(primus_megatron.Choice.of(ours))
    folder = primus / "tests" / "unit_tests" / "core" / "pipeline_parallel"
    assert pytest.main([str(folder), "-q", "-p", "no:cacheprovider", "--noconftest", "-k", "not requires"]) == 0


def main(primus: Path | None = None) -> None:
    sys.path[:0] = [str(primus), str(STAND_IN)] if primus else [str(STAND_IN)]
    if primus:
        on_the_cpu()
    dist.init_process_group("gloo")
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    if primus and rank == 0:
        run_tests_of(primus)
    if rank == 0:
        found = zbpipe.plan(4, 7, (1, 1.1, 0.9), memory_limit=4, placements="v", budget=1e4)
        Path("plan.csv").write_text(found.schedule.to_csv())
    for name, ranks, stages_per_rank, microbatches in CASES:
        dist.barrier()
        if rank < ranks:
            group = pair if ranks == 2 else dist.group.WORLD
            train(rank, group, name, stages_per_rank, microbatches)
    dist.barrier()
    print(f"rank {rank}: {len(CASES)} pipelines with the gradients of the whole model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
