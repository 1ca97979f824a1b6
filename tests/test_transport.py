"""What messages cost where they wait for each other."""

from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpipe import CostModel, Schedule, generate, simulate, testing
from zbpipe.costs.model import Link, Receives, Transport
from zbpipe.schedule.ir import Op, OpKind, Placement
from zbpipe.simulator.actions import Action, Rows, parse
from zbpipe.simulator.passes import receive_by_rendezvous, sort_by_end
from zbpipe.simulator.time_graph import TimeGraph, durations, longest_path
from zbpipe.simulator.timeline import Timeline

TIMES = (1.0, 1.2, 0.8)
QUEUES = (Transport.ONE_QUEUE, Transport.QUEUE_PER_PEER)


def loss(name: str, transport: Transport, receives: Receives | None, ranks: int = 8, microbatches: int = 32) -> float:
    schedule = generate(name, ranks, microbatches)
    costs = CostModel.uniform(schedule.placement, *TIMES, comm=0.05)
    with_queues = simulate(schedule, costs, transport=transport, receives=receives)
    return 100 * (with_queues.makespan / simulate(schedule, costs).makespan - 1)


def ends(rows: Rows, costs: CostModel, transport: Transport) -> dict[str, float]:
    graph = TimeGraph(Schedule.from_actions(rows, "table"), transport, rows)
    _, found = longest_path(graph, durations(graph, costs))
    return {str(Action(*node)): end for node, end in zip(graph.nodes, found, strict=True)}


def test_one_queue_by_hand() -> None:
    """Rank 1 posts its receive of F1 before it sends B0, which so has to wait until F1 is made."""
    rows = parse("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1")
    found = ends(rows, CostModel((3.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0)), Transport.ONE_QUEUE)
    # Made at 5, on its way from 6 on.
    assert (found["1B0"], found["0SEND_F1"], found["1SEND_B0"], found["0B0"]) == (5.0, 6.0, 6.0, 7.0)


def test_a_message_that_waits_holds_up_what_shares_its_queue() -> None:
    costs = CostModel((3.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0))
    rows = parse("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1")
    for transport, expected in ((Transport.ONE_QUEUE, 4.0), (Transport.SHARED, 7.0)):
        assert ends(rows, costs, transport)["1F0"] == expected


def test_a_cycle_is_told() -> None:
    rows = parse("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1")
    cycle = TimeGraph(Schedule.from_actions(rows, "table"), Transport.ONE_QUEUE, rows).find_cycle()
    assert list(map(str, cycle)) == ["0SEND_F1", "1SEND_B0", "0SEND_F1"]


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf", "VMin", "DualPipeV"])
def test_receives_on_time_lose_next_to_nothing(name: str) -> None:
    for transport in QUEUES:
        assert loss(name, transport, Receives.TIMED) < 0.5


def test_what_other_places_lose() -> None:
    assert loss("ZBV", Transport.ONE_QUEUE, Receives.EARLY) == pytest.approx(7.0, abs=0.1)
    assert loss("ZBV", Transport.ONE_QUEUE, Receives.LATE) == pytest.approx(9.3, abs=0.1)
    assert loss("VHalf", Transport.QUEUE_PER_PEER, Receives.EARLY) == pytest.approx(3.8, abs=0.1)
    assert loss("1F1B", Transport.SHARED, Receives.EARLY) == pytest.approx(52.7, abs=0.1)
    assert loss("1F1B", Transport.SHARED, Receives.LATE) == pytest.approx(2.8, abs=0.1)


def test_the_place_is_chosen_by_schedule_and_transport() -> None:
    def chosen(name: str, transport: Transport) -> str | None:
        schedule = generate(name, 8, 32)
        costs = CostModel.uniform(schedule.placement, *TIMES, comm=0.05)
        return simulate(schedule, costs, transport=transport).receives

    assert [chosen("ZBV", transport) for transport in Transport] == [None, "timed", "timed", "rendezvous", None]
    assert [chosen(name, Transport.SHARED) for name in ("1F1B", "VMin", "ZBH1")] == ["late", "late", "nearest"]


@given(
    testing.schedules(max_ranks=6, max_microbatches=10) | testing.runnable_schedules(),
    st.sampled_from([*product(QUEUES, Receives), (Transport.BLOCKING, None)]),
    st.data(),
)
def test_waiting_messages_make_nothing_faster(schedule: Schedule, how: tuple[Any, Any], data: st.DataObject) -> None:
    costs = data.draw(testing.cost_models(schedule.placement))
    ideal = simulate(schedule, costs)
    found = simulate(schedule, costs, transport=how[0], receives=how[1])
    assert found.makespan >= ideal.makespan * (1 - 1e-9)
    assert found.busy == pytest.approx(ideal.busy)
    assert found.peak_activations == pytest.approx(ideal.peak_activations)
    if how[1]:
        runs_in_order(found)


@given(testing.runnable_schedules(), st.sampled_from(Transport), st.data())
def test_the_chosen_place_is_never_the_worst(schedule: Schedule, transport: Transport, data: st.DataObject) -> None:
    costs = data.draw(testing.cost_models(schedule.placement))
    best = simulate(schedule, costs, transport=transport).makespan
    assert best <= simulate(schedule, costs, transport=transport, receives="early").makespan * (1 + 2e-3)
    assert best <= simulate(schedule, costs, transport=transport, receives="late").makespan * (1 + 2e-3)


def runs_in_order(timeline: Timeline) -> None:
    """No rank does two things at once, and the critical path goes without a gap but for messages."""
    for spans in timeline.spans:
        for one, other in pairwise(spans):
            assert other.start >= one.end
    path = timeline.critical_path
    if not path:
        return
    assert path[-1].end == timeline.makespan
    assert path[0].start == 0
    comm = max((timeline.costs.transfer(a, b) for a in range(9) for b in range(9)), default=0.0)
    for one, other in pairwise(path):
        assert other.start >= one.end - 1e-9 * timeline.makespan
        # A message may stand behind others, each of which takes its time.
        assert other.start - one.end <= 2 * comm * timeline.schedule.num_microbatches * timeline.costs.num_stages + 1e-9


@given(testing.runnable_schedules(), st.data())
def test_the_order_of_ends_is_one_in_which_everything_can_run(schedule: Schedule, data: st.DataObject) -> None:
    times = [data.draw(st.sampled_from([0.0, 1.0])) for _ in range(3)]
    timeline = simulate(schedule, CostModel.uniform(schedule.placement, *times))
    order = list(sort_by_end(timeline))
    place = {op: n for n, op in enumerate(order)}
    assert sorted(order) == sorted(op for ops in schedule for op in ops)
    for ops in schedule:
        assert [place[op] for op in ops] == sorted(place[op] for op in ops)
    for op in order:
        if op.kind is OpKind.F and op.stage:
            assert place[Op(op.stage - 1, OpKind.F, op.microbatch)] < place[op]


def test_a_rendezvous_by_hand() -> None:
    """Rank 0 has made F1 at 5, while rank 1 runs F0 until 6. Their message follows, and rank 1 runs on at 7."""
    rows = parse(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    )
    costs = CostModel((2.0, 3.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), link=Link(latency=1.0))
    placed = receive_by_rendezvous(rows, Placement.loop(2), costs)
    assert [str(each) for each in placed[1][:5]] == ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0"]
    found = ends(placed, costs, Transport.SHARED)
    assert (found["0SEND_F0"], found["0F1"], found["1F0"], found["0SEND_F1"], found["1B0"]) == (3.0, 5.0, 6.0, 7.0, 9.0)


def test_a_blocking_message_keeps_its_sender_from_computing() -> None:
    """By hand: F and B take 1 and 2 seconds, and each message half a second."""
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    costs = CostModel.uniform(schedule.placement, comm=0.5)
    timeline = simulate(schedule, costs, transport="blocking")
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 1), (1.5, 2.5), (5, 7), (8.5, 10.5)]
    assert [(span.start, span.end) for span in timeline.spans[1]] == [(1.5, 2.5), (2.5, 4.5), (5, 6), (6, 8)]
    assert [str(span.op) for span in timeline.critical_path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert simulate(schedule, costs).makespan == 10
