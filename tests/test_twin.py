"""Copies to the host, and events after computations, on a twin of a GPU: whatever the order in which its streams run,
nothing is read too early."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from pipelines import on_one_rank
from torch import Tensor, nn
from twin import Event, Twin

import zbpipe
from zbpipe import Schedule
from zbpipe.runtime._torch import hooks
from zbpipe.runtime.measure import recording
from zbpipe.runtime.offload import Copier
from zbpipe.runtime.ranks import progress
from zbpipe.runtime.verify.gradient_check import schedule_w_last
from zbpipe.simulator.offloading import Offload, copy_all

CPU = torch.device("cpu")
MICROBATCHES = 4


def train(
    schedule: Schedule, twin: Twin | None, monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], object] = bool
) -> list[Tensor]:
    """Gradients of the second step, whose streams are the twin's."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    if twin is not None:
        monkeypatch.setattr("zbpipe.runtime.schedules.make_copier", lambda device: Copier(twin))
    runtime = on_one_rank(modules, MICROBATCHES, loss=nn.functional.mse_loss)
    runtime.adopt(schedule)
    before(runtime)
    x, target = torch.randn(2, 2 * MICROBATCHES, 8)
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        if twin is None:
            runtime.step(x, target=target)
        else:
            with twin.computing():
                runtime.step(x, target=target)
    return [weight.grad for module in modules for weight in module.parameters() if weight.grad is not None]


ORDERS: dict[str, Callable[[], Schedule]] = {
    "all F, all I, all W": lambda: schedule_w_last(2, MICROBATCHES),
    "ZBV": lambda: zbpipe.generate("ZBV", 1, MICROBATCHES),
}


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("what", Offload)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_the_streams_gives_the_same_gradients(
    one_rank: None, order: str, what: Offload, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ORDERS[order]()
    expected = train(plain, None, monkeypatch)
    for seed in seeds:
        found = train(copy_all(plain, what), Twin(seed), monkeypatch)
        assert all(map(torch.equal, found, expected)), f"seed {seed}"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))])
def test_a_device_behind_the_host_is_seen_as_it_is(one_rank: None, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress, by events that are used again, and times of ops."""
    schedule = copy_all(zbpipe.generate("ZBV", 1, MICROBATCHES), Offload.ALL)
    twin, records, own = Twin(seed), list[recording.StepRecord](), list[Event]()
    launched = progress.Launched(lambda: own.append(twin.new_event()) or own[-1])
    monkeypatch.setattr(progress, "MOST", 5)
    monkeypatch.setattr(progress, "_launched_on", lambda device: launched)
    monkeypatch.setattr(recording, "find_device", lambda device: twin)

    def count_passed() -> int:
        return max(sum(each in own for each in twin.passed), launched.count - progress.MOST)

    def compare(kind: str, stage: int, microbatch: int, compute: Callable[[], Any]) -> Any:
        result = compute()
        before, found = count_passed(), launched.count_ended()
        assert before <= found <= count_passed()
        return result

    def attach(runtime: Any) -> None:
        recording.collect(runtime, [recording.Wanted.NOTHING, recording.Wanted.TIMES], records.extend)
        compared.enter_context(hooks.hook(runtime, hooks.HookOrder.SCALE, compare))

    with ExitStack() as compared:
        train(schedule, twin, monkeypatch, attach)
    ops = list(schedule.computations.ops[0])
    assert launched.count == 2 * (len(ops) + MICROBATCHES + 1), "the loss is a part of F, and the step has an end"
    assert [span.op for span in records[0].spans] == ops
    times = [time for span in records[0].spans for time in (span.start, span.end)]
    assert [*times, records[0].seconds] == sorted({*times, records[0].seconds})
