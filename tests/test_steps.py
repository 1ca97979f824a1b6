"""What a step refuses before anything is sent, and what comes after one that failed or was refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY, WIDTH, batch
from pipelines import on_one_rank
from ranks import run_ranks
from test_faults import MICROBATCHES, Job, OnCall, explode, renew_group
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.ranks.failures import share_with_other_ranks

HAS_MICROBATCH_ARGUMENTS = hasattr(pipelining.PipelineSchedule, "_get_microbatch_inputs")
"""Whether torch's `step` takes microbatches, too (since 2.14)."""


def take(job: Job, rows: int, with_input: bool = True, with_target: bool = True) -> None:
    """A step on so many sequences."""
    tokens, targets = (torch.cat(each)[:rows] for each in zip(batch(MICROBATCHES), batch(MICROBATCHES, 1), strict=True))
    has_first, has_last = 0 in job.modules, job.num_stages - 1 in job.modules
    job.schedule.step(
        *([tokens] if has_first and with_input else []), target=targets if has_last and with_target else None
    )


def uneven() -> None:
    take(Job("ZBH1"), 13)


def too_few() -> None:
    take(Job("ZBH1"), 4)


def smaller() -> None:
    job = Job("ZBH1")
    take(job, 12)
    take(job, 6)


def no_input() -> None:
    take(Job(), 12, with_input=False)


def no_target() -> None:
    take(Job(), 12, with_target=False)


def no_loss() -> None:
    job = Job("ZBV", None)  # type: ignore[arg-type]
    tokens, _ = batch(MICROBATCHES)
    outputs = job.schedule.eval(*([tokens] if 0 in job.modules else []))
    assert (outputs is not None) == (job.num_stages - 1 in job.modules)
    take(job, 12)


def five_microbatches() -> None:
    job = Job()
    tokens, targets = batch(MICROBATCHES)
    inputs = [(each,) for each in tokens.chunk(MICROBATCHES)][:5]
    first = 0 in job.modules
    job.schedule.step(arg_mbs=inputs if first else None, target_mbs=list(targets.chunk(6)) if first else None)


def after_a_failure() -> None:
    job = Job()
    job.step()
    if 1 in job.modules:
        job.modules[1].register_forward_pre_hook(OnCall(3, explode))
    with pytest.raises(zbpipe.PipelineError, match="too much"):
        job.step()
    job.step()


def after_a_refusal() -> None:
    """Both ranks refuse and go on: what rank 0 said then does not explain what fails later."""
    job = Job()
    tokens = torch.cat([batch(MICROBATCHES)[0]] * 2)[:13]
    with pytest.raises(ValueError, match="equal microbatches"):
        job.schedule.step(tokens, target=tokens)
    job.step()
    if 1 in job.modules:
        job.modules[1].register_forward_pre_hook(OnCall(3, explode))
    job.step()


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted() -> None:
    job = Job()
    job.step()
    if 1 in job.modules:
        job.modules[1].register_forward_pre_hook(OnCall(3, interrupt))
    job.step()


CASES: tuple[Callable[[], None], ...] = (
    *(uneven, too_few, smaller, no_input, no_target, no_loss),
    *(after_a_failure, after_a_refusal, interrupted),
    *((five_microbatches,) if HAS_MICROBATCH_ARGUMENTS else ()),
)


def all_cases(folder: Path) -> dict[str, str]:
    """One after the other, each in a process group of its own; what this rank raised."""
    errors = {}
    for case in CASES:
        renew_group(folder / case.__name__)
        try:
            case()
        except (Exception, KeyboardInterrupt) as error:
            errors[case.__name__] = f"{type(error).__name__}: {error}"
    renew_group(folder / "end")
    return errors


def test_refusals_and_failures_of_steps(tmp_path: Path) -> None:
    first, second = run_ranks(2, all_cases, tmp_path)

    def assert_refused(name: str, *words: str) -> None:
        """By rank 0 before anything is sent, and rank 1 learns of it."""
        assert first[name].startswith("ValueError: "), first[name]
        assert all(each in first[name] for each in words), first[name]
        told = f", before step 0: {first[name]}. All ranks have skipped this step"
        assert second[name].startswith("RefusedStepError: rank 0, schedule "), second[name]
        assert told in second[name], second[name]

    assert_refused("smaller", "shapes (1, 6), but those of the first step", "had (2, 6)", "drop_last=True")
    assert_refused("no_input", "stage 0 is on this rank, and the step got no input for it")
    assert_refused("no_target", "the last stage is on this rank, and the step got no target")
    if HAS_MICROBATCH_ARGUMENTS:
        assert "6 arg_mbs but got 5" in first["five_microbatches"]
        assert first["five_microbatches"] in second["five_microbatches"]
    assert "microbatch 1 has inputs of the shapes (2, 6), but microbatch 0 has (3, 6)" in first["uneven"]
    assert "a step has 6 microbatches, but the inputs give 4" in first["too_few"]
    # Rank 1 has the last stage, and with it the target.
    for name, rows in (("uneven", 13), ("too_few", 4)):
        assert f"a target of shape ({rows}, 6) cannot be split into 6 equal microbatches" in second[name]
    for errors in (first, second):
        assert "ValueError: a training step needs a loss_fn on every rank" in errors["no_loss"]
        again = "PipelineError: a step of this schedule failed before, and its messages may still be under way ("
        assert errors["after_a_failure"].startswith(again)
        assert "4F2: ArithmeticError: too much" in errors["after_a_failure"].replace("1F2", "4F2")
        assert "Build the process group and the schedule anew" in errors["after_a_failure"]
    assert second["after_a_refusal"].startswith("PipelineError: rank 1, schedule ZBV, step ")
    assert first["after_a_refusal"].startswith("PipelineError: another rank failed first: rank 1, schedule ZBV, step ")
    assert second["interrupted"] == "KeyboardInterrupt: "
    seen = "PipelineError: another rank failed first: rank 1 was interrupted (KeyboardInterrupt), schedule ZBV, step "
    assert first["interrupted"].startswith(seen)


def alone(module: nn.Module, loss: Callable[..., Any], **like: Any) -> Any:
    """A pipeline of one rank, with two microbatches."""
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), **like)
    return zbpipe.build_pipeline_schedule("ZBH1", stage, 2, loss)


def in_parts(output: Tensor, target: Tensor) -> Any:
    loss = (output - target).square().mean()
    return loss, {"mean": loss.item()}


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (in_parts, "a tuple"),
        (lambda output, target: {"loss": output.mean()}, "a dict"),
        (lambda output, target: output.mean().item(), "a float"),
        (lambda output, target: (output - target).square().mean(1), r"a tensor of shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("shapes", ["inferred", "given"])
def test_what_is_no_loss_is_named(one_rank: None, loss: Callable[..., Any], found: str, shapes: str) -> None:
    x = torch.ones(4, 3)
    like = {"input_args": x[:2], "output_args": x[:2]} if shapes == "given" else {}
    schedule = alone(nn.Linear(3, 3), loss, **like)
    losses: list[Any] = []
    schedule.eval(x, target=x, losses=losses)  # may have any values
    assert len(losses) == 2
    with pytest.raises(zbpipe.PipelineError, match=rf"loss_fn returned {found}, but training needs .* return the loss"):
        schedule.step(x, target=x)


@pytest.mark.parametrize("target", [{"a": torch.ones(4)}, (torch.ones(4), torch.ones(4)), [1, 2, 3, 4]])
@pytest.mark.parametrize("run", ["step", "eval"])
def test_a_target_that_torch_cannot_split(one_rank: None, target: Any, run: str) -> None:
    x = torch.ones(4, 3)
    schedule = alone(nn.Linear(3, 3), lambda output, target: output.mean())
    name = type(target).__name__
    with pytest.raises(ValueError, match=rf"target of type {name} cannot be split .*step\(target_mbs=\[\.\.\.\]"):
        getattr(schedule, run)(x, target=target)
    if HAS_MICROBATCH_ARGUMENTS:
        getattr(schedule, run)(arg_mbs=[(each,) for each in x.chunk(2)], target_mbs=[target, target])
    schedule.step(x, target=x)


def test_evaluation_on_neighbouring_stages_without_i(one_rank: None) -> None:
    x = torch.ones(4, 3)
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    schedule = on_one_rank(layers, 2, "ZBVLean", checkpointing="full")
    assert not any(op.kind is zbpipe.OpKind.I for ops in schedule.schedule for op in ops)
    assert torch.equal(schedule.eval(x, target=x), nn.Sequential(*layers)(x))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_training_step_without_gradients(one_rank: None, mode: str) -> None:
    x = torch.ones(4, 3)
    schedule = alone(nn.Linear(3, 3), nn.functional.mse_loss)
    with getattr(torch, mode)(), pytest.raises(ValueError, match=rf"is called under torch\.{mode}\(\): call eval"):
        schedule.step(x, target=x)
    schedule.step(x, target=x)


def test_parameters_that_are_inference_tensors(one_rank: None) -> None:
    with torch.inference_mode():
        layer = nn.Linear(3, 3)
    x = torch.ones(4, 3)
    schedule = alone(layer, nn.functional.mse_loss)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(schedule.eval(x, target=x), layer(x))
    with pytest.raises(
        ValueError, match=r"weight of stage 0 was made under torch\.inference_mode\(\).*build the model"
    ):
        schedule.step(x, target=x)


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (KeyboardInterrupt(), " was interrupted (KeyboardInterrupt)"),
        (SystemExit("no data"), " was interrupted (SystemExit: no data)"),
        (SystemExit(0), ""),
    ],
)
def test_interruptions_of_a_job(one_rank: None, error: BaseException, note: str) -> None:
    with pytest.raises(type(error)), share_with_other_ranks():
        raise error
    assert note in pipelining.default_store().compare_set("zbpipe/first_failure", "", "nothing").decode()
    assert bool(note) == (b"nothing" not in pipelining.default_store().get("zbpipe/first_failure"))


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def warnings_of_two_steps(schedule: str, prepare: Callable[[dict[int, nn.Module], int], None]) -> list[str]:
    job = Job(schedule)
    prepare(job.modules, job.num_stages - 1)
    kept = Kept()
    logger = logging.getLogger("zbpipe.runtime.tied_weights")
    logger.addHandler(kept)
    job.step()
    job.step()
    logger.removeHandler(kept)
    return kept.messages


def fill(modules: dict[int, nn.Module], last: int, value: Tensor, trains: bool = True) -> None:
    for index, layer in ((0, 0), (last, -1)):
        if index in modules:
            weight = modules[index][layer].weight  # type: ignore[index]
            weight.requires_grad_(trains)
            with torch.no_grad():
                weight.copy_(value)


def tie(modules: dict[int, nn.Module], last: int) -> None:
    fill(modules, last, torch.arange(VOCABULARY * WIDTH).view(VOCABULARY, WIDTH) / 1000)


def tie_frozen(modules: dict[int, nn.Module], last: int) -> None:
    fill(modules, last, torch.arange(VOCABULARY * WIDTH).view(VOCABULARY, WIDTH) / 1000, trains=False)


def fill_with_ones(modules: dict[int, nn.Module], last: int) -> None:
    fill(modules, last, torch.ones(VOCABULARY, WIDTH))


def leave(modules: dict[int, nn.Module], last: int) -> None:
    pass


class Config:
    tie_word_embeddings = True


def say_tied(modules: dict[int, nn.Module], last: int) -> None:
    for module in modules.values():
        module.config = Config()  # type: ignore[assignment]


def ties() -> list[list[str]]:
    cases = [("ZBH1", tie), ("ZBH1", say_tied), ("ZBH1", leave), ("ZBH1", tie_frozen), ("ZBH1", fill_with_ones)]
    return [warnings_of_two_steps(*case) for case in [*cases, ("ZBV", tie), ("ZBV", say_tied)]]


def test_ties_across_ranks_are_told() -> None:
    first, between, last = run_ranks(3, ties)
    assert first == last
    assert between == [[]] * 7
    (tied,), (said,), *others = first
    assert tied.startswith(
        "'0.weight' of stage 0 (rank 0) and '2.weight' of stage 2 (rank 2) are equal, as tied weights are; training"
        " will not keep them equal, since each rank adds only its own gradients: use a V schedule"
    )
    assert said.startswith("the model's config says tie_word_embeddings, but the embedding of stage 0 (rank 0) and")
    assert others == [[]] * 5
