"""FSDP2's reductions beside the products of a stage's last W, in one process. With others: test_data_parallel.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pipelines import TOLERANCE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import weight_norm

import zbpipe
from zbpipe.runtime._torch import fsdp_reduction, hooks
from zbpipe.runtime.split.products import PendingGradient

WIDTH, ROWS = 8, 2
Events = list[str]


class Part(nn.Module):
    """A stage with every kind of parameter group: with products, without, of the stage itself, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.back = nn.Linear(2 * WIDTH, WIDTH)
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH))  # its products stay in I
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.normed(self.narrow(x)))
        return self.frozen(self.back(self.wide(h).tanh())) * self.scale + x


class Seldom(Part):
    """Multiplies with one weight for some microbatches only."""

    def forward(self, x: Tensor) -> Tensor:
        # By what the microbatch is, because torch infers shapes by a call of its own.
        return super().forward(x) if x[0, 0] > 0 else self.norm(self.narrow(x)) + x


class Tied(Part):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.wide.weight = self.narrow.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.back(self.narrow(self.norm(x)).tanh())
        return self.frozen(self.back(self.wide(h))) * self.scale + x


class Partial(Part):
    """Has a layer that FSDP2 leaves alone."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Products of W, starts of reductions and their ends, in order."""
    events: Events = []
    accumulate, finish = PendingGradient.accumulate, fsdp_reduction.finish

    def noted_accumulate(gradient: PendingGradient) -> None:
        accumulate(gradient)
        events.append(f"product {gradient.layer.label}")  # type: ignore[attr-defined]

    def noted_finish(module: nn.Module) -> None:
        finish(module)
        events.append(f"end {module.label}")

    monkeypatch.setattr(PendingGradient, "accumulate", noted_accumulate)
    monkeypatch.setattr(fsdp_reduction, "finish", noted_finish)
    return events


def shard(part: Any, index: int, events: Events, **how: Any) -> nn.Module:
    """Each layer and the stage are FSDP modules."""
    mesh = init_device_mesh("cpu", (1,))
    for name, layer in (*part.named_children(), ("stage", part)):
        if (type(part), name) in ((Tied, "wide"), (Partial, "narrow")):
            continue
        more: Any = {}
        if isinstance(part, Partial) and layer is part:
            more = {"ignored_params": set(part.narrow.parameters())}
        modules: Any = [part.narrow, part.wide] if isinstance(part, Tied) and name == "narrow" else layer
        fully_shard(modules, mesh=mesh, **how, **more)
        layer.set_all_reduce_hook(lambda reduced, name=name: events.append(f"reduce {index} {name}"))
        layer.set_force_sum_reduction_for_comms(True)
    for name, layer in part.named_modules():
        layer.label = f"{index} {name}".strip()
    return part


class Job:
    """Two stages, sharded on one rank, and the same in one piece."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        events: Events,
        schedule: Any = "ZBV",
        microbatches: int = 3,
        how: Any = None,
        prepare: Callable[[Any], None] | None = None,
        **options: Any,
    ) -> None:
        parts = [build(), build()]
        self.plain = nn.Sequential(*copy.deepcopy(parts))
        self.parts = [shard(part, index, events, **(how or {})) for index, part in enumerate(parts)]
        stages = [PipelineStage(part, index, 2, torch.device("cpu")) for index, part in enumerate(self.parts)]
        if prepare is not None:
            for stage in stages:
                prepare(stage)
        self.microbatches, self.events = microbatches, events
        self.schedule = zbpipe.build_pipeline_schedule(schedule, stages, microbatches, mse_loss, **options)

    def step(self) -> Events:
        """Events of one step."""
        x = torch.randn(self.microbatches, ROWS, WIDTH)
        x[:, 0, 0] = -1
        x[1:2, 0, 0] = 1  # see `Seldom`
        target = torch.randn_like(x)
        self.events.clear()
        self.schedule.step(x.flatten(0, 1), target=target.flatten(0, 1))
        for each in zip(x, target, strict=True):
            (mse_loss(self.plain(each[0]), each[1]) / self.microbatches).backward()
        return list(self.events)

    def check(self, **tolerance: float) -> None:
        """The accumulated gradients equal those of the model in one piece."""
        found = [each for part in self.parts for each in part.named_parameters()]
        for (name, parameter), plain in zip(found, self.plain.parameters(), strict=True):
            assert (parameter.grad is None) == (plain.grad is None), name
            if parameter.grad is not None and plain.grad is not None:
                whole = getattr(parameter.grad, "full_tensor", lambda own=parameter.grad: own)()
                torch.testing.assert_close(whole, plain.grad, **(tolerance or TOLERANCE), msg=name)


LAST_W = (
    # Groups without products first, then from the largest on.
    "reduce norm, reduce stage, product back, reduce back, product wide, reduce wide, reduce normed,"
    " product narrow, reduce narrow, end"
)


def on_stage(index: int, events: Events) -> str:
    return ", ".join(each.replace(f" {index}", "") for each in events if each.split()[1] == str(index))


def test_each_group_is_reduced_before_the_products_of_the_next(one_rank: None, events: Events) -> None:
    """Another stage's reduction goes on while this one computes: the step's end waits for both."""
    job = Job(Part, events)
    job.step()
    found = job.step()
    for index in range(2):
        of_stage = on_stage(index, found)
        assert of_stage.endswith(LAST_W)
        assert of_stage.count("reduce") == 6
    assert found[-2:] == ["end 0", "end 1"]
    job.check()


def test_a_group_that_torch_lists_twice(one_rank: None, events: Events) -> None:
    """torch 2.11 lists the group of `fully_shard([norm, output])` once for each of these modules."""
    job = Job(Part, events)
    job.step()
    for part in job.parts:
        context = part._get_fsdp_state()._state_ctx  # type: ignore[operator]
        context.all_states = [state for state in context.all_states for _ in range(2)]
    found = job.step()
    assert all(on_stage(index, found).endswith(LAST_W) for index in range(2))
    job.check()


@pytest.mark.parametrize("before", ["0I0,0W0", "0B0"])
def test_a_last_b_is_split(one_rank: None, events: Events, before: str) -> None:
    """Lean schedules end with a whole backward, on the rank that ends last."""
    table = f"0F0,1F0,1I0,1W0,{before},0F1,1F1,1B1,0B1"
    job = Job(Part, events, zbpipe.Schedule.from_csv(table, "table"), microbatches=2)
    job.step()
    ran = []

    def note(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        ran.append(f"{stage}{kind}{microbatch}")
        return compute()

    with hooks.hook(job.schedule, hooks.HookOrder.RECORD, note):
        assert on_stage(0, job.step()).endswith(LAST_W)
    assert list(dict.fromkeys(ran)) == table.split(","), "records see the schedule's ops"
    job.check()


def with_an_own_backward(stage: Any) -> None:
    original = stage.backward_maybe_with_nosync

    def backward_of_a_framework(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    stage.backward_maybe_with_nosync = backward_of_a_framework


def with_an_own_reduction(stage: Any) -> None:
    stage.perform_reduce_grad = partial(type(stage).perform_reduce_grad, stage)


@pytest.mark.parametrize("why", ["option", "own backward", "own reduction", "unknown torch"])
def test_torchs_way(one_rank: None, events: Events, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """All reductions after all products, where someone asks for it, or has a way of their own."""
    prepare = {"own backward": with_an_own_backward, "own reduction": with_an_own_reduction}.get(why)
    options: Any = {"reduce_grads": "late"} if why == "option" else {}
    if why == "unknown torch":
        monkeypatch.setattr(fsdp_reduction, "IS_KNOWN", False)
    job = Job(Part, events, prepare=prepare, **options)
    job.step()
    kinds = [each.split()[0] for each in job.step() if each.split()[1] == "0"]
    assert kinds == 9 * ["product"] + 6 * ["reduce"]
    job.check()


def test_gradients_are_checked_as_w_leaves_them(one_rank: None, events: Events) -> None:
    job = Job(Part, events)
    check = zbpipe.GradientCheck(job.schedule, 1)
    assert "end 0" not in job.step()
    assert check.report is not None
    assert check.report.passed
    assert "end 0" in job.step()


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
IN_BF16 = {"rtol": 0.1, "atol": 0.02}


@pytest.mark.parametrize(
    ("build", "options", "tolerance"),
    [
        (Part, {}, {}),
        (Part, {"microbatches": 1}, {}),
        (Part, {"how": {"reshard_after_forward": True}}, {}),
        (Part, {"how": MIXED}, IN_BF16),
        (Part, {"how": MIXED, "microbatches": 1}, IN_BF16),
        (Part, {"schedule": "ZBVLean"}, {}),
        (Seldom, {"microbatches": 4}, {}),
        (Tied, {}, {}),
        (Partial, {}, {}),
    ],
    ids=["usual", "one microbatch", "resharded", "bf16", "bf16, one microbatch", "lean", "seldom", "tied", "in part"],
)
def test_gradients(one_rank: None, events: Events, build: Any, options: Any, tolerance: Any) -> None:
    """Over three steps, whose gradients add up. In the first one nothing is left to W."""
    job = Job(build, events, **options)
    for _ in range(3):
        assert "end 0" in job.step()
    job.check(**tolerance)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"), reason="torch has only one")
@pytest.mark.parametrize("most", [1, 2])
def test_as_many_buffers_as_fsdp_allows(one_rank: None, events: Events, most: int) -> None:
    job, held = Job(Part, events), []
    for part in job.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_reduce_scatter_max_input_buffers(most)

    def note_buffers(state: Any, reduced: Tensor) -> None:
        held.append(1 + len(state._comm_ctx.reduce_scatter_states))

    for part in job.parts:
        part.wide.set_all_reduce_hook(partial(note_buffers, part._get_fsdp_state()))  # type: ignore[operator, union-attr]
    job.step()
    assert set(held) == {most}
