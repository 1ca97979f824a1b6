"""zbpipe in torchtitan 0.2.2: `make test-titan02` runs this in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import compatibility
import pytest
from cells import COMPILING, Cell, Flavor, matrix, row, train_as_without_a_pipeline
from compatibility import Row, Section
from ranks import run_ranks
from titan_jobs import DEEPSEEK, SHORT, Job, Titan, assert_trains_alike, pipeline, require_titan, start_from

import zbpipe
from zbpipe import Placement
from zbpipe.demo import comparison
from zbpipe.demo.launch import demo_arguments
from zbpipe.runtime.options import Options
from zbpipe.titan.versions import installed

require_titan("0.2.2")
pytestmark = pytest.mark.timeout(900)

# A pipeline's gradients are those of the sum over all tokens. They are clipped to the same norm with and without one.
CLIPPED = ("--training.max_norm", "0.1")
BY_OP = ("--activation_checkpoint.selective_ac_option", "op")
FLAVOR = Flavor({"selective": "selective", "full": "full"}, (*CLIPPED, *BY_OP), sums=True)

MATRIX = matrix(["ZBV"])
_SHARDED = ("--parallelism.data_parallel_shard_degree", "2")
_HYBRID = ("--parallelism.data_parallel_replicate_degree", "2", *_SHARDED)
_TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree", "2")
_EVERY_SECOND_BLOCK = ("--activation_checkpoint.selective_ac_option", "2")
_VALIDATION = (
    *("--validation.enable", "--validation.freq", "1", "--validation.steps", "1"),
    *("--validation.dataset", "python_stdlib", "--validation.local_batch_size", "4", "--validation.seq_len", "64"),
)
_BF16_EXPERTS = {"losses": 1e-4, "norms": 1e-3}
COMBINATIONS = {
    **{
        name: Cell(name, name, checkpointing="full")
        for name in ("ZBH1", "ZBH2", "ZB1P", "ZB2P", "VHalf", "VMin", "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
    },
    **{
        name: Cell(f"torch's {name}, no checkpointing", name, checkpointing="none")
        for name in ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
    },
    **{f"{name} p=4": Cell(name, name, pipeline_ranks=4) for name in ("ZBV", "ZBH1", "VHalf")},
    "every second block": Cell(
        "ZBV, every second block checkpointed, which is TorchTitan's default", settings=_EVERY_SECOND_BLOCK
    ),
    "dp_shard": Cell("ZBV, FSDP2 (`fully_shard`)", settings=_SHARDED, ranks_per_stage=2),
    "dp_shard compiled": Cell("ZBV, FSDP2, torch.compile", settings=_SHARDED, ranks_per_stage=2, compiled=True),
    "hsdp": Cell("ZBV, FSDP2, sharded and replicated (HSDP)", settings=_HYBRID, ranks_per_stage=4),
    "tp": Cell("ZBV, tensor parallelism", settings=_TENSOR_PARALLEL, ranks_per_stage=2),
    # On the CPU TorchTitan multiplies expert by expert. The first of four stages has none.
    "moe": Cell(
        "ZBV, mixture of experts (DeepSeek V3)",
        model=DEEPSEEK,
        tolerances=_BF16_EXPERTS,
        stages_that_compute_in_i=4,
    ),
    "validation": Cell("ZBV, TorchTitan's validation after each step", settings=_VALIDATION),
}
EXPERTS_ONE_BY_ONE = (
    " (loss within 1e-4, norm within 1e-3); the weight gradients of experts that are multiplied one by one, as on the"
    " CPU, are computed in I, which the log says once a stage"
)
CELLS = MATRIX | COMBINATIONS
seen: dict[str, str] = {}
"""What became of each cell and each refusal, in words for the page."""


@pytest.mark.parametrize("name", CELLS)
def test_trains_as_without_a_pipeline(titan: Titan, name: str) -> None:
    train_as_without_a_pipeline(titan, CELLS[name], FLAVOR)
    seen[name] = f"works{EXPERTS_ONE_BY_ONE * (name == 'moe')}"


def replicated_by_ddp(titan: Titan) -> str:
    settings = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
    job = titan.train(*pipeline("ZBV"), *settings, num_ranks=4)
    assert "DDP has not supported > 1D parallelism" in job.errors[0]
    return f"refused by TorchTitan: {job.errors[0]}"


def torch_compiled(titan: Titan) -> str:
    job = titan.train(*pipeline("ZBVZeroBubble"), "--compile.enable", num_ranks=2)
    assert len(job.errors) == 2
    assert not job.began
    assert all("not supported with stage modules that have used torch.compile" in error for error in job.errors)
    return f"refused by torch: {job.errors[0].removeprefix('RuntimeError: ')}"


def torch_selective(titan: Titan) -> str:
    job = titan.train(*pipeline("ZBVZeroBubble"), *BY_OP, num_ranks=2)
    assert job.began
    assert "Trying to backward an extra time" in job.errors[0]
    return f"fails in torch, in the first step: {job.errors[0].partition('. ')[0]}"


REFUSALS = {
    "dp_replicate": ("ZBV, replicated data parallelism by DDP", "4 ranks", replicated_by_ddp),
    "torch compiled": ("torch's ZBVZeroBubble, torch.compile", "TorchTitan, 2 ranks", torch_compiled),
    "torch selective": ("torch's ZBVZeroBubble, selective checkpointing", "TorchTitan, 2 ranks", torch_selective),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_does_not_train(titan: Titan, name: str) -> None:
    seen[name] = REFUSALS[name][2](titan)


def test_the_page_says_what_was_seen(request: pytest.FixtureRequest) -> None:
    everything = CELLS.keys() | REFUSALS.keys()
    compatibility.compare_when_all_ran(request, "name", everything, seen.keys(), section)


def section() -> Section:
    """This target's part of docs/compatibility.md, as it should be."""
    outcomes = {
        (cell.schedule, cell.checkpointing, COMPILING[cell.compiled]): seen[name] for name, cell in MATRIX.items()
    }
    return Section(
        compatibility.target("torchtitan"),
        f"Tested with {compatibility.seen_with('torch', 'torchtitan')} by tests/test_titan02.py. CI runs it with torch"
        " 2.13 by `make test-titan02`; `make test-titan02 WRITE=--write-compatibility` writes this section. In"
        " torchtitan 0.2.2 every pipeline, torch's 1F1B as well, has the gradients of the sum of the loss over all"
        " tokens of a step, not of its mean. So the tests divide the norms by the number of tokens before they compare"
        " them, and all jobs clip to the same norm. Selective checkpointing is by op. Rows with nothing but a schedule"
        " on 2 ranks have full checkpointing, all others selective checkpointing, unless they say so. Not tried:"
        " context parallelism, expert parallelism, float8. Tensor parallelism with torch.compile fails in TorchTitan"
        " without a pipeline, too (torch 2.13, CPU).",
        compatibility.TITAN,
        [
            compatibility.by_checkpointing(
                "Schedule, activation checkpointing, torch.compile",
                'Llama 3. "Compiled" means TorchTitan\'s `--compile.enable`: every block, by Inductor, and the loss.',
                outcomes,
                ["ZBV"],
            ),
            compatibility.features(
                "More features",
                '"Ranks" are processes.',
                [row(cell, seen[name]) for name, cell in COMBINATIONS.items()],
            ),
            compatibility.features(
                "What does not work",
                "",
                [Row(feature, how, seen[name]) for name, (feature, how, _) in REFUSALS.items()],
            ),
        ],
    )


def table(file: Path, schedule: zbpipe.Schedule) -> str:
    file.write_text(schedule.to_csv())
    return str(file)


def wave(num_stages: int) -> zbpipe.Schedule:
    """A table for 2 ranks and 4 microbatches whose stages go down, up, and down again."""
    rank_of = tuple((0, 1, 1, 0)[stage % 4] for stage in range(num_stages))
    placement = Placement(rank_of)
    return zbpipe.plan(2, 4, zbpipe.CostModel.uniform(placement), placements=[placement], budget=0.2).schedule


def trains_like_torchs(titan: Titan, job: Job, expected: Job | None = None) -> None:
    """As TorchTitan's own job without a pipeline, which has the mean of the loss where a pipeline has the sum."""
    expected = expected or titan.without_pipeline(*CLIPPED)
    print(job.log)
    assert_trains_alike(job, expected, norm_scale=256)


@pytest.mark.parametrize("num_stages", [4, 6])
def test_a_table_of_any_placement(titan: Titan, tmp_path: Path, num_stages: int) -> None:
    """TorchTitan knows loops and V's alone; with 6 stages the last one is on rank 1."""
    schedule = wave(num_stages)
    name = table(tmp_path / "wave.csv", schedule)
    job = titan.train(*CLIPPED, *pipeline(name), num_ranks=2)
    trains_like_torchs(titan, job)
    for stage, rank in enumerate(schedule.placement.rank_of):
        assert f"PP rank {rank} is building stage_idx {stage} with modules" in job.log
    assert job.log.count("is building stage_idx") == num_stages
    assert f"Using zbpipe's pipeline schedule {name} with 4 microbatches" in job.log


def test_torchs_own_gradients_are_of_the_sum_too(titan: Titan) -> None:
    """So that zbpipe's schedules change nothing but the schedule."""
    ours, torchs = (titan.train(*pipeline(name), num_ranks=2) for name in ("ZBV", "1F1B"))
    for one, other in zip(ours.steps, torchs.steps, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert one["grad_norm"] > 300


FOR_AUTO = ("--training.steps", "7")
"""Enough for Auto to measure one step, and to try the plan."""


def test_auto_learns_and_measures_while_it_trains(titan: Titan, tmp_path: Path) -> None:
    costs, trace = tmp_path / "costs.toml", tmp_path / "trace.json"
    files = ("--zbpipe.costs-out", str(costs), "--zbpipe.trace", str(trace), "--zbpipe.trace-step", "7")
    measure = (*pipeline("Auto"), "--zbpipe.profile-steps", "1", *files)
    job = titan.train(*CLIPPED, *FOR_AUTO, *measure, num_ranks=2)
    expected = titan.without_pipeline(*CLIPPED, *FOR_AUTO)
    assert (job.error, expected.error) == (None, None), job.log
    assert len(job.losses) == 7
    assert job.losses == pytest.approx(expected.losses, rel=1e-5)
    assert "Auto: a step took" in job.log
    assert "Auto: in turn, the plan takes" in job.log or "Auto: stays with ZBVLean" in job.log
    assert zbpipe.load_costs(costs).placement == Placement.v(2)
    rows = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert rows == ["rank 0", "rank 0 measured", "rank 1", "rank 1 measured"]


def test_metrics_of_the_pipeline_and_measured_costs(titan: Titan, tmp_path: Path) -> None:
    """In the steps that TorchTitan logs, and of those very steps: it asks for them only when they have run."""
    costs = tmp_path / "costs.json"
    measure = ("--zbpipe.profile-steps", "1", "--zbpipe.costs-out", str(costs))
    every_third = ("--metrics.log_freq", "3", "--training.steps", "6")
    for schedule, more in (("ZBH1", measure), ("1F1B", ())):
        job = titan.train(*every_third, *pipeline(schedule), *more, num_ranks=2)
        assert job.error is None, job.log
        assert [step["step"] for step in job.steps] == [1, 3, 6]
        for step in job.steps:
            assert step[f"zbpipe/schedule/{schedule}"] == 1
            assert 0 < step["zbpipe/simulated_step(s)"] <= step["zbpipe/step(s)"] * 1.5
            assert 0 < step["zbpipe/bubble(%)"] < 100
            assert step["zbpipe/peak_activations"] == 2
        assert job.log.count(f"pipeline: {schedule}  step: ") == 3
    assert zbpipe.load_costs(costs).placement == Placement.loop(2)


def looked_at() -> list[list[int]]:
    """Of the steps 3 to 9 of a resumed job that logs every fourth: those recorded, and those whose record is told."""
    from zbpipe.titan import monitor

    recorded, told = [], []

    class Processor:
        def should_log(self, step: int) -> bool:
            return step == 1 or step % 4 == 0

        def log(self, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
            told.append((extra_metrics or {})["of"])

    class Pipeline:
        armed, record = True, None

        def collect(self) -> dict[str, Any]:
            return {"of": self.record}

    pipeline: Any = Pipeline()
    monitor.report(pipeline, Processor, lambda dims: -1, to_come=1)
    processor: Any = Processor()
    processor.parallel_dims = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbpipe.titan.monitor.dist.get_rank", lambda: 0)
        for step in range(3, 10):
            if pipeline.armed:
                recorded.append(step)
                pipeline.record = step
            if processor.should_log(step):
                processor.log(step)
    return [recorded, told]


def test_only_steps_that_are_logged_are_told() -> None:
    """The first one after a restart is looked at in any case: nobody has asked by then."""
    assert looked_at() == [[3, 4, 8], [4, 8]]


def test_the_gradients_are_checked(titan: Titan) -> None:
    job = titan.train(*pipeline("ZBV"), "--zbpipe.check-gradients", "2", num_ranks=2)
    assert job.error is None, job.log
    told = "the split gives the gradients of an ordinary backward. ZBV: 8 microbatches of 2 steps on 4 stages"
    assert told in job.log


@pytest.mark.parametrize("schedule", ["VHalf", "Interleaved1F1B", "DualPipeV"])
def test_options_of_torchs_schedules(titan: Titan, schedule: str) -> None:
    """They reach zbpipe's schedules and torch's own, to which TorchTitan does not pass them."""
    job = titan.train(
        *(*CLIPPED, "--activation_checkpoint.mode", "none", *pipeline(schedule)),
        *("--zbpipe.max-active-stages", "1"),
        num_ranks=2,
    )
    if "max_active_stages" not in zbpipe.runtime._torch.SCHEDULE_OPTIONS:
        assert "has no option 'max_active_stages'" in (job.error or "")
        return
    trains_like_torchs(titan, job)
    assert f"Using {'zbpipe' if schedule == 'VHalf' else 'torch'}'s pipeline schedule {schedule} with" in job.log


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (pipeline("ZBVV"), "unknown schedule 'ZBVV'; did you mean 'ZBV'?"),
        (
            [*pipeline("ZBV"), "--parallelism.pipeline_parallel_schedule_csv", "a.csv"],
            "pipeline_parallel_schedule_csv='a.csv' and the schedule ZBV exclude each other",
        ),
        (pipeline("four_ranks.csv"), "four_ranks.csv is a table for 4 ranks, but the job has 2"),
        (
            [*pipeline("ZBV"), "--parallelism.pipeline_parallel_microbatch_size", "3"],
            "training.local_batch_size=4 is not a multiple of parallelism.pipeline_parallel_microbatch_size=3",
        ),
        (
            [*pipeline("ZBV"), "--parallelism.pipeline_parallel_layers_per_stage", "4"],
            "cuts the model's 6 layers into 2 stages, but ZBV on 2 ranks has 4: leave the field out",
        ),
    ],
)
def test_settings_that_cannot_run(titan: Titan, tmp_path: Path, arguments: Sequence[str], error: str) -> None:
    four = table(tmp_path / "four_ranks.csv", zbpipe.generate("ZBV", 4, 8))
    job = titan.train(*(four if each == "four_ranks.csv" else each for each in arguments), num_ranks=2)
    assert len(job.errors) == 2
    assert all(error in each for each in job.errors), job.errors
    assert not job.began
    assert "is building stage_idx" not in job.log
    if "layers_per_stage" not in arguments[-2]:  # the model has to be there to count its layers
        assert "Starting job" not in job.log


MODULES = '[["tok_embeddings"], ["layers.0", "layers.1", "layers.2"], ["layers.3", "layers.4", "layers.5"], ["norm"{}]]'


@pytest.mark.parametrize("head", ["output", "lm_head"])
def test_a_toml_file_that_cuts_the_model_by_hand(titan: Titan, tmp_path: Path, head: str) -> None:
    """TorchTitan would leave out a module that no stage names."""
    config = tmp_path / "job.toml"
    modules = MODULES.format(f', "{head}"')
    config.write_text(f'[parallelism]\npipeline_parallel_schedule = "ZBV"\nmodule_fqns_per_model_part = {modules}\n')
    arguments = ("--job.config_file", str(config), "--parallelism.pipeline_parallel_degree", "2")
    job = titan.train(*CLIPPED, *arguments, num_ranks=2)
    if head == "output":
        trains_like_torchs(titan, job)
        assert "PP rank 0 is building stage_idx 0 with modules ['tok_embeddings']" in job.log
        assert "loss is not visible" not in job.log
    else:
        assert "names ['lm_head'], which the model does not have, and leaves out ['output']" in job.errors[0]


def test_the_demo_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comparison, "SCHEDULES", ("ZBV",))

    class Silent:
        def started(self, what: str, steps: int) -> None: ...
        def stepped(self, step: int, loss: float) -> None: ...
        def ended(self, failed: bool) -> None: ...

    (run,) = comparison.run_demo(2, Silent(), tmp_path, rounds=1)
    log = (tmp_path / "ZBV" / "output.log").read_text()
    print(log)
    assert (run.status, run.error) == ("ok", None)
    assert len(run.losses) == 2
    assert log.count("no accelerator found, so this trains on the CPU") == 1


OTHER_PROGRAM = """
import sys

import zbpipe.titan
from zbpipe.titan.command_line import parse

options, arguments = parse(sys.argv[1:])
zbpipe.titan.plug_in(options)
from torchtitan.config.manager import ConfigManager  # as it was before zbpipe came
from torchtitan.train import Trainer

trainer = Trainer(ConfigManager().parse_args(arguments))
trainer.train()
trainer.close()
try:
    zbpipe.titan.plug_in()
except RuntimeError as error:
    print(error)
"""


def test_a_program_that_starts_the_trainer_itself(titan: Titan, tmp_path: Path) -> None:
    """As AMD's Primus does."""
    program = tmp_path / "program.py"
    program.write_text(OTHER_PROGRAM)
    arguments = [
        *demo_arguments(tmp_path, "llama3_python_stdlib"),
        *(*SHORT, *start_from(titan.seed()), *pipeline("ZBV"), "--zbpipe.trace", str(tmp_path / "trace.json")),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(program), *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "zbpipe is plugged into TorchTitan already" in done.stdout
    assert (tmp_path / "trace.json").exists()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["zbpipe/schedule/ZBV"] for step in steps] == [1, 1, 1]


def ranks_with_loss(wave_table: str) -> tuple[dict[str, int], dict[str, bool]]:
    import torchtitan.train
    from torchtitan.components import metrics
    from torchtitan.tools.utils import NoColor

    from zbpipe.titan import _titan02

    dims: Any = SimpleNamespace(pp_enabled=True, world_size=8, pp=4)
    names = ("ZBV", "zbvzerobubble", "DualPipeV", "1F1B", "Interleaved1F1B", "PipelineScheduleMulti", wave_table)
    two: Any = SimpleNamespace(pp_enabled=True, world_size=2, pp=2)
    found = {name: _titan02.rank_with_loss(two if name == wave_table else dims, name) for name in names}
    warned = {}
    for name in ("ZBV", "1F1B"):
        told: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(metrics.logger, "warning", told.append)
            config = SimpleNamespace(parallelism=SimpleNamespace(pipeline_parallel_schedule=name))
            torchtitan.train.ensure_pp_loss_visible(dims, config, NoColor())
        warned[name] = bool(told)
    return found, warned


def test_loss_and_metrics_come_from_the_rank_with_the_last_stage(in_a_process: InAProcess) -> None:
    found, warned = in_a_process.ranks_with_loss
    assert [found[each] for each in ("ZBV", "zbvzerobubble", "DualPipeV")] == [0, 0, 0]
    assert [found[each] for each in ("1F1B", "Interleaved1F1B", "PipelineScheduleMulti")] == [6, 6, 6]
    assert found[in_a_process.wave] == 1
    assert warned == {"ZBV": False, "1F1B": True}


def refusals_of_a_model() -> list[str]:
    """What is said when a trainer that did not ask before has a model cut."""
    from torch import nn
    from torchtitan.config import JobConfig

    from zbpipe.titan import _titan02

    model = nn.Module()
    model.layers = nn.ModuleDict({str(number): nn.Linear(1, 1) for number in range(6)})
    for name in ("tok_embeddings", "norm", "output"):
        setattr(model, name, nn.Linear(1, 1))

    def cut(*args: Any) -> Any:
        return SimpleNamespace(), [], True, True

    said = []
    for tables in ("", "a.csv"):
        config = JobConfig()
        config.parallelism.pipeline_parallel_degree = 2
        config.parallelism.pipeline_parallel_schedule = "ZBV"
        config.parallelism.pipeline_parallel_schedule_csv = tables
        with pytest.raises(ValueError, match="ZBV") as refused:
            _titan02.pipeline_with(cut, Options())(
                model, SimpleNamespace(pp=2), config, "cpu", SimpleNamespace(n_layers=6)
            )
        said.append(str(refused.value))
    return said


def test_a_model_that_is_not_cut(in_a_process: InAProcess) -> None:
    cuts_itself, exclusive = in_a_process.refusals_of_a_model
    assert "cuts into stages, and not TorchTitan's own pipeline_llm: use one of torch's schedules" in cuts_itself
    assert "this model, which test_titan02.refusals_of_a_model.<locals>.cut cuts into stages" in cuts_itself
    assert "pipeline_parallel_schedule_csv='a.csv' and the schedule ZBV exclude each other" in exclusive


def experts() -> float:
    """The largest relative error of an expert's weight gradient, of those that W computes."""
    import torch
    from torchtitan.models.moe import moe

    from zbpipe.runtime.split.layers import defer_weights
    from zbpipe.runtime.split.products import WeightGradients

    moe.indices_padding_wrapper = lambda function: function  # it pads by a kernel of Triton
    torch.manual_seed(0)
    plain, split = (moe.GroupedExperts(16, 32, 4, use_grouped_mm=True) for _ in range(2))
    with torch.no_grad():
        plain.init_weights(0.02)
    split.load_state_dict(plain.state_dict())
    gradients = WeightGradients()
    defer_weights(split, gradients)
    x, counts = torch.randn(24, 16), torch.tensor([8, 4, 4, 8])
    plain(x.clone().requires_grad_(), counts).square().sum().backward()
    with gradients.record() as pending:
        split(x.clone().requires_grad_(), counts).square().sum().backward()
    assert len(pending) == 3
    assert all(weight.grad is None for weight in split.parameters())
    for gradient in pending:
        gradient.accumulate()
    errors = [
        (one.grad - other.grad).norm() / other.grad.norm()  # type: ignore[operator, union-attr]
        for one, other in zip(split.parameters(), plain.parameters(), strict=True)
    ]
    return max(map(float, errors))


def test_grouped_experts_wait_for_w(in_a_process: InAProcess) -> None:
    """As on GPUs; on the CPU TorchTitan multiplies expert by expert."""
    assert in_a_process.experts < 1e-2


class InAProcess(NamedTuple):
    """What was seen in a process that zbpipe is plugged into; importing TorchTitan takes seconds."""

    wave: str
    """A table whose last stage is on rank 1 of 2."""
    ranks_with_loss: tuple[dict[str, int], dict[str, bool]]
    refusals_of_a_model: list[str]
    experts: float


def look(wave_table: str) -> InAProcess:
    from zbpipe.titan import cpu

    cpu.stand_in()
    from zbpipe.titan import _titan02

    _titan02.plug_in(Options(), on_cpu=True)
    return InAProcess(wave_table, ranks_with_loss(wave_table), refusals_of_a_model(), experts())


@pytest.fixture(scope="module")
def in_a_process(tmp_path_factory: pytest.TempPathFactory) -> InAProcess:
    (seen_there,) = run_ranks(1, look, table(tmp_path_factory.mktemp("wave") / "wave.csv", wave(6)))
    return seen_there


def test_lean_schedules_take_the_checkpointing_from_the_config(titan: Titan) -> None:
    job = titan.train(*pipeline("ZBVLean"), *installed().checkpoint("full"), num_ranks=2)
    assert_trains_alike(job, titan.without_pipeline(), norm_scale=job.steps[0]["n_tokens_seen"])
    assert "ZBVLean is made for full activation checkpointing" in job.log
