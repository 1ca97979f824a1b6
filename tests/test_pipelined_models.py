"""`zbpipe.pipeline` on models of transformers: the losses and gradients of the model in one piece.

F is a forward, I the backward for the input, W the backward for the weights. `make test-models` runs this in an
environment of its own.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pipelined_models
import pytest
from architectures.case import transformer
from architectures.texts import EXPERTS, SMALL, T5, XLNET
from pipelined_models import ARCHITECTURES, WORDS, Job, Outcome, train_all, write_model
from ranks import run_ranks
from torch import nn

import zbpipe

for library in ("transformers", "peft"):
    pytest.importorskip(library)

pytestmark = pytest.mark.timeout(1800)

TOLERANCE = 1e-5
"""Both run in float32, and add the same numbers in another order."""
SHARE = 0.95
SCHEDULES = ("ZBV", "ZB", "ZBH1", "plan")

EVERYWHERE = ("Llama", "GPT-2, tied")
"""Architectures that run with every schedule on two and four ranks; each of the others has one of these."""


def jobs() -> Iterator[Job]:
    for number, name in enumerate(ARCHITECTURES):
        if name in EVERYWHERE:
            yield from (Job(name, *each) for each in product(SCHEDULES, (2, 4)))
        else:
            yield Job(name, SCHEDULES[number // 2 % len(SCHEDULES)], 2 + number % 2 * 2)
    for how, names in WITH_MORE.items():
        for number, name in enumerate(names):
            yield Job(name, SCHEDULES[number % len(SCHEDULES)], 2, how)


WITH_MORE = {
    "LoRA": ("Llama", "GPT-2, tied", "Mixtral"),
    "checkpointing": ("Llama, tied", "GPT-2", "Mixtral", "Gemma 3"),
    "packed": ("Llama", "Gemma 3", "Llama, eager attention"),
    "compiled": ("Llama",),
    "FSDP2": ("Llama, tied", "GPT-OSS", "Llama, tied", "GPT-2, tied"),
    "accumulated": ("Llama", "Llama, tied", "Llama, tied", "GPT-2, tied"),
    "lengths": ("Llama", "GPT-2, tied", "Mamba 2"),
    "saved": ("Llama, tied", "Qwen3-MoE", "GPT-2, tied", "Mistral"),
}
JOBS = list(dict.fromkeys(jobs()))
ON_FOUR = [job for job in JOBS if job.ranks == 4 or job.how == "FSDP2"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome | str]]:
    """What each rank has seen, by job. One group of processes runs all jobs of a number of ranks."""
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


def test_each_schedule_runs_on_two_and_four_ranks() -> None:
    assert {(job.schedule, job.ranks) for job in JOBS} == set(product(SCHEDULES, (2, 4)))
    assert len({job.name for job in JOBS}) > 20


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
    "T5": (
        partial(transformer, "T5Config", "AutoModelForSeq2SeqLM", T5),
        "has an encoder and a decoder",
    ),
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
    assert (tmp_path / "plain" / "model.safetensors").exists()
    assert (tmp_path / "pipelined" / "model.safetensors").exists()


def run_example(folder: Path, name: str, start: list[str]) -> str:
    """What the script prints."""
    script = [pipelined_models.__file__, str(EXAMPLES / f"{name}.py"), "model", "lines.txt", name]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *start, *script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
