"""`zbpipe doctor`: the report has what a job depends on, and no secrets."""

from importlib import import_module
from pathlib import Path

import pytest
from commands import answer

from zbpipe.frameworks.titan import versions

doctor = import_module("zbpipe.cli.doctor")  # `zbpipe.cli` has the command by that name


def refuse() -> None:
    raise ImportError("torchtitan is too new")


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
    assert printed == f"{text}wrote {report}: attach it at {doctor._issues()}\n"
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
