"""Trains the models of the zoo, each against plain autograd over the whole model, many in one process group."""

import logging
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
from zoo import CASES
from zoo.case import Case, Mode

MICROBATCHES, STEPS = 3, 2


class Setting(NamedTuple):
    schedule: str
    mode: Mode = "eager"
    inferred: bool = False
    """Whether torch infers the shapes that stages hand on, by one more forward of each, or is given them."""

    def __str__(self) -> str:
        return f"{self.schedule}, {self.mode}, shapes {'inferred' if self.inferred else 'given'}"

    def suits(self, case: Case) -> bool:
        return self.mode in case.modes and (case.schedules is None or self.schedule in case.schedules)


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
}
"""By the number of ranks."""


def settings(case: Case, num_ranks: int) -> list[Setting]:
    """Those in which this model is run on so many ranks.

    On one rank both eager ones, and one of each pair that differs in the place of W alone. On two ranks one of all, for
    the models that ask for it. By their names.
    """
    suitable = [setting for setting in SETTINGS[num_ranks] if setting.suits(case)]
    number = _number(case)
    if num_ranks == 2:
        start = number % (len(suitable) or 1)
        return suitable[start : start + 1] if case.on_two_ranks else []
    for mode in ("checkpointed", "compiled"):
        if len(pair := [each for each in suitable if each.mode == mode]) == 2:
            suitable.remove(pair[number % 2])
    return suitable


def _number(case: Case) -> int:
    return zlib.crc32(case.name.encode())


def register_tables() -> None:
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
            try:
                compare(case, setting)
                found[case.name] = ""
            except Exception:
                found[case.name] = f"{setting}: {traceback.format_exc()}"
                return found
    return found


def compare(case: Case, setting: Setting) -> None:
    """Require the losses, gradients and buffers on this rank that there are without a pipeline."""
    num_stages = registry.resolve(setting.schedule).place(dist.get_world_size()).num_stages
    expected = reference(case, num_stages)
    found = train(case, setting, num_stages, expected.examples)
    for step, (mine, theirs) in enumerate(zip(found, expected.outcomes, strict=True)):
        require_alike(case, step, mine, theirs)


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
                (loss / MICROBATCHES if case.accumulates and case.scale_grads else loss).backward()
                losses.append(loss.item())
            for parameter in nn.ModuleList(stages.values()).parameters():  # each one once
                if parameter.grad is not None and case.scale_grads and not case.accumulates:
                    parameter.grad.div_(MICROBATCHES)
            outcomes.append(_outcome(stages, losses))
            _prepare_next(case, stages, step)
    for name, gradient in outcomes[0].gradients.items():  # a model without gradients would prove nothing
        assert name.endswith(case.no_gradient) or (gradient is not None and gradient.any()), f"{name} gets no gradient"
    return Reference(outcomes, examples)


def _forward(case: Case, stages: Mapping[int, nn.Module], microbatch: int, inputs: tuple[Tensor, ...]) -> Any:
    def like(value: Any) -> tuple[Tensor, ...]:
        return tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in as_tuple(value))

    def as_tuple(value: Any) -> tuple[Tensor, ...]:
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)

    examples = []
    output: Any = inputs
    for index, module in stages.items():
        before = as_tuple(output)
        begin(module, index, microbatch)
        output = module(*before)
        examples.append((like(before), like(output)))
    return output, examples


def begin(module: nn.Module, index: int, microbatch: int) -> None:
    """Before F: random numbers and a microbatch number that are the same in every order of the schedule."""
    _seed(1000 * index + microbatch)
    set_microbatch(module, microbatch)


def _seed(number: int) -> None:
    """On the CPU alone: for devices that are not there, torch.manual_seed takes down the stack, which is slow."""
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


def _prepare_next(case: Case, stages: Mapping[int, nn.Module], step: int) -> None:
    for module in stages.values():
        if step == 0:
            case.between(module)
        if case.scale_grads and not case.accumulates:  # else gradients are summed up over the steps
            module.zero_grad()


def _outcome(stages: Mapping[int, nn.Module], losses: list[float]) -> Outcome:
    modules = nn.ModuleDict({str(index): module for index, module in stages.items()})
    named = modules.named_parameters(remove_duplicate=False)
    return Outcome(
        losses,
        {name: None if each.grad is None else each.grad.clone() for name, each in named},
        {name: each.clone() for name, each in modules.named_buffers()},
    )


class _CountedStage(PipelineStage):
    """Tells its module which microbatch comes."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin(self.submod, self.stage_index, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def train(case: Case, setting: Setting, num_stages: int, examples: Sequence[Any]) -> list[Outcome]:
    indices = zbpipe.stage_indices(setting.schedule, rank=dist.get_rank(), num_ranks=dist.get_world_size())
    modules = _built(case, indices)
    stages = []
    for index, module in modules.items():
        given = {} if setting.inferred else dict(zip(("input_args", "output_args"), examples[index], strict=True))
        run = _in_mode(case, setting.mode, index, module)
        stages.append(_CountedStage(run, index, num_stages, torch.device("cpu"), **given))
    names = setting.schedule, case.second_schedule or setting.schedule
    schedule: Any = None
    outcomes = []
    for step, name in enumerate(names):
        if step == 0 or case.second_schedule:
            schedule = zbpipe.build_pipeline_schedule(
                name, stages, MICROBATCHES, case.loss, scale_grads=case.scale_grads
            )
        for module in modules.values() if step == 0 else ():
            case.prepared(module)
        inputs, target = _batch(case, step)
        losses: list[Tensor] = []
        args, wanted = inputs if 0 in modules else (), target if num_stages - 1 in modules else None
        schedule.step(*args, target=wanted, losses=losses)
        outcomes.append(_outcome(modules, [loss.item() for loss in losses]))
        _prepare_next(case, modules, step)
    return outcomes


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


def require_alike(case: Case, step: int, found: Outcome, expected: Outcome) -> None:
    def close(name: str, mine: Tensor, other: Tensor, least: float = 0.0) -> None:
        mine, other = mine.to_dense(), other.to_dense()
        size = float(other.abs().max()) if other.numel() else 0.0
        bound = case.tolerance * max(size, least)
        torch.testing.assert_close(mine, other, rtol=0, atol=bound, msg=lambda m: f"step {step}, {name}: {m}")

    if found.losses:
        close("losses", torch.tensor(found.losses), torch.tensor(expected.losses))
    largest = max(
        float(each.to_dense().abs().max())
        for each in expected.gradients.values()
        if torch.is_tensor(each) and each.numel()
    )
    for name, gradient in reversed(found.gradients.items()):
        wanted = expected.gradients[name]
        if wanted is None and gradient is not None and name.endswith(case.no_gradient) and not gradient.any():
            continue  # zeros came back from the next stage
        assert (gradient is None) == (wanted is None), name
        if gradient is not None and wanted is not None:
            assert gradient.requires_grad == wanted.requires_grad, name
            # A gradient that is zero but for rounding, as that of attention's key bias, is measured by the others.
            close(name, gradient, wanted, 1e-3 * largest)
    for name, values in found.buffers.items():
        close(name, values, expected.buffers[name])
