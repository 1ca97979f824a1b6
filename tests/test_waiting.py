"""What waits for W stays as it is, whoever else holds it; and what no W should add is not added."""

import copy
import ctypes
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compared import Compared
from pipelines import on_one_rank
from torch import Tensor, nn
from zoo import BY_NAME
from zoo.case import Case, bare, function, linear, parameter, stage
from zoo.runner import Setting, compare

import zbpipe
from zbpipe import Schedule
from zbpipe.runtime._torch import tensor_data
from zbpipe.runtime.split import stage as split_stage
from zbpipe.runtime.split import weight_gradients
from zbpipe.runtime.split.deferring_layers import defer_weights, deferral_of
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.stage import find_pending
from zbpipe.runtime.split.weight_gradients import WeightGradients
from zbpipe.runtime.verify.gradient_check import schedule_w_last

WIDTH, TOKENS, MICROBATCHES = 8, 3, 3
# Two orders of the same float64 sums.
TOLERANCE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


WEIGHTS_LAST = schedule_w_last(1, MICROBATCHES, ["FI", "W"])
"""For one rank with one stage: every W waits for all I."""

QUICK = (
    *("a node hook", "a node pre-hook", "memory of NumPy's", "refuses what it is asked for"),
    *("a backward that keeps a part of its gradient", "a workspace", "complex inside", "a hook on the weight"),
    *("recomputed by autograd.grad", "recomputed for inputs", "torch.jit.trace", "a copy for an average"),
    *("vmap", "func.grad", "jvp", "forward-mode AD", "forces", "no output features", "no tokens", "sparse x"),
    *("nested, strided", "autocast to bfloat16", "a backward outside", "x without grad"),
    *("a hook that counts", "gradients over two steps, two schedules", "gradients over two steps, shared weights"),
)
"""The models of the zoo that the quick tests train, too."""


@pytest.mark.usefixtures("tables", "one_rank")
@pytest.mark.parametrize("case", [BY_NAME[name] for name in QUICK], ids=QUICK)
def test_like_plain_autograd(case: Case) -> None:
    compare(case, Setting("WeightsLast"))


def batch() -> tuple[Tensor, Tensor]:
    """One sample a microbatch."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(MICROBATCHES, TOKENS, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def pipeline(module: nn.Module, name: str | Schedule = WEIGHTS_LAST) -> Any:
    return on_one_rank([module], MICROBATCHES, name, F.mse_loss, scale_grads=False)


def plain_gradients(module: nn.Module) -> list[Tensor | None]:
    plain = copy.deepcopy(module)
    x, target = batch()
    for each, of_it in zip(x.split(1), target.split(1), strict=True):
        F.mse_loss(plain(each), of_it).backward()
    return [parameter.grad for parameter in plain.parameters()]


def step(schedule: Any, module: nn.Module) -> list[Tensor | None]:
    module.zero_grad()
    x, target = batch()
    schedule.step(x, target=target)
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_like_plain(module: nn.Module, name: str | Schedule = WEIGHTS_LAST) -> Any:
    expected = plain_gradients(module)
    schedule = pipeline(module, name)
    for _ in range(2):
        for found, plain in zip(step(schedule, module), expected, strict=True):
            assert (found is None) == (plain is None)
            if plain is not None:
                assert plain.any()
                torch.testing.assert_close(found, plain, **TOLERANCE)
    return schedule


def learned(view: Callable[[Tensor], Tensor] = torch.zeros_like) -> nn.Module:
    """Positions are added through a view, so their gradient is a view of dY of the layer before."""
    return stage(lambda s, x: s.b(torch.tanh(s.a(x) + view(s.pos))), pos=parameter(TOKENS, WIDTH))(0)


def test_nothing_is_copied_that_nobody_else_holds(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_if_shared, copied = weight_gradients.copy_if_shared, []

    def count(pending: list[PendingGradient]) -> None:
        before = [tensor.data_ptr() for gradient in pending for tensor in (gradient.x, gradient.dy)]
        copy_if_shared(pending)
        after = [tensor.data_ptr() for gradient in pending for tensor in (gradient.x, gradient.dy)]
        copied.append(sum(one != other for one, other in zip(before, after, strict=True)))

    monkeypatch.setattr(split_stage, "copy_if_shared", count)
    positions = pipeline(learned(lambda pos: pos.unsqueeze(0)))
    for _ in range(2):
        step(positions, positions._stages[0].submod)
    # The input of the whole stage is the caller's, too. The gradient of the positions is dY of one microbatch: the
    # first of a step, which in the very first step leaves nothing for W.
    assert copied == [0, 1, 1, 2, 1, 1]
    copied.clear()
    without = pipeline(learned())
    for _ in range(2):
        step(without, without._stages[0].submod)
    assert copied == [0, 1, 1, 1, 1, 1]


Back = Callable[[Tensor], Tensor]
Branch = function(lambda ctx, dy: (ctx.given[0].back(dy), None))


def overwrite(dy: Tensor) -> Tensor:
    return dy.mul_(2)


def escape(dy: Tensor) -> Tensor:
    """Writes past the version counter, as kernels in Triton or C++ do."""
    result = 2 * dy
    dy.data.copy_(result)
    return result


def fork(back: Back) -> Any:
    """`early` gets dY first, then the backward of a branch, `back`, does something with it."""
    layers = dict.fromkeys(("early", "late"), linear(WIDTH, WIDTH))
    return bare(lambda s, x: Branch.apply(s.late(x), s) + s.early(x), back=lambda: back, **layers)(0)


@pytest.mark.parametrize("back", [overwrite, escape])
@pytest.mark.parametrize("schedule", ["ZBH1", WEIGHTS_LAST], ids=["ZBH1", "W last"])
def test_a_backward_that_overwrites_dy_during_i(
    one_rank: None, caplog: pytest.LogCaptureFixture, back: Back, schedule: Any
) -> None:
    """The first I sees it, and from then on that layer computes in I."""
    module = fork(back)
    with caplog.at_level(logging.WARNING, "zbpipe"):
        runtime = assert_like_plain(module, schedule)
    assert deferral_of(module.early).stays_in_i
    assert not deferral_of(module.late).stays_in_i
    told = "stage 0: something changes the gradient of the output (dY) of layer early (Linear) in place during I"
    assert told in caplog.text
    assert not find_pending(runtime._stages[0], 0)


@pytest.mark.parametrize("first", [1, MICROBATCHES], ids=["second microbatch", "second step"])
def test_what_versions_do_not_show_later_is_an_error(one_rank: None, first: int) -> None:
    """As a scaling that waits for the gradients of earlier microbatches, or steps."""
    module = fork(lambda dy: escape(dy) if schedule.works[0].num_split >= first else 2 * dy)
    schedule = pipeline(module)
    message = rf"microbatch {first % MICROBATCHES}: the gradient of the output \(dY\) of layer early .*weight_products"
    for _ in range(first // MICROBATCHES):
        step(schedule, module)
    with pytest.raises(zbpipe.PipelineError, match=message):
        step(schedule, module)


def test_what_versions_show_is_an_error_in_any_step(one_rank: None) -> None:
    """Contents are compared in the first two steps alone."""
    module = fork(lambda dy: 2 * dy)
    schedule = pipeline(module)
    for _ in range(3):
        step(schedule, module)
    module.back = overwrite
    with pytest.raises(zbpipe.PipelineError, match=r"dY\) of layer early \(Linear\) was changed in place during I"):
        step(schedule, module)


def test_memory_that_is_written_by_its_address_between_i_and_w(one_rank: None) -> None:
    """Nothing holds it, so nothing is copied; in the first microbatches W compares."""
    places: list[int] = []

    def back(dy: Tensor) -> Tensor:
        if places:
            ctypes.memset(places[-1], 0, dy.nbytes)
        if schedule.works[0].num_split > 0:
            places.append(dy.data_ptr())
        return 2 * dy

    module = fork(back)
    schedule = pipeline(module)
    words = r"dY\) of layer early \(Linear\) was changed in place between I and W"
    with pytest.raises(zbpipe.PipelineError, match=words):
        step(schedule, module)


def test_a_layer_can_be_kept_in_i(one_rank: None) -> None:
    """Also one that a schedule has deferred before."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for share in (1, 0.5):
        work = split_stage.find_weight_work(assert_like_plain(module)._stages[0])
        assert work is not None
        assert work.share == share
        module[0].weight_products = {}  # type: ignore[assignment]


def test_fingerprints() -> None:
    """They tell any change of content, in any dtype and layout, and nothing else."""
    x, large = torch.randn(6, 8), torch.randn(3, 50, 40)
    kinds = [x, x.bfloat16(), x.half(), x.double(), x.to(torch.complex64), x.to(torch.complex128), x[0], x[0, 0]]
    kinds += [large, large.mT, large.half(), large.flatten()]
    kinds += [x.T, x[:, ::2], x[:1].expand(4, 8), x.long(), x.int(), x > 0, x.to(torch.float8_e4m3fn), x.conj()]
    changes: list[Callable[[Tensor], Tensor]] = [lambda x: -x, lambda x: 2 * x, torch.zeros_like, lambda x: x.flip(-1)]
    for each in kinds:
        known = tensor_data.fingerprint(each)
        assert known == tensor_data.fingerprint(each.clone())
        for change in changes:
            try:
                changed = change(each)
            except (RuntimeError, NotImplementedError):  # of bool, of float8
                continue
            same = torch.equal(*(tensor_data._bits(x.contiguous()) for x in (each, changed)))
            assert (known == tensor_data.fingerprint(changed)) == same, (each.dtype, each.shape)
    assert tensor_data.fingerprint(torch.empty(0, 3)) == 0
    nan = torch.full((3,), torch.nan)
    assert tensor_data.fingerprint(nan) == tensor_data.fingerprint(nan.clone())


def test_a_prepared_layer_in_a_pickle_is_a_plain_one() -> None:
    layer = nn.Linear(WIDTH, 2)
    defer_weights(layer, WeightGradients())
    data = pickle.dumps(layer)
    assert b"zbpipe" not in data
    both = Compared(pickle.loads(data))
    x = torch.randn(2, WIDTH)
    assert len(both.train(x)) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert both.module(x).dtype == torch.float64
