"""Which TorchTitan zbpipe takes, and what it says of the others. None has to be installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from zbpipe.cli.demo import command
from zbpipe.cli.demo.launch import DemoError
from zbpipe.frameworks.titan import versions

SOURCES = {
    "0.2.2": ("config/job_config.py", "@dataclass\nclass JobConfig:\n    pass\n"),
    "0.3.0": ("config/configs.py", "class ParallelismConfig:\n    pipeline_parallel_microbatch_size: int = 1\n"),
    "main of August 2026": ("config/configs.py", "class ParallelismConfig:\n    num_pp_microbatches: int = 1\n"),
    "another": ("config/configs.py", "class ParallelismConfig:\n    num_pp_microbatches_or_so: int = 1\n"),
}
"""Of each version, what shows that it is this one."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets what pip knows, and what is on Python's path."""

    def set_up(like: str, clone: str | None, torch: str, pip: str | None = None) -> None:
        known = {"torch": torch} | ({"torchtitan": pip} if pip else {})
        spec = ModuleSpec("torchtitan", None, is_package=True)
        spec.submodule_search_locations = [str(source_tree(tmp_path, like, clone) / "torchtitan")]
        monkeypatch.setattr(versions, "find_spec", lambda name: spec)
        monkeypatch.setattr(versions, "version", partial(version, known))

    return set_up


def version(known: dict[str, str], package: str) -> str:
    if package not in known:
        raise PackageNotFoundError(package)
    return known[package]


def source_tree(folder: Path, like: str, release: str | None = None) -> Path:
    """A folder for Python's path, as a clone has it if it has a `release`; to import it is an error."""
    file, content = SOURCES[like]
    source = folder / "torchtitan" / file
    source.parent.mkdir(parents=True)
    source.write_text(content)
    (folder / "torchtitan" / "__init__.py").write_text("raise RuntimeError('it was imported')")
    if release is not None:
        (folder / "assets").mkdir()
        (folder / "assets" / "version.txt").write_text(release + "\n")
    return folder


SIZE_02 = ["--training.local_batch_size", "4", "--training.seq_len", "64"]
SIZE_MAIN = [
    *("--parallelism.num_pp_microbatches", "4", "--training.max_context_length", "64"),
    *("--training.num_tokens_per_microbatch_per_dp_rank", "64"),
]


@pytest.mark.parametrize(
    ("like", "clone", "pip", "torch", "size"),
    [
        ("0.2.2", None, "0.2.2", "2.12.0+rocm7.15", SIZE_02),
        ("0.2.2", "0.2.2", "0.3.0", "2.11.0a0+git1234", SIZE_02),
        ("0.3.0", None, "0.3.0", "2.14.0", SIZE_02),
        ("0.3.0", None, "0.4.0.dev20261101", "2.15.0", SIZE_02),
        ("main of August 2026", "0.2.2", None, "2.14.0", SIZE_MAIN),
    ],
)
def test_names_show_the_version_and_numbers_do_not(
    install: Any, tmp_path: Path, like: str, clone: str | None, pip: str | None, torch: str, size: list[str]
) -> None:
    install(like, clone, torch, pip)
    assert versions.find_installed().name == like
    assert versions.find_installed().size(4, 64) == size
    assert versions.describe_installed() == f"torchtitan {clone or pip} in {tmp_path / 'torchtitan'}"


NO_NAMES = (
    "has none of the names by which zbpipe recognizes TorchTitan, `class JobConfig` in config/job_config.py (0.2.2),"
    " `pipeline_parallel_microbatch_size` in config/configs.py (0.3.0), `num_pp_microbatches` in config/configs.py"
    " (main of August 2026): pip install torchtitan==0.3.0, or use zbpipe.install() in your program, or start it by"
    " `python -m zbpipe.run`: they need none of TorchTitan's private names"
)


@pytest.mark.parametrize(
    ("like", "release", "torch", "said"),
    [
        ("another", "0.4.0", "2.15.0", NO_NAMES),
        (
            "0.3.0",
            None,
            "2.12.0+rocm7.15",
            "needs torch 2.14 or newer, and this is torch 2.12.0+rocm7.15: pip install torchtitan==0.2.2, or install"
            " torch 2.14 or newer",
        ),
        ("0.2.2", None, "2.10.0", "needs torch 2.11 or newer, and this is torch 2.10.0: install torch 2.11 or newer"),
        ("another", None, "2.15.0", "torchtitan of an unknown version in "),
    ],
)
def test_others_are_refused(install: Any, like: str, release: str | None, torch: str, said: str) -> None:
    install(like, release, torch)
    with pytest.raises(ImportError, match=re.escape(said)):
        versions.find_installed()


def test_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"torchtitan is not installed: pip install torchtitan==0\."):
        versions.find_installed()
    with pytest.raises(DemoError, match="the demo trains with TorchTitan: torchtitan is not installed"):
        command.run_demo(2, Path())


@pytest.mark.long
def test_the_trainer_says_it_and_imports_nothing(tmp_path: Path) -> None:
    path = os.pathsep.join([str(source_tree(tmp_path, "another", "0.4.0")), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "zbpipe.titan.train", "--training.steps", "3"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: torchtitan 0.4.0 in {tmp_path / 'torchtitan'} has none of the names")
    assert "it was imported" not in done.stderr
