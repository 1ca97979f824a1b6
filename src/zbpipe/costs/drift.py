"""Whether the steps of a job have become slower or faster for good, from nothing but their times.

A CUSUM on both sides (Page 1954): it adds up by how many deviations of the usual noise a step is longer than usual,
less some slack a step, and raises an alarm when the sum is too large. It finds a small change late and a large one
soon, where "k of the last n steps beyond x" sees only whether a step is beyond x. What a single step counts is limited,
so that a checkpoint or a pause of the collector, however long, is no drift: at least three steps have to be beyond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, inf, log
from statistics import fmean, median

from zbpipe.costs.model import CostModel
from zbpipe.schedule.ir import OpKind, Placement

CALIBRATION = 20
"""Steps from which the usual time and its noise are taken."""
_LEAST_NOISE = 0.03
"""As a share of a step. Changes of about three times the noise are found; smaller ones would not pay for measuring."""
_SLACK = 0.8
"""Deviations that a step may be longer without counting."""
_MOST = 2.5
"""Deviations that a single step counts."""
_ALARM = 4.5
"""Deviations in sum: more than twice `_MOST` - `_SLACK`, so that two steps are not enough, however long."""
_NORMAL = 1.4826
"""Deviations in a median absolute deviation, if times are normal."""
_WORTH_TELLING = 1.1
"""A rank that takes this many times its former time is named."""
_OF_A_LINK = 1.5
"""The same for a link, whose time is measured by a few messages."""


@dataclass(frozen=True)
class Drift:
    """A change that lasts."""

    ratio: float
    """Time of a step since then, over the usual one."""
    steps: int
    """How many steps ago it began, about."""


class DriftDetector:
    """Looks at the time of one step after the other.

    It learns the usual time from the first `CALIBRATION` steps, and anew after each alarm.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what is usual."""
        self._known: list[float] = []
        """Logarithms of the times from which it learns, until it has enough."""
        self._usual = self._noise = 0.0
        self._sums = [0.0, 0.0]
        """Upwards and downwards."""
        self._since: list[list[float]] = [[], []]
        """The steps since each sum was 0."""

    def observe(self, seconds: float) -> Drift | None:
        """Take the time of one step, and return the drift if there is one."""
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
    """Which ranks and links take longer, or less time, than they did; in words for a log.

    >>> from zbpipe import CostModel, Placement
    >>> one, slow = (CostModel((1.0, x), (1.0, x), (1.0, x), (1.0, 1.0)) for x in (1.0, 2.0))
    >>> causes(one, slow, Placement.loop(2))
    'rank 1 computes 2.00 times as long as before'
    """
    changed = _largest(_changes(before, after, placement))
    if not changed:
        return "no single rank or link: all of them, or other work on their machines"
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
    """Those worth telling: the one of the most seconds first, and what has changed by half as many at least."""
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
    """Seconds of a message there and back."""
    return sum(costs.links[pair].seconds(costs.message_bytes) for pair in ((one, other), (other, one)))
