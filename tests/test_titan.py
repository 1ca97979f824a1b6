"""zbpipe inside TorchTitan 0.2 and 0.3: real jobs on the CPU, and the pieces that they are made of."""

import inspect
import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from commands import process
from data import assert_refused, has_words, refusals
from pipelines import on_one_rank
from titan_jobs import (
    LOSS,
    STEPS,
    VALIDATED,
    Cell,
    Job,
    Titan,
    assert_trains_alike,
    assert_values,
    config_of,
    flavor,
    pipeline,
    require_titan,
    train_as_without_a_pipeline,
)
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

import zbpipe.titan
from zbpipe import Placement, cli
from zbpipe.cli.demo import command, launch
from zbpipe.cli.demo.launch import JobOutcome, train_on_cpu
from zbpipe.costs import JobCosts
from zbpipe.frameworks.installation import find_algorithm
from zbpipe.frameworks.options import Options, help_of
from zbpipe.frameworks.titan import monitor, steps, versions
from zbpipe.frameworks.titan.check import check
from zbpipe.frameworks.titan.command_line import parse
from zbpipe.runtime.measure.profiler import log_costs
from zbpipe.runtime.optimizer.step import StepCounts

IS_02 = require_titan("0.3.0", "0.2.2") == "0.2.2"
needs_02 = pytest.mark.skipif(not IS_02, reason="of torchtitan 0.2")
needs_03 = pytest.mark.skipif(IS_02, reason="of torchtitan 0.3")
SHARD = ("--parallelism.data_parallel_shard_degree", "2")
TORCHS_OPTIONS = inspect.signature(ScheduleInterleaved1F1B.__init__).parameters
RUNTIME = ("max-active-stages 1", "unshard-lookahead auto", "defer-reduce-grad-wait")
LONG, NEWEST = pytest.mark.long, pytest.mark.newest


def options(*each: str) -> tuple[str, ...]:
    return tuple(word for option in each for word in f"--zbpipe.{option}".split())


FOR_AUTO = 7
"""Steps that are enough for Auto to measure one step, and to try the plan."""
OF_THIS_TORCH = options(*(each for each in RUNTIME if each.split()[0].replace("-", "_") in TORCHS_OPTIONS))
MEASURES = options("profile-steps 1")
HOST = " MiB to the host"
LESS = "--parallelism.pipeline_parallel_{}_stage_less_layers"


def faulty(config: str) -> tuple[str, ...]:
    return "--module", "job_configs", "--config", config


AHEAD = ("--zbpipe.optimizer-step", "validated")


def per_stage(layers: int) -> tuple[str, str]:
    return "--parallelism.pipeline_parallel_layers_per_stage", str(layers)


JOBS = {
    # TorchTitan's chunked loss runs the head's backward in F.
    "the lm_head waits for W": Cell(options=options("defer-loss")),
    # ZB with one stage per rank, so that the loss of rank 0, which the job writes, comes from rank 1.
    "accumulation and validation": Cell(
        schedule="ZB",
        settings=("--training.global_batch_size", "8", *flavor().validation),  # twice the local batch
        options=per_stage(4),
        says=("gradient accumulation steps 2", r"ZB runs 1 stage per rank: \d.*% \w+ than 1F1B as simulated"),
    ),
    # ZB takes the checkpointing from the config.
    **{
        f"lean {how}": Cell(schedule="ZB", checkpointing=how, says=(f"predicted {words} checkpointing: ",))
        for how, words in (("none", "without"), ("full", "with full"))
    },
    # As many stages per rank as the user's cut has: four of each rank, embedding and head count as layers. With nothing
    # but these on the outer stages, rank 0 of a wave has much less work than rank 1.
    "ZB of four": Cell(
        schedule="ZB",
        options=per_stage(1),
        says=(
            "ZB runs 4 stages per rank in a loop: .* than 1F1B as simulated .*; 4 stages per rank in a wave:",
            "Using pipeline schedule ZBLoop with 4 microbatches and 8 stages",
        ),
    ),
    "ZB of three": Cell(
        schedule="ZB",
        options=(*per_stage(1), *(word for end in ("first", "last") for word in (LESS.format(end), "0"))),
        says=("ZB runs 3 stages per rank in a loop:", "Using pipeline schedule ZB with 4 microbatches and 6 stages"),
    ),
    "ZB": Cell(
        schedule="ZB",
        says=("ZB runs 2 stages per rank in a loop:", r"\(by work; ", "ZBLoop with 4 microbatches and 4 stages"),
    ),
    # Options of this torch reach zbpipe's schedules and torch's own, to which TorchTitan does not pass them. torch's
    # split takes no checkpointing.
    "VHalf with options": Cell(
        schedule="VHalf",
        checkpointing="none",
        options=(*OF_THIS_TORCH, *options("receives late")),
        says=("Messages: late receives, for the transport 'ideal'",),
    ),
    **{
        f"{name} with options": Cell(schedule=name, checkpointing="none", options=OF_THIS_TORCH)
        for name in ("Interleaved1F1B", "DualPipeV")
    },
    # TorchTitan's policy for gathered parameters keeps its meaning.
    "reshard always": Cell(
        settings=SHARD,
        ranks_per_stage=2,
        options=("--parallelism.fsdp_reshard_after_forward", "always"),
        says=(r"; (\d+) of \1 modules free",),
    ),
    "reshard by zbpipe": Cell(
        settings=SHARD,
        ranks_per_stage=2,
        options=options("fsdp-mode reshard"),
        says=("FSDP: each module gathers for each F and backward",),
    ),
    **{
        f"{config} {name}": Cell(schedule=name, options=faulty(config))
        for config, name in (("own_functions", "ZBV"), ("counting_tokens", "ZB"))
        if not IS_02
    },
    "Auto offloads": Cell(
        schedule="Auto", steps=FOR_AUTO, options=(*MEASURES, *options("offload activations")), says=(HOST,)
    ),
}
IN_LONG = (
    "own_functions ZBV",
    "lean none",
    "lean full",
    "ZB",
    "ZB of three",
    "DualPipeV with options",
    "Auto offloads",
)
MARKS: dict[str, Any] = dict.fromkeys((*IN_LONG, "reshard always", "reshard by zbpipe"), LONG)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in JOBS])
def test_a_job_trains_as_without_a_pipeline(titan: Titan, name: str) -> None:
    cell = JOBS[name]
    if name.endswith("with options") and not OF_THIS_TORCH:
        pytest.skip(f"torch {torch.__version__} has no such option")
    job = train_as_without_a_pipeline(titan, cell)
    if flavor().validation[0] in cell.settings:
        assert sum(VALIDATED in step for step in job.steps) == STEPS


@pytest.mark.long
@pytest.mark.parametrize("config", ["", *([] if IS_02 else ["own_functions"])])
def test_a_table_of_any_placement(titan: Titan, tmp_path: Path, config: str) -> None:
    """TorchTitan knows loops and V's alone. These stages go down, up, and down again; the last one is on rank 1."""
    placement = Placement((0, 1, 1, 0, 0, 1))
    planned = zbpipe.plan(2, 4, zbpipe.CostModel.uniform(placement), placements=[placement], budget=0.2)
    name, schedule = str(tmp_path / "wave.csv"), planned.schedule
    (tmp_path / "wave.csv").write_text(schedule.to_csv())
    job = train_as_without_a_pipeline(titan, Cell(schedule=name, options=faulty(config) if config else ()))
    assert job.log.count(f"{name} with 4 microbatches: stages on ranks 0-1-1-0-0-1") == 1  # the same on all ranks


@needs_03
@pytest.mark.long
def test_another_runtime_is_left_alone(titan: Titan) -> None:
    """Schedules of zbpipe and its options are refused: REFUSALS."""
    job = titan.train(*pipeline("1F1B"), *faulty("runtime"), num_ranks=2)
    assert job.error is None, job.log
    norms = [[step["grad_norm"] for step in each.steps] for each in (job, titan.without_pipeline())]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)  # the loss is on the other rank
    assert "job_configs.pipeline_by_runtime runs 1F1B by its own Runtime" in job.log
    assert "zbpipe/bubble(%)" not in job.steps[-1]
    assert "loss is not visible" in job.log


MODULES = [["tok_embeddings"], ["layers.0", "layers.1", "layers.2"], ["layers.3", "layers.4", "layers.5"]]


@needs_02
def test_a_toml_file_that_cuts_the_model_by_hand(titan: Titan, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    modules = json.dumps([*MODULES, ["norm", "output"]])
    config.write_text(f'[parallelism]\npipeline_parallel_schedule = "ZBV"\nmodule_fqns_per_model_part = {modules}\n')
    arguments = ("--job.config_file", str(config), "--parallelism.pipeline_parallel_degree", "2")
    job = titan.train(*arguments, "--zbpipe.check-gradients", "2", num_ranks=2)
    assert_trains_alike(job, titan.without_pipeline())
    assert "PP rank 0 is building stage_idx 0 with modules ['tok_embeddings']" in job.log
    assert "loss is not visible" not in job.log
    assert "gradients of an ordinary backward. ZBV: 8 microbatches of 2 steps on 4 stages" in job.log


@pytest.mark.long
def test_the_demo_starts(tmp_path: Path) -> None:
    (run,) = command.run_demo(2, tmp_path, {"ZBV": ("ZBV",)}).values()
    log = (tmp_path / "ZBV" / "output.log").read_text()
    print(log)
    assert run.error is None
    assert len(run.losses) == 2
    assert log.count("no accelerator found, so this trains on the CPU") == 1


def test_a_second_plug_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zbpipe.titan, "_plugged", [Options()])
    with pytest.raises(RuntimeError, match=r"zbpipe is already plugged into TorchTitan: call .*plug_in only once"):
        zbpipe.titan.plug_in()


@pytest.mark.parametrize(
    ("arguments", "timeout", "error"),
    [
        pytest.param(["--training.steps", "100000"], 3, "not finished after 3 seconds", marks=NEWEST),
        pytest.param(["--zbpipe.check-gradients", "1"], 200, "options have no effect without a pipeline", marks=LONG),
    ],
)
def test_an_error_by_torchrun(tmp_path: Path, arguments: list[str], timeout: float, error: str) -> None:
    outcome = train_on_cpu(arguments, num_ranks=1, folder=tmp_path, timeout=timeout)
    assert error in str(outcome.error)
    assert outcome.steps == ()
    assert process("pgrep", "-f", str(tmp_path), code=1).stdout == "", "no process is left"


COMPLAINT = r"RuntimeError: Loss is not finite \(global_avg_loss=nan\) at step 2. Stopping training."
HERE = r"rank 1, schedule ZBV, action \d+ of \d+ in step \d+, \dF\d: ArithmeticError: too much"
CUTS = "cuts the model's 6 layers into 2 stages, but ZBV on 2 ranks has 4: change or omit the field"
ODD = "=3 cuts the model's 6 layers into 3 stages, but ZB on 2 ranks has a multiple of 2: change or omit the field"
DIFFER = r"PipelineError: .*: rank 0: ZBV with 4 microbatches \(table \w+\); rank 1: 1F1B with 4 .*\)"
RUNTIMES = "job_configs.pipeline_by_runtime runs this model by its own Runtime"
OVERRIDES = "--zbpipe.optimizer-step validated has no effect in job_configs.OwnTrainer, which overrides train_step"
PROCESSES = "pipeline_parallel_degree=3 needs a multiple of 3 processes, and this job has 2: start"
OTHER = "PipelineError: another rank failed first: "


REFUSALS = {
    "too few stages": ((*pipeline("ZBV"), *per_stage(4)), CUTS, CUTS),
    "stages that the ranks cannot share": ((*pipeline("ZB"), *per_stage(3)), ODD, ODD),
    "a deadlock": (pipeline("deadlock.csv"), "deadlock: ", "deadlock: "),
    "different schedules": ((*pipeline("ZBV")[:2], *faulty("other_schedule")), DIFFER, DIFFER),
    "raises in a step": (
        (*pipeline("ZBV"), *faulty("raises_in_step_2")),
        f"^{OTHER}{HERE}$",
        f"^PipelineError: {HERE}$",
    ),
    "another runtime": ((*pipeline("ZBV"), *faulty("runtime")), RUNTIMES, RUNTIMES),
    "an own trainer": ((*pipeline("ZBV"), *faulty("own_trainer"), *AHEAD), OVERRIDES, OVERRIDES),
    "too few processes": (pipeline("ZBV", 3), PROCESSES, PROCESSES),
    # TorchTitan sees a loss that is not finite on the rank with the last stage.
    "step is not finite on rank 0": (
        (*pipeline("ZBV"), *faulty("nan_in_step_2")),
        f"^{COMPLAINT}$",
        f"^{OTHER}rank 0: {COMPLAINT}$",
    ),
    "step is not finite on rank 1": (
        (*pipeline("1F1B"), *faulty("nan_in_step_2")),
        f"^{OTHER}rank 1: {COMPLAINT}$",
        f"^{COMPLAINT}$",
    ),
}
OF_03: dict[str, Any] = {"stages that the ranks cannot share": LONG, "raises in a step": ()}
OF_03 |= {"another runtime": LONG, "an own trainer": LONG}
OF_03 |= {"different schedules": NEWEST, "step is not finite on rank 0": NEWEST, "step is not finite on rank 1": LONG}
BEFORE_THE_RANKS_MEET = ("a deadlock", "another runtime", "an own trainer", "too few processes")


@pytest.mark.parametrize("name", [pytest.param(name, marks=OF_03.get(name, ())) for name in REFUSALS])
def test_a_job_that_cannot_run(titan: Titan, tmp_path: Path, name: str) -> None:
    (arguments, *patterns), tables = REFUSALS[name], wrong_tables()
    if IS_02 and name in OF_03:
        pytest.skip("of torchtitan 0.3")
    for file, content in tables.items():
        (tmp_path / file).write_text(content)
    job = titan.train(*(str(tmp_path / each) if each in tables else each for each in arguments), num_ranks=2)
    assert len(job.errors) == 2
    for error, pattern in zip(job.errors, patterns, strict=True):
        assert re.search(pattern, error), job.errors
    assert job.began == ("step" in name)
    if "stages" in name or name == "a deadlock":
        assert "is building stage_idx" not in job.log
    if name in BEFORE_THE_RANKS_MEET:
        assert job.log.count("Error: ") == 2
        assert "Building" not in job.log


@pytest.mark.parametrize(("job", "words"), refusals("titan"))
def test_settings_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, words: str) -> None:
    schedule, *given = job.split()
    monkeypatch.chdir(tmp_path)
    for name, content in (wrong_tables() | wrong_costs()).items():
        (tmp_path / name).write_text(content)
    names = {each.name.replace("_", "-") for each in fields(Options)}
    found, rest = parse([f"--zbpipe.{each}" if each in names else each for each in given])
    assert not rest
    assert_refused(lambda: checked(schedule, options=found), words)


@pytest.mark.parametrize(("jobs", "words"), refusals("before the launch"))
def test_what_is_refused_or_told_before_the_launch(caplog: pytest.LogCaptureFixture, jobs: str, words: str) -> None:
    """A job, and others that fit. What "warns" is logged, not refused.

    torch's split is not for a loss in chunks. With zbpipe's schedules all ranks compile at the same time.
    """
    job, _, fits = jobs.partition(" | ")

    def check_each(jobs: str) -> None:
        for schedule, *settings in (each.split() for each in jobs.split("; ") if each):
            given: dict[str, Any] = dict(each.split("=") for each in settings)
            given |= {
                name: value == "yes" or int(value) for name, value in given.items() if re.match(r"yes|\d+$", value)
            }
            checked(schedule, **given)

    check_each(fits)
    assert not caplog.records
    if not job.startswith("warns: "):
        assert_refused(lambda: check_each(job), words)
        return
    check_each("; ".join([job.removeprefix("warns: ")] * 2))
    (record,) = caplog.records
    assert has_words(record.getMessage(), words)


def checked(
    schedule: str = "ZBV",
    ranks: int = 2,
    batch: int = 4,
    compiles: bool = False,
    seconds: int = 300,
    mode: str = "default",
    options: Options | None = None,
    csv: str | None = None,
    size: int = 1,
    chunks: int = 0,
    **given: Any,
) -> None:
    names = {"schedule": schedule, "degree": ranks, "schedule_csv": csv, "microbatch_size": size}
    config = config_of(
        parallelism={f"pipeline_parallel_{name}": value for name, value in names.items()},
        training={"local_batch_size": batch},
        compile={"enable": compiles},
        comm={"init_timeout_seconds": seconds, "mode": mode},
        loss={"num_chunks": chunks},
    )
    check(config, find_algorithm(schedule), options or Options(**given))


def test_files_are_tried_before_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--zbpipe.costs-out: cost file 'c.yaml' has to end in .toml or .json"):
        checked(costs_out="c.yaml", profile_steps=2)
    (tmp_path / "file").touch()
    in_file = str(tmp_path / "file" / "trace.json")
    with pytest.raises(ValueError, match=r"--zbpipe.trace: '.*trace.json' cannot be written: .*name another file"):
        checked(trace=in_file)
    with pytest.raises(ValueError, match=r"--zbpipe.trace: .* cannot be written: Is a directory"):
        checked(trace=str(tmp_path))
    new, old = tmp_path / "new" / "costs.json", tmp_path / "old.json"
    old.write_text("old")
    checked(costs_out=str(new), profile_steps=2, trace=str(old))
    assert new.parent.is_dir()
    assert not new.exists()
    assert old.read_text() == "old"
    # Only the first rank writes. The others may be on machines without that folder.
    monkeypatch.setenv("RANK", "1")
    checked(trace=in_file)


def test_costs_that_cannot_be_written_are_a_warning(
    one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_costs(JobCosts(zbpipe.CostModel.uniform(zbpipe.Placement.v(1))), str(tmp_path / "gone" / "costs.json"))
    assert "the measured costs cannot be written: [Errno 2] No such file" in caplog.text


def wrong_tables() -> dict[str, str]:
    right = zbpipe.generate("1F1B", 2, 4).to_csv()
    first, second = right.strip().split("\n")
    return {
        "four_ranks.csv": zbpipe.generate("ZBV", 4, 8).to_csv(),
        "eight_microbatches.csv": zbpipe.generate("ZBV", 2, 8).to_csv(),
        "no_schedule.csv": "garbage\n",
        "missing.csv": right.replace("1B3", ""),
        "deadlock.csv": "\n".join([",".join(reversed(first.split(","))), second]),
    }


def wrong_costs() -> dict[str, str]:
    stages = "[stages]\nrank_of = [0, 1]\nf = [1, 1]\ni = [1, 1]\nw = [1, 1]\nactivations = [1, 1]\n"
    layers = "".join(f'[[layers]]\nmodules = ["layers.{n}"]\nf = 1\ni = 1\nw = 1\nactivations = 1\n' for n in range(6))
    four = "[stages]\nf = [1, 1, 1, 1]\ni = [1, 1, 1, 1]\nw = [1, 1, 1, 1]\nactivations = [2e9, 2e9, 2e9, 2e9]\n"
    return {"two_stages.toml": stages, "layers.toml": layers, "four.toml": four}


def test_zbpipes_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--training.steps", "3"]) == (Options(), ["--training.steps", "3"])
    found, rest = parse(["--a", "--zbpipe.split-backward", "strict", "b", "--zbpipe.defer-loss"])
    assert (found, rest) == (Options("strict", defer_loss=True), ["--a", "b"])
    found, _ = parse([*options("max-active-stages 2", "unshard-lookahead 1,2", "max-outstanding-sends 3", RUNTIME[2])])
    expected = {"max_active_stages": 2, "unshard_lookahead": (1, 2), "max_outstanding_sends": 3}
    assert found.select_for("torch") == expected | {"defer_reduce_grad_wait": True}
    assert not found.select_for("zbpipe", "job of zbpipe")
    assert parse([*options("unshard-lookahead auto")])[0].select_for("torch") == {"unshard_lookahead": "auto"}
    assert parse([*options("check-gradients 2")])[0].check_gradients == 2
    for wrong in ("defer", "split-backward half", "max-active-stages -1", "unshard-lookahead 1,x", "check-gradients 0"):
        with pytest.raises(SystemExit):
            parse([*options(wrong)])
        assert re.split("[ ,]", wrong)[-1] in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse([*options("defer-los")])
    assert "unknown argument --zbpipe.defer-los: did you mean --zbpipe.defer-loss?" in capsys.readouterr().err


def test_each_option_has_a_sentence_in_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zbpipe.titan import train

    trainer: Any = SimpleNamespace(train=lambda: print("TorchTitan's own help"))
    monkeypatch.setitem(sys.modules, "zbpipe.frameworks.titan.plug", trainer)
    monkeypatch.setattr(zbpipe.frameworks.titan, "plug", trainer, raising=False)
    monkeypatch.setattr("zbpipe.titan.plug_in", lambda options: None)
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    train._train()
    text = " ".join(capsys.readouterr().out.split())
    assert text.endswith("TorchTitan's own help")
    for each in fields(Options):
        assert f" --zbpipe.{each.name.replace('_', '-')} " in text
        assert help_of(each, "--zbpipe.").endswith(".")
    monkeypatch.setattr(sys, "argv", ["train"])
    train._train()
    assert capsys.readouterr().out == "TorchTitan's own help\n"


@pytest.mark.newest
def test_auto_learns_and_measures_while_it_trains(titan: Titan, tmp_path: Path) -> None:
    costs, trace = tmp_path / "costs.toml", tmp_path / "trace.json"
    files = options(f"costs-out {costs}", f"trace {trace}", "trace-step 7")
    says = ("Auto: a step took", "MiB after F")
    job = train_as_without_a_pipeline(
        titan, Cell(schedule="Auto", steps=FOR_AUTO, options=(*MEASURES, *files), says=says)
    )
    measured = zbpipe.load_costs(costs)
    assert measured.placement == zbpipe.Placement.v(2)
    stages: Any = measured.costs
    assert min(*stages.f, *stages.i, *stages.w) > 0
    assert min(stages.activations) > 64 * 256 * 4
    assert not stages.gather
    assert not stages.reduce
    assert "exposed FSDP" not in job.log
    rows = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert rows == ["rank 0", "rank 0 measured", "rank 1", "rank 1 measured"]


def test_metrics_of_the_pipeline_and_measured_costs(titan: Titan, tmp_path: Path) -> None:
    """In the steps that TorchTitan logs, and of those very steps: 0.2 asks for them only when they have run."""
    costs = tmp_path / "costs.json"
    measure = ("--zbpipe.profile-steps", "1", "--zbpipe.costs-out", str(costs))
    every_second = ("--metrics.log_freq", "2", "--training.steps", "4")
    for schedule, more in (("ZBH1", measure), ("1F1B", ())):
        job = titan.train(*every_second, *pipeline(schedule), *more, num_ranks=2)
        assert job.error is None, job.log
        assert [step["step"] for step in job.steps] == [1, 2, 4]
        for step in job.steps:
            assert step[f"zbpipe/schedule/{schedule}"] == 1
            assert 0 < step["zbpipe/simulated_step(s)"] <= step["zbpipe/step(s)"] * 1.5
            assert 0 < step["zbpipe/bubble(%)"] < 100
            assert step["zbpipe/peak_activations"] == 2
            assert step.get("zbpipe/weight_gradients_in_w(%)") == (None if schedule == "1F1B" else 100)
        assert job.log.count(f"pipeline: {schedule}  step: ") == 3
    assert zbpipe.load_costs(costs).placement == zbpipe.Placement.loop(2)


@pytest.mark.long
def test_a_job_offloads_by_measured_costs(titan: Titan, tmp_path: Path) -> None:
    costs = tmp_path / "costs.toml"
    kind = (*pipeline("ZBV"), *SHARD, *versions.find_installed().checkpoint("none"))
    measure = ("--training.steps", "3", *MEASURES, *options(f"costs-out {costs}"))
    assert titan.train(*measure, *kind, num_ranks=4).error is None
    measured: Any = zbpipe.load_costs(costs).costs
    assert measured.gather
    assert measured.reduce
    offload, says = options(f"costs-file {costs}", "offload all"), (HOST, "  exposed FSDP: ")
    cell = Cell(checkpointing="none", settings=SHARD, ranks_per_stage=2, options=offload, says=says)
    train_as_without_a_pipeline(titan, cell)


VARYING = (
    *("--module", "job_configs", "--config", "varying", "--training.steps", "6"),
    *("--validator.enable", "--validator.freq", "3", "--validator.steps", "1"),
    *("--validator.dataloader.dataset", "python_stdlib"),
)


@needs_03
@pytest.mark.long
def test_steps_of_different_sizes(titan: Titan) -> None:
    """Without a pipeline TorchTitan's trainer takes what it accumulates from the loader one batch after the other."""
    job = titan.train(*VARYING, *pipeline("Auto"), num_ranks=2)
    expected = titan.without_pipeline(*VARYING, "--training.local_batch_size", "1")
    assert (job.error, expected.error) == (None, None), job.log
    counts = [sum(name in step for step in job.steps) for name in (LOSS, VALIDATED)]
    assert counts == [6, 3]  # also after the first step
    assert_values(job.steps, expected.steps)


LONGER = ("--training.steps", "4")


@pytest.mark.newest
@needs_03
def test_resuming_after_a_rank_was_killed(titan: Titan, tmp_path: Path) -> None:
    """After the second of four steps. Into another schedule: test_matrix."""
    job = (*pipeline("Auto"), *LONGER)
    killed = titan.train(*job, *faulty("killed_in_step_3"), num_ranks=2, checkpoints=tmp_path)
    assert killed.exit_codes == (1, -signal.SIGKILL), killed.log
    seen = r"rank 0, schedule Auto-ZB, action \d+ of \d+ in step \d+, .* rank 1: RuntimeError: .*by peer"
    assert re.search(seen, killed.errors[0])
    assert [step["step"] for step in killed.steps] == [1, 2]
    resumed = titan.train(*job, num_ranks=2, checkpoints=tmp_path)
    assert resumed.error is None, resumed.log
    assert "Training starts at step 3" in resumed.log
    assert_values(resumed.steps, titan.without_pipeline(*LONGER).steps[2:])


def check_lengths() -> None:
    """Ranks compare steps of other lengths, though TorchTitan gives all of them the positions of the tokens."""
    from zbpipe.frameworks.titan import plug

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    schedule: Any = on_one_rank([nn.Linear(1, 1), nn.Linear(1, 1)], 4)
    plug.complete(schedule, "ZBV", SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
    for length, number in ((8, None), (8, None), (6, 4)):
        assert schedule.sizes.find_number(None, [{"positions": torch.arange(length)}] * 4) == number
        schedule.sizes.are_set_up = True


def check_help() -> None:
    import torchtitan.train

    words = io.StringIO()
    with redirect_stdout(words), pytest.raises(SystemExit) as end:
        torchtitan.train.ConfigManager().parse_args(["--help"])
    assert end.value.code == 0
    assert "add --module and --config" in words.getvalue()


def check_cuts() -> None:
    """A model that is not cut by TorchTitan, and wrong names of modules."""
    from torchtitan.distributed import pipeline_parallel

    from zbpipe.frameworks.titan import plug

    model = nn.Module()
    model.layers = nn.ModuleDict({str(number): nn.Linear(1, 1) for number in range(6)})
    for name in ("tok_embeddings", "norm", "output"):
        setattr(model, name, nn.Linear(1, 1))
    without_norm = [*MODULES, ["output"]]

    def cut(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(), [], True, True

    def split(*args: Any, **kwargs: Any) -> Any:
        name = plug._BUILD
        titans = {"whole_model": model, "pp_mesh": None, "pp_schedule": "ZBV", "device": "cpu"}
        return getattr(pipeline_parallel, name)(**titans, module_names_per_stage=without_norm)

    left_out = "no stage has ['norm'], and TorchTitan would train the model without them: give each stage's"
    for function, modules, words in (
        (cut, None, "test_titan.check_cuts.<locals>.cut cuts into stages without asking torch for the sch"),
        (cut, [*MODULES, ["lm_head"]], "names ['lm_head'], which the model does not have: the head is 'output' in"),
        (cut, without_norm, left_out),
        (cut, [["norm"]], "ZBV"),
        (split, None, left_out),
    ):
        config = config_of(parallelism={"module_fqns_per_model_part": modules})
        of_03 = {
            "parallelism": config.parallelism,
            "training": config.training,
            "ac_config": None,
            "device": torch.device("cpu"),
        }
        given: tuple[tuple[Any, ...], dict[str, Any]] = (
            ((None, config, torch.device("cpu"), SimpleNamespace(n_layers=6)), {})
            if IS_02
            else ((), {**of_03, "model_config": SimpleNamespace(layers=[None] * 6)})
        )
        with pytest.raises(ValueError, match=re.escape(words)):
            plug.make_pipelining(function, Options())(model, *given[0], **given[1])


def check_experts() -> None:
    """On GPUs grouped experts wait for W; on the CPU TorchTitan 0.2 multiplies expert by expert."""
    from torchtitan.models.moe import moe

    from zbpipe.runtime.split.deferring_layers import defer_weights
    from zbpipe.runtime.split.weight_gradients import WeightGradients

    moe.indices_padding_wrapper = lambda function: function  # it pads by a kernel of Triton
    torch.manual_seed(0)
    plain, split = (moe.GroupedExperts(16, 32, 4, use_grouped_mm=True) for _ in range(2))
    with torch.no_grad():
        plain.init_weights(0.02)
    split.load_state_dict(plain.state_dict())
    gradients = WeightGradients()
    defer_weights(split, gradients)
    x, counts = torch.randn(24, 16, requires_grad=True), torch.tensor([8, 4, 4, 8])
    plain(x, counts).square().sum().backward()
    with gradients.record() as pending:
        split(x, counts).square().sum().backward()
    assert len(pending) == 3
    assert all(weight.grad is None for weight in split.parameters())
    for gradient in pending:
        gradient.accumulate()
    for one, other in zip(split.parameters(), plain.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 1e-2 * other.grad.norm()


def check_text() -> None:
    """The demo's text is the standard library, byte by byte, split by data-parallel rank."""
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    from zbpipe.cli.demo import python_text

    python_text.register()
    tokenizer = python_text.ByteTokenizer()
    shards = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        data = HuggingFaceTextDataset(python_text.NAME, None, tokenizer, 128, dp_rank=rank, dp_world_size=ranks)
        shards.append(next(iter(data))[0]["input"].tolist())
    whole, first, second = shards
    assert whole[0] == 256  # beginning of a document
    begin = bytes(token for token in whole if token < 256).decode()
    assert min(Path(shutil.__file__).parent.glob("*.py")).read_text().startswith(begin[:60])
    assert first == whole != second
    tokens = tokenizer.encode("λ x", add_bos=True, add_eos=True)
    assert tokens == [256, *"λ x".encode(), 257]
    assert (tokenizer.decode(tokens), tokenizer.get_vocab_size()) == ("λ x", 258)


CHECKS = (check_lengths, check_cuts, check_text, check_experts if IS_02 else check_help)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_where_zbpipe_is_plugged_in(titan: Titan, check: Callable[[], None]) -> None:
    titan.call(check)


class _Processor:
    parallel_dims = None

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def should_log(self, step: int) -> bool:
        return step == 1 or step % 4 == 0

    def log(self, step: int, max_loss: float, norm: float, extra_metrics: dict[str, Any] | None = None) -> None:
        self.logged.append({"loss": max_loss, "norm": norm, **(extra_metrics or {})})

    def log_validation(self, loss: float, step: int) -> None:
        self.logged.append({"validated": loss})


class _Pipeline:
    armed, record = True, 0

    def share(self, losses: list[float]) -> list[float]:
        return [loss + 5 for loss in losses]

    def collect(self) -> dict[str, Any]:
        return {"of": self.record}


@pytest.mark.parametrize(("to_come", "recorded"), [(1, [3, 4, 8]), (0, [4, 8])])
def test_only_steps_that_are_logged_are_told(
    monkeypatch: pytest.MonkeyPatch, to_come: int, recorded: list[int]
) -> None:
    """0.2 asks when the step has run, so the first one after a restart is recorded: nobody has asked yet."""
    kind: Any = type("Processor", (_Processor,), {})
    monkeypatch.setattr("zbpipe.frameworks.titan.monitor.dist.get_rank", lambda: 1)
    replaced, pipeline = _Pipeline(), _Pipeline()
    wrapped = []
    for each in (replaced, pipeline):
        monitor.report(each, kind, to_come)  # type: ignore[arg-type]
        wrapped.append((kind.should_log, kind.log))
    assert wrapped[0] == wrapped[1]
    processor, found = kind(), []
    for step in range(3, 10):
        is_logged = to_come == 0 and processor.should_log(step)
        if pipeline.armed:
            found.append(step)
            pipeline.record = step
        if is_logged or (to_come == 1 and processor.should_log(step)):
            processor.log(step, -1.0, 2.0)
    processor.log_validation(loss=-1.0, step=8)
    assert found == recorded
    shared = {"loss": 4, "norm": 2}
    assert processor.logged == [shared | {"of": 4}, shared | {"of": 8}, {"validated": 4}]


def fake_train(arguments: list[str], *, num_ranks: int, **unused: Any) -> JobOutcome:
    if num_ranks == 1:
        return JobOutcome((), None)
    if "ZBVZeroBubble" in arguments:
        return JobOutcome((), "RuntimeError: Trying to backward an extra time. [rank0] " + 20 * "And so on. ")
    steps = tuple(
        {
            "step": step,
            "loss_metrics/global_avg_loss": 8.0 - step,
            "grad_norm": 1.0 + ("ZB" in arguments),
            "throughput(tps)": 100.0 * step,
            "zbpipe/bubble(%)": 60.0 / step,
        }
        for step in (1, 2, 3, 4, 5)
    )
    return JobOutcome(steps, None)


def test_the_demo_reports_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "train_on_cpu", fake_train)
    result = CliRunner().invoke(cli.main, ["demo", "--steps", "5"])
    assert result.exit_code == 0, result.output
    started = re.findall(r"^(\w+) \.\.\. (.*)$", result.output, re.MULTILINE)
    ends = "loss 7.0000 to 3.0000"
    assert started == [("1F1B", ends), ("ZBVZeroBubble", "failed"), ("ZBV", ends)]
    assert re.search(r"^1F1B +torch +7.00000 +3.00000 +800 +15.0% +ok$", result.output, re.MULTILINE)
    fails = r"^ZBVZeroBubble +torch +- +- +- +- +failed: RuntimeError: Trying to backward an extra time. .*And so on\.$"
    assert re.search(fails, result.output, re.MULTILINE)

    def fail_zbv(arguments: list[str], **options: Any) -> JobOutcome:
        return JobOutcome((), "RuntimeError: no") if "ZBV" in arguments else fake_train(arguments, **options)

    monkeypatch.setattr(command, "train_on_cpu", fail_zbv)
    result = CliRunner().invoke(cli.main, ["demo", "--all"])
    assert result.exit_code == 1
    assert result.output.splitlines()[-3:] == [
        "ZBV does not train",
        "in step 1 grad_norm is 1.0 with 1F1B and 2.0 with ZB",
        "validated does not train",
    ]


def test_the_first_error_is_told(tmp_path: Path) -> None:
    signals = [(15, "SIGTERM", 6), (11, "SIGSEGV", 7)]
    lines = [f"  exitcode  : -{n}\n  traceback : Signal {n} ({name}) received by PID {pid}" for n, name, pid in signals]
    root = "Root Cause (first observed failure):"
    log = "\n".join(["torch.distributed.elastic.ChildFailedError: ", "Failures:", lines[0], root, lines[1]])
    (tmp_path / "output.log").write_text(log)
    assert launch.first_error(tmp_path) == "Signal 11 (SIGSEGV) received by PID 7"
    for rank, (time, text) in enumerate([("20", "RuntimeError: later"), ("10", "ValueError: first\n  and why")]):
        file = tmp_path / "errors" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": time}}}))
    assert launch.first_error(tmp_path) == "ValueError: first and why"


# A norm of gradients that some steps are above and some below. TorchTitan 0.2 has that of the sum over all tokens.
CLIPPING = "720" if IS_02 else "2.82"
# By default TorchTitan 0.2 cannot resume from the last checkpoint of a job.
RESUMABLE = ("--checkpoint.no_last_save_model_only",) if IS_02 else ()


def counts_of(job: Job) -> dict[str, int]:
    found = set(re.findall(r"Optimizer steps: (.*)", job.log))
    assert len(found) == 1, job.log
    return {way: int(number) for number, way in (each.split() for each in found.pop().strip().split(", "))}


@pytest.mark.long
@pytest.mark.versions
def test_checkpoints_hold_validated_steps(titan: Titan, tmp_path: Path) -> None:
    kind = (*pipeline("ZBV"), "--lr_scheduler.warmup_steps", "2", "--training.max_norm", CLIPPING, *RESUMABLE)

    def in_two_parts(name: str, *more: str) -> list[Job]:
        parts = [("--training.steps", steps, "--metrics.log_freq", often) for steps, often in (("6", "6"), ("8", "1"))]
        return [titan.train(*kind, *more, *part, num_ranks=2, checkpoints=tmp_path / name) for part in parts]

    first, resumed = in_two_parts("ahead", *AHEAD)
    for job, usual in zip((first, resumed), in_two_parts("usual"), strict=True):
        assert (usual.error, job.error) == (None, None), job.log
        for name in (LOSS, "grad_norm"):
            found = [step[name] for step in job.steps]
            assert len(found) == 2  # TorchTitan logs the first step, too
            assert found == [step[name] for step in usual.steps], "bit-identical"
    counts = counts_of(first)
    assert counts.keys() == {"synchronous", "validated", "repeated"}
    assert sum(counts.values()) == 6
    assert first.steps[-1]["zbpipe/optimizer_steps/repeated"] == counts["repeated"]


class Part:
    def __init__(self, done: list[Any]) -> None:
        self.done, self.optimizers = done, ["optimizer"]

    def step(self) -> None:
        self.done.append("stepped")

    def zero_grad(self) -> None:
        self.done.append("zero")


@pytest.mark.parametrize("has_engine", [False, True])
def test_no_checkpoint_comes_before_the_validation(monkeypatch: pytest.MonkeyPatch, has_engine: bool) -> None:
    """Each is saved of a finished step: the last one, too, whose number the interval does not divide. TorchTitan's main
    branch has parts of the trainer in an engine since September 2026."""
    done: list[Any] = []

    class Trainer:
        def __init__(self) -> None:
            due = lambda step, last_step: last_step or step % 2 == 0  # noqa: E731
            save = lambda step, last_step: done.append(step)  # noqa: E731
            self.checkpointer = SimpleNamespace(enable=True, _should_save=due, save=save)
            self.checkpointer.maybe_wait_for_staging = lambda: None
            self.metrics_processor = SimpleNamespace(should_log=lambda step: step == 1)
            self.parts: Any = self
            if has_engine:
                self.parts = self.engine = SimpleNamespace()
            self.parts.pp_schedule, self.parts.optimizers, self.parts.lr_schedulers = "ZBV", Part(done), Part(done)
            self.parts.step = 0

        def train(self) -> None:
            for self.parts.step in (1, 2, 3):
                self.train_step(None)
                self.checkpointer.save(self.parts.step, last_step=self.parts.step == 3)

        def train_step(self, data_iterator: Any) -> None:
            self.parts.optimizers.zero_grad()
            done.append(float(utils.clip_grad_norm_("parameters")))
            self.parts.optimizers.step()
            self.parts.lr_schedulers.step()

    class Step:
        counts = StepCounts()

        def __init__(self, *parts: Any, max_norm: float, lr_schedulers: Any, clip: Any, step: Any) -> None:
            assert (parts, max_norm, type(lr_schedulers)) == (("ZBV", ["optimizer"]), 1.0, Part)
            self.clip, self.step = clip, step

        def __call__(self, *, now: bool) -> float:
            self.step()
            return float(self.clip()) + now

        def finish(self) -> None:
            done.append("finished")

    utils = SimpleNamespace(clip_grad_norm_=lambda parameters: torch.tensor(2.0))
    monkeypatch.setattr(steps, "OptimizerStep", Step)
    steps.validate_steps(Trainer, utils, lambda trainer: 1.0)
    Trainer().train()
    both = ["stepped"] * 2
    assert done == [*both, 3.0, 1, *both, 2.0, "finished", 2, *both, 2.0, "finished", 3, "finished"]
