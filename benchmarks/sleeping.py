"""Stages that sleep instead of computing, so that the step's time does not depend on the machine's cores.

A stage holds one number. Processes, gloo's messages, torch's executor, and both backward splits are real.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.pipelining import PipelineStage

from zbpipe.costs.model import CostModel
from zbpipe.runtime._torch.hooks import HookOrder, hook
from zbpipe.runtime.build import build_pipeline_schedule
from zbpipe.schedule.ir import Op, OpKind, Schedule
from zbpipe.schedule.registry import resolve

_LATE = 1e-4
"""Usual delay of `time.sleep` in seconds: the longest time to spin, because cores are few."""


def sleep_until(end: float) -> None:
    """Return at `end` of `time.monotonic`, as exactly as the machine allows."""
    time.sleep(max(0.0, end - _LATE - time.monotonic()))
    while time.monotonic() < end:
        pass


class SleepingLayer(nn.Linear):
    """One number times a weight. F sleeps in the forward, I and W where autograd computes dX and dW.

    So each sleeps in the action that computes its gradient, with any split; in B, I and W sleep one after the other.
    """

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.seconds = dict.fromkeys((OpKind.F, OpKind.I, OpKind.W), 0.0)
        self.slept: list[tuple[OpKind, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self._sleep(OpKind.F)
        # The batch needs no gradient. In a model there are more layers, and all but the very first compute dX.
        x = x if x.requires_grad else x.detach().requires_grad_()
        return F.linear(self._sleep_in_backward(x, OpKind.I), self._sleep_in_backward(self.weight, OpKind.W))

    def _sleep_in_backward(self, tensor: Tensor, kind: OpKind) -> Tensor:
        """`tensor`, with a sleep before its gradient. Deferred, I passes None because W will compute dW."""
        view = tensor.view_as(tensor)
        # A hook of the tensor itself would keep its gradient in I.
        node = cast(Node, view.grad_fn)
        node.register_prehook(lambda gradients: None if gradients[0] is None else self._sleep(kind))
        return view

    def _sleep(self, kind: OpKind) -> None:
        start = time.monotonic()
        sleep_until(start + self.seconds[kind])
        self.slept.append((kind, time.monotonic() - start))


class Ran(NamedTuple):
    op: Op
    start: float
    end: float
    slept: tuple[tuple[OpKind, float], ...]
    """Kind (F, I, W) and seconds of each sleep."""


def check(ran: Sequence[Ran], ops: Sequence[Op], costs: CostModel, torchs_split: bool) -> None:
    """Raise unless exactly `ops` ran, in this order, and each slept once and long enough for each of its kinds.

    With torch's split the first stage, whose input needs no gradient, runs its whole backward in W.
    """
    if [each.op for each in ran] != list(ops):
        raise AssertionError(f"ran {' '.join(str(each.op) for each in ran)} instead of {' '.join(map(str, ops))}")
    for op, _, _, slept in ran:
        late = torchs_split and op.stage == 0
        belongs = {OpKind.B: "IW", OpKind.I: "" if late else "I", OpKind.W: "IW" if late else "W"}
        short = any(seconds < costs.of(op.stage, kind, op.microbatch).seconds - 1e-9 for kind, seconds in slept)
        if sorted(kind for kind, _ in slept) != list(belongs.get(op.kind, "F")) or short:
            raise AssertionError(f"{op} slept {slept}")


class Runner:
    """A schedule on this rank, ready to run steps. Costs are in seconds."""

    def __init__(
        self, source: str | Schedule, costs: CostModel, microbatches: int, receives: str | None = None
    ) -> None:
        rank, ranks, last = dist.get_rank(), dist.get_world_size(), costs.num_stages - 1
        algorithm = resolve(source)
        indices = algorithm.place(ranks).stages_on(rank)
        self._layers = {index: SleepingLayer() for index in indices}
        stages = [PipelineStage(layer, i, costs.num_stages, torch.device("cpu")) for i, layer in self._layers.items()]
        self.torchs = algorithm.source == "torch"
        options: dict[str, Any] = {} if self.torchs else {"costs": costs, "receives": receives}
        self.schedule = build_pipeline_schedule(algorithm, stages, microbatches, mean_loss, **options)
        self.costs = costs
        self.ops = algorithm.make(ranks, microbatches, costs=costs).ops[rank]
        self.ran: list[Ran] = []
        self.start = 0.0
        """Start of the last step, in seconds of `time.monotonic`."""
        batch = torch.ones(microbatches, 1)
        self.arguments = [batch] if 0 in indices else []
        self.target = batch if last in indices else None
        self._run()  # without sleep: the first step prepares shapes and more
        for index, layer in self._layers.items():
            layer.seconds = self._sleeps(index)

    def seconds(self) -> float:
        """Seconds of one step, from a common start to the end of the last rank."""
        self.ran.clear()
        with hook(self.schedule, HookOrder.RECORD, self._follow):
            self.start, seconds = run_together(self._run)
        check(self.ran, self.ops, self.costs, self.torchs)
        return seconds

    def _follow(self, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        op, layer, start = Op(stage, OpKind(kind), microbatch), self._layers[stage], time.monotonic()
        layer.slept, layer.seconds = [], self._sleeps(stage, microbatch)
        result = compute()
        if not self.ran or self.ran[-1].op != op:  # else this is the loss, one more F to hooks
            self.ran.append(Ran(op, start, time.monotonic(), tuple(layer.slept)))
        return result

    def _sleeps(self, stage: int, microbatch: int = -1) -> dict[OpKind, float]:
        return {kind: self.costs.of(stage, kind, microbatch).seconds for kind in (OpKind.F, OpKind.I, OpKind.W)}

    def _run(self) -> None:
        self.schedule.step(*self.arguments, target=self.target, return_outputs=False)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def run_together(run: Callable[[], None]) -> tuple[float, float]:
    """Run one step on all ranks. Returns their common start (of `time.monotonic`) and the step's seconds."""
    gc.collect()
    gc.disable()  # as trainers do: they collect garbage between steps
    dist.barrier()
    begin = torch.tensor([time.monotonic() + 0.02], dtype=torch.float64)  # all ranks share one clock
    dist.broadcast(begin, 0)
    sleep_until(start := begin.item())
    run()
    taken = torch.tensor([time.monotonic() - start], dtype=torch.float64)
    gc.enable()
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return start, taken.item()
