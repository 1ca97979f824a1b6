"""Schedules of users reach the command lines: by a module to import, and as a function in a file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import run
from data import refusals

from zbpipe import cli, generate, stage_indices
from zbpipe.schedule import registry
from zbpipe.schedule.user_code import function_of, import_modules

OWN = """
import zbpipe

@zbpipe.register("{name}", placement="v", stages_per_rank=2, summary="mine")
def mine(ranks, microbatches):
    return zbpipe.generate("ZBV", ranks, microbatches)

def plain(ranks, microbatches):
    return mine(ranks, microbatches)
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own_for_test.py"
    file.write_text(OWN.format(name="MineOfTest"))
    (tmp_path / "broken_for_test.py").write_text("1 / 0")
    yield file
    sys.modules.pop("own_for_test", None)


def test_a_function_in_a_file_is_a_schedule(own: Path) -> None:
    source = f"{own}:mine"
    assert str(generate(source, 2, 4)) == str(generate("ZBV", 2, 4))
    assert stage_indices(source, rank=1, num_ranks=2) == (1, 2)
    assert function_of(source) is function_of(source), "the file runs once"
    result = run("simulate own_for_test.py:mine -p 2 -m 4")
    assert result.output.startswith("MineOfTest, 2 ranks, 4 microbatches")


@pytest.mark.parametrize("name", ["mineoftest", "own_for_test.py:mine"])
def test_a_module_is_imported_first(name: str) -> None:
    result = run(f"--import own_for_test simulate {name} -p 2 -m 4")
    assert result.output.startswith("MineOfTest, 2 ranks, 4 microbatches")


@pytest.mark.parametrize(("source", "complaint"), refusals("own schedules"))
def test_what_is_no_schedule_is_refused_with_the_way_out(source: str, complaint: str) -> None:
    result = run(f"simulate {source} -p 2 -m 4")
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_module_that_fails_is_one_line() -> None:
    result = run("--import broken_for_test list")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "the module 'broken_for_test' cannot be imported: ZeroDivisionError" in result.stderr
    with pytest.raises(ValueError, match="'none_for_test' cannot be imported: ModuleNotFoundError"):
        import_modules(["none_for_test"])


def test_the_shell_completes_names() -> None:
    typed = {"_ZBPIPE_COMPLETE": "bash_complete", "COMP_WORDS": "zbpipe show zbv", "COMP_CWORD": "2"}
    completed = CliRunner().invoke(cli.main, [], env=typed, prog_name="zbpipe")
    items = completed.output.splitlines()
    assert items[-1] == "file,zbv"
    assert {"plain,ZBV", "plain,ZBVZeroBubble"} <= set(items)
    assert all(item.startswith("plain,ZBV") for item in items[:-1])
