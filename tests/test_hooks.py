"""Hooks around computations run in one order, whoever came first, and end in any order."""

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import on_one_rank
from torch import nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe.runtime._torch import hooks as torch_hooks
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime._torch.attributes import replaced
from zbpipe.runtime._torch.hooks import HookOrder
from zbpipe.runtime._torch.stage_work import own

ORDERS = (HookOrder.FOLLOW, HookOrder.RECORD, HookOrder.COPY)


def pipeline(name: str) -> Any:
    per_rank = zbpipe.generate(name, 1, 1).placement.num_stages
    return on_one_rank([nn.Linear(4, 4) for _ in range(per_rank)], 2, name, F.mse_loss)


def note(seen: list[str], order: HookOrder, kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
    seen.append(f"{order.name} {stage}{kind}{microbatch}")
    return compute()


@pytest.mark.parametrize("name", ["ZBV", "1F1B"])
def test_hooks_run_in_their_order_and_end_in_any(one_rank: None, name: str) -> None:
    schedule = pipeline(name)
    x = torch.ones(2, 4)
    schedule.step(x, target=x)
    before = [dict(vars(owner)).keys() for owner in (schedule, *pipelining.stages_of(schedule))]
    for come, go in zip(permutations(ORDERS), reversed(list(permutations(ORDERS))), strict=True):
        seen: list[str] = []
        hooks = {order: torch_hooks.hook(schedule, order, partial(note, seen, order)) for order in ORDERS}
        for order in come:
            hooks[order].__enter__()
        left = list(ORDERS)
        for order in go:
            seen.clear()
            schedule.step(x, target=x)
            first = [each.split()[0] for each in seen if each.endswith(" 0F0")][: len(left)]
            assert first == [each.name for each in left]
            assert len({each.split()[1] for each in seen}) * len(left) <= len(seen)
            hooks[order].__exit__(None, None, None)
            left.remove(order)
        seen.clear()
        schedule.step(x, target=x)
        assert seen == []
    assert [vars(owner).keys() for owner in (schedule, *pipelining.stages_of(schedule))] == before


def test_a_hook_that_ends_in_a_computation_ends_alone(one_rank: None) -> None:
    schedule = pipeline("ZBV")
    seen: list[str] = []
    last = torch_hooks.hook(schedule, HookOrder.RECORD, partial(note, seen, HookOrder.RECORD))

    def end_other(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        last.__exit__(None, None, None)
        first.__exit__(None, None, None)
        return compute()

    first = torch_hooks.hook(schedule, HookOrder.RECORD, end_other)
    last.__enter__()
    first.__enter__()
    schedule.step(torch.ones(2, 4), target=torch.ones(2, 4))
    assert seen == ["RECORD 0F0"]


def test_what_is_not_there_cannot_be_replaced() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(AttributeError, match="has no attribute 'slots' to replace"), replaced(layer, slots=None):
        pass
    assert "slots" not in vars(layer)


def test_a_backward_of_a_framework_is_named(one_rank: None) -> None:
    """It reduces gradients itself, so stages that torch's own would reduce too early are not refused."""
    schedule = pipeline("ZBV")
    first, second = pipelining.stages_of(schedule)

    def frameworks(*args: Any, **kwargs: Any) -> Any:
        return type(second).backward_maybe_with_nosync(second, *args, **kwargs)

    vars(second)["backward_maybe_with_nosync"] = frameworks
    assert own(first).own_backward == ""
    assert own(second).own_backward.endswith("frameworks")


def test_a_stage_keeps_its_class_and_gets_its_methods_back(one_rank: None) -> None:
    schedule = pipeline("ZBV")
    stage = pipelining.stages_of(schedule)[1]
    work = own(stage)
    assert (type(stage), type(work).__name__) == (PipelineStage, "SplitWork")
    assert "forward_one_chunk" in vars(stage)
    work.release()
    assert not {*work.METHODS, "zbpipe_work"} & vars(stage).keys()
