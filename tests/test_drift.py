"""The drift detector: no alarm without a change, a lasting change found within five steps, and who is to blame."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from zbpipe import CostModel, Placement
from zbpipe.costs import Link
from zbpipe.costs.drift import CALIBRATION, DriftDetector, causes


def times(noise: float, steps: int, seed: int, mean: float = 1.0) -> list[float]:
    random = Random(seed)
    return [mean * max(1 + noise * random.gauss(0, 1), 0.3) for _ in range(steps)]


def test_false_alarms_are_rarer_than_one_in_a_thousand_steps() -> None:
    """Under noise of 10 %, over 20,000 steps and all that is usual after each alarm."""
    detector = DriftDetector()
    alarms = sum(detector.observe(each) is not None for each in times(0.1, 20_000, seed=0))
    assert alarms < 20


@pytest.mark.parametrize(
    ("noise", "ratio", "at_least"), [(0.1, 1.4, 0.98), (0.1, 0.7, 0.95), (0.05, 1.2, 0.98), (0.0, 1.12, 1.0)]
)
def test_a_lasting_change_is_found_within_five_steps(noise: float, ratio: float, at_least: float) -> None:
    found = 0
    for seed in range(200):
        detector = DriftDetector()
        for each in times(noise, CALIBRATION, seed):
            assert detector.observe(each) is None
        found += any(detector.observe(each) for each in times(noise, 5, 1000 + seed, ratio))
    assert found >= at_least * 200


def test_what_it_says_of_a_change() -> None:
    detector = DriftDetector()
    for each in times(0.01, 50, seed=1):
        detector.observe(each)
    drift = next(filter(None, map(detector.observe, times(0.01, 10, seed=2, mean=1.5))))
    assert drift.ratio == pytest.approx(1.5, rel=0.03)
    assert drift.steps == 3
    # What is usual from now on is no drift again.
    assert not any(map(detector.observe, times(0.01, 100, seed=3, mean=1.5)))


def test_long_steps_now_and_then_are_no_drift() -> None:
    """As those with checkpoints."""
    detector = DriftDetector()
    for number, each in enumerate(times(0.02, 1000, seed=4)):
        assert detector.observe(each if number % 20 else 20 * each) is None


def test_causes() -> None:
    ways = {pair: Link(1e-5, 1e9) for pair in ((0, 1), (1, 0), (1, 2), (2, 1))}
    before = CostModel((1.0,) * 6, (1.0,) * 6, (1.0,) * 6, (1.0,) * 6, links=ways, message_bytes=1e6)
    placement = Placement.v(3)
    none = "no single rank or link: all of them changed, or other work runs on their machines"
    assert causes(before, before, placement) == none
    slow = replace(before, f=(1, 1, 4, 4, 1, 1))
    assert causes(before, slow, placement) == "rank 2 computes 2.00 times as long as before"
    away = replace(before, links=ways | {(1, 2): Link(1e-5, 1e8), (2, 1): Link(1e-5, 1e8)})
    assert causes(before, away, placement) == ("the link of the ranks 1 and 2 takes 9.91 times as long as before")
    # What has changed by far fewer seconds is noise, or waits for the cause.
    assert causes(before, replace(away, f=(1, 1, 14, 14, 1, 1)), placement).startswith("rank 2 computes 5.33")
    assert "link" not in causes(before, replace(away, f=(1, 1, 14, 14, 1, 1)), placement)
    both = causes(before, replace(away, message_bytes=2e8, f=(1, 1, 2.5, 2.5, 1, 1)), placement)
    assert both.startswith("the link of the ranks 1 and 2 takes")
    assert "rank 2 computes 1.50" in both
    assert causes(before, replace(slow, i=(1.4, 1, 4, 4, 1, 1.4)), placement).startswith("rank 2 computes 3.00")
    assert "rank 0" not in causes(before, replace(slow, i=(1.4, 1, 4, 4, 1, 1.4)), placement)
    longer = replace(before, f=(2.0,) * 6, i=(2.0,) * 6, w=(2.0,) * 6)
    assert causes(before, longer, placement) == "all ranks compute 2.00 times as long as before"
