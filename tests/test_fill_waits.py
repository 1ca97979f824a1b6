"""W's products in the waits of F, I and B: the same bits, and the same collectives in the same order.

Four real ranks over gloo: two of the pipeline, each with two of tensor, sequence, expert or context parallelism. The
budgets of the waits are random, and other ones on each rank: whatever ranks choose, they must not wait forever.
"""

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Block, FeedForward
from models import Checkpointing, checkpointed
from pipelines import Pipeline, as_rank, on_one_rank, squared_error
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zbpipe
from zbpipe.costs.model import CostModel, Link
from zbpipe.runtime.split.stage import find_split
from zbpipe.runtime.split.waits import MEASURED_STEP
from zbpipe.runtime.verify.gradient_check import schedule_w_last
from zbpipe.schedule import registry
from zbpipe.schedule.ir import OpKind
from zbpipe.simulator.offloading import offload

DIM, SEQUENCE, HEADS, BATCH, MICROBATCHES = 16, 8, 4, 2, 4
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
    layer: Callable[..., nn.Module] = Context
    """Of `Sharded`, whose DTensors take five times the work, a stage has one, of others two."""
    schedule: Any = "ZBV"
    checkpointing: Checkpointing = "none"
    how: str = "all"
    is_fsdp: bool = False
    """Whether FSDP2 shards the stages over two ranks, which are then no pipeline."""
    in_bfloat16: bool = False
    """FSDP2 then reduces in float32."""


B_BEFORE_W = zbpipe.Schedule.from_csv(
    "0F0,0I0,0W0,0F1,0F2,0I1,0B2,0W1,0F3,0I3,0W3\n1F0,1I0,1W0,1F1,1I1,1F2,1B2,1W1,1F3,1I3,1W3", name="B before W"
)
"""Adds the gradients of microbatch 2 before those of 1, whose I comes first. With a third term in the sum, the order of
these two makes a difference."""
W_LAST = zbpipe.Schedule.from_csv(
    "0F0,1F0,0F1,1F1,1I0,0I0,1I1,0I1,0F2,1F2,0F3,1F3,1I2,0I2,1I3,0I3,1W0,0W0,1W1,0W1,1W2,0W2,1W3,0W3", name="W last"
)
"""On one rank: the products of two microbatches wait when 0F2 runs."""
NAMES = [each.name for each in registry.schedules().values() if each.source == "zbpipe" and each.name != "Auto"]
CASES = {
    **{name: Case(schedule=name) for name in NAMES},
    "own ZB": Case(schedule="ZB", how="own"),
    "own ZBV": Case(Sharded, checkpointing="selective", how="own"),
    **{
        f"{layer.__name__} {each}": Case(layer, checkpointing=each)
        for layer in (Sharded, Experts, Context)
        for each in ("none", "selective", "full")
    },
    "FSDP2": Case(Sharded, is_fsdp=True),
    "FSDP2 full": Case(Sharded, is_fsdp=True, checkpointing="full"),
    "FSDP2 bfloat16": Case(schedule=W_LAST, is_fsdp=True, in_bfloat16=True),
    "ZB bfloat16": Case(schedule="ZB", in_bfloat16=True),
    "B before W": Case(schedule=B_BEFORE_W),
    "spmd_types": Case(Typed),
}


SHORT = ("B before W", "own ZBV", "Experts full", "ZB bfloat16", "FSDP2 bfloat16")
WHOLE = zbpipe.Schedule.from_csv("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1", name="whole backwards")


def compiled(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def build(case: Case, mesh: DeviceMesh, shards: DeviceMesh | None, index: int, num_stages: int) -> nn.Module:
    torch.manual_seed(index)
    layers = [case.layer(mesh, case.checkpointing) for _ in range(1 if case.layer is Sharded else 2)]
    module = nn.Sequential(*layers)
    if shards is not None:
        for each in (*layers, module):
            dtypes = (torch.bfloat16, torch.float32) if case.in_bfloat16 else ()
            policy = MixedPrecisionPolicy(*dtypes)
            fully_shard(each, mesh=shards, reshard_after_forward=False, mp_policy=policy)
            each.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has none that scales
    elif case.in_bfloat16:
        module.bfloat16()
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


def choose_budgets(waits: Any, ops: Iterable[str], seed: object) -> dict[str, list[float]]:
    """Random ones for each wait, from none to more than everything, other ones on each rank. Of seed 0: everything
    in F, which then adds the products of several microbatches to a weight, one right after the other."""
    if seed == 0:
        return {op: [1e12 * (op[0] == "F")] * 40 for op in ops}
    draw = random.Random(f"{seed} {dist.get_rank()}")
    sizes = sorted(waits._may_fill.values())
    choices = [0.0, sizes[0] / 2, *sizes, 1e12]
    return {op: draw.choices(choices, [5, *[1] * (len(choices) - 1)], k=40) for op in ops}


class Found(NamedTuple):
    is_equal: bool
    """Whether gradients, losses and collectives were those of the step without fills, for all seeds."""
    filled: int
    """Number of products that ran in waits."""
    budgets: Mapping[str, Sequence[float]]
    """As agreed by the ranks."""
    kinds: frozenset[str]
    """Kinds of ops that the list has."""


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
    x = x.bfloat16() if case.in_bfloat16 and not case.is_fsdp else x
    waits = pipeline.schedule.waits

    def step() -> tuple[list[float], list[Tensor], Log]:
        log: Log = []
        pipeline.zero_grad()
        with logging_launches(log):
            losses = pipeline.run(x, target=target)
        grads: list[Any] = [each.grad for each in pipeline.parameters()]
        return losses, [each.to_local() if isinstance(each, DTensor) else each for each in grads], log

    waits._steps = MEASURED_STEP - 2  # the step after the first one is measured
    for _ in range(2):
        assert not waits.is_decided
        assert not pipeline.schedule.is_steady
        step()
    budgets, waits.budgets = waits.budgets, {}
    assert len({find_split(stage).waits for stage in pipeline.stages}) == 1  # type: ignore[union-attr]
    losses, gradients, log = step()
    assert not waits.filled
    is_equal = len(log) > MICROBATCHES
    ops = [op for op in budgets if case.how == "all" or op[0] != "F"]
    for seed in range(seeds):
        waits.budgets = choose_budgets(waits, ops, seed)
        now = step()
        is_equal &= now[0] == losses and now[2] == log and all(map(torch.equal, now[1], gradients))
    kinds = frozenset(op.kind.value for row in pipeline.schedule.schedule for op in row)
    return Found(is_equal, waits.filled, budgets, kinds)


def train_all(names: Sequence[str]) -> dict[str, Found]:
    return {name: train(CASES[name], 3) for name in names}


@cache
def all_found(*names: str) -> list[dict[str, Found]]:
    """By rank. One start of the processes serves all tests."""
    return run_ranks(4, train_all, names, timeout=600)


def check(name: str, found: Sequence[Found]) -> None:
    first, second, *others = found
    assert all(each.is_equal for each in found)
    assert all(each.filled for each in found)
    # Both ranks of a stage have the same budgets; measured by the one that asked first.
    assert first.budgets == second.budgets
    assert all(each.budgets == others[0].budgets for each in others)
    assert {op[0] for op in first.budgets} == first.kinds - {"W"}
    if CASES[name].how == "own":
        assert not any(budget for op, budget in first.budgets.items() if op[0] == "F")


OTHERS = tuple(sorted(CASES.keys() - {*SHORT}))
TRAINED = [(SHORT, name) for name in SHORT] + [pytest.param(OTHERS, name, marks=pytest.mark.long) for name in OTHERS]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("together", "name"), TRAINED, ids=[*SHORT, *OTHERS])
def test_gradients_and_collectives_are_the_same(together: tuple[str, ...], name: str) -> None:
    check(name, [each[name] for each in all_found(*together)])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_random_budgets_of_each_rank() -> None:
    found = run_ranks(4, train, CASES["Experts none"], 60, timeout=800)
    assert all(each.is_equal for each in found)


def on_this_rank(build: Callable[[], nn.Module] = lambda: nn.Linear(4, 4), **options: Any) -> Any:
    return on_one_rank([build(), build()], 2, loss=squared_error, fill_waits="own", **options)


def run_steps(schedule: Any, number: int = MEASURED_STEP) -> None:
    for _ in range(number):
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        (r"stage 0: the stage itself \(Linear\) is compiled", {"build": lambda: compiled(nn.Linear(4, 4))}),
        ("only zbpipe's split of the backward", {"split_backward": "autograd"}),
        ("only zbpipe's split of the backward", {"name": WHOLE}),
    ],
)
def test_where_it_cannot_work(
    one_rank: None, caplog: pytest.LogCaptureFixture, reason: str, options: dict[str, Any]
) -> None:
    schedule = on_this_rank(**options)
    run_steps(schedule)
    (said,) = [each for each in caplog.messages if "fill_waits" in each]
    assert re.search(f"fill_waits='own' changes nothing: {reason}", said)


def test_without_collectives_nothing_changes(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    schedule = on_this_rank()
    run_steps(schedule)
    (said,) = [each for each in caplog.messages if "fill_waits" in each]
    assert said == "fill_waits='own': no op waits for a collective for as long as a product of W takes (backend gloo)"
    assert not any(schedule.waits.budgets.values())
    assert schedule.is_steady


class Scattered(nn.Linear):
    """A linear layer with a collective in its backward, of one rank."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        group: Any = dist.group.WORLD
        return super().forward(funcol.all_to_all_single_autograd(input * 2, None, None, group) + 0)


class Barred(nn.Module):
    """Only the gradients of `once` may be added early. Those of the others would be added in another order."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.once, self.twice, self.mixed, self.shared = (*(Scattered() for _ in range(3)), shared)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.twice(self.twice(self.once(x))))
        return self.mixed(x) + (self.mixed.weight**2).sum()  # I adds to its gradient


def test_weights_whose_gradients_would_be_added_in_another_order_fill_nothing(one_rank: None) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    order = zbpipe.Schedule.from_csv(
        "0F0,1F0,1I0,0I0,0F1,1F1,1I1,0I1,0F2,1F2,1I2,0I2,1W0,0W0,1W1,0W1,1W2,0W2", name="W last"
    )
    parts = [Barred(shared), Barred(shared)]
    schedule: Any = on_one_rank(parts, 3, order, loss=squared_error, fill_waits="all")
    x = torch.randn(3, 4)

    def gradients() -> dict[str, Any]:
        for part in parts:
            part.zero_grad()
        schedule.step(x, target=x)
        return {f"{n}.{name}": each.grad for n, part in enumerate(parts) for name, each in part.named_parameters()}

    for _ in range(MEASURED_STEP):
        gradients()
    waits = schedule.waits
    names = {
        f"{n}.{name}"
        for n, part in enumerate(parts)
        for name, each in part.named_parameters()
        if id(each) in waits._may_fill
    }
    assert names == {"0.once.weight", "1.once.weight"}
    waits.budgets = {}
    known = gradients()
    waits.budgets = {f"{kind}{stage}": [1e9] * 9 for kind in "FI" for stage in (0, 1)}
    found = gradients()
    assert waits.filled
    assert all(torch.equal(each, found[name]) for name, each in known.items())


def test_checked_steps_are_filled(one_rank: None) -> None:
    """A check compares sums of all microbatches, and only its reference fills nothing."""
    schedule = on_this_rank(lambda: nn.Sequential(Scattered(), Scattered()))
    run_steps(schedule)
    schedule.adopt(schedule_w_last(2, 2, ["F", "I", "W"]))
    schedule.waits.budgets = {"I0": [1e9] * 4, "I1": [1e9] * 4}
    filled = []
    check = zbpipe.GradientCheck(schedule)
    for _ in range(2):
        run_steps(schedule, 1)
        filled.append(schedule.waits.filled)
    assert check.report is not None
    assert check.report.deferred
    assert 0 < filled[0] == filled[1] - filled[0]


def test_the_log_is_of_the_first_filled_step(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    """Also if that has another number of microbatches, and follows an evaluation."""
    caplog.set_level("INFO")
    schedule = on_this_rank(lambda: nn.Sequential(Scattered(), Scattered()))
    run_steps(schedule, MEASURED_STEP - 1)
    with patch.object(schedule.waits, "_find_budgets", lambda: {"I1": [0, 2 * 2 * 4 * 4]}):
        run_steps(schedule, 1)
    caplog.clear()
    schedule.eval(torch.ones(4, 4), target=torch.ones(4, 4))
    assert not caplog.messages
    for _ in range(2):
        schedule.step(torch.ones(6, 4), target=torch.ones(6, 4), microbatches=3)
    (said,) = [each for each in caplog.messages if "fill_waits" in each]
    assert said.startswith("fill_waits='own': W's products filled 100% of these waits, ")


def test_copies_and_receives_are_placed_for_times_without_fills() -> None:
    """With copies to the host nothing fills waits."""
    schedule = zbpipe.generate("ZBV", 2, 4)
    waits = {OpKind.F: (0.45,) * 4, OpKind.I: (0.45,) * 4}
    plain = replace(CostModel.uniform(schedule.placement, host=Link(bandwidth=2), waits=waits), link=Link(0.2))
    copied = offload(schedule, plain)
    assert copied.has_copies
    found = []
    with as_rank(0, 2):
        for how in ("off", "all"):
            stages = [PipelineStage(nn.Linear(4, 4), n, 4, torch.device("cpu")) for n in (0, 3)]
            runtime: Any = zbpipe.build_pipeline_schedule(
                copied, stages, 4, squared_error, costs=plain, transport="one queue", fill_waits=how
            )
            found.append([str(action) for action in runtime.pipeline_order_with_comms[0]])
    assert found[0] == found[1]


NAP = 0.02


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective takes a nap."""
    wait = funcol.wait_tensor

    def nap(tensor: Tensor) -> Tensor:
        time.sleep(NAP)
        return wait(tensor)

    monkeypatch.setattr(funcol, "wait_tensor", nap)


@pytest.mark.parametrize(("how", "expected"), [({}, "own"), ({"fill_waits": "off"}, "off"), ({"plain": True}, "off")])
def test_auto_plans_for_the_waits_that_it_measured(
    one_rank: None, naps: None, how: dict[str, Any], expected: str
) -> None:
    parts = [nn.Sequential(Scattered(), Scattered()) for _ in range(2)]
    options = {"fill_waits": "own", "profile_steps": 1, **how}
    schedule: Any = on_one_rank(parts, 2, "Auto", squared_error, **options)
    run_steps(schedule, 4)
    costs = schedule.costs.costs
    assert all(costs.waits[OpKind.I])
    assert costs == schedule.lists.costs
    assert costs.fill_waits == expected


def test_given_costs_are_filled_as_the_job_is(one_rank: None) -> None:
    costs = CostModel((1, 1), (1, 1), (1, 1), activations=(1, 1), waits={OpKind.I: 1}, fill_waits="all")
    assert on_this_rank(costs=costs).lists.costs == replace(costs, fill_waits="own")


def test_the_profiler_measures_waits_and_the_log_tells_how_much_of_them_is_filled(
    one_rank: None, caplog: pytest.LogCaptureFixture, naps: None
) -> None:
    """The profiled steps fill no waits, unlike those before and after."""
    caplog.set_level("INFO")
    schedule = on_this_rank(
        lambda: nn.Sequential(Scattered(), Scattered()), name=schedule_w_last(2, 2, ["F", "I", "W"])
    )
    run_steps(schedule, MEASURED_STEP + 1)
    assert schedule.waits.filled
    said = [each for each in caplog.messages if "fill_waits" in each]
    assert re.fullmatch(
        "fill_waits='own': the collectives in .* take as long as .* of W, and W's products fill them", said[0]
    )
    assert re.fullmatch(
        r"fill_waits='own': W's products filled \d+% of these waits, .* s of this step on this rank", said[1]
    )
    assert len(said) == 2
    profiler = zbpipe.Profiler(schedule, steps=1)
    filled = []
    for _ in range(4):  # to warm up, for memory, for times, and one more
        before = schedule.waits.filled
        run_steps(schedule, 1)
        filled.append(schedule.waits.filled - before)
    assert [bool(each) for each in filled] == [True, False, False, True]
    assert profiler.costs is not None
    costs: Any = profiler.costs.costs
    assert costs.fill_waits == "own"
    # The first layer computes no gradient of its input, and no collective.
    for kind, seconds, numbers in ((OpKind.F, costs.f, (2, 2)), (OpKind.I, costs.i, (1, 2))):
        for waits, whole, number in zip(costs.waits[kind], seconds, numbers, strict=True):
            assert number * NAP <= waits <= whole
