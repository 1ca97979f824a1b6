"""The check of gradients: it passes where the split is right, names the layer where it is not, and leaves no trace."""

import copy
import itertools
import logging
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import WIDTH, Block, Checkpointing, batch, build_stage, gradients, loss_fn
from pipelines import as_rank, on_one_rank, shard
from ranks import endings, run_ranks
from titan_jobs import STEPS, Titan, pipeline, require_titan
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint
from zoo.case import bare, linear

import zbpipe
from zbpipe.runtime.split import deferral, graph_parts
from zbpipe.runtime.split.products import LINEAR, PendingGradient
from zbpipe.runtime.split.stage import find_pending
from zbpipe.runtime.verify import GradientReport
from zbpipe.runtime.verify.gradient_check import schedule_w_last
from zbpipe.runtime.verify.gradient_report import GradientMismatchError

pytestmark = pytest.mark.long  # it takes minutes, too

CPU = torch.device("cpu")


def w_last(module: nn.Module, microbatches: int) -> Any:
    return on_one_rank([module], microbatches, schedule_w_last(1, microbatches), nn.functional.mse_loss)


def model(num_stages: int = 2, checkpointing: Checkpointing = "none") -> list[nn.Module]:
    return [build_stage(index, num_stages, checkpointing, num_blocks=2) for index in range(num_stages)]


def train(schedule: Any, microbatches: int, steps: int = 1) -> None:
    tokens, targets = batch(microbatches)
    for _ in range(steps):
        schedule.step(tokens, target=targets)


def mismatch(check: Callable[..., object], *args: Any, match: str | None = None, **how: Any) -> GradientMismatchError:
    """The error of a check that finds wrong gradients."""
    with pytest.raises(zbpipe.PipelineError, match=match) as error:
        check(*args, **how)
    cause = error.value.__cause__
    assert isinstance(cause, GradientMismatchError)
    assert str(pickle.loads(pickle.dumps(cause))) == str(cause)
    return cause


@pytest.mark.parametrize(("num_stages", "checkpointing"), [(1, "full"), (2, "none"), (2, "selective"), (3, "full")])
def test_a_right_split_passes(num_stages: int, checkpointing: Checkpointing) -> None:
    assert not dist.is_initialized()
    report = zbpipe.check_gradients(model(num_stages, checkpointing), *batch(3), loss_fn, microbatches=3)
    assert report.passed
    assert (report.microbatches, set(report.tolerances)) == (2 * 3, set(range(num_stages)))
    parameters = [p for stage in model(num_stages) for p in stage.parameters() if p.requires_grad]
    assert len(report.errors) == len(parameters)
    assert max(report.errors.values()) < 1e-5
    assert report.errors[num_stages - 1, "0.up.weight" if num_stages > 1 else "1.up.weight"] >= 0
    assert not dist.is_initialized()


def two_layers() -> Any:
    """What W multiplies waits while other microbatches run."""
    return bare(lambda s, x: s.last(torch.tanh(s.first(x))), first=linear(WIDTH, WIDTH), last=linear(WIDTH, WIDTH))(0)


@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    # Under autocast the dtype of the weights stays; that of the deferred products changes.
    [(torch.float64, False, 1e-9), (torch.bfloat16, False, 3e-2), (torch.float32, True, 3e-2)],
)
def test_every_dtype_has_its_tolerance(dtype: torch.dtype, autocast: bool, tolerance: float) -> None:
    with torch.autocast("cpu", torch.bfloat16, autocast):
        report = zbpipe.check_gradients(two_layers().to(dtype), torch.randn(4, WIDTH, dtype=dtype), microbatches=4)
    assert report.tolerances == {0: tolerance}


def breaking(patch: pytest.MonkeyPatch, change: Callable[[PendingGradient], PendingGradient | None]) -> None:
    """Have `change` act on each deferred gradient before W, or give another in its place."""
    accumulate = PendingGradient.accumulate
    patch.setattr(PendingGradient, "accumulate", lambda self: accumulate(change(self) or self))


def turn_round(of: Callable[[PendingGradient], bool]) -> Callable[[PendingGradient], None]:
    """Somebody writes over the dY that waits, unseen by autograd's version counter."""

    def change(pending: PendingGradient) -> None:
        if of(pending):
            pending.dy.data.neg_()

    return change


def test_a_gradient_changed_while_it_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = model()
    wrong = modules[0][1].gate.weight  # type: ignore[index, union-attr]
    breaking(monkeypatch, turn_round(lambda pending: pending.weight is wrong))
    words = r"stage 0: .*: 1\.gate\.weight [\d.]+ If this layer declares"
    assert mismatch(zbpipe.check_gradients, modules, *batch(2), loss_fn, match=words).report.off() == [
        (0, "1.gate.weight")
    ]


def test_a_wrong_gradient_of_the_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to no parameter of the stage, but to all of the stages before."""
    monkeypatch.setattr(LINEAR, "of_input", lambda dy, x, weight: 1.01 * dy @ weight)
    parts = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    words = r"stage 1: .* and gradients of the stages 0 before it\. .* look at the gradient that the next stage sends"
    found = mismatch(zbpipe.check_gradients, parts, torch.randn(2, WIDTH), match=words).report
    assert {*found.off()} == {(stage, name) for stage in (0, 1) for name in ("weight", "bias")}


def test_at_most_ten_names_the_worst_first(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12)))
    for layer in layers:  # all weights have the same gradient
        nn.init.eye_(layer.weight)  # type: ignore[arg-type]
    factors = {layer.weight: n + 1 for n, layer in enumerate(layers)}
    breaking(monkeypatch, lambda pending: replace(pending, dy=factors[pending.weight] * pending.dy))  # type: ignore[index]
    names = ", ".join(f"{n}.weight {n}" for n in range(11, 1, -1))
    mismatch(
        zbpipe.check_gradients, layers, torch.randn(2, WIDTH), match=re.escape(f"above 1e-04: {names} and 1 more. ")
    )


class Declared(nn.Module):
    """Calls `torch.bmm`, as it declares, and a convolution, for which it declares what is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.weight_products = {torch.bmm: lambda dy, x: x.mT @ dy}
        conv: Any = nn.Conv1d(WIDTH, WIDTH, 1)
        conv.weight_products = {F.conv1d: lambda *args: args[0]}  # wrong
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.bmm(x, self.weight))  # type: ignore[no-any-return]


def test_the_report_counts_the_products_that_waited(caplog: pytest.LogCaptureFixture) -> None:
    """The check compares nothing of a declared product that never ran, so it has to say so."""
    with caplog.at_level(logging.WARNING, "zbpipe"):
        report = zbpipe.check_gradients(Declared(), torch.randn(4, WIDTH, WIDTH), microbatches=2)
    assert report.passed
    assert report.deferred == {(0, "weight")}
    assert report.not_deferred == {(0, "conv.weight")}
    assert "; 1 weight gradients waited for W, 1 did not" in str(report)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("zbpipe")]
    assert len(told) == 1, told
    assert "conv (Conv1d) 50 % (weight_products fit no call: declare function(x, weight, ...)" in told[0], told


def dropping() -> nn.Module:
    """Drops some activations, so that both runs need the same random numbers."""
    return bare(
        lambda s, x: x + s.down(F.dropout(torch.relu(s.up(x)), 0.5)),
        up=linear(WIDTH, 2 * WIDTH),
        down=linear(2 * WIDTH, WIDTH),
    )(0)


def test_compiled_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch runs again with the compiler, but never with the products of the split."""
    torch.compiler.reset()
    stage = nn.Sequential(dropping(), dropping())
    for block in stage:
        block.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(3, WIDTH)
    factor = 1

    def multiplied(self: graph_parts.Part, *factors: Any) -> tuple[Tensor, Tensor]:
        one, other = self.graph(*factors)
        return factor * one, other

    monkeypatch.setattr(graph_parts.Part, "as_matrices", property(lambda part: partial(multiplied, part)))
    zbpipe.check_gradients(stage, x, microbatches=3)
    factor = 2
    report = mismatch(zbpipe.check_gradients, stage, x, microbatches=3).report
    assert {*report.off()} == {(0, f"{n}.{layer}.weight") for n in (0, 1) for layer in ("up", "down")}
    assert min(report.errors[key] for key in report.off()) > 0.3  # the first I of the first step leaves nothing to W


class Restless(nn.Module):
    """Changes all that a forward can change: buffers in place and anew, attributes, random numbers of four kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.block = dropping()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.running, self.replaced = nn.Buffer(torch.zeros(WIDTH)), nn.Buffer(torch.ones(WIDTH))
        self.calls, self.held, self.numbers = 0, torch.zeros(1), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1 + random.randrange(2) + int(np.random.randint(2))
        self.held += torch.randint(3, (), generator=self.numbers)
        self.running.add_(x.detach().mean((0, 1)))
        self.replaced = 0.9 * self.replaced  # type: ignore[assignment]
        h = self.norm(self.block(x * self.replaced).transpose(1, 2)).transpose(1, 2)
        return h * (1 + float(self.held)) + self.running.clone() + self.calls


def restless(index: int, checkpointing: Checkpointing) -> nn.Module:
    stage = build_stage(index, 2, checkpointing, num_blocks=2)
    stage.insert(1, Restless())  # type: ignore[operator]
    return stage


def learn_shapes(schedule: Any, modules: list[nn.Module]) -> None:
    """One step, of which nothing stays: before it torch runs stages on whatever is in memory."""
    states = [copy.deepcopy(module.state_dict()) for module in modules]
    train(schedule, 3)
    for module, state in zip(modules, states, strict=True):
        module.load_state_dict(state)
        module.zero_grad()


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_checked_steps_leave_no_trace(one_rank: None, checkpointing: Checkpointing) -> None:
    """Bit by bit: losses, gradients, weights, buffers, random numbers, attributes."""
    runs = []
    for checked in (0, 2):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        modules = [restless(index, checkpointing) for index in range(2)]
        held = [part.held for module in modules for part in module.modules() if isinstance(part, Restless)]
        schedule: Any = on_one_rank(modules, 3, scale_grads=False)
        learn_shapes(schedule, modules)
        check = zbpipe.GradientCheck(schedule, checked) if checked else None
        torch.manual_seed(1)
        losses: list[Tensor] = []
        for step in range(3):
            tokens, targets = batch(3, seed=step)
            schedule.step(tokens, target=targets, losses=losses)
        assert check is None or (check.report is not None and check.report.microbatches == 6)
        state = [each for module in modules for each in module.state_dict().values()]
        found = [*losses, *gradients(dict(enumerate(modules))).values(), *state, *held, torch.get_rng_state()]
        calls = [part.calls for module in modules for part in module.modules() if hasattr(part, "calls")]
        runs.append((found, calls))
    (plain, plain_calls), (found, calls) = runs
    assert calls == plain_calls
    assert len(found) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def in_dict(held: Any) -> int:
    held["n"] += 1
    return int(held["n"])


def in_place(held: Any) -> int:
    held[0] += 1
    return int(held[0])


NUMBERS = itertools.count()
HELD = r" \(1.held of stage 0 changed\)"
REFUSED: dict[str, tuple[Any, Callable[[Any], int], str]] = {
    "dict": ({"n": 0}, in_dict, HELD),
    "object in a dict": ({"one": SimpleNamespace(n=0)}, lambda held: in_dict(vars(held["one"])), HELD),
    "numpy array": (np.zeros(2), in_place, HELD),
    "iterator": (itertools.count(), next, HELD),
    "global": (None, lambda held: next(NUMBERS), ""),
}


def alternating(held: Any, count: Callable[[Any], int]) -> nn.Module:
    """Which of two paths it takes depends on what it holds."""
    parts: dict[str, Any] = {"a": linear(WIDTH, WIDTH), "b": linear(WIDTH, WIDTH), "held": lambda: held}
    return bare(lambda s, x: s.a(x) if count(s.held) % 2 else s.b(torch.tanh(s.a(x))), **parts)(0)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_state_is_named(kind: str) -> None:
    """The split is right, and the error says what else it may be."""
    held, count, name = REFUSED[kind]
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), alternating(held, count))
    words = rf"random numbers{name}, the second run differs without a fault: keep that in a buffer"
    mismatch(zbpipe.check_gradients, module, torch.randn(6, WIDTH), microbatches=3, match=words)


def test_a_forward_that_the_split_changes_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the same output once more, and another one without the split."""
    linear = deferral._DeferredWhole.forward
    monkeypatch.setattr(deferral._DeferredWhole, "forward", staticmethod(lambda *args: 1.01 * linear(*args)))
    parts = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    assert mismatch(zbpipe.check_gradients, parts, torch.randn(2, WIDTH)).report.off()


def reentrant() -> Any:
    """Its checkpoint refuses `torch.autograd.grad`, by which torch infers what stages hand on."""
    inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return bare(
        lambda s, x: checkpoint(s.inside, s.before(x), use_reentrant=True),
        inside=lambda: inside,
        before=linear(WIDTH, WIDTH),
    )(0)


@pytest.mark.parametrize("given", [False, True], ids=["modules", "stages with shapes"])
def test_reentrant_checkpoints(one_rank: None, given: bool) -> None:
    parts: list[Any] = [reentrant(), reentrant()]
    x, y = torch.randn(2, 4, WIDTH)
    if given:
        example = torch.zeros(2, WIDTH, requires_grad=True)
        parts = [PipelineStage(each, n, 2, CPU, (example,), (example,)) for n, each in enumerate(parts)]
    report = zbpipe.check_gradients(parts, x, y, nn.functional.mse_loss)
    assert {name for stage, name in report.deferred} == {"before.weight", "inside.0.weight", "inside.2.weight"}
    assert len(report.errors) == 12


def test_a_reentrant_checkpoint_of_what_needs_no_gradient() -> None:
    """It gives none, with torch alone as well."""
    module = reentrant().inside
    stage = nn.Sequential(module)
    stage.forward = lambda x: checkpoint(module, x, use_reentrant=True)  # type: ignore[method-assign]
    x, y = torch.randn(2, 4, WIDTH)
    for more in ((), (y, nn.functional.mse_loss)):
        with pytest.raises((ValueError, zbpipe.PipelineError), match=r"call batch.requires_grad_\(\), or set"):
            zbpipe.check_gradients(stage, x, *more)
        assert zbpipe.check_gradients(stage, x.clone().requires_grad_(), *more).passed


def test_hooks_on_gradients(one_rank: None) -> None:
    """Those that change a gradient belong to it; those after the accumulation do not see the second run."""
    modules = model()
    doubled, cleared = modules[0][1].up.weight, modules[0][1].down.bias  # type: ignore[index, union-attr]
    doubled.register_hook(lambda gradient: 2 * gradient)
    seen: list[Tensor] = []

    def clear(bias: Tensor) -> None:
        assert bias.grad is not None
        seen.append(bias.grad)
        bias.grad = None

    cleared.register_post_accumulate_grad_hook(clear)
    schedule: Any = on_one_rank(modules, 2)
    check = zbpipe.GradientCheck(schedule)
    train(schedule, 2)
    assert len(seen) == 2
    assert check.report is not None
    assert check.report.not_compared == {(0, "1.down.bias")}
    assert (0, "1.up.weight") in check.report.errors
    assert (0, "1.down.bias") not in check.report.errors
    assert str(check.report).endswith("; not compared: 1.down.bias of stage 0")


def test_a_gradient_that_is_zero_but_for_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured against those of the other layers."""
    module = two_layers()
    nn.init.zeros_(module.last.weight)

    def round_differently(pending: PendingGradient) -> None:
        if pending.weight is module.first.weight:
            pending.dy = pending.dy + 1e-10

    breaking(monkeypatch, round_differently)
    report = zbpipe.check_gradients(module, torch.randn(4, WIDTH))
    assert 0 < report.errors[0, "first.weight"] < 1e-4


def test_gradients_that_are_not_finite() -> None:
    """Both runs overflow alike, as under the first scales of a loss in float16."""
    module = two_layers()
    with torch.no_grad():
        module.last.bias.fill_(float("inf"))
    report = zbpipe.check_gradients(module, torch.randn(2, WIDTH))
    assert (0, "last.weight") in report.not_compared


def test_the_parts_are_left_as_they_were(one_rank: None) -> None:
    modules = [restless(index, "none") for index in range(2)]
    schedule: Any = on_one_rank(modules, 2)
    learn_shapes(schedule, modules)
    train(schedule, 2)
    tensors = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    before = [each.clone() for each in tensors], [each.grad for each in tensors], torch.get_rng_state()
    zbpipe.check_gradients(modules, *batch(2), loss_fn)
    assert all(map(torch.equal, tensors, before[0]))
    assert all(each.grad is gradient for each, gradient in zip(tensors, before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])
    # They still put their gradients off for the schedule that they belong to.
    owed: list[int] = []
    watched = schedule._stages[1]
    w = watched.backward_weight_one_chunk
    watched.backward_weight_one_chunk = lambda n, **kwargs: (owed.append(len(find_pending(watched, n))), w(n, **kwargs))
    train(schedule, 2)
    assert owed == [13, 13]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_fully_shard(one_rank: None, monkeypatch: pytest.MonkeyPatch, precision: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    modules = model()
    for module in modules:
        for layer in [*filter(lambda layer: isinstance(layer, Block), module.modules()), module]:
            shard(layer, mp_policy=policy)
    schedule: Any = on_one_rank(modules, 4)
    check = zbpipe.GradientCheck(schedule, 2)
    train(schedule, 4, steps=2)
    assert check.report is not None
    assert check.report.tolerances == dict.fromkeys((0, 1), 1e-4 if precision is None else 3e-2)
    assert (0, "1.up.weight") in check.report.errors
    breaking(monkeypatch, turn_round(lambda pending: pending.x.shape[-1] == 2 * WIDTH))
    zbpipe.GradientCheck(schedule)
    report = mismatch(train, schedule, 4).report
    assert {name for _, name in report.off()} == {f"{n}.down.weight" for n in (0, 1, 2)}


def checked_on_two_ranks(broken: bool) -> tuple[GradientReport | None, list[str]]:
    """The report, and what the log says."""
    rank, told = dist.get_rank(), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign, assignment]
    logger = logging.getLogger("zbpipe.runtime.verify.gradient_check")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    module: Any = build_stage(rank, 2, num_blocks=2)
    schedule: Any = zbpipe.ScheduleZBH1(PipelineStage(module, rank, 2, CPU), 4, loss_fn)
    check = zbpipe.GradientCheck(schedule, 2)
    if broken and rank == 1:
        breaking(pytest.MonkeyPatch(), turn_round(lambda pending: pending.weight is module[2].weight))
    tokens, targets = batch(4)
    for _ in range(2):
        schedule.step(*([tokens] if rank == 0 else []), target=targets)
    return check.report, told


def test_two_ranks_end_with_the_same_report_or_error() -> None:
    (first, told), (second, silent) = run_ranks(2, checked_on_two_ranks, False)
    assert first == second
    assert first.passed
    assert (first.schedule, first.steps, first.microbatches) == ("ZBH1", 2, 8)
    assert {(0, "0.weight"), (1, "2.weight")} <= set(first.errors)
    assert len(told) == 1
    assert told[0].startswith("the split gives the gradients of an ordinary backward. ZBH1: 8 microbatches of 2 steps")
    assert silent == []
    wrong = (
        r"rank \d, schedule ZBH1, after its last action: GradientMismatchError: stage 1: .*"
        r" above 1e-04: 2\.weight [\d.]+\. If this layer declares weight_products itself"
    )
    for ending in endings(2, checked_on_two_ranks, True, group_timeout=60):
        assert re.search(f"PipelineError: (another rank failed first: )?{wrong}", ending.error or ""), ending


def test_what_cannot_be_checked_is_refused(one_rank: None) -> None:
    modules = model()
    stage = PipelineStage(build_stage(0, 1), 0, 1, CPU)
    with pytest.raises(ValueError, match="Schedule1F1B does not have zbpipe's split"):
        zbpipe.GradientCheck(zbpipe.build_pipeline_schedule("1F1B", stage, 2, loss_fn))
    tokens, targets = batch(2)
    with pytest.raises(ValueError, match="4 samples do not make 3 microbatches of equal size: give"):
        zbpipe.check_gradients(modules, tokens, targets, loss_fn, microbatches=3)
    with pytest.raises(ValueError, match="target and loss_fn go together"):
        zbpipe.check_gradients(modules, tokens, targets)
    dist.destroy_process_group()
    with as_rank(0, 2), pytest.raises(ValueError, match="belongs to a job of 2 ranks: call it outside"):
        zbpipe.check_gradients(modules, tokens, targets, loss_fn)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_titan(titan: Titan) -> None:
    """The loss has a backward of its own, in which FSDP2 reduces the head's gradient."""
    require_titan("0.3.0")
    sharded = ("--parallelism.data_parallel_shard_degree", "2", "--training.mixed_precision_param", "bfloat16")
    settings = (*pipeline("ZBV"), "--zbpipe.defer-loss", *sharded, "activation-checkpoint:full")
    job, plain = (titan.train(*more, *settings, num_ranks=4) for more in (("--zbpipe.check-gradients", "2"), ()))
    print(job.log)
    assert (job.error, plain.error) == (None, None)
    told = "the split gives the gradients of an ordinary backward. ZBV: 8 microbatches of 2 steps on 4 stages"
    assert job.log.count(told) == 2  # one for each pipeline
    assert len(job.losses) == STEPS
    assert job.losses == plain.losses
