"""The computations of a stage: an object that torch's executor calls through the stage's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.stage import _PipelineStageBase

from zbpipe.runtime._torch import fsdp2
from zbpipe.runtime._torch.fsdp2 import is_fsdp
from zbpipe.runtime._torch.messages import StageMessages, replace_methods, restore_methods

Around = Callable[[str, int, int, Callable[[], Any]], Any]
"""Takes kind, stage and microbatch of a computation, and the computation. Runs it and returns its result."""


class StageWork:
    """The computations of one stage by torch's own methods; subclasses compute differently. The stage holds it. Hooks
    run around `forward`, `backward`, `input_gradient`, `weight_gradient` and the loss."""

    METHODS: ClassVar[tuple[str, ...]] = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")

    def __init__(self, stage: _PipelineStageBase) -> None:
        before = find_work(stage)
        if before is not None:
            before.release()
        self.stage = stage
        self.hooks: list[tuple[int, Around]] = [] if before is None else before.hooks
        """Functions around each computation, outermost first."""
        self.torchs: SimpleNamespace = replace_methods(stage, self, self.METHODS)
        cast(Any, stage).zbpipe_work = self

    def release(self) -> None:
        restore_methods(self.stage, self, self.torchs)
        del cast(Any, self.stage).zbpipe_work

    def forward(self, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        return self.torchs.forward_one_chunk(microbatch, *args, **kwargs)

    def backward(self, microbatch: int, loss: Tensor | None, is_last: bool) -> None:
        """B. `is_last`: whether it is the stage's last backward in this step."""
        self.torchs.backward_one_chunk(microbatch, loss, True, is_last)

    def input_gradient(self, microbatch: int, loss: Tensor | None) -> None:
        self.torchs.backward_one_chunk(microbatch, loss, False)

    def weight_gradient(self, microbatch: int, is_last: bool) -> Iterator[None]:
        """W in pieces: each step of the iterator computes one."""
        self.torchs.backward_weight_one_chunk(microbatch, last_backward=is_last)
        yield

    def loss(self, microbatch: int, compute: Callable[[], Any]) -> Any:
        """The loss of a microbatch on the last stage, one more F to hooks."""
        return self._run("F", microbatch, compute)

    # Called by torch's executor.

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        return self._run("F", microbatch, partial(self.forward, microbatch, *args, **kwargs))

    def backward_one_chunk(
        self, microbatch: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if full_backward:
            self._run("B", microbatch, partial(self.backward, microbatch, loss, last_backward))
        else:
            self._run("I", microbatch, partial(self.input_gradient, microbatch, loss))

    def backward_weight_one_chunk(self, microbatch: int, last_backward: bool = False) -> None:
        self._run("W", microbatch, lambda: [*self.weight_gradient(microbatch, last_backward)])

    def _run(self, kind: str, microbatch: int, compute: Callable[[], Any]) -> Any:
        for _, around in reversed(self.hooks):
            compute = partial(around, kind, self.stage.stage_index, microbatch, compute)
        return compute()


class OwnWork(StageWork):
    """The computations of a stage of zbpipe's schedules. Frees the loss's graph, lets FSDP2 gather and reduce during
    computations, and supports evaluation."""

    METHODS = (
        *StageWork.METHODS,
        *("backward_maybe_with_nosync", "clear_runtime_states", "scale_grads"),
        # torch 2.15 calls the last two instead of `perform_reduce_grad`.
        *("perform_reduce_grad", "start_gradient_reduction", "wait_for_gradient_reduction"),
    )

    def __init__(self, stage: _PipelineStageBase) -> None:
        before = find_work(stage)
        super().__init__(stage)
        known = before if isinstance(before, OwnWork) else None
        self.messages: StageMessages = known.messages if known else StageMessages(stage)
        self.fsdp_mode: fsdp2.FsdpMode = known.fsdp_mode if known else "overlap"
        self.is_reduced = True
        """Whether the running step reduces FSDP2's gradients. Otherwise a later step does."""
        self.gathering: Sequence[Any] = ()
        """FSDP2's modules that the running F waits for, each when it needs it."""
        self.whole: frozenset[int | None] = frozenset()
        """Microbatches with a B in the running step."""
        self.left: dict[int, None] = {}
        """Microbatches whose W or B has not run in this step, in the order of the list."""
        self.is_reducing = False
        """Whether the last W or B of this step has started FSDP2's reductions."""
        self._divisor = 1
        """Divisor of the reduced gradients."""

    def forward(self, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(microbatch, *args, **kwargs)
        self.finish_gathering()
        self.messages.require_gradients_of(output)
        self.messages.take_output(microbatch, output)
        return output

    def backward(self, microbatch: int, loss: Tensor | None, is_last: bool) -> None:
        super().backward(microbatch, loss, is_last)
        # torch's schedule keeps every loss until the end of the step, and the loss's graph would keep the stage's
        # input. (The I of torch's own split leaves the graph for W.)
        if loss is not None and not loss._is_view():
            loss.detach_()

    def clear_runtime_states(self) -> None:
        """At the beginning of a step."""
        self.forget_run()

    def forget_run(self) -> None:
        """Forget the results of the microbatches, also between two runs of a step."""
        self.is_reducing = False
        self.torchs.clear_runtime_states()

    @property
    def overlaps_fsdp(self) -> bool:
        return self.fsdp_mode != "torch" and fsdp2.IS_KNOWN and is_fsdp(self.stage.submod)

    @property
    def reshards(self) -> bool:
        """Whether FSDP2 gathers a module for each F and backward, and then frees it."""
        return self.fsdp_mode == "reshard" and self.overlaps_fsdp

    def finish_gathering(self) -> None:
        """Wait for the modules that no F has waited for."""
        for each in self.gathering:
            each.wait()
        self.gathering = ()

    @property
    def reduces_early(self) -> bool:
        """Whether FSDP2 starts to reduce gradients in the last W or B."""
        # A framework may have its own backward, or replace torch's REDUCE_GRAD.
        own = self._find_method("perform_reduce_grad")
        is_torchs = getattr(own, "__func__", None) is _PipelineStageBase.perform_reduce_grad
        return self.overlaps_fsdp and self.is_reduced and not self.own_backward and is_torchs

    @property
    def own_backward(self) -> str:
        """Name of the framework's function that replaces the stage's backward; empty for torch's own."""
        own = self._find_method("backward_maybe_with_nosync")
        is_torchs = own == type(self.stage).backward_maybe_with_nosync.__get__(self.stage)
        return "" if is_torchs else getattr(own, "__qualname__", repr(own))

    def _find_method(self, name: str) -> Any:
        found = getattr(self.stage, name)
        return getattr(self.torchs, name) if found == getattr(self, name) else found

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "full" or not (last_backward and self.reduces_early):
            return self.torchs.backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        # torch forbids FSDP2's hooks to reduce in any backward, and waits at the end of each.
        self.is_reducing = True
        tensors = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        with fsdp2.reducing_backward(self.stage.submod):
            return stage_backward(*tensors), None

    # torch's list is the same in evaluation, which must not scale gradients of earlier steps.

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # The rank's other stages may still compute, so the end of the reduction can wait for them.
        if self.is_reducing:
            self._divisor = grad_scale_factor
        elif self.stage.has_backward:
            self.torchs.perform_reduce_grad(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        if not self.is_reducing:
            self.torchs.start_gradient_reduction()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        if self.is_reducing:
            self._divisor = grad_scale_factor
        else:
            self.torchs.wait_for_gradient_reduction(grad_scale_factor)

    def finish_reduction(self) -> None:
        """Wait, at the end of the step, for a reduction that the stage's last W or B started."""
        if not self.is_reducing:
            return
        self.is_reducing = False
        fsdp2.finish(self.stage.submod)
        if self._divisor != 1:
            self.stage.scale_grads(self._divisor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        if self.stage.has_backward:
            self.torchs.scale_grads(grad_scale_factor)


def find_work(stage: _PipelineStageBase) -> StageWork | None:
    return getattr(stage, "zbpipe_work", None)


def own(stage: _PipelineStageBase) -> OwnWork:
    """The work of a stage of zbpipe's schedules. The stage holds it from now on."""
    found = find_work(stage)
    return found if isinstance(found, OwnWork) else OwnWork(stage)
