"""Copies beside the computations that torch runs, by a stand-in for a GPU's: what moves, when, and what it frees."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Checkpointing, batch, build_stage, gradients
from pipelines import Pipeline, Result, on_one_rank
from ranks import run_ranks
from test_gradients import FEW, assert_all_like_reference
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zbpipe
from zbpipe import CostModel, OpKind, Placement, Schedule, simulate
from zbpipe.costs import Link
from zbpipe.costs.model import Transport
from zbpipe.runtime.lists import Lists
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.runtime.offload import Copier, Copies, Saved, find_unshared, make_copier
from zbpipe.runtime.verify.gradient_check import schedule_w_last
from zbpipe.simulator import offload
from zbpipe.simulator.offloading import Offload, copy_all

CPU = torch.device("cpu")


def train(
    checkpointing: Checkpointing, what: Offload | None, backend: str | None = None
) -> tuple[dict[str, Tensor], Any]:
    """Three steps, compiled if a backend is given; the gradients of the last."""
    modules = [build_stage(index, 2, checkpointing) for index in range(2)]
    for block in [each for module in modules for each in module.children()]:
        if backend and not isinstance(block, nn.Embedding):
            block.compile(fullgraph=True, backend=backend)
    runtime = on_one_rank(modules, 4)
    plain = schedule_w_last(2, 4)
    runtime.adopt(plain if what is None else copy_all(plain, what))
    for _ in range(3):
        for module in modules:
            module.zero_grad()
        tokens, targets = batch(4)
        runtime.step(tokens, target=targets)
    return gradients(dict(enumerate(modules))), runtime


@cache
def without_copies(checkpointing: Checkpointing) -> dict[str, Tensor]:
    return train(checkpointing, None)[0]


@pytest.mark.parametrize("what", Offload)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_gradients_are_the_same_to_the_bit(one_rank: None, checkpointing: Checkpointing, what: Offload) -> None:
    expected = without_copies(checkpointing)
    found, runtime = train(checkpointing, what)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert runtime._copies.copier.copied > 10_000
    assert not runtime._copies._copies, "all came back"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_stages_offload_too(one_rank: None, backend: str) -> None:
    expected, _ = train("full", None, backend)
    found, runtime = train("full", Offload.ALL, backend)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert runtime._copies.copier.copied > 10_000


def train_both() -> dict[str, list[Result]]:
    return {name: train_rank(name, Offload.ALL) for name in ("ZBV", "ZBH2")}


def train_rank(name: str, what: Offload) -> list[Result]:
    results = []
    for count in FEW:
        pipeline = Pipeline(name, count)
        pipeline.schedule.adopt(copy_all(zbpipe.generate(name, dist.get_world_size(), count), what))
        tokens, targets = batch(count)
        for _ in range(2):
            pipeline.zero_grad()
            losses = pipeline.run(tokens, target=targets)
        assert pipeline.schedule._copies.copier.copied
        results.append((losses, pipeline.gradients()))
    return results


def test_pipelines_that_offload_everything() -> None:
    assert_all_like_reference(run_ranks(2, train_both), FEW)


# What it frees

WIDTH, TOKENS, LAYERS = 8, 1024, 6


class Live(TorchDispatchMode):
    """The most bytes that tensors ever had at once, of those made since; it asks them all, for storages may shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, ReferenceType[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in old:
                self._known[id(leaf.untyped_storage())] = ref(leaf.untyped_storage())
        alive = (storage for each in self._known.values() if (storage := each()) is not None)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return result


def peak(schedule: Schedule) -> float:
    """In tensors of all tokens, in the second step."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    runtime = on_one_rank([module], schedule.num_microbatches, "ZBH1", F.mse_loss)
    runtime.adopt(schedule)
    x, target = (torch.randn(schedule.num_microbatches * TOKENS, WIDTH) for _ in range(2))
    runtime.step(x, target=target)
    with Live() as live:
        runtime.step(x, target=target)
    return live.peak / (TOKENS * WIDTH * 4)


def test_live_bytes_drop_as_simulated(one_rank: None) -> None:
    """F leaves the inputs of all layers but the first, which is the user's. W needs an x and a dY of all of them."""
    plain = schedule_w_last(1, 6)
    kept, waits = LAYERS - 1, 2 * LAYERS
    costs = CostModel((1,), (1,), (1,), (kept,), freed_by_i=1 - waits / kept, working={OpKind.I: 2})
    measured, simulated = {}, {}
    for what in (None, *Offload):
        schedule = plain if what is None else copy_all(plain, what)
        simulated[what] = max(simulate(schedule, costs).peak_memory)
        measured[what] = peak(schedule)
    assert simulated == {None: 74, Offload.PAIRS: 39, Offload.ACTIVATIONS: 74, Offload.ALL: 14}
    # Outputs stay for the whole step, and others of the kind. A copy whose duration is unknown may last as long as the
    # next computation, so what one I has left is freed behind that.
    beyond = {what: measured[what] - simulated[what] for what in simulated}
    assert all(0 <= more <= 2 * 6 + (waits if what else 0) for what, more in beyond.items()), (measured, simulated)


def test_what_others_hold_stays(one_rank: None) -> None:
    weight, cache = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4)
    x = torch.randn(3, 4, requires_grad=True)
    saved = Saved()
    with saved.record():
        y = (x @ weight * cache).exp().square()
        z = y.sigmoid().exp()
    loss = z.sum()
    tensors = saved.list_alive()
    places = {each.untyped_storage().data_ptr() for each in tensors}
    assert {each.data_ptr() for each in (weight, cache, x, z)} <= places
    found = find_unshared(tensors, smallest=0)
    assert {each.data_ptr() for each in found} == places - {each.data_ptr() for each in (weight, cache, x, z)}
    assert len(found) == 2
    assert find_unshared(tensors, smallest=49) == []
    copier = make_copier(CPU)
    expected = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    copy = copier.copy_out(found)
    copier.release(copy)
    assert all(each.nbytes() == 0 for each in found)
    copier.copy_back(copy)
    copier.wait(copy)
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, weight]), expected))


def test_what_died_is_not_kept(one_rank: None) -> None:
    saved = Saved()
    with saved.record():
        torch.randn(3, requires_grad=True).exp().exp()
    assert saved.list_alive() == []


# When


def noting(log: list[str], word: str, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: log.append(word) or call(*args)


@pytest.mark.parametrize(
    ("bandwidth", "expected"),
    [
        (100, "F0 out F1 release I1 back I0 wait W1 W0"),
        (1, "F0 out F1 release I1 back I0 wait W1 W0"),
        (0.5, "F0 out F1 I1 release back I0 wait W1 W0"),
    ],
)
def test_memory_is_freed_behind_the_computation_that_the_copy_outlasts_not(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, bandwidth: float, expected: str
) -> None:
    log: list[str] = []
    runtime = on_one_rank([nn.Linear(4, 4)], 2, "ZBH1", F.mse_loss)
    around = Copies.around

    def logged(self: Copies, kind: str, stage: int, microbatch: int, compute: Any) -> Any:
        if f"{kind}{microbatch}" not in log:  # the loss is a part of F
            log.append(f"{kind}{microbatch}")
        return around(self, kind, stage, microbatch, compute)

    for name, word in {"copy_out": "out", "release": "release", "copy_back": "back", "wait": "wait"}.items():
        monkeypatch.setattr(Copier, name, noting(log, word, getattr(Copier, name)))
    monkeypatch.setattr(Copies, "around", logged)
    runtime.adopt(copy_all(schedule_w_last(1, 2), Offload.ALL))
    schedule = Schedule.from_csv("0F0,0OF0,0F1,0I1,0RF0,0I0,0W1,0W0")  # in place of that
    runtime.adopt(schedule, CostModel.uniform(schedule.placement, host=Link(bandwidth=bandwidth)))
    x = torch.randn(2, 4)
    runtime.step(x, target=x)
    assert " ".join(log) == expected
    log.clear()
    runtime.eval(x, target=x)
    assert "F1" in log
    assert not {"out", "back"} & set(log)


# The option


def test_the_option_plans_the_copies(one_rank: None) -> None:
    build = partial(on_one_rank, [nn.Linear(4, 4)], 4, "ZBH1", F.mse_loss)
    costs = CostModel.uniform(Placement.loop(1), host=Link(bandwidth=8))
    assert build(costs=costs, offload="pairs").schedule == offload(zbpipe.generate("ZBH1", 1, 4), costs, what="pairs")


def test_what_cannot_offload_is_refused(one_rank: None) -> None:
    runtime = on_one_rank([nn.Linear(4, 4)], 2, "ZBH1", F.mse_loss, split_backward="autograd")
    plain = schedule_w_last(1, 2)
    with pytest.raises(ValueError, match="only zbpipe's split frees them: keep split_backward='deferred'"):
        runtime.adopt(copy_all(plain, Offload.PAIRS))
    runtime.adopt(copy_all(plain, Offload.ACTIVATIONS))
    x = torch.randn(2, 4)
    runtime.step(x, target=x)
    with pytest.raises(ValueError, match="on the CPU in tests, not on meta: omit offload"):
        make_copier(torch.device("meta"))


def test_copies_that_begin_in_a_recorded_step_last(one_rank: None) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    runtime = on_one_rank([module], 2, "ZBH1", F.mse_loss)
    runtime.adopt(copy_all(schedule_w_last(1, 4), Offload.ALL))
    records: list[StepRecord] = []
    collect(runtime, [Wanted.TIMES], records.extend)
    x = torch.randn(4, 4)
    copied = []
    for _ in range(3):
        runtime.step(x, target=x, microbatches=4)
        copied.append(runtime._copies.copier.copied)
    assert len(records) == 1
    # The first I leaves nothing to W.
    assert copied[2] - copied[1] == copied[1] - copied[0] > copied[0] > 0


def test_orders_with_copies_are_made_without_filled_waits() -> None:
    """Copies leave nothing to fill."""
    costs = replace(CostModel.uniform(Placement.loop(2), host=Link(bandwidth=8)), fill_waits="all")
    seen: list[CostModel] = []

    def make(*_: int, costs: CostModel, **more: Any) -> Schedule:
        seen.append(costs)
        return zbpipe.generate("ZBH1", 2, 4)

    algorithm: Any = SimpleNamespace(any_stages_per_rank=False, make=make)
    for what in (None, Offload.PAIRS):
        Lists(algorithm, Placement.loop(2), costs, None, what, Transport.IDEAL, None, False).make(4)
    assert [each.fill_waits for each in seen] == ["all", "off"]
