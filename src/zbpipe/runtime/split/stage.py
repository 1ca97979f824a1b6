"""The backward split on a pipeline stage: I is one ordinary backward, W computes the deferred gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpipe.costs.job import ENOUGH
from zbpipe.runtime._torch import autograd, compiler, fsdp2, pipelining
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.stage_work import OwnWork, find_work, own
from zbpipe.runtime.split import sources
from zbpipe.runtime.split.deferring_layers import (
    catch_around,
    defer_in_compiled_regions,
    defer_weights,
    deferral_of,
    deferrals,
)
from zbpipe.runtime.split.delaying import delay_in_i_alone, delaying, forget
from zbpipe.runtime.split.products import PendingGradient, title
from zbpipe.runtime.split.waits import WaitFiller
from zbpipe.runtime.split.weight_gradients import (
    WeightGradients,
    accumulate,
    accumulate_and_reduce,
    copy_if_shared,
    find_changes,
)
from zbpipe.runtime.split.work import StaysInI, WeightWork, describe, look_at_graphs, percent

SplitBackward = Literal["deferred", "strict", "autograd"]
"""Kinds of backward split. "deferred" is zbpipe's. "strict" is the same, with an error for stages that defer nothing.
"autograd" is torch's own, which walks the autograd graph twice."""

_SETTLED_AFTER = 2
"""Number of I after which the deferred gradients are known. The first I leaves nothing to W."""

logger = logging.getLogger(__name__)


def split_backward(
    stages: Sequence[pipelining.Stage],
    how: SplitBackward,
    gradients: WeightGradients | None = None,
    *,
    in_compiled_regions: bool = True,
    waits: WaitFiller | None = None,
) -> None:
    """Prepare `stages` (all of one rank) for I and W, which defer into `gradients`."""
    if how not in get_args(SplitBackward):
        raise ValueError(
            f"split_backward={how!r} is unknown: use 'deferred' (zbpipe's), 'strict' (the same, or an error) or"
            " 'autograd' (torch's own)"
        )
    for stage in stages:
        if any(map(fsdp2.reduces_in_hooks, stage.submod.modules())):
            raise ValueError(
                f"stage {stage.stage_index} is wrapped by DistributedDataParallel or the replicate made from it, whose"
                " gradient hooks do not fit a backward in two parts: use fully_shard, or FSDP2's replicate, or a"
                " schedule without I and W"
            )
    if how == "autograd":
        require_not_compiled(stages, "split_backward='autograd'")
        return
    require_memory_that_lasts(stages)
    gradients = gradients or WeightGradients()
    for stage in stages:
        (find_split(stage) or SplitWork(stage)).defer(tuple(stages), gradients, waits or WaitFiller())
        if in_compiled_regions:
            defer_in_compiled_regions(stage.submod, gradients)
        if how == "strict" and not deferrals(stage.submod):
            raise ValueError(
                f"stage {stage.stage_index} has no layer that can defer its weight gradient: no layer multiplies with"
                " a parameter. split_backward='deferred' would run full backwards as its I"
            )


def find_split(stage: pipelining.Stage) -> SplitWork | None:
    found = find_work(stage)
    return found if isinstance(found, SplitWork) else None


def infer_without_compiler(stage: pipelining.Stage) -> AbstractContextManager[None]:
    """Context in which torch infers shapes: `stage` runs its compiled regions without the compiler."""
    # Otherwise the stages would compile one after the other, and not all at once in `warm_up`.
    split = find_split(stage)
    return nullcontext() if split is None else replaced(split.gradients, is_inferring=True)


def find_pending(stage: pipelining.Stage, microbatch: int) -> Sequence[PendingGradient]:
    """Gradients deferred by this microbatch's I. Empty after W, or for torch's own split."""
    split = find_split(stage)
    return () if split is None else split.deferred.get(microbatch, ())


def find_weight_work(stage: pipelining.Stage) -> WeightWork | None:
    split = find_split(stage)
    return None if split is None else split.work


def find_deferred_share(stages: Sequence[pipelining.Stage]) -> float | None:
    """Share of the weight gradients' FLOPs that W computes, over all ranks, which have to call this. None without W."""
    found = [work for each in stages if (work := find_weight_work(each)) is not None]
    flops = [sum(each.flops * each.share for each in found), sum(each.flops for each in found)]
    total = torch.tensor(flops, dtype=torch.float64, device=pipelining.device_of(stages[0]))
    dist.all_reduce(total, group=stages[0].group)
    waiting, everything = total.tolist()
    return waiting / everything if everything else None


def require_no_early_reduction(stages: Sequence[pipelining.Stage]) -> None:
    """Refuse stages whose gradients FSDP would reduce in I, before W adds to them."""
    # torch's stages defer the reduction only if the whole stage is an FSDP module. A framework's own backward may treat
    # the parts differently, but it is set after the schedule was built. So call this when the first step begins. The
    # last W checks gradients that such a backward leaves unreduced.
    for stage in stages:
        if own(stage).own_backward or fsdp2.is_fsdp(stage.submod):
            continue
        if any(map(fsdp2.is_fsdp, stage.submod.modules())):
            raise ValueError(
                f"stage {stage.stage_index}: fully_shard wraps parts of the stage, not the stage, so these parts would"
                " reduce their gradients in I, before W adds to them. Also call fully_shard on the whole stage, or use"
                " a schedule without I and W"
            )


def require_not_compiled(stages: Sequence[pipelining.Stage], what: str) -> None:
    """Refuse torch's own split, for `what`, on compiled modules."""
    # torch raises an error about donated buffers at the first W. With `donated_buffer=False`, which it suggests,
    # weight gradients are wrong (torch 2.13 and 2.15).
    compiled = [stage.stage_index for stage in stages if any(map(compiler.is_compiled, stage.submod.modules()))]
    if compiled:
        raise ValueError(
            f"{what} cannot split the compiled modules of stages {compiled} (with donated_buffer=False their weight"
            " gradients come out wrong): use one of zbpipe's schedules with split_backward='deferred'"
        )


def require_memory_that_lasts(stages: Sequence[pipelining.Stage]) -> None:
    """Refuse compiled modules in CUDA graphs, in which each microbatch would overwrite the previous one's x and dY."""
    # Inductor reads its configuration at a module's first call, so call this again when the first step begins.
    for stage in stages:
        for name, module in stage.submod.named_modules():
            if compiler.runs_in_cuda_graphs(module):
                raise ValueError(
                    f"stage {stage.stage_index}: {title(name, type(module).__name__)} is compiled to"
                    " run in CUDA graphs, whose memory the next microbatch overwrites, but deferred gradients have to"
                    " last until W: compile it without them (mode='reduce-overhead', mode='max-autotune', the option"
                    " triton.cudagraphs and TORCHINDUCTOR_CUDAGRAPHS=1 turn them on, mode='max-autotune-no-cudagraphs'"
                    " does not), or use a schedule without I and W"
                )


def find_obstacle_to_fills(stages: Sequence[pipelining.Stage]) -> str:
    """The reason why W's products cannot fill these stages' waits; empty if they can."""
    if any(find_split(stage) is None for stage in stages):
        return "only zbpipe's split of the backward has products that wait, in schedules with I and W"
    for stage in stages:
        for name, module in stage.submod.named_modules():
            if compiler.is_compiled(module):
                which = title(name, type(module).__name__)
                return f"stage {stage.stage_index}: {which} is compiled, and so are its waits for collectives"
    return ""


def _report_what_stays_in_i(splits: Sequence[SplitWork]) -> None:
    """Log once which share a rank's stages defer, and the largest exceptions with their reasons."""
    known = {split.stage: split.work for split in splits if split.work is not None}
    words = []
    for stage, work in known.items():
        if work.in_i:
            in_i = describe((_name(each), each.share, each.reason) for each in work.in_i)
            share = percent(work.share)
            words.append(f"stage {stage.stage_index} defers {share} of its weight gradients' FLOPs to W; in I: {in_i}")
    if everything := [stage.stage_index for stage, work in known.items() if work.flops and not work.in_i]:
        who = "stages {} defer 100 % of their" if everything[1:] else "stage {} defers 100 % of its"
        words.append(f"{who.format(', '.join(map(str, everything)))} weight gradients' FLOPs to W")
    if nothing := [str(stage.stage_index) for stage, work in known.items() if not work.flops]:
        words.append(f"W does nothing for stages without products with a trained weight: {', '.join(nothing)}")
    is_enough = all(work.share >= ENOUGH for work in known.values())
    logger.log(
        logging.INFO if is_enough else logging.WARNING,
        "%s%s",
        "; ".join(words),
        "" if is_enough else ". So its schedule gains less. docs/the-split.md shows how to declare a layer's products",
    )


def _name(product: StaysInI) -> str:
    """The product's layer, or its parameter if that is not the weight."""
    layer, _, parameter = product.parameter.rpartition(".")
    return f"{title(layer, product.layer)}{'' if parameter == 'weight' else f' {parameter}'}"


def _name_of(stage: pipelining.Stage, layer: nn.Module) -> str:
    name = next((name for name, each in stage.submod.named_modules() if each is layer), "")
    return title(name, type(layer).__name__)


class SplitWork(OwnWork):
    """Runs I as one ordinary backward without the deferred gradients, which W computes. torch's hook `dw_builder` is
    for this, but keeps a stage's outputs alive until backward."""

    def __init__(self, stage: pipelining.Stage) -> None:
        super().__init__(stage)
        self.gradients = WeightGradients()
        self.waits = WaitFiller()
        self.on_rank: Sequence[pipelining.Stage] = (stage,)
        self.work: WeightWork | None = None
        """Weight work per microbatch, known after the first I."""
        self.dtypes: frozenset[torch.dtype] = frozenset()
        self.deferred: dict[int, list[PendingGradient]] = {}
        """Gradients deferred by each microbatch's I, until its W."""
        self._is_sharded = False
        self._summed: dict[int, Any] | None = None
        """FSDP2's parameters with sums outside `.grad` by the ids of the weights, from this step's first W on: to list
        them takes a while."""
        self._delaying: Sequence[nn.Module] = ()
        """Layers that delay their weight gradients themselves."""
        self.num_split = 0
        """Number of I that this stage has split since its last trial."""
        self._has_looked_around = False
        """Whether the modules around the layers were also searched for products."""
        self._has_reported = False
        self.leaves_whole = False
        """Whether F and B of this step's microbatches without I run as without zbpipe."""
        self._is_scaled = False
        """Whether this step's gradients were divided by the number of microbatches."""

    def defer(self, on_rank: Sequence[pipelining.Stage], gradients: WeightGradients, waits: WaitFiller) -> None:
        self.gradients, self.on_rank, self.waits = gradients, on_rank, waits
        self._is_sharded = any(map(fsdp2.is_fsdp, self.stage.submod.modules()))
        self._delaying = delay_in_i_alone(self.stage.submod)
        defer_weights(self.stage.submod, gradients)

    @property
    def tries_out(self) -> bool:
        """Whether the next I is the stage's first, which leaves nothing to W."""
        return self.num_split == 0

    @property
    def _is_settled(self) -> bool:
        return self.num_split >= _SETTLED_AFTER and self._has_looked_around

    @property
    def is_steady(self) -> bool:
        """Whether the stage's next step tries nothing out and compares no contents."""
        has_no_i = len(self.whole) == self.stage.chunks
        return (has_no_i or (not self.tries_out and self._has_looked_around)) and all(
            deferral.checks.are_over(self.gradients.step) for deferral in deferrals(self.stage.submod).values()
        )

    def forward(self, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        with self.waits.during("F", self):
            return super().forward(microbatch, *args, **kwargs)

    def backward(self, microbatch: int, loss: Tensor | None, is_last: bool) -> None:
        # In the last B, FSDP2's hooks reduce each module as soon as its gradients are complete.
        if self.waits.fills("B", self) and not (is_last and self.reduces_early):
            with replaced(self.gradients, may_fuse=False):  # as autograd adds the gradients
                self._compute_input_gradient("B", microbatch, loss)
            for _ in self.weight_gradient(microbatch, is_last):
                pass
        else:
            with self.waits.during("B", self):
                super().backward(microbatch, loss, is_last)
            self.left.pop(microbatch, None)

    def _run(self, kind: str, microbatch: int, compute: Callable[[], Any]) -> Any:
        is_left = self.leaves_whole and not self.waits.fills("B", self)
        self.gradients.are_whole = is_left and microbatch in self.whole
        try:
            return super()._run(kind, microbatch, compute)
        finally:
            self.gradients.are_whole = False

    def input_gradient(self, microbatch: int, loss: Tensor | None) -> None:
        self._compute_input_gradient("I", microbatch, loss)

    def _compute_input_gradient(self, kind: str, microbatch: int, loss: Tensor | None) -> None:
        if not self.stage.has_backward:
            return
        # The first I computes all weight gradients at once, and checks whether anything changes x or dY before W.
        on_trial, module = self.tries_out, self.stage.submod
        layers = () if on_trial else self._delaying
        with (
            self.gradients.record(on_trial) as pending,
            look_at_graphs(on_trial) as products,
            delaying(layers, pending),
            nullcontext() if on_trial else self.waits.during(kind, self, pending),
        ):
            self.deferred[microbatch] = pending
            super().backward(microbatch, loss, is_last=False)
        if on_trial:
            self.dtypes = frozenset(gradient.dy.dtype for gradient in pending)
            self._keep_in_i_what_changed(pending)
            self.work = WeightWork(module, products, pending)
            pending.clear()
            fsdp2.settle(fsdp2.list_with_separate_sums(module))
        self._require_unchanged(microbatch, pending, "during I")
        copy_if_shared(pending)
        self.num_split += 1
        if not self._has_reported:
            splits = [split for stage in self.on_rank if (split := find_split(stage)) is not None]
            if all(each._is_settled for each in splits):
                for split in splits:
                    split._has_reported = True
                _report_what_stays_in_i(splits)

    def weight_gradient(self, microbatch: int, is_last: bool) -> Iterator[None]:
        if not self.stage.has_backward:
            return
        pending, module = self.deferred.pop(microbatch), self.stage.submod
        self._require_unchanged(microbatch, pending, "between I and W")
        self.left.pop(microbatch, None)
        summed = self._find_summed()
        if summed and (sums := fsdp2.find_separate_sums(summed.values())):
            for gradient in pending:
                gradient.fsdp_sums = sums
        if is_last and self.reduces_early:
            self.is_reducing = True
            layers = [each.layer for each in deferrals(module).values()]
            yield from accumulate_and_reduce(module, pending, layers)
            return
        with self.waits.timing_w(pending):
            yield from accumulate(pending)
        fsdp2.settle(summed.values())
        if own := self.own_backward:
            nothing: dict[str, Any] = {"stage_output": (), "param_groups": []}
            self.stage.backward_maybe_with_nosync("weight", nothing, last_backward=is_last)
            # An earlier reduction in I is fine: FSDP accumulates. torch reduces now if the stage is an FSDP module.
            if is_last and not fsdp2.is_fsdp(module) and fsdp2.owes_reduction(module):
                raise RuntimeError(
                    f"stage {self.stage.stage_index}: {own}, which replaces torch's backward, does not reduce the"
                    " gradients that the last W has added to parts in fully_shard. Make it reduce them when it is"
                    " called with last_backward=True, also call fully_shard on the whole stage, or use a schedule"
                    " without I and W"
                )

    def _find_summed(self) -> dict[int, Any]:
        if self._summed is None:
            self._summed = fsdp2.index_separate_sums(self.stage.submod) if self._is_sharded else {}
        return self._summed

    def add_early(self, microbatch: int, gradient: PendingGradient) -> None:
        self._require_unchanged(microbatch, [gradient], "between I and W")
        found = self._find_summed().get(id(sources.find_leaf(gradient.weight)))
        of_fsdp = () if found is None else (found,)
        gradient.fsdp_sums = fsdp2.find_separate_sums(of_fsdp)
        gradient.accumulate()
        fsdp2.settle(of_fsdp)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide each gradient once. For parameters that this rank's stages share, the last stage does it."""
        if not self.stage.has_backward:
            return
        self._is_scaled = True
        works = (find_work(stage) for stage in self.on_rank)
        unfinished = (work.stage for work in works if isinstance(work, SplitWork) and not work._is_scaled)
        later = {id(parameter) for stage in unfinished for parameter in stage.submod.parameters()}
        for parameter in self.stage.submod.parameters():
            if parameter.grad is not None and id(parameter) not in later:
                parameter.grad.div_(grad_scale_factor)

    def forget_run(self) -> None:
        self.deferred.clear()
        forget(self._delaying)
        self._is_scaled = False
        self._summed = None
        super().forget_run()

    def clear_runtime_states(self) -> None:
        self.leaves_whole = self._is_settled  # layers learn from the first I
        if self.stage.has_backward:
            self.gradients.step += 1
            autograd.register_types()  # the job may have imported spmd_types since
            is_settled = not self._look_around()
            for deferral in deferrals(self.stage.submod).values():
                deferral.begin_step(is_settled)
        super().clear_runtime_states()

    def _look_around(self) -> bool:
        """After the first step, also look for products in the modules around layers whose weight gradients stayed in I.
        Returns whether the next I is a trial again."""
        # Not within a step, because a checkpoint has to repeat F in I.
        if self.work is None or self._has_looked_around:
            return False
        self._has_looked_around = True
        if not catch_around(self.stage.submod, {each.parameter for each in self.work.in_i}, self.gradients):
            return False
        self.num_split = 0
        return True

    def _keep_in_i_what_changed(self, pending: Sequence[PendingGradient]) -> None:
        changes = {id(gradient.layer): (gradient, words) for gradient, words in find_changes(pending)}
        for gradient, words in changes.values():
            deferral_of(gradient.layer).stays_in_i = True
            logger.warning(
                "stage %d: something changes %s of layer %s in place during I, so its weight gradient is computed in I",
                *(self.stage.stage_index, words, _name_of(self.stage, gradient.layer)),
            )

    def _require_unchanged(self, microbatch: int, pending: Sequence[PendingGradient], when: str) -> None:
        for gradient, words in find_changes(pending):
            raise RuntimeError(
                f"stage {self.stage.stage_index}, microbatch {microbatch}: {words} of layer"
                f" {_name_of(self.stage, gradient.layer)} was changed in place {when}, after the layer had used it, so"
                " its weight gradient in W would be wrong. Look for your hooks and backwards that write into"
                " gradients, or keep the layer's weight gradient in I: layer.weight_products = {}"
            )
