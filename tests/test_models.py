"""Models of other people's libraries: the gradients of plain autograd, and the share that waits for W."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from architectures import CASES, LENGTH, SAMPLES, VOCABULARY, Takes, tokens
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

import zbpipe
from zbpipe.runtime.verify import GradientReport
from zbpipe.runtime.verify.gradient_check import schedule_w_last

for library in ("transformers", "timm", "diffusers", "peft", "torchao", "torchvision"):
    pytest.importorskip(library)

pytestmark = pytest.mark.usefixtures("one_rank")
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two models of one name"

MICROBATCHES, STEPS = 2, 2
CPU = torch.device("cpu")


CHECKPOINTED = (
    *("Mixtral", "GPT-2", "Llama", "T5", "timm EVA", "timm ConvNeXt", "SD3", "UNet", "LoRA", "float8, tensorwise"),
)
UNDER_AUTOCAST = ("Mixtral", "JetMoE", "Llama 4", "GPT-2", "Falcon", "XLNet", "torchvision ViT", "UNet")
COMPILED = (
    *("JetMoE", "Mixtral in bfloat16", "GPT-OSS in bfloat16", "DeepSeek V3 in bfloat16", "Llama 4", "XLNet"),
    *("timm BEiT", "timm ConvNeXt", "SD3", "DoRA", "float8, tensorwise", "MXFP8", "BitNet", "QAT"),
)
"""Models that are compiled as a whole. In float32, transformers calls an operator of its own there for most experts."""


class UnderAutocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: Tensor = self.model(*args)
        return output.float()


def prepare(model: Any, how: str) -> None:
    model = model.model if isinstance(model, Takes) else model
    if how == "compiled":
        model.compile(backend="aot_eager")
    if how == "checkpointed":
        names = ("gradient_checkpointing_enable", "enable_gradient_checkpointing", "set_grad_checkpointing")
        next(getattr(model, name) for name in names if hasattr(model, name))()


HOW = {"": BY_NAME, "checkpointed": CHECKPOINTED, "under autocast": UNDER_AUTOCAST, "compiled": COMPILED}


@pytest.mark.parametrize(("how", "name"), [(how, name) for how, names in HOW.items() for name in names])
def test_a_model_leaves_its_weight_gradients_to_w(how: str, name: str) -> None:
    torch.compiler.reset()
    case, rough = BY_NAME[name], how == "under autocast" or (how == "compiled" and "bfloat16" in name)
    build = (lambda: UnderAutocast(case.build())) if how == "under autocast" else case.build
    model = without_weights_of_zero(build())
    batch = case.batch()
    args = batch if isinstance(batch, tuple) else (batch,)
    with torch.no_grad():
        target = torch.randn(deepcopy(model)(*args).shape)
    expected = plain_gradients(deepcopy(model), args, target)
    prepare(model, how)
    report = train([PipelineStage(model, 0, 1, CPU)], args, target, expected, 3e-2 if rough else 1e-4)
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    deferred, in_i = (sum(sizes[name] for _, name in names) for names in (report.deferred, report.not_deferred))
    assert report.share >= case.share, str(report)
    assert deferred / (deferred + in_i) >= case.share, str(report)


def test_stages_that_torch_traces_leave_their_weight_gradients_to_w() -> None:
    layers = (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, VOCABULARY))
    model, args = nn.Sequential(nn.Embedding(VOCABULARY, 32), *layers), (tokens(),)
    target = torch.randn(SAMPLES, LENGTH, VOCABULARY)
    expected = plain_gradients(deepcopy(model), args, target)
    traced = pipeline(model, (args[0].chunk(MICROBATCHES)[0],), split_spec={"3": SplitPoint.BEGINNING})
    report = train([traced.build_stage(n, CPU) for n in range(traced.num_stages)], args, target, expected)
    assert traced.num_stages == 2
    assert report.share == 1


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
