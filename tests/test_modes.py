"""Training, evaluation, sizes and refusals in any order: every step like plain autograd over the whole model."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pipelines
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from zoo.case import bare

import zbpipe
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.measure.recording import StepRecord, Wanted, Watcher, watch
from zbpipe.simulator.offloading import Offload, copy_all

WIDTH, USUAL = 4, 3
NAMES = ("ZBH1", "ZBV", "ZB", "ZB2P", "VHalf", "Auto", "Table", "Plan")

Grad = Literal["no_grad", "inference_mode", "enable_grad"]


@dataclass(frozen=True)
class Event:
    """What a loop does next, on all ranks."""

    kind: Literal["train", "eval", "adopt", "change", "zero", "freeze", "freeze up to", "refuse", "wrong"]
    microbatches: int = USUAL
    rows: int = 2
    """Of a microbatch: another number is another shape."""
    sizes: tuple[int, ...] = ()
    """Rows of each microbatch, if not all have the same."""
    is_split: bool = False
    """Whether the microbatches are given instead of the batch."""
    grad: Grad = "no_grad"
    """Of an evaluation."""
    wrong: str = "uneven"
    """One of `WRONG`."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of each microbatch."""
        return self.sizes or (self.rows,) * self.microbatches


LISTS = ("no tokens", "another number", "other tokens") if pipelining.TAKES_MICROBATCHES else ()
WRONG = ("uneven", "empty", "no input", "no target", "uneven target", *LISTS)
"""What is wrong with a batch, on the ranks that have its input or its target."""


class Part(nn.Module):
    """A stage that hands on two tensors, and keeps what it has seen in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.seen.add_(x.sum())
        return self.b(torch.tanh(self.a(x))) + y, torch.tanh(y + self.b(x))


def make_part(index: int, *_: int) -> Part:
    torch.manual_seed(index)
    return Part()


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mse_loss(output[0], target) + output[1].square().mean()


class Loop:
    """A schedule, and the same model without one."""

    def __init__(self, name: str, scale_grads: bool = True, **options: Any) -> None:
        num_ranks = dist.get_world_size()
        table: Any = zbpipe.generate("1F1B", num_ranks, USUAL) if name == "Table" else name
        if name == "Plan":
            table = zbpipe.plan(num_ranks, USUAL, (1, 1, 1), budget=1e3, placements=["v"])
        if name == "Auto":
            options |= {"profile_steps": 1}
        pipeline = pipelines.Pipeline(table, USUAL, make_part, loss_fn, scale_grads=scale_grads, **options)
        self.indices, self.parts, self.schedule = pipeline.indices, pipeline.modules, pipeline.schedule
        self.whole = [make_part(index) for index in range(pipeline.num_stages)]
        self.name, self.scales, self.step, schedule = name, scale_grads, 0, self.schedule
        self.stages, self.other = pipeline.stages, None
        if name in ("Table", "Plan"):
            for number in {*range(1, 8)} - {USUAL}:
                schedule.adopt(zbpipe.generate("1F1B" if name == "Table" else "ZBV", num_ranks, number))

    def run(self, event: Event) -> None:
        self.step += 1
        if event.kind in ("train", "eval"):
            self._compare(event)
        elif event.kind == "adopt" and self.name != "Auto":
            table = {1: "1F1B", 2: "VMin", 4: "ZB"}[len(self.indices)]
            self.schedule.adopt(zbpipe.generate(table, dist.get_world_size(), event.microbatches))
        elif event.kind == "zero":
            for part in (*self.parts.values(), *self.whole):
                part.zero_grad(set_to_none=event.is_split)
        elif event.kind == "freeze":
            for part in [each for index, each in self.parts.items() if index == event.rows - 1] + self.whole[
                event.rows - 1 : event.rows
            ]:
                part.a.requires_grad_(not part.a.weight.requires_grad)
        elif event.kind == "freeze up to":
            for parts in (dict(enumerate(self.whole)), self.parts):
                for index, part in parts.items():
                    part.requires_grad_(index >= min(event.microbatches - 1, len(self.whole) - 1))
        elif event.kind == "refuse":
            with pytest.raises(ValueError, match="microbatches"):
                self._call("step", event, microbatches=0)
            with torch.inference_mode(event.is_split), torch.no_grad(), pytest.raises(ValueError, match="call eval"):
                self._call("step", event, microbatches=event.microbatches)
        elif event.kind in ("change", "wrong"):
            (self._change if event.kind == "change" else self._refuse)(event)

    def _change(self, event: Event) -> None:
        """To another schedule on the same stages, or back."""
        name = {1: "ZBH2", 2: "VMin", 4: "ZB"}[len(self.indices)]
        other = self.other or zbpipe.build_pipeline_schedule(name, self.stages, USUAL, loss_fn, scale_grads=self.scales)
        self.schedule, self.other = other, self.schedule

    def _refuse(self, event: Event) -> None:
        """What some ranks refuse, all do, and no gradient changes."""
        before = [(each.grad, None if each.grad is None else each.grad.clone()) for each in self.parameters()]
        words = self.step_wrongly(event)
        for each, (grad, kept) in zip(self.parameters(), before, strict=True):
            assert each.grad is grad
            assert grad is None or torch.equal(grad, kept)  # type: ignore[arg-type]
        for index, part in self.parts.items():  # forwards may have run before their rank learned of it
            part.seen.copy_(self.whole[index].seen)
        said = [""] * dist.get_world_size()
        dist.all_gather_object(said, words)
        own = [each for each in said if "All ranks skip" not in each]
        assert own, said
        assert all(each in own or any(cause in each for cause in own) for each in said), said

    def step_wrongly(self, event: Event) -> str:
        """What this rank says to a wrong batch. The ranks compare its step, so all refuse it."""
        event = replace(event, microbatches=max(2, event.microbatches), sizes=())
        *inputs, target = self._batch(event)
        rows = {"uneven": -1, "empty": 0}.get(event.wrong)
        given: dict[str, Any] = {"microbatches": event.microbatches}
        if event.wrong in LISTS:
            given["microbatches"] = self._wrong_tokens(event)
        given["target"] = target[: -1 if event.wrong == "uneven target" else rows]
        if event.wrong == "no target" or len(self.whole) - 1 not in self.parts:
            given["target"] = None
        has_input = 0 in self.parts and event.wrong != "no input"
        how = self.schedule.eval if event.rows == 1 else self.schedule.step
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are compared below)
            how(*(each[:rows] for each in inputs if has_input), **given)
        return str(error.value)

    def _wrong_tokens(self, event: Event) -> list[int]:
        """With an empty microbatch; or right, but other ones on the last rank, or another number of them."""
        tokens = [event.rows] * event.microbatches
        if event.wrong == "no tokens":
            return [*tokens, 0]
        if dist.get_world_size() == 1:
            return [*tokens, WIDTH + 1]  # not as many in all as any dimension has
        if dist.get_rank() == dist.get_world_size() - 1:
            others = event.wrong == "other tokens" and event.rows > 1
            return [event.rows + 1, event.rows - 1, *tokens[2:]] if others else [*tokens, WIDTH + 1]
        return tokens

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank."""
        return [each for part in self.parts.values() for each in part.parameters()]

    def _batch(self, event: Event) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(100 + self.step)
        return tuple(torch.randn(3, sum(event.parts), WIDTH).unbind())  # type: ignore[return-value]

    def _call(self, how: str, event: Event, **given: Any) -> list[float]:
        x, y, target = self._batch(event)
        first, last = 0 in self.parts, len(self.whole) - 1 in self.parts
        losses: list[Tensor] = []
        if event.is_split and pipelining.TAKES_MICROBATCHES:
            chunks = [each.split(event.parts) for each in (x, y, target)]
            given["arg_mbs"] = list(zip(*chunks[:2], strict=True)) if first else None
            given["target_mbs"] = list(chunks[2]) if last else None
            if not first and not last:
                given["kwarg_mbs"] = [{}] * len(event.parts)
            getattr(self.schedule, how)(losses=losses, **given)
        else:
            getattr(self.schedule, how)(
                *((x, y) if first else ()), target=target if last else None, losses=losses, **given
            )
        return [each.item() for each in losses]

    def _compare(self, event: Event) -> None:
        trains = event.kind == "train"
        before = {
            id(each): each.grad.clone()
            for part in self.parts.values()
            for each in part.parameters()
            if each.grad is not None
        }
        # The first step may be of the size that the schedule was built for.
        number: dict[str, Any] = {"microbatches": event.microbatches}
        if event.sizes:
            number = {"microbatches": len(event.sizes) if event.is_split else [*event.sizes]}
        elif self.step == 1 and event.microbatches == USUAL:
            number = {}
        if trains and self.scales and len({*event.sizes}) > 1:
            with pytest.raises(ValueError, match="and scale_grads weighs all"):
                self._call("step", event, **number)
            return
        expected = self._expected(event)
        context = nullcontext() if trains else getattr(torch, event.grad)()
        with context:
            losses = self._call("step" if trains else "eval", event, **number)
        assert pipelining.num_microbatches(self.schedule) == USUAL
        if losses:
            torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
        for index, part in self.parts.items():
            torch.testing.assert_close(part.seen, self.whole[index].seen, rtol=1e-9, atol=1e-9)
            for (name, found), wanted in zip(part.named_parameters(), self.whole[index].parameters(), strict=True):
                where = f"{name} of stage {index} after {event}"
                assert (found.grad is None) == (wanted.grad is None), where
                if found.grad is not None and wanted.grad is not None:
                    assert torch.allclose(found.grad, wanted.grad, rtol=1e-9, atol=1e-12), where
                    assert trains or torch.equal(found.grad, before[id(found)]), where

    def _expected(self, event: Event) -> list[float]:
        losses = []
        for *inputs, target in zip(*(each.split(event.parts) for each in self._batch(event)), strict=True):
            with torch.set_grad_enabled(event.kind == "train"):
                output: Any = inputs
                for part in self.whole:
                    output = part(*output)
                loss = loss_fn(output, target)
            losses.append(loss.item())
            if event.kind == "train":
                (loss / len(event.parts) if self.scales else loss).backward()
        return losses


def run_all(jobs: Sequence[tuple[str, bool, list[Event]]]) -> None:
    """Each on a schedule of its own, in the group that is there."""
    torch.set_default_dtype(torch.float64)
    try:
        for name, scale_grads, events in jobs:
            loop = Loop(name, scale_grads)
            done = []
            for event in events:
                done.append(event)
                try:
                    loop.run(event)
                except BaseException as error:
                    error.add_note(f"{name}, {scale_grads=}, after {done}")
                    raise
    finally:
        torch.set_default_dtype(torch.float32)


lengths = st.lists(st.integers(1, 7), min_size=1, max_size=6).map(tuple)
events = st.lists(
    st.builds(
        Event,
        kind=st.sampled_from(
            ["train"] * 4
            + ["eval"] * 3
            + ["adopt", "change", "zero", "zero", "freeze", *2 * ["freeze up to"], "refuse", "wrong", "wrong"]
        ),
        microbatches=st.integers(1, 5),
        rows=st.sampled_from([2, 2, 2, 1]),
        sizes=st.one_of(st.just(()), lengths) if pipelining.TAKES_MICROBATCHES else st.just(()),
        is_split=st.booleans(),
        grad=st.sampled_from(["no_grad", "inference_mode", "enable_grad"]),
        wrong=st.sampled_from(WRONG),
    ),
    min_size=2,
    max_size=10,
)
job = st.tuples(st.sampled_from(NAMES), st.booleans(), events)


@cache
def drawn(number: int) -> list[tuple[str, bool, list[Event]]]:
    """The jobs for ranks that are started once."""
    found: list[tuple[str, bool, list[Event]]] = []

    @settings(max_examples=number, deadline=None, phases=[Phase.generate])
    @given(job)
    def collect(one: tuple[str, bool, list[Event]]) -> None:
        found.append(one)

    collect()
    return found


FOUND = [Event("train", 2), Event("eval", 4), Event("train", 2), Event("train", 4), Event("train", 4)]
"""What once gave zeros for the gradients of all stages but the last."""
CHANGED = [FOUND[1], Event("change"), *FOUND[2:4], Event("change"), Event("eval"), Event("change"), Event("train")]
SIZES = [Event("train", *size) for size in ((3, 2), (2, 2), (7, 2), (3, 2), (2, 2), (1, 1), (3, 1), (2, 1), (3, 2))]
BEFORE = [Event("wrong", 2, wrong="no target"), Event("wrong", wrong="no input")]
"""Before torch has set up any messages."""
OTHER = Event("train", 2, rows=1)
REFUSED = [OTHER, *(Event("wrong", wrong=wrong) for wrong in WRONG), Event("train", is_split=True)]
MIXED = [
    Event("train", sizes=(3, 1, 2)),
    Event("train", sizes=(5, 7, 4, 6), is_split=True),
    Event("eval", sizes=(2, 6)),
    Event("train", is_split=True),
    Event("train", sizes=(1, 8)),
    Event("wrong", wrong="other tokens"),
    Event("freeze up to", 2),
    Event("train", sizes=(4, 9, 2)),
    Event("freeze up to", 1),
    Event("train", sizes=(9, 3)),
    Event("eval"),
    Event("train", sizes=(2,)),
]
"""Shapes that are learned in the second step at the latest, and known from then on."""
FIXED = [
    (name, bool(n), steps)
    for name in NAMES
    if name not in ("ZB2P", "VHalf")  # as ZBH1 and ZBV
    for n, steps in enumerate((SIZES, [*BEFORE, *FOUND, *CHANGED, *REFUSED]))
] + [(name, False, steps) for name in ("ZBV", "ZBH1", "ZB") for steps in (MIXED,) if pipelining.TAKES_MICROBATCHES]
HALF = [each for number, each in enumerate(FIXED) if number % 4 in (0, 3) or MIXED in each]
"""One of both lists for each schedule, in turn."""
OTHERS = [each for each in FIXED if each not in HALF]


@pytest.mark.parametrize("number", [20, pytest.param(60, marks=pytest.mark.long)])
def test_any_sequence_on_one_rank(one_rank: None, number: int) -> None:
    run_all(OTHERS if number > 20 else HALF)
    settings(max_examples=number, deadline=None)(given(job)(lambda drawn: run_all([drawn])))()


@pytest.mark.parametrize(
    ("ranks", "fixed", "number"),
    [(2, HALF, 4), *(pytest.param(*each, 15, marks=pytest.mark.long) for each in ((2, OTHERS), (3, FIXED)))],
    ids=["two_ranks", "two_ranks_more", "three_ranks"],
)
def test_any_sequence(ranks: int, fixed: list[Any], number: int) -> None:
    run_ranks(ranks, run_all, [*fixed, *drawn(number)], timeout=600)


class Always(Watcher):
    """Watches every step."""

    def before(self) -> Wanted:
        return Wanted.TIMES

    def after(self, record: StepRecord) -> None:
        assert record.spans


TRAIN = Event("train")


def refused_in_company() -> None:
    """Refused steps of schedules that others look at, or copy beside. Beside optimizer steps: test_whole_model."""
    torch.set_default_dtype(torch.float64)
    checked, watched, copied = Loop("ZBV"), Loop("ZBH1", split_backward="autograd"), Loop("VHalf")
    check = zbpipe.GradientCheck(checked.schedule, 2)
    watch(watched.schedule, Always())
    copied.schedule.adopt(copy_all(copied.schedule.schedule, Offload.ALL))
    for loop in (checked, watched, copied):
        for event in (TRAIN, Event("wrong"), TRAIN, Event("wrong", wrong="no input"), TRAIN):
            loop.run(event)
    assert check.report is not None
    assert check.report.microbatches == 2 * USUAL
    assert {stage for stage, _ in check.report.errors} == set(range(4)), "of all ranks"


def test_refused_steps_beside_checks_and_copies() -> None:
    run_ranks(2, refused_in_company)


@pytest.mark.parametrize("first", ["eval", "step"])
def test_a_checkpoint_around_a_compiled_module_takes_the_batch(one_rank: None, first: str) -> None:
    """torch infers shapes by a forward without the compiler, on the memory of the batch, and runs no backward."""
    torch.compiler.reset()
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    inner.compile(backend="aot_eager")
    module: Any = bare(lambda s, x: checkpoint(s.inner, x, use_reentrant=False), inner=lambda: inner)(0)
    schedule = pipelines.on_one_rank([module], 2, "ZBH1", mse_loss)
    x = torch.randn(4, WIDTH)
    getattr(schedule, first)(x, target=x)
    module.zero_grad()
    schedule.step(x, target=x)
    found = module.inner[0].weight.grad
    module.zero_grad()
    mse_loss(module.inner[1](nn.functional.linear(x, *module.inner[0].parameters())), x).backward()
    torch.testing.assert_close(found, module.inner[0].weight.grad)
