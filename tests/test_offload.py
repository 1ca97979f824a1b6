"""Copies to the host and back: as ops, in time and memory, and where the offload pass puts them."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from browser import page_data, page_ops
from commands import answer, run
from data import refusals
from determinism import draw_fewer
from hypothesis import given
from hypothesis import strategies as st

import zbpipe
from zbpipe import CostModel, Op, OpKind, Placement, Schedule, generate, plan, simulate, validate
from zbpipe.costs import Link
from zbpipe.costs.model import Transport
from zbpipe.costs.transformer import typical_costs
from zbpipe.schedule.ir import OFFLOADS, RELOADS
from zbpipe.simulator import Timeline, offload
from zbpipe.simulator.passes import add_messages
from zbpipe.testing import cost_models, runnable_schedules
from zbpipe.views.grid import grid
from zbpipe.views.html import html
from zbpipe.views.perfetto import perfetto
from zbpipe.views.svg import svg

SLOW = Link(latency=0.5, bandwidth=1)


def lone(table: str) -> Schedule:
    return Schedule.from_csv(table, "lone")


def costs_of(schedule: Schedule, host: Link | None = SLOW, freed_by_i: float = 0.0) -> CostModel:
    return CostModel.uniform(schedule.placement, host=host, freed_by_i=freed_by_i)


def copied(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(str(span.op), span.start, span.end) for row in timeline.copies for span in row]


# Ops


def test_copies_have_a_text_form() -> None:
    table = "0F0,0OF0,0F1,0RF0,0I0,0OI0,0B1,0RI0,0W0\n"
    schedule = lone(table)
    assert schedule.ops[0][1] == Op(0, OpKind.OF, 0)
    assert schedule.to_csv() == table
    assert schedule.has_copies
    assert schedule.computations.to_csv() == "0F0,0F1,0I0,0B1,0W0\n"
    plain = generate("ZBV", 2, 2)
    assert plain.computations is plain
    assert not plain.has_copies


@pytest.mark.parametrize("text", ["0O0", "0R0", "0OW0", "0FO0", "0RB1"])
def test_what_is_no_copy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="of the copies OF, RF, OI, RI"):
        Op.parse(text)


@pytest.mark.parametrize(("table", "finding"), refusals("copies"))
def test_copies_at_the_wrong_place_are_found(table: str, finding: str) -> None:
    assert finding in map(str, validate(lone(table)))


def test_memory_in_the_order_of_the_list() -> None:
    schedule = lone("0F0,0OF0,0F1,0RF0,0B0,0B1")
    assert [str(each.op) for each in validate(schedule, memory_limit=1)] == ["0RF0"]
    assert validate(schedule, memory_limit=2) == []
    assert validate(lone("0F0,0OF0,0F1,0B1,0RF0,0B0"), memory_limit=1) == []


# Time and memory


def test_copies_run_beside_computations() -> None:
    """F takes 1 and B 2, a copy 1.5; W of microbatch 0 waits for a copy that is issued too late."""
    schedule = lone("0F0,0OF0,0F1,0RF0,0I0,0OI0,0B1,0RI0,0W0")
    timeline = simulate(schedule, costs_of(schedule))
    assert [(str(span.op), span.start, span.end) for span in timeline.spans[0]] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0I0", 4, 5),
        ("0B1", 5, 7),
        ("0W0", 8.5, 9.5),
    ]
    assert copied(timeline) == [("0OF0", 1, 2.5), ("0RF0", 2.5, 4), ("0OI0", 5, 6.5), ("0RI0", 7, 8.5)]
    assert timeline.busy == (6,)
    assert dict(timeline.memory(0)) == {0: 1, 1: 2, 2.5: 2, 6.5: 1, 7: 1, 9.5: 0}
    assert timeline.peak_memory == (2,)


def test_a_host_of_which_nothing_is_known_takes_no_time() -> None:
    schedule = lone("0F0,0OF0,0F1,0B1,0RF0,0B0")
    timeline = simulate(schedule, costs_of(schedule, host=None))
    assert timeline.makespan == 6
    assert timeline.peak_memory == (1,)


def with_copies(schedule: Schedule, data: st.DataObject) -> Schedule:
    """With copies anywhere that is allowed."""
    rows = []
    for ops in schedule:
        row = list(ops)
        for op in ops:
            there, back, taker = {
                OpKind.F: (OpKind.OF, OpKind.RF, (OpKind.I, OpKind.B)),
                OpKind.I: (OpKind.OI, OpKind.RI, (OpKind.W,)),
            }.get(op.kind, (None, None, ()))
            if there is None or back is None or data.draw(st.booleans()):
                continue
            made = row.index(op)
            taken = next(row.index(user) for kind in taker if (user := op._replace(kind=kind)) in row)
            second = data.draw(st.integers(made + 1, taken))
            first = data.draw(st.integers(made + 1, second))
            row.insert(second, op._replace(kind=back))
            row.insert(first, op._replace(kind=there))
        rows.append(tuple(row))
    return replace(schedule, ops=tuple(rows))


@given(st.data())
def test_copies_keep_to_their_rules_in_time(data: st.DataObject) -> None:
    schedule = with_copies(data.draw(runnable_schedules()), data)
    assert validate(schedule) == []
    costs = replace(data.draw(cost_models(schedule.placement)), host=SLOW)
    transport = data.draw(st.sampled_from([Transport.IDEAL, Transport.QUEUE_PER_PEER, Transport.BLOCKING]))
    timeline = simulate(schedule, costs, transport=transport)
    assert timeline.makespan >= simulate(schedule.computations, costs, transport=transport).makespan * (1 - 1e-9)
    for rank, spans in enumerate(timeline.copies):
        computed = {span.op: span for span in timeline.spans[rank]}
        there = {span.op: span for span in spans if span.op.kind in OFFLOADS}
        back = [span for span in spans if span.op.kind in RELOADS]
        ops = schedule.ops[rank]
        for span in spans:
            before = [op for op in ops[: ops.index(span.op)] if op in computed]
            assert span.start >= computed[before[-1]].end
        for span in back:
            first = there[span.op._replace(kind=OFFLOADS[RELOADS.index(span.op.kind)])]
            takers = (OpKind.I, OpKind.B) if span.op.kind is OpKind.RF else (OpKind.W,)
            taker = next(computed[op] for kind in takers if (op := span.op._replace(kind=kind)) in computed)
            assert first.end <= span.start
            assert span.end <= taker.start
        for stream in (list(there.values()), back):
            assert all(one.end <= other.start for one, other in pairwise(stream))
        assert timeline.memory(rank)[-1][1] == pytest.approx(0)


def test_torchs_lists_have_no_copies() -> None:
    plain = generate("ZBV", 2, 4)
    assert add_messages(offload(plain, costs_of(plain, Link(bandwidth=4)))) == add_messages(plain)


# The pass


@draw_fewer(2)
@given(st.data())
def test_nothing_waits_for_an_offload(data: st.DataObject) -> None:
    schedule = data.draw(runnable_schedules())
    costs = data.draw(cost_models(schedule.placement))
    costs = replace(costs, host=Link(data.draw(st.sampled_from([0, 0.125])), data.draw(st.sampled_from([0.5, 2, 16]))))
    transport = data.draw(st.sampled_from([Transport.IDEAL, Transport.QUEUE_PER_PEER, Transport.BLOCKING]))
    before = simulate(schedule, costs, transport=transport)
    margin = data.draw(st.sampled_from([0, 0.1, 1]))
    found = offload(schedule, costs, transport=transport, margin=margin)
    assert found.computations == schedule
    assert validate(found) == []
    after = simulate(found, costs, transport=transport, receives=before.receives)
    for mine, other in zip(after.spans, before.spans, strict=True):
        assert [span.start for span in mine] == pytest.approx([span.start for span in other])
    least = after.peak_memory
    for rank, peak in enumerate(before.peak_memory):
        assert least[rank] <= peak * (1 + 1e-9)
    limits = [
        data.draw(st.sampled_from([few, few + (many - few) / 2]))
        for few, many in zip(least, before.peak_memory, strict=True)
    ]
    kept = simulate(
        offload(schedule, costs, limits, transport=transport, margin=margin),
        costs,
        transport=transport,
        receives=before.receives,
    )
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(kept.peak_memory, limits, strict=True))


@pytest.mark.parametrize(
    ("name", "bandwidth", "peaks"), [("1F1B", 2, (4, 2)), ("ZBV", 2, (4, 1.5)), ("ZBH2", 2, (7, 3))]
)
def test_what_a_fast_host_gains(name: str, bandwidth: float, peaks: tuple[float, float]) -> None:
    schedule = generate(name, 4, 16)
    costs = costs_of(schedule, Link(bandwidth=bandwidth))
    timelines = [simulate(each, costs) for each in (schedule, offload(schedule, costs))]
    assert tuple(max(each.peak_memory) for each in timelines) == peaks
    assert timelines[0].makespan == timelines[1].makespan


def test_a_limit_takes_no_more_copies_than_it_needs() -> None:
    schedule = generate("ZBH2", 4, 16)
    costs = costs_of(schedule, Link(bandwidth=2))
    copies = [sum(map(len, simulate(offload(schedule, costs, limit), costs).copies)) for limit in (7, 6, 5, 3)]
    assert copies[0] == 0
    assert copies == sorted(copies)
    assert copies[1] > 0
    schedule = generate("1F1B", 4, 8)
    assert offload(schedule, costs_of(schedule, Link(bandwidth=2)), memory_limit=2).has_copies, "the least, as it says"


@pytest.mark.parametrize(("what", "kinds"), [("pairs", "OI RI"), ("Activations", "OF RF"), (True, "OF OI RF RI")])
def test_only_what_is_wanted_is_copied(what: str | bool, kinds: str) -> None:
    schedule = generate("ZBH2", 4, 16)
    found = offload(schedule, costs_of(schedule, Link(bandwidth=4), freed_by_i=-1), what=what)
    assert sorted({op.kind for ops in found for op in ops} - {"F", "I", "W"}) == kinds.split()
    assert offload(found, costs_of(schedule, Link(bandwidth=4), freed_by_i=-1), what=what) == found


# Pictures


@pytest.fixture(scope="module")
def shown() -> Timeline:
    schedule = generate("ZBV", 2, 4)
    costs = costs_of(schedule, Link(bandwidth=2))
    return simulate(offload(schedule, costs, what="activations"), costs)


def test_the_grid_has_two_lanes_for_copies(shown: Timeline) -> None:
    text = grid(shown, 200).plain
    assert len(re.findall(r"^   out .*O", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^    in .*R", text, re.MULTILINE)) == 2
    assert "offload for I" in text
    assert "for W" not in text


def test_other_pictures_have_them_too(shown: Timeline) -> None:
    copies = [span.op for row in shown.copies for span in row]
    assert copies
    picture = svg(shown)
    assert all(f"<title>{op}: " in picture for op in copies)
    assert picture.count('<g class="copies') == 4
    events = json.loads(perfetto(shown))["traceEvents"]
    assert sorted(event["name"] for event in events if event.get("tid") in (1, 2) and event["ph"] == "X") == sorted(
        map(str, copies)
    )
    data = page_data(html(shown))
    drawn = [op for rank in data["ranks"] for lane in rank["lanes"] for op, *_ in page_ops(data, lane)]
    assert sorted(drawn) == sorted(map(str, copies))
    assert "copies" not in svg(replace(shown, copies=()))


# Plans


def host_costs(bandwidth: float) -> CostModel:
    return typical_costs(Placement.v(2), "none", host=Link(bandwidth=bandwidth))


def test_a_plan_that_offloads_is_shorter_within_the_same_limit() -> None:
    limit, costs = 1.5, host_costs(2)
    plain = plan(2, 8, costs, limit, budget=2e5)
    found = plan(2, 8, costs, limit, budget=2e5, offload=True)
    assert found.schedule.has_copies
    assert found.makespan < 0.97 * plain.makespan
    assert found.makespan >= found.lower_bound
    assert found.limits == (limit, limit)
    assert all(peak <= limit * (1 + 1e-9) for peak in found.timeline.peak_memory)
    assert found.found_by.endswith(", offload")
    assert simulate(found.schedule, costs).makespan == found.makespan
    assert len({found.bounds, found.bounds}) == 1, "they have a hash"


def test_a_plan_can_be_a_named_schedule_with_copies() -> None:
    """Such as LoopedBFS, which holds all activations, and so is no plan without copies."""
    costs = typical_costs(Placement.loop(4, 2), "full", host=Link(bandwidth=4))
    plain, found = (plan(4, 8, costs, 6, budget=1e4, offload=what) for what in (None, "activations"))
    assert found.schedule.has_copies
    assert max(found.timeline.peak_memory) <= 6
    assert found.lower_bound <= found.makespan <= plain.makespan


def test_a_plan_without_a_limit_holds_as_little_as_is_free() -> None:
    plain, found = (plan(2, 8, host_costs(2), budget=1e5, offload=what) for what in (None, "activations"))
    assert found.makespan == plain.makespan
    assert max(found.timeline.peak_memory) < max(plain.timeline.peak_memory)


def test_the_command_line_offloads(tmp_path: Path) -> None:
    table = tmp_path / "plan.csv"
    asked = "plan -p 2 -m 8 --checkpointing none --memory-limit 0.7x --placement v --budget 2e5"
    ran = answer(f"{asked} --offload all --host-bandwidth 2 -o {table}")
    assert ", offload" in ran
    assert "2 to the host" in ran
    assert zbpipe.generate(str(table), 2, 8).has_copies
    assert "offload for I" in answer(f"show {table} -p 2 -m 8 --checkpointing none --host-bandwidth 2")
    assert "--host-bandwidth" in run(f"{asked} --offload all").output
    assert "give a number above 0" in run(f"{asked} --host-bandwidth 0").output
