"""A small model cut into stages, with every kind of layer that the backward split treats differently."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zbpipe.runtime.split import GROUPED_MM

Checkpointing = Literal["none", "full", "selective"]
WIDTH, VOCABULARY, SEQUENCE = 16, 32, 6


class DoubledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Block(nn.Module):
    """Residual block: linears with and without bias, one used twice, one frozen, one with its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = DoubledLinear(2 * WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # a changing number would be compiled again and again
            self.calls += 1
        h = self.norm(x)
        h = self.down(F.silu(self.gate(h)) * self.up(h))
        h = self.twice(torch.tanh(self.twice(h)))
        return x + self.frozen(h)


class TiedStage(nn.Module):
    """The only stage of a one-stage model: token embedding and output head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Experts(nn.Module):
    """SwiGLU of groups of rows, as TorchTitan's: weights (experts, out, in), products in bfloat16."""

    weight_products: ClassVar[Any] = {torch._grouped_mm: GROUPED_MM}

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(experts, hidden, dim) / 4) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, dim, hidden) / 4)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        assert not isinstance(self.up, DTensor)
        h = F.silu(self._multiply(x.bfloat16(), self.gate.bfloat16().transpose(-2, -1), ends))
        h = h * self._multiply(x.bfloat16(), self.up.bfloat16().mT, ends)
        return self._multiply(h, self.down.transpose(-2, -1).to(torch.bfloat16), ends).type_as(x)

    def _multiply(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs=ends)


def build_stage(
    index: int, num_stages: int, checkpointing: Checkpointing = "none", seed: int = 0, num_blocks: int = 1
) -> nn.Module:
    """One stage: embedding first, head last, blocks between; the same weights wherever it is built."""
    torch.manual_seed(1000 * seed + index)
    layers: list[nn.Module] = [checkpointed(Block(), checkpointing) for _ in range(num_blocks)]
    if index == 0:
        layers.insert(0, nn.Embedding(VOCABULARY, WIDTH))
    if index == num_stages - 1:
        layers.append(nn.Linear(WIDTH, VOCABULARY, bias=False))
    return nn.Sequential(*layers)


def checkpointed(module: nn.Module, checkpointing: Checkpointing) -> nn.Module:
    """`module` with its activations kept, recomputed, or all but every second product recomputed."""
    return _WRAPPERS[checkpointing](module)


def _every_second_product() -> Callable[..., CheckpointPolicy]:
    """What TorchTitan's selective checkpointing does: keep every second matrix product, recompute the rest."""
    counts = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += 1
        keep = counts[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


_WRAPPERS: dict[Checkpointing, Callable[[nn.Module], nn.Module]] = {
    "none": lambda block: block,
    "full": partial(checkpoint_wrapper, early_stop=False),
    "selective": partial(
        checkpoint_wrapper,
        early_stop=False,
        context_fn=lambda: create_selective_checkpoint_contexts(_every_second_product()),
    ),
}


def batch(num_microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets, two sequences a microbatch: (2 * microbatches, SEQUENCE)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * num_microbatches, SEQUENCE)
    return tuple(torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def gradients(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    """Clones of all gradients that are there, by stage and parameter name without checkpointing's prefix."""
    return {
        f"{index}.{name.replace('_checkpoint_wrapped_module.', '')}": parameter.grad.clone()
        for index, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def reference(num_stages: int, num_microbatches: int, seed: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """Losses per microbatch and gradients of the mean loss, of the same model without pipeline and split."""
    return without_pipeline(num_stages, num_microbatches, *batch(num_microbatches, seed))


def without_pipeline(
    num_stages: int, num_microbatches: int, tokens: Tensor, targets: Tensor
) -> tuple[list[float], dict[str, Tensor]]:
    stages = {index: build_stage(index, num_stages) for index in range(num_stages)}
    losses = []
    for x, target in zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True):
        for stage in stages.values():
            x = stage(x)  # noqa: PLW2901
        loss = loss_fn(x, target)
        (loss / num_microbatches).backward()
        losses.append(loss.item())
    return losses, gradients(stages)
