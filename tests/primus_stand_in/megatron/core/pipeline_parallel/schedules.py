"""Megatron's steps of one microbatch, with the arguments that Primus gives them."""

from typing import Any

import torch
from torch import Tensor


def forward_step(
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    input_tensor: list[Tensor | None],
    forward_data_store: list[Any],
    is_last_stage: bool,
    **_: Any,
) -> tuple[list[Tensor], Tensor]:
    output, loss = forward_step_func(data_iterator, model, input_tensor[0])
    if is_last_stage:
        output = loss(output)
        forward_data_store.append(output.detach())
    return [output], torch.tensor(1)


def backward_step(
    *, input_tensor: list[Any], output_tensor: list[Any], output_tensor_grad: list[Any], **_: Any
) -> list[Tensor | None]:
    if input_tensor[0] is not None:
        input_tensor[0].retain_grad()
    torch.autograd.backward(output_tensor[0], output_tensor_grad[0])
    return [None if input_tensor[0] is None else input_tensor[0].grad]


def deallocate_output_tensor(out: Tensor, deallocate_pipeline_outputs: bool) -> None:
    assert not deallocate_pipeline_outputs
