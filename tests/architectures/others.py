"""Diffusion models, speech, adapters and quantised training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from architectures.case import LENGTH, SAMPLES, VOCABULARY, Case, Takes, tokens, transformer
from architectures.texts import EXPERTS, SMALL, text


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    sizes = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "cross_attention_dim": 32}
    model = UNet2DConditionModel(**blocks, **sizes, attention_head_dim=8, norm_num_groups=8)
    return Takes(model, ("sample", "timestep", "encoder_hidden_states"), "sample")


def latents() -> Tensor:
    return torch.randn(SAMPLES, 4, 8, 8)


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8}
    sizes |= dict.fromkeys(("caption_projection_dim", "joint_attention_dim", "pooled_projection_dim"), 32)
    model = SD3Transformer2DModel(**sizes, num_layers=2, attention_head_dim=8, num_attention_heads=4)
    return Takes(model, ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"), "sample")


def states(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape)


def times() -> Tensor:
    return torch.rand(SAMPLES)


def llama(**options: Any) -> nn.Module:
    return transformer("LlamaConfig", "AutoModelForCausalLM", SMALL | options)


def logits(model: nn.Module) -> nn.Module:
    return Takes(model, ("input_ids",), "logits", use_cache=False)


def adapted(kind: str, **options: Any) -> nn.Module:
    """With an adapter of peft."""
    import peft

    config = getattr(peft, f"{kind}Config")(target_modules="all-linear", **options)
    return logits(peft.get_peft_model(llama(num_key_value_heads=4), config))


with_lora = partial(adapted, "Lora", r=4, init_lora_weights=False)


def with_lora_on_experts(experts: str | None = None) -> nn.Module:
    import peft

    model: Any = text("MixtralConfig", experts=experts, **EXPERTS | {"num_local_experts": 4})()
    names = ["gate_up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    model.model = peft.get_peft_model(model.model, config)
    return cast(nn.Module, model)


def float8() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)  # no CPU multiplies float8
    return logits(convert_to_float8_training(llama(), config=config))


def quantised(config: Callable[[], Any], **options: Any) -> nn.Module:
    from torchao.quantization import quantize_

    model = llama(**options)
    quantize_(model, config())
    return logits(model)


def bitnet() -> Any:
    from torchao.prototype.quantized_training import bitnet_training

    return bitnet_training()


def mxfp8() -> Any:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

    return MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)


def long_tokens() -> Tensor:
    """As many in a microbatch as MXFP8 has in a block."""
    return torch.randint(1, VOCABULARY, (SAMPLES, 4 * LENGTH))


def aware_of_quantisation() -> Any:
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int8, group_size=16)
    return QATConfig(activation_config=activations, weight_config=weights, step="prepare")


CASES = (
    Case("UNet", unet, lambda: (latents(), times(), states(LENGTH, 32))),
    Case("SD3", sd3, lambda: (latents(), times(), states(LENGTH, 32), states(32))),
    Case("LoRA", with_lora, tokens),
    Case("DoRA", partial(with_lora, use_dora=True), tokens),
    Case("LoRA on experts", with_lora_on_experts, tokens),
    Case("LoRA on experts in a loop", partial(with_lora_on_experts, experts="eager"), tokens),
    *(
        Case(kind, partial(adapted, kind, **options), tokens)
        for kind, options in {
            "LoKr": {"r": 4},
            "OFT": {"oft_block_size": 8},
            "BOFT": {"boft_block_size": 8},
            "FourierFT": {"n_frequency": 100},
            "Shira": {"r": 4},
            "HRA": {"r": 4},
        }.items()
    ),
    Case("float8, tensorwise", float8, tokens),
    Case("BitNet", partial(quantised, bitnet), tokens),
    Case("MXFP8", partial(quantised, mxfp8, vocab_size=64, num_key_value_heads=4), long_tokens),
    Case("QAT", partial(quantised, aware_of_quantisation), tokens),
)
