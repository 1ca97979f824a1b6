"""`zbpipe estimate`: steps, memory and gains of a job that was not launched."""

import re
import sys
from dataclasses import replace
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from data import assert_refused, refusals
from documents import blocks
from torch import nn
from torch.utils.checkpoint import checkpoint

from zbpipe import CostModel, Schedule, estimate, generate, simulate
from zbpipe.cli.estimates import WAITING, compare, lines, list_searched, record
from zbpipe.costs import JobCosts, MemoryLimit
from zbpipe.costs.layers import split_of
from zbpipe.costs.transformer import Checkpointing
from zbpipe.estimation import Estimate, Workload, load_layers
from zbpipe.estimation.cut import WorkloadCut
from zbpipe.estimation.devices import DEVICES, Device, find
from zbpipe.estimation.estimate import job_costs, memory_by_rank
from zbpipe.estimation.fsdp import step_without_pipeline
from zbpipe.estimation.layouts import degrees_to_try, search
from zbpipe.estimation.rates import HOST, rates
from zbpipe.estimation.rows import NO_PIPELINE, PLAN, Memory, Step
from zbpipe.estimation.workload import Degrees, LayerWork, ParameterBytes, Spelling
from zbpipe.frameworks.titan import cpu
from zbpipe.runtime.measure.counts import count_bytes, count_operations
from zbpipe.schedule.ir import OpKind, Placement
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.memory import peak_bytes

GIB = 2**30
_FREE = Device("toy", 2.0, 0.5, 0.5, hbm=1e30, inside=1e30, gib=100, source="", share_from="", between=1e30)
ONE_A_SECOND = replace(_FREE, latency=0.0, overhead=0.0)
"""One operation a second in training, and messages that take no time."""


def workload(layers: int = 4, degrees: Degrees | None = None, microbatches: int = 8) -> Workload:
    """Each layer computes 1 for F, 2 for I, 3 for W, keeps 1 GiB, and leaves 2 GiB to W."""
    block = LayerWork(("layers.0",), 1, 2, 3, 1000.0, GIB, 2 * GIB, ((OpKind.F, 0.5 * GIB),))
    blocks = tuple(replace(block, modules=(f"layers.{n}",)) for n in range(layers))
    degrees = degrees or Degrees(pipeline=2)
    return Workload("toy", blocks, degrees, microbatches, 10, message_bytes=0, operations=1.2, words="made up")


def by_checkpointing(layers: int, kept: float, degrees: Degrees, how: Checkpointing | None) -> Workload:
    """Per layer and microbatch 1 GiB, and without checkpointing `kept`. F, I and W take equal times."""
    made, each = workload(layers, degrees), GIB * (kept if how is Checkpointing.NONE else 1)
    blocks = (replace(layer, f=1e15, i=1e15, w=1e15, activations=each, waits=each) for layer in made.layers)
    remade = partial(by_checkpointing, layers, kept)
    return replace(made, layers=tuple(blocks), checkpointing=how, remade=remade)


def named(work: Workload, *names: str, device: Device = ONE_A_SECOND, **more: Any) -> Estimate:
    return estimate(work, device, only=names, plans=False, **more)


def measured(placement: Placement, **times: Any) -> JobCosts:
    return JobCosts(CostModel.uniform(placement, **times))


def row(found: Estimate, name: str, stages: int = 1) -> Step:
    return next(step for step in found.steps if (step.schedule, step.stages_per_rank) == (name, stages))


def test_a_step_by_hand() -> None:
    """1F1B on 2 ranks, 8 microbatches: 9 times what a rank works on one, 2 layers of 6 seconds."""
    found = named(workload(), "1F1B", "ZBH1")
    usual, zbh1 = row(found, "1F1B"), row(found, "ZBH1")
    speed = 80 / (9 * 12) / 2
    figures = (usual.seconds, usual.bubble, usual.tokens_per_second, usual.mfu)
    assert figures == pytest.approx((9 * 12, 1 / 9, speed, speed * 1.2 / 2))
    # Two microbatches, and what F of a layer needs while it runs. 1000 parameters of 2 layers.
    assert usual.memory.activations == 4 * GIB
    assert usual.memory.weights + usual.memory.optimizer == ParameterBytes().total(1) * 2000
    assert usual.fits
    assert re.search(r"^1F1B .* 4\.5 .* 4\.0 ", "\n".join(lines(found)), re.MULTILINE), "in GiB"
    assert found.relative(zbh1, usual) == pytest.approx(zbh1.seconds / usual.seconds)
    assert zbh1.memory.waiting > usual.memory.waiting == 0
    assert zbh1.timeline is not None
    assert zbh1.memory.total == pytest.approx(max(peak_bytes(zbh1.timeline)) + ParameterBytes().total(1) * 2000)


def test_a_step_with_sizes_by_hand() -> None:
    """Of each layer's 6 seconds, attention takes 0.5 in F and 1 in I. Microbatches have 10 tokens in one sample."""
    blocks = tuple(replace(layer, attention=(0.5, 1.0)) for layer in workload().layers)
    work = replace(workload(), layers=blocks)
    usual, equal = (row(named(work, "1F1B", sizes=sizes), "1F1B") for sizes in ((), (10,) * 8))
    assert (usual.seconds, usual.memory) == (equal.seconds, equal.memory)
    half = row(named(work, "1F1B", sizes=[(5, 50)] * 8), "1F1B")  # in samples as long
    assert (half.seconds, half.memory.activations) == (usual.seconds / 2, usual.memory.activations / 2)
    assert half.tokens_per_second == usual.tokens_per_second
    longer = row(named(work, "1F1B", sizes=[(10, 200)] * 8), "1F1B")
    assert longer.seconds == pytest.approx(usual.seconds * (6 + 1.5) / 6)
    assert longer.memory == usual.memory
    found = named(work, "1F1B", sizes=[*[5] * 7, 10])
    assert row(found, "1F1B").memory == usual.memory, "that of the largest, though it is the last"
    assert half.seconds < row(found, "1F1B").seconds < usual.seconds
    assert found.left_out == (
        ("no pipeline (FSDP)", "without a pipeline, sizes of microbatches are not counted: omit them"),
    )
    assert "8 microbatches of 6 tokens" in "\n".join(lines(found))
    with pytest.raises(ValueError, match="sizes of 2 microbatches, but the step has 8"):
        named(work, "1F1B", sizes=[5, 10])


def test_no_step_is_shorter_than_its_launches() -> None:
    """8 microbatches, 2 blocks on each of 2 ranks, on a GPU that takes next to no time."""
    fast = rates(replace(ONE_A_SECOND, peak=1e12))
    for compiled, (plain, apart) in HOST.items():
        work = replace(workload(), compiled=compiled)
        found = named(work, "1F1B", "ZBH1", device=fast.device)
        assert row(found, "1F1B").seconds == pytest.approx(8 * 2 * plain, rel=1e-3)
        assert row(found, "ZBH1").seconds == pytest.approx(8 * 2 * (plain + apart), rel=1e-3)
        assert step_without_pipeline(work, fast).seconds == pytest.approx(4 * plain, rel=1e-3)  # 4 microbatches at once
        moe = replace(work, layers=tuple(replace(each, num_experts=8) for each in work.layers))
        longer = row(named(moe, "1F1B", device=fast.device), "1F1B").seconds
        assert longer == pytest.approx(2.1 * 8 * 2 * plain, rel=1e-3)


@pytest.mark.parametrize(
    ("microbatches", "share", "told"),
    [
        (3, None, "with 3 microbatches, 2 pipeline ranks are idle for much of each step: set --batch 8 or more (a la"),
        (4, 0.61, "W computes only 61% of the weight gradients"),
        (4, 0.8, "toy: "),
    ],
)
def test_what_costs_much_is_told_after_the_answer(microbatches: int, share: float | None, told: str) -> None:
    work = replace(workload(microbatches=microbatches), microbatch_size=2, batch_option="--batch", deferred=share)
    found = named(work, "1F1B")
    _, first, *_ = (line for line in lines(found) if not line.startswith("  "))
    assert first.startswith(told)
    assert (first in record(found)["words"]) == (not first.startswith("toy"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", [*Checkpointing, None])
def test_torchs_split_is_last_where_it_fails(checkpointing: Checkpointing | None, compiled: bool) -> None:
    work = replace(workload(), checkpointing=checkpointing, compiled=compiled)
    found = named(work, "1F1B", "DualPipeV", "DualPipeVSplit")
    runs = checkpointing is Checkpointing.NONE and not compiled
    order = ["DualPipeVSplit", "DualPipeV", "1F1B"] if runs else ["DualPipeVSplit", "1F1B", "DualPipeV"]
    assert [step.schedule for step in found.steps if step.timeline] == order
    assert row(found, "DualPipeV", 2).seconds == row(found, "DualPipeVSplit", 2).seconds
    text = "\n".join(lines(found))
    assert "DualPipeV* " in text
    assert "* torch's own split: it fails under selective checkpointing and torch.compile" in text
    assert (named(work, "DualPipeV").on_these_degrees is not None) == runs


def layer_seconds(layer: LayerWork, device: Device = ONE_A_SECOND, **changes: Any) -> list[float]:
    costs = rates(device).layer_costs(replace(workload(layers=1), layers=(layer,), **changes))
    return [costs.f[0], costs.i[0], costs.w[0]]


SLOW_LINKS = replace(ONE_A_SECOND, inside=10.0)


def test_tensor_parallelism_shares_operations_and_takes_time_for_collectives() -> None:
    """Four collectives of 80 bytes at 10 bytes a second, three quarters of which come from others. Products are longer
    by 64 of their width of a 16th for each further GPU, and asynchronous collectives are half hidden."""
    layer = replace(workload().layers[0], transfers=(4, 0))
    job = {"message_bytes": 20.0, "degrees": Degrees(pipeline=2, tensor=4)}
    each = (1 + 64 * 3 / replace(workload(), layers=(layer,), **job).width) / 4  # type: ignore[arg-type]
    together = 4 * SLOW_LINKS.collective(80, 4)
    assert together == pytest.approx(4 * 80 * 0.75 / 10 / 0.85)
    for hidden in (0.0, 0.5):
        found = layer_seconds(layer, SLOW_LINKS, **job, hidden_tensor=hidden)
        assert found == pytest.approx([each + (1 - hidden) * together, 2 * each, 3 * each])


def test_filled_waits_are_rows_or_one_line() -> None:
    """A block's F and I each have two collectives of TP. ZBV's W fills those of I."""
    plain = replace(workload(degrees=Degrees(pipeline=2, tensor=4)), message_bytes=2000.0, schedule="ZBV")
    plain = replace(plain, layers=tuple(replace(each, transfers=(2, 2)) for each in plain.layers))
    own = replace(plain, fill_waits="own")
    links = replace(SLOW_LINKS, inside=1e4)
    rows = {work.fill_waits: named(work, "ZBV", "1F1B", device=links) for work in (plain, own)}
    off, on = ({step.schedule: step for step in each.steps} for each in rows.values())
    waits: Any = off["ZBV"].timeline.costs.waits  # type: ignore[union-attr]
    assert all(waits[OpKind.I])
    assert waits == on["ZBV"].timeline.costs.waits  # type: ignore[union-attr]
    gain = 1 - on["ZBV"].seconds / off["ZBV"].seconds
    assert gain > 0.02
    assert on["1F1B"].seconds == off["1F1B"].seconds  # torch's, whose backwards are whole
    told, silent = (each.advice for each in rows.values())
    assert told is not None
    assert f'ZBV with fill_waits="own" is {gain:.1%} shorter in the simulator' in told.waits
    assert silent is not None
    assert not silent.waits
    assert "--zbpipe.fill-waits own is untried on GPUs: halve its gain" in own.warnings
    compiled = replace(own, compiled=True)
    assert "--zbpipe.fill-waits own changes nothing: its blocks are compiled" in compiled.warnings
    (timeline,) = (each.timeline for each in named(compiled, "ZBV", device=links).steps if each.timeline)
    assert timeline.costs.fill_waits == "off"


def test_three_rates() -> None:
    """10 operations of F, of which attention takes 4 at a tenth of the products' rate, and 6 bytes at 3 a second."""
    device = replace(ONE_A_SECOND, attention=0.05, hbm=3 / 0.8)
    layer = LayerWork(("layers.0",), 10, 20, 6, 0.0, 0, 0, attention=(4, 8), traffic=(6, 9))
    assert layer_seconds(layer, device, degrees=Degrees()) == pytest.approx([6 + 40 + 2, 12 + 80 + 3, 6])
    f, _, w = layer_seconds(layer, device, degrees=Degrees(), float8=True)
    assert [f, w] == pytest.approx([6 / 1.6 + 40 + 2 * 1.75, 6 / 1.6])


@pytest.mark.parametrize(
    ("degrees", "sizes", "shared", "in_f", "in_i"),
    [
        # Keys and values are gathered in F, and in I with their gradients.
        (Degrees(context=4), {"keys": 80}, 4, 1, 2),
        # Experts are reached by two exchanges each way.
        (Degrees(fsdp=4, experts=4), {"routed": 80}, 1, 2, 2),
    ],
)
def test_collectives_of_a_layer(degrees: Degrees, sizes: dict[str, Any], shared: int, in_f: int, in_i: int) -> None:
    collective = SLOW_LINKS.exchange if "routed" in sizes else SLOW_LINKS.collective
    layer, each = LayerWork(("layers.0",), 8, 16, 24, 0.0, 0, 0, **sizes), collective(80, 4)
    found = layer_seconds(layer, SLOW_LINKS, degrees=degrees)
    assert found == pytest.approx([8 / shared + in_f * each, 16 / shared + in_i * each, 24 / shared])


def test_neighbours_on_other_nodes_are_farther_apart() -> None:
    """A collective uses the cards of all its GPUs in a node."""
    device = replace(ONE_A_SECOND, inside=100.0, between=10.0)
    work, placement = workload(degrees=Degrees(pipeline=4, fsdp=4)), Placement.loop(4)
    known = rates(device)
    costs = known.costs(work, known.layer_costs(work), placement, WorkloadCut(work).split(placement))
    assert [costs.links[pair].bandwidth for pair in ((0, 1), (1, 2), (2, 3))] == [100, 10, 100]
    groups = (8, 1), (16, 1), (8, 2), (8, 8)
    assert [find("H100").bandwidth(*group) / 1e9 for group in groups] == [450, 400, 200, 50]


def test_experts_are_spread_over_gpus() -> None:
    """2 stages of 2 layers, with 100 parameters for all tokens and 900 in experts, on 16 GPUs. 8 share these."""
    work = workload(degrees=Degrees(pipeline=2, tensor=2, fsdp=8, experts=8))
    work = replace(work, layers=tuple(replace(each, num_experts=16, in_experts=900.0) for each in work.layers))
    placement, split = Placement.loop(2), split_of((2, 2))
    assert work.held_by_rank(placement, split) == [((100, 8, 2), (225, 2, 8))] * 2
    together = replace(work, degrees=replace(work.degrees, experts=1))
    assert together.held_by_rank(placement, split) == [((1000, 8, 2),)] * 2
    device = replace(SLOW_LINKS, latency=0.0)
    costs = job_costs(work, device)[0](placement)
    each = device.collective(2.0 * 100, 8, 2) + device.collective(2.0 * 225, 2, 8)
    assert costs.gather == pytest.approx((each, each))
    found = row(named(work, "1F1B", device=device), "1F1B")
    assert found.memory.weights == pytest.approx(100 * (2 + 4 / 8) + 225 * (2 + 4 / 2))
    assert step_without_pipeline(work, rates(device)).memory.weights == pytest.approx(
        4 * (50 / 16 + 112.5 / 4) * 4 + 2 * 2 * (50 + 112.5)
    )


def test_an_exchange_between_nodes_goes_through_the_own_network_card() -> None:
    device = replace(ONE_A_SECOND, inside=100.0, between=10.0)
    assert device.exchange(850.0, 1) == 0
    assert device.exchange(850.0, 8) == pytest.approx(7 / 8 * 10)
    assert device.exchange(850.0, 16) == pytest.approx(1 / 2 * 100)
    # Of a token with two experts, three of four have one on the other node, and one of these both.
    assert device.exchange(850.0, 16, copies=2) == pytest.approx(3 / 4 / 2 * 100)
    assert device.exchange(850.0, 16, copies=1) == pytest.approx(1 / 2 * 100)


def test_deepep_sends_a_token_once_to_each_node() -> None:
    """Each of 10 tokens has 2 experts, on 2 nodes."""
    device = replace(SLOW_LINKS, between=1.0, gpus_per_node=2, latency=0.0)
    layer = LayerWork(("layers.0",), 8, 16, 24, 0.0, 0, 0, routed=160.0)
    degrees = Degrees(fsdp=4, experts=4)
    once, often = (
        layer_seconds(layer, device, degrees=degrees, message_bytes=80.0, sends_once=each)[0] - 8
        for each in (True, False)
    )
    assert once == pytest.approx(2 * device.exchange(160.0, 4, copies=2))
    assert once == pytest.approx(3 / 4 * often)


def test_products_of_routed_experts_take_longer() -> None:
    layer = LayerWork(("layers.0",), 8, 16, 24, 0.0, 0, 0, in_routed=0.5)
    device = replace(ONE_A_SECOND, experts=0.25, range=(0.5, 2.0))
    assert layer_seconds(layer, device, degrees=Degrees()) == pytest.approx([20, 40, 60])
    assert [each.device.experts for each in rates(device).extremes] == [0.125, 0.375]


def test_products_of_narrow_experts_move_more_bytes() -> None:
    """For each of 2 experts per token, three products read and write hidden states and half as wide ones: 3 x 1.5. Of
    these, the measured products need less than a hundredth, and wide ones more than all."""
    layer = LayerWork(("layers.0",), 8, 16, 24, 0.0, 0, 0, routed=160.0, num_experts=4)
    for width, hidden, more in ((2, 4, 3 * 1.5 * 160 / 8), (8192, 8192, 0.0)):
        each = replace(layer, in_experts=3.0 * 4 * hidden * width)
        job: Any = {"degrees": Degrees(), "message_bytes": 20.0 * hidden}
        found = layer_seconds(each, replace(ONE_A_SECOND, hbm=10.0), **job)
        assert found == pytest.approx([time + more for time in (8, 16, 24)], rel=1e-2)


def test_the_search_spreads_experts() -> None:
    work = workload(degrees=Degrees(pipeline=2, fsdp=8))
    tried = {each.experts for each in degrees_to_try(work, gpus_per_node=8)}
    layers = tuple(replace(each, num_experts=48, in_experts=900.0) for each in work.layers)
    with_experts = {each.experts for each in degrees_to_try(replace(work, layers=layers), gpus_per_node=8)}
    assert (tried, with_experts) == ({1}, {1, 4, 8, 16})


def test_a_step_of_several_rounds() -> None:
    """Accumulation of gradients: the optimizer, which reads 32 bytes a parameter, runs once."""
    device = replace(ONE_A_SECOND, hbm=1000.0)
    once, twice = (row(named(replace(workload(), rounds=rounds), "1F1B", device=device), "1F1B") for rounds in (1, 2))
    optimizer = 32 * 2000 / device.memory
    assert [once.seconds, twice.seconds] == pytest.approx([9 * 12 + optimizer, 2 * 9 * 12 + optimizer])
    assert twice.tokens_per_second == pytest.approx(160 / twice.seconds / 2)


def test_fsdp_without_a_pipeline_waits_for_what_takes_longer() -> None:
    """4 GPUs of one node, 1 microbatch each at a time: computing takes 24 seconds, gathering almost nothing."""
    degrees = Degrees(pipeline=2, fsdp=2)
    fast = step_without_pipeline(workload(degrees=degrees, microbatches=2), rates(ONE_A_SECOND))
    assert [fast.seconds, fast.exposed] == pytest.approx([24, 0])
    slow = step_without_pipeline(workload(degrees=degrees, microbatches=2), rates(replace(ONE_A_SECOND, inside=1.0)))
    gather, reduce = (size * 1000 * 0.75 / 0.85 for size in (2, 4))
    # Computation beside them is 0.19 times slower.
    assert slow.seconds == pytest.approx(gather + 4 * (2 * gather + reduce) + reduce + 0.19 * 24)
    assert slow.memory.weights == pytest.approx(4 * 4000 / 4 + 2 * 2000)


def test_as_many_sequences_at_a_time_as_fit() -> None:
    """Each of 4 layers keeps 1 GiB of a microbatch: 16 GiB and 2 that F needs for 4 of them."""
    small, large = (replace(ONE_A_SECOND, gib=gib) for gib in (22, 100))
    assert step_without_pipeline(workload(), rates(large)).memory.activations == 16 * GIB
    assert step_without_pipeline(workload(microbatches=16), rates(small)).memory.activations == 16 * GIB


@pytest.mark.parametrize(
    ("gib", "checkpointing", "limit"),
    [(5, "full", None), (8, "full", "0.8x"), (16, "full", None), (60, "full", "5x"), (60, "selective", "1.5x")],
)
def test_zb_has_the_least_limit_that_is_worth_it(gib: float, checkpointing: str, limit: str | None) -> None:
    """None if the step is as short without, or if nothing fits."""
    job = workload(layers=8, degrees=Degrees(pipeline=4))
    work = replace(job, checkpointing=Checkpointing(checkpointing), num_stages=8, schedule="ZB")
    found = estimate(work, replace(ONE_A_SECOND, gib=gib), only=["ZB"], stages_per_rank=[1, 2], budget=1e3)
    usual = row(replace(found, steps=tuple(step for step in found.steps if not step.memory_limit)), "ZB", 2)
    others = [step for step in found.steps if step.memory_limit]
    assert [step.memory_limit for step in others] == ([limit] if limit else [])
    for step in others:
        assert step.fits
        assert step.seconds < usual.seconds or not usual.fits
        assert f"ZB in {limit} " in "\n".join(lines(found))


def test_plans_leave_room_for_the_weights() -> None:
    work = workload(layers=8, degrees=Degrees(pipeline=2))
    heavy = replace(work, layers=tuple(replace(each, parameters=GIB / 4) for each in work.layers))
    limited = estimate(heavy, replace(ONE_A_SECOND, gib=40), only=("1F1B",), budget=1e5)
    plans = [step for step in limited.steps if step.schedule == "plan"]
    assert {step.stages_per_rank for step in plans} == {1, 2, 4}
    assert all(step.fits and step.memory.total <= 0.85 * 40 * GIB for step in plans)
    free = estimate(heavy, replace(ONE_A_SECOND, gib=1000), only=("1F1B",), budget=1e5)
    assert row(free, PLAN).memory.total > 0.85 * 40 * GIB
    assert row(free, PLAN).seconds < row(limited, "1F1B").seconds
    full = estimate(heavy, replace(ONE_A_SECOND, gib=20), only=("1F1B",))
    assert ("plan, single", "weights and optimizer of a rank take more than the usable 17 GiB") in full.left_out


@pytest.mark.parametrize(("given", "words"), refusals("estimate"))
def test_what_an_estimate_refuses(given: str, words: str) -> None:
    names = {"measured": measured, "replace": replace, "loop": Placement.loop}
    assert_refused(lambda: estimate(workload(), **{"device": ONE_A_SECOND} | eval(f"dict({given})", names)), words)


def test_what_cannot_be_is_left_out_with_the_reason() -> None:
    few = named(workload(layers=3), "1F1B", "ZBV")
    assert [step.schedule for step in few.steps if step.schedule != NO_PIPELINE] == ["1F1B"]
    assert "3 layers cannot be cut into 4 stages" in dict(few.left_out)["ZBV, 2 stages per rank"]
    no_time = estimate(workload(), costs=measured(Placement.v(2), f=0, i=0, w=0), only=("ZBV",), plans=False)
    assert no_time.left_out == (("ZBV, 2 stages per rank", "its step takes 0 seconds: give times above 0"),)
    nothing = replace(workload().layers[0], f=0, i=0, w=0, parameters=0)
    assert estimate(replace(workload(), layers=(nothing,) * 2), ONE_A_SECOND, plans=False).steps == ()
    found = named(workload(), "1F1B", "GPipe", device=replace(ONE_A_SECOND, gib=10))
    assert [step.fits for step in found.steps] == sorted((step.fits for step in found.steps), reverse=True)
    assert not row(found, "GPipe").fits


def test_measured_costs_take_the_place_of_counted_ones() -> None:
    placement = Placement.v(2)
    costs = JobCosts(CostModel((1,) * 4, (1,) * 4, (1,) * 4, (1e9,) * 4), placement)
    found = estimate(workload(), costs=costs, plans=False)
    assert row(found, "ZBV", 2).seconds == simulate(generate("ZBV", 2, 8), costs.on(placement)).makespan
    assert row(found, "1F1B").seconds == 9 * 6  # neighbours taken together
    answered = estimate(workload(), costs=costs, only=(), budget=1e3)
    assert [step.stages_per_rank for step in answered.steps if step.schedule in ("ZB", PLAN)] == [2, 2]
    assert row(found, "1F1B").mfu is None
    assert found.without_pipeline is None
    assert "measured" in found.words[0]


def test_fsdp_accumulates_if_the_batch_does_not_fit() -> None:
    """8 microbatches of 2 sequences on 2 x 2 GPUs are 8 sequences of each GPU, at 4 GiB each for 2."""
    work = replace(workload(degrees=Degrees(pipeline=2, fsdp=2)), microbatch_size=2)
    for gib, at_once in ((100, 8), (12, 4), (6, 2)):
        step = row(named(work, "1F1B", device=replace(ONE_A_SECOND, gib=gib)), NO_PIPELINE)
        assert step.batch == (at_once, 32, 8)
        assert step.memory.activations == 2 * GIB * at_once
        alone = memory_by_rank(workload(degrees=Degrees(fsdp=4), microbatches=at_once // 2))
        assert alone.memories == (step.memory,)


def test_the_search_keeps_the_tokens_of_a_step() -> None:
    found = search(workload(degrees=Degrees(pipeline=2, fsdp=2)), ONE_A_SECOND)
    shown = "\n".join(list_searched(found, found[0])).splitlines()
    (alone,) = (each for each in found if each.workload.degrees.pipeline == 1)
    for each in found:
        (line,) = (line for line in shown if line.startswith(f"{each.workload.degrees}  "))
        best, usual = each.on_these_degrees, alone.without_pipeline
        assert best
        assert usual
        assert f"{best.seconds / usual.seconds - 1:+.1%}" in line
    assert {each.workload.global_tokens for each in found} == {160}
    assert {each.workload.degrees.gpus for each in found} == {4}
    for each in found:
        step = each.on_these_degrees
        assert step is None or (step.schedule == NO_PIPELINE) == (each.workload.degrees.pipeline == 1)
    # One FSDP is the reference of all, and a line says what to type.
    fsdp = alone.steps[0]
    relative = {
        (each["seconds"] / fsdp.seconds, each["step_to_fsdp"]) for one in found for each in record(one)["schedules"]
    }
    assert all(own == told for own, told in relative)
    assert shown[0].endswith("% longer than without one on FSDP 4.")
    assert shown[1] == "  degree 1"
    # The costs are those of TP 1 alone.
    assert {each.workload.degrees.pipeline for each in found} == {1, 2, 4}
    assert any(step.schedule == "plan" for step in found[0].steps) or found[0].workload.degrees.pipeline == 1
    assert all(each.tensor <= 2 for each in degrees_to_try(workload(degrees=Degrees(2, 1, 2)), gpus_per_node=2))


@pytest.mark.parametrize("name", DEVICES)
def test_the_table_of_devices(name: str) -> None:
    device = find(name.lower())
    assert device is DEVICES[name]
    assert device.usable_bytes == pytest.approx(0.85 * device.gib * GIB)
    assert 0.7 >= device.products > device.attention > 0.2
    low, high = device.range or (1, 1)
    assert low < 1 < high
    assert device.inside > device.between > 1e10
    assert device.source and device.share_from  # noqa: PT018


DIM, HIDDEN, LENGTH, HEADS = 64, 128, 32, 4
PRODUCTS = 2 * LENGTH * (4 * DIM * DIM + 2 * DIM * HIDDEN)
ATTENTION = 2 * LENGTH * LENGTH * DIM  # half of two products, under a causal mask


class Block(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)
        self.norm, self.checkpointed = nn.RMSNorm(DIM), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, LENGTH, HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.down(torch.relu(self.up(x + self.out(attended.transpose(1, 2).flatten(2)))))


def on_meta(checkpointed: bool = False) -> tuple[Block, torch.Tensor]:
    with torch.device("meta"):
        return Block(checkpointed), torch.empty(1, LENGTH, DIM, requires_grad=True)


def test_operations_of_f_i_and_w() -> None:
    found = count_operations(*on_meta())
    assert (found.f, found.w) == (PRODUCTS + ATTENTION, PRODUCTS)
    assert found.i == PRODUCTS + 2.5 * ATTENTION
    again = count_operations(*on_meta(checkpointed=True))
    assert (again.f, again.w) == (found.f, found.w)
    assert again.i == found.i + found.f
    with torch.device("meta"):
        layers, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.empty(4, 8, requires_grad=True)
        q = torch.empty(1, HEADS, LENGTH, DIM // HEADS, requires_grad=True)
    # Weight gradients that I computes are counted there.
    layers[0].weight_products = {}  # type: ignore[assignment]
    found = count_operations(layers, x)
    assert (found.i, found.w, found.in_i) == (3 * 512, 512, 512)
    # Attention without a mask costs twice.
    attend = nn.Module()
    attend.forward = lambda x: nn.functional.scaled_dot_product_attention(x, x, x)  # type: ignore[misc]
    found = count_operations(attend, q)
    assert (found.f, found.i, found.w) == (2 * ATTENTION, 5 * ATTENTION, 0)


def test_bytes_of_a_layer() -> None:
    """x and dY of four products wait for W; a checkpoint keeps the input alone."""
    hidden = 4 * LENGTH * DIM
    found, lean = count_bytes(*on_meta()), count_bytes(*on_meta(checkpointed=True))
    assert lean.activations == hidden
    assert found.activations > 5 * hidden
    # x: the norm's result, attention's, the sum, relu's; dY: of q-k-v, out, up, down.
    assert found.waits == lean.waits == hidden * (1 + 1 + 1 + 2) + hidden * (3 + 1 + 2 + 1)
    assert lean.working[OpKind.I] + max(lean.activations, lean.waits) >= found.activations


def test_arguments_by_name_and_several_results() -> None:
    """As a LlamaDecoderLayer needs `position_embeddings=`; the second result has no gradient."""
    block, x = on_meta()
    whole = nn.Module()
    whole.block = block
    whole.forward = lambda x, *, scale: (block(x * scale), scale)  # type: ignore[misc]
    scale = torch.empty(1, device="meta")
    assert count_operations(whole, x, scale=scale) == count_operations(*on_meta())
    found = count_bytes(whole, x, scale=scale)
    assert found.waits == count_bytes(*on_meta()).waits


@pytest.mark.parametrize(("options", "words"), refusals("estimate --hf"))
def test_a_config_of_transformers_is_refused(
    options: str, words: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    file.with_name("config.json").write_text('{"model_type": "llama"}')
    job = f"estimate --hf {file.with_name('config.json')} --gpus 16 --device H100 {options.format(file=file)}"
    assert commands.answer(job, code=2).startswith(f"Error: {words}")


def test_torch_compile_waits_for_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates load no backend, and what they have imported runs compiled later."""
    made: list[Any] = []

    def twice(x: int) -> int:
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, **options: made.append(options) or function)
    before = torch.compile
    with cpu.compiling_late():
        double: Any = torch.compile(twice, backend="eager")
        torch.compile(nn.ReLU(), mode="default")  # modules are compiled at once
    assert torch.compile is before
    assert made == [{"mode": "default"}]
    assert [double(1), double(2)] == [2, 4]
    assert made == [{"mode": "default"}, {"backend": "eager"}]


def toml(**changes: str) -> str:
    lines = blocks("docs/costs-file.md", "toml")[-1].code.splitlines()
    kept = [line for line in lines if line.partition(" =")[0] not in changes]
    return "\n".join([*(f"{key} = {value}" for key, value in changes.items()), *kept])


@pytest.fixture
def file(here: Path) -> Path:
    return here / "model.toml"


def test_a_file_of_layers(file: Path) -> None:
    work = load_layers(file, gpus=16)
    assert (len(work.layers), work.layers[5].modules) == (34, ("layers.4",))
    assert work.degrees == Degrees(pipeline=4, fsdp=4)
    assert work.layers[5].waits > work.layers[5].activations


@pytest.mark.parametrize(("given", "words"), refusals("model.toml"))
def test_a_wrong_file_is_refused(file: Path, given: str, words: str) -> None:
    gpus, *changes = given.split()
    file.write_text(toml(**dict(each.split("=") for each in changes)))
    assert_refused(lambda: load_layers(file, int(gpus)), words)


def test_the_command(file: Path) -> None:
    job = f"estimate --layers {file} --gpus 16 --device h100 --schedule ZBV"
    text = commands.answer(f"{job} --all")
    for words in ("1F1B", "ZBV", "plan", NO_PIPELINE, "deferred", "TFLOP/s", "NVLink"):
        assert words in text, words
    assert re.match(
        r"Drop the pipeline: \d\.\d+ s per step, \d+\.\d% shorter than ZBV, \d+\.\d of 67\.1 GiB on the worst rank;"
        r" ZBV, the best schedule that fits, is \d\.\d% longer\.\n  degree 1\n",
        text,
    ), text
    written = file.with_name("plan.csv")
    commands.answer(f"{job} -o {written} --schedule plan")
    assert Schedule.from_csv(written.read_text()).num_microbatches == 16
    few = commands.answer(job)
    assert few.startswith(text[: text.index("\n")])
    rows = few.split("\n\n")[1].splitlines()[1:-1]
    assert [line.split("  ")[0] for line in rows] == [
        *("no pipeline (FSDP)", "plan", "ZBV (yours)", "ZB", "Interleaved1F1B", "1F1B")
    ]
    data = commands.json_of(job)
    assert data["degrees"] == {"pipeline": 4, "tensor": 1, "context": 1, "fsdp": 4, "replicas": 1, "experts": 1}
    for each in data["schedules"]:
        assert each["memory"]["total"] == pytest.approx(sum(each["memory"].values()) - each["memory"]["total"])
    # A job without a pipeline is sent to the search.
    alone = named(workload(degrees=Degrees(pipeline=1)))
    assert "This job has no pipeline: --search compares other layouts, or name one by degree P." in "\n".join(
        lines(alone)
    )
    assert "--search" not in "\n".join(lines(replace(alone, job=alone.workload)))


def test_a_search_writes_the_schedule_of_its_best_pipeline(file: Path) -> None:
    """Also where it advises none. The job's own degrees are among those of the search."""
    written = file.with_name("best.csv")
    text = commands.answer(f"estimate --layers {file} --gpus 4 --device H100 --search -o {written}")
    assert text.startswith("No pipeline: the best pipeline that fits, ZBV on PP 4, is ")
    assert Schedule.from_csv(written.read_text()).ops == generate("ZBV", 4, 16).ops


@pytest.mark.parametrize(
    ("device", "transport", "shown"),
    [("MI300X", None, True), ("MI300X", "shared-with-compute", False), ("H100", None, False)],
)
def test_one_line_names_amds_worst_case(device: str, transport: str | None, shown: bool) -> None:
    found = named(workload(), "1F1B", device=find(device), transport=transport)
    assert (WAITING.format("MI300X", "shared-with-compute") in lines(found, everything=False)) is shown


@pytest.mark.parametrize(("name", "placement"), [("ZB", Placement.v(2)), ("ZB1P", Placement.loop(2))])
def test_schedules_are_made_as_in_a_job(name: str, placement: Placement) -> None:
    """Without measured costs ZB is made for a typical transformer's memory, ZB1P for equal times, and neither for
    this job's costs."""
    work = replace(workload(layers=8), checkpointing=Checkpointing.FULL)
    step = row(named(work, name), name, len(placement.stages_on(0)))
    assert step.timeline is not None
    made = generate(name, 2, 8, costs=WorkloadCut(work).usual_costs(resolve(name), placement))
    assert step.timeline.schedule == made != generate(name, 2, 8, costs=step.timeline.costs)


def test_an_estimate_is_a_range_over_the_plausible_speeds(file: Path) -> None:
    work, device = load_layers(file, 16), find("H100")
    assert device.range is not None
    found = estimate(work, device, only=["ZBV"], plans=False)
    for end, speed, of_links in ((1, device.range[0], 0.6), (0, device.range[1], 1.15)):
        tflops = speed * device.products * device.peak / 1e12
        links = replace(device, inside=of_links * device.inside, between=of_links * device.between)
        given = estimate(work, links, tflops=tflops, only=["ZBV"], plans=False)
        for step in found.steps:
            assert step.range is not None
            same = next(each for each in given.steps if each.schedule == step.schedule)
            assert step.range[end] == pytest.approx(same.seconds, rel=1e-6)
        assert all(step.range is None for step in given.steps)


def test_the_line_of_a_search_has_all_that_differs() -> None:
    names = ("pipeline", "--pp {}"), ("tensor", "--tp {}"), ("fsdp", "--fsdp {}")
    options = Spelling("--schedule {}", "--limit {}", "--ac {}", "--batch {0} --global {1}", names)
    job = replace(workload(degrees=Degrees(4, 2)), options=options, checkpointing=Checkpointing.FULL)
    work = replace(job, degrees=Degrees(2, 2, 2), microbatches=4, checkpointing=Checkpointing.NONE)
    zb = replace(row(named(workload(), "ZB"), "ZB", 2), memory_limit="0.7x", is_typed=True)
    fsdp = replace(zb, timeline=None, degrees=Degrees(fsdp=8), checkpointing=Checkpointing.FULL, batch=(1, 8, 1))
    found = Estimate(work, None, (zb,), (), (), job=job, fsdp_found=fsdp)
    assert found.spell(zb) == "--schedule ZB --pp 2 --fsdp 2 --batch 4 --global 8 --limit 0.7x --ac none"
    assert found.spell(fsdp) == "--pp 1 --tp 1 --fsdp 8 --batch 1 --global 8 --limit 0.7x"
    assert found.without_pipeline is fsdp
    assert found.spell(replace(zb, is_typed=False)).startswith("--schedule ZB.csv ")  # a job would have other stages


@pytest.mark.parametrize(
    ("seconds", "ends", "words"),
    [
        *((0.88, (0.44, 1.77), "A pipeline: "), (0.93, (0.44, 1.9), "Undecided: ")),
        *((0.98, (0.49, 1.98), "No pipeline: "), (1.02, (0.51, 2.1), "No pipeline: ")),
    ],
)
def test_a_pipeline_has_to_be_clearly_shorter(seconds: float, ends: tuple[float, float], words: str) -> None:
    alone = Step(NO_PIPELINE, "", 1, 1.0, 0.0, 1.0, None, Memory(*[0] * 7), True, range=(0.5, 2.0))
    best = replace(alone, schedule="ZBV", seconds=seconds, range=ends)
    assert compare(best, alone, "ZBV").startswith(words)


LIMITED, SLOW = {"memory_limit": "2x"}, {"seconds": 2.0}
NOW: dict[str, dict[str, Any]] = {
    "1F1B": {"is_own": True, "seconds": 1.1},
    "ZB": {},
    PLAN: {"algorithm": None, "seconds": 0.99},
}


def advised(
    rows: dict[str, dict[str, Any]], fsdp: float = 2.0, lighter: float | None = None, rival: float = 9.0
) -> tuple[str, str, str]:
    """The answer to these rows: its sentence, what to type, and what other checkpointing gains, also FSDP (`rival`)."""
    timeline, each = simulate(generate("1F1B", 2, 2)), Memory(*[GIB] * 7)
    step = Step("", "", 1, 1.0, 0, 1, None, each, True, timeline=timeline, algorithm=resolve("1F1B"), is_typed=True)
    steps = [replace(step, **({"schedule": name.split()[0]} | changes)) for name, changes in rows.items()]
    steps.append(replace(step, schedule=NO_PIPELINE, timeline=None, seconds=fsdp, batch=(2, 64, 8)))
    work = replace(
        workload(),
        batch_option="--batch",
        options=Spelling(
            "--pp.schedule {}",
            "--zb.limit {}",
            "--ac {}",
            "--batch {0} --global {1}",
            (("pipeline", "--pp.degree {}"),),
        ),
        checkpointing=Checkpointing.FULL,
    )
    less = replace(step, schedule="ZB", seconds=lighter or 0.0, checkpointing=Checkpointing.SELECTIVE)
    apart = replace(less, schedule=NO_PIPELINE, timeline=None, seconds=rival, batch=(1, 64, 8))
    others = () if lighter is None else (less, replace(less, schedule="1F1B", seconds=1.0), apart)
    ordered = sorted(steps, key=lambda each: (not each.runs, not each.fits, each.seconds))
    found = Estimate(work, ONE_A_SECOND, tuple(ordered), (), (), others).advice
    assert found is not None
    return found.sentence, found.option, found.checkpointing


@pytest.mark.parametrize(
    ("rows", "fsdp", "sentence", "option"),
    [
        (NOW, 2.0, "Change to ZB: 1 s per step, 9.1% shorter than 1F1B, 7.0 of 85.0 GiB on the worst rank.", "ZB"),
        (NOW | {"1F1B": {"is_own": True}}, 2.0, "Keep 1F1B: 1 s .*; the shortest that fits, plan, is 1.0% shor", None),
        ({"ZB": {"is_own": True}}, 2.0, "Keep ZB: 1 s per step, 7.0 of 85.0 GiB on the worst rank; nothing that", None),
        ({"1F1B": {"is_own": True, "seconds": 1.019}, "ZB": {}, PLAN: {"seconds": 0.985}}, 2.0, "Keep 1F1B: ", None),
        (NOW | {PLAN: NOW[PLAN] | {"seconds": 0.9}}, 2.0, "Change to plan: 0.9 s per step, 18.2% ", "plan.csv"),
        (NOW | {"ZB": SLOW, "ZB in 2x": LIMITED}, 2.0, "Change to ZB in 2x: 1 s", "ZB --zb.limit 2x"),
        (NOW | {"ZB": {"fits": False}}, 2.0, "Change to plan: 0.99 s", "plan.csv"),
        (NOW | {"1F1B": NOW["1F1B"] | {"fits": False}}, 2.0, "Change to ZB: .* than 1F1B, which does not fit,", "ZB"),
        (NOW | {"1F1B": NOW["1F1B"] | {"runs": False}}, 2.0, "Change to ZB: .* than 1F1B, which cannot run,", "ZB"),
        (NOW, 1.07, "Change to ZB: .*; try FSDP without a pipeline, too: this is 6.5% shorter, and frameworks", "ZB"),
        (NOW, 1.02, "Drop the pipeline: 1.02 s per step, 7.3% .*; ZB, .*, is 2.0% shorter, less than", ""),
    ],
)
def test_the_answer(rows: dict[str, dict[str, Any]], fsdp: float, sentence: str, option: str | None) -> None:
    found, typed, _ = advised(rows, fsdp)
    assert re.match(sentence, found), found
    assert typed == (
        "" if option is None else f"--pp.schedule {option}" if option else "--pp.degree 1 --batch 2 --global 64"
    )


def test_the_answer_names_a_checkpointing_that_gains_more() -> None:
    assert advised(NOW, lighter=0.99)[2] == ""
    assert advised(NOW, lighter=0.88)[2] == (
        "With selective checkpointing the job gains more: 0.88 s with ZB, 20.0% shorter than 1F1B now (9.1% shorter"
        " by the checkpointing alone), 7.0 of 85.0 GiB. Add at the end: --ac selective"
    )


def test_a_lighter_checkpointing_with_another_row_comes_with_all_to_type() -> None:
    assert advised({"ZB": {"is_own": True, "schedule": "ZBLoop"}}, lighter=0.88)[2].endswith(
        " 7.0 of 85.0 GiB. Type instead: --pp.schedule ZB --ac selective"
    )


@pytest.mark.parametrize(
    ("kept", "ranks", "gib", "rows"),
    [
        *((kept, 2, 15, {("ZB", how)}) for kept, how in ((2, Checkpointing.NONE), (6, Checkpointing.SELECTIVE))),
        (3, 4, 45, {("VHalf", Checkpointing.NONE), ("ZB", Checkpointing.SELECTIVE)}),
    ],
)
def test_the_lightest_checkpointing_that_fits_is_tried(kept: float, ranks: int, gib: int, rows: set[Any]) -> None:
    """Per layer and microbatch 1 GiB, and without checkpointing `kept`, of which two ranks hold some 2 each. VHalf
    takes less where ZB does not fit."""
    work = by_checkpointing(ranks**2, kept, Degrees(pipeline=ranks), Checkpointing.FULL)
    work = replace(work, schedule="ZB", num_stages=2 if ranks == 2 else None)
    found = estimate(work, replace(ONE_A_SECOND, gib=gib), only=[])
    assert {(step.schedule, step.checkpointing) for step in found.lighter if step.timeline} == rows
    assert {step.checkpointing for step in found.lighter if not step.timeline} >= {Checkpointing.SELECTIVE}


def test_lighter_checkpointing_has_the_stages_that_the_job_then_chooses() -> None:
    """Here a V, and a loop with full checkpointing."""
    work = replace(by_checkpointing(8, 2, Degrees(pipeline=3), Checkpointing.FULL), schedule="ZB")
    device = replace(ONE_A_SECOND, gib=1000)
    lighter = next(each for each in estimate(work, device, only=[]).lighter if each.timeline)
    then = estimate(replace(work.on(work.degrees, Checkpointing.NONE), schedule="ZB"), device, only=[]).own
    assert then is not None
    assert (lighter.placement, lighter.seconds, then.placement) == (then.placement, then.seconds, "v")


def test_a_lighter_checkpointing_that_keeps_the_pipeline_comes_first() -> None:
    sentence, typed, more = advised(NOW, 1.02, lighter=0.9)
    assert sentence == (
        "Change to ZB with selective checkpointing: 0.9 s per step, 18.2% shorter than 1F1B (9.1% shorter by the"
        " checkpointing alone), 7.0 of 85.0 GiB on the worst rank; FSDP without a pipeline: 1.02 s at best, with full"
        " checkpointing."
    )
    assert (typed, more) == ("--pp.schedule ZB --ac selective", "")
    assert advised(NOW, 1.02, lighter=0.9, rival=0.96)[0].endswith(": 0.96 s at best, with selective checkpointing.")
    sentence, typed, more = advised(NOW, 1.02, lighter=0.9, rival=0.92)  # it gains as much without a pipeline
    assert sentence.startswith("Drop the pipeline: 1.02 s")
    assert "0.92 s with no pipeline (FSDP), 16.4% shorter than 1F1B now" in more
    assert more.endswith("Type instead: --pp.degree 1 --batch 1 --global 64 --ac selective")


def test_plan_and_compare_take_the_costs_of_a_job(file: Path) -> None:
    """As the estimate counts them, on its ranks and with its microbatches."""
    job = f"--layers {file} --gpus 16 --device H100"
    work = load_layers(file, 16)
    timeline = row(named(work, "ZBV", device=find("H100")), "ZBV", 2).timeline
    assert timeline is not None
    seconds = {row["schedule"]: row["makespan"] for row in commands.json_of(f"compare {job}")}
    assert seconds["ZBV"] == pytest.approx(timeline.makespan, rel=0.01)
    planned = commands.json_of(f"plan {job} --placement v --budget 1e4")
    assert (planned["ranks"], planned["microbatches"]) == (4, 16)
    assert planned["makespan"] <= seconds["ZBV"]


def test_compare_and_plan_name_the_schedule_of_the_estimate(file: Path) -> None:
    """With as many stages per rank, in the memory that the weights leave."""
    job = f"--layers {file} --gpus 16 --device H100"
    found = estimate(replace(load_layers(file, 16), schedule="ZB"), "H100", only=[])
    assert found.own is not None
    assert found.best is found.own
    compared = commands.json_of(f"compare {job}")
    (zb,) = (each for each in compared if each["recommended"])
    assert zb["schedule"].startswith("ZB")
    assert zb["stages_per_rank"] == found.own.stages_per_rank
    assert found.own.timeline is not None
    planned = commands.json_of(f"plan {job} --budget 1e4")
    assert tuple(planned["rank_of"]) == found.own.timeline.schedule.placement.rank_of
    room = min(planned["limit"])
    assert room < find("H100").usable_bytes
    assert any(max(each["peak_memory"]) > room for each in compared)
    assert all(each["fits"] == all(map(le, each["peak_memory"], planned["limit"])) for each in compared)


def test_a_job_is_answered_alike_with_few_rows_and_all() -> None:
    """Its memory limit counts in each row that can keep to one. Messages are those of the device, unless one asks."""
    job = replace(workload(layers=8, degrees=Degrees(pipeline=4)), checkpointing=Checkpointing.SELECTIVE, num_stages=8)
    work = replace(job, schedule="Interleaved1F1B", memory_limit=MemoryLimit.parse("0.9x"))
    few, everything = (estimate(work, ONE_A_SECOND, only=only, budget=1e3) for only in ((), None))
    assert few.advice == everything.advice
    assert len(few.steps) < len(everything.steps)
    assert [step.schedule for step in few.steps if step.is_own] == ["Interleaved1F1B"]
    adapt = [step for step in everything.steps if step.algorithm and "memory_limit" in step.algorithm.keywords]
    assert {step.memory_limit for step in adapt} == {"0.9x"}
    free = estimate(job, ONE_A_SECOND, only=["ZB"], plans=False)
    assert row(everything, "ZB", 2).memory.total < row(free, "ZB", 2).memory.total
    for asked, expected in ((None, "one queue"), ("blocking", "blocking")):
        found = estimate(job, ONE_A_SECOND, only=["ZB"], plans=False, transport=asked)
        timeline = row(found, "ZB", 2).timeline
        assert timeline is not None
        assert timeline.transport == expected


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "refused"),
    [
        *(("Interleaved1F1B", 2, 9, True), ("Interleaved1F1B", 2, 10, False)),
        *(("1F1B", 1, 3, True), ("DualPipeV", 2, 7, True), ("ZBV", 2, 3, False)),
    ],
)
def test_what_torch_refuses_is_left_out(name: str, stages: int, microbatches: int, refused: bool) -> None:
    work = workload(layers=8, degrees=Degrees(pipeline=4), microbatches=microbatches)
    found = named(work, name, stages_per_rank=[stages])
    assert ("torch refuses" in "".join(reason for _, reason in found.left_out)) == refused
    assert any(step.schedule == name for step in found.steps) != refused
    own = "\n".join(lines(estimate(replace(work, schedule=name), ONE_A_SECOND, only=[])))
    assert own.startswith("Your schedule cannot run: torch refuses ") == refused
