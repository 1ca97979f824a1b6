"""Small models of other people's libraries, and the share of their weight gradients that waits for W."""

import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

# PyPI's torchvision is built for CUDA. Its operators do not load with a CPU build of torch, but its import registers
# kernels for two of them.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if "+cpu" in torch.__version__:
    for _name in ("nms", "qnms"):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

SAMPLES, LENGTH = 4, 8
"""In two microbatches, and tokens of each."""
VOCABULARY = 48


class Case(NamedTuple):
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor | tuple[Tensor, ...]]
    share: float = 0.95
    """Least share of the weight gradients that is deferred to W, by FLOPs and by elements."""


class Takes(nn.Module):
    """A model whose arguments have names, with the one output that a pipeline hands on."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str | int, **constant: Any) -> None:
        super().__init__()
        self.model = model
        self.names, self.output, self.constant = names, output, constant

    def forward(self, *args: Tensor) -> Tensor:
        output: Any = self.model(**dict(zip(self.names, args, strict=True)), **self.constant)
        result: Tensor = output[self.output]
        return result


def tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (SAMPLES, LENGTH))


def image() -> Tensor:
    return torch.randn(SAMPLES, 3, 32, 32)


def transformer(config: str, auto: str, options: Mapping[str, Any], **more: Any) -> nn.Module:
    """A model of transformers: `auto` is the class for its task."""
    import transformers

    model: nn.Module = getattr(transformers, auto).from_config(getattr(transformers, config)(**options), **more)
    return model.train()


SMALL: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "tie_word_embeddings": False},
}
EXPERTS: dict[str, Any] = SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8, "v_head_dim": 8},
    **{"first_k_dense_replace": 1},
}
QWEN3_NEXT: dict[str, Any] = {
    **{"head_dim": 8, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
LLAMA_4: dict[str, Any] = {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64, "num_experts_per_tok": 1}
RWKV: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "context_length": 32},
    **{"attention_hidden_size": 32, "intermediate_size": 64},
}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
XLNET: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "n_layer": 2,
    "n_head": 4,
    "d_inner": 64,
    "dropout": 0.0,
}
GPT: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def text(
    config: str, *, experts: str | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Callable[[], nn.Module]:
    """Builds a model that predicts tokens; `experts` is how the library multiplies them."""
    more: dict[str, Any] = {"dtype": dtype} | ({"experts_implementation": experts} if experts else {})
    build = partial(transformer, config, "AutoModelForCausalLM", options, **more)
    return lambda: Takes(build(), ("input_ids",), "logits", use_cache=False)


def of_mixture(name: str, config: str, *, share: float = 0.95, **options: Any) -> Case:
    return Case(name, text(config, **EXPERTS | options), tokens, share)


def plain(name: str, config: str, **options: Any) -> Case:
    return Case(name, text(config, **SMALL | options), tokens)


TEXTS = (
    of_mixture("Mixtral", "MixtralConfig", num_local_experts=4),
    of_mixture("Mixtral, a loop of experts", "MixtralConfig", num_local_experts=4, experts="eager"),
    of_mixture("Mixtral, experts in batches", "MixtralConfig", num_local_experts=4, experts="batched_mm"),
    of_mixture("GPT-OSS, a loop of experts", "GptOssConfig", num_local_experts=4, head_dim=8, experts="eager"),
    of_mixture("Mixtral in bfloat16", "MixtralConfig", num_local_experts=4, dtype=torch.bfloat16),
    of_mixture("GPT-OSS in bfloat16", "GptOssConfig", num_local_experts=4, head_dim=8, dtype=torch.bfloat16),
    of_mixture("DeepSeek V3 in bfloat16", "DeepseekV3Config", dtype=torch.bfloat16, **LATENT),
    of_mixture("Llama 4", "Llama4TextConfig", **LLAMA_4),
    of_mixture("PhiMoE", "PhimoeConfig", num_local_experts=4),
    of_mixture("JetMoE", "JetMoeConfig", num_local_experts=4, kv_channels=8, num_key_value_heads=2),
    Case("GPT-2", text("GPT2Config", **GPT), tokens),
    plain("Falcon", "FalconConfig", hidden_dropout=0.0, attention_dropout=0.0),
    Case(
        "XLNet",
        lambda: Takes(transformer("XLNetConfig", "AutoModelForCausalLM", XLNET), ("input_ids",), "logits"),
        tokens,
    ),
    plain("Llama", "LlamaConfig"),
    plain("Bamba", "BambaConfig", attn_layer_indices=[1], **BAMBA),
    Case(
        "T5",
        lambda: Takes(
            transformer("T5Config", "AutoModelForSeq2SeqLM", T5 | {"dropout_rate": 0.0}),
            ("input_ids", "decoder_input_ids"),
            "logits",
            use_cache=False,
        ),
        lambda: (tokens(), tokens()),
    ),
)


def of_timm(name: str, **options: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model


def vit_of_torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10)


def sam() -> nn.Module:
    options: dict[str, Any] = {
        "image_size": 32,
        "patch_size": 8,
        "num_channels": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
    }
    options |= {"num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 64, "output_channels": 16}
    windows = {"window_size": 2, "global_attn_indexes": [1]}
    return Takes(transformer("SamVisionConfig", "AutoModel", options | windows), ("pixel_values",), 0)


SMALL_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

SMALL_SWIN: dict[str, Any] = {"img_size": 32, "window_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}

IMAGES = (
    Case("timm BEiT", partial(of_timm, "beit_base_patch16_224", **SMALL_VIT), image),
    Case("timm EVA", partial(of_timm, "eva02_tiny_patch14_224", **SMALL_VIT), image),
    Case("timm Swin", partial(of_timm, "swin_tiny_patch4_window7_224", drop_path_rate=0.0, **SMALL_SWIN), image),
    Case("timm ConvNeXt", partial(of_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)), image),
    Case("timm ResNet", partial(of_timm, "resnet10t", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)), image),
    Case("torchvision ViT", vit_of_torchvision, image),
    Case("SAM", sam, image),
)


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


OTHERS = (
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

CASES = (*TEXTS, *IMAGES, *OTHERS)


if __name__ == "__main__":  # runs a script, for which torchvision is importable now
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
