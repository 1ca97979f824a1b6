"""The parts of a model (blocks, modules before and after them), and a stage: the model's forward between two blocks.

A run of the model with only its first block shows the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import module as hooks

from zbpipe.runtime._torch.attributes import plain_attribute
from zbpipe.runtime._torch.autograd import tree_leaves, tree_map_only
from zbpipe.runtime._torch.module_views import view_of, without_own_state

Blocks = nn.ModuleList | nn.ModuleDict | nn.Sequential
"""Containers whose modules run one by one."""
BY_HAND = (
    "To cut it by hand, write a module for each stage, give each to a PipelineStage, and all of them to"
    " zbpipe.build_pipeline_schedule (docs/own-loop.md)"
)


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model that stages are made of."""

    blocks: str
    """Name of the list of blocks."""
    count: int
    more_results: int | None
    """Number of a block's results besides the hidden states, if it returns a tuple."""
    before: frozenset[str]
    """Names of modules that run before the blocks, in the first stage. Their weights are its own."""
    after: frozenset[str]
    """Names of all other modules outside the blocks. Their weights are the last stage's."""


def examine(model: nn.Module, example: Mapping[str, Any], *, loss_takes_all: bool) -> Anatomy:
    """The parts of `model`, found by a run with `example` as keyword arguments and with its first block only.

    Args:
        model: the whole model.
        example: keyword arguments of two samples.
        loss_takes_all: whether the loss may use all results of the model, or only the logits.

    Raises:
        ValueError: the model cannot be cut into stages that hand on one tensor.
    """
    refuse_by_config(model)
    for weight, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{weight} is on the meta device: load the model's weights on the CPU first. zbpipe.pipeline then frees"
                " those of the other ranks"
            )
    name, blocks = find_blocks(model)
    if len(blocks) < 2:
        raise ValueError(f"{_title(model)} has one block, {name}, so it cannot be cut")
    _refuse_shared(model, name)
    path = set(_list_path(name))
    for each in path:
        if any(True for _ in model.get_submodule(each).parameters(recurse=False)):
            raise ValueError(
                f"{_title(model)} has parameters in {each or 'itself'!r}, around its blocks, and zbpipe does not know"
                f" the stage that needs them: put them into a module. {BY_HAND}"
            )
    ran, more = _run_example(model, name, blocks, example, loss_takes_all)
    outside = frozenset(each for each, _ in model.named_modules() if not f"{each}.".startswith(f"{name}."))
    before = (outside & ran) - path
    return Anatomy(name, len(blocks), more, before, outside - before)


def find_blocks(model: nn.Module) -> tuple[str, Blocks]:
    """The model's largest list of modules outside other lists, and its name."""
    lists = {name: each for name, each in model.named_modules() if name and isinstance(each, Blocks)}
    outer = {name: each for name, each in lists.items() if not any(other in lists for other in _list_path(name))}
    found = max(outer, key=lambda name: sum(each.numel() for each in outer[name].parameters()), default=None)
    if found is None:
        raise ValueError(f"{_title(model)} has no list of blocks (nn.ModuleList), so it cannot be cut. {BY_HAND}")
    return found, outer[found]


def _list_path(name: str) -> Iterator[str]:
    """Names of the modules around this one, from the model itself (an empty name) on.

    >>> list(_list_path("model.layers"))
    ['', 'model']
    """
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _title(model: nn.Module) -> str:
    return type(model).__name__


def refuse_by_config(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if plain_attribute(config, "is_encoder_decoder") is True:
        raise ValueError(
            f"{_title(model)} has an encoder and a decoder: the decoder's stages also need the encoder's output, and"
            f" zbpipe.pipeline passes one tensor. {BY_HAND}: the encoder's in the first stages, and in the others a"
            " part of the decoder, which takes and returns both tensors"
        )
    if plain_attribute(config, "output_router_logits") is True:
        raise ValueError(
            f"{_title(model)} adds a loss over the routers of all blocks, which are on different ranks: set"
            " model.config.output_router_logits = False"
        )
    for name in ("layerdrop", "decoder_layerdrop"):
        if plain_attribute(config, name):
            raise ValueError(
                f"{_title(model)} skips blocks at random, and each rank would skip others: load it with {name}=0.0"
            )
    adapters: Any = getattr(model, "peft_config", None) or {}
    for adapter, about in adapters.items():
        if getattr(about, "is_prompt_learning", False):
            raise ValueError(
                f"the adapter {adapter!r} adds tokens to the input; only the unsplit model has labels for them: use"
                f" LoRA, or another adapter of the blocks. {BY_HAND}"
            )


def _refuse_shared(model: nn.Module, name: str) -> None:
    """Refuse a parameter that two blocks share, or a block and a module outside."""
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
    """Replaces a block, and has its plain attributes, because some models ask blocks for the kind of attention."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        vars(self).update((name, value) for name, value in vars(block).items() if isinstance(value, (str, int, float)))


class _HandedOn(Tensor):
    """A block's output for the next block. Any operation with it raises, because a later rank would not have it."""

    refuse: Callable[[object], ValueError]
    """Makes the error for a user other than the next block."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        used = next(each for each in tree_leaves([args, kwargs]) if isinstance(each, cls))
        raise used.refuse(func)


class _Recording(StandIn):
    """Replaces a block while the example runs."""

    def __init__(self, block: nn.Module, position: int, example: _Example) -> None:
        super().__init__(block)
        self._position, self._example = position, (example, block)  # the tuple hides modules from this one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        example, block = self._example
        return example.take(self._position, block, args, kwargs)


class _Example:
    """A forward of the model that checks each call of a block. Later blocks return the first one's output."""

    def __init__(self, model: nn.Module, name: str, blocks: Blocks, batch: int) -> None:
        self._title, self._name, self._batch = _title(model), name, batch
        self._order = [*(f"{name}.{key}" for key, _ in blocks.named_children()), f"what follows {name}"]
        self.recordings = {
            self._order[position]: _Recording(block, position, self) for position, block in enumerate(blocks.children())
        }
        self.reached = 0
        """Number of blocks that have been called."""
        self.output: Any = None
        """Number of the first block's results besides the hidden states."""
        self._handed_on: Any = None

    def take(self, position: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        self.require_next(position)
        self.reached += 1
        hidden = first_argument(args, kwargs)
        if position == 0:
            self.output = _run(block, args, kwargs)
            self._require_same_shape(hidden)
        elif hidden is not self._handed_on:
            raise self._error(
                f"gives {self._order[position]} a first argument that is not the output of {self._order[position - 1]}"
            )
        for each in tree_leaves([args, kwargs]):
            if isinstance(each, Tensor) and each is not hidden and (each.requires_grad or isinstance(each, _HandedOn)):
                raise ValueError(
                    f"the blocks {self._name} of {self._title} take a second tensor that needs a gradient, of shape"
                    f" {tuple(each.shape)}, but zbpipe.pipeline passes only the hidden states. {BY_HAND}"
                )
        if position == len(self.recordings) - 1:
            return self.output
        output = tree_map_only(Tensor, partial(self._hand_on, position), self.output)
        self._handed_on = _hidden_of(output)
        return output

    def require_next(self, position: int) -> None:
        """Refuse a block other than the next one, or the code after the blocks if blocks remain."""
        if position != self.reached:
            raise self._error(f"runs {self._order[position]} where {self._order[self.reached]} is next")

    def _error(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._title} {reason}: zbpipe.pipeline runs each block once, in order, and gives its output to the next"
            f" block alone. If the model skips blocks at random (layer drop), turn that off. {BY_HAND}"
        )

    def _require_same_shape(self, hidden: Any) -> None:
        result = _hidden_of(self.output)
        if (
            not isinstance(hidden, Tensor)
            or not hidden.is_floating_point()
            or len(hidden) != self._batch
            or not isinstance(result, Tensor)
            or result.shape != hidden.shape
        ):
            raise ValueError(
                f"the blocks {self._name} of {self._title} do not map (batch, ...) to the same shape. {BY_HAND}"
            )

    def _hand_on(self, position: int, output: Tensor) -> Tensor:
        handed = output.as_subclass(_HandedOn)
        handed.refuse = lambda user: self._error(f"uses the output of {self._order[position]} in {user}")
        return handed


def _run_example(
    model: nn.Module, name: str, blocks: Blocks, example: Mapping[str, Any], loss_takes_all: bool
) -> tuple[frozenset[str], int | None]:
    """Names of the modules outside the blocks that ran before the second block, and `more_results`."""
    names = {id(module): each for each, module in model.named_modules()}
    ran: set[str] = set()
    run = _Example(model, name, blocks, next(len(each) for each in example.values() if isinstance(each, Tensor)))

    def record(module: nn.Module, args: Any) -> None:
        if run.reached < 2:
            ran.add(names.get(id(module), ""))

    def track(module: nn.Module, args: Any, output: Any) -> Any:
        """Let everything that depends on an embedding require a gradient, even with frozen weights."""
        is_own = id(module) in names and any(True for _ in module.parameters(recurse=False))
        if is_own and isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            return output.requires_grad_() + 0  # autograd refuses in-place changes of a leaf
        return None

    handles = [hooks.register_module_forward_pre_hook(record), hooks.register_module_forward_hook(track)]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    kind = "cpu" if accelerator is None else accelerator.type
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices, device_type=kind):
            torch.default_generator.manual_seed(0)  # all ranks skip the same random blocks
            output = _run(view_of(model, run.recordings), (), dict(example))
    finally:
        for handle in handles:
            handle.remove()
    run.require_next(len(blocks))
    for each in tree_leaves(output) if loss_takes_all else ():
        if isinstance(each, _HandedOn):
            raise each.refuse("its results")
    return frozenset(ran), len(run.output) - 1 if isinstance(run.output, (tuple, list)) else None


def _run(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's output. Buffers, such as the statistics of a batch norm, are restored."""
    return functional_call(module, {name: each.clone() for name, each in module.named_buffers()}, args, kwargs)


def first_argument(args: Any, kwargs: Any) -> Any:
    """The hidden states among a block's arguments."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _hidden_of(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) else output


Loss = Callable[[Any, Tensor, Any], Tensor]
"""`(output of the model, labels, number of labels in the whole batch) -> loss`: a sum divided by that number."""


class Stage(nn.Module):
    """A stage. Its parameters are the model's own.

    Later stages also run the modules before the blocks, for masks and positions, with embeddings that take no memory
    and with their own buffers.

    Args:
        model: the whole model.
        anatomy: its parts.
        own: positions of the blocks of this stage.
        loss: the model's loss, for the last stage.
        device: the device of this rank's weights.
    """

    sums_tied_gradients = True
    """Tied weights on two ranks stay equal (see `zbpipe.runtime.ranks.tied_weights`)."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, own: range, loss: Loss, device: torch.device) -> None:
        super().__init__()
        self.training = model.training
        self._is_last = own.stop == anatomy.count
        self._loss = loss
        blocks = dict(model.get_submodule(anatomy.blocks).named_children())
        absent = (anatomy.before if own.start else frozenset()) | (frozenset() if self._is_last else anatomy.after)
        others = [_Absent(block, anatomy.more_results) for block in blocks.values()]
        if not self._is_last:
            others[own.stop].is_end = True
        self._entry = (others[0],)  # the tuple hides the module from this one
        replacements: dict[str, nn.Module] = {
            name: without_own_state(model.get_submodule(name), device) for name in absent
        }
        for position, key in enumerate(blocks):
            if position not in own:
                replacements[f"{anatomy.blocks}.{key}"] = others[position]
        self.model = view_of(model, replacements)
        self.blocks = tuple(blocks.values())[own.start : own.stop]
        """The blocks of this stage, for `fully_shard` or `compile`."""
        self.count: Any = None
        """Number of labels that count in the running step's batch."""

    def forward(self, hidden: Tensor, *, labels: Tensor | None = None, **batch: Any) -> Any:
        """Hidden states for the next stage. The last stage returns its microbatch's part of the loss, of shape (1,)."""
        (entry,) = self._entry
        entry.received = hidden
        try:
            output = self.model(**batch)
        except _ReachedError as reached:
            return reached.hidden
        finally:
            entry.received = None
        assert labels is not None
        return self._loss(output, labels, self.count).reshape(1)


class _ReachedError(Exception):
    """Ends the forward of a model at one of its blocks. Not an error: no other exception leaves foreign code safely."""

    def __init__(self, hidden: Any) -> None:
        super().__init__("the forward of a stage ends here")
        self.hidden = hidden


class _Absent(StandIn):
    """Replaces another stage's block: returns its input, or the hidden states that its stage received."""

    def __init__(self, block: nn.Module, more_results: int | None) -> None:
        super().__init__(block)
        self._more_results = more_results
        self.received: Tensor | None = None
        self.is_end = False
        """Whether the forward of the stage ends here."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = first_argument(args, kwargs) if self.received is None else self.received
        if self.is_end:
            raise _ReachedError(hidden)
        return hidden if self._more_results is None else (hidden, *[None] * self._more_results)
