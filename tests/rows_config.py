"""Configs for TorchTitan's `--module`: the demo's Llama job with debug models of TorchTitan that the demo lacks."""

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.hf_datasets.text_datasets import ChatDataLoader, HuggingFaceTextDataLoader
from torchtitan.models import deepseek_v3, gpt_oss, kimi_k2_7, llama3, muse_glimmer, qwen3
from torchtitan.models.kimi_k2_7 import vision_encoder as kimi_encoder
from torchtitan.models.muse_glimmer import vision_encoder
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from zbpipe.cli.demo.models03 import ByteTokenizer, llama3_python_stdlib

_LORA = LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wqkv", "wo", "w1", "w2", "w3"])
_FLOAT8 = Float8LinearConverter.Config(emulate=True, model_compile_enabled=False)


def llama3_8_blocks() -> Trainer.Config:
    return _demo_job(_with_blocks(8, llama3.model_registry("debugmodel")))


def llama3_16_blocks() -> Trainer.Config:
    """With a block for each of the stages of a V on eight ranks."""
    return _demo_job(_with_blocks(16, llama3.model_registry("debugmodel")))


def deepseek_v3_8_blocks() -> Trainer.Config:
    return _demo_job(_with_blocks(8, deepseek_v3.model_registry("debugmodel")))


def _with_blocks(number: int, spec: Any) -> Any:
    """A model with fewer blocks, or with copies of its last one."""
    layers = spec.model.layers
    layers[:] = [*layers[:number], *(deepcopy(layers[-1]) for _ in range(number - len(layers)))]
    return spec


def llama3_lora_chat() -> Trainer.Config:
    """Fine-tuned on conversations, which fill the sequences and do not see each other."""
    spec = llama3.model_registry("debugmodel", converters=[_LORA])
    for layer in spec.model.layers:
        layer.attention.inner_attention = DenseAttention.Config()
    config = _demo_job(spec)
    config.tokenizer = ChatTokenizer.Config()
    config.dataloader = ChatDataLoader.Config(
        dataset_path="text",
        load_dataset_kwargs={"data_files": ast.__file__, "split": "train"},
        sample_processor=_converse,
    )
    return config


def _converse(line: dict[str, str]) -> list[dict[str, str]]:
    text, middle = line["text"], len(line["text"]) // 2
    return [{"role": "user", "content": text[:middle]}, {"role": "assistant", "content": text[middle:] + "."}]


class ChatTokenizer(ByteTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(ByteTokenizer.Config):
        pass

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        return "".join(message["content"] for message in messages)


def llama3_float8() -> Trainer.Config:
    return _demo_job(llama3.model_registry("debugmodel", converters=[_FLOAT8]))


def llama3_float8_lora() -> Trainer.Config:
    return _demo_job(llama3.model_registry("debugmodel", converters=[_FLOAT8, _LORA]))


def gpt_oss_small() -> Trainer.Config:
    """With its attention sinks, and smaller experts, whose products are bfloat16 in any job."""
    spec = gpt_oss.model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 256
        layer.attention.inner_attention = DenseAttention.Config()
    return _demo_job(spec)


def qwen3_moe_small() -> Trainer.Config:
    """With two of its eight blocks, and smaller experts."""
    spec = _with_blocks(2, qwen3.model_registry("debugmodel_moe"))
    for layer in spec.model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 32
    return _demo_job(spec)


def muse_glimmer_images() -> Trainer.Config:
    vision_encoder.compiled_create_block_mask = create_block_mask
    spec = muse_glimmer.model_registry("debugmodel_mm")
    del spec.model.layers[4:]
    encoder = spec.model.vision_encoder
    encoder.block.attn.inner_attention = DenseAttention.Config()
    config = _demo_job(spec)
    config.optimizer = default_adamw(lr=0.1)  # the loss hardly falls otherwise
    config.dataloader = TextWithImages.Config(
        dataset=config.dataloader.dataset, patch_dim=3 * encoder.patch_temporal * encoder.patch_size**2
    )
    return config


def kimi_images() -> Trainer.Config:
    kimi_encoder.compiled_create_block_mask = create_block_mask
    spec = kimi_k2_7.model_registry("debugmodel")
    encoder = spec.model.vision_encoder
    encoder.block.attn.inner_attention = DenseAttention.Config()
    config = _demo_job(spec)
    config.dataloader = TextWithImages.Config(dataset=config.dataloader.dataset, patch_dim=3 * encoder.patch_size**2)
    return config


def _demo_job(spec: Any) -> Trainer.Config:
    config = llama3_python_stdlib()
    config.model_spec = spec
    return config


class TextWithImages(HuggingFaceTextDataLoader):  # type: ignore[misc]
    """The demo's text; the first tokens of each sequence are those of an image of four by four patches."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):  # type: ignore[misc]
        patch_dim: int

    SIDE, MERGED = 4, 2
    IMAGE_TOKEN = 300

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.patch_dim = config.patch_dim

    def __iter__(self) -> Iterator[Any]:
        for inputs, labels in super().__iter__():
            tokens = inputs["input"].clone()
            bytes_of_patches = tokens[:, : self.SIDE**2, None].float()
            tokens[:, : (self.SIDE // self.MERGED) ** 2] = self.IMAGE_TOKEN
            images = {
                "pixel_values": torch.sin(bytes_of_patches * torch.arange(1, 1 + self.patch_dim)),
                "grid_thw": torch.tensor([[1, self.SIDE, self.SIDE]] * len(tokens)),
                "special_tokens": {"image_id": self.IMAGE_TOKEN, "video_id": self.IMAGE_TOKEN},
            }
            yield inputs | images | {"input": tokens}, labels


class DenseAttention(Module):  # type: ignore[misc]
    """FlexAttention's results on the CPU, where it has no backward, by a mask with a value for each pair of tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803  (the names by which TorchTitan shards attention)
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: BlockMask | None = None,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **unused: Any,
    ) -> Tensor:
        """By tensors of (batch, tokens, heads, width of a head); without masks it is causal."""
        q = q_BLNH
        k, v = (each.repeat_interleave(q.shape[2] // each.shape[2], dim=2) for each in (k_BLNH, v_BLNH))
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        batch, _, queries, keys = scores.shape
        seen = (
            torch.ones(queries, keys, dtype=torch.bool).tril()
            if attention_masks is None
            else create_mask(attention_masks.mask_mod, batch, None, queries, keys, device="cpu")
        )
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        out = torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v)
        return out if out_transform is None else out_transform(out, scores.logsumexp(-1).transpose(1, 2))
