"""One stage of a model: the model's own forward between two of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zbpipe.frameworks.whole_model.anatomy import Anatomy, StandIn, first_argument
from zbpipe.runtime._torch.module_views import view_of, without_own_state

Loss = Callable[[Any, Tensor, Any], Tensor]
"""`(output of the model, labels, number of labels in the whole batch) -> loss`: a sum divided by that number."""


class Stage(nn.Module):
    """A stage. Its parameters are the model's own.

    Later stages also run the modules before the blocks, for masks and positions, with embeddings that take no memory,
    and with buffers of their own.

    Args:
        model: the whole model.
        anatomy: its parts.
        own: positions of the blocks of this stage.
        loss: used by the last stage.
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
        self._entry = (others[0],)  # not a part of this module
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
        """Number of labels that count in the whole batch of the running step."""

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
    """Leaves the forward of a model at one of its blocks. Not an error: nothing else leaves other people's code."""

    def __init__(self, hidden: Any) -> None:
        super().__init__("the forward of a stage ends here")
        self.hidden = hidden


class _Absent(StandIn):
    """In the place of another stage's block: hands on its input, or the hidden states that its stage received."""

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
