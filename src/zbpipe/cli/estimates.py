"""Estimates for people: a table in the terminal, and records for JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

from zbpipe.costs.transformer import NOTE
from zbpipe.estimation.devices import GIB, USABLE
from zbpipe.estimation.rows import DECIDED, HARDLY, NO_PIPELINE, Answer, Estimate, JobMemory, Memory, Step, answer
from zbpipe.schedule.ir import count_noun
from zbpipe.views.report import longer, table
from zbpipe.views.style import percent

_HEADS = (
    *("schedule", "placement", "stages", "step s", "bubble", "tokens/s per GPU", "range", "MFU", "vs yours", "vs FSDP"),
    "GiB",
)
_PARTS = {part.name: part.name for part in fields(Memory)} | {"waiting": "deferred"}
"""Parts of a rank's memory, with their column names."""
_COMPARED = ("1F1B", "Interleaved1F1B", "ZB", NO_PIPELINE)
_MOST_ROWS = 6
LEGEND = (
    "in 1.5x: with {}. range: tokens/s per GPU over the plausible speeds of the device. GiB:"
    " peak of the worst rank, then its parts: weights, with the copies that products use; gradients and optimizer;"
    " activations; deferred gradients; messages; working memory or logits. vs: step relative to that of the job's"
    " own schedule, or of FSDP without a pipeline; -5.0% is a 5 % shorter step"
)
WAITING = (
    "On {} computations may wait for messages: --transport {} estimates this worst case, and the job's log names what"
    " it measures (docs/choosing.md, On AMD)"
)


def lines(found: Estimate, *, everything: bool = True, named: Collection[str] = ()) -> Iterator[str]:
    """The answer, a table, and the sources of its figures. The table has the compared rows and the `named` ones, or
    with `everything` all rows."""
    if found.job is None:  # a search has its own
        yield from _answer(found)
    yield from found.workload.warnings
    device, shown = found.device, found.steps if everything else _few(found, named)
    if device and device.worst_transport not in (None, device.transport):
        yield WAITING.format(device.name, str(device.worst_transport).replace(" ", "-"))
    yield _job(found)
    yield ""
    heads = (*_HEADS, *(_PARTS.values() if everything else ()))
    yield from table(heads, [_cells(found, step, parts=everything) for step in shown], left=2)
    if not everything:
        yield (
            "--all prints all schedules, the parts of their memory, and the sources of these figures; --search also"
            " changes the degrees"
        )
        return
    yield ""
    yield LEGEND.format(found.workload.options.memory_limit.format("1.5x"))
    if any(step.has_torchs_split for step in found.steps):
        yield NOTE
    yield from found.words


def _few(found: Estimate, named: Collection[str]) -> list[Step]:
    """The job's own row, the recommended one, the usual baselines, and the shortest that fits."""
    typed = [step for step in found.steps if step.is_typed]
    usual = [step for step in typed if step.schedule in _COMPARED and not step.memory_limit]
    kept = sorted(typed, key=lambda step: (not step.is_own, step is not found.best, step not in usual))[:_MOST_ROWS]
    asked = {name.lower() for name in named}
    return [step for step in found.steps if step in kept or step.schedule.lower() in asked]


def _answer(found: Estimate) -> Iterator[str]:
    advice, work = found.advice, found.workload
    yield from (f"Your schedule cannot run: {reason}" for name, reason in found.left_out if name == work.schedule)
    if advice is None:
        why = "No schedule that can run fits" if work.degrees.pipeline > 1 else "This job has no pipeline"
        option = dict(work.options.degrees)["pipeline"].format("P")
        yield f"{why}: --search compares other layouts, or name one by {option}."
        return
    yield advice.sentence
    if advice.option:
        yield _typed(advice.option, advice.step)
    yield from filter(None, (advice.waits, advice.checkpointing))


def _typed(option: str, step: Step) -> str:
    is_written = step.timeline and step.is_written
    return f"  {option}" + (f"  (written by -o {step.schedule}.csv)" if is_written else "")


def compare(best: Step, fsdp: Step, name: str) -> str:
    """The verdict on a pipeline with this name, if both fit."""
    least, most = (each - 1 for each in best.relative_range(fsdp))
    over = f" ({least:+.1%} to {most:+.1%} over the plausible speeds)" if most - least > 5e-4 else ""
    where = f" on {fsdp.degrees}" if fsdp.degrees else ""
    words = f"the best pipeline that fits, {name}, is {best.compare(fsdp)} than without one{where}{over}."
    match answer(best, fsdp):
        case Answer.YES:
            return f"A pipeline: {words}"
        case Answer.NO:
            more = f" A pipeline has to save {HARDLY:.0%}, the estimates' mean error."
            return f"No pipeline: {words}{more * (best.seconds < fsdp.seconds)}"
        case _:
            return f"Undecided: {words} Frameworks differ by more than {DECIDED:.0%}: try both."


def _job(found: Estimate) -> str:
    work, device = found.workload, found.device
    each = f"{device.name} of {device.gib:.0f} GiB, {1 - USABLE:.0%} kept free" if device else "devices"
    checkpointing = "" if work.checkpointing is None else f", {work.checkpointing.words}"
    return (
        f"{work.name}: {work.parameters / 1e9:.3g}B parameters on {work.degrees.gpus} {each} ({work.degrees}),"
        f" {count_noun(work.microbatches, 'microbatch')} of {work.tokens} tokens,"
        f" {work.global_tokens} tokens per step{checkpointing}"
    )


def _cells(found: Estimate, step: Step, *, parts: bool = True) -> tuple[str, ...]:
    memory, tokens = step.memory, step.tokens_per_second * step.seconds
    own = " (yours)" if step.is_own else ""
    others = (found.relative(step, each) for each in (found.own, found.without_pipeline))
    return (
        step.name + "*" * step.has_torchs_split + own,
        *(step.placement, str(step.stages_per_rank), f"{step.seconds:.4g}", percent(step.bubble)),
        f"{step.tokens_per_second:,.0f}",
        "" if step.range is None else f"{tokens / step.range[1]:,.0f} to {tokens / step.range[0]:,.0f}",
        "" if step.mfu is None else percent(step.mfu),
        *("" if relative is None else longer(relative, than=1) for relative in others),
        *map(_gib, (memory.total, *(getattr(memory, part) for part in _PARTS if parts))),
        *([] if step.fits or not found.device else [f"  does not fit in {found.device.usable_bytes / GIB:.1f} GiB"]),
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2g}"


def best_pipeline(searched: Sequence[Estimate]) -> Estimate:
    """The best layout with a pipeline that fits, else the first one."""
    fitting = (each for each in searched if each.workload.degrees.pipeline > 1 and each.on_these_degrees)
    return next(fitting, searched[0])


def list_searched(searched: Sequence[Estimate], best: Estimate) -> Iterator[str]:
    """The verdict, one line per choice of degrees with its best schedule, then the table of the best choice."""
    layout, fsdp = best_pipeline(searched), best.fsdp_found
    pipeline = layout.on_these_degrees if layout.workload.degrees.pipeline > 1 else None
    if pipeline and fsdp:
        yield compare(pipeline, fsdp, f"{pipeline.name} on {layout.workload.degrees}")
    else:
        yield "No pipeline fits." if fsdp else "Without a pipeline it does not fit."
    is_better = pipeline and not (fsdp and answer(pipeline, fsdp) is Answer.NO)
    if winner := pipeline if is_better else fsdp:
        yield _typed(layout.spell(winner), winner)
    yield (
        f"The search changes the degrees and the checkpointing of {best.workload.name}. The best schedule for each"
        f" layout, {best.workload.global_tokens} tokens per step, without layouts whose computation alone takes longer:"
    )
    rows = [
        (*map(str, (work.degrees, work.checkpointing or "", work.microbatches)), *_cells(each, step, parts=False))
        for each in searched
        if (step := each.on_these_degrees) and (work := each.workload)
    ]
    yield from table(("degrees", "checkpointing", "microbatches", *_HEADS), rows, left=2)
    yield ""
    yield from lines(best)


def record(found: Estimate) -> dict[str, Any]:
    work, device, advice = found.workload, found.device, found.advice
    return {
        "job": work.name,
        "device": None if device is None else device.name,
        "gpus": work.degrees.gpus,
        "degrees": dict(vars(work.degrees)),
        "microbatches": work.microbatches,
        "tokens_per_step": work.global_tokens,
        "parameters": work.parameters,
        "advice": None if advice is None else vars(advice) | {"step": _row(found, advice.step)},
        "schedules": [_row(found, step) for step in found.steps],
        "left_out": dict(found.left_out),
        "words": [*work.warnings, *found.words],
    }


def _row(found: Estimate, step: Step) -> dict[str, Any]:
    hidden = ("timeline", "memory", "algorithm", "degrees")
    return {
        **{name: value for name, value in vars(step).items() if name not in hidden},
        "degrees": step.degrees and dict(vars(step.degrees)),
        "memory": {**vars(step.memory), "total": step.memory.total},
        "step_to_own": found.relative(step, found.own),
        "step_to_1f1b": found.relative(step, found.named("1F1B")),
        "step_to_fsdp": found.relative(step, found.without_pipeline),
    }


def rank_lines(found: JobMemory, limit: str) -> Iterator[str]:
    ranks = enumerate(zip(found.parameters, found.memories, strict=True))
    rows = [
        (str(rank), f"{count / 1e9:.2f}B", *(_gib(getattr(memory, part)) for part in _PARTS), _gib(memory.total))
        for rank, (count, memory) in ranks
    ]
    yield from table(("rank", "parameters", *_PARTS.values(), "GiB"), rows, left=0)
    yield f"1 microbatch in {limit}: {found.unit / GIB:.2f} GiB"
    fits = ", ".join(found.fits) or "no GPU"
    yield f"worst rank: {found.worst / GIB:.1f} GiB, which with {1 - USABLE:.0%} left free fits: {fits}"


def rank_record(found: JobMemory) -> dict[str, Any]:
    both = zip(found.parameters, found.memories, strict=True)
    ranks = [{"parameters": count, **vars(memory), "total": memory.total} for count, memory in both]
    return {"ranks": ranks, "unit_of_memory_limit": found.unit, "fits": found.fits}
