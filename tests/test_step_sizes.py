"""Steps with another number of microbatches than the first: what is refused, and what is made once."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import batch
from ranks import run_ranks
from test_faults import MICROBATCHES, Job, impatient_group, renew_group
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime._torch import pipelining


def data(rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens, targets = batch(MICROBATCHES * 2)
    return tokens[:rows, :length], targets[:rows, :length]


def step(job: Job, rows: int, length: int = 6, **given: Any) -> None:
    tokens, targets = data(rows, length)
    job.run(tokens, target=targets, **given)


def refused(job: Job, rows: int, **given: Any) -> str:
    try:
        step(job, rows, **given)
    except (ValueError, zbpipe.PipelineError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(folder: Path) -> dict[str, str]:
    """What this rank, of two, says to steps that the ranks are not given alike."""
    rank = dist.get_rank()
    renew_group(folder / "alike")
    job = Job("ZBH1")
    step(job, 6)
    found = {str(wrong): refused(job, 6, microbatches=wrong) for wrong in (0, True, "3", 2.0)}
    found["different"] = refused(job, 6, microbatches=2 + rank)
    # Rank 1 has the target, and nothing to refuse by itself.
    found["uneven"] = refused(job, 7 - rank, microbatches=3)
    step(job, 6, microbatches=3)
    found["without"] = refused(job, 12, microbatches=None)
    renew_group(folder / "table")
    table: Any = zbpipe.generate("1F1B", 2, MICROBATCHES)
    found["table"] = refused(Job(table), 6, microbatches=3)
    renew_group(folder / "forgotten")
    job = Job("ZBH1", group=impatient_group())
    step(job, 6)
    began = time.monotonic()
    found["forgotten"] = refused(job, 6, **({} if rank else {"microbatches": 3}))
    assert time.monotonic() - began < 30
    found["next"] = refused(job, 6)
    renew_group(folder / "end")
    return found


def test_what_ranks_are_not_given_alike_is_refused_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, refusals, tmp_path)
    for found in (first, second):
        for wrong in ("0", "True", "'3'", "2.0"):
            words = f"ValueError: microbatches has to be a whole number from 1 on, got {wrong}"
            assert found[wrong.strip("'")] == words
        assert found["different"].startswith(
            "RefusedStepError: the ranks were given different microbatches=: 2 on rank 0, 3 on rank 1. Give the same"
        )
        assert "is a table for 6 microbatches, but the job has 3: name a schedule" in found["table"]
    assert first["uneven"].startswith("ValueError: microbatch 1 has inputs of the shapes (2, 6), but microbatch 0")
    assert second["uneven"] == f"RefusedStepError: rank 0 refuses this step: {first['uneven']}"
    assert "the microbatches have inputs of the shapes (2, 6), but those of the first step" in first["without"]
    assert "or give step(microbatches=) on all ranks" in first["without"]
    assert "3 on rank 0, none on rank 1" in first["forgotten"]
    assert first["forgotten"] in second["forgotten"]
    assert first["next"] == second["next"] == ""


def test_the_lists_of_a_size_are_made_once(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile Python looks for no garbage, which takes longer than the lists; afterwards as before."""
    indices = zbpipe.stage_indices("ZBV", rank=0, num_ranks=1)
    stages = [PipelineStage(torch.nn.Linear(2, 2), index, 2, torch.device("cpu")) for index in indices]
    schedule: Any = zbpipe.build_pipeline_schedule("ZBV", stages, 4, F.mse_loss)
    made: list[tuple[str, bool]] = []
    lower = pipelining.lower

    def recorded(runtime: Any, table: zbpipe.Schedule) -> Any:
        made.append((str(table), gc.isenabled()))
        return lower(runtime, table)

    monkeypatch.setattr(pipelining, "lower", recorded)
    x = torch.ones(6, 2)
    schedule.prepare(2)
    assert made.pop() == (str(zbpipe.generate("ZBV", 1, 2)), False)
    assert pipelining.num_microbatches(schedule) == 4
    assert schedule.schedule == zbpipe.generate("ZBV", 1, 4)
    with pytest.raises(ValueError, match="microbatches has to be a whole number"):
        schedule.prepare(2, 0)
    assert pipelining.num_microbatches(schedule) == 4
    for number in (3, None, 3, 6, 3, 6, 2):
        schedule.step(x if number else x[:4], target=x if number else x[:4], microbatches=number)
    assert made == [(str(zbpipe.generate("ZBV", 1, number)), False) for number in (3, 6)]
    assert gc.isenabled()
    gc.disable()
    try:
        schedule.step(x[:5], target=x[:5], microbatches=5)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="microbatches has to be a whole number"):
        schedule.step(x, target=x, microbatches=0)
    assert gc.isenabled()
