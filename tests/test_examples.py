"""The scripts in examples/: losses are those of the same model without a pipeline."""

import json
import os
import re
import sys
from pathlib import Path

import packed_loop
import plain_loop
import pytest
import torch
from commands import process
from forks import run_script
from titan_jobs import Titan, assert_trains_alike, pipeline, require_titan, short, start_from, words
from torch import nn

import zbpipe
from zbpipe.cli.demo.launch import JobOutcome

EXAMPLES = Path(__file__).parent.parent / "examples"
RANKS = 2
STAGES = {"plain_loop": 8, "packed_loop": 8, "measure_and_plan": 4, "own_schedule": 2}


def run(folder: Path, *command: str | Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = process(*command, folder=folder, PATH=path, CUDA_VISIBLE_DEVICES="")
    return ended.stdout + ended.stderr


def losses_without_a_pipeline(part: plain_loop.Part, num_stages: int, is_packed: bool = False) -> list[float]:
    """Of the same steps. SGD follows the scale of the gradients, so equal losses mean equal gradients."""
    model = nn.Sequential(*(part(index, num_stages) for index in range(num_stages)))
    optimizer = torch.optim.SGD(model.parameters(), lr=plain_loop.LEARNING_RATE)
    losses = []
    for step in range(plain_loop.STEPS):
        if is_packed:
            tokens, targets, _ = packed_loop.draw_batch(step)
            loss = packed_loop.loss_fn(model(tokens), targets, len(tokens))
        else:
            tokens, targets = plain_loop.batch(step, torch.device("cpu"))
            loss = plain_loop.loss_fn(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_all_scripts_are_tried_and_short() -> None:
    scripts = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() == STAGES.keys()
    assert max(scripts.values()) < 80


@pytest.mark.parametrize(
    "name",
    [
        "own_schedule",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("plain_loop", "packed_loop", "measure_and_plan")),
    ],
)
def test_losses_are_those_without_a_pipeline(name: str, tmp_path: Path) -> None:
    script = str(EXAMPLES / f"{name}.py")
    if name == "plain_loop":  # as its first lines say
        output = run(tmp_path, "torchrun", "--standalone", "--nproc-per-node", str(RANKS), script)
    else:
        output = run_script(tmp_path, RANKS, script)
    expected = losses_without_a_pipeline(plain_loop.build_part, STAGES[name], name == "packed_loop")
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (.*)$", output, re.MULTILINE)]
    assert losses == pytest.approx(expected, abs=2e-5)
    if name == "measure_and_plan":
        assert_left_a_plan(tmp_path, output)
    if name == "own_schedule":
        steps = dict(re.findall(r"^(\w+) +step (\d+),", output, re.MULTILINE))
        assert steps == {"1F1B": "27", "ZBH1": "25", "LateW": "25"}


def assert_left_a_plan(folder: Path, output: str) -> None:
    planned, usual = re.findall(r"planned ([\d.]+) ms a step, with ZBV ([\d.]+) ms", output)[0]
    assert 0 < float(planned) <= float(usual)
    plan = zbpipe.generate(str(folder / "plan.csv"), RANKS, plain_loop.MICROBATCHES)
    assert zbpipe.validate(plan) == []
    again = [sys.executable, "-m", "zbpipe", "plan", "-m", "8", "--costs-file", "costs.toml"]
    assert "makespan" in run(folder, *again)


@pytest.mark.long
def test_torchtitan(titan: Titan, tmp_path: Path) -> None:
    require_titan("0.3.0")
    metrics = tmp_path / "metrics.jsonl"
    arguments = (*short(), *start_from(titan.seed()), "--metrics.json_lines", str(metrics), "--dump_folder", "out")
    output = run(tmp_path, EXAMPLES / "torchtitan" / "train.sh", *arguments)
    assert "pipeline: ZB" in output
    steps = tuple(json.loads(line) for line in metrics.read_text().splitlines())
    assert_trains_alike(JobOutcome(steps, None), titan.without_pipeline())


@pytest.mark.long
@pytest.mark.parametrize(("data_ranks", "tensor_ranks"), [(1, 1), (2, 1), (1, 2)])
def test_torchtitan_with_packed_lines(titan: Titan, tmp_path: Path, data_ranks: int, tensor_ranks: int) -> None:
    """The same packs, as microbatches of other sizes, or one after the other without a pipeline."""
    require_titan("0.3.0")
    model = "packed_lines:llama3_packed"
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join("spam " * (number**2 % 11) + "egg" for number in range(50)))
    data = ["--dataloader.dataset_path", str(lines), "--dataloader.microbatches", "4"]
    if tensor_ranks > 1:
        data += words(f"parallelism.tensor_parallel_degree {tensor_ranks}", "parallelism.no-enable_sequence_parallel")
    ranks = data_ranks * tensor_ranks
    one_by_one = ("--training.local_batch_size", "1", "--training.global_batch_size", str(4 * data_ranks))
    expected = titan.without_pipeline(*data, *one_by_one, num_ranks=ranks, model=model)
    found = titan.train(*data, *pipeline("ZB"), num_ranks=RANKS * ranks, model=model)
    assert_trains_alike(found, expected)
    assert found.steps[0]["n_tokens_seen"] % (4 * data_ranks), "all microbatches may have one size"
