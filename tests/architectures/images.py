"""Vision models of timm, torchvision and transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from architectures.case import Case, Takes, image, transformer


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

CASES = (
    Case("timm BEiT", partial(of_timm, "beit_base_patch16_224", **SMALL_VIT), image),
    Case("timm EVA", partial(of_timm, "eva02_tiny_patch14_224", **SMALL_VIT), image),
    Case("timm Swin", partial(of_timm, "swin_tiny_patch4_window7_224", drop_path_rate=0.0, **SMALL_SWIN), image),
    Case("timm ConvNeXt", partial(of_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)), image),
    Case("timm ResNet", partial(of_timm, "resnet10t", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)), image),
    Case("torchvision ViT", vit_of_torchvision, image),
    Case("SAM", sam, image),
)
