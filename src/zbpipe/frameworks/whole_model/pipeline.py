"""`zbpipe.pipeline`: a whole model on the ranks of a pipeline."""

from __future__ import annotations

import inspect
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from zbpipe.costs.job import MemoryLimit
from zbpipe.costs.layers import Layer, LayerCosts
from zbpipe.costs.model import Transport
from zbpipe.costs.transformer import PAPERS_TIMES, Checkpointing, Work, typical_times
from zbpipe.estimation.cut import choose, cutting
from zbpipe.frameworks.layer_work import products
from zbpipe.frameworks.whole_model.anatomy import Anatomy, Loss, Stage, examine
from zbpipe.frameworks.whole_model.tied import TiedWeights
from zbpipe.planner.result import Plan
from zbpipe.runtime._torch.module_views import move, release_parameters
from zbpipe.runtime._torch.shapes import cut
from zbpipe.runtime.adaptive import checkpointing_of
from zbpipe.runtime.build import build_pipeline_schedule, require_options
from zbpipe.runtime.optimizer.norm import clip
from zbpipe.schedule.ir import Placement, Schedule, require_whole
from zbpipe.schedule.registry import Algorithm, resolve

IGNORED = -100
"""Label of a token without a loss, as in transformers and in torch's cross entropy."""
_TOKENS = 4096
"""Assumed tokens of a microbatch, for the overhead of ops: no argument has the real number."""

logger = logging.getLogger(__name__)


def pipeline(
    model: nn.Module,
    *,
    schedule: str | Schedule | Plan | Algorithm = "ZB",
    microbatches: int,
    mesh: DeviceMesh | None = None,
    loss: Loss | None = None,
    example: Mapping[str, Any] | None = None,
    **options: Any,
) -> Pipeline:
    """The `model`, cut into stages, of which this rank keeps its own on its device.

        pipe = zbpipe.pipeline(model, schedule="ZB", microbatches=8, mesh=mesh["pp"])
        optimizer = torch.optim.AdamW(pipe.parameters())
        loss = pipe.step(**batch)

    The model is a causal language model of transformers, also with adapters of peft, or another module with an
    embedding, a list of blocks and a head. All ranks call this with the same weights. Each stage runs the model's own
    forward without the other stages' blocks, so masks and positions are the model's. Weights of other ranks move to the
    meta device: use the pipeline instead of the model.

    Args:
        model: the whole model, with its weights, usually on the CPU.
        schedule: a name, a file, a Schedule or a Plan, as for `zbpipe.build_pipeline_schedule`. The class is always
            zbpipe's, because it takes batches of any length.
        microbatches: the number of microbatches into which a batch is split.
        mesh: the one-dimensional mesh of the pipeline's ranks. Default: all ranks of the job; starts a process group if
            there is none.
        loss: `(output, labels, number) -> Tensor`, a sum over a microbatch divided by the number of labels in the whole
            batch that are not -100. Default: the loss of the next token, `model.loss_function` of transformers.
        example: keyword arguments of the model with two small samples. Default: `input_ids` of six tokens.
        options: options of the schedule, as for `zbpipe.build_pipeline_schedule`.

    Raises:
        ValueError: an unknown schedule or option, or the model cannot be cut or has fewer blocks than stages. The
            message says how to cut it by hand.
    """
    (microbatches,) = require_whole(1, microbatches=microbatches)
    algorithm = resolve(schedule)
    if algorithm.source == "torch":  # torch's own classes take only batches of one length
        schedule = algorithm = replace(algorithm, source="zbpipe")
    require_options(algorithm, options)
    mesh = mesh or _mesh_of_all_ranks()
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions, and a pipeline has one: give mesh['pp']")
    if example is None:
        example = {"input_ids": torch.arange(6, device=next(model.parameters()).device).view(2, 3)}
    anatomy = examine(model, {**_usual(model), **example}, loss_takes_all=loss is not None)
    how = Checkpointing.parse(options.get("checkpointing") or checkpointing_of([model]))
    cut = _Cut(model, anatomy, microbatches, how)
    transport, measured = options.get("transport"), options.get("costs")
    chosen = choose(
        algorithm,
        mesh.size(),
        microbatches,
        cut,
        how,
        tokens=0.0 if mesh.device_type == "cpu" else _TOKENS,
        measured=measured,
        memory_limit=MemoryLimit.parse(options.get("memory_limit"), costs_are_known=measured is not None),
        transport=None if transport is None else Transport.parse(transport),
    )
    if words := chosen.words:
        logger.info("%s", words)
        options = {"work": cut.work(chosen.placement), **options}
    build = partial(
        build_pipeline_schedule,
        schedule if chosen.algorithm is algorithm else chosen.algorithm,
        n_microbatches=microbatches,
        loss_fn=_take_loss,
        **{"scale_grads": False, **options},
    )
    return Pipeline(model, anatomy, chosen.placement, cut.ranges(chosen.placement), loss, mesh, build)


class Pipeline:
    """This rank's part of a model, from `zbpipe.pipeline`. All ranks call its methods, in the same order."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        placement: Placement,
        cut: Sequence[range],
        loss: Loss | None,
        mesh: DeviceMesh,
        build: Callable[..., Any],
    ) -> None:
        self.model = model
        """The model. Weights of other ranks are on the meta device."""
        self._group = group = mesh.get_group()
        self._build = build
        self._usual = _usual(model)
        self._predicts_next = loss is None
        loss = loss or _loss_of(model)
        self._device = _device_of(mesh)
        rank = dist.get_rank(group)
        indices = placement.stages_on(rank)
        logger.info("Blocks %s by stage: %s", anatomy.blocks, " | ".join(f"{each[0]}-{each[-1]}" for each in cut))
        tied = _find_tied(model, anatomy)
        _keep(model, anatomy, [cut[index] for index in indices], self._device)
        self.stages = [Stage(model, anatomy, cut[index], loss, self._device) for index in indices]
        """This rank's stages, as modules. With FSDP2, `fully_shard` each of their `blocks`, and then each stage."""
        self._indices, self._num_stages = indices, placement.num_stages
        self._has_first, self._has_last = 0 in indices, placement.num_stages - 1 in indices
        self._loss_rank = placement.rank_of[-1]
        self._tied = TiedWeights(
            tied,
            self.stages[0].model if self._has_first else None,
            self.stages[-1].model if self._has_last else None,
            placement.rank_of[0] if self._has_last else placement.rank_of[-1],
            group,
        )
        self._first_shapes: Any = None

    @cached_property
    def schedule(self) -> Any:
        """The schedule, built at its first use, after the stages are compiled, sharded and checkpointed."""
        stages = [
            PipelineStage(stage, index, self._num_stages, self._device, group=self._group)
            for index, stage in zip(self._indices, self.stages, strict=True)
        ]
        built = self._build(stages=stages)
        built.tied_copies = self._tied.copies
        return built

    def step(
        self, *, labels: Tensor, num_items_in_batch: Any = None, microbatches: Sequence[int] | None = None, **batch: Any
    ) -> Tensor:
        """Forward and backward of a batch, added to the gradients; returns the loss of the whole batch on all ranks.

        Args:
            labels: of the whole batch. Labels of -100 do not count.
            num_items_in_batch: divisor of the loss, for example to accumulate gradients of several batches. Default:
                the number of labels that count.
            microbatches: numbers of tokens of the microbatches, for a batch without padding: all samples are in one
                row, one after the other, with their `position_ids`. Default: microbatches with equal numbers of rows.
            batch: other keyword arguments of the model, such as `input_ids` and `attention_mask`. Tensors have one row
                for each sample.

        Raises:
            ValueError: the number of samples is not divisible by the number of microbatches.
        """
        return self._run("step", labels, num_items_in_batch, microbatches, batch)

    def evaluate(
        self, *, labels: Tensor, num_items_in_batch: Any = None, microbatches: Sequence[int] | None = None, **batch: Any
    ) -> Tensor:
        """The loss of a batch on all ranks, in evaluation mode and without gradients."""
        modes = {part: part.training for stage in self.stages for part in stage.modules()}
        self.train(False)
        try:
            with torch.no_grad():
                return self._run("eval", labels, num_items_in_batch, microbatches, batch)
        finally:
            for part, mode in modes.items():
                part.training = mode

    def _run(
        self, how: str, labels: Tensor, number: Any, tokens: Sequence[int] | None, batch: dict[str, Any]
    ) -> Tensor:
        given = {name: each for name, each in {**self._usual, **batch}.items() if each is not None}
        if tokens is None:
            _require_rows(len(labels), given)
        if number is None:
            parts = [labels] if tokens is None else cut("labels", labels, tokens)
            number = sum((each[..., int(self._predicts_next) :] != IGNORED).sum() for each in parts)
        for stage in self.stages:
            stage.count = number
        inputs = next((each for each in given.values() if isinstance(each, Tensor)), None)
        if inputs is None:
            raise ValueError("the batch has only labels: give the model's inputs, for example input_ids=...")
        losses: list[Tensor] = []
        with self._tied.summed() if how == "step" else nullcontext():
            getattr(self.schedule, how)(
                *([inputs] if self._has_first else []),
                target=labels if self._has_last else None,
                losses=losses,
                return_outputs=False,
                labels=labels,
                **given,
                **self._size(given, tokens),
            )
        if self._first_shapes is None:
            self._first_shapes = _shapes_of(given) if tokens is None else ()
        loss = torch.zeros((), device=self._device)  # all ranks know the default dtype
        if self._has_last:
            loss += torch.stack(losses).sum().detach()
        dist.broadcast(loss, group=self._group, group_src=self._loss_rank)
        return loss

    def _size(self, batch: Mapping[str, Any], tokens: Sequence[int] | None) -> dict[str, Any]:
        """The keyword argument for a batch that is cut by tokens, or has other shapes than the first one."""
        if tokens is not None:
            return {"microbatches": [*tokens]}
        is_usual = self._first_shapes in (None, _shapes_of(batch))
        return {} if is_usual else {"microbatches": self.schedule.sizes.usual}

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for the optimizer."""
        return iter({id(each): each for _, each in self.named_parameters()}.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, with their names in the whole model."""
        for stage in self.stages:
            yield from stage.model.named_parameters()

    def train(self, mode: bool = True) -> None:
        for stage in self.stages:
            stage.train(mode)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the whole model as `torch.nn.utils.clip_grad_norm_` does; returns their norm."""
        return clip(list(self.parameters()), max_norm, self._group, self._device, copies=self._tied.copies)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the model's state dict, under the whole model's names."""
        return {name: each for stage in self.stages for name, each in stage.model.state_dict().items()}

    def save_pretrained(self, folder: str | PathLike[str], **options: Any) -> None:
        """Save the whole model as its own `save_pretrained` does, from the first process of the job.

        A model without that method gets a file `pytorch_model.bin` with its state dict.

        Raises:
            RuntimeError: on all ranks, if the first process fails to save.
        """
        state = self._gather_state_dict()
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                self._save(folder, state, options)
            except Exception as error:  # the other ranks wait for an answer
                logger.exception("The model is not saved")
                failure = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(failure, device=self._device)
        if failure[0]:
            raise RuntimeError(f"the first process of the job could not save the model in {folder}: {failure[0]}")

    def _save(self, folder: str | PathLike[str], state: dict[str, Tensor], options: dict[str, Any]) -> None:
        model: Any = self.model
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder, state_dict=state, **options)
        else:
            os.makedirs(folder, exist_ok=True)
            torch.save(state, os.path.join(folder, "pytorch_model.bin"), **options)

    def _gather_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state dict on the CPU of the job's first process; empty on the others."""
        group, rank, mine = self._group, dist.get_rank(self._group), self.state_dict()
        about = [{name: (each.shape, each.dtype) for name, each in mine.items()}] * dist.get_world_size(group)
        dist.all_gather_object(about, about[rank], group=group)
        has_first = dist.get_process_group_ranks(group)[0] == 0  # other replicas only help to unshard
        whole: dict[str, Tensor] = {}
        for source, name in ((source, name) for source, part in enumerate(about) for name in part):
            tensor = None
            if source == rank:
                tensor = mine[name].detach()
                tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
                if rank and has_first:
                    dist.send(tensor, group=group, group_dst=0)
            elif rank == 0 and has_first:
                shape, dtype = about[source][name]
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
                dist.recv(tensor, group=group, group_src=source)
            if dist.get_rank() == 0 and tensor is not None:
                whole[name] = tensor.cpu()
        return whole


def _shapes_of(batch: Mapping[str, Any]) -> list[torch.Size]:
    return [each.shape for each in batch.values() if isinstance(each, Tensor)]


def _take_loss(output: Tensor, labels: Tensor) -> Tensor:
    """The last stage's output, which is already the microbatch's part of the loss."""
    return output.sum()


def _loss_of(model: nn.Module) -> Loss:
    function: Any = getattr(model, "loss_function", None)
    if getattr(function, "__name__", "") != "ForCausalLMLoss":
        raise ValueError(
            f"{type(model).__name__} has no loss_function of a causal language model, as in transformers: give loss="
        )

    def compute(output: Any, labels: Tensor, number: Any) -> Tensor:
        logits = output.logits
        found: Tensor = function(logits=logits, labels=labels, vocab_size=logits.size(-1), num_items_in_batch=number)
        return found

    return compute


def _usual(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of each forward. Training needs no cache."""
    # peft's adapters pass on unknown arguments.
    whole = getattr(model, "get_base_model", lambda: model)()
    return {"use_cache": False} if "use_cache" in inspect.signature(whole.forward).parameters else {}


def _require_rows(rows: int, batch: Mapping[str, Any]) -> None:
    for name, each in batch.items():
        if isinstance(each, Tensor) and (not each.dim() or len(each) != rows):
            raise ValueError(
                f"{name} of shape {tuple(each.shape)} cannot be split like labels of {rows} samples:"
                " give one row for each sample"
            )


def _mesh_of_all_ranks() -> DeviceMesh:
    """The mesh of all ranks, each with its own GPU if available. Starts the process group if there is none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return init_device_mesh("cpu" if kind is None else kind.type, (ranks,))


def _device_of(mesh: DeviceMesh) -> torch.device:
    is_cpu = mesh.device_type == "cpu"
    return torch.device("cpu") if is_cpu else torch.device(mesh.device_type, torch.accelerator.current_device_index())


class _Cut:
    def __init__(self, model: nn.Module, anatomy: Anatomy, microbatches: int, how: Checkpointing) -> None:
        self._name = type(model).__name__
        blocks = [products(block) for block in model.get_submodule(anatomy.blocks).children()]
        before, after = (
            sum(products(model.get_submodule(name), recurse=False) for name in names)
            for names in (anatomy.before, anatomy.after)
        )
        self.num_layers, self.products = len(blocks), sum(blocks) + before + after
        more = [before, *[0.0] * (len(blocks) - 1)]
        more[-1] += after
        f, i, w = (
            [in_block * each + around * other for each, other in zip(blocks, more, strict=True)]
            for in_block, around in zip(typical_times(how), PAPERS_TIMES, strict=True)
        )
        layers = (Layer((str(number),), *each, 0.0) for number, each in enumerate(zip(f, i, w, strict=True)))
        self._costs = LayerCosts(tuple(layers))
        self._cut = cutting(self._costs, microbatches, how)

    def ranges(self, placement: Placement) -> tuple[range, ...]:
        if self.num_layers < placement.num_stages:
            has_several = placement.num_stages > placement.num_ranks
            raise ValueError(
                f"{self._name} has {self.num_layers} blocks, and each of the {placement.num_stages} stages needs one:"
                f" use fewer ranks{', or a schedule with one stage per rank, such as ZBH1' if has_several else ''}"
            )
        return self._cut(placement)

    def work(self, placement: Placement) -> Work:
        return self._costs.times(self.ranges(placement))


def _find_tied(model: nn.Module, anatomy: Anatomy) -> list[tuple[str, str]]:
    """Names of a weight before the blocks and after them."""
    names: dict[int, dict[bool, str]] = defaultdict(dict)
    for name, each in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if owner in anatomy.before | anatomy.after:
            names[id(each)][owner in anatomy.after] = name
    return [(pair[False], pair[True]) for pair in names.values() if len(pair) == 2]


def _keep(model: nn.Module, anatomy: Anatomy, own: Sequence[range], device: torch.device) -> None:
    """Move what this rank's stages need to the device, and the other weights to the meta device."""
    blocks = list(model.get_submodule(anatomy.blocks).children())
    for position, block in enumerate(blocks):
        if not any(position in each for each in own):
            block.to("meta")
    absent = {
        *(() if any(each.start == 0 for each in own) else anatomy.before),
        *(() if any(each.stop == len(blocks) for each in own) else anatomy.after),
    }
    for name in absent:
        release_parameters(model.get_submodule(name))
    move(model, device)
