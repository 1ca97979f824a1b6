"""Every model of the zoo gets the losses, gradients and buffers of plain autograd from the deferred split.

A process that starts, and a group of them that meets, cost more than a model: all models of so many ranks go through
the same processes, and each test looks up what was found of its own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from ranks import endings
from zoo import BY_NAME, CASES
from zoo.case import Case, Mode
from zoo.runner import SETTINGS, Setting, outcome, run_all, settings

from zbpipe.runtime.split.products import PendingGradient

# The first test of a number of ranks runs the models of all.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
LIMIT = 1500.0
"""Seconds for all models on one number of ranks, beside other suites on two cores."""


PATIENCE = 20.0
"""Seconds that a rank waits for a message."""
Results = dict[tuple[str, str], list[str | None]]
"""By model and setting: of each rank what is wrong there, if anything."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """Runs the models that were asked for, once on each number of ranks."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]

    @cache
    def run(num_ranks: int) -> Results:
        left = [each["case"].name for each in asked if each.get("num_ranks") == num_ranks and "case" in each]
        errors: Results = {}
        while left:
            folder = tmp_path_factory.mktemp(f"p{num_ranks}")
            endings(num_ranks, run_all, left, folder, group_timeout=PATIENCE, timeout=LIMIT)
            found: Results = defaultdict(list)
            for file in sorted(folder.glob("*.jsonl")):
                for name, setting, wrong in map(json.loads, file.read_text().splitlines()):
                    found[name, setting].append(wrong)
            errors |= found
            done = {name for name, _ in found}
            left = [name for name in left if name not in done] if done else []
        return errors

    return run


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [pytest.param(p, case, id=f"p{p}-{case.name}") for p in SETTINGS for case in CASES if settings(case, p)],
)
def test_like_plain_autograd(results: Callable[[int], Results], num_ranks: int, case: Case) -> None:
    errors, wrong = results(num_ranks), []
    for setting in settings(case, num_ranks):
        found = errors.get((case.name, str(setting)), [])
        if len(found) < num_ranks:
            wrong.append(f"{setting}: {num_ranks - len(found)} ranks gave no result")
        wrong += [f"{setting}, rank {rank}: {error}" for rank, error in enumerate(found) if error]
    assert not wrong, "\n".join(wrong)


def test_every_model_is_run_on_one_rank_and_many_on_several() -> None:
    assert all(settings(case, 1) for case in CASES)
    assert len(CASES) >= 100
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
