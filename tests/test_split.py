"""What the backward split does on one stage: which work in I, which in W, how often, and what it keeps in between."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compared import Compared, Operations, train
from models import (
    SEQUENCE,
    WIDTH,
    Block,
    Checkpointing,
    DoubledLinear,
    TiedStage,
    batch,
    build_stage,
    loss_fn,
    reference,
)
from pipelines import TOLERANCE, Pipeline, assert_like, on_one_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo.case import bare, parameter

import zbpipe
from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.runtime.split import products
from zbpipe.runtime.split.deferral import Deferral
from zbpipe.runtime.split.deferring_layers import defer_weights
from zbpipe.runtime.split.products import LINEAR, PendingGradient
from zbpipe.runtime.split.stage import find_pending
from zbpipe.runtime.split.weight_gradients import WeightGradients

SHAPE = (3, SEQUENCE, WIDTH)


class InPlace(nn.Linear):
    """As by `nn.ReLU(inplace=True)`, or a residual that is added to it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(0.5).add_(x)


@pytest.mark.parametrize(("kind", "times"), [(nn.Linear, 1), (DoubledLinear, 2)])
def test_a_layer_whose_forward_was_wrapped(kind: type[nn.Linear], times: int) -> None:
    """As TorchTitan's tensor parallelism does it: closures, in an attribute on the instance."""

    def wrap(layer: nn.Linear) -> None:
        inner = layer.forward
        layer.forward = lambda input: 3 * inner(input)  # type: ignore[method-assign]

    both, fresh = Compared(kind(WIDTH, 8)), kind(WIDTH, 8)
    fresh.load_state_dict(both.plain.state_dict())
    for each in (both.plain, fresh):
        for _ in range(times):
            wrap(each)  # type: ignore[arg-type]
    both.module = fresh
    for _ in range(2):  # the second time it is prepared already
        defer_weights(fresh, both.gradients)
        assert len(both.train(torch.randn(SHAPE))) == 1


def with_one_weight() -> nn.Module:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    layers[1].weight = layers[0].weight
    return layers


def frozen(name: str) -> nn.Module:
    layer = nn.Linear(WIDTH, 8)
    layer.get_parameter(name).requires_grad_(False)
    return layer


def sparse() -> nn.Module:
    """The embedding's gradient comes first, and its weight is that of the head."""
    stage = TiedStage()
    stage.embedding.sparse = True
    return stage


TOKENS = batch(1)[0]
LAYERS: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    **{
        f"x of {len(shape)} dimensions": (lambda: nn.Linear(WIDTH, 8), shape, 1)
        for shape in ((WIDTH,), (5, WIDTH), SHAPE)
    },
    "no bias": (lambda: nn.Linear(WIDTH, 8, bias=False), (2, *SHAPE), 1),
    # Before torch 2.15 the output of `F.linear` with a bias is a view, which autograd lets nobody change there.
    "in place": (lambda: nn.Sequential(InPlace(WIDTH, WIDTH)), SHAPE, 1),
    # up, gate, down and twice the one that is used twice; nothing for the frozen one
    "block": (Block, SHAPE, 5),
    "tied, sparse": (sparse, TOKENS, 6),
    "a weight of two layers": (with_one_weight, SHAPE, 2),
    "frozen bias": (lambda: frozen("bias"), SHAPE, 1),
    "frozen weight": (lambda: frozen("weight"), SHAPE, 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_so_many_products_are_left_to_w(name: str) -> None:
    make, x, deferred = LAYERS[name]
    both = Compared(make())
    for _ in range(2):
        assert len(both.train(x if torch.is_tensor(x) else torch.randn(x))) == deferred


def scaled(product: Callable[..., Any], is_leaf: bool) -> nn.Module:
    """Its weight is a leaf, or a transpose of one; `product` may be wrong."""
    parts = {"weight": parameter(3, WIDTH, WIDTH), "weight_products": lambda: {torch.bmm: product}}
    return bare(lambda s, x: torch.bmm(x, s.weight if is_leaf else s.weight.mT), **parts)(0)


@pytest.mark.parametrize(("is_leaf", "records"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("result", "got"),
    [
        (None, "None"),
        (torch.ones(WIDTH), r"one in the shape \(16,\)"),  # broadcasting would take it
        (torch.ones(2, 3, WIDTH, WIDTH), r"one in the shape \(2, 3, 16, 16\)"),  # autograd would sum it up
    ],
)
def test_a_product_that_gives_another_shape_is_named(result: Any, got: str, is_leaf: bool, records: bool) -> None:
    both = Compared(scaled(lambda dy, x: result, is_leaf))
    of_weight = rf"of Stage: .* has to .* shape of the weight, \(3, {WIDTH}, {WIDTH}\), got {got}"
    run = both.train if records else partial(train, both.module)
    with pytest.raises(ValueError, match=of_weight):
        run(torch.randn(3, 4, WIDTH))


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_dtensor_weights(one_rank: None, style: Any) -> None:
    both = Compared(nn.Sequential(nn.Linear(WIDTH, 8)), **TOLERANCE)
    parallelize_module(both.module, init_device_mesh("cpu", (1,)), {"0": style()})
    for _ in range(2):
        defer_weights(both.module, both.gradients)
        assert len(both.train(torch.randn(SHAPE))) == 1
    weight: Any = both.module[0].weight  # type: ignore[index]
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == weight.placements


def test_no_kernel_writes_into_a_gradient_that_autograd_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a kernel that adds products in half precision to float32."""
    monkeypatch.setitem(products._sums_in_float32, ("cpu", torch.bfloat16), True)
    weight, factor = torch.zeros(4, 4), torch.ones(4, 4, requires_grad=True)
    x, dy = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    weight.grad = total = 2 * factor
    PendingGradient(nn.Identity(), LINEAR, weight, x, dy).accumulate()
    assert weight.grad is total
    assert (total == 5).all()


PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default


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
        with Operations() as forward:
            output = stage(input)
        with store.record() as pending, Operations() as i:
            output.sum().backward()
        with Operations() as w:
            while pending:
                pending.pop().accumulate()
        assert len(forward.arguments(*PRODUCTS)) == uses
        recomputed = {"none": 0, "full": uses, "selective": uses // 2}[checkpointing]
        assert len(i.arguments(*PRODUCTS)) == uses + recomputed
        factors = [args[-2:] for args in w.arguments(*PRODUCTS)]
        assert len(factors) == uses - len(blocks)  # none for the frozen one
        calls = (1 if checkpointing == "none" else 2) * (microbatch + 1)
        assert [block.calls for block in blocks] == [calls] * len(blocks)
        assert all(left.shape[1] == right.shape[0] == 2 * SEQUENCE for left, right in factors)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_b_defers_nothing(one_rank: None, checkpointing: Checkpointing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its F, once layers have learned what they can defer."""
    # Its stage 0 has one I.
    pipe = Pipeline(zbpipe.generate("DualPipeV", 1, 4), 4, partial(build_stage, checkpointing=checkpointing))
    multiply, position, ops = Deferral.multiply, pipe.schedule.position, set[str]()
    monkeypatch.setattr(Deferral, "multiply", lambda *args: ops.add(str(position.action)) or multiply(*args))
    tokens, targets = batch(4)
    for _ in range(4):
        ops.clear()
        pipe.zero_grad()
        assert_like([(pipe.run(tokens, target=targets), pipe.gradients())], reference(2, 4))
    assert {each for each in ops if each[0] == "0"} == {"0F3"} | ({"0I3"} if checkpointing != "none" else set())


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


@pytest.mark.parametrize("defer_loss", [False, True])
def test_a_loss_with_backwards_of_its_own(one_rank: None, defer_loss: bool) -> None:
    """The head's weight gradient is added in F, or with `defer_loss` in W."""
    *blocks, head = build_stage(1, 2)  # type: ignore[misc]
    # Only the loss calls its head.
    last: Any = bare(lambda s, x: s.blocks(x), blocks=lambda: nn.Sequential(*blocks), head=lambda: head)(0)
    modules = [build_stage(0, 2), last]
    schedule = on_one_rank(
        modules, 3, loss=lambda hidden, target: SelfBackwardLoss.apply(hidden, last.head, target), defer_loss=defer_loss
    )
    seen: list[tuple[int, bool]] = []

    def watch(kind: str, index: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        result = compute()
        if (kind, index) == ("I", 1):
            owed = max(len(find_pending(pipelining.stages_of(schedule)[1], each)) for each in range(3))
            seen.append((owed, last.head.weight.grad is not None))
        return result

    tokens, targets = batch(3)
    losses: list[Tensor] = []
    # Before the first step torch runs the loss once on whatever is in memory, and this one adds to the head's gradient.
    schedule.step(tokens, target=targets)
    for module in modules:
        module.zero_grad()
    with hooks.hook(schedule, hooks.HookOrder.RECORD, watch):
        schedule.step(tokens, target=targets, losses=losses)
    assert [owed for owed, _ in seen] == [7 if defer_loss else 5] * 3  # both halves of the head, and 5 of the block
    assert seen[0][1] != defer_loss
    expected_losses, expected = reference(2, 3)
    assert [loss.item() for loss in losses] == pytest.approx(expected_losses, rel=1e-6)
    # The head is in another place of the module.
    torch.testing.assert_close(last.head.weight.grad, expected["1.1.weight"], **TOLERANCE)
    torch.testing.assert_close(last.blocks[0].up.weight.grad, expected["1.0.up.weight"], **TOLERANCE)
    schedule.step(tokens, target=targets)  # adds to them
    torch.testing.assert_close(last.head.weight.grad, 2 * expected["1.1.weight"], **TOLERANCE)


def test_an_error_in_i_ends_the_recording() -> None:
    both = Compared(nn.Linear(WIDTH, 8))
    with pytest.raises(ZeroDivisionError), both.gradients.record():
        raise ZeroDivisionError
    for each in (both.module, both.plain):
        each(torch.ones(SHAPE)).square().sum().backward()
    both.compare()
