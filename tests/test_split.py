"""What the backward split does on one stage: which work in I, which in W, how often, and what it keeps in between."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from models import (
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    Block,
    Checkpointing,
    DoubledLinear,
    Experts,
    TiedStage,
    batch,
    build_stage,
    checkpointed,
    gradients,
    loss_fn,
    reference,
)
from pipelines import TOLERANCE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import zbpipe
from zbpipe.runtime.split import products
from zbpipe.runtime.split.layers import defer_weights
from zbpipe.runtime.split.products import (
    LINEAR,
    PendingGradient,
    WeightGradients,
)
from zbpipe.runtime.split.stage import is_split


def unfinished(stage: Any) -> dict[int, list[PendingGradient]]:
    """The weight gradients that a stage still owes, by microbatch; none if it was not split."""
    return getattr(stage, "_deferred", {})


class Products(TorchDispatchMode):
    """Counts matrix products, by the shapes of their factors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
            factors = args[-2:]
            self.shapes.append((factors[0].shape, factors[1].shape))
        return func(*args, **(kwargs or {}))


def backward(module: nn.Module, *inputs: Tensor) -> list[PendingGradient]:
    """Forward and I: the backward of the sum of squares. What W still has to do."""
    store = WeightGradients()
    defer_weights(module, store)
    loss = module(*inputs).square().sum()
    with store.record() as pending:
        loss.backward()
    return pending


def assert_equal_gradients(module: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert not found.grad.requires_grad
            torch.testing.assert_close(found.grad, expected.grad, **TOLERANCE)


def check_layer(layer: nn.Module, x: Tensor, deferred: int) -> None:
    """I and W over two microbatches give the gradients of two plain backwards, and W does `deferred` products each."""
    plain = copy.deepcopy(layer)
    for _ in range(2):
        plain(x).square().sum().backward()
        pending = backward(layer, x)
        assert len(pending) == deferred
        for gradient in pending:
            gradient.accumulate()
    assert_equal_gradients(layer, plain)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, SEQUENCE, WIDTH, requires_grad=True)


class InPlace(nn.Linear):
    """As by `nn.ReLU(inplace=True)`, or a residual that is added to it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(0.5).add_(x)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", [nn.Linear, DoubledLinear])
def test_a_layer_whose_forward_was_wrapped(x: Tensor, kind: type[nn.Linear], times: int) -> None:
    """As TorchTitan's tensor parallelism does it: closures, in an attribute on the instance."""

    def wrap(layer: nn.Linear) -> nn.Linear:
        inner = layer.forward
        layer.forward = lambda input: 3 * inner(input)  # type: ignore[method-assign]
        return layer

    plain = kind(WIDTH, 8)
    layer = copy.deepcopy(plain)
    for _ in range(times):
        wrap(plain)
        wrap(layer)
    for _ in range(2):  # the second time it is prepared already
        pending = backward(layer, x)
        assert len(pending) == 1
        pending[0].accumulate()
        plain(x).square().sum().backward()
        assert_equal_gradients(layer, plain)


class Batched(nn.Module):
    """A layer that zbpipe does not know, one weight for each of its groups."""

    weight_products: ClassVar[Mapping[Any, Any]] = {torch.bmm: lambda dy, x: x.mT @ dy}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, WIDTH))
        self.scaled = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x, self.weight.double().transpose(1, 2).float())
        # A product of activations is none with a weight.
        return torch.bmm(y, 2 * self.scaled) + torch.bmm(torch.bmm(y, y.mT), y)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape or (3, SEQUENCE, WIDTH), requires_grad=True)


def tokens() -> Tensor:
    return batch(1)[0]


def with_one_weight() -> nn.Module:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    layers[1].weight = layers[0].weight
    return layers


def frozen(name: str) -> nn.Module:
    layer = nn.Linear(WIDTH, 8)
    layer.get_parameter(name).requires_grad_(False)
    return layer


def parametrized() -> nn.Module:
    layer = nn.Linear(WIDTH, 8)
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return layer


def sparse() -> nn.Module:
    """The embedding's gradient comes first, and its weight is that of the head."""
    stage = TiedStage()
    stage.embedding.sparse = True
    return stage


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    # Before torch 2.15 the output of `F.linear` with a bias is a view, which autograd lets nobody change there.
    "in place": (lambda: nn.Sequential(InPlace(WIDTH, WIDTH)), rows, 1),
    "in place, no bias": (lambda: nn.Sequential(InPlace(WIDTH, WIDTH, bias=False)), rows, 1),
    "own forward": (lambda: DoubledLinear(WIDTH, 8), rows, 1),
    # up, gate, down and twice the one that is used twice; nothing for the frozen one
    "block": (Block, rows, 5),
    "tied": (TiedStage, tokens, 6),
    "tied, sparse": (sparse, tokens, 6),
    "a weight of two layers": (with_one_weight, rows, 2),
    "frozen bias": (lambda: frozen("bias"), rows, 1),
    "frozen weight": (lambda: frozen("weight"), rows, 0),
    "no leaf": (parametrized, rows, 1),
    "convolution": (lambda: nn.Conv1d(SEQUENCE, 4, 3), rows, 1),
    "the user's own": (lambda: nn.Sequential(Batched(), nn.Linear(8, 8)), lambda: rows(3, WIDTH, WIDTH), 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_so_many_products_are_left_to_w(name: str) -> None:
    torch.manual_seed(0)
    make, inputs, deferred = LAYERS[name]
    check_layer(make(), inputs(), deferred)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(WIDTH,), (5, WIDTH), (2, 3, WIDTH), (2, 2, 2, WIDTH)])
def test_linear(bias: bool, shape: tuple[int, ...]) -> None:
    check_layer(nn.Linear(WIDTH, 8, bias=bias), torch.randn(shape), deferred=1)


class Scaled(nn.Module):
    """Its weight is a leaf, or a transpose of one; `products` may be wrong."""

    def __init__(self, product: Callable[..., Any], is_leaf: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.is_leaf = is_leaf
        self.weight_products = {torch.bmm: product}

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight if self.is_leaf else self.weight.mT)


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize(
    ("result", "got"),
    [
        (None, "None"),
        (torch.ones(WIDTH), r"one in the shape \(16,\)"),  # broadcasting would take it
        (torch.ones(2, 3, WIDTH, WIDTH), r"one in the shape \(2, 3, 16, 16\)"),  # autograd would sum it up
    ],
)
def test_a_product_that_gives_another_shape_is_named(result: Any, got: str, is_leaf: bool, records: bool) -> None:
    def run(product: Callable[..., Any]) -> None:
        layer = Scaled(product, is_leaf)
        layer.weight.grad = torch.zeros_like(layer.weight)
        x = torch.randn(3, 4, WIDTH, requires_grad=True)
        if not records:
            defer_weights(layer, WeightGradients())
            layer(x).sum().backward()
        else:
            for gradient in backward(layer, x):
                gradient.accumulate()

    run(lambda dy, x: x.mT @ dy)
    of_weight = rf"of Scaled: .* has to .* shape of the weight, \(3, {WIDTH}, {WIDTH}\), got {got}"
    with pytest.raises(ValueError, match=of_weight):
        run(lambda dy, x: result)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_grouped_experts(checkpointing: Checkpointing) -> None:
    experts = Experts(3, WIDTH, 2 * WIDTH)
    plain = copy.deepcopy(experts)
    layer = checkpointed(experts, checkpointing)
    ends = torch.tensor([5, 5, 9], dtype=torch.int32)  # nothing for the second expert
    for _ in range(2):
        x = torch.randn(9, WIDTH, requires_grad=True)
        twin = x.detach().requires_grad_()
        pending = backward(layer, x, ends)
        assert len(pending) == 3
        while pending:
            pending.pop().accumulate()
        plain(twin, ends).square().sum().backward()
        # The same products of the same bfloat16 numbers.
        torch.testing.assert_close(x.grad, twin.grad, rtol=0, atol=0)
        assert_equal_gradients(experts, plain)
    assert experts.up.grad is not None
    assert not experts.up.grad[1].any()


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_dtensor_weights(one_rank: None, x: Tensor, style: Any) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, 8))
    layer = copy.deepcopy(plain)
    parallelize_module(layer, init_device_mesh("cpu", (1,)), {"0": style()})
    for _ in range(2):
        pending = backward(layer, x)
        assert len(pending) == 1
        pending[0].accumulate()
        plain(x).square().sum().backward()
    weight = layer[0].weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == weight.placements
    for found, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, **TOLERANCE)  # type: ignore[union-attr]


def test_no_kernel_writes_into_a_gradient_that_autograd_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a kernel that adds products in half precision to float32."""
    monkeypatch.setitem(products._sums_in_float32, ("cpu", torch.bfloat16), True)
    weight, factor = torch.zeros(4, 4), torch.ones(4, 4, requires_grad=True)
    x, dy = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    weight.grad = total = 2 * factor
    PendingGradient(nn.Identity(), LINEAR, weight, x, dy).accumulate()
    assert weight.grad is total
    assert (total == 5).all()


def test_a_gradient_of_the_gradient(x: Tensor) -> None:
    """As in a gradient penalty: what is to be differentiated itself is left alone, the last backward is not."""
    layer = nn.Linear(WIDTH, 8)
    plain = copy.deepcopy(layer)
    store = WeightGradients()
    defer_weights(layer, store)
    for each in (layer, plain):
        with store.record() as pending:
            (dx,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            assert pending == []
            dx.square().sum().backward()
        for gradient in pending:
            gradient.accumulate()
    assert layer.weight.grad is not None
    assert_equal_gradients(layer, plain)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_each_product_runs_once(checkpointing: Checkpointing) -> None:
    """I does one dI per linear layer and W one dW; full checkpointing repeats the forward once, in I."""
    stage = build_stage(1, 3, checkpointing, num_blocks=2)
    blocks = [module for module in stage.modules() if isinstance(module, Block)]
    uses = 6 * len(blocks)  # up, gate, down, twice twice, frozen
    store = WeightGradients()
    defer_weights(stage, store)
    input = torch.randn(2, SEQUENCE, WIDTH, requires_grad=True)
    for microbatch in range(2):
        with Products() as forward:
            output = stage(input)
        with store.record() as pending, Products() as i:
            output.sum().backward()
        with Products() as w:
            while pending:
                pending.pop().accumulate()
        assert len(forward.shapes) == uses
        recomputed = {"none": 0, "full": uses, "selective": uses // 2}[checkpointing]
        assert len(i.shapes) == uses + recomputed
        assert len(w.shapes) == uses - len(blocks)  # none for the frozen one
        calls = (1 if checkpointing == "none" else 2) * (microbatch + 1)
        assert [block.calls for block in blocks] == [calls] * len(blocks)
        rows = 2 * SEQUENCE
        assert all(left[1] == rows == right[0] for left, right in w.shapes)


def pipeline(modules: list[nn.Module], microbatches: int, **options: Any) -> tuple[Any, list[Any]]:
    """ZBV on this process alone: two stages."""
    stages = [PipelineStage(m, i, 2, torch.device("cpu")) for i, m in enumerate(modules)]
    return zbpipe.ScheduleZBV(stages, microbatches, loss_fn, **options), stages


def watch_actions(stages: list[Any], watch: Callable[[str, Any], None]) -> None:
    """Call `watch(action, stage)` after each I and each W that torch runs."""

    def run(name: str, stage: Any, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        watch(name, stage)

    for stage in stages:
        for name, method in (("I", "backward_one_chunk"), ("W", "backward_weight_one_chunk")):
            setattr(stage, method, partial(run, name, stage, getattr(stage, method)))


def test_the_first_stages_i_is_real_work_done_at_i(one_rank: None) -> None:
    modules = [build_stage(0, 2), build_stage(1, 2)]
    schedule, stages = pipeline(modules, 1)
    seen: dict[tuple[str, int], set[str]] = {}

    def watch(action: str, stage: Any) -> None:
        seen[action, stage.stage_index] = set(gradients({0: stage.submod}))

    tokens, targets = batch(1)
    schedule.step(tokens, target=targets)  # the first I of all computes everything
    for module in modules:
        module.zero_grad()
    watch_actions(stages, watch)
    schedule.step(tokens, target=targets)
    after_i, after_w = seen["I", 0], seen["W", 0]
    assert "0.0.weight" in after_i  # the embedding, at the far end of the first stage's backward
    assert not [name for name in after_i if name.endswith(("up.weight", "gate.weight", "down.weight", "twice.weight"))]
    assert {"0.1.up.weight", "0.1.twice.weight"} <= after_w


def test_i_frees_the_activations_and_w_the_rest(one_rank: None) -> None:
    """From I to W only each linear layer's x and dY live on; what other layers had saved dies in I."""
    modules = [build_stage(index, 2, num_blocks=2) for index in range(2)]
    schedule, stages = pipeline(modules, 3)
    norm_inputs: dict[int, list[weakref.ref[Any]]] = {0: [], 1: []}
    linear_inputs: dict[int, list[weakref.ref[Any]]] = {0: [], 1: []}

    def remember(refs: list[weakref.ref[Any]], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        refs.append(weakref.ref(inputs[0].untyped_storage()))

    for stage in stages:
        # The second block, because the first one's input may be a receive buffer, which torch may keep.
        block = [layer for layer in stage.submod if isinstance(layer, Block)][1]
        block.norm.register_forward_pre_hook(partial(remember, norm_inputs[stage.stage_index]))
        block.up.register_forward_pre_hook(partial(remember, linear_inputs[stage.stage_index]))

    seen = {"I": 0, "W": 0}

    def watch(action: str, stage: Any) -> None:
        index = stage.stage_index
        gc.collect()
        seen[action] += 1
        counts = [len(pending) for pending in unfinished(stage).values()]
        assert counts == [[10, 11][index]] * (action == "I")  # 5 a block, and the head; ZBV on one rank owes one W
        if action == "I":
            assert norm_inputs[index].pop(0)() is None
            assert linear_inputs[index][0]() is not None
        else:
            assert linear_inputs[index].pop(0)() is None

    tokens, targets = batch(3)
    schedule.step(tokens, target=targets)  # the first step runs torch's metadata inference, too
    for refs in (*norm_inputs.values(), *linear_inputs.values()):
        refs.clear()
    watch_actions(stages, watch)
    schedule.step(tokens, target=targets)
    assert seen == {"I": 6, "W": 6}


@pytest.mark.parametrize("split", ["deferred", "autograd"])
def test_one_rank_alone(one_rank: None, split: str) -> None:
    modules = [build_stage(0, 2), build_stage(1, 2)]
    schedule, stages = pipeline(modules, 3, split_backward=split)
    assert all(is_split(stage) == (split == "deferred") for stage in stages)
    tokens, targets = batch(3)
    losses: list[Tensor] = []
    output = schedule.step(tokens, target=targets, losses=losses)
    assert output.shape == (6, SEQUENCE, VOCABULARY)
    expected_losses, expected = reference(2, 3)
    assert [loss.item() for loss in losses] == pytest.approx(expected_losses, rel=1e-6)
    found = gradients(dict(enumerate(modules)))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **TOLERANCE)


class SelfBackwardLoss(torch.autograd.Function):
    """As TorchTitan's chunked loss: head and backward are done; what is left is the gradient of the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
        ctx.gradient, total = torch.zeros_like(hidden), torch.zeros(())
        for half in (slice(0, SEQUENCE // 2), slice(SEQUENCE // 2, SEQUENCE)):
            chunk = hidden[:, half].detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_fn(head(chunk), target[:, half]) / 2
            if head.weight.requires_grad:
                loss.backward()
                ctx.gradient[:, half] = chunk.grad
            total += loss.detach()
        return total

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        return dloss * ctx.gradient, None, None


class HeadInLoss(nn.Module):
    """The last stage, whose head only the loss calls."""

    def __init__(self) -> None:
        super().__init__()
        *blocks, self.head = build_stage(1, 2)  # type: ignore[misc]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.mark.parametrize("defer_loss", [False, True])
def test_a_loss_with_backwards_of_its_own(one_rank: None, defer_loss: bool) -> None:
    """The head's weight gradient is added in F, or with `defer_loss` in W."""
    last = HeadInLoss()
    stages = [PipelineStage(m, i, 2, torch.device("cpu")) for i, m in enumerate([build_stage(0, 2), last])]
    schedule: Any = zbpipe.ScheduleZBV(
        stages,
        3,
        lambda hidden, target: SelfBackwardLoss.apply(hidden, last.head, target),
        defer_loss=defer_loss,
    )
    owed: list[int] = []
    weights_seen: list[bool] = []

    def watch(action: str, stage: Any) -> None:
        if action == "I" and stage.stage_index == 1:
            owed.append(len(list(unfinished(stage).values())[-1]))
            weights_seen.append(last.head.weight.grad is not None)

    tokens, targets = batch(3)
    losses: list[Tensor] = []
    # Before the first step torch runs the loss once on whatever is in memory, and this one adds to the head's gradient.
    schedule.step(tokens, target=targets)
    for stage in stages:
        stage.submod.zero_grad()
    watch_actions(stages, watch)
    schedule.step(tokens, target=targets, losses=losses)
    assert owed == [7 if defer_loss else 5] * 3  # both halves of the head, and 5 of the block
    assert weights_seen[0] != defer_loss
    expected_losses, expected = reference(2, 3)
    assert [loss.item() for loss in losses] == pytest.approx(expected_losses, rel=1e-6)
    assert not any(unfinished(stage) for stage in stages)
    # The head is in another place of the module.
    torch.testing.assert_close(last.head.weight.grad, expected["1.1.weight"], **TOLERANCE)
    torch.testing.assert_close(last.blocks[0].up.weight.grad, expected["1.0.up.weight"], **TOLERANCE)
    schedule.step(tokens, target=targets)  # adds to them
    torch.testing.assert_close(last.head.weight.grad, 2 * expected["1.1.weight"], **TOLERANCE)


def test_an_error_in_i_ends_the_recording(x: Tensor) -> None:
    layer = nn.Linear(WIDTH, 8)
    plain = copy.deepcopy(layer)
    store = WeightGradients()
    defer_weights(layer, store)
    with pytest.raises(ZeroDivisionError), store.record():
        raise ZeroDivisionError
    layer(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert_equal_gradients(layer, plain)
