"""Configs for TorchTitan's `--module`: the debug model in jobs that go wrong. Rank 1 is told to be at fault."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torchtitan.trainer import Trainer

from zbpipe.cli.demo.models03 import llama3_python_stdlib

_SLOW = 0.05
"""Seconds in which a slow block sleeps in each forward."""


def other_schedule() -> Trainer.Config:
    config = llama3_python_stdlib()
    config.parallelism.pipeline_parallel_schedule = "1F1B" if os.environ["RANK"] == "1" else "ZBV"
    return config


def killed_in_step_3() -> Trainer.Config:
    return _rank_1_in_step(3, lambda trainer: _in_forward(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def slow_at_both_ends() -> Trainer.Config:
    """A job for which a V is a bad placement: rank 0 has both slow stages. Rank 1 is killed in step 7."""
    train_step = Trainer.train_step

    def train_step_with_slow_blocks(trainer: Trainer, data: Any) -> None:
        last = str(len(trainer.model_config.layers) - 1)
        for part in trainer.model_parts if trainer.step == 1 else ():
            for name, block in part.layers.items():
                if name in ("0", last):
                    block.register_forward_pre_hook(lambda *_: time.sleep(_SLOW))
        train_step(trainer, data)

    Trainer.train_step = train_step_with_slow_blocks
    return _rank_1_in_step(7, lambda trainer: _in_forward(lambda: os.kill(os.getpid(), signal.SIGKILL)))


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
