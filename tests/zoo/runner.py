"""Trains the models of the zoo, each against plain autograd over the whole model, many in one process group."""

from __future__ import annotations

import logging
import re
import traceback
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch._dynamo.guards
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import Op, OpKind, Placement, Schedule
from zbpipe.schedule import registry
from zoo import CASES, pipelines
from zoo.case import Case, Mode

MICROBATCHES, STEPS = 3, 2


class Setting(NamedTuple):
    """How a model is run."""

    schedule: str
    mode: Mode = "eager"
    inferred: bool = False
    """Whether torch infers the shapes that stages hand on, by one more forward of each, or is given them."""

    def __str__(self) -> str:
        return f"{self.schedule}, {self.mode}, shapes {'inferred' if self.inferred else 'given'}"

    def suits(self, case: Case) -> bool:
        return (
            self.mode in case.modes
            and (case.schedules is None or self.schedule in case.schedules)
            and case.shapes in ("any", "inferred" if self.inferred else "given")
        )


SETTINGS: Mapping[int, tuple[Setting, ...]] = {
    1: (
        Setting("ZBV", inferred=True),
        Setting("ZBV", "checkpointed", inferred=True),
        Setting("ZBV", "compiled", inferred=True),
        Setting("WeightsLast"),
        Setting("WeightsLast", "checkpointed"),
        Setting("WeightsLast", "compiled"),
    ),
    2: (Setting("ZBH1"), Setting("ZBV", "checkpointed"), Setting("WeightsLast", inferred=True)),
    4: (Setting("ZBV"), Setting("ZBH1", "checkpointed")),
}
"""By the number of ranks."""


def settings(case: Case, num_ranks: int) -> list[Setting]:
    """Those in which this model is run on so many ranks.

    On one rank both eager ones, and one of each pair that differs in the place of W alone. On two ranks one of all, for
    half of the models and those that differ in what stages hand on; on four one of all, for an eighth of the models. By
    their names.
    """
    suitable = [setting for setting in SETTINGS[num_ranks] if setting.suits(case) and num_ranks <= case.most_ranks]
    number = _number(case)
    if num_ranks == 1:
        for mode in ("checkpointed", "compiled"):
            if len(pair := [each for each in suitable if each.mode == mode]) == 2:
                suitable.remove(pair[number % 2])
        return suitable
    if num_ranks == 2 and number // 8 % 2 and case not in pipelines.CASES:
        return []
    start = number % (len(suitable) or 1 if num_ranks == 2 else 16)
    return suitable[start : start + 1]


def _number(case: Case) -> int:
    """The same in every run."""
    return zlib.crc32(case.name.encode())


def register_tables() -> None:
    """Make a table known in which all W come last."""

    @zbpipe.register("WeightsLast", placement="v", stages_per_rank=2, listed=False)
    def weights_last(ranks: int, microbatches: int) -> Schedule:
        """In ZBV's order, or on one rank each microbatch by itself: models may keep something of the last F."""
        rows = tuple(map(tuple, zbpipe.generate("ZBV", ranks, microbatches)))
        if ranks == 1:
            kinds = ((0, OpKind.F), (1, OpKind.F), (1, OpKind.I), (0, OpKind.I), (1, OpKind.W), (0, OpKind.W))
            rows = (tuple(Op(stage, kind, m) for m in range(microbatches) for stage, kind in kinds),)
        rows = tuple(tuple(sorted(ops, key=lambda op: op.kind is OpKind.W)) for ops in rows)
        return Schedule("WeightsLast", Placement.v(ranks), microbatches, rows)


class Outcome(NamedTuple):
    """What one step leaves behind, on the stages of a rank."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def run_all() -> dict[str, str]:
    """Train all models of this number of ranks, until one fails: then ranks may be out of step.

    Returns by model what is wrong on this rank; empty if nothing is.
    """
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    register_tables()
    found = {}
    for case in CASES:
        torch.compiler.reset()
        for setting in settings(case, dist.get_world_size()):  # one at most on several ranks
            error, is_broken = outcome(case, setting)
            found[case.name] = f"{setting}: {error}" if error else ""
            if is_broken:
                return found
    return found


def outcome(case: Case, setting: Setting) -> tuple[str | None, bool]:
    """What is wrong with it, if anything, and whether the ranks may be out of step now."""
    try:
        wrong = compare(case, setting)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if case.refused and re.search(case.refused, told):
            return None, True
        return f"{told}\n{traceback.format_exc()}", True
    if case.refused:
        wrong = f"was not refused with {case.refused!r}"
    return wrong, False


def compare(case: Case, setting: Setting) -> str | None:
    """How the losses, gradients and buffers on this rank differ from those without a pipeline; None if they do not."""
    num_ranks = dist.get_world_size()
    num_stages = registry.resolve(setting.schedule).place(num_ranks).num_stages
    expected = reference(case, num_stages)
    found = train(case, setting, num_stages, expected.examples)
    for step, (mine, theirs) in enumerate(zip(found, expected.outcomes, strict=True)):
        wrong = _difference(case, mine, theirs)
        if wrong:
            return f"step {step}: {'; '.join(wrong)}"
    return None


class Reference(NamedTuple):
    """The same model without a pipeline."""

    outcomes: list[Outcome]
    """By step, of all stages."""
    examples: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    """Inputs and outputs of each stage, for one microbatch."""


@lru_cache(maxsize=4)
def reference(case: Case, num_stages: int) -> Reference:
    """Plain autograd over all stages, a microbatch after the other, without the compiler."""
    with torch.compiler.set_stance("force_eager"):
        examples = _forward(case, _built(case, range(num_stages)), 0, _batches(case, 0)[0][0])[1]
        stages = _built(case, range(num_stages))
        outcomes = []
        for step in range(STEPS):
            losses = []
            for microbatch, (inputs, target) in enumerate(_batches(case, step)):
                output, _ = _forward(case, stages, microbatch, inputs)
                loss = case.loss(output, target)
                (loss / MICROBATCHES if case.accumulates and _scales(case) else loss).backward()
                losses.append(loss.item())
            _finish(stages.values())
            if _scales(case) and not case.accumulates:
                _divide_by_microbatches(stages.values())
            outcomes.append(_outcome(stages, losses))
            _prepare_next(case, stages, step)
    _require_gradients(case, outcomes)
    return Reference(outcomes, examples)


def _forward(case: Case, stages: Mapping[int, nn.Module], microbatch: int, inputs: tuple[Tensor, ...]) -> Any:
    examples = []
    output: Any = inputs
    for index, module in stages.items():
        before = _as_tuple(output)
        begin(module, index, microbatch)
        output = module(*before)
        examples.append((_like(before), _like(_as_tuple(output))))
    return output, examples


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _like(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)


def begin(module: nn.Module, index: int, microbatch: int) -> None:
    """Before F: random numbers and a microbatch number that are the same in every order of the schedule."""
    _seed(1000 * index + microbatch)
    set_microbatch(module, microbatch)


def _seed(number: int) -> None:
    """On the CPU alone: for devices that are not there, torch.manual_seed takes down the stack, and that took a fifth
    of the time of all models.
    """
    torch.default_generator.manual_seed(number)


def set_microbatch(module: nn.Module, microbatch: int) -> None:
    for part in module.modules():
        if hasattr(part, "microbatch"):
            part.microbatch = microbatch  # type: ignore[assignment]


def _built(case: Case, indices: Iterable[int]) -> dict[int, nn.Module]:
    stages = {}
    for index in indices:
        _seed(index)
        stages[index] = case.build(index)
    case.share(stages)
    return stages


def _batches(case: Case, step: int) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    inputs, target = _batch(case, step)
    chunks = zip(*(each.chunk(MICROBATCHES) for each in (*inputs, target)), strict=True)
    return [(tuple(chunk), target) for *chunk, target in chunks]


def _batch(case: Case, step: int) -> tuple[tuple[Tensor, ...], Tensor]:
    _seed(100 + step)
    return case.batch(MICROBATCHES * case.samples)


def _scales(case: Case) -> bool:
    return bool(case.options.get("scale_grads", True))


def _divide_by_microbatches(stages: Iterable[nn.Module]) -> None:
    for parameter in nn.ModuleList(stages).parameters():  # each one once
        if parameter.grad is not None:
            parameter.grad.div_(MICROBATCHES)


def _finish(stages: Iterable[nn.Module]) -> None:
    """What a module does at the end of a step by itself."""
    for module in stages:
        for part in module.modules():
            if hasattr(part, "finish_step"):
                part.finish_step()


def _prepare_next(case: Case, stages: Mapping[int, nn.Module], step: int) -> None:
    for module in stages.values() if step == 0 else ():
        case.between(module)
    if _scales(case) and not case.accumulates:  # else gradients are summed up over the steps
        for module in stages.values():
            module.zero_grad()


def _outcome(stages: Mapping[int, nn.Module], losses: list[float]) -> Outcome:
    named = [(f"{index}.{name}", each) for index, module in stages.items() for name, each in module.named_parameters()]
    gradients = {name: None if each.grad is None else each.grad.clone() for name, each in named}
    buffers = {
        f"{index}.{name}": each.clone() for index, module in stages.items() for name, each in module.named_buffers()
    }
    return Outcome(losses, gradients, buffers)


def _require_gradients(case: Case, outcomes: Sequence[Outcome]) -> None:
    """A model whose parameters get no gradients would prove nothing."""
    for name, gradient in outcomes[0].gradients.items():
        assert name.endswith(case.no_gradient) or (gradient is not None and gradient.any()), f"{name} gets no gradient"


class _CountedStage(PipelineStage):
    """Tells its module which microbatch comes."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin(self.submod, self.stage_index, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def train(case: Case, setting: Setting, num_stages: int, examples: Sequence[Any]) -> list[Outcome]:
    """Two steps of this rank's part of the pipeline."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    indices = zbpipe.stage_indices(setting.schedule, rank=rank, num_ranks=num_ranks)
    modules = _built(case, indices)
    stages = [
        _CountedStage(_in_mode(case, setting.mode, index, module), index, num_stages, torch.device("cpu"), **shapes)
        for index, module in modules.items()
        for shapes in [
            {} if setting.inferred else dict(zip(("input_args", "output_args"), examples[index], strict=True))
        ]
    ]
    schedule = _schedule(case, setting.schedule, stages)
    for module in modules.values():
        case.prepared(module)
    outcomes = []
    for step in range(STEPS):
        inputs, target = _batch(case, step)
        losses: list[Tensor] = []
        args, wanted = inputs if 0 in modules else (), target if num_stages - 1 in modules else None
        schedule.step(*args, target=wanted, losses=losses)
        _finish(modules.values())
        outcomes.append(_outcome(modules, [loss.item() for loss in losses]))
        _prepare_next(case, modules, step)
        if step == 0 and case.second_schedule is not None:
            schedule = _schedule(case, case.second_schedule, stages)
    return outcomes


def _schedule(case: Case, name: str, stages: Sequence[PipelineStage]) -> Any:
    return zbpipe.build_pipeline_schedule(name, stages, MICROBATCHES, case.loss, **case.options)


def _in_mode(case: Case, mode: Mode, index: int, module: nn.Module) -> nn.Module:
    # One of two stages is compiled: in a quarter of the models the first one, whose x needs no gradient.
    if mode == "compiled" and index == (0 if _number(case) % 8 < 2 else 1):
        module.compile(backend="aot_eager")
    return _Checkpointed(module) if mode == "checkpointed" else module


class _Checkpointed(nn.Module):
    """Recomputes the whole stage, as the microbatch that it ran as."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.microbatch = 0

    def forward(self, *inputs: Tensor) -> Any:
        return checkpoint(self._forward, self.microbatch, *inputs, use_reentrant=False)

    def _forward(self, microbatch: int, *inputs: Tensor) -> Any:
        before = self.microbatch
        set_microbatch(self.module, microbatch)
        try:
            return self.module(*inputs)
        finally:
            set_microbatch(self.module, before)


def _difference(case: Case, found: Outcome, expected: Outcome) -> list[str]:
    wrong = []
    if found.losses:
        error = _error(torch.tensor(found.losses), torch.tensor(expected.losses))
        if not error <= case.tolerance:
            wrong.append(f"losses are off by {error:.2g}: {found.losses} instead of {expected.losses}")
    largest = max(map(_largest, filter(torch.is_tensor, expected.gradients.values())))
    for name, gradient in found.gradients.items():
        wrong += _gradient_difference(case, name, gradient, expected.gradients[name], largest)
    for name, values in found.buffers.items():
        if not torch.equal(values, expected.buffers[name]):
            error = _error(values, expected.buffers[name])
            if not error <= case.tolerance:
                wrong.append(f"buffer {name} is off by {error:.2g}")
    return wrong


def _gradient_difference(
    case: Case, name: str, found: Tensor | None, expected: Tensor | None, largest: float
) -> list[str]:
    if expected is None and found is not None and name.endswith(case.no_gradient) and not found.any():
        return []  # zeros came back from the next stage
    if found is None or expected is None:
        return [] if found is expected else [f"{name} has {'no' if found is None else 'a'} gradient"]
    if (found.shape, found.dtype, found.requires_grad) != (expected.shape, expected.dtype, expected.requires_grad):
        return [f"the gradient of {name} is {found.shape}, {found.dtype}, {found.requires_grad=}"]
    # A gradient that is zero but for rounding, as that of attention's key bias, is measured by the others.
    error = _error(found, expected, least=1e-3 * largest)
    return [] if error <= case.tolerance else [f"the gradient of {name} is off by {error:.2g}"]


def _error(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to_dense().to(wide), expected.to_dense().to(wide)
    return _largest(found - expected) / max(_largest(expected), least)


def _largest(tensor: Tensor) -> float:
    return float(tensor.to_dense().abs().max()) if tensor.numel() else 0.0
