"""Gradient scaling over the stages of a pipeline: an overflow on one rank is one on all."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelines import Pipeline, on_one_rank
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.functional import mse_loss

import zbpipe

pytestmark = pytest.mark.long

WIDTH, MICROBATCHES, STEPS = 8, 4, 8
OVERFLOWS = {3: 0, 4: 0, 6: 1}
"""By step the stage whose weight gets an infinite gradient."""
SCALE = {"device": "cpu", "init_scale": 2.0**10, "growth_interval": 2}


class Overflow:
    """A hook of a weight, which makes its gradient infinite in some steps."""

    def __init__(self, stage: int) -> None:
        self.stage, self.step = stage, 0

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * (float("inf") if OVERFLOWS.get(self.step) == self.stage else 1.0)


def built(num_stages: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(num_stages)]


def train(
    parts: dict[int, nn.Linear], scaler: torch.amp.GradScaler, run: Callable[[Tensor, Tensor], object]
) -> list[tuple[float, list[Tensor]]]:
    hooks = [Overflow(index) for index in parts]
    for hook, part in zip(hooks, parts.values(), strict=True):
        part.weight.register_hook(hook)
    optimizer = torch.optim.SGD([each for part in parts.values() for each in part.parameters()], lr=0.1)
    scaler.scale(torch.zeros(()))  # on ranks without the loss nothing else tells it that there is a scale
    found = []
    for step in range(STEPS):
        for hook in hooks:
            hook.step = step
        torch.manual_seed(100 + step)
        run(*torch.randn(2, 2 * MICROBATCHES, WIDTH))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(
            (scaler.get_scale(), [each.detach().clone() for part in parts.values() for each in part.parameters()])
        )
    return found


def on_this_rank(name: str) -> list[tuple[float, list[Tensor]]]:
    scaler = ShardedGradScaler(**SCALE)  # type: ignore[arg-type]
    pipeline = Pipeline(
        name,
        MICROBATCHES,
        lambda index, num_stages: built(num_stages)[index],
        lambda output, target: scaler.scale(mse_loss(output, target)),
    )
    parts: dict[int, Any] = pipeline.modules
    return train(parts, scaler, lambda x, target: pipeline.run(x, target=target))


@pytest.mark.parametrize("name", ["ZBV", "ZBH1"])
def test_a_scaler_that_all_ranks_share(name: str) -> None:
    per_rank = run_ranks(2, on_this_rank, name)
    num_stages = 4 if name == "ZBV" else 2
    parts, scaler = built(num_stages), torch.amp.GradScaler(**SCALE)  # type: ignore[arg-type]

    def step(x: Tensor, target: Tensor) -> None:
        output = x
        for part in parts:
            output = part(output)
        scaler.scale(mse_loss(output, target)).backward()

    expected = train(dict(enumerate(parts)), scaler, step)
    assert len({scale for scale, _ in expected}) > 2
    for rank, found in enumerate(per_rank):
        indices = zbpipe.stage_indices(name, rank=rank, num_ranks=2)
        for (scale, weights), (wanted_scale, wanted) in zip(found, expected, strict=True):
            assert scale == wanted_scale
            torch.testing.assert_close(weights, [wanted[2 * index + n] for index in indices for n in range(2)])


def test_optimizer_step_refuses_scalers(one_rank: None) -> None:
    parts = built(2)
    optimizer = torch.optim.SGD(nn.ModuleList(parts).parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def schedule(loss_fn: Callable[..., Tensor] = mse_loss, **options: Any) -> Any:
        return on_one_rank(copy.deepcopy(parts), MICROBATCHES, loss=loss_fn, **options)

    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return scaler.scale(mse_loss(output, target))

    wrong: Any = scaler
    step: Any = lambda: scaler.step(optimizer)  # noqa: E731
    update: Any = scaler.update
    for make in (
        lambda: zbpipe.OptimizerStep(schedule(scaled), [optimizer]),
        lambda: zbpipe.OptimizerStep(schedule(scaled, defer_loss=True), [optimizer]),
        lambda: zbpipe.OptimizerStep(schedule(), [optimizer], step=step),
        lambda: zbpipe.OptimizerStep(schedule(), [optimizer], clip=update),
        lambda: zbpipe.OptimizerStep(schedule(), wrong),
    ):
        with pytest.raises(ValueError, match=r"OptimizerStep does not unscale .*ShardedGradScaler"):
            make()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    zbpipe.OptimizerStep(schedule(scaled), [optimizer], max_norm=float("inf"))
