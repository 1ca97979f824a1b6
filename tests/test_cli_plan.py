"""`zbpipe plan`: what it prints and writes, what it refuses, and that torch and TorchTitan run what it exports."""

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
from test_cli import SIMULATE_KEYS

import zbpipe
from zbpipe.costs import JobCosts, Layer, LayerCosts, dump_costs
from zbpipe.costs.transformer import typical_costs

QUICK = "--budget 2e5"


def run(line: str) -> Result:
    return commands.run(f"plan {line}")


def answer(line: str) -> str:
    return commands.answer(f"plan {line}")


def json_of(line: str) -> Any:
    return commands.json_of(f"plan {line} {QUICK}")


def test_the_plan_stands_beside_the_schedules_with_a_name() -> None:
    line = "-p 4 -m 8 --costs 1,1.2,0.8 --comm 0.05 --memory-limit 4.5"
    found = json_of(line)
    costs = partial(typical_costs, times=(1, 1.2, 0.8), comm=0.05)
    expected = zbpipe.plan(4, 8, costs, 4.5, budget=2e5)
    more = "peak_activations peak_memory idle period gap limit found_by objective bounds rank_of placement"
    assert found.keys() >= SIMULATE_KEYS | set(more.split())
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
    assert found == json_of(line)
    assert set(json_of("-p 2 -m 4 --placement 0-1-0 --placement wave")["bounds"]) == {"0-1-0", "wave"}


def test_the_table_marks_what_does_not_fit() -> None:
    line = "-p 4 -m 8 --costs 1,1.2,0.8 --checkpointing none --memory-limit 3.5 --placement v"
    lines = answer(f"{line} {QUICK}").splitlines()
    assert lines[0].startswith("plan-v, 4 ranks, 8 microbatches, 2 stages per rank: makespan ")
    assert lines[1].startswith("placement v, found by ")
    assert re.fullmatch(r"no schedule on v has a makespan below [\d.]+: this one is at most [\d.]+% above .*", lines[2])
    rows = lines[5 : lines.index("", 5)]
    assert "plan-v" in [row.split()[0] for row in rows[:2]]  # or ZB, if its step is as short
    marked = {row.split()[0] for row in rows if row.endswith("over the limit of 3.5")}
    assert {"GPipe", "1F1B", "ZBV"} <= marked
    assert not {"VMin", "plan-v"} & marked


def test_the_other_objective_is_reported_as_such() -> None:
    found = json_of("-p 4 -m 6 --objective period")
    assert found["objective"] == "period"
    assert found["gap"] == pytest.approx(found["period"] / found["lower_bound"] - 1, abs=1e-12)


def test_what_it_writes(here: Path) -> None:
    written = run(f"-p 2 -m 4 {QUICK} -o plan.csv --json")
    assert written.stderr == "wrote plan.csv\n"
    found = json.loads(written.stdout)
    schedule = zbpipe.Schedule.from_csv((here / "plan.csv").read_text())
    assert zbpipe.validate(schedule) == []
    assert list(schedule.placement.rank_of) == found["rank_of"]


def test_layers_that_take_no_time(here: Path) -> None:
    dump_costs(JobCosts(LayerCosts((Layer(("a",), 0, 0, 0, 0),) * 4)), here / "nothing.toml")
    assert "a plan for TorchTitan's even split takes 0" in answer(f"-p 2 -m 2 --costs-file nothing.toml {QUICK}")


@pytest.mark.parametrize("limit", ["", "7e9", "7000 MB"])
def test_costs_of_stages_from_a_file(here: Path, limit: str) -> None:
    found = json_of("-m 8 --costs-file stages.toml" + (f" --memory-limit '{limit}'" if limit else ""))
    assert (found["ranks"], found["rank_of"]) == (2, [0, 1, 1, 0])
    assert found["limit"] == ([7e9, 7e9] if limit else [6.5e9, 8e9])
    for entry in (*found["named"], found | {"fits": True}):
        peaks = zip(entry["peak_memory"], found["limit"], strict=True)
        assert entry["fits"] == all(peak <= limit for peak, limit in peaks)
    # Those with four stages, though they may have them elsewhere.
    assert {entry["stages_per_rank"] for entry in found["named"]} == {2}
    if not limit:
        printed = answer(f"-m 8 --costs-file stages.toml --memory-limit 6GiB {QUICK}")
        assert re.search(r"^LoopedBFS .* over the limit of 6 GiB$", printed, re.MULTILINE)


def test_costs_of_layers_from_a_file(here: Path) -> None:
    found = json_of("-p 2 -m 8 --costs-file layers.toml --placement single")
    blocks = [f"layers.{n}" for n in range(16)]
    # The head is worth two blocks.
    assert found["module_fqns_per_model_part"] == [["tok_embeddings", *blocks[:9]], [*blocks[9:], "norm", "lm_head"]]
    printed = answer(f"-p 2 -m 8 --costs-file layers.toml --placement single {QUICK}")
    assert json.loads(printed[printed.index("\n[") :].replace(",\n]", "\n]")) == found["module_fqns_per_model_part"]
    assert "a plan for TorchTitan's even split takes" in printed


def test_progress_on_a_terminal_only() -> None:
    command = [sys.executable, "-m", "zbpipe", "plan", "-p", "2", "-m", "4", "--budget", "1e5", "--placement", "single"]
    quiet = commands.process(*command)
    assert quiet.stderr == ""
    ours, theirs = pty.openpty()
    on_terminal = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True, text=True)
    os.close(theirs)
    assert "searching" in os.read(ours, 100_000).decode()
    os.close(ours)
    assert on_terminal.stdout == quiet.stdout


@pytest.mark.long
@pytest.mark.parametrize("cut", ["evenly", "as planned"])
def test_torchtitan_trains_an_exported_plan(request: pytest.FixtureRequest, tmp_path: Path, cut: str) -> None:
    from titan_jobs import assert_trains_alike, pipeline, require_titan

    require_titan("0.3.0")
    titan = request.getfixturevalue("titan")
    table, split, costs = tmp_path / "plan.csv", titan.folder / "plan.json", tmp_path / "costs.toml"
    if cut == "evenly":
        ranks, options = 4, "--costs 1,1.4,0.6 --checkpointing none --memory-limit 2.6 --placement single"
    else:
        ranks, options = 2, f"--costs-file {costs} --placement v --json"
        blocks = (Layer((f"layers.{number}",), 1, 1, 1, 1) for number in range(6))
        head = Layer(("norm", "lm_head"), 4, 4, 4, 1)
        dump_costs(JobCosts(LayerCosts((Layer(("tok_embeddings",), 0.1, 0, 0.1, 0), *blocks, head))), costs)
    split.write_text(run(f"-p {ranks} -m 4 {options} -o {table} {QUICK}").stdout)
    module = () if cut == "evenly" else ("--module", "job_configs", "--config", "llama3_split")
    job = titan.train(*pipeline(str(table), ranks), *module, num_ranks=ranks)
    print(job.log)
    assert_trains_alike(job, titan.without_pipeline())
    assert f"Using zbpipe's pipeline schedule {table} with 4 microbatches" in job.log
    if cut == "as planned":
        parts = json.loads(split.read_text())["module_fqns_per_model_part"]
        assert parts[-1] == ["norm", "lm_head"]
        assert f"building stage_idx 3 with modules {parts[3]}" in job.log
