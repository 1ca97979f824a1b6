"""The optimizer step that no rank waits for gives what an ordinary one gives, to the bit: also when it is repeated."""

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from hashlib import sha256
from math import inf
from threading import get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pipelines import squared_error
from ranks import run_ranks
from test_optimizer_step_jobs import Job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.optimizer.norm import Votes, clip
from zbpipe.runtime.optimizer.step import StepCounts

RANKS, MICROBATCHES, WIDTH = 3, 6, 8
STEPS = 10
CLIPPED = (2, 3, 4, 7)
"""Steps with large targets: consecutive ones, too."""
MAX_NORM = 10.0
NAN_ON_ONE_RANK = 8

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=3e-3, weight_decay=0.1, foreach=True),
    "fused AdamW": lambda parameters: AdamW(parameters, lr=3e-3, weight_decay=0.1, fused=True),
    "Adam": lambda parameters: Adam(parameters, lr=3e-3, foreach=False, amsgrad=True),
    "SGD": lambda parameters: SGD(parameters, lr=3e-2, momentum=0.9, nesterov=True, foreach=True),
    "Adafactor": lambda parameters: Adafactor(parameters, lr=3e-3),
}


class Part(nn.Module):
    """A stage with random numbers, and with buffers that each forward changes and replaces."""

    count: Tensor
    replaced: Tensor

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.replaced = self.replaced + 1
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Outcome(NamedTuple):
    """Of one rank."""

    digest: str
    """Of parameters, buffers, optimizer state and learning rate."""
    losses: list[str]
    norms: list[str]
    counts: StepCounts
    begun_ahead: int
    """Steps that began before the validation of the last optimizer step."""
    reductions: set[str]
    """Modules that reduced anything over all ranks."""


Case = tuple[str, torch.dtype, dict[str, Any]]
"""An optimizer, the dtype of the model, and arguments of `train`."""


def batches(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(7)
    for number in range(STEPS):
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=numbers).to(dtype)
        y = torch.randn(2 * MICROBATCHES, WIDTH, generator=numbers)
        yield x, y * (30 if number in CLIPPED else 1)


def train(
    name: str,
    optimizer: str,
    dtype: torch.dtype = torch.float32,
    ordinary: bool = False,
    max_norm: float = MAX_NORM,
    on_nonfinite: str = "propagate",
    nan: bool = False,
    zeroed_by_the_job: bool = False,
    **options: Any,
) -> Outcome:
    rank = dist.get_rank()
    part = lambda index, _: Part(index).to(dtype)  # noqa: E731
    job = Job(name, microbatches=MICROBATCHES, make_part=part, loss=squared_error, optimize=OPTIMIZERS[optimizer])
    scheduler = LambdaLR(job.optimizer, lambda number: 1 / (1 + number))
    how: dict[str, Any] = {"max_norm": max_norm, "lr_schedulers": scheduler, "on_nonfinite": on_nonfinite}
    step: Any = (job.ordinary if ordinary else job.ahead)(**how, **options)
    torch.manual_seed(1000 + rank)
    losses, reductions, reduce = [], set(), dist.all_reduce

    def watched(*args: Any, **kwargs: Any) -> Any:
        reductions.add(sys._getframe(1).f_globals["__name__"])
        return reduce(*args, **kwargs)

    with (
        mock.patch.object(pipelining, "run_ahead", side_effect=pipelining.run_ahead) as run_ahead,
        mock.patch.object(dist, "all_reduce", watched),
    ):
        for number, (x, y) in enumerate(batches(dtype)):
            if zeroed_by_the_job:
                job.optimizer.zero_grad(set_to_none=False)
            losses.append(str(job.run(x, target=y)))
            if nan and number == NAN_ON_ONE_RANK and rank == 1:
                job.trained[0].grad[0] = torch.nan  # type: ignore[index]
            step()
    if not ordinary:
        step.finish()
    state = [*job.weights().values(), torch.tensor(job.optimizer.param_groups[0]["lr"])]
    digest = sha256(b"".join(each.double().numpy().tobytes() for each in state)).hexdigest()
    counts = getattr(step, "counts", StepCounts())
    return Outcome(digest, losses, [str(each) for each in job.norms], counts, run_ahead.call_count, reductions)


def pairs(name: str, cases: list[Case]) -> list[tuple[Outcome, Outcome]]:
    """By case, an ordinary training and one that runs ahead. Cases share the ordinary one."""
    ordinary = cache(partial(train, name, ordinary=True))
    found = []
    for optimizer, dtype, how in cases:
        if how.get("max_norm") == CLOSE:
            how = how | {"max_norm": NEARLY * float(ordinary(optimizer, dtype).norms[0])}  # noqa: PLW2901
        shared = {key: how[key] for key in ("on_nonfinite", "nan", "max_norm") if key in how}
        found.append((ordinary(optimizer, dtype, **shared), train(name, optimizer, dtype, **how)))
    return found


@cache
def run_all(name: str, dtype: torch.dtype, cases: tuple[str, ...]) -> list[list[tuple[Outcome, Outcome]]]:
    """By rank and case. One start of the processes serves all."""
    return run_ranks(RANKS, pairs, name, [(CASES[case][0], dtype, CASES[case][1]) for case in cases])


def compare(name: str, dtype: torch.dtype, cases: tuple[str, ...], case: str) -> tuple[Outcome, Outcome]:
    """What rank 0 found in both ways. All ranks decide alike."""
    by_rank = [found[cases.index(case)] for found in run_all(name, dtype, cases)]
    for rank, (usual, ahead) in enumerate(by_rank):
        assert ahead.digest == usual.digest, rank
        assert ahead.losses == usual.losses, rank
        # No step follows the last one.
        assert ahead.begun_ahead >= ahead.counts.validated + ahead.counts.repeated - 1, rank
        assert ahead.counts == by_rank[0][1].counts
    return by_rank[0]


CLOSE, NEARLY = -1.0, 1 + 5e-6
"""Stands for a limit that the first norm does not exceed, but is too close to to tell from a sum in another order."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "predicting": ("AdamW", {"predict": True}),
    "usual": ("AdamW", {"predict": False}),
    # SGD with Nesterov's momentum, which writes into gradients, repeats steps with the same ones.
    "gradients set to 0 by the job": ("SGD", {"zeroed_by_the_job": True, "predict": False}),
    "close to the limit": ("AdamW", {"max_norm": CLOSE, "predict": False}),
    "NaN": ("AdamW", {"nan": True, "predict": False}),
    "NaN, skipped": ("AdamW", {"nan": True, "on_nonfinite": "skip", "predict": False}),
    "unlimited": ("AdamW", {"max_norm": inf}),
    **{name: (name, {"predict": False}) for name in ("fused AdamW", "SGD", "Adam", "Adafactor")},
}
"""An optimizer, and arguments of `train`."""
USUAL = tuple(CASES)[:7]


@pytest.mark.parametrize("case", USUAL)
def test_the_result_is_that_of_an_ordinary_step(case: str) -> None:
    usual, found = compare("ZBV", torch.float32, USUAL, case)
    counts = found.counts
    assert counts.validated + counts.repeated + counts.synchronous + counts.unlimited == STEPS
    assert (counts.synchronous > 0) == (case == "predicting")
    match case:
        case "unlimited":  # no message beyond those of the schedule, and of the stages' set-up in torch 2.15
            assert counts == StepCounts(unlimited=STEPS)
            assert [each for each in found.reductions if not each.startswith("torch.distributed.pipelining.")] == []
        case "close to the limit":
            limit = NEARLY * float(usual.norms[0])
            assert counts.repeated == sum(float(norm) * (1 + 1e-5) >= limit for norm in usual.norms)
        case _:
            assert counts.validated > 0
            assert counts.repeated >= (2 if case == "predicting" else len(CLIPPED) + case.startswith("NaN"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype", "cases"),
    [("ZBV", torch.bfloat16, ("fused AdamW", "SGD", "Adafactor")), ("ZBH2", torch.float32, ("Adam", "Adafactor"))],
    ids=str,
)
def test_other_optimizers(name: str, dtype: torch.dtype, cases: tuple[str, ...]) -> None:
    for case in cases:
        counts = compare(name, dtype, cases, case)[1].counts
        assert counts.validated > 0
        assert counts.validated + counts.repeated == STEPS
        assert counts.repeated >= len(CLIPPED)


@pytest.mark.usefixtures("one_rank")
def test_the_norm_is_of_plain_and_sharded_gradients_together() -> None:
    plain, whole = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    mesh = init_device_mesh("cpu", (1,))
    sharded = nn.Parameter(distribute_tensor(whole, mesh))
    plain.grad, sharded.grad = torch.full((2,), 3.0), distribute_tensor(torch.full((2,), 4.0), mesh)
    for parameters in ([plain, sharded], [sharded, plain]):
        assert clip(parameters, inf, None, torch.device("cpu")).item() == pytest.approx(50**0.5)


@pytest.mark.usefixtures("one_rank")
def test_a_vote_reads_the_norm_on_the_stream_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[int] = set()
    stream = mock.MagicMock(__enter__=lambda _: there.add(get_ident()), __exit__=lambda *_: there.remove(get_ident()))
    device = SimpleNamespace(current_stream=lambda: stream)
    monkeypatch.setattr("zbpipe.runtime.optimizer.norm.find_device", lambda of: device)
    square = mock.MagicMock(__float__=lambda _: float(get_ident() in there))
    assert Votes(0, 1, dist.group.WORLD).cast(square, "one step").result() == 1.0  # type: ignore[arg-type]
