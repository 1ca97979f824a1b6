"""Models of transformers in one piece and pipelined, side by side on each rank."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from architectures.case import VOCABULARY, transformer
from architectures.texts import EXPERTS, GPT, LATENT, LLAMA_4, QWEN3_NEXT, RWKV, SMALL
from searching import searching_little
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zbpipe
from zbpipe.runtime._torch import hooks
from zbpipe.runtime.split.stage import find_weight_work

SAMPLES, LENGTH, MICROBATCHES, STEPS = 8, 8, 4, 2
MAX_NORM = 0.5
SAVED = ("saved", "LoRA", "FSDP2")
"""Trainings whose model is saved, loaded in one piece, and pipelined again."""
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

ARCHITECTURES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("LlamaConfig", SMALL),
    "Llama, tied": ("LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "Llama, eager attention": ("LlamaConfig", SMALL | {"attn_implementation": "eager"}),
    "Mistral": ("MistralConfig", SMALL | {"sliding_window": 4}),
    "Qwen2": ("Qwen2Config", SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4}),
    "Qwen3": ("Qwen3Config", SMALL | {"head_dim": 8}),
    "Gemma": ("GemmaConfig", SMALL | {"head_dim": 8, "tie_word_embeddings": True}),
    "Gemma 2": ("Gemma2Config", SMALL | {"head_dim": 8, "sliding_window": 4}),
    "Gemma 3": ("Gemma3TextConfig", SMALL | {"head_dim": 8, "sliding_window": 4, "tie_word_embeddings": True}),
    "Phi 3": ("Phi3Config", SMALL | NO_DROPOUT | {"embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "GPT-2": ("GPT2Config", GPT | {"tie_word_embeddings": False}),
    "GPT-2, tied": ("GPT2Config", GPT),
    "GPT-NeoX": ("GPTNeoXConfig", SMALL | NO_DROPOUT),
    "Falcon": ("FalconConfig", SMALL | NO_DROPOUT | {"alibi": True}),
    "OPT": (
        "OPTConfig",
        SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0, "do_layer_norm_before": False},
    ),
    "BLOOM": ("BloomConfig", SMALL | NO_DROPOUT | {"n_head": 4}),
    "OLMo 2": ("Olmo2Config", SMALL),
    "GLM4": ("Glm4Config", SMALL | {"head_dim": 8}),
    "Granite": ("GraniteConfig", SMALL | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "Cohere 2": ("Cohere2Config", SMALL | {"head_dim": 8, "sliding_window": 4, "tie_word_embeddings": True}),
    "StarCoder 2": (
        "Starcoder2Config",
        SMALL | {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "Mixtral": ("MixtralConfig", EXPERTS | {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 8}),
    "DeepSeek V3": ("DeepseekV3Config", EXPERTS | LATENT),
    "GPT-OSS": ("GptOssConfig", EXPERTS | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4}),
    "Qwen3-Next": ("Qwen3NextConfig", EXPERTS | QWEN3_NEXT),
    "Llama 4": ("Llama4TextConfig", EXPERTS | LLAMA_4),
    "RWKV": ("RwkvConfig", RWKV),
    "Mamba 2": (
        "Mamba2Config",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_heads": 4, "head_dim": 16}
        | {"n_groups": 2, "chunk_size": 4},
    ),
}


class Job(NamedTuple):
    """One training."""

    name: str
    """The architecture."""
    schedule: str
    ranks: int
    how: str = ""
    """What else is turned on: "LoRA", "checkpointing", "packed", "compiled", "FSDP2", "accumulated",
    "lengths" that change, or "saved" at the end."""

    def __str__(self) -> str:
        return ", ".join(map(str, filter(None, (self.name, self.schedule, f"p={self.ranks}", self.how))))


class Outcome(NamedTuple):
    """What one rank has seen."""

    losses: float
    """Largest relative error of a loss, or of the norm of all gradients."""
    gradients: float
    """Largest relative error of a gradient in any step."""
    share: float
    """Share of the weight gradients' work that is deferred to W."""


def build(name: str, ranks: int) -> nn.Module:
    """With a block for each stage of a V."""
    config, options = ARCHITECTURES[name]
    blocks = dict.fromkeys(("num_hidden_layers", "n_layer"), 2 * ranks)
    options = dict(options)
    more = {key: options.pop(key) for key in ("attn_implementation",) if key in options}
    torch.manual_seed(0)
    return transformer(config, "AutoModelForCausalLM", options | blocks, **more)


def batch(how: str, length: int) -> dict[str, Tensor]:
    """With padding, and microbatches of different numbers of labels; or two sequences packed into each row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (SAMPLES, length), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    if how == "packed":
        labels[:, length // 2] = -100
        positions = (torch.arange(length) % (length // 2)).expand(SAMPLES, -1)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[6, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def schedule_called(name: str, ranks: int) -> Any:
    return zbpipe.plan(ranks, MICROBATCHES, (1.0, 1.2, 0.8), placements=["v"]) if name == "plan" else name


ADAPTED = {"llama": "all-linear", "gpt2": ["c_attn", "c_proj", "c_fc"], "mixtral": ["q_proj", "v_proj"]}
"""Names of the layers with an adapter."""


def with_adapters(model: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=ADAPTED[model.config.model_type], lora_alpha=8)
    adapted: nn.Module = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if "lora_B" in name:  # zeros, behind which gradients are zero, too
                each.normal_(std=0.1, generator=generator)
    return adapted


def train(job: Job, mesh: DeviceMesh, folder: Path) -> Outcome:
    """Train on this rank's part, and the model in one piece beside it."""
    torch.compiler.reset()
    model = build(job.name, job.ranks)
    model = with_adapters(model) if job.how == "LoRA" else model
    plain = deepcopy(model)
    pipe = pipelined(job, model, mesh)
    trained = [each for each in plain.parameters() if each.requires_grad]
    optimizers = optim.SGD(trained, lr=0.5), optim.SGD(pipe.parameters(), lr=0.5)
    losses = gradients = 0.0
    for step in range(STEPS):
        data = batch(job.how, LENGTH - step if job.how == "lengths" else LENGTH)
        expected = plain(**data, use_cache=False).loss
        expected.backward()
        losses = max(losses, error(run_step(job, pipe, data, mesh["dp"]), expected))
        gradients = max(gradients, error_of_gradients(plain, pipe))
        norms = pipe.clip_grad_norm_(MAX_NORM), nn.utils.clip_grad_norm_(trained, MAX_NORM)
        losses = max(losses, error(*norms))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    share = share_of(pipe)
    if job.how in ("checkpointing", "saved"):
        with torch.no_grad():
            losses = max(losses, error(pipe.evaluate(**data), plain.eval()(**data, use_cache=False).loss))
        plain.train()
        assert all(stage.training for stage in pipe.stages)
    if job.how in SAVED:
        pipe.save_pretrained(folder)
        loaded = load(job, folder).train()
        with torch.no_grad():
            losses = max(losses, error(loaded(**data, use_cache=False).logits, plain(**data, use_cache=False).logits))
        again = zbpipe.pipeline(loaded, schedule="ZBV", microbatches=MICROBATCHES, mesh=mesh["pp"])
        plain(**data, use_cache=False).loss.backward()
        again.step(**data)
        gradients = max(gradients, error_of_gradients(plain, again))
    return Outcome(losses, gradients, share)


def run_step(job: Job, pipe: Any, data: dict[str, Tensor], replicas: DeviceMesh) -> Tensor:
    """The loss of the batch."""
    halves: list[dict[str, Any]] = [{key: each.chunk(2)[half] for key, each in data.items()} for half in range(2)]
    number = (data["labels"][:, 1:] != -100).sum()
    if job.how == "accumulated":
        first = pipe.step(**halves[0], num_items_in_batch=number)
        with pytest.raises(ValueError, match="microbatches"):
            pipe.step(**{key: each[1:] for key, each in data.items()})
        second: Tensor = pipe.step(**halves[1], num_items_in_batch=number)
        return first + second
    if job.how == "FSDP2":  # which averages the gradients of the replicas
        loss: Tensor = pipe.step(**halves[replicas.get_local_rank()], num_items_in_batch=number / 2)
        dist.all_reduce(loss, group=replicas.get_group())
        return loss / 2
    found: Tensor = pipe.step(**data)
    return found


def pipelined(job: Job, model: Any, mesh: DeviceMesh) -> Any:
    if job.how == "checkpointing":
        model.gradient_checkpointing_enable()
    schedule = schedule_called(job.schedule, job.ranks)
    pipe = zbpipe.pipeline(model, schedule=schedule, microbatches=MICROBATCHES, mesh=mesh["pp"])
    kept = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.is_meta}
    assert kept == {name for stage in pipe.stages for name, _ in stage.model.named_parameters(remove_duplicate=False)}
    for stage in pipe.stages:
        for block in stage.blocks:
            if job.how == "compiled":
                block.compile(backend="aot_eager")
            if job.how == "FSDP2":
                fully_shard(block, mesh=mesh["dp"])
        if job.how == "FSDP2":
            fully_shard(stage, mesh=mesh["dp"])
    return pipe


def load(job: Job, folder: Path) -> nn.Module:
    """The model in one piece that the pipeline has saved."""
    from transformers import AutoModelForCausalLM

    if job.how != "LoRA":
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
        return loaded
    from peft import PeftModel

    adapted: nn.Module = PeftModel.from_pretrained(build(job.name, job.ranks), folder, is_trainable=True)
    return adapted


@torch.no_grad()
def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def share_of(pipe: Any) -> float:
    """Of all ranks' stages; 1 if no stage has an I, as in a lean schedule of few microbatches with checkpointing."""
    work = [find_weight_work(stage) for stage in hooks.stages_of(pipe.schedule)]
    flops = sum((torch.tensor([each.share, 1]) * each.flops for each in work if each is not None), torch.zeros(2))
    dist.all_reduce(flops, group=hooks.stages_of(pipe.schedule)[0].group)
    return float(flops[0] / flops[1]) if flops[1] else 1.0


@searching_little()  # else each rank searches for its plan for seconds
def train_all(jobs: Sequence[Job], folder: Path) -> dict[str, Outcome | str]:
    """Outcomes on this rank, or what a job raised."""
    world = dist.get_world_size()
    meshes = {
        ranks: init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=("dp", "pp"))
        for ranks in {job.ranks for job in jobs}
    }
    found: dict[str, Outcome | str] = {}
    for number, job in enumerate(jobs):
        try:
            found[str(job)] = train(job, meshes[job.ranks], folder / f"{world}-{number}")
        except Exception:
            found[str(job)] = traceback.format_exc()
    return found


def error_of_gradients(plain: nn.Module, pipe: Any) -> float:
    """The largest relative error; small gradients are compared with a hundredth of the largest one."""
    expected = {name: each.grad for name, each in plain.named_parameters(remove_duplicate=False) if each.requires_grad}
    found = {name: each.grad for name, each in pipe.named_parameters() if each.requires_grad}
    largest = max(float(each.norm()) for each in expected.values())
    errors = [0.0]
    for name, gradient in found.items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        errors.append(float((whole - expected[name]).norm() / (expected[name].norm() + 1e-2 * largest)))
    return max(errors)


WORDS = ["all", "models", "are", "wrong", "but", "some", "are", "useful", "and", "few", "of", "them", "are", "small"]


def write_model(folder: Path) -> None:
    """A model and its tokenizer, as the library saves them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    model: Any = build("Llama", 2)
    model.save_pretrained(folder)
    known = {word: number for number, word in enumerate(dict.fromkeys(["<pad>", "<unk>", *WORDS]))}
    tokenizer = Tokenizer(WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)


if __name__ == "__main__":  # runs a script, for which `architectures.case` has made torchvision importable
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
