"""`zbpipe.pipeline` on models of transformers: the losses and gradients of the model in one piece.

F is a forward, I the backward for the input, W the backward for the weights. `make test-models` runs this in an
environment of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from pipelined_models import ARCHITECTURES, Job, Outcome, train_all
from ranks import run_ranks

for library in ("transformers", "peft"):
    pytest.importorskip(library)

pytestmark = pytest.mark.timeout(1800)

TOLERANCE = 1e-5
"""Both run in float32, and add the same numbers in another order."""
SHARE = 0.95
SCHEDULES = ("ZBV", "ZBVLean", "ZBH1", "plan")

EVERYWHERE = ("Llama", "GPT-2, tied")
"""Architectures that run with every schedule on two and four ranks; each of the others has two of these."""


def jobs() -> Iterator[Job]:
    for number, name in enumerate(ARCHITECTURES):
        for ranks in (2, 4):
            usual = SCHEDULES[(number + ranks // 2) % len(SCHEDULES)]
            yield from (Job(name, each, ranks) for each in (SCHEDULES if name in EVERYWHERE else [usual]))
    for how, names in WITH_MORE.items():
        for number, name in enumerate(names):
            yield Job(name, SCHEDULES[number % len(SCHEDULES)], 2, how)


WITH_MORE = {
    "LoRA": ("Llama", "GPT-2, tied", "Mixtral"),
    "checkpointing": ("Llama, tied", "GPT-2", "Mixtral", "Gemma 3"),
    "packed": ("Llama", "Gemma 3", "Llama, eager attention"),
    "compiled": ("Llama",),
    "FSDP2": ("Llama, tied", "GPT-OSS", "Llama, tied", "GPT-2, tied"),
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
