"""Vision models of timm, torchvision and transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from architectures.case import Case, Takes, image, transformer

VISION: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def of_timm(name: str, **options: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model


def of_torchvision(name: str, **options: Any) -> nn.Module:
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(num_classes=10, **options)
    return model


def vit_of_torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10)


def swin_of_torchvision() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [2, 2], stochastic_depth_prob=0.0, num_classes=10)


def convnext_of_torchvision() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], num_classes=10)


def resnet_of_torchvision() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


def vision(auto: str, output: str | int, config: str, **options: Any) -> nn.Module:
    return Takes(transformer(config, auto, options), ("pixel_values",), output)


SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}

CASES = (
    Case("timm ViT", partial(of_timm, "vit_tiny_patch16_224", **SMALL_VIT), image),
    Case("timm BEiT", partial(of_timm, "beit_base_patch16_224", **SMALL_VIT), image),
    Case("timm EVA", partial(of_timm, "eva02_tiny_patch14_224", **SMALL_VIT), image),
    Case(
        "timm Swin",
        partial(
            of_timm,
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=2,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
        ),
        image,
    ),
    Case("timm ConvNeXt", partial(of_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)), image),
    Case("timm ResNet", partial(of_timm, "resnet10t", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)), image),
    Case("torchvision ViT", vit_of_torchvision, image),
    Case("torchvision Swin", swin_of_torchvision, image),
    Case("torchvision ConvNeXt", convnext_of_torchvision, image),
    Case("torchvision ResNet", resnet_of_torchvision, image),
    Case(
        "SegFormer",
        partial(
            vision,
            "AutoModelForSemanticSegmentation",
            "logits",
            "SegformerConfig",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=32,
            hidden_dropout_prob=0.0,
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
        ),
        image,
    ),
    Case(
        "SAM",
        partial(
            vision,
            "AutoModel",
            0,
            "SamVisionConfig",
            **VISION,
            mlp_dim=64,
            output_channels=16,
            window_size=2,
            global_attn_indexes=[1],
        ),
        image,
    ),
    Case("CLIP", partial(vision, "AutoModel", 0, "CLIPVisionConfig", **VISION), image),
)
