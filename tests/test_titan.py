"""zbpipe inside TorchTitan: real torchrun jobs on the CPU, and the pieces that they are made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from ranks import run_ranks

import zbpipe
from zbpipe import cli
from zbpipe.titan import demo, launch
from zbpipe.titan.launch import Outcome, train_on_cpu

pytest.importorskip("torchtitan")
TIMEOUT = 200


@pytest.fixture(scope="module")
def seed_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seed")
    arguments = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
    outcome = train_on_cpu(arguments, num_ranks=1, folder=folder, timeout=TIMEOUT)
    assert outcome.error is None, (folder / "output.log").read_text()
    return folder / "checkpoint" / "step-0"


def train(schedule: str, seed: Path, folder: Path, *more: str) -> Outcome:
    arguments = [
        *("--training.steps", "3"),
        *("--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", str(seed)),
        *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", schedule),
        *more,
    ]
    return train_on_cpu(arguments, num_ranks=2, folder=folder, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def one_f_one_b(seed_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What torch's 1F1B makes of the same weights and data."""
    folder = tmp_path_factory.mktemp("1f1b")
    outcome = train("1F1B", seed_checkpoint, folder)
    assert outcome.error is None, (folder / "output.log").read_text()
    return outcome


def assert_trains_alike(outcome: Outcome, expected: Outcome, folder: Path) -> None:
    """float32: three optimizer steps differ by rounding at most."""
    assert outcome.error is None, (folder / "output.log").read_text()
    assert [step["step"] for step in outcome.steps] == [1, 2, 3]
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    norms, expected_norms = ([step["grad_norm"] for step in each.steps] for each in (outcome, expected))
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    # It learned something, so equal losses mean something.
    assert outcome.losses[2] < outcome.losses[0] - 0.5


@pytest.mark.parametrize("schedule", ["ZBV", "ZBH1", "ZBH2", "ZB1P", "ZB2P", "VHalf", "VMin"])
def test_trains_like_1f1b_under_selective_checkpointing(
    seed_checkpoint: Path, one_f_one_b: Outcome, tmp_path: Path, schedule: str
) -> None:
    outcome = train(schedule, seed_checkpoint, tmp_path)
    assert_trains_alike(outcome, one_f_one_b, tmp_path)
    log = (tmp_path / "output.log").read_text()
    assert log.count("no accelerator found, so this trains on the CPU") == 1
    assert f"Using zbpipe's pipeline schedule {schedule} with 8 microbatches" in log
    assert "Applied SelectiveAC activation checkpointing" in log


def test_a_csv_file_in_the_schedule_field(seed_checkpoint: Path, one_f_one_b: Outcome, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(zbpipe.generate("VHalf", 2, 8).to_csv())
    assert_trains_alike(train(str(table), seed_checkpoint, tmp_path), one_f_one_b, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--parallelism.pipeline_parallel_schedule", "ZBVV"], "unknown schedule 'ZBVV'; did you mean 'ZBV'?"),
        (
            [
                "--parallelism.pipeline_parallel_schedule",
                "ZBV",
                "--parallelism.pipeline_parallel_schedule_csv",
                "a.csv",
            ],
            "pipeline_parallel_schedule_csv='a.csv' and the schedule ZBV exclude each other",
        ),
        (
            [
                "--parallelism.pipeline_parallel_schedule",
                "ZBV",
                "--parallelism.pipeline_parallel_layers_per_stage",
                "4",
            ],
            "cuts the model's 6 layers into 2 stages, but ZBV on 2 ranks has 4: leave the field out",
        ),
        (
            ["--parallelism.pipeline_parallel_schedule", "four_ranks.csv"],
            "four_ranks.csv is a table for 4 ranks, but the job has 2",
        ),
    ],
)
def test_settings_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("four_ranks.csv").write_text(zbpipe.generate("ZBV", 4, 8).to_csv())
    degree = ["--parallelism.pipeline_parallel_degree", "2"]
    outcome = train_on_cpu([*degree, *arguments], num_ranks=2, folder=tmp_path / "job", timeout=TIMEOUT)
    assert outcome.error is not None
    assert error in outcome.error
    assert outcome.steps == ()


def test_a_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    outcome = train_on_cpu(["--training.steps", "100000"], num_ranks=1, folder=tmp_path, timeout=3)
    assert outcome.error == "no end after 3 seconds"
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def prepare() -> None:
    from zbpipe.titan import cpu
    from zbpipe.titan.train import plug_in

    cpu.stand_in()
    plug_in(on_cpu=True)


def ranks_with_loss() -> dict[str, int]:
    prepare()
    from zbpipe.titan import _torchtitan

    dims: Any = SimpleNamespace(pp_enabled=True, world_size=8, pp=4)
    names = ("ZBV", "zbvzerobubble", "DualPipeV", "1F1B", "Interleaved1F1B", "PipelineScheduleMulti")
    return {name: _torchtitan.rank_with_loss(dims, name) for name in names}


def test_loss_and_metrics_come_from_the_rank_with_the_last_stage() -> None:
    (found,) = run_ranks(1, ranks_with_loss)
    assert [found[name] for name in ("ZBV", "zbvzerobubble", "DualPipeV")] == [0, 0, 0]
    assert [found[name] for name in ("1F1B", "Interleaved1F1B", "PipelineScheduleMulti")] == [6, 6, 6]


def read_text(num_shards: int) -> list[list[list[int]]]:
    """The first three sequences of every data-parallel rank."""
    prepare()
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    from zbpipe.titan import python_text

    python_text.register()
    shards = []
    for rank in range(num_shards):
        data = iter(
            HuggingFaceTextDataset(
                python_text.NAME, None, python_text.ByteTokenizer(), 128, dp_rank=rank, dp_world_size=num_shards
            )
        )
        shards.append([next(data)[0]["input"].tolist() for _ in range(3)])
    return shards


def test_the_text_is_the_standard_library_split_by_data_parallel_rank() -> None:
    ((shard,),) = run_ranks(1, read_text, 1)
    first_file = Path(sys.modules["os"].__file__ or "").parent
    begin = bytes(token for token in shard[0] if token < 256).decode()
    assert shard[0][0] == 256  # beginning of a document
    sources = sorted(path for path in first_file.rglob("*.py") if "site-packages" not in path.parts)
    assert next(text for path in sources if (text := path.read_text(errors="replace"))).startswith(begin[:60])
    (shards,) = run_ranks(1, read_text, 2)
    assert shards[0] != shards[1]
    assert shards[0][0] == shard[0]


def tokenizer_round_trip() -> tuple[list[int], str, int]:
    prepare()
    from zbpipe.titan.python_text import ByteTokenizer

    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("λ x", add_bos=True, add_eos=True)
    return tokens, tokenizer.decode(tokens), tokenizer.get_vocab_size()


def test_bytes_are_tokens() -> None:
    ((tokens, text, size),) = run_ranks(1, tokenizer_round_trip)
    assert tokens == [256, *"λ x".encode(), 257]
    assert (text, size) == ("λ x", 258)


def fake_train(arguments: list[str], *, num_ranks: int, folder: Path, on_step: Any = None, **unused: Any) -> Outcome:
    if num_ranks == 1:
        return Outcome((), None)
    if "ZBVZeroBubble" in arguments:
        return Outcome((), "RuntimeError: Trying to backward an extra time. [rank0] " + 20 * "And so on. ")
    steps = tuple(
        {"step": step, "loss_metrics/global_avg_loss": 8.0 - step, "throughput(tps)": 100.0 * step}
        for step in (1, 2, 3)
    )
    for step in steps:
        on_step(step)
    return Outcome(steps, None)


def test_the_demo_reports_what_it_saw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "train_on_cpu", fake_train)
    file = tmp_path / "runs.json"
    result = CliRunner().invoke(cli.main, ["demo", "--steps", "3", "--json", str(file)])
    assert result.exit_code == 0, result.output
    runs = json.loads(file.read_text())["runs"]
    assert [(run["schedule"], run["source"], run["status"]) for run in runs] == [
        ("1F1B", "torch", "ok"),
        ("ZBVZeroBubble", "torch", "failed"),
        ("ZBV", "zbpipe", "ok"),
    ]
    assert runs[2] == {
        "schedule": "ZBV",
        "source": "zbpipe",
        "activation_checkpoint": "selective",
        "losses": [7.0, 6.0, 5.0],
        "tokens_per_second": 500.0,
        "status": "ok",
        "error": None,
    }
    assert runs[1]["error"].startswith("RuntimeError: Trying to backward an extra time.")
    row = next(line for line in result.output.splitlines() if line.startswith("ZBVZeroBubble  "))
    assert runs[1]["error"].strip() in row
    assert "Largest relative difference between the losses of the runs that are ok: 0.0e+00" in result.output


def test_the_demo_fails_when_zbpipe_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_zbv(arguments: list[str], **options: Any) -> Outcome:
        return Outcome((), "RuntimeError: no") if "ZBV" in arguments else fake_train(arguments, **options)

    monkeypatch.setattr(demo, "train_on_cpu", fail_zbv)
    assert CliRunner().invoke(cli.main, ["demo"]).exit_code == 1


def test_the_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli.main, ["demo"])
    assert result.exit_code != 0
    assert "pip install 'zbpipe[titan]'" in result.output
    (tmp_path / "file").touch()
    for arguments, complaint in ((["--keep", str(tmp_path)], "not empty"), (["--json", "no/where.json"], "folder")):
        result = CliRunner().invoke(cli.main, ["demo", *arguments])
        assert result.exit_code == 2
        assert complaint in result.output


def test_the_first_error_is_told(tmp_path: Path) -> None:
    for rank, (time, text) in enumerate([("20", "RuntimeError: later"), ("10", "ValueError: first\n  and why")]):
        file = tmp_path / "errors" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": time}}}))
    assert launch._error(tmp_path) == "ValueError: first and why"
