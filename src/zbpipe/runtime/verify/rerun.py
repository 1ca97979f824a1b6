"""Rerun of a microbatch on its stage: the same forward from the same state, then one ordinary full backward.

Gradients, weights, buffers, attributes and random states are restored afterwards. Modules with other state are refused.
Post-accumulate hooks do not run. Hooks on tensors and modules run, because they may change a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbpipe.runtime._torch import autograd, fsdp2, pipelining, tensor_data
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime.module_state import ModuleState
from zbpipe.runtime.split.deferring_layers import deferrals

_HIDDEN_STATE = (
    "stage {stage}, microbatch {microbatch}: its gradients cannot be checked, because a second run of its forward from"
    " the same weights, buffers, attributes and random numbers gives another output. The forward depends on {what},"
    " which it changes itself: keep that in a buffer or directly in an attribute of the module, or omit the check"
)


class Microbatch:
    """The data for a rerun of a stage's microbatch. With `defers_loss`, the backward adds the loss's deferred gradients
    by the same product as W. Otherwise FSDP2 could reduce them too early, or have them on other ranks than after W."""

    def __init__(
        self, stage: pipelining.Stage, index: int, like: ModuleState | None = None, *, defers_loss: bool = False
    ) -> None:
        self.stage = stage
        self.index = index
        self.state = ModuleState(stage.submod, pipelining.device_of(stage), like)
        self._defers_loss = defers_loss
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._loss: Callable[[Any], Tensor] | None = None
        self._output_grads: Any = None
        self._copies: dict[int, Tensor] = {}
        """Copies of the inputs by their ids, which are valid while the stage holds the inputs."""
        self._inputs: list[Any] = []
        self._outputs: list[tuple[Tensor, int]] = []
        """Outputs of F, each with its number of in-place changes."""

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the stage's forward, `call`, and record its inputs."""
        self._args, self._kwargs = autograd.tree_map_only(Tensor, self._copy, (args, kwargs))
        output = call(*args, **kwargs)
        tensors = [each.detach() for each in autograd.tree_leaves(output) if isinstance(each, Tensor)]
        self._outputs = [(each, tensor_data.version_of(each)) for each in tensors]
        return output

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return self._copies.setdefault(id(tensor), copy)

    def loss(self, call: Callable[..., Tensor], output: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the loss, `call`, and record all its arguments except the output."""
        self._loss = lambda again: call(again, *args, **kwargs)
        return call(output, *args, **kwargs)

    def remember_backward(self, tensors: Mapping[str, Any]) -> None:
        """Record the start of the stage's backward (see `_torch.hooks.route_calls`)."""
        self._output_grads = autograd.tree_map_only(Tensor, lambda each: each.detach().clone(), tensors["output_grads"])
        self._inputs = [self._copies.get(id(each), each) for each in tensors["input_values"]]

    def compute_gradients(self) -> tuple[dict[str, Tensor], Sequence[Tensor | None]]:
        """Gradients of one ordinary backward, by parameter (of DTensors, this rank's part) and of the tensors among the
        inputs. All state is restored afterwards.

        Raises:
            ValueError: the forward does not repeat its output, because it depends on state that cannot be restored.
        """
        module = self.stage.submod
        now = ModuleState(module, pipelining.device_of(self.stage), self.state)
        written = (*now.tensors, *self.state.tensors)
        with torch.no_grad(), tensor_data.keep_versions(written), fsdp2.without_gradients(module):
            self.state.restore()
            try:
                with torch.enable_grad():
                    output, inputs = self._run()
                    gradients = copy_gradients(module), inputs
                    if not self._is_as_in_f(output):
                        self._require_repeatable()
                return gradients
            finally:
                now.restore()

    def _is_as_in_f(self, output: Any) -> bool:
        """Whether a second forward gave the outputs of F. Outputs that have changed since then do not count."""
        again = [each for each in autograd.tree_leaves(output) if isinstance(each, Tensor)]
        return len(again) == len(self._outputs) and all(
            tensor_data.version_of(one) != version or _are_close(one, other)
            for (one, version), other in zip(self._outputs, again, strict=True)
        )

    def _require_repeatable(self) -> None:
        """Refuse a forward that does not repeat its output with the split either."""
        for _ in range(2):  # an alternating state may be back at its start
            self.state.restore()
            before = _describe_attributes(self.stage.submod)
            output = pipelining.run_forward(self.stage, self.index, self._args, self._kwargs)
            if not self._is_as_in_f(output):
                self.state.restore()
                after = _describe_attributes(self.stage.submod)
                changed = [repr(name) for name, value in after.items() if before[name] != value]
                what = ", ".join(changed) or "something outside of its modules, or hidden in an object of theirs"
                raise ValueError(_HIDDEN_STATE.format(stage=self.stage.stage_index, microbatch=self.index, what=what))

    def _run(self) -> tuple[Any, Sequence[Tensor | None]]:
        """The module's output, and the gradients of its inputs after a backward."""
        plain = partial(_plain, self.stage.submod)
        with plain():
            output = of_module = pipelining.run_forward(self.stage, self.index, self._args, self._kwargs)
        if self._loss is not None:
            with nullcontext() if self._defers_loss else plain():
                output = self._loss(output)
        with plain():
            return of_module, pipelining.run_backward(self.stage, output, self._output_grads, self._inputs)


def _describe_attributes(module: nn.Module) -> dict[str, str]:
    """Attributes of all modules as text, with the contents of containers and objects."""
    return {
        f"{name}.{attribute}".lstrip("."): repr(getattr(value, "__dict__", value))
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if attribute not in ("_parameters", "_buffers", "_modules")
    }


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Equality up to rounding, far below any noticeable change of a gradient."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    size = torch.linalg.vector_norm(widen(one, one))
    error = torch.linalg.vector_norm(widen(one, one) - widen(other, one))
    return not bool(error > _CLOSE.get(one.dtype, 1e-2) * size)


_CLOSE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5}


def copy_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the current gradients, at least in float32. For DTensors, this rank's part."""
    return {each.name: widen(each.gradient, each.parameter) for each in fsdp2.iterate_accumulated(module)}


def widen(gradient: Tensor, like: Tensor) -> Tensor:
    """A copy, at least in float32. For DTensors, this rank's part, placed as `like`."""
    gradient = gradient.detach()
    if isinstance(gradient, DTensor):
        if isinstance(like, DTensor):
            gradient = gradient.redistribute(placements=like.placements)
        gradient = gradient.to_local()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)


@contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    """Context in which layers and compiled regions run as if zbpipe had never prepared them."""
    with ExitStack() as plain:
        for deferral in deferrals(module).values():
            plain.enter_context(replaced(deferral, products={}, plans={}))
        yield
