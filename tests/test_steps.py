"""What a step refuses before anything is sent, and what comes after one that failed or was refused."""

import gc
import logging
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from models import VOCABULARY, WIDTH, batch
from pipelines import as_rank, on_one_rank
from ranks import endings, run_ranks
from test_faults import MICROBATCHES, Job, explode, fail, raised_by, renew_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import distribute_tensor
from torch.profiler import ProfilerActivity, profile
from zoo.case import bare

import zbpipe
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.runtime.module_state import Buffers
from zbpipe.runtime.ranks.failures import share_with_other_ranks


def take(
    job: Job, rows: int, with_input: bool = True, with_target: bool = True, how: str = "step", **given: Any
) -> None:
    """A step on so many sequences."""
    tokens, targets = (torch.cat(each)[:rows] for each in zip(batch(MICROBATCHES), batch(MICROBATCHES, 1), strict=True))
    getattr(job.schedule, how)(
        *([tokens] if job.has_first and with_input else []),
        target=targets if job.has_last and with_target else None,
        **given,
    )


def smaller() -> None:
    job = Job("ZBH1")
    take(job, 12)
    take(job, 6)


def no_loss() -> None:
    job = Job("ZBV", None)  # type: ignore[arg-type]
    tokens, _ = batch(MICROBATCHES)
    outputs = job.schedule.eval(*([tokens] if 0 in job.modules else []))
    assert (outputs is not None) == (job.num_stages - 1 in job.modules)
    take(job, 12)


def refused_alike() -> None:
    """Ranks that all refuse a step go on with the next one."""
    job = Job("ZBH1")
    for rows, how in ((13, "step"), (12, "step"), (13, "eval"), (4, "step"), (12, "eval"), (12, "step")):
        if how == "eval" and not job.has_first:
            time.sleep(1.2)  # until its other thread has seen the refusal
        refusal = refused(job, rows, how=how)
        assert refusal.startswith("ValueError: ") == (rows != 12), refusal


def refused_alone() -> None:
    """The rank that refuses a step goes on, but not with the next one."""
    job = Job()
    take(job, 12)
    if job.has_first:
        with pytest.raises(ValueError, match="got no input"):
            take(job, 12, with_input=False)
    take(job, 12)


def after_a_failure() -> None:
    job = Job()
    with suppress(zbpipe.PipelineError):
        fail(job, explode, 1)
    job.step()


def interrupt() -> None:
    raise KeyboardInterrupt


CASES: dict[str, Callable[[], None]] = {
    "smaller": smaller,
    "no_target": lambda: take(Job(), 12, with_target=False),
    "no_loss": no_loss,
    "refused_alike": refused_alike,
    "refused_alone": refused_alone,
    "after_a_failure": after_a_failure,
    "interrupted": lambda: fail(Job(), interrupt, 1),
}


def all_cases(folder: Path) -> dict[str, str]:
    return raised_by(CASES, folder)


def test_refusals_and_failures_of_steps(tmp_path: Path) -> None:
    first, second = run_ranks(2, all_cases, tmp_path)

    def assert_refused(name: str, *words: str) -> None:
        """By rank 0 before anything is sent, and rank 1 learns of it in its messages."""
        assert first[name].startswith("ValueError: "), first[name]
        assert all(each in first[name] for each in words), first[name]
        assert second[name].startswith("PipelineError: another rank failed first: rank 0, schedule "), second[name]
        assert f", before its first action: {first[name]} (rank 1 runs this step)" in second[name], second[name]

    assert_refused("smaller", "shapes (1, 6), but the messages", "those of the first step, (2, 6)", "drop_last=True)")
    assert_refused("no_target", "the last stage is on this rank, and the step got no target")
    for errors in (first, second):
        assert "ValueError: a training step needs a loss_fn on every rank" in errors["no_loss"]
        assert "refused_alike" not in errors
        again = "PipelineError: this schedule runs no other step, because one failed ("
        assert errors["after_a_failure"].startswith(again)
        assert "4F2: ArithmeticError: too much" in errors["after_a_failure"].replace("1F2", "4F2")
        assert "Build the process group and the schedule anew" in errors["after_a_failure"]
    assert first["refused_alone"].startswith(
        f"{again}rank 0, schedule ZBV, before its first action: ValueError: stage 0 is"
    )
    assert "(rank 1 runs this step)" in first["refused_alone"]
    assert second["refused_alone"].startswith("PipelineError: another rank failed first: rank 0, schedule ZBV, before")
    assert second["interrupted"] == "KeyboardInterrupt: "
    seen = "PipelineError: another rank failed first: rank 1 was interrupted (KeyboardInterrupt), schedule ZBV, action "
    assert first["interrupted"].startswith(seen)


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, "microbatch 1 has inputs of the shapes (2, 6), but microbatch 0 has (3, 6)"),
        (1, "a target of shape (13, 6) cannot be split into 6 equal microbatches"),
    ],
)
def test_what_is_wrong_with_a_batch(rank: int, words: str) -> None:
    with as_rank(rank, 2), pytest.raises(ValueError, match=re.escape(words)):
        take(Job("ZBH1"), 13)


def test_what_else_is_wrong_with_a_batch() -> None:
    tokens, _ = batch(MICROBATCHES)
    inputs = [(each,) for each in tokens.chunk(MICROBATCHES)][:5]
    with as_rank(0, 2):
        job = Job()
        with pytest.raises(ValueError, match="a step has 6 microbatches, but the inputs give 4"):
            take(job, 4, with_target=False)
        with pytest.raises(ValueError, match="stage 0 is on this rank, and the step got no input for it"):
            take(job, 12, with_input=False)
        if pipelining.TAKES_MICROBATCHES:
            with pytest.raises(ValueError, match="6 arg_mbs but got 5"):
                job.schedule.step(arg_mbs=inputs, target_mbs=[*tokens.chunk(6)])


def refused(job: Job, rows: int, **given: Any) -> str:
    try:
        take(job, rows, **given)
    except (ValueError, zbpipe.PipelineError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_numbers_of_microbatches_that_are_refused(one_rank: None) -> None:
    """The ranks compare theirs in the interleavings and in test_modes."""
    x = torch.ones(6, 2)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    schedule = on_one_rank(layers, 6, loss=nn.functional.mse_loss)
    schedule.step(x, target=x)
    for wrong in (0, True, "3", 2.0):
        with pytest.raises(ValueError, match=f"microbatches has to be a whole number from 1 on, got {wrong!r}"):
            schedule.step(x, target=x, microbatches=wrong)
    of_table: Any = zbpipe.generate("1F1B", 1, 6)
    schedule = on_one_rank(layers[:1], 6, of_table, nn.functional.mse_loss)
    with pytest.raises(ValueError, match="for 6 microbatches, but the job has 3: make one by `zbpipe plan -p 1 -m 3"):
        schedule.step(x, target=x, microbatches=3)


def test_the_lists_of_a_size_are_made_once(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile Python looks for no garbage, which takes longer than the lists; afterwards as before."""
    schedule = on_one_rank([nn.Linear(2, 2), nn.Linear(2, 2)], 4, loss=nn.functional.mse_loss)
    made: list[tuple[str, bool]] = []
    lower = pipelining.lower

    def recorded(runtime: Any, table: zbpipe.Schedule) -> Any:
        made.append((str(table), gc.isenabled()))
        return lower(runtime, table)

    monkeypatch.setattr(pipelining, "lower", recorded)
    x = torch.ones(6, 2)
    for number in (3, None, 3, 6, 3, 6):
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


def without_torchrun(port: int) -> None:
    """As srun and mpirun start ranks: the store ends with rank 0, which fails."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    job = Job()
    job.step()
    if rank == 0:
        job.modules[0].register_forward_pre_hook(explode)
    take(job, 12)


@pytest.mark.long
def test_rank_0_has_the_store_and_fails() -> None:
    """The interleavings have refusals, too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for ending, words in zip(
        endings(2, without_torchrun, port, group_timeout=60), ("", "another rank failed first: "), strict=True
    ):
        here = rf"{words}rank 0, schedule ZBV, action \d of \d+ in step \d, 0F0: ArithmeticError: too much"
        assert re.search(f"PipelineError: {here}", ending.error or ""), ending


def schedules_that_stay(folder: Path) -> list[str]:
    """After which of these ends a schedule is still there, without a look for garbage: its group would outlive it."""
    gc.collect()
    gc.disable()
    stay = []
    for kind in ("good", "watched", "failed"):
        schedule = end(kind)
        if schedule() is not None:
            stay.append(kind)
        renew_group(folder / kind)
    return stay


def end(kind: str) -> Any:
    job = Job()
    if kind == "watched":
        collect(job.schedule, [Wanted.TIMES], list[StepRecord]().extend)
    with suppress(zbpipe.PipelineError):
        fail(job, explode if kind == "failed" else gc.isenabled, 1)
    return ref(job.schedule)


def test_no_end_keeps_a_schedule_in_a_cycle(tmp_path: Path) -> None:
    assert run_ranks(2, schedules_that_stay, tmp_path) == [[], []]


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
    in_lists = {"arg_mbs": [(each,) for each in x.chunk(2)], "target_mbs": [target, target]}
    if pipelining.TAKES_MICROBATCHES:
        getattr(schedule, run)(**in_lists)
    else:
        with pytest.raises(ValueError, match=r"^arg_mbs, target_mbs: microbatches as lists need torch 2\.14"):
            getattr(schedule, run)(**in_lists)
    schedule.step(x, target=x)


def embed(s: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A stage that embeds the tokens again, and passes them on. It writes into buffers, and replaces one."""
    *hidden, tokens = inputs
    s.norm.num_batches_tracked = s.norm.num_batches_tracked + 1
    return s.norm(sum(hidden, s.table(tokens))), tokens


def test_inference_of_shapes_takes_zeros_and_keeps_buffers(one_rank: None) -> None:
    parts = nn.ModuleList(map(bare(embed, table=lambda: nn.Embedding(5, 3), norm=lambda: nn.BatchNorm1d(3)), range(2)))
    whole = deepcopy(parts)
    schedule = on_one_rank([*parts], 2, loss=lambda outputs, target: nn.functional.mse_loss(outputs[0], target))
    tokens, target = torch.arange(4), torch.ones(4, 3)
    torch.use_deterministic_algorithms(True)  # new memory then has NaN and the largest integers
    try:
        schedule.step(tokens, target=target)
        with torch.no_grad():
            schedule.eval(tokens, target=target)
    finally:
        torch.use_deterministic_algorithms(False)
    for each in 2 * tokens.chunk(2):
        passed: tuple[Tensor, ...] = (each,)
        for part in whole:
            passed = part(*passed)
    torch.testing.assert_close(dict(parts.named_buffers()), dict(whole.named_buffers()))


def test_buffers_in_which_nobody_can_write() -> None:
    module = nn.BatchNorm1d(3)
    module.register_buffer("mask", torch.ones(1).expand(3))
    before = Buffers([module])
    module(torch.randn(4, 3))
    before.restore()
    torch.testing.assert_close(module.running_mean, torch.zeros(3))


def test_buffers_are_restored_without_collectives(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other stages may have no such buffers."""
    module, mesh = nn.BatchNorm1d(3), init_device_mesh("cpu", (1,))
    module.running_mean = distribute_tensor(torch.zeros(3), mesh)
    before = Buffers([module])
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("a collective"))
    module.running_mean.add_(1)
    before.restore()
    assert module.running_mean.to_local().tolist() == [0, 0, 0]


def test_a_profiler_sees_the_actions_and_no_other_step_pays_for_it(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = on_one_rank([nn.Linear(4, 4) for _ in range(2)], 2, loss=nn.functional.mse_loss)
    x, opened = torch.randn(2, 4), list[str]()
    record = schedules.record_function
    monkeypatch.setattr(schedules, "record_function", lambda name: opened.append(name) or record(name))
    schedule.step(x, target=x)
    assert not opened
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        schedule.step(x, target=x)
    assert {"PP:0F0", "PP:1I1", "PP:0W1"} <= {each.name for each in profiled.events()} & {*opened}


def test_evaluation_on_neighbouring_stages_without_i(one_rank: None) -> None:
    x = torch.ones(4, 3)
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    schedule = on_one_rank(layers, 2, "ZB", checkpointing="full")
    assert not any(op.kind is zbpipe.OpKind.I for ops in schedule.schedule for op in ops)
    assert torch.equal(schedule.eval(x, target=x), nn.Sequential(*layers)(x))


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
    assert note in pipelining.default_store().compare_set("zbpipe/failure/0", "", "nothing").decode()
    assert bool(note) == (b"nothing" not in pipelining.default_store().get("zbpipe/failure/0"))


class Config:
    tie_word_embeddings = True


class Ends(NamedTuple):
    """The weights of the embedding and the head."""

    schedule: str
    are_equal: bool = False
    differ: bool = True
    """Within themselves, unlike ones after an initialisation."""
    embedding_trains: bool = True
    head_trains: bool = True
    are_said_to_be_tied: bool = False

    def prepare(self, modules: dict[int, nn.Module], last: int) -> None:
        numbers = torch.arange(VOCABULARY * WIDTH) / 1000 if self.differ else torch.ones(VOCABULARY * WIDTH)
        for index, layer, trains in ((0, 0, self.embedding_trains), (last, -1, self.head_trains)):
            if index in modules and self.are_equal:
                weight = modules[index][layer].weight  # type: ignore[index]
                weight.requires_grad_(trains)
                with torch.no_grad():
                    weight.copy_(numbers.view(VOCABULARY, WIDTH))
        for module in modules.values() if self.are_said_to_be_tied else ():
            module.config = Config()  # type: ignore[assignment]


TOLD = Ends("ZBH1", True), Ends("ZBH1", True, head_trains=False), Ends("ZBH1", are_said_to_be_tied=True)
NOT_TOLD = (
    *(Ends("ZBH1"), Ends("ZBH1", True, embedding_trains=False, head_trains=False), Ends("ZBH1", True, differ=False)),
    *(Ends("ZBV", True), Ends("ZBV", are_said_to_be_tied=True)),
)


def ties() -> list[list[str]]:
    """The warnings of two steps."""
    found: list[list[str]] = []
    logging.getLogger("zbpipe.runtime.ranks.tied_weights").addFilter(
        lambda each: found[-1].append(each.getMessage()) or True
    )
    for ends in (*TOLD, *NOT_TOLD):
        found.append([])
        job = Job(ends.schedule)
        ends.prepare(job.modules, job.num_stages - 1)
        job.step()
        job.step()
    return found


def test_ties_across_ranks_are_told() -> None:
    first, between, last = run_ranks(3, ties)
    assert first == last
    assert between == [[]] * 8
    (tied,), (half,), (said,), *others = first
    assert half == tied
    assert tied.startswith(
        "'0.weight' of stage 0 (rank 0) and '1.weight' of stage 2 (rank 2) are equal, as tied weights are; training"
        " will not keep them equal, since each rank adds only its own gradients: use a V schedule"
    )
    assert said.startswith("the model's config says tie_word_embeddings, but the embedding of stage 0 (rank 0) and")
    assert others == [[]] * 5


def test_torchs_own_schedule_evaluates_between_steps_on_the_same_stages(one_rank: None) -> None:
    schedule, x = on_one_rank([nn.Linear(4, 4), nn.Linear(4, 4)], 2, loss=nn.functional.mse_loss), torch.randn(4, 4)
    stages = pipelining.stages_of(schedule)
    torchs: Any = schedules.ScheduleInterleaved1F1B(stages, 3, nn.functional.mse_loss, scale_grads=False)
    for _ in range(2):
        schedule.step(x, target=x)
        torchs.eval(torch.ones(3, 4), target=torch.ones(3, 4))
    assert stages[0].submod.weight.grad.any()
