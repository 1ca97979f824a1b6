"""What waits between I and W, in bytes: every tensor once, no copies, and nothing beside."""

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Experts
from split_backward import MiddleStage, Mode, Size
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from zoo.case import linear, stage

from zbpipe.costs.transformer import Block, Checkpointing
from zbpipe.runtime.split.deferring_layers import defer_weights
from zbpipe.runtime.split.products import LINEAR, PendingGradient
from zbpipe.runtime.split.stage import find_pending, split_backward
from zbpipe.runtime.split.weight_gradients import WeightGradients, copy_if_shared

WIDTH, TOKENS = 8, 4
SIZE = Size(dim=64, seq=32, batch=2, head_dim=16)
BLOCK = Block(dim=64, queries=64, keys_and_values=2 * SIZE.kv_heads * 16, hidden=224, fused_qkv=False)
DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
"""Of the parameters, and of autocast."""


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[None]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def bytes_of(pending: Sequence[PendingGradient]) -> int:
    """Of all memory that x, dY and extra arguments of products lie in."""
    tensors = [tensor for gradient in pending for tensor in gradient.tensors]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def bytes_left(run: Callable[[], None]) -> int:
    """What `run` allocates and does not free, also in compiled code."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    return sum(event.self_cpu_memory_usage for event in profile.events())


class Llama(MiddleStage):
    """Blocks with the split, in one of `DTYPES`, eager or compiled one by one."""

    def __init__(self, checkpointing: Checkpointing, dtypes: str, backend: str) -> None:
        super().__init__(SIZE, Mode("eager", checkpointing.value), "unsplit", torch.device("cpu"))
        dtype, self.autocast = DTYPES[dtypes]
        self.stage.submod.to(dtype)
        self.x, self.dy = self.x.to(dtype), self.dy.to(dtype)
        if backend != "eager":
            for block in self.blocks:
                block.compile(backend=backend, fullgraph=True)
        split_backward([self.stage], "deferred")
        for _ in range(3):  # shapes are learned, regions compiled, and gradients there
            self.f_and_i()
            self.run("W")

    def f(self) -> None:
        with autocast(self.autocast):
            self.receive("F")
            self.run("F")
        self.send("F")

    def f_and_i(self) -> None:
        self.f()
        self.receive("I")
        self.run("I")
        self.send("I")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("checkpointing", "dtypes", "backend"),
    [
        *(product(Checkpointing, DTYPES, ["eager"])),
        (Checkpointing.SELECTIVE, "autocast", "aot_eager"),
        *(
            pytest.param(*each, "aot_eager", marks=pytest.mark.long)
            for each in product(Checkpointing, DTYPES)
            if each != (Checkpointing.SELECTIVE, "autocast")
        ),
        # Each takes ten seconds to compile: each kind of checkpointing and each dtype once.
        *(pytest.param(*each, "inductor", marks=pytest.mark.long) for each in zip(Checkpointing, DTYPES, strict=True)),
    ],
)
def test_a_block_leaves_what_the_arithmetic_says(checkpointing: Checkpointing, dtypes: str, backend: str) -> None:
    """x of q, k and v is one, that of gate and up is another, and nothing else is alive after I. Under autocast, eager
    layers cast x for each."""
    torch.compiler.reset()
    stage = Llama(checkpointing, dtypes, backend)
    left = bytes_left(stage.f_and_i)
    size = 4 if dtypes == "float32" else 2
    more = 3 * SIZE.dim if (dtypes, backend) == ("autocast", "eager") else 0
    expected = size * (BLOCK.kept_by_i() + more) * SIZE.seq * SIZE.batch * SIZE.blocks
    assert (bytes_of(find_pending(stage.stage, 0)), left) == (expected, expected)
    if backend == "eager":
        assert bytes_left(lambda: stage.run("W")) == -expected


def layers(use: Callable[[Any, Tensor], Tensor]) -> Any:
    return stage(use, a=linear(WIDTH, WIDTH, bias=False), of_tokens=linear(TOKENS, TOKENS))(0)


def waiting(module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> list[PendingGradient]:
    """What I leaves to W; the gradients after W are those of plain layers."""
    plain, gradients = copy.deepcopy(module), WeightGradients()
    defer_weights(module, gradients)
    with autocast(dtype):
        expected, found = plain(x), module(x)
    dy = torch.randn_like(found)
    expected.backward(dy)
    with gradients.record() as pending:
        found.backward(dy)
    del found, dy
    copy_if_shared(pending)
    for each in pending:
        each.accumulate()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **(TOLERANCE if dtype is None else ROUNDED))
    return pending


@pytest.mark.parametrize("is_held", [False, True])
def test_one_tensor_of_two_gradients_is_one_holder(is_held: bool) -> None:
    x, layer = torch.randn(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
    held = x.detach() if is_held else None
    pending = [PendingGradient(layer, LINEAR, layer.weight, x, torch.randn(TOKENS, WIDTH)) for _ in range(2)]
    copy_if_shared(pending)
    assert pending[0].x is pending[1].x
    assert (pending[0].x is x) == (held is None)


TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
ROUNDED: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}
X = 4 * TOKENS * WIDTH
"""Bytes of a tensor in float32."""


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda s, x: s.b(torch.tanh(x)[:, -1:]), 2 * X // TOKENS),
        (lambda s, x: s.b(torch.tanh(x)[:, -1]), 2 * X // TOKENS),
        (lambda s, x: s.b(torch.tanh(x)[..., : WIDTH // 2].repeat(1, 1, 2)[:, 2:]), X),
        (lambda s, x: s.b(torch.tanh(x)[:, 1:]), X + X * (TOKENS - 1) // TOKENS),
        (lambda s, x: torch.cat([s.b(part) for part in torch.tanh(x).split(1, 1)], 1), 2 * X),
    ],
    ids=["last token", "without its dimension", "half", "most", "chunks"],
)
def test_a_small_part_of_a_large_tensor_waits_alone(use: Any, expected: int) -> None:
    """Where the rest is as large at least; chunks are a whole together."""
    assert bytes_of(waiting(layers(use), torch.randn(1, TOKENS, WIDTH))) == expected


def test_a_transposed_tensor_waits_once() -> None:
    """x and dY of one layer are those of the other, transposed; W copies them when it multiplies them."""

    def use(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return s.b(h) + s.of_tokens(h.mT).mT  # type: ignore[no-any-return]

    assert bytes_of(waiting(layers(use), torch.randn(2, TOKENS, WIDTH))) == 2 * 2 * X


def test_autocast_to_a_wider_dtype_keeps_x_as_it_is() -> None:
    """As routers of mixtures of experts do it on GPUs; `torch.autocast` refuses it on the CPU."""

    def use(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        y = s.a(h)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float32)
        try:
            return y + torch.tanh(s.b(h))  # type: ignore[no-any-return]
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_dtype("cpu", torch.bfloat16)
            torch.clear_autocast_cache()

    pending = waiting(layers(use).bfloat16(), torch.randn(1, TOKENS, WIDTH).bfloat16(), torch.bfloat16)
    assert bytes_of(pending) == X // 2 + X // 2 + X
    assert {gradient.x.dtype for gradient in pending} == {torch.bfloat16}


def test_a_checkpoint_that_saves_casts_finds_its_own() -> None:
    """The x of the first layer is cast before the checkpoint begins, which repeats only what it has itself."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten._to_copy.default])

    def use(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return torch.tanh(s.a(h)) + checkpoint(s.b, h, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    assert len(waiting(layers(use), torch.randn(1, TOKENS, WIDTH), torch.bfloat16)) == 2


def test_a_gradient_of_a_gradient_under_autocast() -> None:
    module = layers(lambda s, x: torch.tanh(s.a(x)) * s.b(x))
    plain = copy.deepcopy(module)
    defer_weights(module, WeightGradients())
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    for each in (plain, module):
        with autocast(torch.bfloat16):
            y = each(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert module.a.weight.grad is not None
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **ROUNDED)


def test_experts_leave_one_x_for_gate_and_up() -> None:
    rows, dim, hidden = 32, 16, 48
    module, gradients = Experts(2, dim, hidden).bfloat16(), WeightGradients()
    defer_weights(module, gradients)
    x, ends = torch.randn(rows, dim, dtype=torch.bfloat16), torch.tensor([8, rows], dtype=torch.int32)
    found: list[list[PendingGradient]] = []

    def f_and_i() -> None:
        y = module(torch.tanh(x), ends)
        with gradients.record() as pending:
            y.backward(torch.ones_like(y))
        found.append(pending)

    left = bytes_left(f_and_i)
    expected = 2 * rows * (2 * dim + 3 * hidden)
    assert (bytes_of(found[0]), left) == (expected + ends.nbytes, expected)


def test_what_the_last_stage_received_waits_as_it_is(one_rank: None) -> None:
    """Its loss lives until the end of the step; the loss's graph would keep x, too, and x would be copied."""
    modules = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    stages = [PipelineStage(module, index, 2, torch.device("cpu")) for index, module in enumerate(modules)]
    x = torch.randn(1, TOKENS, WIDTH)
    ScheduleInterleaved1F1B([*stages], n_microbatches=1, loss_fn=F.mse_loss).step(x, target=x)
    _, last = stages
    split_backward([last], "deferred")
    losses = []
    for _ in range(2):  # the first I leaves nothing to W
        received = x.clone()
        place = received.data_ptr()
        last.set_local_fwd_input(received, 0)
        del received
        losses.append(last.forward_one_chunk(0, ()).square().sum())
        last.backward_one_chunk(0, losses[-1], full_backward=False)
        pending = list(find_pending(last, 0))
        last.backward_weight_one_chunk(0)
        last.clear_runtime_states()
    assert [gradient.x.data_ptr() for gradient in pending] == [place]
