"""What GPUs run in another way than CPUs: the trials of it notice faults, and plain schedules leave it out."""

import logging
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from pipelines import on_one_rank
from torch import nn

from zbpipe.runtime.measure.recording import MemoryCounter
from zbpipe.runtime.offload import Copier
from zbpipe.runtime.split import products, stage
from zbpipe.runtime.split.deferring_layers import deferral_of
from zbpipe.runtime.split.products import PendingGradient
from zbpipe.runtime.verify import on_device
from zbpipe.runtime.verify.gradient_check import schedule_w_last
from zbpipe.simulator.offloading import Offload, copy_all

CPU = torch.device("cpu")
LOOKS_AT_TWO = ("messages in one queue", "messages in a group per edge")
COMPILES = "W of compiled regions"


def add_twice(weight: Any, grad: Any, one: Any, other: Any) -> bool:
    weight.grad = (0 if grad is None else grad) + 2 * (one @ other).to(weight.dtype)
    return True


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "plain schedules": (PendingGradient, "gradient", lambda self: torch.ones_like(self.weight)),
    "fused W": (products, "add_product", add_twice),
    "copies to the host": (Copier, "copy_out", lambda *_: pytest.fail("cannot copy")),
    "times and memory of ops": (MemoryCounter, "within_op", lambda *_: nullcontext()),
    COMPILES: (stage, "defer_in_compiled_regions", lambda module, gradients: None),
    "FSDP during computations": (stage, "accumulate_and_reduce", lambda module, pending: None),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {COMPILES}))
def test_a_trial_tells_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[name])
    with pytest.raises((RuntimeError, KeyError, pytest.fail.Exception)):
        on_device.TRIALS[name](CPU)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", sorted(on_device.TRIALS.keys() - {*LOOKS_AT_TWO, COMPILES}))
def test_a_trial_passes(name: str) -> None:
    on_device.TRIALS[name](CPU)


@pytest.mark.long
@pytest.mark.usefixtures("one_rank")
def test_the_trial_with_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device.TRIALS[COMPILES](CPU)
    monkeypatch.setattr(*FAULTS[COMPILES])
    with pytest.raises(RuntimeError, match="only 0% of W could wait"):
        on_device.TRIALS[COMPILES](CPU)


@pytest.mark.long
def test_processes_of_their_own() -> None:
    good, edges, unknown = on_device.try_out("cpu", (*LOOKS_AT_TWO, "telepathy"))
    assert str(good) == "messages in one queue: works"
    assert not edges.failed
    assert unknown == on_device.Result("telepathy", "KeyError: 'telepathy'", failed=True)


def test_what_the_machine_has_not_is_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    found = [each.found for each in on_device.try_out("cuda", LOOKS_AT_TWO)]
    assert found == ["untried, because it needs two GPUs"] * 2
    monkeypatch.setattr(on_device, "HAS_GROUPS_PER_EDGE", False)
    (result,) = on_device.try_out("cpu", LOOKS_AT_TWO[1:])
    assert result.found == f"untried, because torch {torch.__version__} has none"
    assert not result.failed


@pytest.mark.usefixtures("one_rank")
def test_a_plain_schedule_leaves_it_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[Any] = []
    monkeypatch.setattr(products, "add_product", lambda *args: fused.append(args) or False)
    modules = [nn.Linear(4, 4) for _ in range(2)]
    modules[1].compile(backend="aot_eager")
    with caplog.at_level(logging.WARNING):
        schedule = on_one_rank(modules, 4, loss=nn.functional.mse_loss, plain=True)
    assert "plain: without events" in caplog.text
    schedule.adopt(copy_all(schedule_w_last(2, 4), Offload.ALL))
    assert not schedule.schedule.has_copies
    assert not deferral_of(modules[1]).is_region
    assert {each.fsdp_mode for each in schedule.works} == {"torch"}
    for _ in range(2):
        schedule.step(torch.randn(4, 4), target=torch.zeros(4, 4))
    assert fused == []
    with pytest.raises(ValueError, match="plain"):
        on_one_rank(modules, 4, plain="yes")


def test_the_doctor_tells_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = import_module("zbpipe.cli.doctor")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    bad = on_device.Result("fused W", "RuntimeError: off", failed=True)
    monkeypatch.setattr(on_device, "try_out", lambda device: iter([on_device.Result("memory of ops"), bad]))
    head, good, fails, way_out = "\n".join(doctor._devices()).partition("\n\n")[2].splitlines()
    assert (head, good, fails) == ("# Tried on the GPUs", "memory of ops: works", "fused W: FAILS: RuntimeError: off")
    assert "--zbpipe.plain" in way_out
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert not any("Tried" in line for line in doctor._devices())
