"""What a rank is said to hold at most: activations, what ops need while they run, and messages."""

from dataclasses import replace

import activation_memory
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama import Checkpointing

from zbpipe import CostModel, OpKind, Placement, Schedule, generate, simulate, testing
from zbpipe.costs.layers import join_stages, split_of
from zbpipe.schedule.ir import COMPUTATIONS
from zbpipe.simulator import peak_bytes
from zbpipe.simulator.actions import parse


@given(testing.runnable_schedules(), st.data())
def test_without_messages_it_is_what_ops_take(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(testing.cost_models(schedule.placement))
    timeline = simulate(schedule, replace(costs, message_bytes=0, working={OpKind.I: 3, OpKind.B: 5}))
    assert peak_bytes(timeline) == pytest.approx(timeline.peak_memory)


def test_messages_beside_what_ops_take() -> None:
    """By hand: of two microbatches the first rank holds an output that is under way, and a gradient that came early."""
    schedule = generate("GPipe", 2, 2)
    costs = CostModel((1, 1), (1, 1), (1, 1), (10, 20), message_bytes=1, working={OpKind.B: (5, 7)})
    rows = parse(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1,0WAIT_SEND_F0,0WAIT_SEND_F1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1WAIT_SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B1"
    )
    assert peak_bytes(simulate(schedule, costs), rows) == (20 + 5 + 3, 40 + 7)


def test_more_microbatches_need_no_more_messages() -> None:
    schedules = [generate("ZBV", 4, microbatches) for microbatches in (8, 32)]
    few, many = (
        peak_bytes(simulate(each, CostModel((1,) * 8, (1,) * 8, (1,) * 8, (0,) * 8, message_bytes=1)))
        for each in schedules
    )
    assert max(few) == max(many) > 0


@given(st.data())
def test_a_stage_takes_what_its_layers_take_in_turn(data: st.DataObject) -> None:
    layers = data.draw(testing.cost_models(Placement.loop(1, 4)))
    amounts = st.tuples(*(st.sampled_from([0.0, 0.5, 4.0]) for _ in range(4)))
    layers = replace(layers, working=data.draw(st.dictionaries(st.sampled_from(COMPUTATIONS), amounts)))
    cut = data.draw(st.integers(1, 3))
    stages = join_stages(layers, split_of((cut, 4 - cut)))
    apart = "0F0,1F0,2F0,3F0,3I0,2I0,1I0,0I0,3W0,2W0,1W0,0W0"
    whole = "0F0,1F0,1I0,0I0,1W0,0W0"
    (one,), (other,) = (
        simulate(Schedule.from_csv(table, "table"), costs).peak_memory
        for table, costs in ((apart, layers), (whole, stages))
    )
    assert other == pytest.approx(one)


def test_what_waits_is_counted_layer_by_layer() -> None:
    """A layer that keeps nothing from F to I needs its gradient whole in I, when the others wait for W already."""
    layers = CostModel((1, 1), (1, 1), (1, 1), (0, 4), freed_by_i=(0, -1), working={OpKind.I: (6, 1)})
    (stage,) = [join_stages(layers, split_of((2,)))]
    assert (stage.activations, stage.of(0, OpKind.W).frees) == ((4.0,), 8.0)
    assert stage.of(0, OpKind.I).needs == 4 + 6


@pytest.mark.long
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_what_ranks_are_said_to_hold_is_what_they_hold(checkpointing: Checkpointing) -> None:
    """Within 5 %, messages and what ops need while they run included, from one stage that was measured alone."""
    job = activation_memory.Job(checkpointing, ranks=2, microbatches=4, layers=4, device="cpu")
    stages = activation_memory.measure_stages(job)
    for name in ("1F1B", "ZB"):
        found = activation_memory.measure(name, job, stages)
        assert found.error is None
        assert found.predicted is not None
        assert found.peak == pytest.approx(max(found.predicted), rel=0.05), name
