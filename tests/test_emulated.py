"""The demo's second part: real processes, whose stages sleep."""

import subprocess
from typing import Any

import pytest

from zbpipe import generate
from zbpipe.cli.demo import emulated
from zbpipe.cli.demo.launch import DemoError

pytestmark = pytest.mark.long


def test_every_rank_runs_its_list_and_takes_at_least_what_it_sleeps() -> None:
    results = emulated.emulate(ranks=2, microbatches=3, seconds=1e-3, rounds=1)
    assert [each.schedule for each in results] == ["1F1B", "ZBV"]
    for each in results:
        ran = [[span.op for span in spans] for spans in each.measured.spans]
        assert ran == [list(ops) for ops in generate(each.schedule, 2, 3)]
        assert min(each.seconds, each.measured.makespan, each.planned.makespan) >= 9e-3
        assert each.measured.makespan <= each.seconds * 1.5
        assert 0 <= each.measured.bubble < 1


def test_a_rank_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen([each.replace("0.001", "nan") for each in command], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(DemoError, match=r"ended with 1: .*ValueError"):
        emulated.emulate(ranks=2, microbatches=3, seconds=0.001, rounds=1)
    assert started[0].returncode == 1
