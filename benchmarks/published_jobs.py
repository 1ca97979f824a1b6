"""`zbpipe estimate` against published speeds of whole jobs: `published_jobs.csv`, one row for each job.

`published.py` runs it. The jobs are built from the widths of their models, without torch. Rows with `kept_back` were
used for no figure of `zbpipe.estimation.devices`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from zbpipe.costs.transformer import Block, Checkpointing
from zbpipe.estimation.estimate import estimate
from zbpipe.estimation.workload import Degrees, LayerWork, Workload
from zbpipe.schedule.ir import COMPUTATIONS, OpKind

ROWS = Path(__file__).parent / "published_jobs.csv"
RESULTS = Path(__file__).parent / "results" / "what-hardware-says-of-estimates.csv"


@dataclass(frozen=True)
class Model:
    """A decoder."""

    block: Block
    blocks: int
    vocabulary: int


def _model(dim: int, keys: int, hidden: int, blocks: int, vocabulary: int) -> Model:
    """`keys` is the width of the keys of all heads."""
    return Model(Block(dim, dim, 2 * keys, hidden), blocks, vocabulary)


def _gpt(dim: int, blocks: int, vocabulary: int, keys: int | None = None) -> Model:
    """Two products of width 4d in the feed-forward layer have the operations of three of 8/3 d."""
    return _model(dim, keys or dim, 8 * dim // 3, blocks, vocabulary)


MODELS = {
    "Llama 2 7B": _model(4096, 4096, 11008, 32, 32000),
    "Llama 2 13B": _model(5120, 5120, 13824, 40, 32000),
    "Llama 2 34B": _model(8192, 1024, 22016, 48, 32000),
    "Llama 2 70B": _model(8192, 1024, 28672, 80, 32000),
    "Llama 3 8B": _model(4096, 1024, 14336, 32, 128256),
    "Llama 3 70B": _model(8192, 1024, 28672, 80, 128256),
    "Llama 3 405B": _model(16384, 1024, 53248, 126, 128256),
    "MPT 7B": _gpt(4096, 32, 50432),
    "MPT 13B": _gpt(5120, 40, 50432),
    "MPT 30B": _gpt(7168, 48, 50432),
    "MPT 70B": _gpt(8192, 80, 50432),
    "GPT 175B": _gpt(12288, 96, 50257),
    "Nemotron 340B": _gpt(18432, 96, 256000, keys=1536),
}
_AGAIN = {Checkpointing.NONE: 0, Checkpointing.SELECTIVE: 2, Checkpointing.FULL: 4}
"""Collectives of tensor parallelism that I repeats."""


@dataclass(frozen=True)
class Job:
    """A published job and its speed."""

    id: str
    source: str
    model: str
    device: str
    gpus: int
    p: int
    tp: int
    cp: int
    v: int
    m: int
    microbatch: int
    """Sequences at a time."""
    seq: int
    checkpointing: str
    published: float
    """Tokens per second of each GPU."""
    kept_back: bool
    note: str


def read_jobs() -> list[Job]:
    """All rows."""
    with ROWS.open(newline="") as lines:
        return [_job(cells) for cells in csv.DictReader(lines)]


def _job(cells: dict[str, Any]) -> Job:
    whole = {name: int(cells[name]) for name in ("gpus", "p", "tp", "cp", "v", "m", "microbatch", "seq")}
    others = {"published": float(cells["published"]), "kept_back": bool(cells["kept_back"])}
    return Job(**{**cells, **whole, **others})


def workload(job: Job) -> Workload:
    """The job's work. GPUs of context parallelism share each sequence, and the shards of FSDP."""
    model, how = MODELS[job.model], Checkpointing(job.checkpointing)
    block, has_pipeline = model.block, job.p > 1
    # Without a pipeline the estimate chooses how many sequences run at a time.
    tokens = job.seq * (job.microbatch if has_pipeline else 1) // job.cp
    head = 2.0 * block.dim * model.vocabulary * tokens
    logits = float(tokens * model.vocabulary) / job.tp
    first = LayerWork(("tok_embeddings",), 0, 0, 0, block.dim * model.vocabulary, 0, 0)
    last = LayerWork(
        *(("norm", "output"), head, head, head, block.dim * model.vocabulary, 6 * logits, 2 * logits),
        working=((OpKind.F, 4 * logits), (OpKind.I, 8 * logits), (OpKind.B, 8 * logits)),
        transfers=(1, 1),
    )
    products = 2.0 * (block.parameters - 2 * block.dim) * tokens
    attention = 2.0 * job.seq * block.queries * tokens  # causal
    again = {
        Checkpointing.NONE: 0.0,
        Checkpointing.SELECTIVE: 2.0 * block.dim * (block.queries + block.hidden) * tokens,
        Checkpointing.FULL: products + attention,
    }[how]
    middle = LayerWork(
        ("layers.0",),
        products + attention,
        products + 2.5 * attention + again,
        products,
        block.parameters,
        2.0 * tokens * block.kept_by_f(how, job.tp),
        2.0 * tokens * block.kept_by_i(job.tp),
        tuple((kind, 2.0 * tokens * max(block.working(how, kind, job.tp), 0)) for kind in COMPUTATIONS),
        (4, 4 + _AGAIN[how]),
    )
    layers = (first, *(replace(middle, modules=(f"layers.{number}",)) for number in range(model.blocks)), last)
    return Workload(
        job.id,
        layers,
        Degrees(job.p, job.tp, job.gpus // (job.p * job.tp)),
        job.m if has_pipeline else job.m * job.microbatch,
        tokens,
        message_bytes=2.0 * tokens * block.dim / job.tp,
        operations=3.0 * sum(layer.f for layer in layers) / tokens,
        words="",
        checkpointing=how,
    )


@dataclass(frozen=True)
class Speed:
    """Estimated tokens per second of each GPU."""

    likely: float
    least: float
    most: float

    def error(self, job: Job) -> float:
        return self.likely / job.published - 1

    def includes(self, job: Job) -> bool:
        return self.least <= job.published <= self.most


def predict(job: Job) -> Speed:
    """The estimate of the job's own schedule: interleaved, or FSDP without a pipeline."""
    names = ["Interleaved1F1B"] if job.p > 1 else []
    found = estimate(workload(job), job.device, only=names, stages_per_rank=(job.v,), plans=False)
    step = found.on_these_degrees or next(each for each in found.steps if (each.timeline is None) == (job.p == 1))
    if job.p > 1 and step.timeline is None:
        raise ValueError(f"no estimate of {job.id}: {found.left_out}")
    assert step.range is not None, "the device has a range"
    tokens = step.tokens_per_second * step.seconds
    return Speed(step.tokens_per_second, tokens / step.range[1], tokens / step.range[0])


def summary(found: Iterable[tuple[Job, Speed]]) -> list[list[str]]:
    """Errors by side and use, in percent: number of rows, bias, mean error, and rows within the range."""
    rows = list(found)
    lines = []
    for has_pipeline in (False, True):
        for kept_back in (False, True):
            some = [each for each in rows if (each[0].p > 1, each[0].kept_back) == (has_pipeline, kept_back)]
            errors = [100 * speed.error(job) for job, speed in some]
            inside = sum(speed.includes(job) for job, speed in some)
            name = "pipeline" if has_pipeline else "FSDP"
            words = (name, "kept back" if kept_back else "used", str(len(some)))
            lines.append([*words, f"{fmean(errors):+.1f} %", f"{fmean(map(abs, errors)):.1f} %", f"{inside}"])
    return lines


def write_results(found: Iterable[tuple[Job, Speed]]) -> None:
    """Write a line for each job."""
    heads = (
        "id",
        "source",
        "model",
        "device",
        "gpus",
        "p",
        "published",
        "predicted",
        "least",
        "most",
        "error",
        "kept back",
    )
    with RESULTS.open("w", newline="") as lines:
        out = csv.writer(lines, lineterminator="\n")
        out.writerow((*heads, "note"))
        for job, speed in found:
            numbers = (f"{each:.4g}" for each in (job.published, speed.likely, speed.least, speed.most))
            use = "yes" if job.kept_back else ""
            start = (job.id, job.source, job.model, job.device, job.gpus, job.p)
            out.writerow((*start, *numbers, f"{speed.error(job):+.3f}", use, job.note))
