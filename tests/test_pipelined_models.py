"""`zbpipe.pipeline` on models of transformers: the losses and gradients of the model in one piece."""

import difflib
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import architectures
import published_jobs
import pytest
import torch
import torch.distributed as dist
from architectures import EXPERTS, GPT, LATENT, LLAMA_4, QWEN3_NEXT, RWKV, SMALL, T5, VOCABULARY, XLNET, transformer
from click.testing import CliRunner
from commands import process
from data import has_words, refusals
from ranks import run_ranks
from searching import searching_little
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zbpipe
from zbpipe import cli, estimate
from zbpipe.costs.transformer import Checkpointing
from zbpipe.frameworks.layer_work import products
from zbpipe.frameworks.whole_model import anatomy, counting
from zbpipe.frameworks.whole_model.counting import read_workload
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.split.stage import find_weight_work

for library in ("transformers", "peft"):
    pytest.importorskip(library)

pytestmark = pytest.mark.timeout(1800)

SAMPLES, LENGTH, MICROBATCHES, STEPS = 8, 8, 4, 2
FLAT = ((5, 3), (7,), (2, 6, 1), (9,), (4, 4))
"""Lengths of the samples of each microbatch, in one row without padding."""
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
    name: str
    schedule: str
    ranks: int
    how: str = ""
    """What else is turned on: "LoRA", "checkpointing", "packed", "compiled", "FSDP2", "accumulated",
    "lengths" that change, "flat" batches without padding, or "saved" at the end."""

    def __str__(self) -> str:
        return ", ".join(map(str, filter(None, (self.name, self.schedule, f"p={self.ranks}", self.how))))


class Outcome(NamedTuple):
    losses: float
    """Largest relative error of a loss, or of the norm of all gradients."""
    gradients: float
    share: float


def build(name: str, ranks: int) -> nn.Module:
    config, options = ARCHITECTURES[name]
    blocks = dict.fromkeys(("num_hidden_layers", "n_layer"), 2 * ranks)
    options = dict(options)
    more = {key: options.pop(key) for key in ("attn_implementation",) if key in options}
    torch.manual_seed(0)
    return transformer(config, "AutoModelForCausalLM", options | blocks, **more)


def batch(how: str, length: int) -> dict[str, Tensor]:
    """With padding, and microbatches of different numbers of labels; or two sequences packed into each row."""
    generator = torch.Generator().manual_seed(1)
    if how == "flat":
        positions = torch.cat([torch.arange(each) for samples in FLAT for each in samples])[None]
        ids = torch.randint(1, VOCABULARY, positions.shape, generator=generator)
        return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
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
    torch.compiler.reset()
    model = build(job.name, job.ranks)
    model = with_adapters(model) if job.how == "LoRA" else model
    plain = deepcopy(model)
    pipe = pipelined(job, model, mesh)
    trained = [each for each in plain.parameters() if each.requires_grad]
    optimizers = optim.SGD(trained, lr=0.5), optim.SGD(pipe.parameters(), lr=0.5)
    losses = gradients = 0.0
    for step in range(STEPS):
        data: Any = batch(job.how, LENGTH - step if job.how == "lengths" else LENGTH)
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
    if job.how == "flat":
        flat: Tensor = pipe.step(**data, microbatches=[*map(sum, FLAT)])
        return flat
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
    work = [find_weight_work(stage) for stage in pipelining.stages_of(pipe.schedule)]
    flops = sum((torch.tensor([each.share, 1]) * each.flops for each in work if each is not None), torch.zeros(2))
    dist.all_reduce(flops, group=pipelining.stages_of(pipe.schedule)[0].group)
    return float(flops[0] / flops[1]) if flops[1] else 1.0


@searching_little()  # else each rank searches for its plan for seconds
def train_all(jobs: Sequence[Job], folder: Path) -> dict[str, Outcome | str]:
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


TOLERANCE = 1e-5
"""Both run in float32, and add the same numbers in another order."""
SHARE = 0.95
SCHEDULES = ("ZBV", "ZB", "ZBH1", "plan")

EVERYWHERE = ("Llama", "GPT-2, tied")
"""Architectures that run with every schedule on two and four ranks; each of the others has one of these."""


WITH_MORE = {
    "LoRA": ("Llama", "GPT-2, tied", "Mixtral"),
    "checkpointing": ("Llama, tied", "GPT-2", "Mixtral", "Gemma 3"),
    "packed": ("Llama", "Gemma 3", "Llama, eager attention"),
    "compiled": ("Llama",),
    "FSDP2": ("Llama, tied", "GPT-OSS", "Llama, tied", "GPT-2, tied"),
    "accumulated": ("Llama", "Llama, tied", "Llama, tied", "GPT-2, tied"),
    "lengths": ("Llama", "GPT-2, tied", "Mamba 2"),
    "flat": ("Llama", "Qwen3", "Llama, tied"),
    "saved": ("Llama, tied", "Qwen3-MoE", "GPT-2, tied", "Mistral"),
}
JOBS = [Job(name, *each) for name in EVERYWHERE for each in product(SCHEDULES, (2, 4))]
JOBS += [
    Job(name, SCHEDULES[number // 2 % len(SCHEDULES)], 2 + number % 2 * 2)
    for number, name in enumerate(ARCHITECTURES)
    if name not in EVERYWHERE
]
JOBS += [
    Job(name, SCHEDULES[number % len(SCHEDULES)], 2, how)
    for how, names in WITH_MORE.items()
    for number, name in enumerate(names)
]
ON_FOUR = [job for job in JOBS if job.ranks == 4 or job.how == "FSDP2"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome | str]]:
    folder = tmp_path_factory.mktemp("saved")
    found: dict[str, list[Outcome | str]] = {}
    for ranks, some in ((2, [job for job in JOBS if job not in ON_FOUR]), (4, ON_FOUR)):
        per_rank = run_ranks(ranks, train_all, some, folder, timeout=900)
        found |= {str(job): [on_rank[str(job)] for on_rank in per_rank] for job in some}
    return found


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_it_trains_as_in_one_piece(outcomes: dict[str, list[Outcome | str]], job: Job) -> None:
    for outcome in outcomes[str(job)]:
        assert isinstance(outcome, Outcome), outcome
        assert outcome.losses < TOLERANCE
        assert outcome.gradients < TOLERANCE
        assert outcome.share >= SHARE


GEMMA_3N = SMALL | {
    **{"head_dim": 8, "vocab_size_per_layer_input": 48, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    **{"layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4, "activation_sparsity_pattern": None},
}
ZAMBA_2 = SMALL | {
    **{"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "mamba_ngroups": 1, "n_mamba_heads": 4},
    **{"mamba_headdim": 16, "mamba_d_state": 8, "num_mem_blocks": 1, "num_key_value_heads": 4},
}


def causal(config: str, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    return partial(transformer, config, "AutoModelForCausalLM", options)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "T5": (partial(transformer, "T5Config", "AutoModelForSeq2SeqLM", T5), "has an encoder and a decoder"),
    "Gemma 3n": (causal("Gemma3nTextConfig", GEMMA_3N), "do not map"),
    "Zamba 2": (causal("Zamba2Config", ZAMBA_2), "take a second tensor that needs a gradient"),
    "a loss over routers": (
        causal("MixtralConfig", EXPERTS | {"num_local_experts": 4, "output_router_logits": True}),
        "a loss over the routers of all blocks",
    ),
    "OPT with layer drop": (causal("OPTConfig", SMALL | {"layerdrop": 0.5}), "skips blocks at random"),
    "XLNet": (causal("XLNetConfig", XLNET), "around its blocks"),
    "too few blocks": (causal("LlamaConfig", SMALL | {"num_hidden_layers": 1}), "has one block"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("one_rank")
def test_it_says_why_it_cannot_cut_a_model(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        zbpipe.pipeline(build(), schedule="ZBV", microbatches=2)


EXAMPLES = Path(__file__).parent.parent / "examples" / "transformers"


def test_the_example_differs_by_few_lines() -> None:
    plain, pipelined = ((EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("plain", "pipelined"))
    code = [line for line in difflib.ndiff(plain, pipelined) if line[:2] == "+ " and "torchrun" not in line]
    assert len([line for line in code if line[2:].strip()]) <= 10


def test_the_example_trains_as_the_plain_script(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    lines = [" ".join(WORDS[number % 7 :][: 3 + number % 5]) for number in range(40)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = {name: run_example(tmp_path, name, start) for name, start in (("plain", []), ("pipelined", torchrun))}
    losses = {name: re.findall(r"loss ([\d.]+)$", text, re.MULTILINE) for name, text in printed.items()}
    assert len(losses["plain"]) == 4
    assert list(map(float, losses["pipelined"])) == pytest.approx(list(map(float, losses["plain"])), abs=2e-5)
    packed = re.findall(r"loss ([\d.]+)$", run_example(tmp_path, "packed", torchrun), re.MULTILINE)
    assert list(map(float, packed)) == pytest.approx(list(map(float, losses["plain"])), abs=2e-5)
    assert (tmp_path / "plain" / "model.safetensors").exists()
    assert (tmp_path / "pipelined" / "model.safetensors").exists()


def run_example(folder: Path, name: str, start: list[str]) -> str:
    script = [architectures.__file__, str(EXAMPLES / f"{name}.py"), "model", "lines.txt", name]
    command = (sys.executable, *start, *script)
    return process(*command, folder=folder, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1").stdout


LLAMA_3_8B = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096},
    **{"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config.json of Llama 3 8B with these changes; None removes a field."""

    def write(**changes: Any) -> Path:
        fields = LLAMA_3_8B | changes
        file = tmp_path / "config.json"
        file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
        return file

    return write


@pytest.mark.parametrize("how", Checkpointing)
def test_a_config_is_estimated_as_the_same_model_of_a_published_job(
    how: Checkpointing, config: Callable[..., Path]
) -> None:
    """But transformers computes q, k and v apart, and its norms in several kernels. A recomputation is whole: W needs
    the input of the last product."""
    like = next(each for each in published_jobs.read_jobs() if each.id == "titan-8b-8")
    same = published_jobs.workload(replace(like, gpus=64, p=8, tp=2, v=1, m=32, microbatch=1, checkpointing=str(how)))
    found = read_workload(
        config(), counting.Job(gpus=64, pp=8, tp=2, batch=32, checkpointing=how, compiled=same.compiled)
    )
    last = 2 * 8192 * 4096 * 14336 * (how is Checkpointing.FULL)
    for one, other in zip(found.layers, same.layers, strict=True):
        for name in ("f", "w", "parameters", "attention", "traffic", "keys"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=0.01), (one.modules, name)
        assert one.i == pytest.approx(other.i + last * one.is_block, rel=0.03)
        assert one.waits == pytest.approx(other.waits, rel=0.07)
        assert one.activations == pytest.approx(other.activations, rel=0.3)
    assert found.message_bytes == same.message_bytes
    assert found.operations == pytest.approx(57.9e9, rel=0.01), "as TorchTitan counts them"
    advice, expected = (estimate(each, "H200", only=[]).advice for each in (found, same))
    assert advice
    assert expected
    assert advice.sentence.split(":")[0] == expected.sentence.split(":")[0]
    assert advice.step.seconds == pytest.approx(expected.step.seconds, rel=0.06)
    for gpus, size in ((8, 8), (64, 4 + 6 / 8)):  # as docs/models.md says, and shared by FSDP
        lean = read_workload(config(), counting.Job(gpus=gpus, pp=8, checkpointing=how, dtype="bfloat16"))
        assert lean.parameter_bytes.total(lean.degrees.shards) == size
    assert found.on(replace(same.degrees, pipeline=4, fsdp=8)).layers[1] == found.layers[1]


COUNTED = [name for name in ARCHITECTURES if name != "RWKV"]  # it takes half a minute


@pytest.mark.parametrize("name", COUNTED)
def test_the_work_of_other_models(name: str) -> None:
    """Experts count as far as tokens visit them, but Llama 4 computes all; eager attention and scans are products."""
    options = dict(ARCHITECTURES[name][1])
    attention = options.pop("attn_implementation", None)
    model = transformer(ARCHITECTURES[name][0], "AutoModelForCausalLM", options)
    model.config._attn_implementation = attention
    found = read_workload(model.config, counting.Job(gpus=2, pp=2, seq_len=64, checkpointing=Checkpointing.NONE))
    _, blocks = anatomy.find_blocks(model)
    # torch 2.13 has no backward of attention on meta tensors if heads share keys and values.
    was_run = found.deferred is not None or torch.__version__ >= "2.14"
    more = 2.2 if name == "Llama 4" and was_run else 1.0
    for block, work in zip(blocks.children(), found.layers[1:-1], strict=True):
        expected = more * 2 * 64 * products(block)
        assert work.w == pytest.approx(expected, rel=0.06)
        assert work.f - work.attention[0] == pytest.approx(expected, rel=0.06) or work.attention[0] == 0
        assert work.activations > work.parameters
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    extra = model.get_output_embeddings().weight.numel() if tied else 0
    assert found.parameters == sum(each.numel() for each in model.parameters()) + extra
    assert not was_run or found.deferred == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize(("given", "words"), refusals("config.json"))
def test_a_config_that_cannot_be_estimated(given: str, words: str, config: Callable[..., Path]) -> None:
    changes = eval(f"dict({given})")
    result = CliRunner().invoke(
        cli.main, ["estimate", "--hf", str(config(**changes)), "--gpus", "8", "--device", "H100"]
    )
    assert result.exit_code == 2
    assert has_words(result.stderr.splitlines()[-1], words), result.stderr
