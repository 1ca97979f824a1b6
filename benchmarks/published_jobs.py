"""`zbpipe estimate` against published speeds of whole jobs: `published_jobs.csv`, one row for each job.

`published.py` runs it. The jobs are built from the widths of their models, without torch.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from zbpipe.costs.transformer import Block, Checkpointing
from zbpipe.estimation.devices import find
from zbpipe.estimation.estimate import estimate
from zbpipe.estimation.rates import Rates, rates
from zbpipe.estimation.workload import ASYNC_TENSOR, Degrees, LayerWork, Workload
from zbpipe.schedule.ir import COMPUTATIONS, OpKind

ROWS = Path(__file__).parent / "published_jobs.csv"
RESULTS = Path(__file__).parent / "results" / "what-hardware-says-of-estimates.csv"


@dataclass(frozen=True)
class Model:
    block: Block
    blocks: int
    vocabulary: int
    last: int
    """Number of weights in a block's last product."""
    weights: float
    """Number of weights in a block with which each token is multiplied."""
    attention: int
    """Width of the queries and of the values of all heads: their mean."""
    num_experts: int = 0
    in_experts: float = 0.0
    """Number of weights in all experts of a block."""
    visited: float = 0.0
    """Number of experts that compute each token."""
    heads: int = 0
    """Number of query heads, for attention that is not fused. 0 if no job needs it."""

    @property
    def in_visited(self) -> float:
        """Number of weights in the routed experts that compute a token."""
        return self.in_experts * self.visited / max(self.num_experts, 1)

    @property
    def parameters(self) -> float:
        """Number of weights in a block."""
        return self.weights + self.in_experts - self.in_visited + 2.0 * self.block.dim


def _model(dim: int, keys: int, hidden: int, blocks: int, vocabulary: int, queries: int | None = None) -> Model:
    """`keys` is the width of the keys of all heads."""
    block = Block(dim, queries or dim, 2 * keys, hidden)
    return Model(block, blocks, vocabulary, dim * hidden, block.parameters - 2.0 * dim, block.queries)


def _gpt(dim: int, blocks: int, vocabulary: int, keys: int | None = None) -> Model:
    """Two products of width 4d in the feed-forward layer have the operations of three of 8/3 d."""
    return replace(_model(dim, keys or dim, 8 * dim // 3, blocks, vocabulary), last=4 * dim * dim)


def _with_experts(model: Model, number: int, width: int, visited: int, share: float = 1.0) -> Model:
    """The model with this `share` of its blocks with experts, in all blocks alike. The block's width is of those that
    a token visits."""
    in_experts = share * number * 3 * model.block.dim * width
    return replace(model, num_experts=round(share * number), in_experts=in_experts, visited=visited * share)


_DEEPSEEK = Model(Block(7168, 24576, 40960, 18432), 61, 129280, 7168 * 18432, 585.3e6, 128 * 160, heads=128)
MODELS = {
    "Llama 2 7B": _model(4096, 4096, 11008, 32, 32000),
    "Llama 2 13B": _model(5120, 5120, 13824, 40, 32000),
    "Llama 2 34B": _model(8192, 1024, 22016, 48, 32000),
    "Llama 2 70B": _model(8192, 1024, 28672, 80, 32000),
    "Llama 3 8B": _model(4096, 1024, 14336, 32, 128256),
    "Llama 3 70B": _model(8192, 1024, 28672, 80, 128256),
    "Llama 3 405B": _model(16384, 1024, 53248, 126, 128256),
    "MPT 3B": _gpt(2560, 32, 50432),
    "MPT 7B": _gpt(4096, 32, 50432),
    "MPT 13B": _gpt(5120, 40, 50432),
    "MPT 30B": _gpt(7168, 48, 50432),
    "MPT 70B": _gpt(8192, 80, 50432),
    "GPT 5B": _gpt(4096, 24, 51200),
    "GPT 20B": _gpt(6144, 44, 51200),
    "GPT 22B": replace(_gpt(6144, 48, 51200), heads=64),
    "GPT 175B": replace(_gpt(12288, 96, 50257), heads=96),
    "GPT 530B": replace(_gpt(20480, 105, 51200), heads=128),
    "GPT 1T": replace(_gpt(25600, 128, 51200), heads=160),
    "Nemotron 8B": _gpt(4096, 32, 256000),
    "Nemotron 15B": _gpt(6144, 32, 256000, keys=1024),
    "Nemotron 22B": _gpt(6144, 40, 256000),
    "Nemotron 340B": _gpt(18432, 96, 256000, keys=1536),
    # A block with 8 of 256 experts and a shared one of width 2048; 128 heads of width 192 and values of width 128.
    "DeepSeek V3": _with_experts(_DEEPSEEK, 256, 2048, 8, 58 / 61),
    # Predicts a second token: one more block, and the head again.
    "DeepSeek V3, two tokens": _with_experts(
        replace(_DEEPSEEK, blocks=62, vocabulary=2 * 129280), 256, 2048, 8, 59 / 62
    ),
    # As DeepSeek V3, with 8 of 384 experts and half as many heads.
    "Kimi K2": _with_experts(
        Model(Block(7168, 12288, 20480, 18432), 61, 163840, 7168 * 18432, 500.2e6, 64 * 160), 384, 2048, 8, 60 / 61
    ),
    "Qwen 3 30B": _with_experts(_model(2048, 512, 8 * 768, 48, 151936, queries=4096), 128, 768, 8),
    "Qwen 3 235B": _with_experts(_model(4096, 512, 8 * 1536, 94, 151936, queries=8192), 128, 1536, 8),
    # Every second block attends to 128 tokens, which hardly counts.
    "GPT-OSS 120B": replace(
        _with_experts(_model(2880, 512, 4 * 2880, 36, 201088, queries=4096), 128, 2880, 4), attention=2048
    ),
    "GPT-OSS 20B": replace(
        _with_experts(_model(2880, 512, 4 * 2880, 24, 201088, queries=4096), 32, 2880, 4), attention=2048
    ),
    # Every second block has experts, one of which each token visits, and a shared one of the same width.
    "Llama 4 Maverick": _with_experts(_model(5120, 1024, 16384, 48, 202048), 128, 8192, 1, 1 / 2),
    "Llama 3 405B, 8 blocks": _model(16384, 1024, 53248, 8, 128256),
    "Llama 3 405B, 62 blocks": _model(16384, 1024, 53248, 62, 128256),
}
_PROJECTIONS = 1536 * 24576 + 512 * 32768
"""Number of weights with which DeepSeek V3 makes queries, keys and values from their latent vectors."""
_AGAIN = {Checkpointing.NONE: 0, Checkpointing.SELECTIVE: 2, Checkpointing.FULL: 3}
"""Collectives of tensor parallelism that I repeats."""
_HIDDEN = {"async": ASYNC_TENSOR, "userbuffers": 0.9}
"""Share of tensor parallelism's communication that runs beside products. Megatron's user buffers are fitted."""


@dataclass(frozen=True)
class Job:
    id: str
    source: str
    model: str
    device: str
    gpus: int
    p: int
    tp: int
    cp: int
    ep: int
    v: int
    m: int
    microbatch: int
    """Sequences at a time."""
    seq: int
    checkpointing: str
    options: frozenset[str]
    """Of "compiled" (or kernels fused by hand), "float8", "async" or "userbuffers" (tensor parallelism), "megatron" for
    its jobs without user buffers, "deepep" (or HybridEP), "whole" if each GPU keeps all weights and shards only their
    optimizer, and "unfused" if attention computes and keeps all scores. I also repeats "attention", "norms" (with
    activation functions) and "projections" (DeepSeek's of queries, keys and values from their latent vectors)."""
    link: float | None
    """Network of each GPU in GB/s, if it is not the device's."""
    published: float
    """Tokens per second of each GPU. Not a number before the comparison."""
    use: str
    """"fitted": for figures of the devices and rates. "kept back": by source, but in view while those were chosen.
    "never fitted": found afterwards, and predicted with the figures as they were. "predicted first": also written down
    before the comparison, without a published figure."""
    note: str

    @property
    def kind(self) -> str:
        if MODELS[self.model].num_experts:
            return "experts"
        return "dense with TP" if self.tp > 1 else "dense without TP"


def read_jobs() -> list[Job]:
    with ROWS.open(newline="") as lines:
        return [_job(cells) for cells in csv.DictReader(lines)]


def _job(cells: dict[str, Any]) -> Job:
    whole = {name: int(cells[name]) for name in ("gpus", "p", "tp", "cp", "ep", "v", "m", "microbatch", "seq")}
    options, link = frozenset(cells["options"].split()), float(cells["link"]) if cells["link"] else None
    return Job(**{**cells, **whole, "options": options, "link": link, "published": float(cells["published"] or "nan")})


def like_titan(**changes: Any) -> Workload:
    """The work of TorchTitan's published job of Llama 3 8B on 8 GPUs, with these changes."""
    return workload(replace(next(each for each in read_jobs() if each.id == "titan-8b-8"), **changes))


def workload(job: Job) -> Workload:
    model, how = MODELS[job.model], Checkpointing(job.checkpointing)
    block = model.block
    tokens = job.seq * job.microbatch
    own = tokens // job.cp  # on each GPU
    head = 2.0 * block.dim * model.vocabulary * tokens
    logits = float(own * model.vocabulary) / job.tp
    first = LayerWork(("tok_embeddings",), 0, 0, 0, block.dim * model.vocabulary, 0, 0)
    last = LayerWork(
        *(("norm", "output"), head, head, head, block.dim * model.vocabulary, 6 * logits, 2 * logits),
        working=((OpKind.F, 4 * logits), (OpKind.I, 8 * logits), (OpKind.B, 8 * logits)),
        transfers=(1, 1),
    )
    products = 2.0 * model.weights * tokens
    attention = 2.0 * job.seq * model.attention * tokens  # causal
    again = {
        Checkpointing.NONE: 0.0,
        Checkpointing.SELECTIVE: 2.0 * block.dim * (block.queries + block.hidden) * tokens,
        # torch ends a recomputation before the last product, whose result nothing needs.
        Checkpointing.FULL: products - 2.0 * model.last * tokens,
    }[how]
    again += 2.0 * _PROJECTIONS * tokens * ("projections" in job.options)
    in_f, in_i = block.traffic(how, "compiled" in job.options)
    in_i += in_f * ("norms" in job.options)
    repeats = how is Checkpointing.FULL or "attention" in job.options
    of_f, of_i = attention, (2.5 + repeats) * attention
    if "unfused" in job.options:
        # Products of all scores, twice those that a causal mask needs. F writes scores, reads and writes them for the
        # softmax, and reads them again. I repeats this, and does it for gradients, which two more products read.
        likely, scores = find(job.device), model.heads * job.seq
        of_f, of_i = (2 * likely.attention / likely.products * each * attention for each in (1, 2 + repeats))
        in_f, in_i = in_f + 4 * scores, in_i + (7 + 4 * repeats) * scores
    middle = LayerWork(
        ("layers.0",),
        products + of_f,
        products + of_i + again,
        products,
        model.parameters,
        2.0 * own * block.kept_by_f(how, job.tp),
        2.0 * own * block.kept_by_i(job.tp),
        tuple((kind, 2.0 * own * max(block.working(how, kind, job.tp), 0)) for kind in COMPUTATIONS),
        (4, 4 + _AGAIN[how]),
        (of_f, of_i),
        (2.0 * tokens * in_f, 2.0 * tokens * in_i),
        keys=2.0 * tokens * block.keys_and_values,
        num_experts=model.num_experts,
        in_experts=model.in_experts,
        routed=2.0 * tokens * block.dim * model.visited,
        in_routed=model.in_visited / model.weights,
    )
    layers = (first, *(replace(middle, modules=(f"layers.{number}",)) for number in range(model.blocks)), last)
    return Workload(
        job.id,
        layers,
        Degrees(job.p, job.tp, job.gpus // (job.p * job.tp * job.cp), context=job.cp, experts=job.ep),
        job.m,
        tokens,
        message_bytes=2.0 * own * block.dim / job.tp,
        operations=3.0 * sum(layer.f for layer in layers) / tokens,
        words="",
        checkpointing=how,
        compiled="compiled" in job.options,
        hidden_tensor=sum(_HIDDEN.get(option, 0.0) for option in job.options),
        float8="float8" in job.options,
        sends_once="deepep" in job.options,
        overlaps_fsdp=not job.options.isdisjoint(("userbuffers", "megatron")),
        cut=_cut(job, model.blocks),
        remade=lambda degrees, how: workload(_on(job, degrees, how)),
    )


def _on(job: Job, degrees: Degrees, how: Checkpointing | None) -> Job:
    """The job on other degrees, with the trainer's own stages. Its number of microbatches does not count."""
    job = replace(job, p=degrees.pipeline, tp=degrees.tensor, cp=degrees.context, ep=degrees.experts, v=1, m=1)
    return replace(job, gpus=degrees.gpus, checkpointing=str(how or job.checkpointing))


def _cut(job: Job, blocks: int) -> tuple[int, ...] | None:
    """Megatron's stages: equally many blocks, the embedding in the first and the head in the last one."""
    stages = job.p * job.v
    if blocks % stages or stages == 1:
        return None
    each = [blocks // stages] * stages
    return (each[0] + 1, *each[1:-1], each[-1] + 1)


def block_milliseconds(model: str, device: str, seq: int, how: str, options: frozenset[str]) -> dict[str, float]:
    """Estimated times of F, I and W of one block on one GPU."""
    job = Job("", "", model, device, *(1,) * 8, seq, how, options, None, 1.0, "", "")
    costs = rates(find(device)).layer_costs(workload(job))
    return {"F": 1000 * costs.f[1], "I": 1000 * costs.i[1], "W": 1000 * costs.w[1]}


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
    """The estimate of the job's own schedule: interleaved, or FSDP without a pipeline, or with whole weights."""
    names = [] if job.p == 1 else ["1F1B" if job.v == 1 else "Interleaved1F1B"]
    device = find(job.device) if job.link is None else replace(find(job.device), between=job.link * 1e9)
    if "whole" in job.options:
        likely = rates(device)
        return Speed(*(_speed_with_whole_weights(workload(job), each) for each in (likely, *likely.extremes)))
    found = estimate(workload(job), device, only=names, stages_per_rank=(job.v,), plans=False)
    step = found.on_these_degrees or next(each for each in found.steps if (each.timeline is None) == (job.p == 1))
    if job.p > 1 and step.timeline is None:
        raise ValueError(f"no estimate of {job.id}: {found.left_out}")
    assert step.range is not None, "the device has a range"
    tokens = step.tokens_per_second * step.seconds
    return Speed(step.tokens_per_second, tokens / step.range[1], tokens / step.range[0])


def _speed_with_whole_weights(job: Workload, rates: Rates) -> float:
    """Tokens per second of each GPU without a pipeline, gathering weights and reducing gradients once per step."""
    costs, held, sizes = rates.layer_costs(job), job.held(range(len(job.layers))), job.parameter_bytes
    f, i, w = map(sum, (costs.f, costs.i, costs.w))
    gather, reduce = (
        sum(rates.device.collective(size * each.number, each.shards, each.apart) for each in held)
        for size in (sizes.gathered, sizes.summed)
    )
    seconds = job.microbatches * (f + i + w) + max(gather - f, 0.0) + max(reduce - i - w, 0.0)
    seconds = rates.with_overheads(seconds, job, sum(each.own for each in held))
    return job.global_tokens / job.degrees.gpus / seconds


def summary(found: Iterable[tuple[Job, Speed]]) -> list[list[str]]:
    """Errors by use and side, in percent: number of rows, bias, mean error, and rows within the range. Those that were
    never fitted also by source, and those predicted first by class."""
    by_use: dict[tuple[str, str], list[tuple[Job, Speed]]] = {}
    for job, speed in found:
        side = "pipeline" if job.p > 1 else "no pipeline"
        parts = {"never fitted": job.source, "predicted first": job.kind}
        for use in (job.use, f"{job.use}: {parts[job.use]}") if job.use in parts else (job.use,):
            by_use.setdefault((use, side), []).append((job, speed))
    lines = []
    for words, some in sorted(by_use.items()):
        errors = [100 * speed.error(job) for job, speed in some]
        inside = str(sum(speed.includes(job) for job, speed in some))
        lines.append([*words, str(len(some)), f"{fmean(errors):+.1f} %", f"{fmean(map(abs, errors)):.1f} %", inside])
    return lines


def write_results(found: Iterable[tuple[Job, Speed]]) -> None:
    heads = "id source model device gpus p published predicted least most error use note"
    rows = [heads.split()]
    for job, speed in found:
        numbers = (f"{each:.4g}" for each in (job.published, speed.likely, speed.least, speed.most))
        start = (job.id, job.source, job.model, job.device, str(job.gpus), str(job.p))
        rows.append([*start, *numbers, f"{speed.error(job):+.3f}", job.use, job.note])
    write_table(RESULTS, rows)


def write_table(file: Path, rows: Iterable[Sequence[str]]) -> None:
    with file.open("w", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(rows)
