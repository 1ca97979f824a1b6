"""Every model of the zoo gets the losses, gradients and buffers of plain autograd from the deferred split."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch._dynamo.guards
from ranks import run_ranks
from zoo import BY_NAME, CASES
from zoo.case import Case, Mode
from zoo.runner import Setting, compare, run_all, settings

from zbpipe.runtime.split.products import PendingGradient

# The first test on two ranks runs all models.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("one_rank", "tables")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_one_rank(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch times the guards of each graph, with the processor's caches emptied: an eighth of the compilation.
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
    torch.compiler.reset()
    for setting in settings(case, 1):
        compare(case, setting)


@cache
def run_on_two_ranks() -> list[dict[str, str]]:
    """By rank and model what is wrong. Processes that start, and a group of them that meets, cost more than a model."""
    return run_ranks(2, run_all, timeout=800)


@pytest.mark.parametrize("case", [case for case in CASES if settings(case, 2)], ids=lambda case: case.name)
def test_on_two_ranks(case: Case) -> None:
    for rank, found in enumerate(run_on_two_ranks()):
        assert not found.get(case.name, "it was not run, as one before it failed"), rank


@pytest.mark.parametrize("mode", ["eager", "checkpointed", "compiled"])
@pytest.mark.usefixtures("one_rank", "tables")
def test_the_comparison_sees_a_broken_weight_gradient(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    torch.compiler.reset()
    case, setting = BY_NAME["plain"], Setting("ZBV", mode)
    compare(case, setting)
    accumulate = PendingGradient.accumulate
    monkeypatch.setattr(PendingGradient, "accumulate", lambda self: accumulate(replace(self, dy=(1 + 1e-6) * self.dy)))
    with pytest.raises(AssertionError, match=r"1\.b\.weight: "):  # of the stage that is compiled
        compare(case, setting)
