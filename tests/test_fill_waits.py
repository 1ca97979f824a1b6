"""W's products in the waits of F, I and B: the same bits, and the same collectives in the same order.

Four real ranks over gloo: two of the pipeline, each with two of tensor, sequence, expert or context parallelism. The
budgets of the waits are random, and other ones on each rank: whatever ranks choose, they must not wait forever.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Block, FeedForward
from models import Checkpointing, checkpointed
from pipelines import Pipeline, squared_error
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from zbpipe.runtime.split.stage import find_split
from zbpipe.schedule import registry

DIM, SEQUENCE, HEADS, BATCH, MICROBATCHES = 16, 8, 4, 2, 6
OPS = torch.ops._c10d_functional
LAUNCHES = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
Log = list[tuple[str, tuple[int, ...]]]


class Sharded(nn.Module):
    """Blocks with tensor and sequence parallelism, by DTensor. A rank has its part of the sequence."""

    def __init__(self, mesh: DeviceMesh, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.mesh = mesh
        block = Block(DIM, HEADS, HEADS, SEQUENCE)
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        back = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        of_attention = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        of_feed_forward = {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan = {
            **{"attention_norm": SequenceParallel(), "attention": whole, **of_attention, "attention.out": back},
            **{"feed_forward_norm": SequenceParallel(), "feed_forward": whole, **of_feed_forward},
        }
        parallelize_module(block, mesh, {**plan, "feed_forward.down": back})
        self.block = checkpointed(block, checkpointing)

    def forward(self, x: Tensor) -> Tensor:
        result: DTensor = self.block(DTensor.from_local(x, self.mesh, [Shard(1)]))
        return result.to_local()


class Experts(nn.Module):
    """A token goes to one of two experts, each on a rank: all-to-all of as many rows as there are."""

    def __init__(self, mesh: DeviceMesh, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.router = nn.Linear(DIM, dist.get_world_size(self.group), bias=False)
        self.own = checkpointed(FeedForward(DIM, 2 * DIM), checkpointing)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        scores, owner = self.router(rows).softmax(-1).max(-1)
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=scores.numel() and self.router.out_features)
        sent = counts.tolist()
        got = (funcol.all_to_all_single(counts, None, None, self.group) + 0).tolist()
        here = funcol.all_to_all_single_autograd(rows[order], got, sent, self.group) + 0
        back = funcol.all_to_all_single_autograd(self.own(here), sent, got, self.group) + 0
        mixed = torch.empty_like(back).index_copy(0, order, back) * scores.unsqueeze(1)
        return x + mixed.view_as(x)


class Context(nn.Module):
    """Attention of a rank's part of the sequence to all of it."""

    def __init__(self, mesh: DeviceMesh, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.query, self.key, self.value = (checkpointed(nn.Linear(DIM, DIM), checkpointing) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        key, value = (funcol.all_gather_tensor_autograd(of(x), 1, self.group) for of in (self.key, self.value))
        return x + F.scaled_dot_product_attention(self.query(x), key + 0, value + 0)


class Typed(nn.Module):
    """Sequence parallelism by the synchronous collectives of spmd_types, the default of TorchTitan 0.3."""

    def __init__(self, mesh: DeviceMesh, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.up, self.down = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        import spmd_types as spmd

        whole = spmd.all_gather(x, self.group, src=spmd.S(1), dst=spmd.R)
        summed = spmd.reduce_scatter(self.down(F.silu(self.up(whole))), self.group, src=spmd.P, dst=spmd.S(1))
        return x + summed


class Case(NamedTuple):
    layer: Callable[..., nn.Module] = Sharded
    schedule: str = "ZBV"
    checkpointing: Checkpointing = "none"
    how: str = "all"
    is_fsdp: bool = False
    """Whether FSDP2 shards the stages over two ranks, which are then no pipeline."""


NAMES = [each.name for each in registry.schedules().values() if each.source == "zbpipe" and each.name != "Auto"]
CASES = {
    **{name: Case(schedule=name) for name in NAMES},
    **{f"own {name}": Case(schedule=name, how="own") for name in ("ZB", "ZBV")},
    **{
        f"{layer.__name__} {each}": Case(layer, checkpointing=each)
        for layer in (Sharded, Experts, Context)
        for each in ("none", "selective", "full")
    },
    "FSDP2": Case(is_fsdp=True),
    "FSDP2 full": Case(is_fsdp=True, checkpointing="full"),
    "spmd_types": Case(Typed),
}


def build(case: Case, mesh: DeviceMesh, shards: DeviceMesh | None, index: int, num_stages: int) -> nn.Module:
    torch.manual_seed(index)
    layers = [case.layer(mesh, case.checkpointing) for _ in range(2)]
    module = nn.Sequential(*layers)
    if shards is not None:
        for each in (*layers, module):
            fully_shard(each, mesh=shards, reshard_after_forward=False)
            each.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has none that scales
    return module


class Launch(NamedTuple):
    name: str
    call: Any
    log: Log

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append((self.name, tuple(args[0].shape)))
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # policies of checkpoints read `.default`
        return getattr(self.call, name)


@contextmanager
def logging_launches(log: Log) -> Iterator[None]:
    """Context that logs each collective at its launch."""
    launches = {name: getattr(OPS, name) for name in LAUNCHES}
    of_dist = {name: getattr(dist, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}

    for owner, calls in ((OPS, launches), (dist, of_dist)):
        for name, call in calls.items():
            setattr(owner, name, Launch(name, call, log))
    try:
        yield
    finally:
        for owner, calls in ((OPS, launches), (dist, of_dist)):
            for name, call in calls.items():
                setattr(owner, name, call)


def choose_budgets(waits: Any, seed: object) -> None:
    """Random ones for each wait, from none to more than everything."""
    draw = random.Random(f"{seed} {dist.get_rank()}")
    sizes = sorted(waits._may_fill.values())
    choices = [0.0, sizes[0] / 2, *sizes, 1e12]
    waits.budgets = {op: draw.choices(choices, [5, *[1] * (len(choices) - 1)], k=40) for op in waits.budgets}


class Found(NamedTuple):
    decided_after: int
    is_equal: bool
    """Whether gradients, losses and collectives were those of the step without fills, for all seeds."""
    filled: int
    num_products: int
    """Of W in a step."""
    budgets: dict[str, Any]


def train(case: Case, seeds: int) -> Found:
    if case.is_fsdp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group, shards = dist.new_subgroups(1)[0], mesh["dp"]
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        group, shards = mesh.get_group("pp"), None
    make = partial(build, case, mesh["tp"], shards)
    pipeline = Pipeline(case.schedule, MICROBATCHES, make, squared_error, group=group, fill_waits=case.how)
    torch.manual_seed(10 + dist.get_rank())
    x, target = torch.randn(2, BATCH * MICROBATCHES, SEQUENCE // 2, DIM)
    waits = pipeline.schedule.waits

    def step() -> tuple[list[float], list[Tensor], Log]:
        log: Log = []
        pipeline.zero_grad()
        with logging_launches(log):
            losses = pipeline.run(x, target=target)
        grads: list[Any] = [each.grad for each in pipeline.parameters()]
        return losses, [each.to_local() if isinstance(each, DTensor) else each for each in grads], log

    number = 0
    while not waits.is_decided:
        step()
        number += 1
        assert number < 6, "it never decides"
    budgets, waits.budgets = dict(waits.budgets), {}
    losses, gradients, log = step()
    splits = [find_split(stage) for stage in pipeline.stages]
    assert all(split is not None and not any(split.deferred.values()) for split in splits)
    is_equal, waits.filled = True, 0
    for seed in range(seeds):
        waits.budgets = dict.fromkeys(budgets, ())
        choose_budgets(waits, seed)
        now = step()
        is_equal &= now[0] == losses and now[2] == log and all(map(torch.equal, now[1], gradients))
    assert len(log) > MICROBATCHES
    products = sum(len(waits._may_fill) for _ in range(MICROBATCHES))
    return Found(number, is_equal, waits.filled, products, budgets)


@cache
def all_found() -> list[dict[str, Found]]:
    """By rank. One start of the processes serves all tests."""
    return run_ranks(4, train_all, timeout=600)


def train_all() -> dict[str, Found]:
    return {name: train(case, 3) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_collectives_are_the_same(name: str) -> None:
    if name == "spmd_types":
        pytest.importorskip("spmd_types")
    found = [each[name] for each in all_found()]
    print(found)
    assert all(each.is_equal for each in found)
    assert all(each.filled > 0 for each in found)
