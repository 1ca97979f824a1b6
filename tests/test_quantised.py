"""Quantised training by torchao: W computes the weight gradients, by the recipe and the kernel of the layer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from compared import CALLS, Compared, call, train
from pipelines import check_steps, shard
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import FlopCounterMode

from zbpipe.runtime.split.weight_gradients import accumulate

pytest.importorskip("torchao")

WIDTH = 64

ROWS = 64
BLOCK = 128
"""What NVFP4 divides sizes into."""


def float8(recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)  # no CPU multiplies float8
    return convert_to_float8_training(stack(), config=config)  # type: ignore[no-any-return]


def quantised(config: str | Callable[[], Any], **options: Any) -> nn.Module:
    """By a configuration, or by one of torchao's prototypes of this name."""
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    model = stack()
    quantize_(model, (getattr(quantized_training, config) if isinstance(config, str) else config)(**options))
    return model


def mxfp8_config(with_hp: bool = False) -> Any:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

    return replace(MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL), wgrad_with_hp=with_hp)


def mxfp8_layers() -> nn.Module:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common import KernelPreference

    one, other = (MXFP8Linear(WIDTH, WIDTH, kernel_preference=KernelPreference.EMULATED) for _ in range(2))
    return nn.Sequential(one, nn.Tanh(), other)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, WIDTH, WIDTH, dtype=torch.bfloat16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([32, ROWS], dtype=torch.int32)
        return torch._grouped_mm(x.bfloat16(), self.w.transpose(-2, -1), offs=offsets).float()


def mxfp8_experts(with_hp: bool) -> nn.Module:
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor

    layer = Experts()
    layer.w = nn.Parameter(MXFP8TrainingWeightWrapperTensor(layer.w.data, mxfp8_config(with_hp)))
    return nn.Sequential(nn.Identity(), layer)


class NVFP4(nn.Module):
    """torchao's product, whose kernels run on GPUs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(BLOCK, BLOCK, dtype=torch.bfloat16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear

        y: Tensor = nvfp4_linear(x.bfloat16(), self.weight, sign_vector=(1,) * 16, sr_seed=torch.zeros(1).long())
        return y.float()


def codes(x: Tensor) -> Tensor:
    """Stands for two numbers in a byte: of two columns, the first."""
    return (x[:, ::2] / x.abs().max() * 127).round().to(torch.int8)


def scaled_mm_v2(a: Tensor, b: Tensor, *more: Any, **options: Any) -> Tensor:
    if has_torch_function((a, b)):
        return handle_torch_function(scaled_mm_v2, (a, b), a, b, *more, **options)  # type: ignore[no-any-return]
    return (a.view(torch.int8).float() @ b.view(torch.int8).float()).bfloat16() / 2**12


def stand_in_for_kernels_of_nvfp4(patch: pytest.MonkeyPatch) -> None:
    of = "torchao.prototype.moe_training.nvfp4_training.nvfp4_linear"
    pytest.importorskip(of)
    scale = torch.ones(1)
    patch.setattr(f"{of}.triton_rht_amax", lambda x, sign_vector: (scale, scale))
    patch.setattr(f"{of}.triton_rht_quantize_row_col", lambda x, **_: (codes(x.t()), scale, codes(x), scale))
    patch.setattr(f"{of}.triton_weight_quantize_2d", lambda w, amax: (codes(w), scale, codes(w.t()), scale))
    patch.setattr(torch, "_scaled_mm_v2", scaled_mm_v2)


def test_nvfp4_leaves_its_weight_gradients_to_w(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_kernels_of_nvfp4(monkeypatch)
    train_exactly(nn.Sequential(NVFP4(), nn.Tanh(), NVFP4()), 2, width=BLOCK)


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


LAYERS = {
    "float8, tensorwise": (partial(float8, "tensorwise"), 2),
    "float8, rowwise": (partial(float8, "rowwise"), 2),
    "float8, rowwise_with_gw_hp": (partial(float8, "rowwise_with_gw_hp"), 2),
    "int8": (partial(quantised, "Int8MixedPrecisionTrainingConfig", module_swap=True), 2),
    "int8 weights": (partial(quantised, "int8_weight_only_quantized_training"), 2),
    "BitNet": (partial(quantised, "bitnet_training"), 2),
    "MXFP8": (mxfp8_layers, 2),
    "MXFP8 weights": (partial(quantised, mxfp8_config), 2),
    "MXFP8 experts": (partial(mxfp8_experts, False), 1),
    "MXFP8 experts, dW in bfloat16": (partial(mxfp8_experts, True), 1),
}


EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 0.0}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_w_computes_the_gradients_of_the_layer_to_the_bit(name: str, how: str) -> None:
    build, number = LAYERS[name]
    train_exactly(build(), number, CALLS[how])


def train_exactly(layer: nn.Module, number: int, call: Any = call, width: int = WIDTH) -> None:
    """In three steps, each of which leaves this number of weight gradients to W."""
    both = Compared(layer, **EXACT)
    for step in range(3):
        x = torch.randn(max(ROWS, width), width)
        assert len(both.train(x, call=call, on_trial=not step)) == number
        for each in (both.module, both.plain):
            each.zero_grad()


@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [
        ("float8, rowwise", False),
        ("float8, rowwise", True),
        pytest.param("int8", True, marks=pytest.mark.long),
        ("MXFP8", False),
    ],
)
def test_sharded_weights(one_rank: None, name: str, is_compiled: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    module = LAYERS[name][0]()
    if is_compiled:
        for layer in module.children():
            layer.compile(backend="aot_eager")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert check_steps(shard(module, mp_policy=policy), 2 * ROWS, WIDTH).shares[0] == 1


@pytest.mark.parametrize(
    "name", ["float8, tensorwise", "float8, rowwise_with_gw_hp", "int8 weights", "BitNet", "MXFP8"]
)
def test_i_and_w_multiply_as_much_as_a_full_backward(name: str) -> None:
    both, x = Compared(LAYERS[name][0](), **EXACT), torch.randn(ROWS, WIDTH)
    of_products = 2 * 2 * ROWS * WIDTH * WIDTH
    both.train(x, on_trial=True)
    with FlopCounterMode(display=False) as in_i, both.gradients.record() as pending:
        train(both.module, x)
    assert sum(each.flops for each in pending) == of_products
    with FlopCounterMode(display=False) as in_w:
        list(accumulate(pending))
    with FlopCounterMode(display=False) as in_b:
        train(both.plain, x)
    assert in_w.get_total_flops() == of_products
    assert in_i.get_total_flops() + in_w.get_total_flops() == in_b.get_total_flops()
