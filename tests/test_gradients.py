"""Every schedule gives the losses and gradients of the same model without a pipeline, in real processes over gloo."""

import pytest
import torch
import torch.distributed as dist
from models import Checkpointing, batch, build_stage, gradients, loss_fn, reference
from ranks import run_ranks
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime.deferred import PendingGradient

# Both runs do the same float32 arithmetic but for the order in which the microbatches' weight gradients are added (a
# fused multiply-add into .grad here, product and then sum there). Over 8 microbatches that moves the last bits only.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}
MICROBATCHES = (1, 2, 3, 8)

Result = tuple[list[float], dict[str, torch.Tensor]]


def train(
    schedule: str,
    microbatches: tuple[int, ...],
    checkpointing: Checkpointing,
    broken: bool = False,
    **options: object,
) -> list[Result]:
    """Two steps for each number of microbatches on this rank; the second step's losses and gradients."""
    if broken:
        accumulate = PendingGradient.accumulate
        PendingGradient.accumulate = lambda self: accumulate(self._replace(dy=1.001 * self.dy))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for count in microbatches:
        num_stages = zbpipe.registry.lookup(schedule).place(num_ranks).num_stages
        modules = {
            index: build_stage(index, num_stages, checkpointing)
            for index in zbpipe.stage_indices(schedule, rank=rank, num_ranks=num_ranks)
        }
        stages = [PipelineStage(module, index, num_stages, torch.device("cpu")) for index, module in modules.items()]
        runtime = zbpipe.build_pipeline_schedule(
            schedule=schedule, stages=stages, n_microbatches=count, loss_fn=loss_fn, **options
        )
        tokens, targets = batch(count)
        losses: list[torch.Tensor] = []
        for _ in range(2):
            for module in modules.values():
                module.zero_grad()
            runtime.step(
                *([tokens] if 0 in modules else []),
                target=targets if num_stages - 1 in modules else None,
                losses=losses,
            )
        results.append(([loss.item() for loss in losses], gradients(modules)))
    return results


def assert_like_reference(per_rank: list[list[Result]], num_stages: int) -> None:
    for position, count in enumerate(MICROBATCHES):
        expected_losses, expected = reference(num_stages, count)
        losses = [loss for results in per_rank for loss in results[position][0]]
        found = {name: grad for results in per_rank for name, grad in results[position][1].items()}
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(
                found[name], grad, **TOLERANCE, msg=lambda m, n=name, c=count: f"{n}, m={c}: {m}"
            )


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_zbv(num_ranks: int, checkpointing: Checkpointing) -> None:
    assert_like_reference(run_ranks(num_ranks, train, "ZBV", MICROBATCHES, checkpointing), 2 * num_ranks)


def test_the_comparison_sees_a_broken_weight_gradient() -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_like_reference(run_ranks(2, train, "ZBV", MICROBATCHES, "none", True), 4)
