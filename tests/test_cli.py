"""The command as people and scripts meet it: output, JSON keys, one-line errors, and no torch on the way."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from commands import answer, at_small_size, json_of, run
from documents import blocks
from pages import page_data

import zbpipe
from zbpipe import OpKind, Placement, cli, generate, load_costs
from zbpipe.costs import JobCosts, dump_costs
from zbpipe.costs.model import CostModel
from zbpipe.costs.transformer import Checkpointing, typical_costs
from zbpipe.costs.transport import Transport
from zbpipe.schedule import registry
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.post_validation import period
from zbpipe.simulator.simulation import simulate

pytestmark = pytest.mark.usefixtures("short_search")

SIMULATE_KEYS = {"schedule", "ranks", "microbatches", "stages_per_rank", "makespan", "bubble", "lower_bound"}
HUGE = 10**20 - 1
COMMANDS = ("list", "show", "simulate", "compare", "plan", "export", "validate")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a schedule for 3 ranks and 4 microbatches in mine.csv, the cost files of the page, and others."""
    monkeypatch.chdir(tmp_path)
    for name, block in zip(("stages", "layers"), blocks("docs/costs-file.md", "toml")[:2], strict=True):
        Path(f"{name}.toml").write_text(block.code)
    dump_costs(JobCosts(CostModel((1,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)), "three.toml")
    tables = {"mine": zbpipe.generate("ZBV", 3, 4).to_csv(), "stuck": "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"}
    tables["twice"] = "0F0,0B0,1F0,1B0\n1F0,1B0\n"
    for name, content in tables.items():
        Path(f"{name}.csv").write_text(content)
    Path("bad.toml").write_text("m = 3\n")
    return tmp_path


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test register schedules of its own."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@cache
def compared(line: str) -> list[dict[str, Any]]:
    """The records of `zbpipe compare` of the built-in schedules, which are only looked at."""
    found: list[dict[str, Any]] = json_of(f"compare {line}")
    return found


def all_names() -> set[str]:
    return {algorithm.name for algorithm in registry.schedules().values()}


# list


def test_list_has_all_schedules() -> None:
    _, *lines = answer("list").splitlines()
    assert len(lines) == len(registry.schedules())
    listed = {entry["name"]: entry for entry in json_of("list")}
    assert listed.keys() == all_names()
    for name, entry in listed.items():
        assert any(line.startswith(f"{name} ") and line.endswith(entry["summary"]) for line in lines)
    assert listed["ZBV"] == {
        **{"name": "ZBV", "stages_per_rank": 2, "placement": "v", "source": "zbpipe"},
        "summary": registry.resolve("ZBV").summary,
    }


# show


def test_show_draws_and_sums_up() -> None:
    shown = answer("show 1f1b -p 2 -m 2")
    assert "rank 0 F0 F1 ······B0    ···B1" in shown
    assert shown.splitlines()[-2].startswith(
        "1F1B, 2 ranks, 2 microbatches: makespan 9, bubble 33.3%, peak activations 2"
    )
    assert shown.splitlines()[-1] == (
        "drawn with F 1, I 1, W 1, transfer 0; memory typical of a transformer with selective checkpointing"
    )


def test_show_writes_the_files_that_it_is_asked_for(here: Path) -> None:
    output = answer(
        "show ZBV -p 2 -m 3 --costs typical --checkpointing full --svg a.svg --html b.html --perfetto c.json"
    )
    assert [line.split()[0] for line in output.splitlines()] == ["ZBV,", "drawn", "wrote", "wrote", "wrote"]
    picture, page = ((here / name).read_text() for name in ("a.svg", "b.html"))
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert len(page_data(page)["ranks"]) == 2
    assert json.loads((here / "c.json").read_text())["traceEvents"]
    assert "rank 0" not in output, "the picture is in the files"
    words = "F 1, I 1.99, W 0.67, transfer 0; times and memory typical of a transformer with full checkpointing"
    assert words in picture
    assert words in page


def test_a_long_way_makes_no_endless_picture() -> None:
    """Nearly all of the timeline is idle."""
    shown = answer("show ZBV -p 2 -m 2 --comm 1e50")
    assert len(shown.splitlines()) < 12
    assert "small letters: the rank is idle for more than half of it" in shown


# simulate


def test_simulate_as_json() -> None:
    schedule = zbpipe.generate("ZBV", 4, 8)
    expected = simulate(schedule, typical_costs(schedule.placement, times=(1, 1.2, 0.8), comm=0.1))
    usual = generate("1F1B", 4, 8)
    peak = max(simulate(usual, typical_costs(usual.placement, times=(1, 1.2, 0.8))).peak_memory)
    record = json_of("simulate zbv -p 4 -m 8 --costs 1,1.2,0.8 --comm 0.1")
    assert record.keys() >= SIMULATE_KEYS | {"idle", "period"}
    assert [record[key] for key in ("schedule", "ranks", "microbatches", "stages_per_rank")] == ["ZBV", 4, 8, 2]
    for key in ("makespan", "bubble", "lower_bound", "peak_activations", "peak_memory"):
        assert record[key] == pytest.approx(getattr(expected, key))
    assert record["memory_to_1f1b"] == pytest.approx(max(expected.peak_memory) / peak)
    assert record["period"] == pytest.approx(period(schedule, expected.costs))
    assert [list(idle.values()) for idle in record["idle"]] == [pytest.approx(list(idle)) for idle in expected.idle]
    for option in ("", *(f"--checkpointing {each}" for each in Checkpointing)):
        usual_times = simulate(
            schedule, typical_costs(schedule.placement, option.split()[-1] if option else "selective")
        )
        found = json_of(f"simulate ZBV -p 4 -m 8 {option}")
        assert (found["makespan"], found["peak_memory"]) == (usual_times.makespan, [*usual_times.peak_memory])
    assert json_of("simulate Interleaved1F1B -p 2 -m 4 --stages-per-rank 3")["stages_per_rank"] == 3


def test_simulate_for_people() -> None:
    lines = answer("simulate 1F1B -p 2 -m 2 --costs 1,1,1").splitlines()
    assert lines[0].startswith("1F1B, 2 ranks, 2 microbatches: makespan 9, bubble 33.3%")
    assert lines[1] == "memory: the worst rank holds 2.32, 1.00x of 1F1B's worst rank (2.32)"
    assert [re.split(r"\s{2,}", line) for line in lines[-4:-2]] == [
        ["rank 0", "6", "2", "0", "1", "2.32"],
        ["rank 1", "6", "1", "0", "2", "1.32"],
    ]
    assert lines[-1] == "F 1, I 1, W 1, transfer 0; memory typical of a transformer with selective checkpointing"


# Cost files


@pytest.fixture
def two_stages(tmp_path: Path) -> str:
    """A cost file with a stage on each of two ranks, which has I and W in bytes, and a limit."""
    gib = 2.0**30
    stages = CostModel((1, 1), (2, 2), (0.5, 0.5), (gib, gib), freed_by_i=-1, working={OpKind.I: gib, OpKind.B: gib})
    file = str(tmp_path / "two.toml")
    dump_costs(JobCosts(stages, Placement.loop(2), memory_limit=4.5 * gib, transport=Transport.ONE_QUEUE), file)
    return file


def test_every_command_takes_a_cost_file(two_stages: str, tmp_path: Path) -> None:
    """Ranks, times, transport and limit are the file's."""
    file, costs = f"--costs-file {two_stages}", load_costs(two_stages).costs
    assert isinstance(costs, CostModel)
    expected = simulate(generate("ZBH1", 2, 4), costs, transport="one queue")
    found = json_of(f"simulate ZBH1 -m 4 {file}")
    assert (found["transport"], found["makespan"]) == ("one queue", expected.makespan)
    assert found["peak_memory"] == [*expected.peak_memory]
    assert json_of(f"simulate ZBH1 -m 4 {file} --transport ideal")["transport"] == "ideal"
    assert f"drawn with costs of {two_stages}" in answer(f"show ZBH1 -m 4 {file}")
    assert "8 op" not in answer(f"export ZB1P -m 4 {file} -o {tmp_path / 'a.csv'}")
    compared = {entry["schedule"]: entry for entry in json_of(f"compare -m 4 {file}")}
    assert {"1F1B", "ZBH1", "GPipe"} <= compared.keys()
    assert "ZBV" not in compared
    assert compared["1F1B"]["fits"]
    assert not compared["GPipe"]["fits"], "the limit of the file"
    assert re.search(r"^1F1B +torch +1 .* 1.00x +3 GiB ", answer(f"compare -m 4 {file}"), re.MULTILINE)


def test_steps_in_a_row_may_overlap() -> None:
    one = json_of("simulate 1F1B -p 4 -m 8")["makespan"]
    three = json_of("simulate 1F1B -p 4 -m 8 --steps 3")
    assert (three["steps"], three["makespan"]) == (3, pytest.approx(3 * one))
    assert (
        json_of("simulate ZBH2 -p 4 -m 8 --steps 3 --no-sync")["makespan"]
        < (json_of("simulate ZBH2 -p 4 -m 8 --steps 3")["makespan"])
    )


@pytest.mark.usefixtures("extra")
def test_costs_reach_schedules_that_look_at_them() -> None:
    seen: list[CostModel | None] = []

    @zbpipe.register("Curious")
    def curious(ranks: int, microbatches: int, costs: CostModel | None = None) -> Schedule:
        seen.append(costs)
        return zbpipe.generate("1F1B", ranks, microbatches)

    assert json_of("simulate curious -p 2 -m 2 --costs 3,2,1 --comm 0.5")["schedule"] == "Curious"
    assert seen[0] is not None
    assert (seen[0].f, seen[0].i, seen[0].w) == ((3, 3), (2, 2), (1, 1))
    assert seen[0].transfer(0, 1) == 0.5


# compare


def test_compare_sorts_by_makespan_and_tells_the_gap() -> None:
    found = compared("-p 4 -m 8")
    assert {entry["schedule"] for entry in found} == all_names()
    assert all(entry.keys() >= SIMULATE_KEYS | {"gap", "fits"} for entry in found)
    makespans = [round(entry["makespan"], 6) for entry in found if entry["runs"]]
    assert makespans == sorted(makespans)
    assert makespans[0] < makespans[-1]
    for entry in found:
        assert entry["gap"] == pytest.approx(entry["makespan"] / entry["lower_bound"] - 1, abs=1e-9)
        assert entry["fits"]
    # Those that take any number of stages have it; the others keep their own.
    stages = {entry["schedule"]: entry["stages_per_rank"] for entry in compared("-p 4 -m 8 --stages-per-rank 3")}
    assert stages["Interleaved1F1B"] == stages["LoopedBFS"] == 3
    assert (stages["1F1B"], stages["ZB"]) == (1, 2)


@pytest.mark.parametrize("checkpointing", Checkpointing)
def test_torchs_split_is_last_where_it_fails(checkpointing: Checkpointing) -> None:
    found = compared(f"-p 4 -m 8 --checkpointing {checkpointing}")
    torchs, fails = {"DualPipeV", "InterleavedZeroBubble", "ZBVZeroBubble"}, checkpointing is not Checkpointing.NONE
    assert {entry["schedule"] for entry in found if not entry["runs"]} == (torchs if fails else set())
    assert ({entry["schedule"] for entry in found[-3:]} == torchs) == fails
    steps = {entry["schedule"]: entry["makespan"] for entry in found}
    assert steps["DualPipeVSplit"] == steps["DualPipeV"]
    assert steps["InterleavedZeroBubbleSplit"] == steps["InterleavedZeroBubble"]


@pytest.mark.parametrize("limit", ["", "--memory-limit 1.6x"])
def test_compare_recommends_the_shortest_step_within_the_memory(limit: str) -> None:
    found = compared(f"-p 4 -m 8 {limit}")
    most = 1.6 if limit else 1.02
    fitting = [entry for entry in found if entry["runs"] and entry["memory_to_1f1b"] <= most * (1 + 1e-9)]
    best = min(fitting, key=lambda entry: entry["makespan"])
    assert [entry["schedule"] for entry in found if entry["recommended"]] == [best["schedule"]]
    steps = {entry["schedule"]: entry["makespan"] for entry in found}
    for entry in found:
        for other in ("1F1B", "Interleaved1F1B"):
            assert entry[f"step_to_{other.lower()}"] == entry["makespan"] / steps[other]
    text = answer(f"compare -p 4 -m 8 {limit}")
    (line,) = [line for line in text.splitlines() if line.endswith(" recommended")]
    assert line.startswith(f"{best['schedule']} ")
    assert f" {best['step_to_1f1b'] - 1:+.1%} " in line
    assert f"within {'the memory limit' if limit else '1.02x of 1F1B'}" in text


def test_ties_go_to_less_memory_and_then_to_zbpipes_split() -> None:
    names = [entry["schedule"] for entry in compared("-p 4 -m 16 --checkpointing none")]
    assert names.index("DualPipeVSplit") + 1 == names.index("DualPipeV"), "the same ops"
    assert names.index("1F1B") < names.index("GPipe"), "the same makespan"
    lines = answer("compare -p 4 -m 16 --checkpointing none").splitlines()
    sources = [line.split()[1] for line in lines if line.startswith(("DualPipeVSplit ", "DualPipeV ", "1F1B "))]
    assert sources == ["zbpipe", "torch*", "torch"]


@pytest.mark.parametrize(
    ("limit", "options", "number"),
    [("4.5", "", 4.5), *(("1.0x", f"--checkpointing {each}", None) for each in Checkpointing)],
)
def test_what_exceeds_the_memory_limit_comes_last_and_is_marked(limit: str, options: str, number: float | None) -> None:
    found = compared(f"-p 4 -m 8 {options} --memory-limit {limit}")
    fits = [entry["fits"] for entry in found if entry["runs"]]
    assert fits == sorted(fits, reverse=True)
    assert set(fits) == {True, False}
    for entry in found:
        within = max(entry["peak_memory"]) <= number + 1e-6 if number else entry["memory_to_1f1b"] <= 1 + 1e-9
        assert entry["fits"] == within
    assert next(entry for entry in found if entry["schedule"] == "1F1B")["fits"] or number
    if number:
        lines = answer(f"compare -p 4 -m 8 --memory-limit {limit}").splitlines()[3 : 3 + len(found)]
        assert [line.split()[0] for line in lines] == [entry["schedule"] for entry in found]
        assert [line.endswith("over the limit of 4.5") for line in lines] == [not entry["fits"] for entry in found]


@pytest.mark.usefixtures("extra")
@pytest.mark.parametrize(
    "command", ["compare -p 2 -m 3 --json", "plan -p 2 -m 3 --budget 1e4 --placement single --json"]
)
def test_the_mistakes_of_one_schedule_leave_the_others(command: str) -> None:
    whole = generate("1F1B", 2, 3)

    def fail(error: Exception) -> None:
        raise error

    wrong: dict[str, Callable[[], Any]] = {
        "Raises": lambda: fail(KeyError("a bug")),
        "Odd": lambda: fail(ValueError("Odd needs an odd number of ranks")),
        "Other": lambda: generate("1F1B", 2, 4),
        "Lists": lambda: [[]],
        "Empty": lambda: replace(whole, ops=((), ())),
        "Texts": lambda: replace(whole, ops=(("0F0",), ())),  # type: ignore[arg-type]
        "Swapped": lambda: replace(whole, ops=whole.ops[::-1]),
        "Doubled": lambda: replace(whole, ops=tuple((*ops, ops[0]) for ops in whole)),
        "Stuck": lambda: replace(whole, ops=tuple(ops[::-1] for ops in whole)),
    }
    usual = all_names()
    for name, make in wrong.items():
        zbpipe.register(name, summary="is wrong")(lambda ranks, microbatches, make=make: make())
    result = run(command)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"skipped {name}" for name in wrong]
    assert lines[:2] == ["skipped Raises: KeyError: 'a bug'", "skipped Odd: Odd needs an odd number of ranks"]
    found = json.loads(result.stdout)
    assert {row["schedule"] for row in (found if isinstance(found, list) else found["named"])} == usual


def test_a_file_that_cannot_be_written_is_refused_before_the_work(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by permissions, which root does not notice."""

    def worked(*_: object, **__: object) -> None:
        raise AssertionError("this came too late")

    monkeypatch.setattr("zbpipe.schedule.registry.Algorithm.make", worked)
    monkeypatch.setattr(os, "access", lambda file, mode: False)
    commands = ("export ZBV -p 2 -m 2 -o", "show ZBV -p 2 -m 2 --svg", "plan -p 2 -m 2 -o")
    for line in commands:
        for file in ("new", "mine.csv"):
            result = run(f"{line} {file}")
            assert result.exit_code == 2, (line, result.output)
            assert result.stderr.count("\n") == 1
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr("zbpipe.views.svg.svg", lambda *_, **__: (here / "a").mkdir() or "")
    result = run("show ZBV -p 2 -m 2 --svg a")
    assert (result.exit_code, result.stderr[:47]) == (2, "Error: a: Is a directory; name a file in a fold")


# export, validate, and files


def test_what_export_writes_can_be_read_validated_and_shown(here: Path) -> None:
    assert answer("export ZBV -p 3 -m 5 -o out.csv") == "wrote out.csv: ZBV, 3 ranks, 90 ops\n"
    assert (here / "out.csv").read_text() == zbpipe.generate("ZBV", 3, 5).to_csv()
    for line, name in (("out.csv", "out.csv"), ("zbv -p 3 -m 5", "ZBV")):
        assert answer(f"validate {line}") == f"{name}: valid; 3 ranks, 6 stages, 5 microbatches, 90 ops\n"
    # A file knows its size.
    lines = ("out.csv", "out.csv -p 3 -m 5", "ZBV -p 3 -m 5")
    from_file, same, from_name = (json_of(f"simulate {line}") for line in lines)
    assert from_file == same == from_name | {"schedule": "out.csv"}
    assert "4 stages" in answer("validate LoopedBFS -p 2 -m 2 --stages-per-rank 2")
    assert answer("validate GPipe -p 2 -m 4 --memory-limit 1", code=1).startswith("memory: rank 0")


def test_validate_prints_every_finding(here: Path) -> None:
    table = (here / "mine.csv").read_text()
    (here / "bad.csv").write_text(table.replace("0W3", "").replace("5F0,", "", 1))
    result = run("validate bad.csv")
    findings = zbpipe.validate(Schedule.from_csv((here / "bad.csv").read_text()))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [str(finding) for finding in findings]
    assert len(findings) > 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0F0,0X0\n", "table: row 1 (rank 0), column 2: '0X0' is not an op"),
        ("0F0,0B0\n".encode("utf-16"), "it is not UTF-8 text"),
        (b"," * (2**25 + 1), "it has more than 32 MiB"),
    ],
)
def test_validate_says_in_a_line_what_makes_no_sense(here: Path, content: bytes, words: str) -> None:
    (here / "bad.csv").write_bytes(content)
    result = run("validate bad.csv")
    assert result.exit_code == 1
    assert result.stdout.count("\n") == 1
    assert words in result.stdout


# What goes wrong


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("show ZBW -p 2 -m 2", "did you mean 'ZB'?"),
        ("simulate ZBV -p 2", "ZBV needs -m"),
        ("simulate ZBV -m 2", "ZBV needs -p"),
        ("compar -p 2 -m 2", "No such command 'compar'. Did you mean 'compare'? See `zbpipe --help`."),
        ("show ZBV -p 2 -m 2 --costs a.toml", "'a.toml' names a file; write `--costs-file a.toml`"),
        ("show ZBV -p 0 -m 2", "0 is not in the range"),
        ("show ZBV -p 2 -m 2 --costs 1,2", "'1,2' is not three numbers; write for example 1,1,0.8"),
        ("show ZBV -p 2 -m 2 --costs 0,0,0", "'0,0,0'"),
        ("show ZBV -p 2 -m 2 --comm inf", "comm = inf: give a number from 0"),
        ("compare -p 2 -m 2 --memory-limit 1y", "'1y' is not an amount: write 1.2x"),
        ("compare -p 2 -m 2 --memory-limit 2GiB", "'2GiB' is in bytes, but nothing here was measured in bytes"),
        ("compare -m 2 --memory-limit 1x --costs-file three.toml -p 2", "do not give: 3 stages cannot become 2"),
        ("compare -p 2 -m 2 --checkpointing op", "'op' is not one of 'none', 'selective', 'full'"),
        ("compare -m 2 --checkpointing full --costs-file three.toml", "the file already has the memory of its checkp"),
        ("show ZBV -m 2 --costs 1,1,1 --costs-file three.toml", "exclude each other: the file already has times"),
        ("simulate ZBV -m 2 --comm 1 --costs-file three.toml", "the file already has the times of messages"),
        ("compare -m 2 --costs-file none.toml", "'none.toml' does not exist"),
        ("simulate ZBV -p 2 -m 2 --costs-file three.toml", "the costs are for 3 stages, but the placement has 4"),
        ("simulate ZBV -p 2 -m 2 --steps 0", "0 is not in the range"),
        ("show none.csv", "'none.csv' cannot be read"),
        ("show mine.py::mine -p 2 -m 2", "'mine.py::mine' does not name a function: give file.py:function"),
        ("show mine.csv -p 2", "mine.csv is a table for 3 ranks, but the job has 2"),
        ("show mine.csv -m 5", "mine.csv is a table for 4 microbatches, but the job has 5"),
        ("show stuck.csv", "stuck.csv cannot run: deadlock"),
        ("show twice.csv", "twice.csv cannot run: placement"),
        ("validate none.csv", "'none.csv' does not exist"),
        ("validate ZBV -p 2", "ZBV needs -m"),
        ("validate mine.csv -p 2", "mine.csv is a table for 3 ranks, not 2: omit that option"),
        ("validate mine.csv -m 5", "mine.csv is a table for 4 microbatches, not 5"),
        ("show ZBV -p 2 -m 2 --svg no/such.svg", "'no/such.svg' is not in a folder that exists and that you can write"),
        ("show ZBV -p 2 -m 2 --perfetto mine.csv/a.json", "'mine.csv/a.json' is not in a folder"),
        (f"show ZBV -p 2 -m 2 --svg {300 * 'x'}", "cannot be written: File name too long"),
        ("show ZBV -p 2 -m 2 --html .", "is a directory"),
        ("export ZBV -p 4 -m 8 -o plan.txt", "'plan.txt' has to end in .csv"),
        (f"demo --steps {HUGE}", f"{HUGE} is not in the range"),
        (f"show ZBV -p {HUGE} -m 2", f"{HUGE} ranks with 2 stage(s) each"),
        (f"show ZBV -p 2 -m {HUGE}", f"{HUGE} microbatches are too many for them: use at most 65536"),
        (f"compare -p {HUGE} -m 2", f"a pipeline of {HUGE} ranks has {HUGE} stages, but at most 1024 are possible"),
        (f"compare -p 2 -m {HUGE}", f"{HUGE} microbatches are too many for them: use at most 131072"),
        ("show /dev/zero.csv", "cannot be read"),
        ("show ZBV -p 2 -m 2 --costs 1e200,1,1", "'1e200,1,1' must be three times between 0 and 1e+100"),
        ("show ZB -p 4 -m 8 --memory-limit 0.1x", "small for ZB: one microbatch peaks at 0.3057x"),
        (
            "show ZBV -p 4 -m 8 --memory-limit 1x",
            "memory-limit is for the schedules that adapt to one, Auto, ZB, ZBH1",
        ),
        ("simulate VHalf -p 4 -m 8 --memory-limit 1x", "not for VHalf: omit it"),
        ("compare -p 4 -m 8 --transport nccl", "use one of 'ideal', 'one-queue', 'queue-per-peer', 'shared-with-comp"),
        ("export ZBV -p 2 -m 2", "'-o'"),
        ("show", "Missing argument 'NAME'. See `zbpipe show --help`."),
        ("nothing", "No such command 'nothing'. See `zbpipe --help`."),
        ("plan -m 4", "Missing option '-p'"),
        ("plan -p 4 -m 8 --memory-limit 0.1microbatches", "too small: one microbatch peaks at 1.321 microbatches on"),
        ("plan -m 4 --memory-limit 1GiB --costs-file stages.toml", "1GiB is too small: one microbatch peaks"),
        (
            "plan -p 2 -m 4 --placement vv",
            "unknown placement 'vv'; give one of single, loop, v, wave, the rank of each stage",
        ),
        ("plan -p 3 -m 4 --placement 0-1", "is for 2 ranks, but the job has 3"),
        ("plan -p 2 -m 4 --objective speed", "'speed' is not one of 'makespan', 'period'"),
        ("plan -p 2 -m 4 --budget inf", "budget=inf would take days"),
        (f"plan -p {HUGE} -m 4", f"a plan for {HUGE} ranks has {HUGE} stages, but at most 1024 are possible"),
        ("plan -p 2 -m 4 --costs-file stages.toml --costs 1,1,1", "--costs and --costs-file stages.toml exclude"),
        ("plan -m 4 --costs-file stages.toml --placement v", "--placement and the rank_of in stages.toml exclude"),
        ("plan -p 3 -m 4 --costs-file stages.toml", "rank_of = [0, 1, 1, 0], which is for 2 ranks, got 3: use 2"),
        ("plan -m 4 --costs-file layers.toml", "Missing option '-p'"),
        ("plan -p 2 -m 4 --costs-file bad.toml", "cost file 'bad.toml': m = 3: unknown key"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(here: Path, line: str, words: str) -> None:
    result = run(line)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    assert words in result.stderr


def test_a_mistake_of_zbpipe_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(sys.modules["zbpipe.cli.named"], "simulate", broken)
    assert isinstance(run("simulate ZBV -p 2 -m 2").exception, KeyError)


# The command itself


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_in_the_help_work(here: Path, command: str) -> None:
    examples = re.findall(r"^ +zbpipe (.*)$", answer(f"{command} --help"), re.MULTILINE)
    assert examples
    for example in examples:
        assert example.split()[0] == command
        answer(shlex.join(at_small_size(shlex.split(example))))


def test_without_a_command_the_help_is_shown() -> None:
    assert isinstance(cli.main, click.Group)
    lines = answer("").splitlines()
    for command in (*COMMANDS, "demo"):
        assert any(line.strip().startswith(f"{command} ") for line in lines)


LIGHT = """
import sys, zbpipe
from zbpipe.cli import main
for line in sys.argv[1:]:
    if line == "plan":
        zbpipe.generate("ZB1P", 4, 8), zbpipe.plan
    else:
        main(line.split(), standalone_mode=False)
    light = line.startswith(("show", "plan")) and "budget" not in line
    assert not ({"torch", "numba", "numpy"} if light else {"torch"}) & sys.modules.keys(), line
    assert line == "plan" or not light or "zbpipe.planner.plan" not in sys.modules, line
"""


def test_no_command_imports_torch_and_only_the_search_needs_its_libraries(here: Path) -> None:
    """Neither does the package itself, nor a schedule that a search makes."""
    show = "show ZBV -p 4 -m 8 --svg a.svg --html a.html --perfetto a.json"
    size = "ZBV -p 4 -m 8"
    others = ("list", f"simulate {size}", "compare -p 4 -m 8", f"export {size} -o a.csv", "validate mine.csv")
    lines = (show, "plan --help", "plan", *others, "plan -p 2 -m 2 --budget 1e4")
    subprocess.run([sys.executable, "-c", LIGHT, *lines], check=True, stdout=subprocess.DEVNULL)


def test_the_installed_command_draws_and_refuses(here: Path) -> None:
    zbpipe_command = Path(sys.executable).with_name("zbpipe")

    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([zbpipe_command, *arguments], capture_output=True, text=True, check=False)

    assert "rank 2 " in ended("show", "mine.csv").stdout
    refused = ended("show", "ZBW", "-p", "2", "-m", "2")
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: unknown schedule 'ZBW'")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["ZB", "ZBLoop"])
def test_lean_schedules_keep_to_the_limit(name: str, here: Path) -> None:
    """By name, and in the comparison, where they would exceed the limit otherwise."""
    costs = "-p 4 -m 8 --checkpointing full"
    roomy, tight = (json_of(f"simulate {name} {costs} --memory-limit {limit}x") for limit in (1.3, 0.8))
    assert tight["memory_to_1f1b"] <= 0.8
    assert roomy["memory_to_1f1b"] <= 1.3
    assert roomy["makespan"] < tight["makespan"]
    (found,) = (each for each in compared(f"{costs} --memory-limit 0.8x") if each["schedule"] == name)
    assert (found["fits"], found["makespan"]) == (True, tight["makespan"])
    answer(f"export {name} {costs} --memory-limit 0.8x -o lean.csv")
    assert json_of(f"simulate lean.csv {costs}")["makespan"] == tight["makespan"]
