"""Which TorchTitan zbpipe takes, and what it says of the others. None has to be installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from zbpipe.cli.demo import comparison, emulated
from zbpipe.frameworks.titan import versions


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What pip knows; to be filled."""
    known: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in known:
            raise PackageNotFoundError(package)
        return known[package]

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(versions, "find_spec", lambda name: ModuleSpec(name, None, is_package=True))
    return known


@pytest.mark.parametrize(
    ("torchtitan", "torch", "name"),
    [
        ("0.2.2", "2.12.0+rocm7.15", "0.2.2"),
        ("0.2.3", "2.13.0", "0.2.2"),
        ("0.2.2+g73a0e697", "2.11.0a0+git1234", "0.2.2"),
        ("0.3.0", "2.14.0", "0.3.0"),
        ("0.3.1.dev20261101", "2.15.0", "0.3.0"),
    ],
)
def test_known_versions(packages: dict[str, str], torchtitan: str, torch: str, name: str) -> None:
    packages |= {"torchtitan": torchtitan, "torch": torch}
    assert versions.find_installed().name == name


@pytest.mark.parametrize(
    ("torchtitan", "torch", "said"),
    [
        (
            "0.4.0",
            "2.15.0",
            "this is torchtitan 0.4.0, and zbpipe knows 0.2.2 and 0.3.0: pip install torchtitan==0.3.0, or look for a"
            " newer zbpipe",
        ),
        (
            "0.2.1",
            "2.12.0",
            "this is torchtitan 0.2.1, and zbpipe knows 0.2.2 and 0.3.0: pip install torchtitan==0.2.2",
        ),
        (
            "0.3.0",
            "2.12.0+rocm7.15",
            "torchtitan 0.3.0 needs torch 2.14 or newer, and this is torch 2.12.0+rocm7.15: pip install"
            " torchtitan==0.2.2, or install torch 2.14 or newer",
        ),
        (
            "0.2.2",
            "2.10.0",
            "torchtitan 0.2.2 needs torch 2.11 or newer, and this is torch 2.10.0: install torch 2.11 or newer",
        ),
        (None, "2.15.0", "this is torchtitan of an unknown version, and zbpipe knows"),
    ],
)
def test_others_are_refused(packages: dict[str, str], torchtitan: str | None, torch: str, said: str) -> None:
    packages |= {"torch": torch} | ({"torchtitan": torchtitan} if torchtitan else {})
    with pytest.raises(ImportError, match=re.escape(said)):
        versions.find_installed()


def test_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"torchtitan is not installed: pip install torchtitan==0\."):
        versions.find_installed()
    with pytest.raises(emulated.DemoError, match="the demo trains with TorchTitan: torchtitan is not installed"):
        comparison.run_demo(2, progress=None)  # type: ignore[arg-type]


def source_tree(folder: Path, release: str) -> Path:
    """As AMD's Primus has it; to import it is an error."""
    (folder / "torchtitan").mkdir()
    (folder / "torchtitan" / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (folder / "assets").mkdir()
    (folder / "assets" / "version.txt").write_text(release + "\n")
    return folder


def test_a_source_tree_goes_before_what_pip_knows(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], tmp_path: Path
) -> None:
    packages |= {"torchtitan": "0.3.0", "torch": "2.12.0"}
    spec = ModuleSpec("torchtitan", None, is_package=True)
    spec.submodule_search_locations = [str(source_tree(tmp_path, "0.2.2") / "torchtitan")]
    monkeypatch.setattr(versions, "find_spec", lambda name: spec)
    assert versions.find_installed().name == "0.2.2"


def test_the_trainer_says_it_and_imports_nothing(tmp_path: Path) -> None:
    path = os.pathsep.join([str(source_tree(tmp_path, "0.4.0")), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "zbpipe.titan.train", "--training.steps", "3"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this is torchtitan 0.4.0, and zbpipe knows 0.2.2 and 0.3.0: pip install")
    assert "it was imported" not in done.stderr
