"""The command as people and scripts meet it: output, JSON keys, one-line errors, and no torch on the way."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from browser import page_data
from commands import answer, at_small_size, json_of, process, run
from data import expectations, has_words, refusals
from documents import blocks

import zbpipe
from zbpipe import OpKind, Placement, cli, generate, load_costs
from zbpipe.cli.base import in_one_line
from zbpipe.costs import JobCosts, dump_costs
from zbpipe.costs.model import CostModel, Transport
from zbpipe.costs.transformer import Checkpointing, typical_costs
from zbpipe.frameworks.titan import versions
from zbpipe.schedule import registry
from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.simulation import period, simulate

pytestmark = pytest.mark.usefixtures("short_search")

SIMULATE_KEYS = {"schedule", "ranks", "microbatches", "stages_per_rank", "makespan", "bubble", "lower_bound"}
COMMANDS = ("list", "show", "simulate", "compare", "plan", "export", "validate")


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@cache
def compared(line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json_of(f"compare {line}")
    return found


def all_names() -> set[str]:
    return {algorithm.name for algorithm in registry.schedules().values()}


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


@pytest.mark.parametrize(("line", "words"), expectations("printed"))
def test_what_is_printed(here: Path, line: str, words: str) -> None:
    printed = answer(line)
    assert words in " ".join(printed.split())
    assert len(printed.splitlines()) < 60


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


@pytest.fixture
def two_stages(tmp_path: Path) -> str:
    gib = 2.0**30
    stages = CostModel((1, 1), (2, 2), (0.5, 0.5), (gib, gib), freed_by_i=-1, working={OpKind.I: gib, OpKind.B: gib})
    file = str(tmp_path / "two.toml")
    dump_costs(JobCosts(stages, Placement.loop(2), memory_limit=4.5 * gib, transport=Transport.ONE_QUEUE), file)
    return file


def test_every_command_takes_a_cost_file(two_stages: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        *((f"--checkpointing {each}", limit) for each in Checkpointing for limit in ("", "1.0x")),
        *(("", limit) for limit in ("1.6x", "4.5")),
    ],
)
def test_a_comparison(options: str, limit: str) -> None:
    """Sorted by makespan. What exceeds the limit comes after, and torch's split where it fails comes last."""
    line = f"-p 4 -m 8 {options}" + (f" --memory-limit {limit}" if limit else "")
    found = compared(line)
    assert {entry["schedule"] for entry in found} == all_names()
    runs = [entry for entry in found if entry["runs"]]
    order = [(not entry["fits"], round(entry["makespan"], 6)) for entry in runs]
    assert order == sorted(order)
    steps = {entry["schedule"]: entry["makespan"] for entry in found}
    for entry in found:
        assert entry.keys() >= SIMULATE_KEYS | {"gap", "fits"}
        assert entry["gap"] == pytest.approx(entry["makespan"] / entry["lower_bound"] - 1, abs=1e-9)
        peak, share = max(entry["peak_memory"]), entry["memory_to_1f1b"]
        assert entry["fits"] == (
            share <= float(limit[:-1]) + 1e-9 if limit[-1:] == "x" else peak <= float(limit or "inf")
        )
        for other in ("1F1B", "Interleaved1F1B"):
            assert entry[f"step_to_{other.lower()}"] == entry["makespan"] / steps[other]
    torchs = set() if options == "--checkpointing none" else {"DualPipeV", "InterleavedZeroBubble", "ZBVZeroBubble"}
    assert {entry["schedule"] for entry in found if not entry["runs"]} == torchs
    assert {entry["schedule"] for entry in found[len(runs) :]} == torchs
    assert all(steps[f"{name}Split"] == steps[name] for name in ("DualPipeV", "InterleavedZeroBubble"))
    assert len({entry["fits"] for entry in runs}) == 2 or limit in ("", "1.6x")
    most = float(limit[:-1]) if limit[-1:] == "x" else 1.02
    fitting = [entry for entry in runs if entry["fits"] and (entry["memory_to_1f1b"] <= most * (1 + 1e-9) or limit)]
    best = min(fitting, key=lambda entry: entry["makespan"] - 0.02 * steps["ZB"] * (entry["schedule"] == "ZB"))
    assert [entry["schedule"] for entry in found if entry["recommended"]] == [best["schedule"]]
    lines = answer(f"compare {line}").splitlines()
    (recommended,) = [each for each in lines if each.endswith(" recommended")]
    assert recommended.startswith(f"{best['schedule']} ")
    assert f" {best['step_to_1f1b'] - 1:+.1%} " in recommended
    assert f"within {'the memory limit' if limit else '1.02x of 1F1B'}" in "\n".join(lines)
    if limit == "4.5":
        assert [each.split()[0] for each in lines[3 : 3 + len(found)]] == [entry["schedule"] for entry in found]
        marked = [each.endswith("over the limit of 4.5") for each in lines[3 : 3 + len(found)]]
        assert marked == [not entry["fits"] for entry in found]
        assert len(set(marked)) == 2


def test_a_comparison_has_the_stages_that_are_asked_for() -> None:
    """Of schedules that take any number of stages; the others keep their own."""
    stages = {entry["schedule"]: entry["stages_per_rank"] for entry in compared("-p 4 -m 8 --stages-per-rank 3")}
    assert stages["Interleaved1F1B"] == stages["LoopedBFS"] == 3
    assert (stages["1F1B"], stages["ZBV"]) == (1, 2)


def test_ties_go_to_less_memory_and_then_to_zbpipes_split() -> None:
    names = [entry["schedule"] for entry in compared("-p 4 -m 16 --checkpointing none")]
    assert names.index("DualPipeVSplit") + 1 == names.index("DualPipeV"), "the same ops"
    assert names.index("1F1B") < names.index("GPipe"), "the same makespan"
    lines = answer("compare -p 4 -m 16 --checkpointing none").splitlines()
    sources = [line.split()[1] for line in lines if line.startswith(("DualPipeVSplit ", "DualPipeV ", "1F1B "))]
    assert sources == ["zbpipe", "torch*", "torch"]


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


def test_what_export_writes_can_be_read_validated_and_shown(here: Path) -> None:
    assert answer("export ZBV -p 3 -m 5 -o out.csv") == "wrote out.csv: ZBV, 3 ranks with 2 stages each, 90 ops\n"
    assert (here / "out.csv").read_text() == zbpipe.generate("ZBV", 3, 5).to_csv()
    assert answer("validate out.csv") == "out.csv: valid; 3 ranks, 6 stages, 5 microbatches, 90 ops\n"
    # A file knows its size.
    lines = ("out.csv", "out.csv -p 3 -m 5", "ZBV -p 3 -m 5")
    from_file, same, from_name = (json_of(f"simulate {line}") for line in lines)
    assert from_file == same == from_name | {"schedule": "out.csv"}
    assert answer("validate out.csv --memory-limit 1", code=1).startswith("memory: rank 0")


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


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("line", "words"), refusals("commands"))
def test_errors_are_one_line_with_exit_code_2(line: str, words: str) -> None:
    result = run(line)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith("Error: ")
    assert has_words(result.stderr, words)


def test_a_mistake_of_zbpipe_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(sys.modules["zbpipe.cli.request"], "simulate", broken)
    assert isinstance(run("simulate ZBV -p 2 -m 2").exception, KeyError)


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
    process(sys.executable, "-c", LIGHT, *lines)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import zbpipe
from zbpipe.cli import main
if sys.argv[1:]:
    main()
for name in ("ScheduleZB", "pipeline"):
    try:
        getattr(zbpipe, name)
    except ImportError as error:
        print(error)
"""
NEEDS_TORCH = "needs torch, which is not installed: pip install 'torch>=2.11'"
JOB = "--module llama3 --config llama3_8b --gpus 8 --device H100"


@pytest.mark.parametrize("line", [f"estimate {JOB}", f"plan {JOB}", f"compare {JOB}", "measure --module a -o a.toml"])
def test_a_job_without_torch_is_one_sentence(line: str, here: Path) -> None:
    refused = process(sys.executable, "-c", WITHOUT_TORCH, *line.split(), code=2)
    assert refused.stderr == f"Error: this command {NEEDS_TORCH}\n"


@pytest.mark.parametrize("program", ["run --schedule ZB -- job.py", "titan.train --module llama3"])
def test_a_program_without_torch_is_one_sentence(program: str, here: Path) -> None:
    """Also its help."""
    for words in (program, f"{program.split(maxsplit=1)[0]} -h"):
        name, *arguments = f"zbpipe.{words}".split()
        run = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_module({name!r}, run_name='__main__')"
        refused = process(sys.executable, "-c", run, *arguments, code=1)
        assert refused.stderr == f"python -m {name} {NEEDS_TORCH}\n"


def test_what_needs_no_torch_runs_without(here: Path) -> None:
    (here / "model.toml").write_text(blocks("docs/costs-file.md", "toml")[-1].code)
    for line in (
        *("show ZB -p 4 -m 8", "simulate ZB -p 4 -m 8", "compare -p 2 -m 4", "plan -p 2 -m 4 --budget 1e4"),
        "estimate --layers model.toml --gpus 16 --device H100",
    ):
        assert process(sys.executable, "-c", WITHOUT_TORCH, *line.split()).stdout
    names = process(sys.executable, "-c", WITHOUT_TORCH).stdout.splitlines()
    assert names == [f"zbpipe.{name} {NEEDS_TORCH}" for name in ("ScheduleZB", "pipeline")]


def test_the_installed_command_draws_and_refuses(here: Path) -> None:
    command = Path(sys.executable).with_name("zbpipe")
    assert "rank 2 " in process(command, "show", "mine.csv").stdout
    refused = process(command, "show", "ZBW", "-p", "2", "-m", "2", code=2)
    assert refused.stderr.startswith("Error: unknown schedule 'ZBW'")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["ZB", "ZBLoop"])
def test_lean_schedules_keep_to_the_limit(name: str, here: Path) -> None:
    costs = "-p 4 -m 8 --checkpointing full"
    roomy, tight = (json_of(f"simulate {name} {costs} --memory-limit {limit}x") for limit in (1.3, 0.8))
    assert tight["memory_to_1f1b"] <= 0.8
    assert roomy["memory_to_1f1b"] <= 1.3
    assert roomy["makespan"] < tight["makespan"]
    rows = compared(f"{costs} --memory-limit 0.8x")
    (found,) = (each for each in rows if each["schedule"] == name)
    assert (found["fits"], found["makespan"]) == (True, tight["makespan"])
    answer(f"export {name} {costs} --memory-limit 0.8x -o lean.csv")
    assert json_of(f"simulate lean.csv {costs}")["makespan"] == tight["makespan"]


def test_an_import_error_names_what_is_broken() -> None:
    """Also where a lazy import hides it, as in transformers."""
    hidden = ImportError("no such model")
    hidden.__cause__ = RuntimeError("operator nms does not exist")
    with pytest.raises(click.ClickException, match=r"^no such model; because: operator nms does not exist$"):
        in_one_line(ImportError)(refuse)(hidden)


doctor = import_module("zbpipe.cli.doctor")  # `zbpipe.cli` has the command by that name


def refuse(error: ImportError | None = None) -> None:
    raise error or ImportError("torchtitan is too new")


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_installed", refuse)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("HF_TOKEN", "of mine")
    monkeypatch.setenv("SLURM_JWT_KEY", "of mine")
    log, report = tmp_path / "job.log", tmp_path / "report.txt"
    log.write_bytes(b"step 0\n" + b"\n".join(f"step {n}".encode() for n in range(1, 201)) + b" \xff\n")
    printed = answer(f"doctor -o {report} --log {log}")
    text = report.read_text()
    assert printed == f"{text}wrote {report}: send it to {doctor._issues()}\n"
    lines = text.splitlines()
    for line in ("zbpipe 0.1.0", "torchtitan is too new", "NCCL_DEBUG=INFO", "step 1", "step 200 \ufffd"):
        assert line in lines
    shared = "Messages between GPUs: 'shared with compute'. CUDA_DEVICE_MAX_CONNECTIONS=1 makes streams share a queue"
    assert any(line.startswith(shared) for line in lines)
    assert "step 0" not in lines
    assert "of mine" not in text


@pytest.mark.parametrize(
    ("program", "said"),
    [("print('the plug fits')", "the plug fits"), ("raise AttributeError('Trainer')", "AttributeError: Trainer")],
)
def test_the_plug_is_tried(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_installed", lambda: None)
    monkeypatch.setattr(doctor, "_PLUG", program)
    assert doctor._plug().splitlines()[-1] == said
    assert ("does not fit" in doctor._plug()) == program.startswith("raise")


@pytest.mark.long
def test_the_plug_fits() -> None:
    pytest.importorskip("torchtitan")
    assert doctor._plug() == "the plug fits"
