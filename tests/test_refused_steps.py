"""What one rank refuses, or fails in, all ranks learn, and the next step is right on all of them."""

from __future__ import annotations

import gc
import random
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import endings, run_ranks
from test_faults import explode
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime.measure.recording import StepRecord, Wanted, Watcher, watch
from zbpipe.simulator.offloading import Offload, copy_all

MICROBATCHES, WIDTH = 4, 8
LOOP = "loop"
"""A table, so for no other number of microbatches."""


class Job:
    """A pipeline of small stages beside the same model without a pipeline."""

    def __init__(self, name: str, **options: Any) -> None:
        torch.set_default_dtype(torch.float64)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        algorithm = zbpipe.generate("InterleavedZeroBubble", num_ranks, MICROBATCHES) if name == LOOP else name
        indices = zbpipe.stage_indices(algorithm, rank=rank, num_ranks=num_ranks)
        last = len(indices) * num_ranks - 1
        self.parts = [self.part(index) for index in range(last + 1)]
        self.whole = nn.Sequential(*(self.part(index) for index in range(last + 1)))
        self.indices, self.has_first, self.has_last = indices, 0 in indices, last in indices
        stages = [PipelineStage(self.parts[index], index, last + 1, torch.device("cpu")) for index in indices]
        self.schedule: Any = zbpipe.build_pipeline_schedule(algorithm, stages, MICROBATCHES, F.mse_loss, **options)

    @staticmethod
    def part(index: int) -> nn.Module:
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def run(self, seed: int, how: str, wrong: Wrong | None, number: int | None) -> list[float]:
        """One step on all ranks; the losses, where the last stage is."""
        x, t = self.batch(seed, number)
        given: dict[str, Any] = {"args": (x,) if self.has_first else (), "target": t if self.has_last else None}
        if wrong is not None:
            given |= wrong(self, x, t)
        losses: list[Tensor] = []
        more = {} if number is None else {"microbatches": number}
        getattr(self.schedule, how)(*given.pop("args"), losses=losses, **given, **more)
        return [each.item() for each in losses]

    @staticmethod
    def batch(seed: int, number: int | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        count = number or MICROBATCHES
        return torch.randn(2 * count, WIDTH), torch.randn(2 * count, WIDTH)

    def step(self, seed: int, how: str = "step", wrong: Wrong | None = None, number: int | None = None) -> str:
        """The same, with losses as without a pipeline; what this rank refused it by, if it did."""
        before = [parameter.grad for part in self.parts for parameter in part.parameters()]
        kept = [None if each is None else each.clone() for each in before]
        try:
            losses = self.run(seed, how, wrong, number)
        except ValueError as error:
            after = [parameter.grad for part in self.parts for parameter in part.parameters()]
            assert all(one is other for one, other in zip(before, after, strict=True))
            for one, other in zip(kept, after, strict=True):
                assert one is None or (other is not None and torch.equal(one, other))
            return str(error)
        expected = []
        x, t = self.batch(seed, number)
        for xs, ts in zip(x.chunk(len(x) // 2), t.chunk(len(t) // 2), strict=True):
            loss = F.mse_loss(self.whole(xs), ts)
            expected.append(loss.item())
            if how == "step":
                (loss / (len(x) // 2)).backward()
        if self.has_last:
            assert losses == pytest.approx(expected, rel=1e-12)
        return ""

    def zero_grad(self) -> None:
        for part in (*self.parts, self.whole):
            part.zero_grad()

    def error(self) -> float:
        """The largest relative error of the gradients on this rank."""
        pairs = [
            (mine.grad, own.grad)
            for index in self.indices
            for mine, own in zip(self.parts[index].parameters(), self.whole[index].parameters(), strict=True)
        ]
        return max(float((one - other).norm() / other.norm()) for one, other in pairs)  # type: ignore[operator, union-attr]


Wrong = Callable[[Job, Tensor, Tensor], Mapping[str, Any]]
"""What is wrong with a step on the ranks that have its input or its target."""


def short_batch(job: Job, x: Tensor, t: Tensor) -> Mapping[str, Any]:
    return {"args": (x[: len(x) // 2],) if job.has_first else ()}


def uneven_batch(job: Job, x: Tensor, t: Tensor) -> Mapping[str, Any]:
    return {"args": (x[:-1],) if job.has_first else (), "target": t[:-1] if job.has_last else None}


def empty_batch(job: Job, x: Tensor, t: Tensor) -> Mapping[str, Any]:
    return {"args": (x[:0],) if job.has_first else (), "target": t[:0] if job.has_last else None}


def wider_batch(job: Job, x: Tensor, t: Tensor) -> Mapping[str, Any]:
    return {"args": (torch.cat((x, x), dim=1),) if job.has_first else ()}


def no_input(job: Job, x: Tensor, t: Tensor) -> Mapping[str, Any]:
    return {"args": ()}


def no_target(job: Job, x: Tensor, t: Tensor) -> Mapping[str, Any]:
    return {"target": None}


def uneven_target(job: Job, x: Tensor, t: Tensor) -> Mapping[str, Any]:
    return {"target": t[:-1] if job.has_last else None}


WRONG: tuple[Wrong, ...] = (uneven_batch, empty_batch, no_input, no_target, uneven_target)
OF_OTHER_SHAPES: tuple[Wrong, ...] = (short_batch, wider_batch)
"""Wrong only if the step does not set up messages for shapes."""


def random_steps(name: str, seed: int, count: int) -> list[tuple[str, str]]:
    """Steps of all kinds, some of them wrong. What each was, and what this rank refused it by."""
    choose = random.Random(seed)
    job = Job(name)
    seen = []
    before = ""
    for number in range(count):
        how = choose.choice(("step", "step", "step", "eval"))
        size = choose.choice((None, None, MICROBATCHES, *(() if name == LOOP else (2, 6))))
        steady = how == before and size is None and dist.get_world_size() > 1
        wrong = choose.choice((None, None, *WRONG, *(OF_OTHER_SHAPES if steady else ())))
        before = before if wrong else how
        if choose.random() < 0.5:
            job.zero_grad()
        refused = job.step(number, how, wrong, size)
        what = f"{number}: {how} {'' if wrong is None else wrong.__name__} {size}"
        seen.append((what, refused))
        # In a usual eval no message goes back: the ranks before have run their part, and none is behind.
        last_is_alone = job.schedule.placement.rank_of[-1] != 0 and wrong in (no_target, uneven_target)
        is_told = how == "step" or not steady or job.has_last or not last_is_alone
        assert bool(refused) == (wrong is not None and is_told), (name, seed, what, refused)
        if how == "step" and not refused:
            assert (off := job.error()) < 1e-12, (name, seed, what, off)
            job.zero_grad()
    return seen


def sequences(names: tuple[str, ...], seeds: int, steps: int) -> list[list[tuple[str, str]]]:
    return [random_steps(name, seed, steps) for name in names for seed in range(seeds)]


@pytest.mark.parametrize(
    ("num_ranks", "names", "seeds"),
    [
        (1, ("ZBH1", "ZBV"), 2),
        (2, ("ZBH1", "ZBV", LOOP), 2),
        pytest.param(4, ("ZBH2", "ZBVLean", "Auto", LOOP), 1, marks=pytest.mark.long),
    ],
)
def test_all_ranks_refuse_what_one_refuses(num_ranks: int, names: tuple[str, ...], seeds: int) -> None:
    per_rank = run_ranks(num_ranks, sequences, names, seeds, 12, timeout=240)
    for steps in zip(*per_rank, strict=True):
        for answers in zip(*steps, strict=True):
            assert len({what for what, _ in answers}) == 1
            own = [refused for _, refused in answers if refused and "All ranks" not in refused]
            told = [refused for _, refused in answers if "All ranks have skipped this step" in refused]
            assert not told or any(each in told[0] or "refuses this step" in told[0] for each in own), answers


class Always(Watcher):
    """Watches every step."""

    def before(self) -> Wanted:
        return Wanted.TIMES

    def after(self, record: StepRecord) -> None:
        assert record.spans


def in_company() -> None:
    """Refused steps of schedules that others look at, or copy beside."""
    for job in (Job("ZBV"), Job("ZBH1", split_backward="autograd"), Job("ZBV")):
        check = None
        if job.schedule.algorithm.name == "ZBH1":
            watch(job.schedule, Always())
        elif dist.get_world_size() > 1:
            check = zbpipe.GradientCheck(job.schedule, 2)
        else:
            job.schedule.adopt(copy_all(job.schedule.schedule, Offload.ALL))
        for number, wrong in enumerate((None, short_batch, None, uneven_batch, no_input, None, None)):
            job.zero_grad()
            assert bool(job.step(number, wrong=wrong)) == (wrong is not None)
            assert wrong or job.error() < 1e-12
        if check:
            assert check.report is not None
            assert check.report.microbatches == 2 * MICROBATCHES
            assert {stage for stage, _ in check.report.errors} == set(range(4)), "of all ranks"


def with_optimizer(refuse: bool, max_norm: float, kind: str) -> list[Tensor]:
    """The weights after some steps; with some refused ones in between, of which the optimizer must not know."""
    job = Job("ZBV")
    parameters = [each for index in job.indices for each in job.parts[index].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    step = zbpipe.OptimizerStep(job.schedule, optimizer, max_norm=max_norm, predict=False)
    for number in range(6):
        if refuse and number % 2:
            with pytest.raises(ValueError, match="the microbatches have inputs"):
                job.run(100 + number, "step", short_batch, None)
        job.run(number, "step", None, None)
        step()
    step.finish()
    assert job.schedule.optimizer_steps[kind] == 6
    return [each.detach().clone() for each in parameters]


def beside_others() -> None:
    in_company()
    for limit in ((1e-3, "repeated"), (100.0, "validated")):
        for one, other in zip(with_optimizer(False, *limit), with_optimizer(True, *limit), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_refused_steps_beside_checks_copies_and_optimizer_steps() -> None:
    run_ranks(2, beside_others)


def without_torchrun(port: int) -> None:
    """As srun and mpirun start ranks: the store ends with rank 0, which fails."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    job = Job("ZBH1")
    job.run(0, "step", None, None)
    if rank == 0:
        job.parts[0].register_forward_pre_hook(explode)
    job.run(1, "step", None, None)


def test_rank_0_has_the_store_and_fails() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = r"rank 0, schedule .*, step 1 of \d+, 0F0: ArithmeticError: too much"
    first, second = endings(2, without_torchrun, port, group_timeout=60)
    assert re.search(f"PipelineError: {words}", first.error or ""), first
    assert re.search(f"PipelineError: another rank failed first: {words}", second.error or ""), second


def schedules_that_stay(kinds: tuple[str, ...]) -> list[str]:
    """After which of these ends a schedule is still there, without a look for garbage: its group would outlive it."""
    gc.collect()
    gc.disable()
    stay = []
    for kind in kinds:
        schedule = ref(end(kind).schedule)
        if schedule() is not None:
            stay.append(kind)
        dist.barrier()
    return stay


def end(kind: str) -> Job:
    job = Job("ZBV")
    job.run(0, "step", None, None)
    if kind == "failed" and 1 in job.indices:
        job.parts[1].register_forward_pre_hook(explode)
    with suppress(ValueError, zbpipe.PipelineError):
        job.run(1, "step", uneven_batch if kind == "refused" else None, None)
    return job


def test_no_end_keeps_a_schedule_in_a_cycle() -> None:
    assert run_ranks(2, schedules_that_stay, ("good", "refused", "failed")) == [[], []]
