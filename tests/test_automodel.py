"""NeMo AutoModel's own pipelines with zbpipe installed: gradients and losses of the model without a pipeline.

`make test-automodel` runs this in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from automodel_jobs import MICROBATCHES, Gradients, Run, Training, train_all, without_a_pipeline
from compatibility import Section, Table, compare, seen_with, target
from ranks import fork_from, run_ranks

import zbpipe
from zbpipe.frameworks.installation import uninstall

pytest.importorskip("nemo_automodel")
yaml = pytest.importorskip("yaml")

fork_from("nemo_automodel._transformers.infrastructure", "nemo_automodel.components.models.qwen3_moe.model")

# Both add the same float32 numbers in another order.
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}


class Cell(NamedTuple):
    """One training, and what AutoModel makes of its schedule."""

    training: Training
    runs: str
    """The class of the schedule."""
    first_rank: tuple[int, ...]
    """The stages of the first rank."""


V, V_OF_FOUR, ONE = (0, 3), (0, 7), (0,)
ON_TWO = {
    "ZBV": Cell(Training("ZBV"), "ScheduleZBV", V),
    "ZBV, mean of microbatches": Cell(Training("ZBV", in_mean=True), "ScheduleZBV", V),
    "VHalf": Cell(Training("vhalf"), "ScheduleVHalf", V),
    "VMin": Cell(Training("VMin"), "ScheduleVMin", V),
    "ZBH1": Cell(Training("ZBH1"), "ScheduleZBH1", ONE),
    "Auto": Cell(Training("Auto"), "AutoSchedule", V),
    # As many stages as the layers allow: 4 of 8 layers in a wave, one of 3 layers.
    "ZB": Cell(Training("ZB"), "ScheduleZB", (0, 3, 4, 7)),
    "ZB, 3 layers": Cell(Training("ZB", layers=3), "ScheduleZB", ONE),
    "plan.csv": Cell(Training("plan.csv"), "ScheduleFromFile", V),
    "wave.csv": Cell(Training("wave.csv"), "ScheduleFromFile", (0, 3, 4, 7)),
    "1F1B": Cell(Training("1f1b"), "Schedule1F1B", ONE),
    "Interleaved1F1B": Cell(Training("Interleaved1F1B"), "ScheduleInterleaved1F1B", (0, 2)),
    # As the recipes do, which tell AutoModel the length of each batch; all others have torch find it out.
    "ZBV, lengths that change": Cell(Training("ZBV", lengths=(12, 20, 8), says_lengths=True), "ScheduleZBV", V),
    "ZBH1, lengths that change": Cell(Training("ZBH1", lengths=(12, 20, 8), says_lengths=True), "ScheduleZBH1", ONE),
    "1F1B, lengths that change": Cell(Training("1f1b", lengths=(12, 20, 8), says_lengths=True), "Schedule1F1B", ONE),
}
ON_FOUR = {
    "ZBV, p=4": Cell(Training("ZBV", pipeline=4), "ScheduleZBV", V_OF_FOUR),
    "ZBH1, p=4": Cell(Training("ZBH1", pipeline=4), "ScheduleZBH1", ONE),
    "Auto, p=4": Cell(Training("Auto", pipeline=4), "AutoSchedule", V_OF_FOUR),
    "wave.csv, p=4": Cell(Training("wave.csv", pipeline=4, layers=16), "ScheduleFromFile", (0, 7, 8, 15)),
    "ZBV, FSDP2": Cell(Training("ZBV", "FSDP2"), "ScheduleZBV", V),
    "VHalf, FSDP2": Cell(Training("VHalf", "FSDP2"), "ScheduleVHalf", V),
    "ZBH1, FSDP2": Cell(Training("ZBH1", "FSDP2"), "ScheduleZBH1", ONE),
    "Auto, FSDP2": Cell(Training("Auto", "FSDP2"), "AutoSchedule", V),
    "wave.csv, FSDP2": Cell(Training("wave.csv", "FSDP2"), "ScheduleFromFile", (0, 3, 4, 7)),
    "1F1B, FSDP2": Cell(Training("1f1b", "FSDP2"), "Schedule1F1B", ONE),
    **{
        f"{name}, {how}": Cell(Training(name, own_backward=True, **more), runs, stages)  # type: ignore[arg-type]
        for how, more in {
            "FSDP2 by AutoModel's backward": {"sharding": "FSDP2"},
            "FSDP2 that reduces every microbatch": {"sharding": "FSDP2", "defer_fsdp_grad_sync": False},
            "experts": {"sharding": "MoE", "layers": 4},
            "experts, parts": {"sharding": "MoE, parts", "layers": 4},
            # The gradients of the first batch wait, unreduced, for those of the second one.
            "experts, parts, two batches": {"sharding": "MoE, parts", "layers": 4, "lengths": (12, 12)},
            "experts, parts, lengths that change": {
                "sharding": "MoE, parts",
                "layers": 4,
                "lengths": (12, 20),
                "says_lengths": True,
            },
        }.items()
        for name, runs, stages in (("ZBV", "ScheduleZBV", V), ("ZBH1", "ScheduleZBH1", ONE))
    },
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each number of ranks, with a plan in a V and one in a wave."""
    folder = tmp_path_factory.mktemp("tables")
    for ranks in (2, 4):
        (folder / str(ranks)).mkdir()
        for name, stages_per_rank in (("plan.csv", 2), ("wave.csv", 4)):
            placement = zbpipe.Placement.v(ranks, stages_per_rank)
            plan = zbpipe.plan(ranks, MICROBATCHES, (1.0, 1.0, 1.0), placements=[placement])
            (folder / str(ranks) / name).write_text(plan.schedule.to_csv())
    return folder


@pytest.fixture(scope="module")
def on_two(tables: Path) -> dict[str, list[Run]]:
    """By cell, what each rank saw. One start of the processes serves all tests."""
    return run_cells(2, ON_TWO, tables)


@pytest.fixture(scope="module")
def on_four(tables: Path) -> dict[str, list[Run]]:
    return run_cells(4, ON_FOUR, tables)


def run_cells(ranks: int, cells: dict[str, Cell], tables: Path) -> dict[str, list[Run]]:
    trainings = [with_table(cell.training, tables) for cell in cells.values()]
    for cell in cells.values():  # before the ranks: what one process has compiled, they all find
        expected(model_of(cell.training), ranks // cell.training.pipeline)
    by_rank = run_ranks(ranks, train_all, trainings, timeout=500)
    return dict(zip(cells, map(list, zip(*by_rank, strict=True)), strict=True))


def with_table(training: Training, tables: Path) -> Training:
    if not training.schedule.endswith(".csv"):
        return training
    return training._replace(schedule=str(tables / str(training.pipeline) / training.schedule))


@cache
def expected(training: Training, replicas: int) -> tuple[Gradients, list[list[list[float]]]]:
    found: tuple[Gradients, list[list[list[float]]]] = run_ranks(1, without_a_pipeline, training, replicas)[0]
    return found


def model_of(training: Training) -> Training:
    """The part of a training that it has without a pipeline, too."""
    sharding: Any = training.sharding[:3]
    return Training("", sharding, 0, training.layers, training.lengths, in_mean=training.in_mean)


def assert_as_without_a_pipeline(cell: Cell, runs: list[Run]) -> None:
    training = cell.training
    assert {run.runs for run in runs} == {cell.runs}
    assert runs[0].stages == cell.first_rank
    gradients, losses = expected(model_of(training), len(runs) // training.pipeline)
    found = {name: gradient for run in runs for name, gradient in run.gradients.items()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]
    # Ranks of a pipeline that hold its last stage, replica by replica.
    reported = [run.losses for run in runs if any(run.losses)]
    assert reported == [[pytest.approx(batch, rel=1e-5) for batch in replica] for replica in losses]


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_train_as_without_a_pipeline(name: str, on_two: dict[str, list[Run]]) -> None:
    assert_as_without_a_pipeline(ON_TWO[name], on_two[name])


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_train_as_without_a_pipeline(name: str, on_four: dict[str, list[Run]]) -> None:
    assert_as_without_a_pipeline(ON_FOUR[name], on_four[name])


COLUMNS = {
    "2 ranks": "",
    "4 ranks": ", p=4",
    "FSDP2": ", FSDP2",
    "FSDP2, AutoModel's backward": ", FSDP2 by AutoModel's backward",
    "the same, reducing every microbatch": ", FSDP2 that reduces every microbatch",
    "experts": ", experts",
    "experts, FSDP2 on parts": ", experts, parts, two batches",
}
SCHEDULES = ("ZBV", "VHalf", "VMin", "ZBH1", "Auto", "plan.csv", "wave.csv", "1F1B")
OWN = """\
Tested with {versions}. Not tried: context parallelism. With torch 2.15 AutoModel 0.7.0 fails also without zbpipe.
"""
ABOUT = """\
"Works" means: AutoModel's own pipeline of a model with 4, 8 or 16 layers, eight microbatches,
float32, has the gradients (within 1e-4) and the losses (within 1e-5) of the model without a pipeline. FSDP2 and
experts: 2 pipeline ranks times 2 data-parallel ones. Experts: AutoModel's Qwen3 mixture of experts with its
`MoEFSDPSyncMixin`, `wrap_outer_model` on, or off with gradients added up over two batches. plan.csv is a plan in a V,
wave.csv one with four stages per rank, and 1F1B is torch's.

The example in examples/automodel, cut down to a small Llama, reports the losses and the norms of the same job without a
pipeline over three optimizer steps, and the loss of validation. So it does with LoRA and torch.compile together, if
LoRA's first weights, which each rank draws for its own layers, are made alike.
"""


def test_the_page_says_what_works(
    on_two: dict[str, list[Run]], on_four: dict[str, list[Run]], request: pytest.FixtureRequest
) -> None:
    cells, runs = ON_TWO | ON_FOUR, on_two | on_four

    def outcome(name: str) -> str:
        if name not in cells:
            return "not tried"
        assert_as_without_a_pipeline(cells[name], runs[name])
        return "works"

    lines = [[schedule, *(outcome(schedule + suffix) for suffix in COLUMNS.values())] for schedule in SCHEDULES]
    table = Table("Schedule and sharding", "", ["schedule", *COLUMNS], lines)
    own = OWN.format(versions=seen_with("torch", "nemo-automodel"))
    section = Section(target("nemo-automodel"), own, ABOUT, [table])
    compare(section, request.config.getoption("--write-compatibility"))


CPU_ONLY = {
    "distributed": {"mp_policy": {"param_dtype": "float32", "reduce_dtype": "float32", "output_dtype": "float32"}},
    "model": {"torch_dtype": "float32"},
    "dist_env": {"backend": "gloo"},
}
EXAMPLE = Path(__file__).parents[1] / "examples" / "automodel" / "llama3_8b_zbv.yaml"
SMALL_STEPS = {
    "local_batch_size": 4,
    "global_batch_size": 8,  # two steps of the schedule for one of the optimizer
    "max_steps": 3,
    "num_epochs": 1,
    "val_every_steps": 3,
    "ckpt_every_steps": 100,
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model from a small config, as one that was downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


Written = dict[str, list[dict[str, Any]]]
"""What a job wrote of training and of validation."""


def write_job(pipeline: int, model: Path, folder: Path, more: dict[str, dict[str, Any]]) -> Path:
    """The config of the example's job, cut down to three steps of a small model.

    `more` has further settings by section of the config.
    """
    job = yaml.safe_load(EXAMPLE.read_text())
    for section, values in [*CPU_ONLY.items(), *more.items()]:
        job.setdefault(section, {}).update(values)
    job["distributed"]["pp_size"] = pipeline
    job["distributed"]["pipeline"].update(job.pop("pipeline", {}))
    job["step_scheduler"] = SMALL_STEPS
    job["model"]["pretrained_model_name_or_path"] = str(model)
    sentences = "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset"
    job["dataset"] = {"_target_": sentences, "num_sentences": 24, "tokenizer": None}
    job["dataloader"]["shuffle"] = False
    job["validation_dataset"] = job["dataset"] | {"num_sentences": 8, "seed": 1}
    job["validation_dataloader"] = dict(job["dataloader"])
    job["checkpoint"] = {"enabled": False, "checkpoint_dir": str(folder)}
    config = folder / "job.yaml"
    config.write_text(yaml.safe_dump(job))
    return config


def run_recipes(pipeline: int, model: Path, folder: Path) -> dict[str, Written]:
    """The jobs of `SETTINGS`, one after the other in the same processes."""
    configs = []
    for name, more in SETTINGS.items():
        (folder / name).mkdir()
        configs.append(write_job(pipeline, model, folder / name, more))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pipeline)]
    ended = subprocess.run(
        [*torchrun, "-m", "zbpipe.run", "--", "-m", "automodel_on_cpu", *map(str, configs)],
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ("the schedule ZBV and gets zbpipe's ZBV" in ended.stdout + ended.stderr) == (pipeline > 1)
    return {
        job: {
            name: [json.loads(line) for line in (folder / job / f"{name}.jsonl").read_text().splitlines()]
            for name in ("training", "validation")
        }
        for job in SETTINGS
    }


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    # One stage per rank, so the last rank has the loss. A wave would have it on the first one.
    "all weights": {"pipeline": {"pp_schedule": "ZB", "layers_per_stage": 4}},
    "LoRA, compiled": {
        "peft": {
            "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
            "match_all_linear": True,
            "dim": 8,
            "alpha": 16,
            "use_triton": False,
        },
        "compile": {"enabled": True, "mode": "default", "fullgraph": False, "dynamic": False},
    },
}


@pytest.fixture(scope="module")
def jobs(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Written]]:
    """What the jobs of `SETTINGS` wrote, on two ranks and on one."""
    return [run_recipes(ranks, small_model, tmp_path_factory.mktemp("jobs")) for ranks in (2, 1)]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_example_trains_as_without_a_pipeline(jobs: list[dict[str, Written]], name: str) -> None:
    """AutoModel's whole recipe: losses that it reports, of validation, too, and norms of the gradients."""
    found, whole = (each[name] for each in jobs)
    assert len(whole["training"]) == 3
    assert len(whole["validation"]) == 1
    for kind, keys in {"training": ("loss", "grad_norm"), "validation": ("val_loss",)}.items():
        for key in keys:
            values = [step[key] for step in whole[kind]]
            assert [step[key] for step in found[kind]] == pytest.approx(values, rel=1e-4)
            assert min(values) > 0.1


def test_automodel_takes_the_example() -> None:
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    section = parse_distributed_section(load_yaml_config(EXAMPLE).distributed.to_dict())
    assert (section["pp_size"], section["pipeline_config"].pp_schedule) == (8, "ZBV")


def test_a_pool_of_receive_buffers_made_for_1f1b_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be there if the config names 1F1B, and ZBV takes its place."""
    from nemo_automodel.components.distributed.pipelining import functional, recv_buffer_pool

    zbpipe.install("ZBV", everywhere=True)
    try:
        assert functional.get_schedule_class("1f1b").__name__ == "ScheduleZBV"
        monkeypatch.setattr(recv_buffer_pool, "_INSTALLED", True)
        with pytest.raises(
            ValueError, match=r"pp_recv_buffer_pool .* too few for ZBV: omit it from distributed\.pipeline"
        ):
            functional.get_schedule_class("1f1b")
    finally:
        uninstall()
