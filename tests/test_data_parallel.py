"""Stages under data parallelism: the gradients of the model in one piece, however the replicas share the weights.

Four real processes over gloo: two pipeline ranks times two data-parallel ones. When a group is reduced: test_reduction.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import pytest
import torch
from models import Block, batch, build_stage, without_pipeline
from pipelines import TOLERANCE, Pipeline, on_one_rank
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

import zbpipe
from zbpipe.runtime._torch import pipelining
from zbpipe.schedule import registry

PIPELINE, DATA = 2, 2

DataParallel = Literal["fully_shard", "hybrid", "replicate"]
WAYS: tuple[DataParallel, ...] = get_args(DataParallel)
Gradients = dict[str, Tensor]


class Training(NamedTuple):
    """How one schedule trains the model."""

    schedule: str
    reshard_after_forward: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012
    sizes: tuple[int, int] = (3, 3)
    """Microbatches of each step."""
    accumulates: bool = False
    """Whether the gradients of all steps add up."""
    has_experts: bool = False
    """Whether some layers are sharded on another mesh."""
    ways: tuple[DataParallel, ...] = WAYS


# Sharding a stage between its actions and waiting late are options of newer versions of torch.
SHARDED_OFTEN = {"max_active_stages": 1, "defer_reduce_grad_wait": True}
TRAININGS = {
    **{name: Training(name) for name in ("ZBV", "ZBH1", "1F1B")},
    "ZBV, sharded often": Training(
        "ZBV",
        reshard_after_forward=True,
        options={name: value for name, value in SHARDED_OFTEN.items() if name in pipelining.SCHEDULE_OPTIONS},
        ways=("fully_shard",),
    ),
    "ZBV, resharded": Training("ZBV", options={"fsdp_mode": "reshard"}),
    "ZBV, late": Training("ZBV", options={"fsdp_mode": "torch"}, ways=("fully_shard",)),
    "ZBV, two sizes": Training("ZBV", sizes=(3, 4), ways=("fully_shard",)),
    "ZBV, accumulating": Training("ZBV", accumulates=True, ways=("hybrid",)),
    "ZBV, experts": Training("ZBV", has_experts=True, ways=("hybrid",)),
}
RUNS = [(way, name) for name, each in TRAININGS.items() for way in each.ways]


@cache
def all_runs() -> list[dict[tuple[DataParallel, str], list[Gradients]]]:
    """By rank, training and step. One start of the processes serves all tests."""
    return run_ranks(PIPELINE * DATA, train_all, timeout=600)


def train_all() -> dict[tuple[DataParallel, str], list[Gradients]]:
    meshes = {parallel: make_mesh(parallel) for parallel in WAYS}
    return {(way, name): train(way, meshes[way], TRAININGS[name]) for way, name in RUNS}


def make_mesh(parallel: DataParallel) -> DeviceMesh:
    if parallel == "hybrid":  # as TorchTitan builds it for data_parallel_replicate_degree
        return init_device_mesh("cpu", (PIPELINE, DATA, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pp", "dp"))


def train(parallel: DataParallel, mesh: DeviceMesh, training: Training) -> list[Gradients]:
    """The whole gradients of this rank's stages."""

    def build(index: int, num_stages: int) -> nn.Module:
        module = build_stage(index, num_stages)
        for group in groups_of(module):
            parallelize(parallel, mesh, training, group)
        return module

    size, found = training.sizes[0], []
    pipeline = Pipeline(training.schedule, size, build, group=mesh.get_group("pp"), **training.options)
    for step, count in enumerate(training.sizes):
        tokens, targets = (each.chunk(DATA)[mesh.get_local_rank(1)] for each in batch(DATA * count, step))
        if training.accumulates:
            for module in pipeline.modules.values():
                module.set_requires_gradient_sync(False)  # type: ignore[operator]
        else:
            pipeline.zero_grad()
        pipeline.run(tokens, target=targets, **({} if count == size else {"microbatches": count}))  # type: ignore[arg-type]
        whole: dict[str, Any] = pipeline.gradients()
        found.append({name: gradient.full_tensor().clone() for name, gradient in whole.items()})
    return found


def groups_of(module: nn.Module) -> Iterator[Any]:
    """What TorchTitan wraps, in its order: each layer, the last two of the model as one group, and the stage."""
    groups: list[Any] = list(module.children())
    if isinstance(groups[-1], nn.Linear):
        groups[-2:] = [groups[-2:]]
    yield from (*groups, module)


def parallelize(parallel: DataParallel, mesh: DeviceMesh, training: Training, group: Any) -> None:
    if training.has_experts and isinstance(group, Block):
        shard_experts(group, mesh)
    elif parallel == "replicate":
        replicate(group, mesh=mesh["dp"])
    else:
        fully_shard(
            group,
            mesh=mesh["dp"] if parallel == "fully_shard" else mesh["dp_replicate", "dp_shard"],
            reshard_after_forward=training.reshard_after_forward,
        )
    for module in group if isinstance(group, list) else [group]:
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales


def shard_experts(block: Block, mesh: DeviceMesh) -> None:
    """Two layers of the block on another mesh: one as a module of its own, one as a second group of the block."""
    own, rest = mesh["dp_replicate"], mesh["dp_replicate", "dp_shard"]
    placed = ShardPlacementResult(Shard(0), FSDPMeshInfo(own, shard_mesh_dim=0))
    fully_shard(block.down, mesh=own).set_force_sum_reduction_for_comms(True)
    fully_shard(block, mesh=rest, shard_placement_fn=lambda each: placed if each is block.twice.weight else None)


@cache
def plain_gradients(num_stages: int, count: int, step: int) -> Gradients:
    """Those of the same model in one piece, over the batch of all ranks."""
    return without_pipeline(num_stages, DATA * count, *batch(DATA * count, step))[1]


@pytest.mark.parametrize(("parallel", "name"), RUNS)
def test_gradients_equal_those_of_the_model_in_one_piece(parallel: DataParallel, name: str) -> None:
    training = TRAININGS[name]
    num_stages = registry.resolve(training.schedule).place(PIPELINE).num_stages
    for step, count in enumerate(training.sizes):
        expected = plain_gradients(num_stages, count, step)
        if training.accumulates and step:
            earlier = plain_gradients(num_stages, training.sizes[0], 0)
            expected = {parameter: gradient + earlier[parameter] for parameter, gradient in expected.items()}
        found = [runs[parallel, name][step] for runs in all_runs()]
        assert {parameter for each in found for parameter in each} == expected.keys()
        for gradients in found:
            for parameter, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[parameter], **TOLERANCE, msg=f"{parameter}, step {step}")


@pytest.mark.parametrize("split", ["deferred", "autograd"])
def test_parts_that_fsdp_would_reduce_before_w_are_refused(one_rank: None, split: str) -> None:
    """torch's stages put the reduction off for a stage that is an FSDP module as a whole, and for nothing else."""
    modules: list[Any] = [build_stage(0, 2), build_stage(1, 2)]
    fully_shard(modules[0][1], mesh=init_device_mesh("cpu", (1,)))
    schedule = on_one_rank(modules, 2, split_backward=split)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(zbpipe.PipelineError, match=r"stage 0: fully_shard wraps parts of the stage, not the stage"):
        schedule.step(tokens, target=tokens)
