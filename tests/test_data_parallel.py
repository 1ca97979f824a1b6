"""Stages under data parallelism: FSDP2 gathers, accumulates and reduces as ever, and every dW is there before it does.

Four real processes over gloo: two pipeline ranks times two data-parallel ones. The model is cut into quarters, and a
stage holds one of them or two neighbours, so all schedules train the same parameters under the same names.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import dropwhile
from typing import Any, Literal, NamedTuple, get_args
from unittest.mock import patch

import pytest
import torch
from models import Block, Checkpointing, batch, build_stage, loss_fn
from pipelines import TOLERANCE, Pipeline, on_one_rank
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import zbpipe
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.split.products import PendingGradient

QUARTERS, PIPELINE, DATA = 4, 2, 2

DataParallel = Literal["fully_shard", "hybrid", "replicate"]
WAYS: tuple[DataParallel, ...] = get_args(DataParallel)
Gradients = dict[str, Tensor]


class Training(NamedTuple):
    """How one schedule trains the model; the gradients are kept from every step."""

    schedule: str
    microbatches: int = 3
    steps: int = 2
    reshard_after_forward: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012
    checkpointing: Checkpointing = "none"
    compiled: bool = False
    later_microbatches: int = 0
    """The number in every step but the first, if it is another one."""
    accumulates: bool = False
    """Whether the gradients of all steps add up."""
    has_experts: bool = False
    """Whether some layers are sharded on another mesh."""
    ways: tuple[DataParallel, ...] = WAYS

    def size(self, step: int) -> int:
        return (self.later_microbatches if step else 0) or self.microbatches


class Run(NamedTuple):
    """What one rank saw of a training."""

    gradients: list[Gradients]
    """By step: those of this rank's stages, whole."""
    events: list[list[tuple[int, str]]]
    """By step: each B, I and W of a stage, and which parameter group of a stage was reduced, in order."""


# Sharding a stage between its actions and waiting late are options of newer versions of torch.
SHARDED_OFTEN = {"max_active_stages": 1, "defer_reduce_grad_wait": True}
TRAININGS = {
    "ZBV": Training("ZBV"),
    "ZBH1": Training("ZBH1"),
    "1F1B": Training("1F1B"),
    "ZBV, sharded often": Training(
        "ZBV",
        reshard_after_forward=True,
        options={name: value for name, value in SHARDED_OFTEN.items() if name in pipelining.SCHEDULE_OPTIONS},
        ways=("fully_shard",),
    ),
    "ZBV, resharded": Training("ZBV", options={"fsdp_mode": "reshard"}),
    "ZBV, late": Training("ZBV", options={"fsdp_mode": "torch"}, ways=("fully_shard",)),
    "ZBV, two sizes": Training("ZBV", later_microbatches=4, ways=("fully_shard",)),
    "ZBV, accumulating": Training("ZBV", accumulates=True, ways=("hybrid",)),
    "ZBV, experts": Training("ZBV", has_experts=True, ways=("hybrid",)),
}
SPLIT = ("ZBV", "ZBH1")


def _combinations() -> Iterator[tuple[bool, str, Training]]:
    """Schedules, data parallelism, checkpointing, eager or compiled; whether the training is a long one.

    ZBV has every kind of data parallelism, every other schedule one.
    """
    for row, schedule in enumerate(("ZBV", "ZB", "ZBH1", "VHalf")):
        for column in range(3) if schedule == "ZBV" else (row % 3,):
            parallel, checkpointing = WAYS[column], get_args(Checkpointing)[(row + column) % 3]
            compiled = (row + column) % 2 == 1
            name = ", ".join([schedule, parallel, checkpointing, *(["compiled"] if compiled else [])])
            training = Training(schedule, checkpointing=checkpointing, compiled=compiled, ways=(parallel,))
            yield column != row % 3, name, training


LONG = {name: training for is_long, name, training in _combinations() if is_long}
TRAININGS |= {name: training for is_long, name, training in _combinations() if not is_long}


Runs = dict[DataParallel, dict[str, Run]]


@cache
def all_runs(is_long: bool) -> list[Runs]:
    """By rank. One start of the processes serves all tests."""
    return run_ranks(PIPELINE * DATA, train_in_all_ways, LONG if is_long else TRAININGS, timeout=600)


def train_in_all_ways(trainings: dict[str, Training]) -> Runs:
    meshes = {parallel: _mesh(parallel) for parallel in WAYS}
    return {
        parallel: {name: train(parallel, mesh, each) for name, each in trainings.items() if parallel in each.ways}
        for parallel, mesh in meshes.items()
    }


def _mesh(parallel: DataParallel) -> DeviceMesh:
    if parallel == "hybrid":  # as TorchTitan builds it for data_parallel_replicate_degree
        return init_device_mesh("cpu", (PIPELINE, DATA, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pp", "dp"))


def train(parallel: DataParallel, mesh: DeviceMesh, training: Training) -> Run:
    run = Run([], [])

    def build(index: int, num_stages: int) -> nn.Module:
        module = _module(index, num_stages, training.checkpointing)
        for block in module.modules() if training.compiled else ():
            if isinstance(block, Block):
                block.compile(backend="aot_eager")
        for label, group in _groups(module):
            modules = group if isinstance(group, list) else [group]
            if label != "stage":
                for layer in (layer for each in modules for layer in each.modules()):
                    layer.place = index, label
            _parallelize(parallel, mesh, training, group)
            if not training.has_experts:  # torch has no hook for several meshes
                modules[0].set_all_reduce_hook(partial(_note_reduction, run, index, label))
        return module

    pipeline = Pipeline(training.schedule, training.microbatches, build, group=mesh.get_group("pp"), **training.options)
    for stage in pipeline.stages:
        _watch(stage, run)
    with patch.object(PendingGradient, "accumulate", _note_product(run)):
        for step in range(training.steps):
            _step(pipeline, mesh, training, step, run)
    return run


def _step(pipeline: Pipeline, mesh: DeviceMesh, training: Training, step: int, run: Run) -> None:
    count = training.size(step)
    tokens, targets = (t.chunk(DATA)[mesh.get_local_rank(1)] for t in batch(DATA * count, step))
    if training.accumulates:
        for module in pipeline.modules.values():
            module.set_requires_gradient_sync(False)  # type: ignore[operator]
    else:
        pipeline.zero_grad()
    run.events.append([])
    size: Any = {} if count == training.microbatches else {"microbatches": count}
    pipeline.run(tokens, target=targets, **size)
    run.gradients.append(_whole_gradients(pipeline.modules.values()))


def _module(index: int, num_stages: int, checkpointing: Checkpointing = "none") -> nn.Sequential:
    """One stage, whose layers and parameters bear the same names however many stages there are."""
    held = range(QUARTERS * index // num_stages, QUARTERS * (index + 1) // num_stages)
    quarters = {str(quarter): build_stage(quarter, QUARTERS, checkpointing) for quarter in held}
    return nn.Sequential(OrderedDict(quarters))


def _groups(module: nn.Sequential) -> Iterator[tuple[str, Any]]:
    """What TorchTitan wraps, in its order: each layer, the last two of the model as one group, and the stage."""
    for quarter, layers in module.named_children():
        groups: list[Any] = list(layers.children())
        if int(quarter) == QUARTERS - 1:
            groups[-2:] = [groups[-2:]]
        for number, group in enumerate(groups):
            yield f"{quarter}.{number}", group
    yield "stage", module


def _parallelize(parallel: DataParallel, mesh: DeviceMesh, training: Training, group: Any) -> None:
    if training.has_experts and isinstance(group, Block):
        _shard_experts(group, mesh)
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


def _shard_experts(block: Block, mesh: DeviceMesh) -> None:
    """Two layers of the block on another mesh: one as a module of its own, one as a second group of the block."""
    own, rest = mesh["dp_replicate"], mesh["dp_replicate", "dp_shard"]
    placed = ShardPlacementResult(Shard(0), FSDPMeshInfo(own, shard_mesh_dim=0))
    fully_shard(block.down, mesh=own).set_force_sum_reduction_for_comms(True)
    fully_shard(block, mesh=rest, shard_placement_fn=lambda each: placed if each is block.twice.weight else None)


def _note_product(run: Run) -> Callable[[PendingGradient], None]:
    accumulate = PendingGradient.accumulate

    def noted(gradient: PendingGradient) -> None:
        accumulate(gradient)
        if run.events:
            stage, group = gradient.layer.place  # type: ignore[misc]
            run.events[-1].append((stage, f"product {group}"))

    return noted


def _note_reduction(run: Run, stage: int, group: str, reduced: Tensor) -> None:
    run.events[-1].append((stage, f"reduce {group}"))


def _watch(stage: Any, run: Run) -> None:
    """Write each backward of the stage down when it is done."""
    backward, backward_weight = stage.backward_one_chunk, stage.backward_weight_one_chunk

    def noted_backward(*args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        backward(*args, full_backward=full_backward, **kwargs)
        run.events[-1].append((stage.stage_index, "B" if full_backward else "I"))

    def noted_backward_weight(*args: Any, **kwargs: Any) -> None:
        backward_weight(*args, **kwargs)
        run.events[-1].append((stage.stage_index, "W"))

    stage.backward_one_chunk, stage.backward_weight_one_chunk = noted_backward, noted_backward_weight


def _whole_gradients(modules: Any) -> Gradients:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.full_tensor().clone()
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


@cache
def plain_gradients(microbatches: int, step: int) -> Gradients:
    """Those of the same model in one piece, over the batch of all ranks, of the mean of the microbatches' losses."""
    model = _module(0, 1)
    for tokens, targets in _microbatches(microbatches, step):
        (loss_fn(model(tokens), targets) / (DATA * microbatches)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _microbatches(count: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All of them, `count` a rank."""
    tokens, targets = batch(DATA * count, step)
    yield from zip(tokens.chunk(DATA * count), targets.chunk(DATA * count), strict=True)


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        *((way, name) for name, each in TRAININGS.items() for way in each.ways),
        *(pytest.param(*each.ways, name, marks=pytest.mark.long) for name, each in LONG.items()),
    ],
)
def test_gradients_equal_those_of_the_model_in_one_piece(parallel: DataParallel, name: str) -> None:
    training, by_rank = (TRAININGS | LONG)[name], all_runs(name in LONG)
    for step in range(training.steps):
        expected = plain_gradients(training.size(step), step)
        for before in range(step) if training.accumulates else ():
            earlier = plain_gradients(training.size(before), before)
            expected = {parameter: gradient + earlier[parameter] for parameter, gradient in expected.items()}
        seen: set[str] = set()
        for runs in by_rank:
            found = runs[parallel][name].gradients[step]
            seen |= found.keys()
            for parameter, gradient in found.items():
                torch.testing.assert_close(
                    gradient,
                    expected[parameter],
                    **TOLERANCE,
                    msg=lambda m, p=parameter, s=step: f"{p}, step {s}: {m}",  # type: ignore[misc]
                )
        assert seen == expected.keys()


@pytest.mark.parametrize("name", [*SPLIT, "ZBV, resharded"])
@pytest.mark.parametrize("parallel", WAYS)
def test_each_group_is_reduced_once_a_step_with_its_last_product(parallel: DataParallel, name: str) -> None:
    """The stage's other products, which come later, hide the reduction."""
    count = TRAININGS[name].microbatches
    for step in range(TRAININGS[name].steps):
        reduced: list[str] = []
        unsplit: list[str] = []
        for runs in all_runs(False):
            for of_stage in _by_stage(runs[parallel][name].events[step]).values():
                assert of_stage.count("I") == of_stage.count("W") == count
                *_, before = (place for place, event in enumerate(of_stage[:-1]) if event in "IW")
                last_w = list(dict.fromkeys(of_stage[before + 1 : -1]))
                groups = [event.removeprefix("reduce ") for event in last_w if event.startswith("reduce")]
                # The embedding has no product, and is the first.
                expected = [f"{event} {group}" for group in groups for event in ("product", "reduce")]
                assert last_w == [event for event in expected if event != "product 0.0"]
                reduced += [event for event in of_stage if event.startswith("reduce")]
                assert all(event in last_w for event in reduced if event in of_stage)
            for of_stage in _by_stage(runs[parallel]["1F1B"].events[step]).values():
                unsplit += of_stage[count:]
        # One for the embedding, three for blocks and one for a block with the head; nothing is left for the stage.
        assert len(set(reduced)) == 5
        assert sorted(reduced) == sorted(DATA * list(set(reduced))) == sorted(unsplit)


def _by_stage(events: list[tuple[int, str]]) -> dict[int, list[str]]:
    """Without what comes before the first backward: torch finds out shapes by a forward and a backward of its own."""
    by_stage = defaultdict(list)
    for stage, event in dropwhile(lambda event: event[1].startswith("reduce"), events):
        by_stage[stage].append(event)
    return by_stage


@pytest.mark.parametrize("split", ["deferred", "autograd"])
def test_parts_that_fsdp_would_reduce_before_w_are_refused(one_rank: None, split: str) -> None:
    """torch's stages put the reduction off for a stage that is an FSDP module as a whole, and for nothing else."""
    modules: list[Any] = [build_stage(0, 2), build_stage(1, 2)]
    fully_shard(modules[0][1], mesh=init_device_mesh("cpu", (1,)))
    schedule = on_one_rank(modules, 2, split_backward=split)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(zbpipe.PipelineError, match=r"stage 0 has parts in fully_shard but is not in it itself"):
        schedule.step(tokens, target=tokens)


@pytest.mark.parametrize(
    "wrap",
    [
        replicate_by_ddp,
        lambda stage: replicate_by_ddp(stage[1]),
        lambda stage: setattr(stage, "1", DistributedDataParallel(stage[1])),
    ],
    ids=["by DDP", "in part by DDP", "in part in DDP"],
)
def test_ddp_which_would_reduce_before_w_is_refused(one_rank: None, wrap: Callable[[Any], object]) -> None:
    modules: list[Any] = [build_stage(0, 2), build_stage(1, 2)]
    wrap(modules[0])
    for split in ("deferred", "autograd"):
        with pytest.raises(ValueError, match=r"stage 0 .*fully_shard"):
            on_one_rank(modules, 2, split_backward=split)
