"""What the documents say, works: every code block runs, or is checked as far as it can be without a cluster."""

from __future__ import annotations

import copy
import csv
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import documents
import mutants
import pytest
import torch
from click.testing import CliRunner
from commands import at_small_size
from compatibility import PAGE, TITAN, Section, Table, find_changes, put, read
from documents import PAGES, ROOT, Block, blocks

import zbpipe
import zbpipe.run
from zbpipe import cli
from zbpipe.runtime.split.deferring_layers import defer_weights
from zbpipe.runtime.split.weight_gradients import WeightGradients
from zbpipe.schedule import registry

_NAMED_FILE = re.compile(r"This is `(\S+)`[^`]*$")
_LANGUAGES = {"", "python", "sh", "bash", "diff", "toml", "csv", "yaml"}
"""What is checked below. A block without a language is what a program prints."""
ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that the pages name right above a block: "This is `stages.toml`:"."""
    folder = tmp_path_factory.mktemp("documents")
    for block in (block for block in ALL_BLOCKS if block.language in ("toml", "csv")):
        above = "\n".join((ROOT / block.page).read_text().splitlines()[: block.line - 2])
        if named := _NAMED_FILE.search(above):
            (folder / named[1]).write_text(block.code)
    assert {file.name for file in folder.iterdir()} == {"stages.toml", "layers.toml", "mine.csv", "model.toml"}
    # As a job would write it.
    (folder / "costs.toml").write_text((folder / "stages.toml").read_text())
    return folder


def test_every_block_is_in_a_language_that_is_checked() -> None:
    assert [f"{block}: {block.language}" for block in ALL_BLOCKS if block.language not in _LANGUAGES] == []
    assert len(ALL_BLOCKS) > 60


@pytest.fixture(scope="module")
def failures(folder: Path) -> dict[str, str]:
    """What failed in the Python of each page. One process runs them all."""
    program = [sys.executable, documents.__file__]
    result = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stderr.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(failures: dict[str, str], page: str) -> None:
    assert not failures[page], failures[page]


def commands(block: Block) -> list[list[str]]:
    """In words, without comments, pipes, and the variables in front. Of a diff, those that it adds."""
    added = re.sub(r"^(-.*\n|\+ )", "", block.code, flags=re.MULTILINE) if block.language == "diff" else block.code
    lines = added.replace("\\\n", " ").splitlines()
    bare = (re.sub(r"(^|\s)#.*|\s[|>].*|\.venv/bin/", "", line).strip() for line in lines)
    alone = (re.sub(r"^([A-Z_0-9]+=\S*\s*)+", "", part) for line in bare for part in line.split(" && "))
    return [shlex.split(part.replace("$ZBPIPE", "titan_integration/primus")) for part in alone if part]


def run_zbpipe(words: list[str], folder: Path) -> None:
    # The playground serves until somebody ends it, and plans for minutes before it writes a file. TorchTitan takes
    # seconds to import; test_titan_integration.py runs what reads its configs, tests/test_doctor.py `doctor`.
    options = ["--help"] if words[1:2] in (["playground"], ["doctor"]) or "--module" in words else []
    result = CliRunner().invoke(cli.main, [*at_small_size(words[1:]), *options])
    assert result.exit_code == 0, result.output


def is_a_target(words: list[str], folder: Path) -> None:
    assert re.search(f"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@cache
def help_of_pip(command: str) -> str:
    program = [sys.executable, "-m", "pip", command, "--help"]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout


def installs(words: list[str], folder: Path) -> None:
    """Options that pip has, and extras that zbpipe has."""
    if words[1] == "index":
        return
    assert [word for word in words if word.startswith("-") and word not in help_of_pip(words[1])] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [extra for word in words for extra in re.findall(r"^\.\[(.*)\]", word) if extra not in extras] == []


def launches(words: list[str], folder: Path) -> list[list[str]]:
    """torchrun knows its own options, and zbpipe.run those that follow. What TorchTitan has to read is returned."""
    from torch.distributed.run import get_args_parser

    words = [word for word in words if word != "..."]
    found = get_args_parser().parse_args(words[1:])
    if not found.module:
        assert (ROOT / found.training_script).is_file()
        return []
    if found.training_script == "zbpipe.run":
        zbpipe.run._parser().parse_args(found.training_script_args)
        return []
    assert found.training_script == "zbpipe.titan.train"
    return [found.training_script_args]


def runs_python(words: list[str], folder: Path) -> None:
    """A program of this repository, whose source has the options."""
    if words[1] in ("-c", "-m") or words[1].startswith("../"):
        assert words[1] != "-m" or words[2] in ("venv", "zbpipe", "zbpipe.titan.check_clone")
        return
    program = ROOT / words[1]
    assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in program.read_text()] == []


def is_a_script(words: list[str], folder: Path) -> None:
    """What its arguments do is tested in test_titan_integration.py."""
    assert (ROOT / words[0]).is_file()


PROGRAMS: dict[str, Callable[[list[str], Path], object]] = {
    "zbpipe": run_zbpipe,
    "make": is_a_target,
    "pip": installs,
    "torchrun": launches,
    "python": runs_python,
    "python3": runs_python,
    "titan_integration/run_train.sh": is_a_script,
    "titan_integration/first_run.sh": is_a_script,
    **dict.fromkeys(
        (".", "cd", "docker", "export", "git", "srun", "pre-commit", "primus-cli", "./runner/primus-cli"),
        lambda words, folder: None,  # nothing that can be looked up here
    ),
}
"""By the first word of a command: what is tested of it. A command that begins with another word is an error."""


WITH_COMMANDS = [
    pytest.param(block, id=str(block), marks=() if block.page == "README.md" else pytest.mark.long)
    for block in ALL_BLOCKS
    if block.language in ("sh", "bash", "diff")
]


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("block", WITH_COMMANDS)
def test_the_commands_of_a_block(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block.code.replace("<", "").replace(">", "")  # placeholders such as <the address of your copy>
    if block.language != "diff":
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
    monkeypatch.chdir(folder)
    for words in commands(block):
        PROGRAMS[words[0]](words, folder)


def test_launches_have_enough_microbatches() -> None:
    """As zbpipe's plug wants them; TorchTitan's default is one."""
    batch, degree = "--training.local_batch_size", "--parallelism.pipeline_parallel_degree"
    launched = [words for block in ALL_BLOCKS if block.language == "sh" for words in commands(block) if degree in words]
    given = [given for words in launched if (given := dict(pairwise(words)))[degree] != "1"]
    assert len(given) >= 5
    for each in given:
        assert int(each.get(batch, 1)) >= 2 * int(each[degree]), each


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language in ("toml", "csv", "yaml")], ids=str)
def test_a_block_of_data(block: Block) -> None:
    match block.language:
        case "toml":
            assert tomllib.loads(block.code)
        case "csv":
            assert zbpipe.validate(zbpipe.Schedule.from_csv(block.code)) == []
            assert list(csv.reader(block.code.splitlines()))
        case "yaml":
            yaml = pytest.importorskip("yaml")
            [example] = (ROOT / block.page).parent.glob("*.yaml")
            known = set(re.findall(r"(\w+):", example.read_text()))
            assert {key for key in _keys(yaml.safe_load(block.code)) if key not in known} == set()


def _keys(tree: Any) -> set[str]:
    if not isinstance(tree, dict):
        return set()
    return {key for key, value in tree.items() for key in (key, *_keys(value))}


def test_the_reference_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """The names of the package, the commands, the options of a job."""
    api = (ROOT / "docs/api.md").read_text()
    documented = re.findall(r"^::: zbpipe\.(\w+)$", api, re.MULTILINE)
    classes = re.findall(r"`(Schedule\w+)`", api)  # which have one signature, that of RegisteredSchedule
    assert "::: zbpipe.runtime.schedules.RegisteredSchedule" in api
    assert sorted((*documented, *classes)) == sorted({*zbpipe.__all__, "testing"})
    page = (ROOT / "docs/command-line.md").read_text()
    assert [name for name in cli.main.commands if f"zbpipe {name}" not in page] == []
    assert all(algorithm.summary for algorithm in registry.schedules().values())
    runpy.run_path(str(ROOT / "docs/_options.py"))
    printed = capsys.readouterr().out
    assert (ROOT / "docs/options.md").read_text() == printed, "python docs/_options.py > docs/options.md"
    assert mutants.write_table() in (ROOT / "tests/README.md").read_text(), "python tests/mutants.py --list"


def test_every_relative_link_leads_to_a_file() -> None:
    """`make docs` also looks for the places within pages. The code names pages that exist, too."""
    missing = [
        f"{page}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
        if not os.path.isfile((ROOT / page).parent / target)
    ]
    assert missing == []
    sources = [path for folder in ("src", "examples") for path in (ROOT / folder).rglob("*.py")]
    named = {page for path in sources for page in re.findall(r"\bdocs/[\w-]+\.md", path.read_text())}
    assert len(named) > 5
    assert sorted(named - set(PAGES)) == []


def test_the_lines_of_the_log_are_those_of_the_code() -> None:
    """Those that docs/logs.md explains."""
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a string in several lines
    rows = re.findall(r"^\| .*?(`.*?`)[^|]*\|", (ROOT / "docs/logs.md").read_text(), re.MULTILINE)
    quoted = [part for row in rows for words in row.split("`") for part in words.split(" ... ") if part]
    assert len(quoted) > 10
    assert [part for part in quoted if part not in code] == []


def test_all_pages_have_one_address() -> None:
    """That of pyproject.toml."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    owner = address.rpartition("/")[0]
    texts = {page: (ROOT / page).read_text() for page in (*PAGES, "mkdocs.yml", "pyproject.toml")}
    found = {page: set(re.findall(rf"{owner}/[\w-]+", text)) for page, text in texts.items()}
    assert {page: addresses for page, addresses in found.items() if addresses - {address}} == {}
    assert all(found[page] for page in ("README.md", "docs/trouble.md", "mkdocs.yml"))


def test_adding_a_schedule(tmp_path: Path) -> None:
    """The page's function and its table give the schedules that they look like, also in a package with the entry point
    that the page shows."""
    (function,) = blocks("docs/adding-a-schedule.md", "python")
    (entry_point,) = blocks("docs/adding-a-schedule.md", "toml")
    name, module = re.findall(r'(\w+) = "([\w.]+)"', entry_point.code)[0]
    package = tmp_path / Path(*module.split(".")).with_suffix(".py")
    package.parent.mkdir(parents=True)
    package.write_text(function.code)
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[zbpipe.algorithms]\n{name} = {module}\n")
    shown = "print(zbpipe.generate('lateweights', 2, 1), zbpipe.stage_indices('LateWeights', rank=1, num_ranks=2))"
    for begin in (function.code, f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import zbpipe"):
        program = [sys.executable, "-c", f"{begin}\n{shown}"]
        printed = subprocess.run(program, capture_output=True, text=True, check=True, timeout=240).stdout
        assert printed == "rank 0: 0F0 0I0 0W0\nrank 1: 1F0 1I0 1W0 (1,)\n"


def test_deferring_a_layer() -> None:
    """The page's layer leaves its weight gradient to W, and gets the right one."""
    names: dict[str, Any] = {}
    (block,) = (each for each in blocks("docs/the-split.md", "python") if "weight_products" in each.code)
    exec(block.code, names)
    layer = names["PerHead"](3, 4)
    plain = copy.deepcopy(layer)
    store = WeightGradients()
    defer_weights(layer, store)
    x = torch.randn(3, 5, 4, requires_grad=True)
    loss = layer(x).square().sum()
    with store.record() as pending:
        loss.backward()
    assert layer.weight.grad is None
    (gradient,) = pending
    gradient.accumulate()
    plain(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


def test_the_page_of_what_works_together_takes_a_section_and_tells_what_changed() -> None:
    page = PAGE.read_text()
    (title, older), *_ = read(page)["torchtitan"][1].items()
    table = Table("More features", "", ["feature", "tested how", "outcome"], [["one", "2 ranks", "works"]])
    changed = read(put(Section("torchtitan 0.1 with torch 2.1", "Tested.", TITAN, [table]), page))
    drawn = (
        "Tested.\n\n#### More features\n\n| feature | tested how | outcome |\n|---|---|---|\n| one | 2 ranks | works |"
    )
    assert list(changed["torchtitan"][1].items())[-1] == ("torchtitan 0.1 with torch 2.1", drawn)
    assert changed["torchtitan"][1][title] == older
    assert changed["torchtitan"][0] == read(page)["torchtitan"][0] == TITAN.strip()
    recorded = {"| one | works |", "| two | not tried | not tried |", "| three | works | not tried |"}
    assert not find_changes(recorded, {"| one | works |", "| two | fails | works |", "| three | works | works |"})
    seen = {"| one | fails |", "| three | fails | works |"}
    assert find_changes(recorded, seen) == {"| one | works |", *seen}
