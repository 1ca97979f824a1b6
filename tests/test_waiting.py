"""What waits for W stays as it is, whoever else holds it; and what no W should add is not added."""

from __future__ import annotations

import copy
import ctypes
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import Op, OpKind, Placement, Schedule, registry
from zbpipe.runtime import _torch
from zbpipe.runtime.split import contents, ownership, products, stage
from zbpipe.runtime.split.layers import defer_weights, deferral_of
from zbpipe.runtime.split.products import PendingGradient, WeightGradients

WIDTH, TOKENS, MICROBATCHES = 8, 3, 3
# Two orders of the same float64 sums.
TOLERANCE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def weights_last(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a table for one rank with one stage, in which every W waits for all I."""
    monkeypatch.setattr(registry, "_registered", dict(registry.schedules()))

    @zbpipe.register("WeightsLast", placement="loop", stages_per_rank=1, listed=False)
    def weights_last(ranks: int, microbatches: int) -> Schedule:
        pairs = [Op(0, kind, m) for m in range(microbatches) for kind in (OpKind.F, OpKind.I)]
        row = (*pairs, *(Op(0, OpKind.W, m) for m in range(microbatches)))
        return Schedule("WeightsLast", Placement.loop(ranks), microbatches, (row,))

    return "WeightsLast"


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def batch() -> tuple[Tensor, Tensor]:
    """One sample a microbatch."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(MICROBATCHES, TOKENS, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def pipeline(module: nn.Module, name: str) -> Any:
    stages = [PipelineStage(module, 0, 1, torch.device("cpu"))]
    return zbpipe.build_pipeline_schedule(name, stages, MICROBATCHES, loss_fn, scale_grads=False)


def plain_gradients(module: nn.Module) -> list[Tensor | None]:
    plain = copy.deepcopy(module)
    x, target = batch()
    for each, of_it in zip(x.split(1), target.split(1), strict=True):
        loss_fn(plain(each), of_it).backward()
    return [parameter.grad for parameter in plain.parameters()]


def step(schedule: Any, module: nn.Module) -> list[Tensor | None]:
    module.zero_grad()
    x, target = batch()
    schedule.step(x, target=target)
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_like_plain(module: nn.Module, name: str, steps: int = 2) -> Any:
    expected = plain_gradients(module)
    schedule = pipeline(module, name)
    for _ in range(steps):
        for found, plain in zip(step(schedule, module), expected, strict=True):
            assert (found is None) == (plain is None)
            if plain is not None:
                assert plain.any()
                torch.testing.assert_close(found, plain, **TOLERANCE)
    return schedule


class Learned(nn.Module):
    """Positions are added through a view, so their gradient is a view of dY of the layer before."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pos = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) + self.view(self.pos)))


@pytest.mark.parametrize(
    "view",
    [lambda pos: pos.unsqueeze(0), lambda pos: pos[None], lambda pos: pos.view(1, TOKENS, WIDTH), lambda pos: pos],
    ids=["unsqueeze", "None", "view", "itself"],
)
def test_a_gradient_that_is_a_view_of_dy(one_rank: None, weights_last: str, view: Any) -> None:
    assert_like_plain(Learned(view), weights_last)


def test_nothing_is_copied_that_nobody_else_holds(
    one_rank: None, weights_last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_if_shared, copied = ownership.copy_if_shared, []

    def count(pending: list[PendingGradient]) -> None:
        before = [tensor.data_ptr() for gradient in pending for tensor in (gradient.x, gradient.dy)]
        copy_if_shared(pending)
        after = [tensor.data_ptr() for gradient in pending for tensor in (gradient.x, gradient.dy)]
        copied.append(sum(one != other for one, other in zip(before, after, strict=True)))

    monkeypatch.setattr(stage, "copy_if_shared", count)
    positions = pipeline(Learned(lambda pos: pos.unsqueeze(0)), weights_last)
    for _ in range(2):
        step(positions, positions._stages[0].submod)
    # The input of the whole stage is the caller's, too. The gradient of the positions is dY of one microbatch: the
    # first of a step, which in the very first step leaves nothing for W.
    assert copied == [0, 1, 1, 2, 1, 1]
    copied.clear()
    without = pipeline(Learned(torch.zeros_like), weights_last)
    for _ in range(2):
        step(without, without._stages[0].submod)
    assert copied == [0, 1, 1, 1, 1, 1]


class Scaled(torch.autograd.Function):
    """A backward that writes into the gradient it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.mul_(2)


class Fork(nn.Module):
    """`early` gets dY first, then a branch writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        late = Scaled.apply(self.late(x))
        return late + self.early(x)


@pytest.mark.parametrize("name", ["ZBH1", "WeightsLast"])
def test_a_backward_that_overwrites_dy_during_i(
    one_rank: None, weights_last: str, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The first I tells, and from then on that layer computes in I."""
    module = Fork()
    with caplog.at_level(logging.WARNING, "zbpipe"):
        schedule = assert_like_plain(module, name)
    assert deferral_of(module.early).stays_in_i
    assert not deferral_of(module.late).stays_in_i
    told = "stage 0: something changes the gradient of the output (dY) of layer early (Linear) in place during I"
    assert told in caplog.text
    assert schedule._stages[0]._deferred == {}


def test_what_changes_only_later_is_an_error_that_names_the_layer(one_rank: None, weights_last: str) -> None:
    module = Fork()
    schedule = pipeline(module, weights_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scaled, "backward", staticmethod(lambda ctx, dy: 2 * dy))
        step(schedule, module)
    message = (
        r"stage 0, microbatch 0: the gradient of the output \(dY\) of layer early \(Linear\) was changed in place"
        r".*weight_products = \{\}"
    )
    with pytest.raises(zbpipe.PipelineError, match=message):
        step(schedule, module)


class Escapes(torch.autograd.Function):
    """A backward that writes into the gradient it gets, past the version counter, as kernels in Triton or C++ do."""

    writes = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        result = 2 * dy
        if Escapes.writes:
            dy.data.copy_(result)
        return result


class EscapingFork(Fork):
    def forward(self, x: Tensor) -> Tensor:
        late: Tensor = Escapes.apply(self.late(x))
        return late + self.early(x)


@pytest.fixture
def escaping(monkeypatch: pytest.MonkeyPatch) -> Fork:
    monkeypatch.setattr(Escapes, "writes", True)
    return EscapingFork()


def test_what_versions_do_not_show_is_seen_in_the_first_i(
    one_rank: None, weights_last: str, caplog: pytest.LogCaptureFixture, escaping: Fork
) -> None:
    with caplog.at_level(logging.WARNING, "zbpipe"):
        assert_like_plain(escaping, weights_last)
    assert deferral_of(escaping.early).stays_in_i
    assert "something changes the gradient of the output (dY) of layer early (Linear) in place" in caplog.text


@pytest.mark.parametrize("first", [1, MICROBATCHES], ids=["second microbatch", "second step"])
def test_what_versions_do_not_show_later_is_an_error(
    one_rank: None, weights_last: str, escaping: Fork, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """As a scaling that waits for the gradients of earlier microbatches, or steps."""
    schedule = pipeline(escaping, weights_last)
    given = Escapes.backward

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        Escapes.writes = schedule._stages[0]._num_split >= first
        return given(ctx, dy)

    monkeypatch.setattr(Escapes, "backward", staticmethod(backward))
    message = rf"microbatch {first % MICROBATCHES}: the gradient of the output \(dY\) of layer early .*weight_products"
    for _ in range(first // MICROBATCHES):
        step(schedule, escaping)
    with pytest.raises(zbpipe.PipelineError, match=message):
        step(schedule, escaping)


def test_memory_that_is_written_by_its_address_between_i_and_w(
    one_rank: None, weights_last: str, escaping: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing holds it, so nothing is copied; in the first microbatches W compares."""
    places: list[int] = []
    schedule = pipeline(escaping, weights_last)

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        if places:
            ctypes.memset(places[-1], 0, dy.nbytes)
        if schedule._stages[0]._num_split > 0:
            places.append(dy.data_ptr())
        return 2 * dy

    monkeypatch.setattr(Escapes, "backward", staticmethod(backward))
    with pytest.raises(
        zbpipe.PipelineError, match=r"dY\) of layer early \(Linear\) was changed in place between I and W"
    ):
        step(schedule, escaping)


def test_contents_are_compared_in_the_first_two_steps_alone(
    one_rank: None, weights_last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    fingerprint = contents.fingerprints
    monkeypatch.setattr(products, "fingerprints", lambda tensors: [taken.append(len(tensors)), fingerprint(tensors)][1])
    module = Learned(torch.zeros_like)
    schedule = pipeline(module, weights_last)
    counts = []
    for _ in range(4):
        taken.clear()
        step(schedule, module)
        counts.append(len(taken))
    assert counts == [2 * MICROBATCHES, 2 * MICROBATCHES, 0, 0]


def test_fingerprints() -> None:
    """They tell any change of content, in any dtype and layout, and nothing else."""
    x = torch.randn(6, 8)
    kinds = [x, x.bfloat16(), x.half(), x.double(), x.to(torch.complex64), x.to(torch.complex128), x[0], x[0, 0]]
    kinds += [x.T, x[:, ::2], x[:1].expand(4, 8), x.long(), x.int(), x > 0, x.to(torch.float8_e4m3fn), x.conj()]
    changes: list[Callable[[Tensor], Tensor]] = [lambda x: -x, lambda x: 2 * x, torch.zeros_like, lambda x: x.flip(-1)]
    for each in kinds:
        known = _torch.fingerprint(each)
        assert known == _torch.fingerprint(each.clone())
        for change in changes:
            try:
                changed = change(each)
            except (RuntimeError, NotImplementedError):  # of bool, of float8
                continue
            same = _torch.same_content(each.contiguous(), changed.contiguous())
            assert (known == _torch.fingerprint(changed)) == same, (each.dtype, each.shape)
    assert _torch.fingerprint(torch.empty(0, 3)) == 0
    nan = torch.full((3,), torch.nan)
    assert _torch.fingerprint(nan) == _torch.fingerprint(nan.clone())


class Keeps(torch.autograd.Function):
    """A backward that gives its gradient on and clears it at its next call, as one that has a buffer for it does."""

    kept: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        if Keeps.kept is not None:
            Keeps.kept.zero_()
        Keeps.kept = dy
        return dy


@pytest.mark.parametrize("part", [slice(None), slice(0, 2)])
def test_a_backward_that_keeps_dy(one_rank: None, weights_last: str, part: slice) -> None:
    """All of dY, or memory of which dY is a part."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x[:, part])
            return self.b(x) + Keeps.apply(F.pad(y, (0, 0, 0, TOKENS - y.shape[1])) if part.stop else y)

    Keeps.kept = None
    assert_like_plain(Kept(), weights_last)


def test_a_layer_can_be_kept_in_i(one_rank: None, weights_last: str) -> None:
    """Before it is prepared and afterwards."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    assert num_waiting(assert_like_plain(module, weights_last), module) == [2] * MICROBATCHES
    module[0].weight_products = {}  # type: ignore[assignment]
    assert num_waiting(assert_like_plain(module, weights_last), module) == [1] * MICROBATCHES
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    module[0].weight_products = {}  # type: ignore[assignment]
    assert num_waiting(assert_like_plain(module, weights_last), module) == [1] * MICROBATCHES


def num_waiting(schedule: Any, module: nn.Module) -> list[int]:
    """For each microbatch of one more step, how many products are left to W."""
    stage = schedule._stages[0]
    weight, counts = stage.backward_weight_one_chunk, []

    def count(chunk: int, *args: Any, **kwargs: Any) -> None:
        counts.append(len(stage._deferred[chunk]))
        weight(chunk, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "backward_weight_one_chunk", count)
        step(schedule, module)
    return counts


class Workspace(nn.Module):
    """The input of its layer lies in a buffer that each microbatch writes anew, before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("space", torch.zeros(1, TOKENS, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.space.copy_(torch.tanh(x))
        return self.a(x) + self.b(self.space)


def test_a_buffer_as_workspace(one_rank: None, weights_last: str) -> None:
    assert_like_plain(Workspace(), weights_last)


class Inner(torch.autograd.Function):
    """Its backward asks autograd for gradients of its own: of the input alone, or of the weight as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight = layer, weight
        return torch.tanh(layer(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            y = torch.tanh(ctx.layer(inner))
        if ctx.weight is None:
            return *torch.autograd.grad(y, inner, dy), None, None
        return *torch.autograd.grad(y, (inner, ctx.weight), dy), None  # type: ignore[return-value]


class Asks(nn.Module):
    def __init__(self, for_weight: bool) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.for_weight = for_weight

    def forward(self, x: Tensor) -> Tensor:
        return Inner.apply(self.before(x), self.inner.weight if self.for_weight else None, self.inner)  # type: ignore[no-any-return]


@pytest.mark.parametrize("for_weight", [False, True])
def test_gradients_that_a_backward_asks_for_itself(one_rank: None, weights_last: str, for_weight: bool) -> None:
    assert_like_plain(Asks(for_weight), weights_last)


def test_hooks_on_the_node_that_adds_to_grad(one_rank: None, weights_last: str) -> None:
    """They run once a microbatch, after the gradient was added, and may come and go between two steps."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    schedule = assert_like_plain(module, weights_last)
    weight: Any = module[0].weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    seen: list[float] = []
    handle = node.register_hook(lambda *gradients: seen.append(weight.grad.norm().item()))  # type: ignore[union-attr]
    step(schedule, module)
    assert len(seen) == MICROBATCHES
    assert seen[-1] == pytest.approx(weight.grad.norm().item())  # type: ignore[union-attr]
    handle.remove()
    seen.clear()
    step(schedule, module)
    assert seen == []
    before = node.register_prehook(lambda gradients: seen.append(gradients[0].norm().item()))
    step(schedule, module)
    before.remove()
    assert len(seen) == MICROBATCHES


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.inside(torch.complex(x, x.roll(1, -1)))).flatten(-2)[..., :WIDTH]


def test_complex_weights(one_rank: None, weights_last: str) -> None:
    assert_like_plain(nn.Sequential(nn.Linear(WIDTH, WIDTH), ComplexLinear()), weights_last)


class Tied(nn.Module):
    """A token embedding as the first stage and the head with the same weight as the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16, bias=False))
        self.last[1].weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("name", ["ZBV", "VHalf", "LoopedBFS"])
def test_a_gradient_of_two_stages_is_divided_once(one_rank: None, name: str) -> None:
    model = Tied()
    tokens = torch.randint(16, (MICROBATCHES, TOKENS))
    plain = copy.deepcopy(model)
    for each in tokens.split(1):
        (F.cross_entropy(plain(each)[0], each[0]) / MICROBATCHES).backward()
    stages = [PipelineStage(m, i, 2, torch.device("cpu")) for i, m in enumerate((model.first, model.last))]

    def build() -> Any:
        return zbpipe.build_pipeline_schedule(name, stages, MICROBATCHES, lambda y, t: F.cross_entropy(y[0], t[0]))

    if name == "LoopedBFS":  # torch's own class
        with pytest.raises(ValueError, match=r"stages 0 and 1 share 1\.weight.*scale_grads=False"):
            build()
        return
    build().step(tokens, target=tokens)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **TOLERANCE)


def prepared(layer: nn.Linear) -> nn.Linear:
    defer_weights(layer, WeightGradients())
    return layer


def test_a_prepared_layer_in_a_pickle_is_a_plain_one() -> None:
    layer = prepared(nn.Linear(WIDTH, 2))
    data = pickle.dumps(nn.Sequential(layer))
    assert b"zbpipe" not in data
    loaded = pickle.loads(data)
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(loaded(x), layer(x))
    loaded(x).sum().backward()
    store = WeightGradients()
    defer_weights(loaded, store)  # once more
    with store.record() as pending:
        loaded(x).sum().backward()
    assert len(pending) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_prepared_layer_can_be_traced() -> None:
    layer = prepared(nn.Linear(WIDTH, 2))
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(torch.jit.trace(layer, x)(x), layer(x))


def test_transforms_of_torch_func_and_forward_mode() -> None:
    layer = prepared(nn.Linear(WIDTH, 2))
    x = torch.randn(3, WIDTH, requires_grad=True)
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x))
    torch.testing.assert_close(torch.func.grad(lambda each: layer(each).sum())(x[0]), layer.weight.sum(0))
    _, tangent = torch.func.jvp(layer, (x,), (x,))  # type: ignore[misc]
    torch.testing.assert_close(tangent, x @ layer.weight.t())
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x, x))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, x @ layer.weight.t())


@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.Linear(WIDTH, 0), torch.randn(3, WIDTH)),
        lambda: (nn.Linear(WIDTH, 2), torch.randn(0, WIDTH)),
        lambda: (nn.Linear(WIDTH, 2, bias=False), torch.eye(WIDTH).to_sparse()),
        lambda: (nn.Linear(WIDTH, 2), torch.nested.nested_tensor([torch.randn(2, WIDTH), torch.randn(3, WIDTH)])),
    ],
    ids=["no outputs", "no rows", "sparse", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_inputs_out_of_the_ordinary(make: Any) -> None:
    layer, x = make()
    plain = copy.deepcopy(layer)
    store = WeightGradients()
    defer_weights(layer, store)

    def total(y: Tensor) -> Tensor:
        return torch.cat([each.flatten() for each in y.unbind()]).square().sum() if y.is_nested else y.square().sum()

    with store.record() as pending:
        total(layer(x)).backward()
    for gradient in pending:
        gradient.accumulate()
    total(plain(x)).backward()
    for found, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **TOLERANCE)


def test_autocast_leaves_float64_alone() -> None:
    layer = prepared(nn.Linear(WIDTH, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, WIDTH)).dtype == torch.float64
