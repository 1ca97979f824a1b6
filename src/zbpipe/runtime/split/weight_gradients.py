"""The weight gradients that backwards defer to W: collected in I, kept from changes, and added to `.grad`.

Between I and W, nothing else may change the tensors that W reads: x, dY, and a product's extra tensors. But autograd
passes gradients on without copies, so dY may share its memory with a `.grad`, to which later microbatches add in place;
x may be a buffer that a module reuses; and a backward may keep its incoming gradient. So I ends by copying all memory
with another holder: other tensors, NumPy, or a lender of memory to torch. It also copies small parts of large tensors,
such as the last token's hidden states, to free the rest.

autograd's versions miss writes through `.data` or by a kernel. So the content is also compared, but only in the first
microbatches of a layer: a correct job pays nothing after its second step. Each checking I and W waits for the device
once, and from the third step on a CUDA graph can capture steps.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zbpipe.runtime._torch import autograd, collectives, fsdp2, tensor_data
from zbpipe.runtime._torch.fsdp2 import Unit
from zbpipe.runtime.split import sources
from zbpipe.runtime.split.products import PendingGradient

STEPS, RUNS = 2, 4


@dataclass(slots=True)
class Checks:
    """Selects the checked uses of a layer: all in the first I of its first steps."""

    seen_steps: int = 0
    seen_runs: int = 0
    last: tuple[int, int] = (0, 0)

    def is_due(self, step: int, run: int) -> bool:
        """Whether to check in this run of this step. Step 0 precedes the first step."""
        if self.seen_steps > STEPS:
            return False
        if step and step != self.last[0]:
            self.seen_steps += 1
            self.seen_runs = 0
        if (step, run) != self.last:
            self.seen_runs += 1
            self.last = step, run
        return self.seen_steps <= STEPS and self.seen_runs <= RUNS

    def are_over(self, step: int) -> bool:
        """Whether no check follows `step` if later steps use the same layers."""
        return self.seen_steps >= STEPS or self.last[0] != step


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum per tensor, on the first tensor's device."""
    return torch.stack([tensor_data.fingerprint(each).to(tensors[0].device) for each in tensors])


def differ(some: Tensor, others: Tensor) -> Tensor:
    """Which fingerprints differ. Content that only becomes visible in a copy is no change."""
    return (some != others) & (some != tensor_data.HIDDEN) & (others != tensor_data.HIDDEN)


Changes = list[tuple[PendingGradient, str]]
"""Deferred gradients with changed tensors, and the names of these."""


def find_changes(pending: Iterable[PendingGradient]) -> Changes:
    """In-place changes since the layers deferred their gradients, as counted by autograd, and changes of contents since
    the fingerprints were taken, or since the last call."""
    changes = []
    for gradient in pending:
        now = tensor_data.versions_of(gradient.tensors)
        if now != gradient.versions:
            changes.append((gradient, gradient.name_where(map(operator.ne, now, gradient.versions))))
    checked = [(each, each.contents, fingerprints(each.tensors)) for each in pending if each.contents is not None]
    found = [differ(old, new).to(checked[0][2].device) for _, old, new in checked]
    marks = iter(torch.cat(found).tolist() if found else ())  # one wait for the device
    for gradient, _, new in checked:
        if words := gradient.name_where([next(marks) for _ in gradient.tensors]):
            changes.append((gradient, words))
        gradient.contents = new
    return changes


class WeightGradients:
    """Collects the weight gradients that backwards defer. One per schedule and rank."""

    def __init__(self, *, may_fuse: bool = True) -> None:
        self.may_fuse = may_fuse
        """Whether W may add a product to `.grad` by one kernel, which rounds less often than autograd."""
        # Plain attributes, because autograd runs the backward of CUDA ops in its own threads.
        self.recording: list[PendingGradient] | None = None
        """The deferred gradients; None while nothing records."""
        self.on_trial = False
        self.is_inferring = False
        """Whether torch infers shapes, one stage after the other. Compiled regions then run without the compiler."""
        self.are_whole = False
        """Whether the running F or B has no I. Its layers compute as without zbpipe, in less host time."""
        self.has_collectives: set[int] | None = None
        """Ids of the weights whose gradients need collectives in W; None if nobody asks."""
        self.step = self._run = 0
        """Counters of steps, and of their recordings."""

    @contextmanager
    def record(self, on_trial: bool = False) -> Iterator[list[PendingGradient]]:
        """Context in which layers defer their weight gradients into the yielded list."""
        # On trial, the gradients are added at once, and the list shows which ones would be deferred.
        pending: list[PendingGradient] = []
        self.recording, self.on_trial = pending, on_trial
        try:
            yield pending
        finally:
            self.recording, self.on_trial = None, False
            self._run += 1

    def defer(self, gradient: PendingGradient, checks: Checks | None = None) -> bool:
        """Defer `gradient`. False if nothing records, so that it has to be computed now."""
        if self.recording is None:
            return False
        gradient.may_fuse = self.may_fuse
        gradient.versions = tensor_data.versions_of(gradient.tensors)
        if checks is not None and self.step and checks.is_due(self.step, self._run):
            gradient.contents = fingerprints(gradient.tensors)
        self.recording.append(gradient)
        if self.on_trial:
            recording, self.recording = self.recording, None  # products that make a weight do not wait
            if self.has_collectives is None:
                gradient.accumulate()
            else:
                with collectives.finding_collectives() as has_any:
                    gradient.accumulate()
                if has_any():
                    self.has_collectives.add(id(sources.find_leaf(gradient.weight)))
            self.recording = recording
        return True


_WASTE = 2
"""Ratio of a storage to its deferred bytes from which these are copied. The copy takes no more than it frees."""


def copy_if_shared(pending: Sequence[PendingGradient]) -> None:
    """Copy tensors for W whose memory has other holders, or is mostly unused."""
    tensors = (each for gradient in pending for each in gradient.tensors if not tensor_data.is_alone(each))
    copies: dict[int, Tensor] = {}
    for storage, own in tensor_data.group_by_storage(tensors):
        if storage is None or tensor_data.has_others(storage, own) or _is_mostly_unused(storage, own):
            parts: dict[tuple[object, ...], Tensor] = {}
            for each in own:  # several layers may share one x
                if (part := _identify_part(each)) not in parts:
                    parts[part] = each.clone()
                copies[id(each)] = parts[part]
    for gradient in pending:
        if copies and any(id(each) in copies for each in gradient.tensors):
            gradient.tensors = tuple(copies.get(id(each), each) for each in gradient.tensors)


def _is_mostly_unused(storage: torch.UntypedStorage, own: Sequence[Tensor]) -> bool:
    return 0 < _WASTE * sum({_identify_part(each): each.nbytes for each in own}.values()) <= storage.nbytes()


def _identify_part(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def accumulate(pending: list[PendingGradient]) -> Iterator[None]:
    """Compute the deferred gradients, and add one to `.grad` at each step of the iterator."""
    # From the last pair to the first, freeing each, because the latest pairs of I are still in the cache. Weights made
    # from the same parameters, such as those of experts, share a graph that runs once.
    left = Counter(_makers_of(each.weight) for each in pending if isinstance(each.weight, sources.Made))
    made: defaultdict[Sequence[int], list[tuple[GradientEdge, Tensor]]] = defaultdict(list)
    while pending:
        gradient = pending.pop()
        weight = gradient.weight
        if not isinstance(weight, sources.Made):
            gradient.accumulate()
            yield
            continue
        makers = _makers_of(weight)
        made[makers].append((weight.edge, gradient.gradient()))
        left[makers] -= 1
        if not left[makers]:
            edges, gradients = zip(*made.pop(makers), strict=True)
            torch.autograd.backward(edges, gradients, retain_graph=True)
        yield


def _makers_of(weight: sources.Made) -> tuple[int, ...]:
    return tuple(map(id, weight.leaves))


def accumulate_and_reduce(
    module: nn.Module, pending: list[PendingGradient], layers: Iterable[nn.Module]
) -> Iterator[None]:
    """Compute a stage's last deferred gradients, of these layers. FSDP2 reduces each unit as soon as its gradients are
    complete."""
    units = _order(layers, fsdp2.list_units(module))
    fsdp2.begin(module)
    of_others, *of_units = _sort(pending, units)
    yield from accumulate(of_others)
    for unit, own in zip(units, of_units, strict=True):
        yield from accumulate(own)
        fsdp2.reduce(unit)


def _order(layers: Iterable[nn.Module], units: Sequence[Unit]) -> list[Unit]:
    """The units in the order of their reductions: without products first, then from the largest on."""
    # A reduction overlaps the next unit's products, so the last one, which nothing hides, has to be small. All
    # data-parallel ranks need the same order, so it must not depend on this microbatch's products, which may leave out
    # experts.
    multiplied = {
        id(parameter)
        for layer in layers
        for parameter in autograd.own_parameters(layer).values()
        if parameter is not None and parameter.dim() > 1
    }
    return sorted(units, key=lambda unit: (not unit.parameters.isdisjoint(multiplied), -unit.elements))


def _sort(pending: list[PendingGradient], units: Sequence[Unit]) -> list[list[PendingGradient]]:
    """The products of parameters outside all units, and those of each unit. Empties `pending`."""
    place_of = {own: place for place, unit in enumerate(units, start=1) for own in unit.parameters}
    found: list[list[PendingGradient]] = [[] for _ in range(len(units) + 1)]
    for gradient in (part for each in pending for part in each.parts):
        found[place_of.get(id(sources.find_leaf(gradient.weight)), 0)].append(gradient)
    pending.clear()
    return found


def defer_in_loss(loss_fn: Callable[..., Tensor], gradients: WeightGradients) -> Callable[..., Tensor]:
    """`loss_fn` with the weight gradients of its own backwards deferred to the last stage's W."""
    # Losses such as TorchTitan's chunked one run their own backwards during F. The loss's backward in I passes the
    # gradients deferred in F on to W. Until then the gradients of all logits stay in memory, which a chunked loss
    # otherwise avoids.

    @wraps(loss_fn)
    def compute(*args: Any, **kwargs: Any) -> Tensor:
        with gradients.record() as pending:
            loss = loss_fn(*args, **kwargs)
        if loss.requires_grad:
            return _HandOn.apply(loss, pending, gradients)  # type: ignore[no-any-return]
        _defer_or_add(pending, gradients)
        return loss

    return compute


def _defer_or_add(pending: list[PendingGradient], gradients: WeightGradients) -> None:
    while pending:
        for gradient in pending.pop(0).parts:
            if not gradients.defer(gradient):
                gradient.accumulate()


class _HandOn(torch.autograd.Function):
    """The identity. Its backward passes on the loss's deferred gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, pending: list[PendingGradient], gradients: WeightGradients) -> Tensor:
        ctx.pending, ctx.gradients = pending, gradients
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        for gradient, words in find_changes(ctx.pending):
            raise RuntimeError(
                f"{words} of a {type(gradient.layer).__name__} in the loss was changed in place between F and I, so its"
                " weight gradient in W would be wrong: keep it in I by layer.weight_products = {}"
            )
        _defer_or_add(ctx.pending, ctx.gradients)
        return dloss, None, None


autograd.copy_type(_HandOn, lambda loss, *_: loss.view_as(loss))
