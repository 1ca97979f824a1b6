"""A model's blocks, and the modules before and after them, found by running the model up to its second block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from zbpipe.runtime._torch.autograd import restored, tree_leaves
from zbpipe.runtime._torch.module_views import view_of
from zbpipe.runtime.attributes import plain_attribute

Blocks = nn.ModuleList | nn.ModuleDict | nn.Sequential
"""Containers of modules that run one by one."""
BY_HAND = (
    "To cut it by hand, write a module for each stage, give each to a PipelineStage, and all of them to"
    " zbpipe.build_pipeline_schedule (docs/own-loop.md)"
)


class ReachedError(Exception):
    """Leaves the forward of a model at one of its blocks. Not an error: nothing else leaves other people's code."""

    def __init__(self, hidden: Any = None) -> None:
        super().__init__("the forward of a stage ends here")
        self.hidden = hidden


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model that stages are made of."""

    blocks: str
    """Name of the list of blocks."""
    count: int
    """Number of blocks."""
    more_results: int | None
    """Number of results of a block besides the hidden states, if it returns a tuple."""
    before: frozenset[str]
    """Names of modules with own parameters that run before the blocks."""
    after: frozenset[str]
    """Names of all other modules with own parameters outside the blocks."""


def examine(model: nn.Module, example: Mapping[str, Any]) -> Anatomy:
    """The anatomy of `model`, which runs its first block with `example` as keyword arguments.

    Raises:
        ValueError: the model cannot be cut into stages that hand on one tensor.
    """
    _refuse_by_config(model)
    name, blocks = find_blocks(model)
    if len(blocks) < 2:
        raise ValueError(f"{_title(model)} has one block, {name}, so it cannot be cut")
    _refuse_shared(model, name)
    path = set(_list_path(name))
    outside = [
        each
        for each, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and not each.startswith(f"{name}.")
    ]
    for each in path.intersection(outside):
        raise ValueError(
            f"{_title(model)} has parameters in {each or 'itself'!r}, around its blocks, and it is not known which"
            f" stage needs them: put them into a module. {BY_HAND}"
        )
    ran, more = _run_first_block(model, name, blocks, example)
    return Anatomy(name, len(blocks), more, frozenset(outside) & ran, frozenset(outside) - ran)


def find_blocks(model: nn.Module) -> tuple[str, Blocks]:
    """The model's largest list of modules that is in no other list, and its name."""
    lists = {name: each for name, each in model.named_modules() if name and isinstance(each, Blocks)}
    outer = {name: each for name, each in lists.items() if not any(other in lists for other in _list_path(name))}
    found = max(outer, key=lambda name: sum(each.numel() for each in outer[name].parameters()), default=None)
    if found is None:
        raise ValueError(f"{_title(model)} has no list of blocks (nn.ModuleList), so it cannot be cut. {BY_HAND}")
    return found, outer[found]


def _list_path(name: str) -> Iterator[str]:
    """Names of the modules around the one with this name, from the model itself (an empty name) on.

    >>> list(_list_path("model.layers"))
    ['', 'model']
    """
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _title(model: nn.Module) -> str:
    return type(model).__name__


def _refuse_by_config(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if plain_attribute(config, "is_encoder_decoder") is True:
        raise ValueError(
            f"{_title(model)} has an encoder and a decoder: the decoder's stages also need the encoder's output, and"
            f" zbpipe.pipeline hands on one tensor. {BY_HAND}: the encoder's in the first stages, and in the others a"
            " part of the decoder, which takes and returns both tensors"
        )
    if plain_attribute(config, "output_router_logits") is True:
        raise ValueError(
            f"{_title(model)} adds a loss over the routers of all blocks, which are on different ranks: set"
            " model.config.output_router_logits = False"
        )
    adapters: Any = getattr(model, "peft_config", None) or {}
    for adapter, about in adapters.items():
        if getattr(about, "is_prompt_learning", False):
            raise ValueError(
                f"the adapter {adapter!r} adds tokens to the input, whose labels only the whole model knows: use LoRA,"
                f" or another adapter of the blocks. {BY_HAND}"
            )
    for name, each in model.named_parameters():
        if each.is_meta:
            raise ValueError(
                f"{name} is on the meta device: load the model's weights on the CPU first. zbpipe.pipeline then frees"
                " those of the other ranks"
            )


def _refuse_shared(model: nn.Module, name: str) -> None:
    """Refuse a parameter with a place in two blocks, or in a block and outside."""
    owners: dict[int, str] = {}
    for each, parameter in model.named_parameters(remove_duplicate=False):
        inside = each.startswith(f"{name}.")
        owner = f"{name}.{each.removeprefix(f'{name}.').split('.')[0]}" if inside else ""
        if owners.setdefault(id(parameter), owner) != owner:
            raise ValueError(
                f"{_title(model)} shares {each} between {owners[id(parameter)] or 'modules outside'!r} and"
                f" {owner or 'modules outside'!r}, which may be on different ranks. {BY_HAND}"
            )


class StandIn(nn.Module):
    """In the place of a block, with its plain attributes: some models ask their blocks for the kind of attention."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        vars(self).update((name, value) for name, value in vars(block).items() if isinstance(value, (str, int, float)))


class _Recording(StandIn):
    """Records the arguments of a block. Runs it, or ends the forward."""

    def __init__(self, block: nn.Module, *, is_end: bool) -> None:
        super().__init__(block)
        self._block = (block,)  # not a part of this module
        self._is_end = is_end
        self.inputs: list[Any] = []
        self.output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.inputs = tree_leaves([args, kwargs])
        if self._is_end:
            raise ReachedError
        self.output = self._block[0](*args, **kwargs)
        return self.output


def _run_first_block(
    model: nn.Module, name: str, blocks: Blocks, example: Mapping[str, Any]
) -> tuple[frozenset[str], int | None]:
    """Names of the modules outside the blocks that ran before the second block, and `more_results`."""
    names = {id(module): each for each, module in model.named_modules()}
    ran: set[str] = set()
    kept = ExitStack()

    def record(module: nn.Module, args: Any) -> None:
        ran.add(names.get(id(module), ""))
        kept.enter_context(restored(module.buffers(recurse=False)))

    def track(module: nn.Module, args: Any, output: Any) -> Any:
        """Have all that depends on an embedding require a gradient, also with frozen weights."""
        is_own = id(module) in names and any(True for _ in module.parameters(recurse=False))
        if is_own and isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            return output.requires_grad_() + 0  # a leaf could not be changed in place
        return None

    (key, block), (next_key, next_block), *_ = blocks.named_children()
    first, second = _Recording(block, is_end=False), _Recording(next_block, is_end=True)
    view = view_of(model, {f"{name}.{key}": first, f"{name}.{next_key}": second})
    handles = [hooks.register_module_forward_pre_hook(record), hooks.register_module_forward_hook(track)]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    kind = "cpu" if accelerator is None else accelerator.type
    try:
        with kept, torch.enable_grad(), torch.random.fork_rng(devices, device_type=kind):
            view(**example)
    except ReachedError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    if not second.inputs:
        raise ValueError(f"the forward of {_title(model)} does not run {name} one by one. {BY_HAND}")
    batch = next(len(each) for each in example.values() if isinstance(each, Tensor))
    hidden = _find_hidden(first.inputs)
    result = first.output[0] if isinstance(first.output, (tuple, list)) else first.output
    if hidden is None or len(hidden) != batch or not isinstance(result, Tensor) or result.shape != hidden.shape:
        raise ValueError(f"the blocks {name} of {_title(model)} do not map (batch, ...) to the same shape. {BY_HAND}")
    passed = _find_hidden(second.inputs)
    if passed is None or passed.shape != result.shape or not torch.equal(passed, result):
        raise ValueError(
            f"{_title(model)} changes the hidden states between two blocks of {name}, which a stage would leave out."
            f" {BY_HAND}"
        )
    for recording, given in ((first, hidden), (second, passed)):
        for each in recording.inputs:
            if isinstance(each, Tensor) and each.requires_grad and each is not given:
                raise ValueError(
                    f"the blocks {name} of {_title(model)} take a second tensor that needs a gradient, of shape"
                    f" {tuple(each.shape)}, and zbpipe.pipeline hands on the hidden states alone. {BY_HAND}"
                )
    return frozenset(ran), len(first.output) - 1 if isinstance(first.output, (tuple, list)) else None


def _find_hidden(inputs: list[Any]) -> Tensor | None:
    """The first argument with numbers."""
    found = (each for each in inputs if isinstance(each, Tensor))
    hidden = next(found, None)
    return hidden if hidden is not None and hidden.is_floating_point() else None
