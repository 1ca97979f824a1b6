"""TorchTitan's trainer in jobs whose steps have different numbers of microbatches, of different lengths."""

from __future__ import annotations

import pytest
from titan_jobs import Titan, pipeline, require_titan

require_titan("0.3.0")

STEPS = 6
"""Of which `sizes_config` has the sizes."""
VARYING = (
    *("--module", "sizes_config", "--config", "varying", "--training.steps", str(STEPS)),
    *("--validator.enable", "--validator.freq", "3", "--validator.steps", "1"),
    *("--validator.dataloader.dataset", "python_stdlib"),
)
ALONE = ("--training.local_batch_size", "1")
"""Without a pipeline TorchTitan's trainer takes what it accumulates from the loader one batch after the other."""


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["ZBH1", "Auto"])
def test_steps_of_different_sizes(titan: Titan, schedule: str) -> None:
    job = titan.train(*VARYING, *pipeline(schedule), num_ranks=2)
    expected = titan.without_pipeline(*VARYING, *ALONE)
    assert (job.error, expected.error) == (None, None), job.log
    validations = 1 + STEPS // 3  # also after the first step
    for name, number, tolerance in (
        ("loss_metrics/global_avg_loss", STEPS, 1e-5),
        ("grad_norm", STEPS, 1e-4),
        ("validation_metrics/loss", validations, 1e-5),
    ):
        found, wanted = ([step[name] for step in each.steps if name in step] for each in (job, expected))
        assert len(found) == number
        assert found == pytest.approx(wanted, rel=tolerance), name
