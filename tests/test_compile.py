"""The backward split inside of compiled regions: what leaves the graph, how often it compiles, and what is refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
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
    loss_fn,
    reference,
)
from pipelines import on_one_rank
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe.runtime.split.compiled import defer_in_compiled_regions
from zbpipe.runtime.split.layers import defer_weights
from zbpipe.runtime.split.products import PendingGradient, WeightGradients, WeightProducts
from zbpipe.runtime.split.slots import WeightWithSlots
from zbpipe.runtime.split.stage import require_memory_that_lasts

Call = Callable[[nn.Module, Tensor], Tensor]

IN_TURN = ["selective", *(pytest.param(each, marks=pytest.mark.long) for each in ("none", "full"))]
"""Kinds of checkpointing; `make test` tries the first."""

# The compiler changes the order of sums within a block (float32).
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}


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


def prepare(module: nn.Module) -> WeightGradients:
    store = WeightGradients()
    defer_weights(module, store)
    defer_in_compiled_regions(module)
    return store


def run(
    module: nn.Module, x: Tensor, store: WeightGradients | None = None, call: Call = lambda module, x: module(x)
) -> list[PendingGradient]:
    """Forward and backward of the sum of squares, as I if there is a store."""
    loss = call(module, x).square().sum()
    if store is None:
        loss.backward()
        return []
    with store.record() as pending:
        loss.backward()
    return pending


def assert_same_gradients(module: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, **TOLERANCE)


def assert_close_gradients(module: nn.Module, plain: nn.Module) -> None:
    """bfloat16 rounds to 8 bits."""
    for (name, found), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None, name
        assert found.grad.dtype == expected.grad.dtype  # type: ignore[union-attr]
        assert (found.grad - expected.grad).norm() / expected.grad.norm() < 2**-6, name  # type: ignore[operator, union-attr]


def rows_of_input() -> Tensor:
    return torch.randn(2, SEQUENCE, WIDTH, requires_grad=True)


def train(
    compiled: nn.Module,
    plain: nn.Module,
    microbatches: int = 3,
    *,
    call: Call = lambda module, x: module(x),
    check: Callable[[nn.Module, nn.Module], None] = assert_same_gradients,
) -> list[list[PendingGradient]]:
    """By microbatch what waited for W; the gradients are those of `plain` after each."""
    store, waited = prepare(compiled), []
    for _ in range(microbatches):
        x = rows_of_input()
        waited.append(run(compiled, x, store, call))
        for gradient in waited[-1]:
            gradient.accumulate()
        run(plain, x.detach().requires_grad_(), call=call)
        check(compiled, plain)
    return waited


def compile_blocks(stage: nn.Module, backend: str) -> None:
    """One by one and without graph breaks, as TorchTitan does it."""
    for block in stage.children():
        if not isinstance(block, (nn.Embedding, nn.Linear)):
            block.compile(backend=backend, fullgraph=True)


def test_x_and_dy_of_every_layer_leave_the_region() -> None:
    blocks = nn.Sequential(FeedForward(), FeedForward(), FeedForward())
    plain = copy.deepcopy(blocks)
    compile_blocks(blocks, "aot_eager")
    assert [len(pending) for pending in train(blocks, plain, 4)] == [9] * 4
    # The first microbatch runs without the compiler; then one graph does for all blocks and all microbatches.
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_checkpoint_repeats_a_call_as_it_ran() -> None:
    """The first call runs without the compiler. Its repetition may never come, and its memory be used again."""
    block = FeedForward()
    plain = copy.deepcopy(block)
    block.compile(backend="aot_eager", fullgraph=True)
    store = prepare(block)

    def run_checkpointed(x: Tensor) -> None:
        loss = checkpoint(block, x, use_reentrant=False).square().sum()
        with store.record() as pending:
            loss.backward()
        assert len(pending) == 3
        for gradient in pending:
            gradient.accumulate()
        run(plain, x.detach().requires_grad_())

    x = rows_of_input()
    memory = x.untyped_storage()._cdata
    checkpoint(block, x, use_reentrant=False)  # as torch does where it needs shapes alone
    del x
    others = [rows_of_input() for _ in range(100)]
    # Almost always one of them gets the memory that is free now; else any will do.
    again = next((each for each in others if each.untyped_storage()._cdata == memory), others[0])
    run_checkpointed(rows_of_input())
    run_checkpointed(again)
    run_checkpointed(torch.randn(1, SEQUENCE, WIDTH, requires_grad=True))  # eagerly, F as well as its repetition
    assert_same_gradients(block, plain)


def test_a_checkpoint_that_begins_before_the_region() -> None:
    """It makes the inputs of the region anew. As torch infers shapes, one forward and backward come before all else."""
    block = nn.Sequential(nn.LayerNorm(WIDTH), FeedForward())
    plain = copy.deepcopy(block)
    block[1].compile(backend="aot_eager", fullgraph=True)
    waited = train(block, plain, call=lambda module, x: checkpoint(module, x, use_reentrant=False))
    assert [len(pending) for pending in waited] == [3, 3, 3]
    assert counters["stats"]["unique_graphs"] == 1


def test_outside_of_a_recording_the_region_gives_complete_gradients() -> None:
    block = FeedForward()
    plain = copy.deepcopy(block)
    block.compile(backend="aot_eager", fullgraph=True)
    prepare(block)
    for _ in range(3):
        x = rows_of_input()
        run(block, x)
        run(plain, x.detach().requires_grad_())
    assert_same_gradients(block, plain)
    # torch's metadata inference asks for the gradient of the input alone, and must not leave any behind.
    x, weight = rows_of_input(), block.up.weight
    before = weight.grad.clone()  # type: ignore[union-attr]
    torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(weight.grad, before)  # type: ignore[arg-type]


def test_a_module_that_torch_compile_wrapped() -> None:
    inner = FeedForward()
    plain = copy.deepcopy(inner)
    compiled: Any = torch.compile(inner, backend="aot_eager", fullgraph=True)
    assert [len(pending) for pending in train(compiled, plain)] == [3, 3, 3]
    assert counters["stats"]["unique_graphs"] == 1


class Mixture(nn.Module):
    """Every row goes to one expert; how many go to each comes out of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(EXPERTS, WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        scores, chosen = self.router(flat).softmax(-1).max(-1)
        order = torch.argsort(chosen, stable=True)
        count = (chosen.unsqueeze(-1) == torch.arange(EXPERTS)).sum(0)
        y = self.experts(flat[order], torch.cumsum(count, dim=0, dtype=torch.int32))
        return x + torch.zeros_like(flat).index_add(0, order, y * scores[order].unsqueeze(-1)).view_as(x)


EXPERTS = 4


def run_two_blocks(build: Callable[[], nn.Module], checkpointing: Checkpointing = "none") -> list[list[nn.Module]]:
    """Three microbatches through two compiled blocks, compared with plain ones; the layers that waited in each."""
    plain = nn.Sequential(build(), build())
    blocks = nn.Sequential(*(checkpointed(copy.deepcopy(block), checkpointing) for block in plain))
    compile_blocks(blocks, "aot_eager")
    waited = train(blocks, plain, check=assert_close_gradients)
    # Nothing is left in the layers.
    assert not any(isinstance(each, WeightWithSlots) for layer in blocks.modules() for each in vars(layer).values())
    return [[each.layer for each in pending] for pending in waited]


@pytest.mark.parametrize("checkpointing", IN_TURN)
def test_products_of_experts_leave_the_region(checkpointing: Checkpointing) -> None:
    waited = run_two_blocks(Mixture, checkpointing)
    assert [len(layers) for layers in waited] == [8, 8, 8]
    assert [sum(isinstance(layer, Experts) for layer in layers) for layers in waited] == [6, 6, 6]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def compiled_in_place() -> Any:
    block = Mixture()
    block.compile(backend="aot_eager")
    return block


def wrapped_by_torch_compile() -> Any:
    """As torchtitan 0.2 does it."""
    return torch.compile(FeedForward(), backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(("build", "products"), [(compiled_in_place, 4), (wrapped_by_torch_compile, 3)])
def test_fsdp_around_a_region(one_rank: None, build: Callable[[], Any], products: int) -> None:
    """The weights are there only when FSDP has gathered them, and are others than those that were learned from."""
    block = build()
    plain = copy.deepcopy(block)
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    block.set_force_sum_reduction_for_comms(True)
    block.set_requires_gradient_sync(False)

    def check(block: Any, plain: nn.Module) -> None:
        block.unshard()
        assert_close_gradients(block, plain)

    assert [len(pending) for pending in train(block, plain, check=check)] == [products] * 3


class PerHead(nn.Module):
    """A layer of the user's own, whose weight is used for something else, too, in all ways that Python knows."""

    weight_products: ClassVar[WeightProducts] = {torch.bmm: lambda dy, x: x.mT @ dy}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(2, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x, torch.permute(self.weight.permute(2, 1, 0).transpose(0, -1), (0, 2, 1)))
        decay = 2 * self.weight.square().sum() + (self.weight * 2 + self.weight[:1] @ self.weight[1:]).sum()
        return y + self.bias + decay / len(self.weight) + torch.stack([self.weight, -self.weight]).sum()


def test_a_layer_of_the_users_own() -> None:
    waited = run_two_blocks(PerHead)
    assert [len(layers) for layers in waited] == [2, 2, 2]


class Masked(nn.Linear):
    """Looks at its weight in ways that only a tensor knows, and so does not say what it multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, nn.Parameter)
        return F.linear(x, self.weight, self.bias)


def test_a_forward_that_does_not_say_what_it_multiplies_gets_the_very_weight() -> None:
    """It cannot leave the region. The first call runs without the compiler."""
    waited = run_two_blocks(lambda: nn.Sequential(Masked(WIDTH, WIDTH)))
    assert [len(layers) for layers in waited] == [2, 0, 0]


class Chosen(nn.Module):
    """Two products and two arguments, with a module in it, and no declaration."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4) for _ in range(2))
        self.act = nn.SiLU()

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return self.act(torch.bmm(x, self.up)) * gain @ self.down.transpose(-2, -1)


class WithGain(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.layer, x, x.square().mean(-1, keepdim=True), use_reentrant=False)  # type: ignore[no-any-return]


def test_several_products_of_a_layer_leave_the_region_without_a_declaration() -> None:
    waited = run_two_blocks(lambda: WithGain(Chosen()))
    assert [len(layers) for layers in waited] == [4, 4, 4]


class Bounded(nn.Linear):
    """Multiplies with a weight that it makes, whose gradient depends on it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.tanh(self.weight), self.bias)


@pytest.mark.parametrize("checkpointing", IN_TURN)
def test_a_made_weight_leaves_the_region(checkpointing: Checkpointing) -> None:
    waited = run_two_blocks(lambda: nn.Sequential(Bounded(WIDTH, WIDTH)), checkpointing)
    assert [len(layers) for layers in waited[1:]] == [2, 2]


class Picky(Chosen):
    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and not isinstance(self.up, nn.Parameter):
            torch._dynamo.graph_break()
        return super().forward(x, gain)


def test_a_region_that_the_compiler_refuses_with_stand_ins_is_compiled_without(caplog: Any) -> None:
    waited = run_two_blocks(lambda: WithGain(Picky()))
    assert [len(layers) for layers in waited] == [4, 0, 0]
    messages = [each for each in caplog.messages if "cannot compile" in each]
    assert "in the place of the weights of Picky" in messages[0]
    assert len(messages) == 1  # both blocks have the same code


def test_compiling_again_because_of_zbpipe_is_told(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("zbpipe.runtime.split.compiled._MOST_SHAPES", 1)  # so the second shape has no slots
    block = FeedForward()
    block.compile(backend="aot_eager", dynamic=True)
    store = prepare(block)
    for length in (5, 5, 7):
        run(block, torch.randn(2, length, WIDTH, requires_grad=True), store)
    (message,) = [each for each in caplog.messages if "because of zbpipe" in each]
    assert "the graph of the stage itself (FeedForward), or compiles it again, because of zbpipe: 0/0: " in message


OTHER_USES: dict[str, Callable[[Tensor], Tensor]] = {
    "compared": lambda w: w * ((w > 0) & (w != 1)) + w * (w > 0.5) + w * ~(w <= 0.1),
    "divided": lambda w: w / 2 + 1 / (w + 9) + w % 0.5 + w.detach() // 0.5,
    "powers": lambda w: 2**w + w**2 + abs(w) - (-w) - 3 + (1 - w),
    "rows": lambda w: sum(row.flatten()[:1] for row in w) + w[:1],
    "functions": lambda w: torch.where(w > 0, w, 0) + torch.linalg.norm(w) + w.norm() + torch.matmul(w, w.mT),
}


@pytest.mark.parametrize("use", OTHER_USES)
def test_other_uses_of_a_weight_that_leaves_the_region(use: str) -> None:
    class Regularised(PerHead):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.weight) + self.bias + OTHER_USES[use](self.weight).square().mean()

    waited = run_two_blocks(Regularised)
    assert [len(layers) for layers in waited] == [2, 2, 2]


class RowsOfData(nn.Module):
    """How many rows go through the product comes out of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(EXPERTS, WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        (chosen,) = torch.where(flat[:, 0] > 0)
        rows = flat[chosen]
        count = (torch.arange(rows.shape[0]).unsqueeze(-1) % EXPERTS == torch.arange(EXPERTS)).sum(0)
        y = self.experts(rows, torch.cumsum(count, dim=0, dtype=torch.int32))
        return x + torch.zeros_like(flat).index_add(0, chosen, y).view_as(x)


def test_a_number_of_rows_that_is_not_known_stays_in_i() -> None:
    """As with expert parallelism. The first call runs without the compiler, so there they wait."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        waited = run_two_blocks(RowsOfData)
    assert [len(layers) for layers in waited] == [6, 0, 0]


def test_weights_that_are_frozen_or_have_hooks_stay_in_the_region() -> None:
    block = FeedForward()
    block.up.weight.requires_grad_(False)
    plain = copy.deepcopy(block)
    seen: list[str] = []
    block.gate.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("gate"))
    block.compile(backend="aot_eager", fullgraph=True)
    waited = train(block, plain, 2)
    assert [[each.weight for each in pending] for pending in waited] == [[block.down.weight]] * 2
    assert seen == ["gate", "gate"]


def test_other_shapes_and_no_gradients() -> None:
    """Every new shape is looked at once; what needs no gradient is compiled as it is."""
    block = FeedForward()
    plain = copy.deepcopy(block)
    block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    store = prepare(block)
    for length in (SEQUENCE, 3, SEQUENCE, 3):
        x = torch.randn(2, length, WIDTH, requires_grad=True)
        pending = run(block, x, store)
        assert len(pending) == 3
        while pending:
            pending.pop().accumulate()
        run(plain, x.detach().requires_grad_())
        with torch.no_grad():
            torch.testing.assert_close(block(x), plain(x), **TOLERANCE)
    assert_same_gradients(block, plain)


def test_autocast() -> None:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)  # type: ignore[no-any-return]

    block = FeedForward()
    plain = copy.deepcopy(block)
    block.compile(backend="aot_eager", fullgraph=True)
    waited = train(block, plain, 2, call=call, check=assert_close_gradients)
    assert {each.x.dtype for pending in waited for each in pending} == {torch.bfloat16}
    assert {each.grad.dtype for each in block.parameters()} == {torch.float32}  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("checkpointing", IN_TURN)
def test_a_pipeline_of_compiled_blocks(one_rank: None, checkpointing: Checkpointing, backend: str) -> None:
    modules = [build_stage(0, 2, checkpointing), build_stage(1, 2, checkpointing)]
    for module in modules:
        compile_blocks(module, backend)
    schedule = on_one_rank(modules, 4)
    tokens, targets = batch(4)
    expected_losses, expected = reference(2, 4)
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        losses: list[Tensor] = []
        schedule.step(tokens, target=targets, losses=losses)
        assert [loss.item() for loss in losses] == pytest.approx(expected_losses, rel=1e-5)
        found = gradients(dict(enumerate(modules)))
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, **TOLERANCE)
    # All blocks share one, and the weight gradients of their layers with a forward of their own another.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_what_is_left_in_i_is_told_once(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    modules = [build_stage(0, 2), build_stage(1, 2)]
    compile_blocks(modules[0], "aot_eager")
    schedule = on_one_rank(modules, 3)
    tokens, targets = batch(3)
    with caplog.at_level(logging.WARNING, "zbpipe"):
        for _ in range(2):
            schedule.step(tokens, target=targets)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("zbpipe")]
    # In a compiled region `twice` is called twice.
    assert told == [
        "stage 0 defers 75 % of its weight gradients' FLOPs to W; in I: 1.twice (Linear) 12.5 %, 2.twice (Linear) 12.5"
        " % (in a compiled region, where the weight is multiplied more than once, or by a layer that does more with"
        " it). So its schedule gains less. docs/the-split.md shows how to declare a layer's products"
    ]


def test_a_stage_with_nothing_to_defer(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    modules = [nn.Embedding(32, WIDTH), build_stage(1, 2)]
    with caplog.at_level(logging.WARNING, "zbpipe"):
        schedule = on_one_rank(modules, 2)
    assert "stage 0 has no layer that can defer its weight gradient" in caplog.text
    tokens, targets = batch(2)
    schedule.step(tokens, target=targets)
    assert gradients(dict(enumerate(modules))).keys() >= {"0.weight", "1.0.up.weight"}


IN_CUDA_GRAPHS: dict[str, dict[str, Any]] = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "option": {"options": {"triton.cudagraphs": True}},
    "backend": {"backend": "cudagraphs"},
}
IN_OWN_MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "max-autotune-no-cudagraphs": {"mode": "max-autotune-no-cudagraphs"},
    "option": {"options": {"triton.cudagraphs": False}},
    "aot_eager": {"backend": "aot_eager"},
}


def stages_with_one_compiled(in_place: bool, **how: Any) -> list[nn.Module]:
    block: Any = FeedForward()
    if in_place:
        block.compile(**how)
    compiled: Any = block if in_place else torch.compile(block, **how)
    return [nn.Sequential(nn.LayerNorm(WIDTH), compiled), FeedForward()]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("how", IN_CUDA_GRAPHS)
def test_memory_of_cuda_graphs_is_refused(one_rank: None, in_place: bool, how: str) -> None:
    modules = stages_with_one_compiled(in_place, **IN_CUDA_GRAPHS[how])
    with pytest.raises(
        ValueError, match=r"stage 0: 1 \((FeedForward|OptimizedModule)\) is compiled to run in CUDA graphs"
    ):
        on_one_rank(modules, 2)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("how", IN_OWN_MEMORY)
def test_other_modes_are_not(one_rank: None, in_place: bool, how: str) -> None:
    on_one_rank(stages_with_one_compiled(in_place, **IN_OWN_MEMORY[how]), 2)


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
    stages = [PipelineStage(block, i, 2, torch.device("cpu")) for i in range(2)]
    for donated in (True, False):
        with torch._functorch.config.patch(donated_buffer=donated):
            with pytest.raises(ValueError, match=r"torch's own ZBVZeroBubble cannot split the compiled .* \[0, 1\]"):
                zbpipe.build_pipeline_schedule("ZBVZeroBubble", stages, 2, loss_fn)
            with pytest.raises(ValueError, match="split_backward='autograd' cannot split the compiled modules"):
                zbpipe.build_pipeline_schedule("ZBV", stages, 2, loss_fn, split_backward="autograd")
    zbpipe.build_pipeline_schedule("Interleaved1F1B", stages, 2, loss_fn, scale_grads=False)  # has no split


@pytest.mark.parametrize("compiled", ["compile", "torch.compile"])
def test_the_layers_of_a_compiled_module_within_a_compiled_one_wait(compiled: str) -> None:
    def region(module: nn.Module) -> Any:
        if compiled == "torch.compile":
            return torch.compile(module, backend="aot_eager")
        module.compile(backend="aot_eager")
        return module

    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    module = nn.Sequential(region(nn.Sequential(region(inner), nn.Linear(WIDTH, WIDTH))), nn.Linear(WIDTH, WIDTH))
    report = zbpipe.check_gradients(module, torch.randn(8, WIDTH))
    assert report.passed
    assert not report.not_deferred
    assert len(report.deferred) == 3


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_a_checkpoint_does_not_see_how_a_layer_in_its_region_is_traced(
    one_rank: None, checkpointing: Checkpointing
) -> None:
    """The block has a layer with its own forward, traced when the region first runs, within the checkpoint."""
    modules = {index: build_stage(index, 2, checkpointing) for index in range(2)}
    plain = copy.deepcopy(modules)
    for block in [each for module in modules.values() for each in module.modules() if isinstance(each, Block)]:
        block.compile(backend="aot_eager")
    stages = [PipelineStage(module, index, 2, torch.device("cpu")) for index, module in modules.items()]
    schedule: Any = zbpipe.build_pipeline_schedule("ZBV", stages, 4, loss_fn)
    tokens, targets = batch(4)
    schedule.step(tokens, target=targets)
    for one, goal in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        (loss_fn(plain[1](plain[0](one)), goal) / 4).backward()
    expected = gradients(plain)
    for name, found in gradients(modules).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6, msg=name)
