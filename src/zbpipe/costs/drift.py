"""Detects lasting changes of the step time from the step times alone.

A CUSUM on both sides (Page 1954): it sums how far each step exceeds the usual time, in deviations, less some slack per
step. A large sum raises an alarm. Small changes are found late and large ones soon. A rule like "k of the last n steps
beyond x" ignores by how much. The contribution of one step is limited, so a long checkpoint or garbage collection is no
drift: at least three steps have to exceed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, inf, log
from statistics import fmean, median

from zbpipe.costs.model import CostModel
from zbpipe.schedule.ir import OpKind, Placement

CALIBRATION = 20
"""Number of steps that calibrate the usual time and its noise."""
_LEAST_NOISE = 0.03
"""Least noise, as a share of a step. Detectable changes are about three times the noise. Smaller ones do not justify
measuring."""
_SLACK = 0.8
"""Deviations by which a step may be longer without counting."""
_MOST = 2.5
"""Largest contribution of a single step, in deviations."""
_ALARM = 4.5
"""Alarm level of the sum, in deviations. It exceeds twice `_MOST` - `_SLACK`, so two steps never suffice, however
long."""
_NORMAL = 1.4826
"""Standard deviations per median absolute deviation, for normally distributed times."""
_WORTH_TELLING = 1.1
"""Least ratio to the former time for which a rank is named."""
_OF_A_LINK = 1.5
"""Least ratio for a link, whose time is measured with a few messages."""


@dataclass(frozen=True)
class Drift:
    """A change that lasts."""

    ratio: float
    """Step time since the change, relative to the usual one."""
    steps: int
    """Approximate number of steps since the change."""


class DriftDetector:
    """Detects drift from one step time after another.

    It learns the usual time from the first `CALIBRATION` steps, and again after each alarm.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the usual time."""
        self._known: list[float] = []
        """Logarithms of the calibration times."""
        self._usual = self._noise = 0.0
        self._sums = [0.0, 0.0]
        """Upward and downward sum."""
        self._since: list[list[float]] = [[], []]
        """Steps since each sum was last 0."""

    def observe(self, seconds: float) -> Drift | None:
        """Record the time of one step. Returns the drift if one is found."""
        if len(self._known) < CALIBRATION:
            self._learn(log(seconds))
            return None
        beyond = (log(seconds) - self._usual) / self._noise
        for side, sign in enumerate((1, -1)):
            self._sums[side] = max(0.0, self._sums[side] + min(sign * beyond, _MOST) - _SLACK)
            self._since[side] = [*self._since[side], log(seconds)] if self._sums[side] else []
            if self._sums[side] > _ALARM:
                found = Drift(exp(median(self._since[side]) - self._usual), len(self._since[side]))
                self.begin_anew()
                return found
        return None

    def _learn(self, value: float) -> None:
        self._known.append(value)
        if len(self._known) == CALIBRATION:
            self._usual = median(self._known)
            spread = _NORMAL * median(abs(each - self._usual) for each in self._known)
            self._noise = max(spread, _LEAST_NOISE)


def causes(before: CostModel, after: CostModel, placement: Placement) -> str:
    """Ranks and links that are slower or faster than before, in words for a log.

    >>> from zbpipe import CostModel, Placement
    >>> one, slow = (CostModel((1.0, x), (1.0, x), (1.0, x), (1.0, 1.0)) for x in (1.0, 2.0))
    >>> causes(one, slow, Placement.loop(2))
    'rank 1 computes 2.00 times as long as before'
    """
    changed = _largest(_changes(before, after, placement))
    if not changed:
        return "no single rank or link: all of them changed, or other work runs on their machines"
    slower = [each.ratio > 1 for each in changed]
    if placement.num_ranks > 1 and sum(each.of_rank for each in changed) == placement.num_ranks and len({*slower}) == 1:
        return f"all ranks compute {fmean(each.ratio for each in changed if each.of_rank):.2f} times as long as before"
    return ", ".join(f"{each.what} {each.ratio:.2f} times as long as before" for each in changed)


@dataclass(frozen=True)
class _Change:
    what: str
    before: float
    """Seconds for one microbatch."""
    after: float
    of_rank: bool

    @property
    def ratio(self) -> float:
        if self.before <= 0:
            return inf if self.after > 0 else 1.0
        return self.after / self.before

    @property
    def seconds(self) -> float:
        return abs(self.after - self.before)


def _changes(before: CostModel, after: CostModel, placement: Placement) -> Iterator[_Change]:
    for rank in range(placement.num_ranks):
        stages = placement.stages_on(rank)
        yield _Change(f"rank {rank} computes", _seconds(before, stages), _seconds(after, stages), of_rank=True)
    for one, other in sorted({(min(pair), max(pair)) for pair in before.links.keys() & after.links.keys()}):
        what = f"the link of the ranks {one} and {other} takes"
        yield _Change(what, _message(before, one, other), _message(after, one, other), of_rank=False)


def _largest(changes: Iterable[_Change]) -> list[_Change]:
    """Changes worth reporting: the one with the most seconds first, then those with at least half as many."""
    worth = [
        each
        for each in changes
        if not 1 / (least := _WORTH_TELLING if each.of_rank else _OF_A_LINK) <= each.ratio <= least
    ]
    most = max((each.seconds for each in worth), default=0.0)
    return sorted((each for each in worth if each.seconds >= most / 2), key=lambda each: -each.seconds)


def _seconds(costs: CostModel, stages: tuple[int, ...]) -> float:
    return sum(costs.seconds(stage, kind) for stage in stages for kind in (OpKind.F, OpKind.B))


def _message(costs: CostModel, one: int, other: int) -> float:
    """Round-trip time of a message, in seconds."""
    return sum(costs.links[pair].seconds(costs.message_bytes) for pair in ((one, other), (other, one)))
