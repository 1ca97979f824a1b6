"""The plug with names and signatures of TorchTitan's main branch, in a stand-in that needs no TorchTitan."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

import zbpipe
from zbpipe import CostModel, Placement
from zbpipe.cli.demo.launch import JobOutcome
from zbpipe.frameworks.installation import find_algorithm
from zbpipe.frameworks.options import Options
from zbpipe.frameworks.titan import batches, versions
from zbpipe.frameworks.titan.check import check, require_processes
from zbpipe.frameworks.titan.command_line import parse
from zbpipe.titan.check_clone import find_difference

STAND_IN = Path(__file__).parent / "titan_stand_in"
NEEDS_TORCH = pytest.mark.skipif(torch.__version__ < "2.14", reason="TorchTitan's main branch needs torch 2.14")
RANKS, MICROBATCHES = 2, 4


def train(jobs: Sequence[tuple[str, str]], options: Sequence[str] = (), *, only_read: bool = False) -> list[Any]:
    """For each job of a toy with a schedule, the losses on this rank and what zbpipe said, or the error.

    If the command lines are `only_read`, None or the error.
    """
    sys.path.insert(0, str(STAND_IN))
    os.environ["WORLD_SIZE"] = str(RANKS)
    import zbpipe.titan

    zbpipe.titan.plug_in(parse(options)[0])
    import torchtitan.train

    found: list[Any] = []
    for toy, schedule in jobs:
        name, _, degree = schedule.partition(" ")
        arguments = {
            "--module": "torchtitan.experiments.toys",
            "--config": toy,
            "--parallelism.pipeline_parallel_degree": degree or str(RANKS),
            "--parallelism.pipeline_parallel_schedule": name,
            "--parallelism.num_pp_microbatches": "16" if only_read else str(MICROBATCHES),
        }
        sys.argv = ["train", *(word for pair in arguments.items() for word in pair)]
        try:
            found.append(_train(torchtitan.train, only_read))
        except ValueError as error:
            found.append(str(error))
    return found


def _train(titan: Any, only_read: bool) -> tuple[list[float], list[str]] | None:
    if only_read:
        titan.ConfigManager().parse_args()
        return None
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("zbpipe", "torchtitan")]
    for each in loggers:
        each.addHandler(handler)
        each.setLevel(logging.INFO)
    try:
        titan.main()
    finally:
        for each in loggers:
            each.removeHandler(handler)
    schedule, metrics = titan.Trainer.trained[-1].pp_schedule, titan.Trainer.trained[-1].metrics_processor
    if schedule.__class__.__name__ == "ScheduleZB":
        said.append(f"made for the work {schedule._work}")
    return [loss for _, loss, _ in metrics.logged], said + [json.dumps(extra) for *_, extra in metrics.logged]


TOYS = ("llm", "vlm", "own_functions")
SCHEDULES = ("1F1B", "ZB", "ZBV", "ZBH1", "InterleavedZeroBubble")


@NEEDS_TORCH
def test_models_train_alike_with_all_schedules(tmp_path: Path) -> None:
    wave = tmp_path / "wave.csv"  # in a placement that no framework knows
    placement = Placement((0, 1, 1, 0, 0, 1))
    planned = zbpipe.plan(RANKS, MICROBATCHES, CostModel.uniform(placement), placements=[placement], budget=0.2)
    wave.write_text(planned.schedule.to_csv())
    jobs = [(toy, schedule) for toy in TOYS for schedule in (*SCHEDULES, str(wave))]
    ranks = run_ranks(RANKS, train, jobs)
    losses: dict[str, list[float]] = {}
    for (toy, schedule), *found in zip(jobs, *ranks, strict=True):
        assert not isinstance(found[0], str), (toy, schedule, found[0])
        of_ranks, said = zip(*found, strict=True)
        assert of_ranks[0] == of_ranks[1] == pytest.approx(losses.setdefault(toy, of_ranks[0]), rel=1e-5), schedule
        assert min(of_ranks[0]) > 0
        words = "\n".join(said[0])
        assert ("Using zbpipe's pipeline schedule" in words) == (schedule in ("ZB", "ZBV", "ZBH1", str(wave)))
        assert "zbpipe/bubble(%)" in words
        assert "pipeline: " in words
        assert ("stages per rank in a" in words) == (schedule == "ZB")
        assert ("made for the work [(" in words) == (schedule == "ZB")  # of the stages of its cut
        if schedule == "ZBV":  # cut by what each module costs
            assert ("vision_encoder on the first stage counts as" in words) == (toy == "vlm")
            assert "by work" in words


@NEEDS_TORCH
def test_another_runtime_is_left_alone_and_knows_no_schedule_of_zbpipes() -> None:
    jobs = [("runtime", "1F1B"), ("runtime", "ZBV"), ("llm", "1F1B")]
    *_, (first, refused, other) = run_ranks(RANKS, train, jobs)
    assert not isinstance(first, str), first
    assert not isinstance(other, str), other
    assert first[0] == pytest.approx(other[0])
    assert "torchtitan.experiments.toys.pipeline_by_runtime runs 1F1B by its own Runtime" in first[1]
    assert ["the loss of 1F1B is on another rank" in each[1] for each in (first, other)] == [True, False]
    assert isinstance(refused, str)
    assert refused.startswith("torchtitan.experiments.toys.pipeline_by_runtime runs this model by its own Runtime")


@NEEDS_TORCH
def test_what_is_refused_before_the_ranks_meet() -> None:
    jobs = [("own_trainer", "ZBV"), ("llm", "ZBV"), ("llm", f"ZBV {RANKS + 1}")]
    (refused, trained, unfit), *_ = run_ranks(RANKS, read, jobs)
    assert "pipeline_parallel_degree=3 needs a multiple of 3 processes, and this job has 2: start" in str(unfit)
    assert refused == (
        "--zbpipe.optimizer-step validated has no effect in torchtitan.experiments.toys.OwnTrainer, which overrides"
        " train_step: omit the option"
    )
    assert trained is None


def read(jobs: Sequence[tuple[str, str]]) -> list[str | None]:
    """The errors of command lines with validated optimizer steps."""
    return train(jobs, ("--zbpipe.optimizer-step", "validated"), only_read=True)


# What TorchTitan lacks.


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A `torchtitan` with one module, `part`."""
    package, part = ModuleType("torchtitan"), ModuleType("torchtitan.part")
    package.__path__ = []
    package.part = part  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchtitan", package)
    monkeypatch.setitem(sys.modules, "torchtitan.part", part)
    monkeypatch.setattr(versions, "describe_installed", lambda: "torchtitan 0.4.0 in /clone")
    return part


def test_names_that_are_missing_are_all_told(titan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    titan.moved = lambda first, new_name: None  # type: ignore[attr-defined]
    needed = (
        versions.Needed("part:old or part:moved", ("first", "old_name or new_name")),
        versions.Needed("part:moved", ("second",)),
        versions.Needed("part:gone or other:gone"),
    )
    monkeypatch.setattr(versions, "NEEDED", needed[:1])
    versions.require_names()
    monkeypatch.setattr(versions, "NEEDED", needed)
    said = (
        "torchtitan 0.4.0 in /clone lacks second of part.moved, part.gone or other.gone, which zbpipe needs; it"
        " knows 0.2.2, 0.3.0, main of August 2026: use zbpipe.install()"
    )
    with pytest.raises(ImportError, match=re.escape(said)):
        versions.require_names()


def test_a_package_that_a_clone_needs_is_told(titan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_grain(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'grain'", name="grain")

    monkeypatch.setattr(versions, "resolve_name", find_no_grain)
    said = "torchtitan 0.4.0 in /clone cannot be imported: No module named 'grain': install its dependencies"
    with pytest.raises(ImportError, match=re.escape(said)):
        versions.require_names()


# Sizes and degrees.


def config(**parallelism: Any) -> Any:
    """With tokens in one row if `num_pp_microbatches` is given, else with sequences."""
    degrees = ("tensor_parallel_degree", "context_parallel_degree", "data_parallel_replicate_degree")
    common = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "ZBV",
        "pipeline_parallel_schedule_csv": None,
        **dict.fromkeys(degrees, 1),
        "data_parallel_shard_degree": -1,
    }
    in_row = "num_pp_microbatches" in parallelism
    sizes = (
        {"num_tokens_per_microbatch_per_dp_rank": 96, "max_context_length": 32, "num_tokens_per_train_step": 96 * 3 * 4}
        if in_row
        else {"local_batch_size": 9, "seq_len": 32, "global_batch_size": 36}
    )
    return SimpleNamespace(
        parallelism=SimpleNamespace(
            **common | ({} if in_row else {"pipeline_parallel_microbatch_size": 3}) | parallelism
        ),
        training=SimpleNamespace(steps=10, **sizes),
        compile=SimpleNamespace(enable=False),
        comm=SimpleNamespace(init_timeout_seconds=300, mode="default"),
    )


@pytest.mark.parametrize("given", [{}, {"num_pp_microbatches": 3}])
def test_the_sizes_of_a_step(given: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    job = config(**given)
    assert batches.microbatches(job) == 3
    assert batches.length(job.training) == 32
    assert batches.shape(job) == ((96,) if given else (3, 32))
    assert [batches.accumulates(job, data) for data in (3, 4)] == [True, False]
    check(job, find_algorithm(job.parallelism.pipeline_parallel_schedule), Options())
    asked = "--parallelism.num_pp_microbatches 4" if given else "--training.local_batch_size 12"
    assert f"set {asked} or more" in caplog.text


TWO = "pipeline_parallel_degree=2 x "


@pytest.mark.parametrize(
    ("number", "name", "degree", "said"),
    [
        (2, "pipeline_parallel_degree", 3, "pipeline_parallel_degree=3 needs a multiple of 3 processes, and this job"),
        (
            6,
            "tensor_parallel_degree",
            2,
            f"{TWO}tensor_parallel_degree=2 needs a multiple of 4 processes, and this job ",
        ),
        (
            8,
            "data_parallel_shard_degree",
            2,
            f"{TWO}data_parallel_shard_degree=2 needs 4 processes, and this job has 8",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_processes(number: int, name: str, degree: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        require_processes(config(**{name: degree}), number)
    job = config()
    require_processes(job, 8)
    job.parallelism.pipeline_parallel_degree, job.comm.mode = 3, "fake_backend"
    require_processes(job, 8)


def test_options_without_a_pipeline_name_no_schedule() -> None:
    job = config(pipeline_parallel_degree=1, pipeline_parallel_schedule="Interleaved1F1B")
    with pytest.raises(ValueError, match=r"^zbpipe's options have no effect without a pipeline: omit them, or set"):
        check(job, find_algorithm("Interleaved1F1B"), Options(check_gradients=1))
    check(job, find_algorithm("Interleaved1F1B"), Options())


def test_the_check_of_a_clone_compares_losses_and_norms() -> None:
    def outcome(loss: float, norm: float, steps: int = 1) -> JobOutcome:
        return JobOutcome(({"step": 1, "loss_metrics/global_avg_loss": loss, "grad_norm": norm},) * steps, None)

    assert find_difference(outcome(2, 3), outcome(2 * (1 + 1e-6), 3 * (1 + 1e-5))) is None
    assert find_difference(outcome(2, 3), outcome(2.001, 3)) == (
        "in step 1 loss_metrics/global_avg_loss is 2 with 1F1B and 2.001 with ZBV"
    )
    assert "grad_norm is 3 with 1F1B and 6" in str(find_difference(outcome(2, 3), outcome(2, 6)))
    assert find_difference(outcome(2, 3), outcome(2, 3, steps=2)) == "ZBV has 2 steps and 1F1B 1"
