"""Simulated times with W's products in waits for collectives, compared with a simulation of events."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import answer
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st
from searching import searching_little

import zbpipe
from zbpipe.algorithms.zb import find_shortest
from zbpipe.costs.file import dump_costs, load_costs
from zbpipe.costs.job import JobCosts, MemoryLimit, least_room
from zbpipe.costs.layers import Layer, LayerCosts
from zbpipe.costs.model import CostModel, Link
from zbpipe.costs.transformer import typical_costs
from zbpipe.schedule.ir import Op, OpKind, Placement, Schedule
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.lower_bound import period_bound
from zbpipe.simulator.offloading import offload
from zbpipe.simulator.simulation import period, simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.testing import check_schedule, cost_models, schedules
from zbpipe.views.grid import grid
from zbpipe.views.html import drawing
from zbpipe.views.perfetto import perfetto
from zbpipe.views.svg import svg

F, I, W, B = OpKind.F, OpKind.I, OpKind.W, OpKind.B  # noqa: E741
PAGE = Path(__file__).parent.parent / "docs" / "the-split.md"
SLICES = 8
"""Of an op: in each it computes, makes a part of its W, and waits."""
TIMES = 1.0, 1.2, 0.8


def waiting(schedule: Schedule, share: float, *, by: float = 1.0) -> CostModel:
    """Costs with this exposed share of F and I, I's being longer `by` a factor."""
    costs = CostModel.uniform(schedule.placement, *TIMES)
    of_i = min(share * by, 1.0)
    return replace(costs, waits={F: tuple(share * each for each in costs.f), I: tuple(of_i * each for each in costs.i)})


def run_events(schedule: Schedule, costs: CostModel, how: str) -> float:
    """The step's time. Ranks run their lists op after op, slice after slice."""
    done: dict[tuple[int, str, int], float] = {}

    def run(row: tuple[Op, ...]) -> Iterator[float]:
        now, pool = 0.0, dict[tuple[int, int], float]()

        def work(seconds: float, stage: int | None) -> None:
            for key in sorted(pool, key=lambda key: key[0]):
                if stage in (None, key[0]):
                    part = min(seconds, pool[key])
                    pool[key] -= part
                    seconds -= part

        for stage, kind, microbatch in row:
            if kind is W:
                now += pool.pop((stage, microbatch))
                continue
            last = costs.num_stages - 1
            giver = (stage - 1, "F") if kind is F else (stage + 1, "I") if stage < last else (stage, "F")
            while giver[0] >= 0 and (*giver, microbatch) not in done:
                yield now
            now = max(now, done.get((*giver, microbatch), 0.0))
            whole = (costs.f if kind is F else costs.i)[stage]
            wait = costs.waits[F if kind is F else I][stage]  # type: ignore[index]
            for _ in range(SLICES):
                now += (whole - wait) / SLICES
                if kind is not F:
                    pool[stage, microbatch] = pool.get((stage, microbatch), 0.0) + costs.w[stage] / SLICES
                if how == "all" or (how == "own" and kind is not F):
                    work(wait / SLICES, None if how == "all" else stage)
                now += wait / SLICES
            now += pool.pop((stage, microbatch)) if kind is B else 0.0
            done[stage, "F" if kind is F else "I", microbatch] = now
        yield now

    ends = [0.0] * schedule.num_ranks
    running = dict(enumerate(map(run, schedule.ops)))
    while running:
        for rank, each in list(running.items()):
            found = next(each, None)
            if found is None:
                del running[rank]
            else:
                ends[rank] = found
    return max(ends)


@pytest.mark.parametrize("how", ["off", "own", "all"])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf", "ZB"])
def test_times_are_those_of_a_simulation_of_events(name: str, how: Any) -> None:
    for ranks, share, by in ((4, 0.0, 1.0), (4, 0.1, 2.0), (4, 0.3, 1.0), (4, 0.5, 2.0), (8, 0.2, 1.0)):
        schedule = zbpipe.generate(name, ranks, 2 * ranks)
        costs = waiting(schedule, share, by=by)
        timeline = simulate(schedule, costs, fill_waits=how)
        assert timeline.makespan == pytest.approx(run_events(schedule, costs, how))
        off = simulate(schedule, costs)
        assert timeline.peak_memory == off.peak_memory
        assert (timeline.makespan < off.makespan - 1e-6) == (how != "off" and share > 0)
        assert timeline.lower_bound <= timeline.makespan + 1e-9


def draw_waiting(data: st.DataObject, placement: Placement) -> CostModel:
    costs = data.draw(cost_models(placement))
    parts = st.sampled_from([0.0, 0.5, 1.0])
    waits = {kind: tuple(each * data.draw(parts) for each in own) for kind, own in ((F, costs.f), (I, costs.i))}
    return replace(costs, waits=waits)


@given(st.data(), st.sampled_from(["own", "all"]))
def test_no_filled_step_is_below_its_bound_or_above_the_unfilled_one(data: st.DataObject, how: Any) -> None:
    schedule = data.draw(schedules(max_ranks=4, max_microbatches=6))
    costs = draw_waiting(data, schedule.placement)
    filled, off = (simulate(schedule, costs, fill_waits=each) for each in (how, "off"))
    assert filled.lower_bound <= filled.makespan + 1e-9
    assert filled.makespan <= off.makespan + 1e-9
    bound = period_bound(schedule.placement, filled.costs, schedule.num_microbatches)
    assert bound <= period(schedule, filled.costs) + 1e-9
    # What W takes less is at most what the ranks wait.
    most = sum(filled.costs.of(*op).hides for row in schedule for op in row)
    assert -1e-9 <= sum(off.busy) - sum(filled.busy) <= most + 1e-9


def test_all_also_fills_f_and_takes_the_products_of_other_stages() -> None:
    """One rank: W of both stages is behind everything, so F's waits have nothing yet to run."""
    ops = ["0F0", "1F0", "1I0", "0I0", "0F1", "1F1", "1I1", "0I1", "1W0", "0W0", "1W1", "0W1"]
    schedule = Schedule.from_csv(",".join(ops), name="late W")
    costs = CostModel((2, 2), (2, 2), (4, 4), activations=(1, 1), waits={F: (1, 1), I: (1, 0)})
    took = {how: 32 - simulate(schedule, costs, fill_waits=how).makespan for how in ("off", "own", "all")}
    assert took == {"off": 0, "own": 2, "all": 4}


def test_the_bound_is_f_and_i_and_the_part_of_w_that_waits_cannot_hide() -> None:
    schedule = zbpipe.generate("ZBV", 1, 4)
    for share, how in ((0.2, "own"), (0.2, "all"), (1.0, "own"), (1.0, "all")):
        f, i, w = TIMES
        waits = share * (i if how == "own" else f + i)
        timeline = simulate(schedule, waiting(schedule, share), fill_waits=how)  # type: ignore[arg-type]
        assert timeline.lower_bound == pytest.approx(4 * (f + i + max(w - waits, 0)))


COSTS = partial(CostModel, (1.0, 2.0), (1.0, 2.0), (1.0, 2.0), activations=(1.0, 1.0))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"waits": {I: (0.5, 2.5)}}, r"waits\[I\] = 2.5 for stage 1: its I takes 2.0, waits included"),
        ({"waits": {F: 1.5}}, r"waits\[F\] = 1.5 for stage 0: its F takes 1.0, waits included"),
        ({"waits": {F: -1}}, r"waits\[F\] = -1"),
        ({"waits": {W: 0.5}}, "zbpipe.OpKind F or I, for example"),
        ({"fill_waits": "some"}, "fill_waits = 'some': use 'off', 'own' or 'all'"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        COSTS(**fields)


def test_layers_wait_too() -> None:
    layers = [Layer((f"layers.{number}",), 1.0, 2.0, 1.0, 1.0) for number in range(3)]
    costs = LayerCosts(layers, waits={I: (0.5, 1.0, 1.5)}, fill_waits="own")  # type: ignore[arg-type]
    assert costs.even(Placement.loop(2)).waits == {I: (1.5, 1.5)}
    assert costs.even(Placement.loop(2)).fill_waits == "own"
    with pytest.raises(ValueError, match=r"waits\[I\] = 3.0 for layer 2: its I takes 2.0"):
        replace(costs, waits={I: (1.0, 1.0, 3.0)})


def test_cost_files_have_them(tmp_path: Any) -> None:
    for name in ("costs.toml", "costs.json"):
        job = JobCosts(COSTS(waits={F: (0.5, 0.5), I: 1.0}, fill_waits="all"))
        dump_costs(job, tmp_path / name)
        assert load_costs(tmp_path / name) == job
    assert 'fill_waits = "all"' in (tmp_path / "costs.toml").read_text()
    assert "[waits]\nF = [0.5, 0.5]\nI = [1.0, 1.0]" in (tmp_path / "costs.toml").read_text()


def test_waits_grow_with_the_size_of_a_microbatch() -> None:
    costs = COSTS(waits={I: (0.5, 1.0)}, fill_waits="own", sizes=(1, 3), of_size=1)
    assert [costs.of(1, kind, 1).hides for kind in "FIWB"] == [0, 3, 0, 3]
    assert [costs.of(0, "I", number).hides for number in (-1, 0, 1)] == [1, 0.5, 1.5]


def test_copies_to_the_host_leave_nothing_to_fill() -> None:
    schedule = Schedule.from_csv("0F0,0OF0,0RF0,0I0,0W0", name="copies")
    costs = CostModel((1,), (1,), (1,), activations=(1,), waits={I: 1})
    assert simulate(schedule, costs, fill_waits="own").makespan == simulate(schedule, costs).makespan == 3


@pytest.mark.parametrize("transport", ["ideal", "one queue", "queue per peer", "shared with compute"])
def test_copies_are_planned_for_times_without_fills(transport: str) -> None:
    """They delay no op, and ranks receive as if nothing could be filled."""
    for name, ranks, share, speed in (("ZBH1", 4, 0.9, 2), ("ZBV", 3, 0.9, 2), ("ZBV", 2, 0.9, 2), ("ZBV", 3, 0.2, 2)):
        schedule = zbpipe.generate(name, ranks, 2 * ranks)
        filled = replace(waiting(schedule, share), host=Link(bandwidth=speed), link=Link(0.2), fill_waits="all")
        off = replace(filled, fill_waits="off")
        copied = offload(schedule, filled)
        assert copied == offload(schedule, off)
        assert copied.has_copies
        one, other = (simulate(copied, costs, transport=transport) for costs in (filled, off))
        assert one.spans == other.spans


@pytest.mark.parametrize(("name", "how"), [("ZBV", "all"), ("ZBH2", "all"), ("ZBV", "own"), ("1F1B", "own")])
def test_pictures_draw_what_runs_in_waits(name: str, how: Any) -> None:
    schedule = zbpipe.generate(name, 3, 6)
    off, filled = (simulate(schedule, waiting(schedule, 0.3), fill_waits=each) for each in ("off", how))
    for rank, row in enumerate(filled.fills):
        saved = off.busy[rank] - filled.busy[rank]
        assert sum(each.end - each.start for each in row) == pytest.approx(saved)
        for each in row:
            (span,) = (span for span in filled.spans[rank] if span.start - 1e-9 <= each.start < span.end - 1e-9)
            assert each.end <= span.end + 1e-9
            assert how == "all" or (span.op.stage == each.stage and span.op.kind in (I, B))
    pictures = [(str(grid(each)), svg(each), str(drawing(each)), perfetto(each)) for each in (off, filled)]
    for without, picture, word in zip(*pictures, (" waits ", 'class="waits"', "' fill'", '"waits"'), strict=True):
        assert word in picture
        assert word not in without


@draw_fewer(8)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.sampled_from(["own", "all"]), st.data())
def test_zb_and_plans_for_filled_waits_are_never_longer_than_those_for_others(
    ranks: int, microbatches: int, stages: int, how: Any, data: st.DataObject
) -> None:
    """If both fill the waits. Within the memory limits."""
    placement = Placement.wave(ranks, stages)
    off = draw_waiting(data, placement)
    costs = replace(off, fill_waits=how)
    room = data.draw(st.floats(1, 8))
    limit = MemoryLimit(tuple(room * least for least in least_room(placement, costs)), "")

    def plan(costs: CostModel) -> Timeline:
        return zbpipe.plan(ranks, microbatches, costs, limit, placements=placement).timeline

    for make in (lambda costs: find_shortest("ZB", placement, microbatches, costs, limit), plan):
        with searching_little():
            found, plain = make(costs), make(off)
        check_schedule(found.schedule)
        assert found.makespan <= simulate(plain.schedule, costs).makespan * (1 + 1e-9)
        pairs = zip(simulate(found.schedule, costs).peak_memory, limit.amount, strict=True)  # type: ignore[arg-type]
        assert all(peak <= most * (1 + 1e-8) for peak, most in pairs)


def test_plans_keep_w_back_where_there_is_memory() -> None:
    placement = Placement.wave(4, 2)
    off = typical_costs(placement, times=TIMES, waits=(0.3, 0.3))
    filled = replace(off, fill_waits="all")
    plain, found = (
        zbpipe.plan(4, 16, costs, "1.25x", placements=placement, budget=1e5).timeline for costs in (off, filled)
    )
    assert found.makespan < 0.95 * simulate(plain.schedule, filled).makespan


def test_the_table_of_w_that_zb_keeps_back() -> None:
    """In the docs: relative to ZB without fills in the same memory."""
    rows = re.findall(r"^\| ([\d.]+x) \|(( -[\d.]+ % \|){5})$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 3
    placement = Placement.wave(4, 4)
    for room, cells, _ in rows:
        costs = [typical_costs(placement, times=TIMES, waits=(tenths / 10, tenths / 10)) for tenths in range(1, 6)]
        plain, *filled = (
            find_shortest("ZB", placement, 16, each, MemoryLimit.parse(room)).makespan
            for each in (costs[0], *(replace(each, fill_waits="all") for each in costs))
        )
        assert [f"{100 * (each / plain - 1):.1f} %" for each in filled] == [
            each.strip() for each in cells.split("|")[:-1]
        ]


def test_the_table_of_the_docs() -> None:
    rows = re.findall(r"^\| (ZB\w*) \| (\d) \|(( -[\d.]+ % \|){5})$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 6
    for name, text, cells, _ in rows:
        ranks = int(text)
        stages = {"stages_per_rank": 4} if name == "ZB" else {}
        placement = resolve(name).place(ranks, **stages)
        costs = [typical_costs(placement, times=TIMES, waits=(tenths / 10, tenths / 10)) for tenths in range(1, 6)]
        schedule = zbpipe.generate(name, ranks, 4 * ranks, costs=costs[0], **stages)
        plain, *filled = (
            simulate(schedule, each, fill_waits="own").makespan for each in (replace(costs[0], waits={}), *costs)
        )
        assert [f"{100 * (each / plain - 1):.1f} %" for each in filled] == [
            each.strip() for each in cells.split("|")[:-1]
        ]


def test_commands_take_shares_that_wait_and_what_fills_them(tmp_path: Path) -> None:
    def makespan(*arguments: str) -> float:
        found = json.loads(answer(shlex.join(["simulate", *arguments, "-m", "16", "--json"])))
        return float(found["makespan"])

    typed = "-p", "4", "--costs", "1,1.2,0.8"
    plain, waiting = makespan("ZBV", *typed), makespan("ZBV", *typed, "--waits", "0.3,0.3")
    assert plain == waiting
    filled = *typed, "--waits", "0.3,0.3", "--fill-waits", "own"
    assert makespan("ZBV", *filled) == pytest.approx(0.894 * plain, rel=1e-3)
    assert makespan("1F1B", *filled) == makespan("1F1B", *typed)
    schedule = zbpipe.generate("ZBV", 4, 16)
    file = tmp_path / "costs.toml"
    dump_costs(JobCosts(replace(typical_costs(schedule.placement, waits=(0, 0.5)), fill_waits="own")), file)
    of_file = "ZBV", "-p", "4", "--costs-file", str(file)
    of_it, off = makespan(*of_file), makespan(*of_file, "--fill-waits", "off")
    assert of_it < 0.95 * off


@pytest.mark.parametrize("text", ["0.3", "0.3,1.5", "-0.1,0", "a,b", "nan,0"])
def test_shares_that_are_none_are_refused(text: str) -> None:
    assert f"'{text}'" in answer(f"simulate ZBV -p 2 -m 2 --waits={text}", code=2)
