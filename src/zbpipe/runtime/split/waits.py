"""Weight gradients in the waits of F, I and B for collectives, such as those of tensor and expert parallelism.

Between a collective's launch and its wait, an op runs products that would otherwise run in W. One step measures the
waits, by op kind, stage and number within the op. From then on each wait has a fixed budget of FLOPs, the same on all
ranks with these stages: no clock decides. The products launch no collectives, so that all collectives keep their order.
Each weight's gradients are added in the order of the list, so that sums keep their bits.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zbpipe.costs.model import FillWaits
from zbpipe.runtime._torch import autograd, collectives, fsdp2
from zbpipe.runtime.device import find_device, seconds_between
from zbpipe.runtime.split import sources
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.weight_gradients import WeightGradients

MEASURED_STEP = 4
"""The first steps try out which gradients can wait, and compare contents."""
MOST_OVER = 2.0
"""A product may take this many times the rest of a wait: then at least half of it costs no time."""

logger = logging.getLogger(__name__)

Budgets = Mapping[str, Sequence[float]]
_Span = tuple[torch.Event, torch.Event]


class Work(Protocol):
    """`zbpipe.runtime.split.stage.SplitWork` of a stage."""

    stage: Any
    deferred: dict[int, list[PendingGradient]]
    left: dict[int, None]
    gradients: WeightGradients

    def add_early(self, microbatch: int, gradient: PendingGradient) -> None:
        """Add a deferred gradient to `.grad` before its W."""


class WaitFiller:
    """One per schedule and rank."""

    def __init__(
        self, how: FillWaits = "off", agree: Callable[[Callable[[], Budgets]], Budgets] = lambda find: find()
    ) -> None:
        """`agree` calls its argument on one of the ranks with these stages, and returns the result on all."""
        self.how, self._agree = how, agree
        self.budgets: Budgets | None = None
        """FLOPs for each wait of an op, by kind and stage, such as "I3". None before they are agreed."""
        self.filled = 0
        """Number of products that ran in waits."""
        self._ran = self._room = 0.0
        """FLOPs that ran in the waits of a step, and those that have room in them."""
        self._rate = 0.0
        """W's FLOPs per second, on the rank that logs. 0 once the log says how many ran."""
        self._works: Sequence[Work] = ()
        self._mark: Callable[[], torch.Event]
        """A timed event now, on the stages' device."""
        self._steps = 0
        self.is_measuring = False
        self._measured: defaultdict[str, list[list[_Span]]] = defaultdict(list)
        self._of_w: list[tuple[float, _Span]] = []
        """FLOPs and times of each W."""
        self._may_fill: dict[int, float] = {}
        """Fewest FLOPs of a product, by the ids of weights whose gradients may be added early."""
        self._barred: set[int] = set()

    @property
    def is_decided(self) -> bool:
        return self.how == "off" or self.budgets is not None

    def turn_off(self, reason: str) -> None:
        logger.warning("fill_waits=%r changes nothing: %s", self.how, reason)
        self.how, self.budgets = "off", None

    @contextmanager
    def follow_step(self, works: Sequence[Work]) -> Iterator[None]:
        """Context of a training step."""
        self._works, self._mark = works, find_device(works[0].stage.device).mark
        self._steps += 1
        self.is_measuring = self._steps >= MEASURED_STEP and not self.is_decided
        if not self.is_measuring:
            self._ran = self._room = 0.0
            yield
            if self._rate and self._room:
                words = "fill_waits=%r: W's products filled %.0f%% of these waits, %.3g s of this step on this rank"
                logger.info(words, self.how, 100 * self._ran / self._room, self._ran / self._rate)
                self._rate = 0.0
            return
        try:
            yield
            for leaf in self._barred & self._may_fill.keys():
                del self._may_fill[leaf]
            self.budgets = self._agree(self._find_budgets)
            self._log()
        finally:
            self.is_measuring = False
            self._measured.clear()
            self._of_w.clear()

    def fills(self, kind: str, work: Work) -> bool:
        return bool(self.budgets and self.budgets.get(f"{kind}{work.stage.stage_index}"))

    def during(self, kind: str, work: Work, pending: Sequence[PendingGradient] = ()) -> AbstractContextManager[None]:
        """Context of an op, which defers `pending`."""
        if self.is_measuring:
            return self._measure(kind, work, pending)
        return self._fill_during(kind, work, pending) if self.fills(kind, work) else nullcontext()

    @contextmanager
    def timing_w(self, pending: Sequence[PendingGradient]) -> Iterator[None]:
        if not self.is_measuring:
            yield
            return
        flops, start = sum(each.flops for each in pending), self._mark()
        yield
        self._of_w.append((flops, (start, self._mark())))

    @contextmanager
    def _measure(self, kind: str, work: Work, pending: Sequence[PendingGradient]) -> Iterator[None]:
        before = fsdp2.mark_gradients(work.stage.submod)
        with collectives.marking_waits(self._mark) as spans:
            yield
        self._measured[f"{kind}{work.stage.stage_index}"].append(spans)
        if kind == "I":
            self._find_fillable(work, pending, before)

    def _find_fillable(self, work: Work, pending: Sequence[PendingGradient], before: Mapping[int, object]) -> None:
        # Sums of other weights would get their terms in another order.
        shared = {id(each) for other in self._works if other is not work for each in other.stage.submod.parameters()}
        now = fsdp2.mark_gradients(work.stage.submod)
        changed = {leaf for leaf, mark in now.items() if before.get(leaf) != mark}
        self._barred |= (shared & now.keys()) | changed | (work.gradients.has_collectives or set())
        leaves = [(id(sources.find_leaf(each.weight)), each) for each in pending]
        uses = Counter(leaf for leaf, _ in leaves)
        for leaf, gradient in leaves:
            if uses[leaf] > 1 or isinstance(gradient.weight, sources.Made):
                self._barred.add(leaf)
            elif flops := gradient.flops:
                self._may_fill[leaf] = min(flops, self._may_fill.get(leaf, flops))

    def seconds_of_w(self) -> list[float]:
        """Of each W in the measured step, until its end."""
        return [seconds_between(*span) for _, span in self._of_w]

    def _find_budgets(self) -> Budgets:
        in_w, flops = sum(self.seconds_of_w()), sum(flops for flops, _ in self._of_w)
        least = min(self._may_fill.values(), default=0.0)
        budgets = {}
        for op, runs in self._measured.items():
            waits = [[seconds_between(*span) for span in run] for run in runs]
            numbers = range(max(map(len, waits)))
            usual = [statistics.median_low(each[n] for each in waits if n < len(each)) for n in numbers]
            found = [each * flops / in_w if in_w else 0.0 for each in usual]
            is_used = least and MOST_OVER * max(found, default=0.0) >= least and (op[0] != "F" or self.how == "all")
            budgets[op] = found if is_used else []
        return budgets

    def _log(self) -> None:
        assert self.budgets is not None
        if dist.get_rank() != 0:
            return
        flops = sum(flops for flops, _ in self._of_w)
        room = sum(sum(self.budgets.get(op, ())) * len(runs) for op, runs in self._measured.items())
        used = [op for op, budget in self.budgets.items() if budget]
        said = f"no op waits for a collective for as long as a product of W takes (backend {dist.get_backend()})"
        if used:
            self._rate, ops = flops / sum(self.seconds_of_w()), ", ".join(used)
            said = f"the collectives in {ops} take as long as {room / flops:.0%} of W, and W's products fill them"
        logger.info("fill_waits=%r: %s", self.how, said)

    @contextmanager
    def _fill_during(self, kind: str, work: Work, running: Sequence[PendingGradient]) -> Iterator[None]:
        assert self.budgets is not None
        budgets = self.budgets[f"{kind}{work.stage.stage_index}"]
        self._room += sum(budgets)
        left, works = iter(budgets), self._works if self.how == "all" else (work,)
        has_autocast = autograd.any_autocast()

        def around(wait: Callable[[], Any]) -> Any:
            if chosen := list(self._choose(works, running, next(left, 0.0))):
                self.filled += len(chosen)
                self._ran += sum(gradient.flops for _, _, gradient in chosen)
                with autograd.outside_of_modes(with_autocast=has_autocast):
                    for giver, microbatch, gradient in chosen:
                        giver.add_early(microbatch, gradient)
            return wait()

        with collectives.route_waits(around):
            yield

    def _choose(
        self, works: Sequence[Work], running: Sequence[PendingGradient], budget: float
    ) -> Iterator[tuple[Work, int, PendingGradient]]:
        """Take products from those that wait, in the order of each weight's microbatches."""
        for work in works:
            passed_by: set[int] = set()
            for microbatch in work.left:
                pending = work.deferred.get(microbatch)
                if pending is None:  # its backward comes first
                    break
                for place in reversed(range(len(pending))):
                    if budget <= 0:
                        return
                    gradient = pending[place]
                    leaf = id(sources.find_leaf(gradient.weight))
                    if leaf in passed_by or leaf not in self._may_fill:
                        continue
                    flops = gradient.flops
                    if flops > MOST_OVER * budget:
                        passed_by.add(leaf)
                        continue
                    del pending[place]
                    budget -= flops
                    yield work, microbatch, gradient
                if pending is running:  # its later products come before those of the next microbatch
                    break
