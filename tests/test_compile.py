"""The backward split inside of compiled regions: what leaves the graph, how often it compiles, and what is refused."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from compared import Compared
from models import (
    SEQUENCE,
    WIDTH,
    Block,
    Checkpointing,
    Experts,
    batch,
    build_stage,
    checkpointed,
    gradients,
    reference,
)
from pipelines import Pipeline, assert_like, on_one_rank, shard
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from zoo.case import bare

import zbpipe
from zbpipe.runtime.split.deferring_layers import defer_in_compiled_regions, defer_weights
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.stage import require_memory_that_lasts
from zbpipe.runtime.split.weight_gradients import find_changes

# The compiler changes the order of sums within a block (float32).
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
ROUGHLY = {"rtol": 0.1, "atol": 0.1}
HALF = 2**-6
"""bfloat16 rounds to 8 bits."""
SHAPE = (2, SEQUENCE, WIDTH)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class FeedForward(nn.Module):
    """Three plain linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def compile_blocks(stage: nn.Module, **how: Any) -> None:
    """One by one and without graph breaks, as TorchTitan does it."""
    for block in stage.children():
        if not isinstance(block, (nn.Embedding, nn.Linear)):
            block.compile(**{"backend": "aot_eager", "fullgraph": True, **how})


def blocks(make: Callable[[], nn.Module], number: int = 1, of_norm: float = 0.0, **how: Any) -> Compared:
    """Compiled blocks, beside plain ones."""
    stage = nn.Sequential(*(make() for _ in range(number)))
    compile_blocks(stage, **how)
    return Compared(stage, of_norm=of_norm, of_y=None if not of_norm else ROUGHLY, **TOLERANCE)


def count(both: Compared, **how: Any) -> list[int]:
    """The gradients that waited for W in each of three microbatches."""
    return [len(both.train(torch.randn(SHAPE), **how)) for _ in range(3)]


def test_x_and_dy_of_every_layer_leave_the_region() -> None:
    assert count(blocks(FeedForward, 3)) == [9] * 3
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_region_leaves_one_object_to_w() -> None:
    """A weight with a hook gets its gradient in I, and the others wait one by one."""
    both = blocks(FeedForward, 2)
    both.train(torch.randn(SHAPE))

    def run() -> list[PendingGradient]:
        with both.gradients.record() as pending:
            both.module(torch.randn(SHAPE)).sum().backward()
        return pending

    pending = run()
    assert [len(each.parts) for each in pending] == [3, 3]
    pending[1].parts[2].dy.add_(1)
    ((changed, words),) = find_changes(pending)
    assert changed is pending[1]
    assert words == "the gradient of the output (dY)"
    seen: list[Tensor] = []
    both.module.get_parameter("0.up.weight").register_hook(seen.append)
    assert [len(each.parts) for each in run()] == [3, 1, 1]
    assert len(seen) == 1


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_region_does_not_run_the_graph_of_the_same_block_without_a_split(fullgraph: bool) -> None:
    plain = FeedForward()
    plain.compile(backend="aot_eager", fullgraph=fullgraph)
    plain(torch.randn(SHAPE, requires_grad=True)).sum().backward()
    both = blocks(FeedForward, fullgraph=fullgraph)
    assert count(both) == [3] * 3


def test_b_runs_as_torch_compiles_it() -> None:
    """Its backward has six products, I's three: the others are W's."""
    ran: list[int] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        products = len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
        run = graph.forward
        return make_boxed_func(lambda *args: (ran.append(products), run(*args))[1])

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=compile_graph)
    both = blocks(FeedForward, backend=backend)
    both.train(torch.randn(SHAPE))
    assert ran == [3]
    both.module(torch.randn(SHAPE)).sum().backward()
    assert ran == [3, 6]


def test_a_checkpoint_that_begins_before_the_region() -> None:
    both = blocks(FeedForward)
    assert count(both, call=lambda module, x: checkpoint(module, x, use_reentrant=False)) == [3, 3, 3]
    assert counters["stats"]["unique_graphs"] == 1


class Looped(FeedForward):
    """The block as often as it is told."""

    def forward(self, x: Tensor, times: int = 1) -> Tensor:  # type: ignore[override]
        for _ in range(times):
            x = super().forward(x)
        return x


class Broken(FeedForward):
    """A graph break between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        torch._dynamo.graph_break()
        return x + self.down(h)


class Around(nn.Module):
    """A block within a block, maybe between graph breaks; maybe compiled as well as plain."""

    def __init__(self, inner: nn.Module, breaks: bool = False, beside: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)
        self.breaks, self.fast = breaks, optimized(inner) if beside else inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        h = self.inner(h) + self.fast(h.tanh())
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(h)  # type: ignore[no-any-return]


def optimized(module: nn.Module) -> Any:
    """As torchtitan 0.2 compiles a block."""
    return torch.compile(module, backend="aot_eager")


def compiled(module: nn.Module) -> Any:
    module.compile(backend="aot_eager")
    return module


def after_no_grad(module: nn.Module, x: Tensor, step: int) -> Tensor:
    with torch.no_grad():
        y = module(x)
    return module(x) + y  # type: ignore[no-any-return]


def by_function(module: Any, x: Tensor, step: int) -> Tensor:
    """Not the module is compiled but a function that calls its layers."""

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Any:
        return module.down(torch.tanh(module.up(x)))

    return run(x)


def trained(first: bool) -> Callable[[Any, Tensor, int], Tensor]:
    """Layer `up` trains in the first step, or in the later ones."""

    def run(module: Any, x: Tensor, step: int) -> Tensor:
        module.up.weight.requires_grad_(first == (step == 0))
        return module(x)  # type: ignore[no-any-return]

    return run


def by_itself(module: Any, x: Tensor, step: int) -> Tensor:
    return module(x)  # type: ignore[no-any-return]


Run = Callable[[Any, Tensor, int], Tensor]
AROUND: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    **{
        name: (make, by_itself)
        for name, make in {
            "optimized in optimized, with breaks": lambda: optimized(Around(optimized(Broken()), breaks=True)),
            "compiled in compiled": lambda: compiled(Around(compiled(Broken()))),
            "compiled beside itself": lambda: Around(FeedForward(), beside=True),
        }.items()
    },
    **{
        name: (lambda: compiled(FeedForward()), run)
        for name, run in {
            "twice": lambda module, x, step: module(module(x)),
            "and its layer": lambda module, x, step: module(x) + module.up(torch.tanh(x))[..., :WIDTH],
            "without a gradient first": after_no_grad,
            "frozen later": trained(True),
            "thawed later": trained(False),
        }.items()
    },
    "a compiled function": (FeedForward, by_function),
    "more often later": (lambda: compiled(Looped()), lambda module, x, step: module(x, 1 + step)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_a_region(name: str) -> None:
    make, run = AROUND[name]
    both = Compared(make(), **TOLERANCE)
    for step in range(3):
        both.train(torch.randn(SHAPE), call=lambda module, x, step=step: run(module, x, step), on_trial=not step)


EXPERTS = 4


def experts() -> nn.Module:
    return Experts(EXPERTS, WIDTH, 2 * WIDTH)


def mix(s: Any, x: Tensor) -> Tensor:
    """Every row goes to one expert; how many go to each comes out of the data."""
    flat = x.flatten(0, -2)
    scores, chosen = s.router(flat).softmax(-1).max(-1)
    order = torch.argsort(chosen, stable=True)
    count = (chosen.unsqueeze(-1) == torch.arange(EXPERTS)).sum(0)
    y = s.experts(flat[order], torch.cumsum(count, dim=0, dtype=torch.int32))
    return x + torch.zeros_like(flat).index_add(0, order, y * scores[order].unsqueeze(-1)).view_as(x)


mixture = bare(mix, router=lambda: nn.Linear(WIDTH, EXPERTS), experts=experts)


def run_two_blocks(build: Callable[[], nn.Module], checkpointing: Checkpointing = "none") -> list[int]:
    """Three microbatches through two compiled blocks, compared with plain ones; how many gradients waited in each."""
    return count(blocks(lambda: checkpointed(build(), checkpointing), 2, HALF))


class Sharded(Compared):
    def compare(self) -> None:
        self.module.unshard()  # type: ignore[operator]
        super().compare()


@pytest.mark.parametrize(
    ("build", "products"), [(lambda: compiled(mixture(0)), 4), (lambda: optimized(FeedForward()), 3)]
)
def test_fsdp_around_a_region(one_rank: None, build: Callable[[], Any], products: int) -> None:
    """The weights are there only when FSDP has gathered them, and are others than those that were learned from."""
    both = Sharded(build(), of_norm=HALF, of_y=ROUGHLY)
    block = shard(both.module)
    block.set_requires_gradient_sync(False)
    defer_weights(block, both.gradients)
    defer_in_compiled_regions(block, both.gradients)
    assert count(both) == [products] * 3


class PerHead(nn.Module):
    """A layer of the user's own, whose weight is used for something else, too, in all ways that Python knows."""

    weight_products: ClassVar[Any] = {torch.bmm: lambda dy, x: x.mT @ dy}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(2, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x, torch.permute(self.weight.permute(2, 1, 0).transpose(0, -1), (0, 2, 1)))
        decay = 2 * self.weight.square().sum() + (self.weight * 2 + self.weight[:1] @ self.weight[1:]).sum()
        return y + self.bias + decay / len(self.weight) + torch.stack([self.weight, -self.weight]).sum()


class Kept(nn.Linear):
    weight_products: ClassVar[Any] = {}


def linear(inputs: int = WIDTH, outputs: int = WIDTH, bias: bool = True) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(inputs, outputs, bias)


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) / 4)


def in_a_loop(s: Any, x: Tensor) -> Tensor:
    """Each expert multiplies with a part of the weights."""
    return sum((x * (x[..., :1] > n) @ s.w[n] for n in range(EXPERTS)), x)


def by_factors(s: Any, x: Tensor) -> Tensor:
    """The product of two factors is the weight, whose gradient is multiplied again."""
    return x + s.down(s.up(x)) + x @ (s.down.weight @ s.up.weight)  # type: ignore[no-any-return]


def concatenated(s: Any, x: Tensor) -> Tensor:
    """The gradients of three weights are parts of one product, and two of them the same part."""
    one, other = (torch.cat([s.a + s.c, s.b]) @ x.mT).chunk(2, 1)
    return x + (one * other).mT


def gated(s: Any, x: Tensor) -> Tensor:
    """The gradient of `gate` leads to that of `lin`, so I needs it."""
    h = s.lin(x.detach())  # else I needs it for dX, too
    return x + h @ (s.gate + torch.tanh(h).mean((0, 1)))  # type: ignore[no-any-return]


LAYERS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "of the user's own": (lambda _: PerHead(), 1),
    "and with the transpose": (bare(lambda s, x: s.a(x) @ s.a.weight, a=linear()), 1),
    "in a loop": (bare(in_a_loop, w=weight(EXPERTS, WIDTH, WIDTH)), 1),
    # Their backward computes dX, dW and db in one operation.
    "convolutions": (
        bare(
            lambda s, x: x + s.back(s.there(x).tanh()),
            there=lambda: nn.Conv1d(SEQUENCE, 6, 3, padding=1),
            back=lambda: nn.ConvTranspose1d(6, SEQUENCE, 3, padding=1),
        ),
        2,
    ),
    "factors": (bare(by_factors, up=linear(WIDTH, 2, False), down=linear(2)), 2),
    "concatenated": (bare(concatenated, **dict.fromkeys("abc", weight(WIDTH, WIDTH))), 3),
    "gated": (bare(gated, lin=linear(bias=False), gate=weight(WIDTH, WIDTH)), 1),
    "an empty declaration": (lambda _: nn.Sequential(Kept(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 1),
    "experts": (mixture, 4),
    # Its gradient depends on the weight.
    "a made weight": (bare(lambda s, x: F.linear(x, torch.tanh(s.a.weight), s.a.bias), a=linear()), 1),
}
"""Layers, and the number of their weights whose gradients wait."""


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        *product(list(LAYERS)[:-2], ["none"]),
        *product(list(LAYERS)[-2:], ["selective"]),
        *(pytest.param(*each, marks=pytest.mark.long) for each in product(list(LAYERS)[-2:], ["none", "full"])),
    ],
)
def test_every_kind_of_layer_leaves_its_products_to_w(kind: str, checkpointing: Checkpointing) -> None:
    build, number = LAYERS[kind]
    assert run_two_blocks(lambda: build(0), checkpointing) == [2 * number] * 3
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def rows_of_data(s: Any, x: Tensor) -> Tensor:
    """How many rows go through the product comes out of the data."""
    flat = x.flatten(0, -2)
    (chosen,) = torch.where(flat[:, 0] > 0)
    rows = flat[chosen]
    count = (torch.arange(rows.shape[0]).unsqueeze(-1) % EXPERTS == torch.arange(EXPERTS)).sum(0)
    y = s.experts(rows, torch.cumsum(count, dim=0, dtype=torch.int32))
    return x + torch.zeros_like(flat).index_add(0, chosen, y).view_as(x)


def test_a_number_of_rows_that_comes_out_of_the_data() -> None:
    """As with expert parallelism."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert run_two_blocks(lambda: bare(rows_of_data, experts=experts)(0)) == [6, 6, 6]


def test_weights_that_are_frozen_or_have_hooks_stay_in_the_region() -> None:
    block = FeedForward()
    block.up.weight.requires_grad_(False)
    seen: list[str] = []
    block.gate.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("gate"))
    both = blocks(lambda: block)
    for _ in range(2):
        assert [each.weight for each in both.train(torch.randn(SHAPE))] == [block.down.weight]
    assert seen == ["gate", "gate"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_other_shapes_and_no_gradients(dynamic: bool) -> None:
    both = blocks(FeedForward, dynamic=dynamic)
    for length in (SEQUENCE, 3, SEQUENCE, 3):
        x = torch.randn(2, length, WIDTH)
        assert len(both.train(x)) == 3
        with torch.no_grad():
            torch.testing.assert_close(both.module(x), both.plain(x), **TOLERANCE)


def test_autocast() -> None:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)  # type: ignore[no-any-return]

    both = blocks(FeedForward, of_norm=HALF)
    for _ in range(2):
        assert {each.x.dtype for each in both.train(torch.randn(SHAPE), call=call)} == {torch.bfloat16}
    assert {each.grad.dtype for each in both.module.parameters()} == {torch.float32}  # type: ignore[union-attr]


PIPELINES = [
    ("selective", "aot_eager"),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (("selective", "inductor"), ("full", "aot_eager"))),
]


@pytest.mark.parametrize(("checkpointing", "backend"), PIPELINES)
def test_a_pipeline_of_compiled_blocks(one_rank: None, checkpointing: Checkpointing, backend: str) -> None:
    pipe = Pipeline("ZBV", 4, lambda index, total: build_stage(index, total, checkpointing))
    for module in pipe.modules.values():
        compile_blocks(module, backend=backend)
    tokens, targets = batch(4)
    for name in ("ZBV", "ZBV", "DualPipeV", "DualPipeV"):  # in the last one most backwards are whole
        pipe.schedule.adopt(zbpipe.generate(name, 1, 4))
        pipe.zero_grad()
        assert_like([(pipe.run(tokens, target=targets), pipe.gradients())], reference(2, 4), **TOLERANCE)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_what_is_left_in_i_is_told_once(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    modules = [build_stage(0, 2), nn.Sequential(nn.Sequential(Kept(WIDTH, WIDTH)), build_stage(1, 2))]
    modules[1].get_submodule("0").compile(backend="aot_eager")
    schedule = on_one_rank(modules, 3)
    tokens, targets = batch(3)
    with caplog.at_level(logging.INFO, "zbpipe"):
        for _ in range(2):
            schedule.step(tokens, target=targets)
    told = [each for each in caplog.messages if "FLOPs to W; in I" in each]
    (line,) = told
    assert line.startswith("stage 1 defers 90.9 % of its weight gradients' FLOPs to W; in I: 0.0 (Kept) 9.09 % (")


def test_a_stage_with_nothing_to_defer(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    modules = [nn.Embedding(32, WIDTH), build_stage(1, 2)]
    schedule = on_one_rank(modules, 2)
    tokens, targets = batch(2)
    with caplog.at_level(logging.INFO, "zbpipe"):
        for _ in range(2):
            schedule.step(tokens, target=targets)
    assert caplog.messages == [
        "stage 1 defers 100 % of its weight gradients' FLOPs to W; W does nothing for stages without products with a"
        " trained weight: 0"
    ]
    assert gradients(dict(enumerate(modules))).keys() >= {"0.weight", "1.0.up.weight"}


def stages_with_one_compiled(in_place: bool, **how: Any) -> list[nn.Module]:
    block: Any = FeedForward()
    if in_place:
        block.compile(**how)
    compiled: Any = block if in_place else torch.compile(block, **how)
    return [nn.Sequential(nn.LayerNorm(WIDTH), compiled), FeedForward()]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("how", "in_cuda_graphs"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "cudagraphs"}, True),
        ({}, False),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"options": {"triton.cudagraphs": False}}, False),
        ({"backend": "aot_eager"}, False),
    ],
    ids=str,
)
def test_memory_of_cuda_graphs_is_refused(one_rank: None, how: Any, in_cuda_graphs: bool, in_place: bool) -> None:
    modules = stages_with_one_compiled(in_place, **how)
    named = r"stage 0: 1 \((FeedForward|OptimizedModule)\) is compiled to run in CUDA graphs"
    with pytest.raises(ValueError, match=named) if in_cuda_graphs else nullcontext():
        on_one_rank(modules, 2)


@pytest.mark.parametrize("in_place", [True, False])
def test_inductors_configuration_counts_until_the_first_step(one_rank: None, in_place: bool) -> None:
    schedule = on_one_rank(stages_with_one_compiled(in_place), 2)
    excused = on_one_rank(stages_with_one_compiled(in_place, options={"triton.cudagraphs": False}), 2)
    x = torch.randn(2, SEQUENCE, WIDTH)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        with pytest.raises(ValueError, match="is compiled to run in CUDA graphs"):
            on_one_rank(stages_with_one_compiled(in_place), 2)
        with pytest.raises(zbpipe.PipelineError, match="is compiled to run in CUDA graphs"):
            schedule.step(x, target=x)
        require_memory_that_lasts(excused._stages)


def test_torchs_own_split_on_compiled_stages_is_refused(one_rank: None) -> None:
    """With donated buffers torch fails at the first W; without them it accumulates wrong gradients."""
    block = Block()
    block.compile(backend="aot_eager")
    for donated in (True, False):
        with torch._functorch.config.patch(donated_buffer=donated):
            with pytest.raises(ValueError, match=r"torch's own ZBVZeroBubble cannot split the compiled .* \[0, 1\]"):
                on_one_rank([block, block], 2, "ZBVZeroBubble")
            with pytest.raises(ValueError, match="split_backward='autograd' cannot split the compiled modules"):
                on_one_rank([block, block], 2, split_backward="autograd")
    on_one_rank([block, block], 2, "Interleaved1F1B", scale_grads=False)  # has no split


def test_weights_of_tensor_parallelism_leave_the_region(one_rank: None) -> None:
    """DTensors, which the compiled backward makes from local gradients and a mesh."""
    both = Compared(FeedForward(), **TOLERANCE)
    across = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(both.module, init_device_mesh("cpu", (1,)), across)
    both.module.compile(backend="aot_eager", fullgraph=True)
    defer_weights(both.module, both.gradients)
    defer_in_compiled_regions(both.module, both.gradients)
    assert count(both) == [3, 3, 3]
