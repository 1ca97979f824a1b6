"""`zbpipe plan`: what it prints and writes, what it refuses, and that torch and TorchTitan run what it exports."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pytest
from click.testing import Result
from documents import blocks
from ranks import run_ranks
from test_gradients import assert_like_reference, train_from_file

import zbpipe
from zbpipe import CostModel, Placement
from zbpipe.costs import JobCosts, Layer, LayerCosts, dump_costs
from zbpipe.costs.transformer import typical_costs

QUICK = "--budget 2e5"
SIMULATE_KEYS = {
    "schedule",
    "ranks",
    "microbatches",
    "stages_per_rank",
    "steps",
    "makespan",
    "bubble",
    "peak_activations",
    "peak_memory",
    "lower_bound",
    "period",
    "idle",
}


def run(line: str) -> Result:
    return commands.run(f"plan {line}")


def answer(line: str) -> str:
    return commands.answer(f"plan {line}")


def json_of(line: str) -> Any:
    return commands.json_of(f"plan {line} {QUICK}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write into, with the cost files of the docs."""
    monkeypatch.chdir(tmp_path)
    for name, block in zip(("stages", "layers"), blocks("docs/costs-file.md", "toml")[:2], strict=True):
        (tmp_path / f"{name}.toml").write_text(block.code)
    return tmp_path


def test_the_plan_stands_beside_the_schedules_with_a_name() -> None:
    found = json_of("-p 4 -m 8 --costs 1,1.2,0.8 --comm 0.05 --memory-limit 4.5")
    costs = partial(typical_costs, times=(1, 1.2, 0.8), comm=0.05)
    expected = zbpipe.plan(4, 8, costs, 4.5, budget=2e5)
    assert found.keys() >= SIMULATE_KEYS | {"gap", "placement", "limit", "found_by", "objective", "bounds", "rank_of"}
    assert found["makespan"] == expected.makespan
    assert (found["placement"], found["found_by"]) == (expected.placement, expected.found_by)
    assert found["lower_bound"] == expected.lower_bound
    assert found["gap"] == pytest.approx(found["makespan"] / found["lower_bound"] - 1, abs=1e-12)
    assert found["limit"] == [4.5] * 4
    assert max(found["peak_memory"]) <= 4.5
    named = {entry["schedule"]: entry for entry in found["named"]}
    assert named["VMin"]["fits"]
    assert not named["GPipe"]["fits"]
    assert all(entry["makespan"] >= found["makespan"] for entry in named.values() if entry["fits"])


def test_the_table_marks_what_does_not_fit() -> None:
    line = "-p 4 -m 8 --costs 1,1.2,0.8 --checkpointing none --memory-limit 3.5 --placement v"
    first, _, *lines = answer(f"{line} {QUICK}").splitlines()
    assert first.startswith("best without a search: VHalf, makespan ")
    assert lines[0].startswith("plan-v, 4 ranks, 8 microbatches, 2 stages per rank: makespan ")
    assert lines[1].startswith("placement v, found by ")
    assert re.fullmatch(r"no schedule on v has a makespan below [\d.]+: this one is at most [\d.]+% above .*", lines[2])
    rows = lines[5 : lines.index("", 5)]
    assert rows[0].startswith("plan-v")
    marked = {row.split()[0] for row in rows if row.endswith("over the limit of 3.5")}
    assert {"GPipe", "1F1B", "ZBV"} <= marked
    assert not {"VMin", "plan-v"} & marked


def test_the_same_command_gives_the_same_plan() -> None:
    line = "-p 3 -m 5 --costs 1,2,1 --seed 7"
    assert json_of(line) == json_of(line)


def test_the_other_objective_is_reported_as_such() -> None:
    found = json_of("-p 4 -m 6 --objective period")
    assert found["objective"] == "period"
    assert found["gap"] == pytest.approx(found["period"] / found["lower_bound"] - 1, abs=1e-12)
    assert "has a period below" in answer(f"-p 4 -m 6 --objective period {QUICK}")


def test_a_placement_can_be_spelled_out() -> None:
    found = json_of("-p 2 -m 4 --placement 0-1-0 --placement wave")
    assert set(found["bounds"]) == {"0-1-0", "wave"}


def test_what_it_writes(here: Path) -> None:
    written = run(f"-p 2 -m 4 {QUICK} -o plan.csv --json plan.json")
    assert written.stdout == "wrote plan.csv\nwrote plan.json\n"
    found = json.loads((here / "plan.json").read_text())
    schedule = zbpipe.Schedule.from_csv((here / "plan.csv").read_text())
    assert zbpipe.validate(schedule) == []
    assert list(schedule.placement.rank_of) == found["rank_of"]
    both = run(f"-p 2 -m 4 {QUICK} -o plan.csv --json")
    assert json.loads(both.stdout) == found
    assert both.stderr == "wrote plan.csv\n"


# Cost files


def test_layers_that_take_no_time(here: Path) -> None:
    dump_costs(JobCosts(LayerCosts((Layer(("a",), 0, 0, 0, 0),) * 4)), here / "nothing.toml")
    assert "a plan for TorchTitan's even split takes 0" in answer(f"-p 2 -m 2 --costs-file nothing.toml {QUICK}")


def test_costs_of_stages_from_a_file(here: Path) -> None:
    found = json_of("-m 8 --costs-file stages.toml")
    assert (found["ranks"], found["rank_of"]) == (2, [0, 1, 1, 0])
    assert found["limit"] == [6.5e9, 8e9]
    assert all(peak <= limit for peak, limit in zip(found["peak_memory"], found["limit"], strict=True))
    for entry in found["named"]:
        assert entry["fits"] == all(
            peak <= limit for peak, limit in zip(entry["peak_memory"], found["limit"], strict=True)
        )
    # Those with four stages, though they may have them elsewhere.
    assert {entry["stages_per_rank"] for entry in found["named"]} == {2}


@pytest.mark.parametrize("limit", ["7e9", "7000 MB"])
def test_a_limit_is_in_the_unit_of_the_cost_file(here: Path, limit: str) -> None:
    found = json_of(f"-m 8 --costs-file stages.toml --memory-limit '{limit}'")
    assert found["limit"] == [7e9, 7e9]
    assert max(found["peak_memory"]) <= 7e9


def test_what_exceeds_a_limit_in_bytes_is_marked_with_it(here: Path) -> None:
    printed = answer(f"-m 8 --costs-file stages.toml --memory-limit 6GiB {QUICK}")
    assert re.search(r"^GPipe .*", printed, re.MULTILINE) is None  # it has two stages only
    assert re.search(r"^LoopedBFS .* over the limit of 6 GiB$", printed, re.MULTILINE)


def test_costs_of_layers_from_a_file(here: Path) -> None:
    found = json_of("-p 2 -m 8 --costs-file layers.toml --placement single")
    blocks = [f"layers.{n}" for n in range(16)]
    # The head is worth two blocks.
    assert found["module_fqns_per_model_part"] == [["tok_embeddings", *blocks[:9]], [*blocks[9:], "norm", "lm_head"]]
    printed = answer(f"-p 2 -m 8 --costs-file layers.toml --placement single {QUICK}")
    assert json.loads(printed[printed.index("\n[") :].replace(",\n]", "\n]")) == found["module_fqns_per_model_part"]
    assert "a plan for TorchTitan's even split takes" in printed


# What goes wrong


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-m 4", "Missing option '-p'"),
        ("-p 2", "Missing option '-m'"),
        ("-p 2 -m 4 --costs 1,1", "'1,1' is not three numbers"),
        ("-p 2 -m 4 --memory-limit 0.5", "memory_limit = 0.5 is too small: one microbatch peaks at 1.320"),
        ("-p 2 -m 4 --memory-limit 5GiB", "'5GiB' is in bytes, but nothing here was measured in bytes: write it as"),
        ("-m 4 --memory-limit 1GiB --costs-file stages.toml", "memory_limit = 1GiB is too small: one microbatch peaks"),
        ("-p 2 -m 4 --placement vv", "'vv' is not one of single, loop, v, wave, nor the rank of each stage"),
        ("-p 2 -m 4 --placement 0-2", "a placement needs a stage on every rank, got the ranks (0, 2)"),
        ("-p 3 -m 4 --placement 0-1", "is for 2 ranks, but the job has 3"),
        ("-p 2 -m 4 --objective speed", "'speed' is not one of 'makespan', 'period'"),
        ("-p 2 -m 4 --budget 0", "budget=0 is too small for a search"),
        ("-p 2 -m 4 --budget nan", "budget=nan is too small for a search"),
        ("-p 2 -m 4 --budget inf", "budget=inf would take days"),
        (
            f"-p {10**20} -m 4",
            f"a plan for {10**20} ranks has {10**20} stages, but at most 1024 are possible: use fewer",
        ),
        (f"-p 2 -m {10**20}", f"{10**20} microbatches are too many for them: use at most 131072"),
        (f"-p 2 -m 4 --placement 0-{10**20}", "a placement needs a stage on every rank"),
        ("-p 2 -m 4 --seed x", "'x' is not a valid integer"),
        ("-p 2 -m 4 -o no/such.csv", "'no/such.csv' is not in a folder that exists and that you can write to"),
        ("-p 2 -m 4 --json no/such.json", "'no/such.json' is not in a folder"),
        ("-p 2 -m 4 --costs-file none.toml", "'none.toml' does not exist"),
        ("-p 2 -m 4 --costs-file stages.toml --costs 1,1,1", "--costs and --costs-file stages.toml exclude each other"),
        ("-p 2 -m 4 --costs-file stages.toml --comm 1", "--comm and --costs-file stages.toml exclude each other"),
        ("-m 4 --costs-file stages.toml --placement v", "--placement and the rank_of in stages.toml exclude"),
        ("-p 3 -m 4 --costs-file stages.toml", "rank_of = [0, 1, 1, 0], which is for 2 ranks, got 3: use 2"),
        ("-m 4 --costs-file layers.toml", "Missing option '-p'"),
        ("-p 40 -m 4 --costs-file layers.toml", "18 layers cannot be cut into 40 stages"),
        ("-p 2 -m 4 --costs-file three.json", "the costs are for 3 stages, and no placement has that number"),
        ("-p 2 -m 4 --costs-file bad.toml", "cost file 'bad.toml': m = 3: unknown key"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(here: Path, line: str, words: str) -> None:
    (here / "bad.toml").write_text("m = 3\n")
    dump_costs(JobCosts(CostModel((1,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)), here / "three.json")
    result = run(line)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


# While it runs


def test_a_progress_bar_on_a_terminal_only() -> None:
    command = [sys.executable, "-m", "zbpipe", "plan", "-p", "2", "-m", "4", "--budget", "1e5", "--placement", "single"]
    quiet = subprocess.run(command, capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
    ours, theirs = pty.openpty()
    on_terminal = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True, text=True)
    os.close(theirs)
    assert "searching" in os.read(ours, 100_000).decode()
    os.close(ours)
    assert on_terminal.stdout == quiet.stdout


def test_only_the_search_needs_its_libraries() -> None:
    program = (
        "import sys; from zbpipe.cli import main; main(sys.argv[1:], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
        "assert sys.argv[1] == 'plan' or not {'numba', 'numpy', 'zbpipe.planner.plan'} & sys.modules.keys()"
    )
    for line in ("show ZBV -p 4 -m 8", "plan --help", "plan -p 2 -m 2 --budget 1e4"):
        subprocess.run([sys.executable, "-c", program, *line.split()], check=True, capture_output=True)


# What torch makes of it


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_torch_gets_the_right_gradients_from_an_exported_plan(num_ranks: int, tmp_path: Path) -> None:
    """For uneven stages and little memory, so that it is none of the schedules with a name."""
    placement = Placement.v(num_ranks)
    uneven = tuple(1 + stage % 3 / 2 for stage in range(placement.num_stages))
    dump_costs(JobCosts(CostModel(uneven, uneven[::-1], uneven, uneven), placement), tmp_path / "costs.json")
    table = tmp_path / "plan.csv"
    answer(
        f"-m 6 --costs-file {tmp_path / 'costs.json'} --memory-limit { ({2: 5, 4: 8}[num_ranks]) } -o {table} {QUICK}"
    )
    per_rank = run_ranks(num_ranks, train_from_file, str(table), 6)
    assert_like_reference(per_rank, 2 * num_ranks, (6,))


@pytest.mark.long
def test_torchtitan_trains_an_exported_plan(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from titan_jobs import assert_trains_alike, require_titan

    require_titan("0.3.0")

    titan = request.getfixturevalue("titan")
    table = tmp_path / "plan.csv"
    answer(f"-p 4 -m 4 --costs 1,1.4,0.6 --checkpointing none --memory-limit 2.6 --placement single -o {table} {QUICK}")
    job = titan.train(
        *("--parallelism.pipeline_parallel_degree", "4"),
        *("--parallelism.pipeline_parallel_schedule", str(table)),
        num_ranks=4,
    )
    print(job.log)
    assert_trains_alike(job, titan.without_pipeline())
    assert f"Using zbpipe's pipeline schedule {table} with 4 microbatches" in job.log


@pytest.mark.long
def test_torchtitan_trains_a_model_that_is_cut_as_planned(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from titan_jobs import assert_trains_alike, pipeline, require_titan

    require_titan("0.3.0")

    titan = request.getfixturevalue("titan")
    layers = (
        Layer(("tok_embeddings",), 0.1, 0, 0.1, 0),
        *(Layer((f"layers.{number}",), 1, 1, 1, 1) for number in range(6)),
        Layer(("norm", "lm_head"), 4, 4, 4, 1),
    )
    dump_costs(JobCosts(LayerCosts(layers)), tmp_path / "costs.toml")
    table, split = tmp_path / "plan.csv", titan.folder / "plan.json"
    answer(f"-p 2 -m 4 --costs-file {tmp_path / 'costs.toml'} --placement v -o {table} --json {split} {QUICK}")
    parts = json.loads(split.read_text())["module_fqns_per_model_part"]
    assert parts[-1] == ["norm", "lm_head"]
    job = titan.train(*pipeline(str(table)), "--module", "split_config", "--config", "llama3_split", num_ranks=2)
    print(job.log)
    assert_trains_alike(job, titan.without_pipeline())
    assert f"building stage_idx 3 with modules {parts[3]}" in job.log


def test_a_wave_is_named_where_it_is_better() -> None:
    """With its time; not where it was asked for, and not where it is no better."""
    line = "-p 4 -m 8 --costs 1,1.2,0.8 --budget 3e6"
    found = json.loads(run(f"{line} --json").stdout)
    costs = partial(typical_costs, times=(1, 1.2, 0.8))
    wave = zbpipe.plan(4, 8, costs, placements="wave", budget=3e6)
    assert found["wave"] == pytest.approx(wave.reached)
    assert found["wave"] < found["makespan"]
    assert f"({wave.reached / found['makespan'] - 1:+.1%}): --placement wave" in run(line).output
    assert json.loads(run(f"{line} --placement v --json").stdout)["wave"] is None
    assert json.loads(run("-p 1 -m 2 --costs 1,1,1 --budget 1e4 --json").stdout)["wave"] is None
