"""The share of the weight gradients' work that waits for W, against an independent count."""

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import check_steps, shard
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from zoo import BY_NAME
from zoo.case import bare, function, linear

import zbpipe
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime.verify.gradient_report import GradientReport

WIDTH, EXPERTS, TOKENS = 16, 4, 24
Forward = Callable[[Any, Tensor], Tensor]


class Own(nn.Module):
    """A forward of its own over parameters `w`, three-dimensional, and `v`, two-dimensional, and a linear layer.

    They may be in a dictionary, as those of peft's adapters.
    """

    def __init__(self, forward: Forward, in_dict: bool = False) -> None:
        super().__init__()
        held = nn.ParameterDict() if in_dict else self
        self.lin = nn.Linear(WIDTH, WIDTH)
        for name, shape in (("w", (EXPERTS, WIDTH, WIDTH)), ("v", (WIDTH, WIDTH))):
            setattr(held, name, nn.Parameter(torch.randn(shape) / 4))
        held.scale = nn.Parameter(torch.ones(WIDTH))
        if in_dict:
            self.held = held
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(getattr(self, "held", self), self.lin(x))


class Checkpointed(nn.Sequential):
    """A checkpoint that is opened around a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def own(forward: Forward, in_checkpoint: bool = False) -> nn.Module:
    layer = Own(forward)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(layer) if in_checkpoint else layer)


def chosen_by_data(s: Any, x: Tensor) -> Tensor:
    """As PhiMoE's experts: each gets the rows that go to it."""
    result = torch.zeros_like(x)
    choice = x.detach().sum(-1).abs().mul(100).long() % EXPERTS
    for expert in choice.unique():
        rows = (choice == expert).nonzero().squeeze(-1)
        result = result.index_add(0, rows, F.linear(torch.tanh(F.linear(x[rows], s.w[expert])), s.w[expert].t()))
    return result


def gathered(s: Any, x: Tensor) -> Tensor:
    choice = torch.arange(len(x)) % EXPERTS
    return (s.w[choice] @ x.unsqueeze(-1)).squeeze(-1)  # type: ignore[no-any-return]


def gained(s: Any, x: Tensor) -> Tensor:
    """A gain and a bias are no products."""
    return F.linear(x * s.scale + s.scale, 2 * s.v.view(-1).view(WIDTH, WIDTH))


def looked_up(s: Any, x: Tensor) -> Tensor:
    """Rows of a table are no product, and what is made of them is no weight."""
    rows = s.v[torch.arange(len(x)) % WIDTH]
    return F.linear(rows + F.embedding(torch.arange(len(x)) % WIDTH, s.v) + x, s.w[0])


def kronecker(s: Any, x: Tensor) -> Tensor:
    """As LoKr, with a factor, which is a constant and no activation."""
    block = s.scale.view(4, 4)
    return F.linear(x, 2 * torch.kron(block, block))


def spectral(s: Any, x: Tensor) -> Tensor:
    """As FourierFT: a few frequencies, at their places in a larger matrix."""
    frequencies = torch.zeros(WIDTH, WIDTH)
    frequencies[torch.arange(WIDTH), torch.arange(WIDTH)] = s.scale
    return F.linear(x, torch.fft.ifft2(frequencies).real * 3)


def sparse(s: Any, x: Tensor) -> Tensor:
    weight = torch.ones(WIDTH, WIDTH)
    weight += torch.sparse_coo_tensor(torch.arange(WIDTH).expand(2, -1), 2 * s.scale, (WIDTH, WIDTH))
    return F.linear(x, weight)


def between_constants(s: Any, x: Tensor) -> Tensor:
    """As BOFT: products whose weight gradients could wait make the weight."""
    constant = torch.ones(WIDTH, WIDTH)
    return x @ (constant @ (constant @ (2 * s.v))) + F.linear(x, constant @ s.w[0].exp())


def filtered(s: Any, x: Tensor) -> Tensor:
    return F.linear(x, F.conv1d(s.v.unsqueeze(1), torch.ones(1, 1, 1)).squeeze(1))


def multiply_back(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    x, weight = ctx.saved_tensors
    return 2 * dy @ weight, 2 * dy.t() @ x if ctx.needs_input_grad[1] else None


def by_own_kernels(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """That no torch function mode sees."""
    with torch._C.DisableTorchFunction():
        return multiply_back(ctx, dy)


def multiply(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    ctx.save_for_backward(x, weight)
    return 2 * x @ weight.t()


ByOwnKernels, ByTorch = function(by_own_kernels, multiply), function(multiply_back, multiply)


def by_a_function(s: Any, x: Tensor) -> Tensor:
    return ByOwnKernels.apply(x, s.v)  # type: ignore[no-any-return]


def reentrant(s: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: s.lin(F.linear(x, s.w[1])), x, use_reentrant=True)  # type: ignore[no-any-return]


def within_checkpoint(s: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: s.lin(torch.bmm(x.expand(EXPERTS, -1, -1), s.w)).sum(0), x, use_reentrant=False)  # type: ignore[no-any-return]


OF_THE_ZOO = {
    "plain": "",
    "weight norm": "",
    "convolution": "",
    "transposed convolution": "",
    "LSTM": "",
    "GRU": "a product of its own",
    "nn.MultiheadAttention": "",
    "tied weights": "",
    "a hook on the weight": "the weight has hooks",
    "grouped experts": "",
    "bilinear": "a bilinear layer",
}


OF_PARTS: dict[str, tuple[Forward, str]] = {
    "chosen by data": (chosen_by_data, ""),
    "gathered": (gathered, ""),
    "a gain": (gained, ""),
    "looked up": (looked_up, ""),
    "a Function": (by_a_function, "the autograd Function Own, which is not declared"),
    "a Function with torch's products": (lambda s, x: ByTorch.apply(x, s.v), ""),
    "reentrant": (reentrant, ""),
    "checkpointed": (within_checkpoint, ""),
}
OF_ADAPTERS = kronecker, spectral, sparse, between_constants, filtered
IN_A_CHECKPOINT: dict[Forward, str] = {
    gathered: "made from parameters",
    between_constants: "made from parameters",
    gained: "made from parameters",
}
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    **{name: (partial(BY_NAME[name].build, 0), (1, 4, 8), reason) for name, reason in OF_THE_ZOO.items()},
    **{name: (partial(own, forward), (TOKENS, WIDTH), reason) for name, (forward, reason) in OF_PARTS.items()},
    **{each.__name__: (partial(Own, each, in_dict=True), (2, TOKENS, WIDTH), "") for each in OF_ADAPTERS},
    **{
        f"{forward.__name__} in a checkpoint": (partial(own, forward, True), (TOKENS, WIDTH), reason)
        for forward, reason in IN_A_CHECKPOINT.items()
    },
}
"""Models, the shape of their x, and one of the reasons why a weight gradient of theirs stays in I."""


def counted(module: nn.Module, x: Tensor, parameters: list[nn.Parameter]) -> float:
    """What an ordinary backward computes more, with these parameters' gradients than without any."""
    found = []
    for trains in (True, False):
        for each in module.parameters():
            each.requires_grad_(trains and any(each is one for one in parameters))
        # Without checkpoints, which compute no more than they need.
        with (
            replaced(sys.modules[__name__], checkpoint=lambda f, x, **_: f(x)),
            FlopCounterMode(display=False) as counter,
        ):
            module(x.detach().requires_grad_()).square().mean().backward()
        found.append(counter.get_total_flops())
    for each in module.parameters():
        each.requires_grad_()
    return float(found[0] - found[1])


def check(module: nn.Module, x: Tensor) -> GradientReport:
    return zbpipe.check_gradients(module, torch.cat([x, x]).requires_grad_(), microbatches=2)


NOT_COUNTED = ("LSTM", "bilinear")
"""torch's own counter has no formula for these."""


@pytest.mark.parametrize("name", CASES)
def test_the_share_is_that_of_an_independent_count(name: str) -> None:
    make, shape, reason = CASES[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    parameters = list(module.parameters())
    report = check(module, x)
    if name not in NOT_COUNTED:
        assert report.flops[0] == pytest.approx(counted(module, x, parameters), rel=0.02)
        lost = {each.parameter for _, each in report.in_i}
        waiting = [each for own, each in module.named_parameters() if own not in lost]
        assert report.shares[0] == pytest.approx(counted(module, x, waiting) / report.flops[0], rel=0.02)
    reasons = [each.reason for _, each in report.in_i]
    assert not reason or any(reason in each for each in reasons), reasons
    assert (report.share == 1) == (not reasons)
    assert {own for _, own in report.not_deferred} <= {each.parameter for _, each in report.in_i}
    assert all(each.share <= 0.5 or (0, each.parameter) in report.not_deferred for _, each in report.in_i)


def test_an_x_without_a_gradient_in_the_shape_of_a_weight() -> None:
    """The result of the first layer depends on parameters alone, as autograd sees it, and is as large as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Own(by_a_function))
    report = zbpipe.check_gradients(model, torch.randn(2 * WIDTH, WIDTH), microbatches=2)
    assert report.shares[0] == pytest.approx(2 / 3)
    assert [each.parameter for _, each in report.in_i] == ["1.v"]


def logged(module: nn.Module, x: Tensor, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    with caplog.at_level(logging.INFO, "zbpipe.runtime.split"):
        zbpipe.check_gradients(module, x)
    return [(each.levelno, each.getMessage()) for each in caplog.records if "split" in each.name]


def test_the_log_warns_if_little_waits(caplog: pytest.LogCaptureFixture) -> None:
    ((level, words),) = logged(own(gathered, True), torch.randn(4 * TOKENS, WIDTH), caplog)
    assert level == logging.WARNING
    assert words == (
        "stage 0 defers 66.7 % of its weight gradients' FLOPs to W; in I: 1.0 (Own) w 33.3 % (its weight is made"
        " from parameters). So its schedule gains less. docs/the-split.md shows how to declare a layer's products"
    )


def test_the_log_of_a_good_job_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    large = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH))
    everything = (logging.INFO, "stage 0 defers 100 % of its weight gradients' FLOPs to W")
    assert logged(large, torch.randn(4 * TOKENS, WIDTH), caplog) == [everything]
    _, (level, words) = logged(nn.Sequential(large, own(by_a_function)), torch.randn(4 * TOKENS, WIDTH), caplog)
    assert level == logging.INFO
    assert "97.1 % of its weight gradients' FLOPs to W; in I: 1.1 (Own) v 2.86 % (the autograd Function" in words


def tied(s: Any, ids: Tensor) -> Tensor:
    """An embedding whose gradient waits as that of the head, or a head that never runs."""
    h = torch.baddbmm(s.body.bias, s.embed(ids), s.body.weight.expand(len(ids), -1, -1))
    return s.head(h) if s.runs else h  # type: ignore[no-any-return]


@pytest.mark.parametrize("runs", [True, False])
def test_lookups_and_what_does_not_run_are_not_named(runs: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zbpipe.runtime.split")
    head, embed = nn.Linear(8, 11, bias=False), nn.Embedding(11, 8)
    head.weight = embed.weight
    model = bare(tied, embed=lambda: embed, body=linear(8, 8), head=lambda: head, runs=lambda: runs)(0)
    report = zbpipe.check_gradients(model, torch.randint(0, 11, (4, 5)))
    assert report.share == 1
    assert report.not_deferred == frozenset()
    assert {name for _, name in report.deferred} == ({"body.weight", "embed.weight"} if runs else {"body.weight"})
    assert not [each for each in caplog.messages if "in I:" in each]


def test_a_report_of_several_stages(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4 * TOKENS, WIDTH)
    report = zbpipe.check_gradients([nn.Linear(WIDTH, WIDTH), own(by_a_function)], x)
    assert report.shares == {0: 1, 1: pytest.approx(2 / 3)}
    assert report.share == pytest.approx(3 / 4)
    assert (
        "3 weight gradients waited for W, 1 did not; 75 % of the weight gradients' FLOPs are deferred to W; in I:"
        " 1.v of stage 1 25 % (the autograd Function Own, which is not declared); largest relative error"
    ) in str(report)


def test_compiled_regions(one_rank: None) -> None:
    """They also defer a product of an autograd Function."""
    reports = []
    for compiled in (False, True):
        torch.compiler.reset()
        layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), Own(by_a_function)
        for layer in layers if compiled else ():
            layer.compile(backend="aot_eager")
        reports.append(check_steps(nn.Sequential(*layers), 3 * TOKENS, WIDTH, microbatches=3))
    torch.compiler.reset()
    eager, in_regions = reports
    assert eager.flops[0] == pytest.approx(in_regions.flops[0])
    assert eager.shares[0] == pytest.approx(5 / 6)
    assert in_regions.shares[0] == 1


def test_fully_sharded_weights_have_names(one_rank: None) -> None:
    report = check_steps(shard(own(by_a_function)), 2 * TOKENS, WIDTH)
    assert report.shares[0] == pytest.approx(2 / 3)
    assert [each.parameter for _, each in report.in_i] == ["1.v"]
    assert report.not_deferred == {(0, "1.v")}
