"""The command as people and scripts meet it: output, JSON keys, one-line errors, and no torch on the way."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner, Result

import zbpipe
from zbpipe import cli, generate, registry
from zbpipe.costs import CostModel
from zbpipe.ir import Schedule
from zbpipe.simulation import simulate

SIMULATE_KEYS = {
    "schedule",
    "ranks",
    "microbatches",
    "stages_per_rank",
    "makespan",
    "bubble",
    "peak_activations",
    "lower_bound",
}
HUGE = 10**20 - 1
COMMANDS = ("list", "show", "simulate", "compare", "plan", "export", "validate")


def run(line: str) -> Result:
    return CliRunner().invoke(cli.main, shlex.split(line))


def answer(line: str) -> str:
    result = run(line)
    assert result.exit_code == 0, result.output
    return result.stdout


def json_of(line: str) -> Any:
    return json.loads(answer(f"{line} --json"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write into, with a schedule for 3 ranks and 4 microbatches in mine.csv."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(registry.generate("ZBV", 3, 4).to_csv())
    return tmp_path


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test register schedules of its own."""
    monkeypatch.setattr(registry, "_registered", dict(registry.schedules()))


# list


def test_list_has_all_schedules() -> None:
    lines = answer("list").splitlines()
    assert len(lines) == 1 + len(registry.schedules())
    for algorithm in registry.schedules().values():
        assert any(line.startswith(f"{algorithm.name} ") and line.endswith(algorithm.summary) for line in lines)


def test_list_as_json() -> None:
    listed = json_of("list")
    assert {entry["name"] for entry in listed} == {algorithm.name for algorithm in registry.schedules().values()}
    assert all(set(entry) == {"name", "stages_per_rank", "placement", "source", "summary"} for entry in listed)
    zbv = next(entry for entry in listed if entry["name"] == "ZBV")
    assert (zbv["stages_per_rank"], zbv["placement"], zbv["source"]) == (2, "v", "zbpipe")


# show


def test_show_draws_and_sums_up() -> None:
    shown = answer("show 1f1b -p 2 -m 2")
    assert "rank 0 F0 F1 ······B0    ···B1" in shown
    assert shown.splitlines()[-1].startswith(
        "1F1B, 2 ranks, 2 microbatches: makespan 9, bubble 33.3%, peak activations 2"
    )


def test_show_writes_the_files_that_it_is_asked_for(here: Path) -> None:
    output = answer("show ZBV -p 2 -m 3 --costs 1,2,0.5 --comm 0.1 --svg a.svg --html b.html --perfetto c.json")
    assert [line.split()[0] for line in output.splitlines()] == ["ZBV,", "wrote", "wrote", "wrote"]
    assert ElementTree.fromstring((here / "a.svg").read_text()).tag.endswith("svg")
    assert '"1F2"' in (here / "b.html").read_text()
    assert json.loads((here / "c.json").read_text())["traceEvents"]
    assert "rank 0" not in output, "the picture is in the files"


def test_a_long_way_makes_no_endless_picture() -> None:
    """Nearly all of the timeline is idle."""
    shown = answer("show ZBV -p 2 -m 2 --comm 1e50")
    assert len(shown) < 1e6
    assert "24 ops are too short for a column" in shown


def test_stages_per_rank_reach_the_schedule() -> None:
    assert json_of("simulate Interleaved1F1B -p 2 -m 4 --stages-per-rank 3")["stages_per_rank"] == 3


# simulate


def test_simulate_as_json() -> None:
    schedule = registry.generate("ZBV", 4, 8)
    expected = simulate(schedule, CostModel.uniform(schedule.placement, 1, 1.2, 0.8, comm=0.1))
    record = json_of("simulate zbv -p 4 -m 8 --costs 1,1.2,0.8 --comm 0.1")
    assert record.keys() >= SIMULATE_KEYS | {"idle", "longest_rank_span"}
    assert (record["schedule"], record["ranks"], record["microbatches"]) == ("ZBV", 4, 8)
    assert record["stages_per_rank"] == 2
    assert record["makespan"] == pytest.approx(expected.makespan)
    assert record["bubble"] == pytest.approx(expected.bubble)
    assert record["peak_activations"] == pytest.approx(list(expected.peak_activations))
    assert record["lower_bound"] == pytest.approx(expected.lower_bound)
    assert record["longest_rank_span"] == pytest.approx(expected.longest_rank_span)
    assert [list(idle.values()) for idle in record["idle"]] == [pytest.approx(list(idle)) for idle in expected.idle]


def test_simulate_for_people() -> None:
    lines = answer("simulate 1F1B -p 2 -m 2").splitlines()
    assert lines[0].startswith("1F1B, 2 ranks, 2 microbatches: makespan 9, bubble 33.3%")
    assert [re.split(r"\s{2,}", line) for line in lines[-2:]] == [
        ["rank 0", "6", "2", "0", "1", "2"],
        ["rank 1", "6", "1", "0", "2", "1"],
    ]


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
        return registry.generate("1F1B", ranks, microbatches)

    assert json_of("simulate curious -p 2 -m 2 --costs 3,2,1 --comm 0.5")["schedule"] == "Curious"
    assert seen[0] is not None
    assert (seen[0].f, seen[0].i, seen[0].w) == ((3, 3), (2, 2), (1, 1))
    assert seen[0].transfer(0, 1) == 0.5


# compare


def test_compare_sorts_by_makespan_and_tells_the_gap() -> None:
    compared = json_of("compare -p 4 -m 8")
    assert {entry["schedule"] for entry in compared} == {algorithm.name for algorithm in registry.schedules().values()}
    assert all(entry.keys() >= SIMULATE_KEYS | {"gap", "fits"} for entry in compared)
    makespans = [round(entry["makespan"], 6) for entry in compared]
    assert makespans == sorted(makespans)
    assert makespans[0] < makespans[-1]
    for entry in compared:
        assert entry["gap"] == pytest.approx(entry["makespan"] / entry["lower_bound"] - 1, abs=1e-9)
        assert entry["fits"]


def test_what_exceeds_the_memory_limit_comes_last_and_is_marked() -> None:
    limit = 4
    compared = json_of(f"compare -p 4 -m 8 --memory-limit {limit}")
    fits = [entry["fits"] for entry in compared]
    assert fits == sorted(fits, reverse=True)
    assert True in fits
    assert False in fits
    for entry in compared:
        assert entry["fits"] == (max(entry["peak_activations"]) <= limit + 1e-6)
    lines = answer(f"compare -p 4 -m 8 --memory-limit {limit}").splitlines()[1 : 1 + len(compared)]
    assert [line.split()[0] for line in lines] == [entry["schedule"] for entry in compared]
    assert [line.endswith("over the limit of 4") for line in lines] == [not fit for fit in fits]


@pytest.mark.usefixtures("extra")
def test_compare_leaves_out_what_cannot_have_these_numbers() -> None:
    @zbpipe.register("Even")
    def even(ranks: int, microbatches: int) -> Schedule:
        raise ValueError("Even needs an even number of ranks")

    result = run("compare -p 3 -m 4 --json")
    assert result.exit_code == 0
    assert result.stderr == "left out Even: Even needs an even number of ranks\n"
    assert len(json.loads(result.stdout)) == len(registry.schedules()) - 1


@pytest.mark.usefixtures("extra")
@pytest.mark.parametrize(
    "command", ["compare -p 2 -m 3 --json", "plan -p 2 -m 3 --budget 1e4 --placement single --json"]
)
def test_the_mistakes_of_one_schedule_leave_the_others(command: str) -> None:
    whole = generate("1F1B", 2, 3)

    @zbpipe.register("Raises")
    def raises(ranks: int, microbatches: int) -> Schedule:
        raise KeyError("a bug")

    wrong: dict[str, Callable[[], Any]] = {
        "Other": lambda: generate("1F1B", 2, 4),
        "Lists": lambda: [[]],
        "Empty": lambda: replace(whole, ops=((), ())),
        "Texts": lambda: replace(whole, ops=(("0F0",), ())),  # type: ignore[arg-type]
        "Swapped": lambda: replace(whole, ops=whole.ops[::-1]),
        "Doubled": lambda: replace(whole, ops=tuple((*ops, ops[0]) for ops in whole)),
        "Stuck": lambda: replace(whole, ops=tuple(ops[::-1] for ops in whole)),
    }
    for name, make in wrong.items():
        zbpipe.register(name)(lambda ranks, microbatches, make=make: make())
    result = run(command)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"left out {name}" for name in ("Raises", *wrong)]
    assert lines[0] == "left out Raises: KeyError: 'a bug'"
    found = json.loads(result.stdout)
    rows = found if isinstance(found, list) else found["named"]
    assert {row["schedule"] for row in rows} == {algorithm.name for algorithm in registry.schedules().values()} - {
        "Raises",
        *wrong,
    }


def test_a_file_that_cannot_be_written_is_refused_before_the_work(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by permissions, which root does not notice."""

    def worked(*_: object, **__: object) -> None:
        raise AssertionError("this came too late")

    monkeypatch.setattr("zbpipe.registry.generate", worked)
    monkeypatch.setattr("zbpipe.demo.comparison.run_demo", worked)
    monkeypatch.setattr(os, "access", lambda file, mode: False)
    for line in (
        "export ZBV -p 2 -m 2 -o",
        "show ZBV -p 2 -m 2 --svg",
        "plan -p 2 -m 2 -o",
        "demo --json",
        "demo --keep",
    ):
        for file in ("new", "mine.csv"):
            result = run(f"{line} {file}")
            assert result.exit_code == 2, (line, result.output)
            assert result.stderr.count("\n") == 1


def test_a_result_of_the_demo_that_cannot_be_written_after_all(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbpipe.demo.comparison.run_demo", lambda *_: (here / "a").mkdir() or [])
    result = run("demo --json a")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: a: Is a directory; name a file")


# export, validate, and files


def test_what_export_writes_can_be_read_validated_and_shown(here: Path) -> None:
    assert answer("export ZBV -p 3 -m 5 -o out.csv") == "wrote out.csv: ZBV, 3 ranks, 90 ops\n"
    assert (here / "out.csv").read_text() == registry.generate("ZBV", 3, 5).to_csv()
    assert answer("validate out.csv") == "out.csv: valid; 3 ranks, 6 stages, 5 microbatches, 90 ops\n"
    from_file, from_name = json_of("simulate out.csv"), json_of("simulate ZBV -p 3 -m 5")
    assert from_file.pop("schedule") == "out.csv"
    assert from_name.pop("schedule") == "ZBV"
    assert from_file == from_name


def test_validate_takes_a_name() -> None:
    assert answer("validate zbv -p 3 -m 5") == "ZBV: valid; 3 ranks, 6 stages, 5 microbatches, 90 ops\n"
    assert "4 stages" in answer("validate LoopedBFS -p 2 -m 2 --stages-per-rank 2")
    result = run("validate GPipe -p 2 -m 4 --memory-limit 1")
    assert result.exit_code == 1
    assert result.stdout.startswith("memory: rank 0")


def test_validate_prints_every_finding(here: Path) -> None:
    table = (here / "mine.csv").read_text()
    (here / "bad.csv").write_text(table.replace("0W3", "").replace("5F0,", "", 1))
    result = run("validate bad.csv")
    findings = zbpipe.validate(Schedule.from_csv((here / "bad.csv").read_text()))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [str(finding) for finding in findings]
    assert len(findings) > 1


def test_validate_says_what_is_no_table(here: Path) -> None:
    (here / "bad.csv").write_text("0F0,0X0\n")
    result = run("validate bad.csv")
    assert result.exit_code == 1
    assert result.stdout.startswith("table: row 1 (rank 0): '0X0' is not an op")
    assert result.stdout.count("\n") == 1


def test_a_table_from_excel(here: Path) -> None:
    (here / "excel.csv").write_bytes(b"\xef\xbb\xbf" + (here / "mine.csv").read_bytes().replace(b"\n", b"\r\n"))
    assert answer("validate excel.csv") == answer("validate mine.csv").replace("mine", "excel")
    assert answer("show excel.csv") == answer("show mine.csv").replace("mine", "excel")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0F99999999\n", "table: schedule bad.csv: rank 0 runs 0F99999999, but 1 op(s) are far too few for 100000000"),
        (b"99999999F0,99999999B0\n", "rank 0 runs 99999999F0, but no rank runs stage 0"),
        (b"0F0;0B0\r\n", "';' separates the cells of the table: save it with commas"),
        ("0F0,0B0\n".encode("utf-16"), "it is no UTF-8 text"),
        (b"," * (2**25 + 1), "it has more than 32 MiB"),
    ],
)
def test_validate_says_in_a_line_what_makes_no_sense(here: Path, content: bytes, words: str) -> None:
    (here / "bad.csv").write_bytes(content)
    result = run("validate bad.csv")
    assert result.exit_code == 1
    assert result.stdout.count("\n") == 1
    assert words in result.stdout


def test_a_file_knows_its_size_and_insists_on_it(here: Path) -> None:
    assert json_of("simulate mine.csv -p 3 -m 4") == json_of("simulate mine.csv")
    assert "3 ranks, 4 microbatches" in answer("show mine.csv")


# What goes wrong


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("show ZBW -p 2 -m 2", "did you mean 'ZBV'?"),
        ("simulate ZBV -p 2", "ZBV needs -m"),
        ("simulate ZBV -m 2", "ZBV needs -p"),
        ("show ZBV -p two -m 2", "'two' is not a valid whole number."),
        ("compar -p 2 -m 2", "No such command 'compar'. Did you mean 'compare'? See `zbpipe --help`."),
        ("show ZBV -p 2 -m 2 --costs a.toml", "'a.toml' names a file; write `zbpipe plan --costs-file a.toml`"),
        ("show ZBV -p 0 -m 2", "0 is not in the range"),
        ("show ZBV -p 2 -m 2 --stages-per-rank 3", "stages_per_rank=3"),
        ("show ZBV -p 2 -m 2 --costs 1,2", "'1,2' is not three numbers; write for example 1,1,0.8"),
        ("show ZBV -p 2 -m 2 --costs a,b,c", "'a,b,c' is not three numbers"),
        ("show ZBV -p 2 -m 2 --costs 1,1,nan", "'1,1,nan'"),
        ("show ZBV -p 2 -m 2 --costs=-1,1,1", "'-1,1,1'"),
        ("show ZBV -p 2 -m 2 --costs 0,0,0", "'0,0,0'"),
        ("show ZBV -p 2 -m 2 --comm -1", "-1.0 is no amount"),
        ("show ZBV -p 2 -m 2 --comm inf", "inf is no amount"),
        ("compare -p 2 -m 2 --memory-limit nan", "'nan' is no amount"),
        ("simulate ZBV -p 2 -m 2 --steps 0", "0 is not in the range"),
        ("show none.csv", "'none.csv' cannot be read"),
        ("show mine.csv -p 2", "mine.csv is a table for 3 ranks, but the job has 2"),
        ("show mine.csv -m 5", "mine.csv is a table for 4 microbatches, but the job has 5"),
        ("show bad.csv", "bad.csv cannot run: deadlock"),
        ("show twice.csv", "twice.csv cannot run: placement"),
        ("validate none.csv", "'none.csv' does not exist"),
        ("validate ZBW -p 2 -m 2", "did you mean 'ZBV'?"),
        ("validate ZBV -p 2", "ZBV needs -m"),
        ("validate mine.csv -p 2", "mine.csv is a table for 3 ranks, not 2: leave that option out"),
        ("validate mine.csv -m 5", "mine.csv is a table for 4 microbatches, not 5"),
        ("show ZBV -p 2 -m 2 --svg no/such.svg", "'no/such.svg' is in no folder that exists and that you can write to"),
        ("show ZBV -p 2 -m 2 --html no/such.html", "'no/such.html' is in no folder"),
        ("show ZBV -p 2 -m 2 --perfetto mine.csv/a.json", "'mine.csv/a.json' is in no folder"),
        (f"show ZBV -p 2 -m 2 --svg {300 * 'x'}", "cannot be written: File name too long"),
        ("show ZBV -p 2 -m 2 --html .", "is a directory"),
        ("export ZBV -p 2 -m 2 -o no/such.csv", "'no/such.csv' is in no folder"),
        ("demo --json no/such.json", "'no/such.json' is in no folder"),
        ("demo --keep mine.csv/a", "mine.csv is no folder that you can write to"),
        ("demo --keep .", "the folder is not empty"),
        (f"demo --steps {HUGE}", f"{HUGE} is not in the range"),
        (f"show ZBV -p {HUGE} -m 2", f"{HUGE} ranks with 2 stage(s) each"),
        (f"show ZBV -p 2 -m {HUGE}", f"{HUGE} microbatches are too many for them: use at most 65536"),
        (f"show 1F1B -p 2 -m 2 --stages-per-rank {HUGE}", f"1F1B runs 1 stage(s) per rank, got stages_per_rank={HUGE}"),
        (f"show LoopedBFS -p 2 -m 2 --stages-per-rank {HUGE}", f"2 ranks with {HUGE} stage(s) each"),
        (f"simulate ZBV -p 2 -m 2 --steps {HUGE}", f"num_steps={HUGE} of 24 ops are too many"),
        (f"export ZBV -p {HUGE} -m 2 -o a.csv", f"{HUGE} ranks with 2 stage(s) each"),
        (f"compare -p {HUGE} -m 2", f"a pipeline of {HUGE} ranks has {HUGE} stages, but at most 1024 are possible"),
        (f"compare -p 2 -m {HUGE}", f"{HUGE} microbatches are too many for them: use at most 131072"),
        (f"show mine.csv -m {HUGE}", f"mine.csv is a table for 4 microbatches, but the job has {HUGE}"),
        ("show far.csv", "rank 0 runs 0F99999999, but 1 op(s) are far too few for 100000000 microbatches"),
        ("show /dev/zero.csv", "cannot be read"),
        ("show ZBV -p 2 -m 2 --costs 1e200,1,1", "'1e200,1,1' is not three times from zero to 1e+100"),
        ("show ZBV -p 2 -m 2 --costs 1e-320,0,0", "'1e-320,0,0' is not three times"),
        ("validate mine.csv --memory-limit nan", "'nan' is no amount; write a number from zero"),
        ("validate mine.csv --memory-limit inf", "'inf' is no amount"),
        ("validate mine.csv --memory-limit -1", "'-1' is no amount"),
        ("export ZBV -p 2 -m 2", "'-o'"),
        ("compare -m 2", "'-p'"),
        ("show", "Missing argument 'NAME'. See `zbpipe show --help`."),
        ("nothing", "No such command 'nothing'. See `zbpipe --help`."),
        ("--nothing", "No such option"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(here: Path, line: str, words: str) -> None:
    (here / "bad.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    (here / "far.csv").write_text("0F99999999\n")
    (here / "twice.csv").write_text("0F0,0B0,1F0,1B0\n1F0,1B0\n")
    result = CliRunner().invoke(cli.main, shlex.split(line), prog_name="zbpipe")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    assert words in result.stderr


def test_a_mistake_of_zbpipe_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(sys.modules["zbpipe.simulation"], "simulate", broken)
    assert isinstance(run("simulate ZBV -p 2 -m 2").exception, KeyError)


# The command itself


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_in_the_help_work(here: Path, command: str) -> None:
    examples = re.findall(r"^ +zbpipe (.*)$", answer(f"{command} --help"), re.MULTILINE)
    assert examples
    for example in examples:
        assert example.split()[0] == command
        answer(example)


def test_without_a_command_the_help_is_shown() -> None:
    assert isinstance(cli.main, click.Group)
    lines = answer("").splitlines()
    for command in (*COMMANDS, "demo"):
        assert any(line.strip().startswith(f"{command} ") for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "list",
        "show ZBV -p 4 -m 8",
        "show ZBV -p 4 -m 8 --svg a.svg --html a.html --perfetto a.json",
        "simulate ZBV -p 4 -m 8",
        "compare -p 4 -m 8",
        "export ZBV -p 4 -m 8 -o a.csv",
        "validate mine.csv",
    ],
)
def test_no_command_imports_torch(here: Path, line: str) -> None:
    program = (
        "import sys; from zbpipe.cli import main; main(sys.argv[1:], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", program, *shlex.split(line)], check=True)


def test_the_installed_command_draws_and_refuses(here: Path) -> None:
    zbpipe_command = Path(sys.executable).with_name("zbpipe")

    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([zbpipe_command, *arguments], capture_output=True, text=True, check=False)

    assert "rank 2 " in ended("show", "mine.csv").stdout
    refused = ended("show", "ZBW", "-p", "2", "-m", "2")
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: unknown schedule 'ZBW'")
    assert refused.stderr.count("\n") == 1
