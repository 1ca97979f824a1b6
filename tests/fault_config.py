"""Configs for TorchTitan's `--module`: the debug model in jobs that go wrong. Rank 1 is told to be at fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torchtitan.trainer import Trainer

from zbpipe.cli.demo.models03 import llama3_python_stdlib


def other_schedule() -> Trainer.Config:
    config = llama3_python_stdlib()
    config.parallelism.pipeline_parallel_schedule = "1F1B" if os.environ["RANK"] == "1" else "ZBV"
    return config


def killed_in_step_3() -> Trainer.Config:
    return _rank_1_in_step(3, lambda trainer: _in_forward(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def raises_in_step_2() -> Trainer.Config:
    return _rank_1_in_step(2, lambda trainer: _in_forward(_explode))


def nan_in_step_2() -> Trainer.Config:
    return _rank_1_in_step(2, _break_weights)


def _rank_1_in_step(number: int, fault: Callable[[Trainer], None]) -> Trainer.Config:
    train_step = Trainer.train_step

    def train_step_with_fault(trainer: Trainer, data: Any) -> None:
        if trainer.step == number:
            fault(trainer)
        train_step(trainer, data)

    if os.environ["RANK"] == "1":
        Trainer.train_step = train_step_with_fault
    return llama3_python_stdlib()


def _in_forward(fault: Callable[[], None]) -> None:
    """At the thirtieth call of any module: in the middle of a step."""
    calls = iter(range(30))

    def count(*args: Any) -> None:
        if next(calls, None) is None:
            fault()

    torch.nn.modules.module.register_module_forward_pre_hook(count)


def _explode() -> None:
    raise ArithmeticError("too much")


def _break_weights(trainer: Trainer) -> None:
    with torch.no_grad():
        for weight in trainer.model_parts[0].parameters():
            weight.fill_(float("nan"))
