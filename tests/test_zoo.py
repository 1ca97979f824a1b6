"""Every model of the zoo gets the losses, gradients and buffers of plain autograd from the deferred split."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch._dynamo.guards
from ranks import run_ranks
from zoo import BY_NAME, CASES
from zoo.case import Case, Mode
from zoo.runner import SETTINGS, Setting, outcome, run_all, settings

from zbpipe.runtime.split.products import PendingGradient

# The first test of a number of ranks runs the models of all.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("one_rank", "tables")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_one_rank(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch times the guards of each graph, with the processor's caches emptied: an eighth of the compilation.
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
    torch.compiler.reset()
    for setting in settings(case, 1):
        assert outcome(case, setting)[0] is None, setting


@cache
def run_on(num_ranks: int) -> list[dict[str, str]]:
    """By rank and model what is wrong. Processes that start, and a group of them that meets, cost more than a model."""
    return run_ranks(num_ranks, run_all, timeout=800)


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [pytest.param(p, case, id=f"p{p}-{case.name}") for p in SETTINGS if p > 1 for case in CASES if settings(case, p)],
)
def test_on_several_ranks(num_ranks: int, case: Case) -> None:
    for rank, found in enumerate(run_on(num_ranks)):
        assert not found.get(case.name, "it was not run, as one before it failed"), rank


def test_many_models_are_run_on_several_ranks() -> None:
    assert sum(bool(settings(case, 2)) for case in CASES) > len(CASES) / 3


@pytest.mark.parametrize("mode", ["eager", "checkpointed", "compiled"])
@pytest.mark.usefixtures("one_rank", "tables")
def test_the_comparison_sees_a_broken_weight_gradient(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    torch.compiler.reset()
    case, setting = BY_NAME["plain"], Setting("ZBV", mode)
    assert outcome(case, setting) == (None, False)
    accumulate = PendingGradient.accumulate
    monkeypatch.setattr(PendingGradient, "accumulate", lambda self: accumulate(replace(self, dy=(1 + 1e-6) * self.dy)))
    wrong, is_broken = outcome(case, setting)
    assert not is_broken
    assert "the gradient of 1.a.weight is off by" in str(wrong)  # the stage that is compiled
