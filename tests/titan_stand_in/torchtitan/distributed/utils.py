from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm_(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """The norm of the gradients of all ranks."""
    squares = get_total_norm([each.grad for each in parameters if each.grad is not None]).square()
    dist.all_reduce(squares)
    clip_grads_with_norm_(parameters, max_norm, squares.sqrt())
    return squares.sqrt()
