"""FSDP2's reductions beside the products of a stage's last W, in one process. With others: test_data_parallel.py."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pipelines
import pytest
import torch
from pipelines import TOLERANCE
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import weight_norm

import zbpipe
from zbpipe.costs.model import GATHER, REDUCE
from zbpipe.runtime._torch import fsdp2, hooks
from zbpipe.runtime.measure.profiler import find_exposed
from zbpipe.runtime.measure.recording import StepRecord
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.schedule.ir import Op
from zbpipe.simulator.timeline import Span

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


def two_layers() -> nn.Module:
    """In the last backward the first layer would prefetch the second one, as it ran before, for another microbatch."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Products of W, starts of reductions and their ends, in order."""
    events: Events = []
    accumulate, finish = PendingGradient.accumulate, fsdp2.finish

    def noted_accumulate(gradient: PendingGradient) -> None:
        accumulate(gradient)
        events.append(f"product {gradient.layer.label}")  # type: ignore[attr-defined]

    def noted_finish(module: nn.Module) -> None:
        gathers = [group._all_gather_result for group in fsdp2.list_groups(module)]
        assert not any(gathers), "a module was gathered for nothing"
        finish(module)
        events.append(f"end {module.label}")

    monkeypatch.setattr(PendingGradient, "accumulate", noted_accumulate)
    monkeypatch.setattr(fsdp2, "finish", noted_finish)
    return events


def shard(part: Any, index: int, events: Events, **how: Any) -> nn.Module:
    """Each layer and the stage are FSDP modules."""
    sizes = how.pop("mesh", (1,))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[: len(sizes)])
    for name, layer in (*part.named_children(), ("stage", part)):
        if (type(part), name) in ((Tied, "wide"), (Partial, "narrow")):
            continue
        more: Any = {}
        if isinstance(part, Partial) and layer is part:
            more = {"ignored_params": set(part.narrow.parameters())}
        modules: Any = [part.narrow, part.wide] if isinstance(part, Tied) and name == "narrow" else layer
        pipelines.shard(modules, mesh, **how, **more)
        layer.set_all_reduce_hook(lambda reduced, name=name: events.append(f"reduce {index} {name}"))
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
        self.parts = [shard(part, index, events, **dict(how or {})) for index, part in enumerate(parts)]
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


@pytest.mark.parametrize("how", [{}, {"mesh": (1, 1)}, {"by": replicate}], ids=["shard", "hybrid", "replicate"])
def test_each_group_is_reduced_before_the_products_of_the_next(one_rank: None, events: Events, how: Any) -> None:
    """Another stage's reduction goes on while this one computes: the step's end waits for both."""
    job = Job(Part, events, how=how)
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


@pytest.mark.parametrize("before", ["0F0,1F0,1I0,1W0,0I0,0W0", "0F0,1F0,1B0,0B0"])
def test_a_last_b_reduces_in_its_backward(one_rank: None, events: Events, before: str) -> None:
    """ZB ends with a whole backward, and others have no other one."""
    table = f"{before},0F1,1F1,1B1,0B1"
    job = Job(Part, events, zbpipe.Schedule.from_csv(table, "table"), microbatches=2)
    job.step()
    ran = []

    def note(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        ran.append(f"{stage}{kind}{microbatch}")
        if ran[-1] == "0B1":
            events.append("begin 0")
        return compute()

    with hooks.hook(job.schedule, hooks.HookOrder.RECORD, note):
        *of_others, of_b = on_stage(0, job.step()).split("begin")
    assert not any("reduce" in each for each in of_others)
    assert of_b == (", reduce back, reduce wide, reduce norm, reduce normed, reduce stage, reduce narrow, end"), (
        "from the last module to the first"
    )
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
    options: Any = {"fsdp_mode": "torch"} if why == "option" else {}
    if why == "unknown torch":
        monkeypatch.setattr(fsdp2, "IS_KNOWN", False)
    job = Job(Part, events, prepare=prepare, **options)
    job.step()
    kinds = [each.split()[0] for each in job.step() if each.split()[1] == "0"]
    assert kinds == 9 * ["product"] + 6 * ["reduce"]
    job.check()


@pytest.mark.parametrize("mode", ["overlap", "torch"])
def test_the_first_f_waits_for_each_module_when_it_needs_it(
    one_rank: None, events: Events, caplog: pytest.LogCaptureFixture, mode: Any
) -> None:
    """Also for those that it does not call."""
    caplog.set_level("INFO")
    job = Job(Seldom, events, microbatches=2, how={"reshard_after_forward": False}, fsdp_mode=mode)
    gathered: dict[str, list[str]] = {}

    def note(name: str, part: Any, *args: Any) -> None:
        gathered.setdefault(name, [each for each, layer in part.named_children() if is_gathered(layer)])

    for name, layer in job.parts[0].named_children():
        layer.register_forward_pre_hook(partial(note, name, job.parts[0]))
    job.step()
    gathered.clear()  # the first step begins by inferring shapes
    job.step()
    everything = ["narrow", "norm", "wide", "back", "normed", "frozen"]
    # The first microbatch leaves out most of them, and the second one finds them.
    assert gathered["narrow"] == (["narrow"] if mode == "overlap" else everything)
    assert gathered["normed"] == everything
    begin, end = ("during", "during") if mode == "overlap" else ("before", "after")
    words = fsdp2.describe(mode, job.parts)
    assert words.startswith(
        f"FSDP: gathers {begin} a stage's first F, reductions {end} its last W or B; 0 of 14 modules"
    )
    assert "FSDP: " not in caplog.text  # this rank shares nothing
    job.check()


TABLES = ["0F0,1F0,1I0,1W0,0F1,1F1,0I0,0W0,1I1,1W1,0I1,0W1", "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1"]


@pytest.mark.parametrize("build", [Part, two_layers])
@pytest.mark.parametrize("table", TABLES)
def test_no_module_stays_gathered_between_two_ops(one_rank: None, events: Events, build: Any, table: str) -> None:
    schedule = zbpipe.Schedule.from_csv(table, "table")
    job, held = Job(build, events, schedule, microbatches=2, fsdp_mode="reshard"), []
    modules = [module for part in job.parts for module in part.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.register_forward_hook(lambda *_: held.append(sum(map(is_gathered, modules))))  # type: ignore[attr-defined]

    def note(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        result = compute()
        assert not any(map(is_gathered, modules)), f"{stage}{kind}{microbatch}"
        assert not any(group._all_gather_result for part in job.parts for group in fsdp2.list_groups(part)), (
            "for nothing"
        )
        return result

    for step in range(2):
        with hooks.hook(job.schedule, hooks.HookOrder.RECORD, note) if step else nullcontext():
            job.step()
    assert max(held) <= 2, "of a stage, its own parameters and those of one layer"
    job.check()


def is_gathered(layer: Any) -> bool:
    return any(group.is_unsharded for group in fsdp2.groups_of(layer._get_fsdp_state()))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
def test_evaluations_between_steps_leave_fsdp_alone(one_rank: None, events: Events, mode: str) -> None:
    job = Job(Part, events, schedule="ZBV")
    x = torch.randn(3 * ROWS, WIDTH)

    def state() -> list[Any]:
        states = [each._get_fsdp_state() for part in job.parts for each in part.modules() if hasattr(each, "reshard")]
        groups = [group for part in job.parts for group in fsdp2.list_groups(part)]
        flags = [(each.reduce_grads, each.reshard_after_backward, each._training_state) for each in groups]
        parameters: list[Any] = [each for part in job.parts for each in part.parameters() if each.grad is not None]
        gradients = [each.grad.to_local().clone() for each in parameters]
        return [flags, [each._state_ctx.is_last_backward for each in states], gradients]

    # What FSDP gathers first under inference_mode it cannot train with, with or without a pipeline.
    with getattr(torch, mode if mode != "inference_mode" else "no_grad")():
        job.schedule.eval(x, target=x)
    for microbatches in (6, 3, 2):
        job.step()
        before = state()
        with getattr(torch, mode)():
            job.schedule.eval(x, target=x, microbatches=microbatches)
        after = state()
        assert after[:2] == before[:2]
        assert all(map(torch.equal, after[2], before[2]))
    job.check()


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
IN_BF16 = {"rtol": 0.1, "atol": 0.02}


JOBS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "one microbatch": (Part, {"microbatches": 1}),
    "resharded": (Part, {"how": {"reshard_after_forward": True}}),
    "bf16": (Part, {"how": MIXED}),
    "bf16, one microbatch": (Part, {"how": MIXED, "microbatches": 1}),
    "lean": (Part, {"schedule": "ZB"}),
    "lean, two layers": (two_layers, {"schedule": "ZB"}),
    "seldom": (Seldom, {"microbatches": 4}),
    "tied": (Tied, {}),
    "in part": (Partial, {}),
}


@pytest.mark.parametrize("name", JOBS)
def test_gradients(one_rank: None, events: Events, name: str) -> None:
    """Over three steps, whose gradients add up. In the first one nothing is left to W."""
    build, options = JOBS[name]
    job = Job(build, events, **options)
    for _ in range(3):
        assert "end 0" in job.step()
    job.check(**IN_BF16 if "bf16" in name else {})


@pytest.mark.parametrize("mode", ["overlap", "reshard"])
def test_the_profiler_measures_the_collectives(
    one_rank: None, events: Events, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """Between two steps, whose gradients it leaves alone. Gathers that are a part of each op, it leaves to these."""
    job = Job(Part, events, fsdp_mode=mode)
    profiler = zbpipe.Profiler(job.schedule, 1)
    job.step()
    assert not fsdp2.is_shared(job.parts[0])
    monkeypatch.setattr(fsdp2, "is_shared", lambda module: True)
    for _ in range(3):
        job.step()
    assert profiler.costs is not None
    costs = profiler.costs.costs
    assert isinstance(costs, zbpipe.CostModel)
    assert all((costs.of(stage, GATHER).seconds > 0) == (mode == "overlap") for stage in range(2))
    assert all(costs.of(stage, REDUCE).seconds > 0 for stage in range(2))
    job.check()


def test_what_a_step_waits_for_collectives() -> None:
    """Its first F is 2 seconds late, its last W 3, and its end 5."""
    times = {"0F0": (0, 3), "0F1": (3, 4), "0F2": (4, 5), "0I0": (5, 6), "0W0": (6, 7), "0I1": (7, 8), "0W1": (8, 9)}
    times |= {"0I2": (9, 19), "0W2": (19, 23)}
    spans = tuple(Span(Op.parse(op), float(start), float(end)) for op, (start, end) in times.items())
    record = StepRecord("mine", 28.0, spans, {}, {}, 0)
    assert find_exposed(record) == 2 + 3 + 5
    assert find_exposed(replace(record, spans=())) == 0


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"), reason="torch has only one")
@pytest.mark.parametrize("table", TABLES)
def test_no_product_waits_for_a_buffer(one_rank: None, events: Events, table: str) -> None:
    """And buffers hold no more than the gradients that they replace."""
    job = Job(Part, events, zbpipe.Schedule.from_csv(table, "table"), microbatches=2)
    held: list[tuple[int, int]] = []
    states = [part._get_fsdp_state() for part in job.parts]  # type: ignore[operator]

    def note(*_: Any) -> None:
        buffers = [each.reduce_scatter_input for state in states for each in state._comm_ctx.reduce_scatter_states]
        gradients = (each for part in job.parts for each in fsdp2.iterate_accumulated(part))
        left = [each.gradient for each in gradients if not each.name.endswith(fsdp2.REDUCED)]
        held.append((len(buffers), sum(map(Tensor.numel, (*buffers, *left)))))

    job.step()
    for part in job.parts:
        part.zero_grad()
        part.narrow.set_all_reduce_hook(note)  # type: ignore[operator, union-attr]
    job.step()
    weights = sum(each.numel() for part in job.parts for each in part.parameters() if each.requires_grad)
    assert max(number for number, _ in held) > 2
    assert max(size for _, size in held) <= weights
