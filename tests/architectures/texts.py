"""Language models of transformers. `pipelined_models` has others, whose shares are asked for there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from architectures.case import VOCABULARY, Case, Takes, tokens, transformer

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


CASES = (
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
