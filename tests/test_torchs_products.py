"""torch's products with undeclared weights: those left to W, and their gradients against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compared import CALLS, Compared, Operations, call, train
from pipelines import check_steps, shard
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.flop_counter import FlopCounterMode
from zoo.case import bare, function, parameter
from zoo.case import linear as linear_layer

import zbpipe
from zbpipe.runtime.split.products import FROM_BACKWARD, LINEAR

WIDTH = 6
Forward = Callable[[Any, Tensor], Tensor]


class Case(NamedTuple):
    forward: Forward
    weight: tuple[int, ...]
    deferred: int = 1
    """Products left to W."""
    x: tuple[int, ...] = (3, 4, WIDTH)
    in_checkpoint: int | None = None
    """Products left to W in a checkpoint, if there are fewer."""


class Own(nn.Module):
    """A layer with one weight and a bias, and a forward that anybody may have written."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(case.weight) / 3)
        self.b = nn.Parameter(torch.randn(WIDTH))
        self.function = case.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def experts(s: Any, x: Tensor) -> Tensor:
    """Each gets the rows that go to it, maybe none."""
    y = torch.zeros_like(x)
    choice = torch.arange(len(x)) % 2
    for expert in range(len(s.w)):
        rows = (choice == expert).nonzero().squeeze(-1)
        y = y.index_add(0, rows, F.linear(x[rows], s.w[expert]))
    return y


def attention(s: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(x, s.w).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v)


def in_place(s: Any, x: Tensor) -> Tensor:
    return (x @ s.w).add_(s.b[torch.arange(WIDTH)]).mul_(2)


def hooked(s: Any, x: Tensor) -> Tensor:
    """A hook on a part of the weight, from which another part is made."""
    expert = s.w[1]
    expert.register_hook(lambda gradient: 3 * gradient)
    return x @ expert[:, 1:] + F.linear(x, s.w[0])[..., 1:]


def hooked_transpose(s: Any, x: Tensor) -> Tensor:
    weight = s.w.T
    y = x @ weight
    weight.register_hook(lambda gradient: 3 * gradient)
    return y


def hooked_nodes(s: Any, x: Tensor) -> Tensor:
    """Hooks on the nodes of views."""
    one, other = s.w[0], s.w[1].T
    for view in (one, other):
        view.grad_fn.register_prehook(lambda gradients: (3 * gradients[0],) if gradients[0] is not None else None)
    return x @ one + x @ other


def normalised(s: Any, x: Tensor) -> Tensor:
    weight = F.normalize(s.w, dim=1)
    return torch.tanh(x @ weight) @ weight.T


def standardised(s: Any, x: Tensor) -> Tensor:
    """A kernel of more dimensions than its parameter has."""
    return F.conv1d(x, (s.w - s.w.mean(0)).view(4, 4, 3), s.b[:4], padding=1)


def penalised(s: Any, x: Tensor) -> Tensor:
    """The backward of the penalty frees the graph that makes the weight."""
    weight = F.normalize(s.w, dim=1)
    return x @ weight + weight.square().mean()


def hooked_normalised(s: Any, x: Tensor) -> Tensor:
    weight = F.normalize(s.w, dim=1)
    weight.register_hook(lambda gradient: 3 * gradient)
    return x @ weight


def refuses_a_keyword(s: Any, x: Tensor) -> Tensor:
    """Results in tensors of the user's own."""
    y = x.new_empty(3 * 4, WIDTH)
    with torch.no_grad():
        torch.mm(x.flatten(0, 1), s.w, out=y)
    return x @ s.w + y.view_as(x)


SQUARE = (WIDTH, WIDTH)
CASES = {
    "@": Case(lambda s, x: x @ s.w, SQUARE),
    "@ T": Case(lambda s, x: x @ s.w.T, SQUARE),
    "T @": Case(lambda s, x: (s.w.T @ x.mT).mT, SQUARE),
    "vector": Case(lambda s, x: s.w @ x[0, 0] + x, SQUARE, 0),
    "x of one row": Case(lambda s, x: x[0, 0] @ s.w + x, SQUARE),
    "batched @": Case(lambda s, x: (x.unsqueeze(1) @ s.w).sum(1), (2, *SQUARE)),
    "@ batched": Case(lambda s, x: (s.w @ x.unsqueeze(1).mT).sum(1).mT, (2, *SQUARE)),
    "bmm": Case(lambda s, x: torch.bmm(x, s.w), (3, *SQUARE)),
    "bmm of an expanded weight": Case(lambda s, x: torch.bmm(x, s.w.expand(3, -1, -1)), SQUARE, in_checkpoint=0),
    "baddbmm": Case(lambda s, x: torch.baddbmm(s.b, x, s.w), (3, *SQUARE)),
    "linear by keyword": Case(lambda s, x: F.linear(x, bias=s.b, weight=s.w), SQUARE),
    "mm by keyword": Case(lambda s, x: torch.mm(x.flatten(0, 1), mat2=s.w).view_as(x), SQUARE),
    "addmm": Case(lambda s, x: torch.addmm(s.b, x.flatten(0, 1), s.w).view_as(x), SQUARE),
    "addmm with a factor": Case(lambda s, x: torch.addmm(s.b, x.flatten(0, 1), s.w, alpha=2).view_as(x), SQUARE, 0),
    "linear": Case(lambda s, x: F.linear(x, s.w, s.b), SQUARE),
    "operator": Case(lambda s, x: torch.ops.aten.linear.default(x, s.w, s.b), SQUARE),
    "select": Case(lambda s, x: F.linear(F.linear(x, s.w[0]), s.w[-1]), (3, *SQUARE), 2),
    "unbind": Case(lambda s, x: torch.stack([x @ each for each in s.w]), (3, *SQUARE), 3),
    "chunk": Case(lambda s, x: torch.stack([F.linear(x, each) for each in s.w.chunk(2)]), (2 * WIDTH, WIDTH), 2),
    "columns": Case(lambda s, x: x @ s.w[:, ::2], (WIDTH, 2 * WIDTH)),
    "reshape": Case(lambda s, x: x @ s.w.view(WIDTH, -1), (WIDTH, 2, WIDTH)),
    "view of a cast": Case(lambda s, x: (x.float() @ s.w.float().T).double(), SQUARE),
    "experts": Case(experts, (3, *SQUARE), 3, x=(8, WIDTH)),
    "attention": Case(attention, (3 * WIDTH, WIDTH)),
    "einsum": Case(lambda s, x: torch.einsum("bsd,dhk->bshk", x, s.w).flatten(2), (WIDTH, 2, 3)),
    "einsum, weight first": Case(lambda s, x: torch.einsum("hkd,bsd->bshk", [s.w, x]).flatten(2), (2, 3, WIDTH)),
    "einsum that sums the weight": Case(lambda s, x: torch.einsum("bsd,edk->bsk", x, s.w), (2, *SQUARE), 0),
    "einsum that broadcasts": Case(lambda s, x: torch.einsum("bsd,sdk->bsk", x, s.w), (1, *SQUARE), 0),
    "einsum with an ellipsis": Case(lambda s, x: torch.einsum("...d,dk->...k", x, s.w), SQUARE),
    "einsum of parts, by a made weight": Case(
        lambda s, x: torch.einsum("...rk,rkc->...rc", x.unflatten(-1, (3, 2)), s.w @ s.w).flatten(-2),
        (3, 2, 2),
        in_checkpoint=0,
    ),
    "einsum with an ellipsis in the weight": Case(lambda s, x: torch.einsum("...d,...dk->...k", x, s.w), SQUARE, 0),
    "made by products with constants": Case(lambda s, x: x @ (s.w.detach() @ (s.w.detach() @ s.w)), SQUARE),
    "conv1d": Case(lambda s, x: F.conv1d(x, s.w, padding=1), (4, 4, 3)),
    "conv1d of one sample": Case(lambda s, x: F.conv1d(x[0], s.w, padding=1) + x, (4, 4, 3)),
    "conv1d, same": Case(lambda s, x: F.conv1d(x.mT, s.w, s.b, padding="same", dilation=2).mT, (WIDTH, WIDTH, 3)),
    "conv1d, same, padded on one side": Case(lambda s, x: F.conv1d(x, s.w, padding="same"), (4, 4, 2), 0),
    "depthwise": Case(lambda s, x: F.conv1d(x.mT, s.w, s.b, 1, 1, 1, WIDTH).mT, (WIDTH, 1, 3)),
    "depthwise, squeezed": Case(
        lambda s, x: F.conv1d(x.mT, s.w.squeeze(1).unsqueeze(1), padding=1, groups=WIDTH).mT, (WIDTH, 1, 3)
    ),
    "conv2d": Case(lambda s, x: F.conv2d(x.unsqueeze(1), s.w, stride=(1, 2), padding=(1, 2)), (2, 1, 3, 3)),
    "conv3d": Case(lambda s, x: F.conv3d(x[None, None], s.w), (2, 1, 2, 2, 2)),
    "conv_transpose1d": Case(lambda s, x: F.conv_transpose1d(x, s.w, None, 2, 1, 1), (4, 5, 3)),
    "used twice": Case(lambda s, x: torch.tanh(x @ s.w) @ s.w.T, SQUARE, 2),
    "in place": Case(in_place, SQUARE),
    "written elsewhere": Case(refuses_a_keyword, SQUARE),
    "weight of a weight": Case(lambda s, x: x @ (s.w @ s.w), SQUARE, in_checkpoint=0),
    "weight of two": Case(lambda s, x: F.linear(x, s.w * s.b), SQUARE, in_checkpoint=0),
    "normalised": Case(lambda s, x: x @ F.normalize(s.w, dim=1), SQUARE, in_checkpoint=0),
    "normalised, used twice": Case(normalised, SQUARE, 2, in_checkpoint=0),
    "normalised, with a penalty": Case(penalised, SQUARE, 0),
    "standardised": Case(standardised, (4 * 4, 3), in_checkpoint=0),
    "made from x": Case(lambda s, x: x @ (s.w * x.mean()), SQUARE, 0),
    "hook on a made weight": Case(hooked_normalised, SQUARE, 0),
    "detached": Case(lambda s, x: x @ s.w.detach().requires_grad_()[0] + x @ s.w[1], (2, *SQUARE)),
    "hook on a part": Case(hooked, (2, *SQUARE), 0),
    "hook on a transpose": Case(hooked_transpose, SQUARE, 0),
    "hooks on nodes of views": Case(hooked_nodes, (2, *SQUARE), 2, in_checkpoint=0),
    "chosen by index": Case(lambda s, x: x @ s.w[torch.tensor([0, 1, 2])], (3, *SQUARE), in_checkpoint=0),
    "rows chosen by index": Case(lambda s, x: x @ s.w[torch.arange(WIDTH)], SQUARE, 0),
    "no product": Case(lambda s, x: (x * s.w).clamp(min=s.w.min()), (WIDTH, WIDTH), 0, x=(3, WIDTH, WIDTH)),
}

OF_COMPLEX_NUMBERS = ("@", "T @", "batched @", "@ batched", "bmm", "linear", "einsum")
"""Cases for each conjugate in a gradient."""


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("run", CALLS)
@pytest.mark.parametrize(
    ("name", "dtype"), [*product(CASES, [torch.float64]), *product(OF_COMPLEX_NUMBERS, [torch.complex128])], ids=str
)
def test_what_waits_gets_the_gradients_of_autograd(name: str, dtype: torch.dtype, run: str) -> None:
    case = CASES[name]
    layer = Own(case).to(dtype)
    nn.init.normal_(layer.w, std=1 / 3)  # complex numbers, too
    both = Compared(layer, rtol=1e-5 if "cast" in name else 1e-11, atol=1e-11)
    deferred = case.deferred if run == "plain" or case.in_checkpoint is None else case.in_checkpoint
    for _ in range(2):  # the second adds to `.grad`
        assert len(both.train(torch.randn(case.x, dtype=dtype), call=CALLS[run])) == deferred


def test_w_runs_once_what_makes_several_weights() -> None:
    layer = Own(Case(lambda s, x: sum(x @ each for each in (s.w @ s.w).unbind()), (3, *SQUARE)))
    both, x = Compared(layer), torch.randn(3, 4, WIDTH)
    with FlopCounterMode(display=False) as in_all:
        assert len(both.train(x)) == 3
    with FlopCounterMode(display=False) as in_b:
        train(both.plain, x)
    assert in_all.get_total_flops() == 2 * in_b.get_total_flops()


@pytest.mark.parametrize(
    "name", ["@", "@ T", "linear", "mm by keyword of x", "select", "einsum", "batched @", "conv1d"]
)
def test_what_was_learned_of_a_call_holds_for_other_inputs(name: str) -> None:
    """Of another shape, another dtype, without a gradient, in another layout."""
    case = CASES.get(name) or Case(lambda s, x: torch.mm(input=x.flatten(0, 1), mat2=s.w).view(x.shape), SQUARE)
    both = Compared(Own(case), rtol=1e-4, atol=1e-4)
    rows, *rest = case.x
    inputs = [torch.randn(number, *rest) for number in (rows, rows + 2, 1)]
    inputs += [torch.randn(*reversed(case.x)).permute(2, 1, 0), torch.randn(rows, 1, 1).expand(case.x)]
    ways = call, lambda layer, x: layer(x.detach()) + 0 * x.sum()
    for dtype, x, way in product((torch.float32, torch.float64), inputs, ways):
        for each in (both.module, both.plain):
            each.to(dtype).zero_grad()
        assert len(both.train(x.to(dtype), call=way)) == case.deferred


@pytest.mark.parametrize("name", ["@", "@ T", "addmm", "select", "einsum", "conv1d", "batched @"])
def test_under_autocast(name: str) -> None:
    """The same numbers in F, and x is kept in half precision."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float()  # type: ignore[no-any-return]

    both = Compared(Own(CASES[name]), of_y={"rtol": 0, "atol": 0}, rtol=0.02, atol=0.02)
    assert {each.x.dtype for each in both.train(torch.randn(CASES[name].x), call=run)} == {torch.bfloat16}


def test_i_computes_no_weight_gradient_for_the_bias_of_a_convolution() -> None:
    """oneDNN computes both at once."""
    both, x = Compared(nn.Conv1d(4, WIDTH, 3)), torch.randn(2, 4, 8)
    with Operations() as operations, both.gradients.record() as pending:
        train(both.module, x)
    with operations:
        pending.pop().accumulate()
    computed = [args[-1] for args in operations.arguments(torch.ops.aten.convolution_backward.default)]
    assert computed == [[True, False, False], [False, True, False]], "of x, the weight and the bias"


def test_a_view_with_a_gradient_in_another_layout() -> None:
    """Somebody else has made `.grad`: transposed, or sparse."""
    for grad in (torch.ones(WIDTH, 3, WIDTH).transpose(0, 1), torch.ones(3, WIDTH, WIDTH).to_sparse()):
        both = Compared(Own(CASES["select"]))
        both.module.w.grad, both.plain.w.grad = grad.clone(), torch.ones(3, WIDTH, WIDTH)  # type: ignore[union-attr]
        assert len(both.train(torch.randn(3, 4, WIDTH))) == 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sharded_weights(one_rank: None, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Own(CASES[name]) for name in ("select", "@", "conv1d")))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    assert check_steps(shard(module, mp_policy=policy), 6, 4, WIDTH).shares[0] == 1


def multiply(ctx: Any, x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    ctx.save_for_backward(x, weight)
    ctx.more = more
    return x @ weight


def multiply_back(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Keeps dW from a torch function mode, as a kernel of one's own."""
    x, weight = ctx.saved_tensors
    with torch._C.DisableTorchFunction():
        dw = x.flatten(0, 1).mT @ dy.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return dy @ weight.mT, dw, *(None for _ in ctx.more)


Doubling = function(multiply_back, multiply)


def linear_back(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return dy @ weight, dy.flatten(0, 1).mT @ x.flatten(0, 1), None


def linear(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    ctx.save_for_backward(x, weight)
    return F.linear(x, weight, bias)


OwnLinear = function(linear_back, linear)


@pytest.mark.parametrize("run", CALLS)
@pytest.mark.parametrize(
    ("forward", "declared"),
    [
        (
            lambda s, x: Doubling.apply(x, s.w, 2.0, s.b.detach()),
            {Doubling.apply: lambda dy, x, factor, bias: x.flatten(0, 1).mT @ dy.flatten(0, 1)},
        ),
        (lambda s, x: OwnLinear.apply(x, s.w, s.b.detach()) + s.b, {OwnLinear.apply: LINEAR}),
        (lambda s, x: Doubling.apply(x, s.w), {}),
    ],
)
def test_a_function_of_ones_own(forward: Callable[..., Tensor], declared: dict[Any, Any], run: str) -> None:
    layer = Own(Case(forward, SQUARE)).double()
    if declared:
        layer.weight_products = declared  # type: ignore[assignment]
    both = Compared(layer)
    for step in range(2):
        x = torch.randn(3, 4, WIDTH, dtype=torch.float64)
        assert len(both.train(x, call=CALLS[run], on_trial=not step)) == bool(declared)
    assert "apply" not in vars(Doubling)


def test_a_declared_gradient_may_be_dy_itself() -> None:
    """Others read it: it does not become `.grad`, to which the next product adds."""
    layer = Own(Case(lambda s, x: torch.add(torch.add(x, s.w).tanh(), s.w) @ x, SQUARE))
    layer.weight_products = {torch.add: lambda dy, x: dy}  # type: ignore[assignment]
    both = Compared(layer)
    for step in range(2):
        for each in (both.module, both.plain):
            each.zero_grad()
        with both.gradients.record(on_trial=not step) as pending:
            train(layer, torch.randn(WIDTH, WIDTH))
        given = [each.dy.clone() for each in pending]
        layer.w.grad = None
        for gradient in pending:
            gradient.accumulate()
        assert len(given) == 2
        assert all(map(torch.equal, given, (each.dy for each in pending)))
        both.module.zero_grad()
        both.train(torch.randn(WIDTH, WIDTH))


def in_many_ways(s: Any, x: Tensor) -> Tensor:
    """Multiplies one weight by the same functions."""
    w, linear = s.w, F.linear
    y = linear(x, w, s.row) + linear(x, w, s.rows) + linear(x, w) + linear(x[0], w, s.row.detach())
    y = y + x @ w + x[0] @ w + torch.matmul(x[0, 0], w)
    y = y + torch.matmul(w, w).sum() + torch.matmul(w.view(-1, WIDTH), w).sum()
    y = y + F.conv1d(x, s.kernel, s.channels) + F.conv1d(x[0], s.kernel, s.channels)
    with torch.no_grad():
        y += x @ w
    return y + (x.detach() @ w) * (x.float() @ w.float())


def test_a_product_seen_before_is_known_by_all_its_arguments() -> None:
    sizes = {"w": (WIDTH, WIDTH), "row": (WIDTH,), "rows": (4, WIDTH), "kernel": (4, 4, 1), "channels": (4,)}
    both = Compared(bare(in_many_ways, **{name: parameter(*size) for name, size in sizes.items()})(0).double())
    for frozen in (False, False, True, False):
        for each in (both.module, both.plain):
            each.row.requires_grad_(not frozen)  # type: ignore[operator, union-attr]
            each.channels.requires_grad_(not frozen)  # type: ignore[operator, union-attr]
        both.train(torch.randn(3, 4, WIDTH, dtype=torch.float64), call=lambda module, x: module(x) + module(2 * x))


@torch.library.custom_op("zbpipe_stand_in::gemm", mutates_args=())
def gemm(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)


@gemm.register_fake
def _(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    return a.new_empty(a.shape[int(transpose_a)], b.shape[int(not transpose_b)])


def by_gemm(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    """An operator of its library, as Primus Turbo does."""
    ctx.save_for_backward(x, weight)
    ctx.kept = x
    return torch.ops.zbpipe_stand_in.gemm(x, weight, False, True)  # type: ignore[no-any-return]


def by_gemm_back(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    del ctx.kept
    product = torch.ops.zbpipe_stand_in.gemm
    return product(dy, weight, False, False), product(dy, x, True, False)


def run_inner(ctx: Any, x: Tensor, weight: Tensor, inner: nn.Module) -> Tensor:
    ctx.save_for_backward(x, weight)
    ctx.inner = inner
    return inner(x) @ weight  # type: ignore[no-any-return]


def run_inner_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        h = ctx.inner(given)
    h.backward(dy @ weight.mT)
    return given.grad, h.detach().flatten(0, 1).mT @ dy.flatten(0, 1), None


LinearOfOthers, RunsBackward = function(by_gemm_back, by_gemm), function(run_inner_backward, run_inner)
with_inner = bare(
    lambda s, x: RunsBackward.apply(x, s.w, s.inner), w=parameter(WIDTH, WIDTH), inner=linear_layer(WIDTH, WIDTH)
)


def declare(layer: nn.Module, function: Any) -> nn.Module:
    layer.weight_products = {function.apply: FROM_BACKWARD}  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(
    ("layer", "deferred"),
    [
        (
            lambda: declare(Own(Case(lambda s, x: LinearOfOthers.apply(x.flatten(0, 1), s.w), SQUARE)), LinearOfOthers),
            1,
        ),
        (lambda: with_inner(0), 1),
        (lambda: declare(with_inner(0), RunsBackward), 2),
    ],
    ids=["an operator of another library", "a backward within a backward", "declared"],
)
def test_products_of_backwards_of_others(layer: Callable[[], nn.Module], deferred: int) -> None:
    both = Compared(layer())
    for step in range(3):
        # Products with the weight have as many elements as the weight.
        assert len(both.train(torch.randn(3, 2, WIDTH), on_trial=not step)) == deferred


class Calls:
    """Of the backward of `Writes`, which does something with a weight's product, mostly in its third call."""

    number = 0


def do_something(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    (how,) = ctx.more
    x, rows = x.flatten(0, 1).clone(), dy.flatten(0, 1)
    Calls.number += 1
    if how == "times the weight":
        dw = x.mT @ rows * weight
    elif how in AT_ONCE:
        dw = AT_ONCE[how](x, rows, weight)
    else:
        dw = x.mT @ rows
        if how and Calls.number == 3:
            dw = (WAITS | READS | WRITES)[how](x, rows, dw)
    return dy @ weight.mT, dw, None


Writes = function(do_something, multiply)


def sets(x: Tensor, rows: Tensor, dw: Tensor) -> Tensor:
    x[0] = 0
    return dw


def writes(function: Callable[..., Any], *which: int) -> Callable[..., Tensor]:
    def run(x: Tensor, rows: Tensor, dw: Tensor) -> Tensor:
        function(*((x, rows, dw)[each] for each in which))
        return dw

    return run


def after_a_sum(x: Tensor, rows: Tensor, dw: Tensor) -> Tensor:
    more = dw + 1
    dw *= 2
    return dw / 2 + (more - more)


AT_ONCE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "adds": lambda x, rows, weight: torch.zeros_like(weight).addmm_(x.mT, rows),
    "into a given one": lambda x, rows, weight: torch.mm(x.mT, rows, out=torch.zeros_like(weight)),
    "of the weight alone": lambda x, rows, weight: weight.mm(weight),
}
READS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "into the result": writes(lambda dw: dw.mul_(1), 2),
    "into a part of the result": writes(lambda dw: dw[0].mul_(2), 2),
    "after a sum": after_a_sum,
    "reads": lambda x, rows, dw: dw * (1 + float(dw.sum() > 1e9)),
    "by NumPy": lambda x, rows, dw: torch.from_numpy(dw.numpy() * 2) / 2,
    "by DLPack": lambda x, rows, dw: torch.from_dlpack(dw),
    "a kernel": writes(lambda dw: dw.data_ptr(), 2),
    "a random one": lambda x, rows, dw: dw + 0 * torch.rand_like(dw),
}
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sets": sets,
    "into dY": writes(torch.relu_, 1),
    "by an operator": writes(lambda x: torch.ops.aten.mul_.Tensor(x, x), 0),
}
WAITS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "": lambda x, rows, dw: dw,
    "many steps": lambda x, rows, dw: (
        (dw.t() * 2).to(torch.float32).to(torch.float64).t().contiguous() / 2 + rows.square().sum()
    ),
}


@pytest.mark.parametrize("how", [*AT_ONCE, *READS, *WAITS, "times the weight"])
def test_what_a_backward_does_with_a_product_decides_whether_it_waits(how: str) -> None:
    layer = declare(Own(Case(lambda s, x: Writes.apply(x, s.w, how), SQUARE)).double(), Writes)
    both = Compared(layer, rtol=0, atol=0)

    def count(module: nn.Module, x: Tensor) -> Tensor:
        Calls.number = step
        return module(x)  # type: ignore[no-any-return]

    for step in range(3):
        left = both.train(torch.randn(3, 4, WIDTH, dtype=torch.float64), call=count, on_trial=not step)
        assert len(left) == (0 if how in AT_ONCE or (how in READS and step == 2) else 1)


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("on_trial", [False, True])
def test_a_backward_that_writes_into_what_a_product_needs_is_refused(how: str, on_trial: bool) -> None:
    both = Compared(declare(Own(Case(lambda s, x: Writes.apply(x, s.w, how), SQUARE)), Writes))
    Calls.number = 2
    with pytest.raises(RuntimeError, match=r"changed in place after the call, .* set weight_products = {}"):
        both.train(torch.randn(3, 4, WIDTH), on_trial=on_trial)


def test_a_gradient_that_depends_on_the_weight_needs_the_same_in_w() -> None:
    layer = declare(Own(Case(lambda s, x: Writes.apply(x, s.w, "times the weight"), SQUARE)), Writes)
    with Compared(layer).gradients.record() as pending:
        train(layer, torch.randn(3, 4, WIDTH))
    with torch.no_grad():
        layer.w.mul_(2)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"weight was changed in place after the call.* set weight_products = {}"):
        pending[0].accumulate()


def test_a_backward_that_fails_with_a_result_that_waits_is_named() -> None:
    def read_without_torch(x: Tensor, rows: Tensor, dw: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return torch.from_numpy(Tensor.numpy(dw))

    READS["by C"] = read_without_torch
    both = Compared(declare(Own(Case(lambda s, x: Writes.apply(x, s.w, "by C"), SQUARE)), Writes))
    Calls.number = 2
    with pytest.raises(RuntimeError, match=r"OwnBackward in a Own fails: .* weight_products = {}"):
        both.train(torch.randn(3, 4, WIDTH))


def of_x(s: Any, x: Tensor) -> Tensor:
    """A weight made from what it multiplies: the first stage needs no dX."""
    h = s.a(x)
    return h @ (torch.tanh(h).mean(0).unsqueeze(-1) * s.b)  # type: ignore[no-any-return]


def of_a_square(s: Any, x: Tensor) -> Tensor:
    """A weight made from what also goes elsewhere."""
    square = s.b * s.b
    return x @ torch.tanh(square) + square.sum()


@pytest.mark.parametrize(("forward", "share"), [(of_x, 0.5), (of_a_square, 0)])
def test_a_weight_whose_making_runs_in_i_does_not_wait(forward: Forward, share: float) -> None:
    module = bare(forward, a=linear_layer(WIDTH, WIDTH, bias=False), b=parameter(WIDTH, WIDTH))(0)
    assert zbpipe.check_gradients(module, torch.randn(4, WIDTH)).share == share


def with_child(s: Any, x: Tensor) -> Tensor:
    """Multiplies with the weight of a child that it never calls."""
    return F.linear(s.lin(x), s.other.weight, torch.cat([s.other.bias[:2], s.other.bias[2:]]))


@pytest.mark.parametrize("declared", [False, True])
def test_weights_of_children_wait_from_the_second_step_on(declared: bool) -> None:
    layer = bare(with_child, lin=linear_layer(WIDTH, WIDTH), other=linear_layer(WIDTH, WIDTH))(0)
    if declared:
        layer.other.weight_products = {}  # type: ignore[assignment]
    report = zbpipe.check_gradients(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), torch.randn(4, 3, WIDTH))
    assert report.share == pytest.approx(2 / 3 if declared else 1)


class Store:
    """The interface of Transformer Engine's store."""

    def __init__(self) -> None:
        self.context: SimpleQueue[Any] = SimpleQueue()
        self.enabled = True

    def enable_delay_wgrad_compute(self) -> None:
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        self.enabled = False


def run_engine(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor, layer: DelayingLinear) -> Tensor:
    ctx.save_for_backward(weight, x)
    ctx.layer = layer
    return x @ weight.t() + bias


def run_engine_back(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Not torch's kernels. Either one for the weight computes the bias' gradient too, or this backward does."""
    weight, x = ctx.saved_tensors
    store, db = ctx.layer.wgrad_store, dy.sum(0) if ctx.layer.gives_bias_in_i else None
    with torch._C.DisableTorchFunction():
        dx = dy @ weight
        if store.enabled:
            store.context.put((dy, x, db is None))
            return None, dx, db, None
        return dy.t() @ x, dx, dy.sum(0) if db is None else db, None


LinearOfTransformerEngine = function(run_engine_back, run_engine)


class DelayingLinear(nn.Linear):
    def __init__(self, gives_bias_in_i: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.wgrad_store, self.gives_bias_in_i = Store(), gives_bias_in_i

    def forward(self, x: Tensor) -> Tensor:
        return LinearOfTransformerEngine.apply(self.weight, x, self.bias, self)  # type: ignore[no-any-return]

    def backward_dw(self) -> None:
        """For one backward: replaces the weight's gradient, and leaves the bias' alone if there is one."""
        if self.wgrad_store.enabled:
            dy, x, has_bias = self.wgrad_store.context.get_nowait()
            self.weight.grad = dy.t() @ x
            if self.bias.grad is None:
                assert has_bias
                self.bias.grad = dy.sum(0)


def test_layers_with_a_store_of_their_own_delay_in_i_and_are_asked_in_w(one_rank: None) -> None:
    """Stand-ins for Transformer Engine's, which need CUDA."""
    parts = {name: partial(DelayingLinear, gives_bias_in_i=name == "one") for name in ("one", "other")}
    module = bare(lambda s, x: s.other(s.one(s.other(x).tanh()).tanh()), **parts)(0)
    report = zbpipe.check_gradients(module, torch.randn(12, WIDTH), microbatches=3)
    assert report.passed
    assert report.share == 1
    assert report.deferred == {(0, name) for name in ("one.weight", "other.weight")}
