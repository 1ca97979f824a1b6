"""What the documents say, works."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compatibility import without_patches

import zbpipe
from zbpipe import registry
from zbpipe.runtime.split.layers import defer_weights
from zbpipe.runtime.split.products import WeightGradients

ROOT = Path(__file__).parent.parent


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_adding_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's function and its table, in a fresh interpreter; the page's commands on the table."""
    page = ROOT / "docs" / "adding-a-schedule.md"
    (function,) = blocks(page, "python")
    program = (
        function
        + "\nprint(zbpipe.generate('lateweights', 2, 1), zbpipe.stage_indices('LateWeights', rank=1, num_ranks=2))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "rank 0: 0F0 0I0 0W0\nrank 1: 1F0 1I0 1W0 (1,)\n"

    (table,) = blocks(page, "csv")
    (tmp_path / "mine.csv").write_text(table)
    monkeypatch.chdir(tmp_path)
    assert zbpipe.validate(zbpipe.generate("mine.csv", 2, 2)) == []
    commands = [line for line in blocks(page, "sh")[0].splitlines() if line.startswith("zbpipe")]
    for command in commands:
        subprocess.run([sys.executable, "-m", *command.split()], check=True, capture_output=True, timeout=60)


def test_an_installed_package_adds_a_schedule(tmp_path: Path) -> None:
    """By the entry point that the page shows."""
    (function,) = blocks(ROOT / "docs" / "adding-a-schedule.md", "python")
    (entry_point,) = blocks(ROOT / "docs" / "adding-a-schedule.md", "toml")
    name, module = re.findall(r'(\w+) = "([\w.]+)"', entry_point)[0]
    package = tmp_path / Path(*module.split(".")).with_suffix(".py")
    package.parent.mkdir(parents=True)
    package.write_text(function)
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[zbpipe.algorithms]\n{name} = {module}\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import zbpipe; print(zbpipe.generate('LateWeights', 1, 1))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "rank 0: 0F0 0I0 0W0\n"


def test_deferring_a_layer() -> None:
    """The page's layer leaves its weight gradient to W, and gets the right one."""
    names: dict[str, Any] = {}
    (code,) = blocks(ROOT / "docs" / "deferring-a-layer.md", "python")
    exec(code, names)
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


def test_every_schedule_has_a_summary() -> None:
    assert all(traits.summary for traits in registry.schedules().values())


def test_a_patch_release_does_not_change_what_works_together() -> None:
    assert without_patches("torch 2.14.1\nand torchtitan 0.3.0: works") == "torch 2.14 and torchtitan 0.3: works"
    assert without_patches("torch 2.14.1") != without_patches("torch 2.15.0")
