"""What the documents say, works: every code block runs, or is checked as far as it can be without a cluster."""

import ast
import copy
import doctest
import importlib
import inspect
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
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any

import documents
import pytest
import recommended
import torch
from click.testing import CliRunner
from commands import at_small_size, process
from documents import PAGES, ROOT, Block, blocks
from searching import searching_little

import zbpipe
import zbpipe.run
import zbpipe.titan
from zbpipe import cli
from zbpipe.frameworks.installation import uninstall
from zbpipe.planner import stages
from zbpipe.runtime.adaptive import AutoSchedule
from zbpipe.runtime.split.deferring_layers import defer_weights
from zbpipe.runtime.split.weight_gradients import WeightGradients
from zbpipe.runtime.verify import GradientReport
from zbpipe.schedule import registry

_NAMED_FILE = re.compile(r"This is `(\S+)`[^`]*$")
_LANGUAGES = {"", "python", "sh", "bash", "diff", "toml", "csv", "yaml"}
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
    result = process(sys.executable, documents.__file__, folder=folder)
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
    # seconds to import, and the demo trains seven jobs with it: test_titan.py trains one of them and the others'
    # features, test_titan_integration.py runs what reads configs, test_pipelined_models.py those of transformers,
    # test_cli.py `doctor`.
    elsewhere = words[1:2] in (["playground"], ["doctor"], ["demo"]) or not {"--module", "--hf"}.isdisjoint(words)
    options = ["--help"] if elsewhere else []
    result = CliRunner().invoke(cli.main, [*at_small_size(words[1:]), *options])
    assert result.exit_code == 0, result.output


def is_a_target(words: list[str], folder: Path) -> None:
    assert re.search(f"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@cache
def help_of_pip(command: str) -> str:
    return process(sys.executable, "-m", "pip", command, "--help").stdout


def installs(words: list[str], folder: Path) -> None:
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
    if words[1] in ("-c", "-m") or words[1].startswith("../"):
        assert words[1] != "-m" or words[2] in ("venv", "zbpipe")
        return
    program = ROOT / words[1]
    assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in program.read_text()] == []


def is_a_script(words: list[str], folder: Path) -> None:
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


@pytest.mark.parametrize("block", WITH_COMMANDS)
def test_the_commands_of_a_block(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block.code.replace("<", "").replace(">", "")  # placeholders such as <the address of your copy>
    if block.language != "diff":
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
    monkeypatch.chdir(folder)
    with searching_little():
        for words in commands(block):
            PROGRAMS[words[0]](words, folder)


def test_launches_have_enough_microbatches() -> None:
    batch, degree = "--training.local_batch_size", "--parallelism.pipeline_parallel_degree"
    launched = [words for block in ALL_BLOCKS if block.language == "sh" for words in commands(block) if degree in words]
    given = [given for words in launched if (given := dict(pairwise(words)))[degree] != "1"]
    assert len(given) >= 5
    for each in given:
        assert int(each.get(batch, 1)) >= 2 * int(each[degree]), each


def test_blocks_of_data() -> None:
    for block in (block for block in ALL_BLOCKS if block.language in ("toml", "csv", "yaml")):
        match block.language:
            case "toml":
                assert tomllib.loads(block.code)
            case "csv":
                assert zbpipe.validate(zbpipe.Schedule.from_csv(block.code)) == []
            case "yaml" if not block.page.endswith("megatron.md"):  # test_primus_megatron.py runs that one
                [example] = (ROOT / block.page).parent.glob("*.yaml")
                keys = re.compile(r"^ *(\w+):", re.MULTILINE)
                assert set(keys.findall(block.code)) <= set(re.findall(r"(\w+):", example.read_text())), block


def test_the_reference_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_every_relative_link_leads_to_a_file() -> None:
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
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a string in several lines
    rows = re.findall(r"^\| .*?(`.*?`)[^|]*\|", (ROOT / "docs/logs.md").read_text(), re.MULTILINE)
    quoted = [part for row in rows for words in row.split("`") for part in words.split(" ... ") if part]
    assert len(quoted) > 10
    assert [part for part in quoted if part not in code] == []


def test_nothing_sends_people_to_an_address_that_is_not_public() -> None:
    known = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"].values())
    pages = [*map(ROOT.joinpath, PAGES), ROOT / "mkdocs.yml", *(ROOT / "src").rglob("*.py")]
    addresses = {page: re.findall(r"https?://[\w./-]*zbpipe[\w./-]*", page.read_text()) for page in pages}
    assert [each for found in addresses.values() for each in found if not (known and each.startswith(known))] == []


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
        printed = process(sys.executable, "-c", f"{begin}\n{shown}").stdout
        assert printed == "rank 0: 0F0 0I0 0W0\nrank 1: 1F0 1I0 1W0 (1,)\n"


def test_deferring_a_layer() -> None:
    """The page's layer leaves its weight gradient to W, and gets the right one."""
    names: dict[str, Any] = {}
    (block,) = (each for each in blocks("docs/the-split.md", "python") if "weight_products" in each.code)
    exec(block.code, names)
    layer, store = names["PerHead"](3, 4), WeightGradients()
    plain, x = copy.deepcopy(layer), torch.randn(3, 5, 4, requires_grad=True)
    defer_weights(layer, store)
    loss = layer(x).square().sum()
    with store.record() as pending:
        loss.backward()
    assert layer.weight.grad is None
    (gradient,) = pending
    gradient.accumulate()
    plain(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


MODULES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "src").rglob("*.py")
    if ">>> " in path.read_text()
)
LONG = {"estimate", "pipeline"}
PUBLIC = [
    *(getattr(each, name) for each in (zbpipe, zbpipe.costs, zbpipe.simulator) for name in each.__all__),
    *(AutoSchedule, GradientReport, zbpipe.titan.plug_in, uninstall),
]


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("zbpipe"):
            raise
        pytest.skip(f"{error}")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(stages, "default_budget", lambda *_: 2e5)
    module = imported(name)
    result = doctest.testmod(module, extraglobs={"zbpipe": zbpipe}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    runner = doctest.DocTestRunner()
    for each in ast.parse(inspect.getsource(module)).body[1:]:
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            text = str(each.value.value)
            runner.run(doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, module.__file__, 0))
    assert runner.failures == 0
    assert result.attempted + runner.tries > 0


def test_each_public_name_has_an_example() -> None:
    """Above torch one that runs; below, where stages would have to be made first, some lines of code."""
    without = []
    for public in PUBLIC:
        words, *_ = re.split(r"^(?:Args|Raises):", inspect.getdoc(public) or "", flags=re.MULTILINE)
        above_torch = not re.match(r"zbpipe\.(runtime|frameworks|titan)", public.__module__)
        if not re.search(r">>> " if above_torch else r"^(>>> |    )", words, re.MULTILINE):
            without.append(public.__name__)
    assert set(without) <= LONG


@pytest.mark.long
@pytest.mark.parametrize("job", recommended.TWELVE, ids=lambda job: "-".join(map(str, job[:2])))
def test_readme_estimate_and_config_name_one_schedule(job: tuple[Any, ...]) -> None:
    names, sentence = recommended.answers(*job)
    assert len(set(names)) == 1, sentence


CHANGES = list(product(("selective", "full"), recommended.NOW))


@pytest.mark.parametrize(
    ("how", "name"), [pytest.param(*each, marks=[] if each == CHANGES[1] else pytest.mark.long) for each in CHANGES]
)
def test_the_readme_recommends_as_the_estimate_does(how: str, name: str) -> None:
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "README.md").read_text().split("```")[0], re.MULTILINE)
    assert len(rows) == len(CHANGES) + 1
    found = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert found[0] == recommended.HEADS
    assert found[1 + CHANGES.index((how, name))] == recommended.compare(how, name)
