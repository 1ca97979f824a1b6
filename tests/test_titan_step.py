"""TorchTitan's own trainer with `--zbpipe.optimizer-step validated`: the same numbers, to the bit."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from titan_jobs import Job, Titan, pipeline, require_titan

from zbpipe.frameworks.titan import steps
from zbpipe.runtime.optimizer.step import StepCounts

# Norms of gradients that some steps are above and some below. TorchTitan 0.2 has those of the sum over all tokens.
FOUND = require_titan("0.3.0", "0.2.2")
CLIPPING = {"0.3.0": "2.82", "0.2.2": "720"}[FOUND]
# By default TorchTitan 0.2 cannot resume from the last checkpoint of a job.
RESUMABLE = {"0.3.0": (), "0.2.2": ("--checkpoint.no_last_save_model_only",)}[FOUND]

VALIDATED = ("--zbpipe.optimizer-step", "validated")
WARM_UP = ("--lr_scheduler.warmup_steps", "2")
EIGHT_STEPS = (*WARM_UP, "--training.steps", "8", "--metrics.log_freq", "4")


def counts_of(job: Job) -> dict[str, int]:
    """By kind of step; all ranks have the same."""
    found = set(re.findall(r"Optimizer steps: (.*)", job.log))
    assert len(found) == 1, job.log
    return {way: int(number) for number, way in (each.split() for each in found.pop().strip().split(", "))}


def assert_same(job: Job, usual: Job, logged: int) -> None:
    """Bit-identical."""
    assert (usual.error, job.error) == (None, None), job.log
    for name in ("loss_metrics/global_avg_loss", "grad_norm"):
        found = [step[name] for step in job.steps]
        assert len(found) == logged  # TorchTitan logs the first step, too
        assert found == [step[name] for step in usual.steps]


@pytest.mark.long
def test_the_trainer_gets_the_same_numbers(titan: Titan) -> None:
    """With FSDP, and norms that no step exceeds. Experts: test_matrix."""
    shard = ("--parallelism.data_parallel_shard_degree", "2")
    job = (*EIGHT_STEPS, *pipeline("ZBV"), "--training.max_norm", "1e6", *shard)
    usual, validated = (titan.train(*job, *more, num_ranks=4) for more in ((), VALIDATED))
    assert_same(validated, usual, 3)
    counts = counts_of(validated)
    assert counts.keys() == {"synchronous", "validated"}
    assert sum(counts.values()) == 8
    assert validated.steps[-1]["zbpipe/optimizer_steps/validated"] == counts["validated"]


@pytest.mark.long
@pytest.mark.versions
def test_checkpoints_hold_validated_steps(titan: Titan, tmp_path: Path) -> None:
    """Saved after steps that have to be repeated, and resumed."""
    clipping = (*pipeline("ZBV"), *WARM_UP, "--training.max_norm", CLIPPING)

    def in_two_parts(name: str, *more: str) -> list[Job]:
        return [
            titan.train(
                *(*clipping, *RESUMABLE, *more, "--training.steps", steps, "--metrics.log_freq", often),
                num_ranks=2,
                checkpoints=tmp_path / name,
            )
            for steps, often in (("6", "6"), ("8", "1"))
        ]

    first, resumed = in_two_parts("ahead", *VALIDATED)
    for job, usual in zip((first, resumed), in_two_parts("usual"), strict=True):
        assert_same(job, usual, 2)
    counts = counts_of(first)
    assert counts.keys() == {"synchronous", "validated", "repeated"}
    assert sum(counts.values()) == 6
    assert first.steps[-1]["zbpipe/optimizer_steps/repeated"] == counts["repeated"]


def test_no_checkpoint_comes_before_the_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is saved of a finished step: the last one, too, whose number the interval does not divide."""
    done: list[Any] = []

    class Checkpointer:
        enable = True

        def _should_save(self, step: int, last_step: bool = False) -> bool:
            return last_step or step % 2 == 0

        def save(self, step: int, last_step: bool = False) -> None:
            if self._should_save(step, last_step):
                done.append(step)

    class Trainer:
        checkpointer = Checkpointer()
        pp_schedule = lr_schedulers = None
        optimizers = SimpleNamespace(optimizers=[])

        def train(self) -> None:
            for step in (1, 2, 3):
                self.checkpointer.save(step, last_step=step == 3)

        def train_step(self, data_iterator: Any) -> None: ...

    step = SimpleNamespace(finish=lambda: done.append("finished"), counts=StepCounts())
    monkeypatch.setattr(steps, "OptimizerStep", lambda *args, **kwargs: step)
    steps.validate_steps(Trainer, None, lambda trainer: 1.0)
    Trainer().train()
    assert done == ["finished", 2, "finished", 3, "finished"]
