"""Models of other people's libraries: the gradients of plain autograd, and the share that waits for W.

F is a forward, I the backward for the input, W the backward for the weights. `make test-models` runs this in an
environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from architectures import CASES
from architectures.case import LENGTH, SAMPLES, VOCABULARY, Case, Takes, tokens
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

import zbpipe
from zbpipe.runtime.verify import GradientReport
from zbpipe.runtime.verify.one_process import schedule_w_last

for library in ("transformers", "timm", "diffusers", "peft", "torchao", "torchvision"):
    pytest.importorskip(library)

pytestmark = pytest.mark.usefixtures("one_rank")
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two models of one name"

MICROBATCHES, STEPS = 2, 2
CPU = torch.device("cpu")


def as_it_is(model: nn.Module) -> None:
    """Change nothing."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_model_leaves_its_weight_gradients_to_w(case: Case) -> None:
    report, model = train_case(case, as_it_is)
    assert_deferred(report, model, case.share)


CHECKPOINTED = (
    "Mixtral",
    "GPT-2",
    "Llama",
    "T5",
    "timm EVA",
    "timm ConvNeXt",
    "SD3",
    "UNet",
    "LoRA",
    "float8, tensorwise",
)


def checkpoint(model: nn.Module) -> None:
    """Turn on the checkpointing of the model's library."""
    model = model_of_library(model)
    names = ("gradient_checkpointing_enable", "enable_gradient_checkpointing", "set_grad_checkpointing")
    next(getattr(model, name) for name in names if hasattr(model, name))()


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_with_the_checkpointing_of_its_library_it_leaves_as_much(name: str) -> None:
    case = BY_NAME[name]
    report, model = train_case(case, checkpoint)
    assert_deferred(report, model, case.share)


class UnderAutocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: Tensor = self.model(*args)
        return output.float()


@pytest.mark.parametrize(
    "name", ["Mixtral", "JetMoE", "Llama 4", "GPT-2", "Falcon", "XLNet", "torchvision ViT", "UNet"]
)
def test_under_autocast_it_leaves_as_much(name: str) -> None:
    case = BY_NAME[name]
    report, model = train_case(case._replace(build=lambda: UnderAutocast(case.build())), as_it_is, 3e-2)
    assert_deferred(report, model, case.share)


COMPILED = (
    *("JetMoE", "Mixtral in bfloat16", "GPT-OSS in bfloat16", "DeepSeek V3 in bfloat16", "Llama 4", "XLNet"),
    *("timm BEiT", "timm ConvNeXt", "SD3", "DoRA", "float8, tensorwise", "MXFP8", "BitNet", "QAT"),
)
"""Models that are compiled as a whole. In float32, transformers calls an operator of its own there for most experts."""


def compile_whole(model: nn.Module) -> None:
    model_of_library(model).compile(backend="aot_eager")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_it_has_the_same_gradients(name: str) -> None:
    torch.compiler.reset()
    tolerance = 3e-2 if "bfloat16" in name else 1e-4
    report, model = train_case(BY_NAME[name], compile_whole, tolerance)
    assert_deferred(report, model, BY_NAME[name].share)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.Linear(32, 96)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embedding(x)
        for block in self.blocks:
            y = block(y)
        logits: Tensor = self.head(y)
        return logits


def test_stages_that_torch_traces_leave_their_weight_gradients_to_w() -> None:
    model = GPT()
    args = (tokens(),)
    target = torch.randn(SAMPLES, LENGTH, VOCABULARY)
    expected = plain_gradients(deepcopy(model), args, target)
    traced = pipeline(model, (args[0].chunk(MICROBATCHES)[0],), split_spec={"blocks.1": SplitPoint.BEGINNING})
    report = train([traced.build_stage(n, CPU) for n in range(traced.num_stages)], args, target, expected)
    assert traced.num_stages == 2
    assert report.share == 1


def train_case(
    case: Case, prepare: Callable[[nn.Module], object], tolerance: float = 1e-4
) -> tuple[GradientReport, nn.Module]:
    """The report of two steps with the gradients of plain autograd, and the model."""
    model = without_weights_of_zero(case.build())
    batch = case.batch()
    args = batch if isinstance(batch, tuple) else (batch,)
    with torch.no_grad():
        target = torch.randn(deepcopy(model)(*args).shape)
    expected = plain_gradients(deepcopy(model), args, target)
    prepare(model)
    return train([PipelineStage(model, 0, 1, CPU)], args, target, expected, tolerance), model


def train(
    stages: Sequence[Any],
    args: tuple[Tensor, ...],
    target: Tensor,
    expected: dict[str, Tensor],
    tolerance: float = 1e-4,
) -> GradientReport:
    table = schedule_w_last(len(stages), MICROBATCHES)
    schedule: Any = zbpipe.build_pipeline_schedule(table, stages, MICROBATCHES, distance)
    check = zbpipe.GradientCheck(schedule, steps=STEPS)
    for _ in range(STEPS):  # the first I leaves nothing to W
        torch.manual_seed(1)
        schedule.step(*args, target=target)
    found = {name: each / STEPS for stage in stages for name, each in gradients(stage.submod).items()}
    assert_are_close(found, expected, tolerance)
    assert check.report is not None
    return check.report


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def without_weights_of_zero(model: nn.Module) -> nn.Module:
    """The model with random weights in the place of zeros, behind which all gradients were zero, too."""
    with torch.no_grad():
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and not parameter.any():
                parameter.normal_(std=0.05)
    return model


def plain_gradients(model: nn.Module, args: tuple[Tensor, ...], target: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    for *inputs, wanted in zip(*(tensor.chunk(MICROBATCHES) for tensor in (*args, target)), strict=True):
        (distance(model(*inputs), wanted) / MICROBATCHES).backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_are_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(each.norm()) for each in expected.values())
    for name, gradient in expected.items():
        error, size = float((found[name] - gradient).norm()), float(gradient.norm())
        relative = 3e-2 if gradient.dtype is torch.bfloat16 else tolerance
        # Some gradients are zero but for rounding: a softmax takes no notice of a key's bias.
        assert error <= relative * (size + 1e-2 * largest), f"{name}: {error} of {size}"


def assert_deferred(report: GradientReport, model: nn.Module, share: float) -> None:
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    deferred, in_i = (sum(sizes[name] for _, name in names) for names in (report.deferred, report.not_deferred))
    assert report.share >= share, str(report)
    assert deferred / (deferred + in_i) >= share, str(report)


def model_of_library(model: nn.Module) -> Any:
    return model.model if isinstance(model, Takes) else model
