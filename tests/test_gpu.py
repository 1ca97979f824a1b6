"""The command for the first hour with a GPU runs without one, says what it could not try, and sees what is wrong."""

import json
import sys
from pathlib import Path

import gpu
import pytest
import torch
from commands import process
from gpu import UNTRIED, Line, Machine

from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.split.stage import SplitWork

CPU = Machine(torch.device("cpu"), rounds=2, ranks=[2])


@pytest.mark.long
def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    arguments = ("--device", "cpu", "--rounds", "1", "--ranks", "2", "--json")
    ran = process(sys.executable, gpu.__file__, *arguments, report, timeout=900)
    lines = json.loads(report.read_text())["results"]
    assert {line["part"] for line in lines} == gpu.PARTS.keys()
    untried = [line["what"] for line in lines if line["verdict"] == UNTRIED]
    assert "F, I, W captured and replayed" in untried
    assert any("W delayed" in what for what in untried)
    assert any("TORCH_CUDA_SANITIZER" in what for what in untried)
    assert ran.stdout.splitlines()[-1] == f"{len(lines) - len(untried)} PASS, 0 FAIL, {len(untried)} {UNTRIED}"


def verdicts(part: str) -> list[str]:
    return [line.verdict for line in gpu.run(CPU, [part])]


def test_wrong_gradients_fail(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    assert verdicts("graph") == ["PASS", UNTRIED]
    monkeypatch.setattr(PendingGradient, "accumulate", lambda pending: None)
    assert verdicts("graph") == ["FAIL", UNTRIED]


def test_a_step_that_is_not_steady_fails(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    assert verdicts("capture") == ["PASS", UNTRIED, "PASS", UNTRIED]
    monkeypatch.setattr(SplitWork, "is_steady", False)
    assert verdicts("capture") == ["FAIL", UNTRIED, "PASS", UNTRIED]  # ZB splits nothing on one rank


def test_a_part_that_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: Machine) -> list[Line]:
        raise ValueError("no memory\nmore of it")

    monkeypatch.setitem(gpu.PARTS, "host", broken)
    (line,) = gpu.run(CPU, ["host"])
    assert (line.verdict, line.what, line.text) == ("FAIL", "ValueError", "no memory")
