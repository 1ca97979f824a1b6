"""Ops, placements and schedules as text and as torch's CSV."""

import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import answer, process
from hypothesis import given
from hypothesis import strategies as st

import zbpipe
from zbpipe import Op, OpKind, Placement, Schedule, generate, simulate, testing, validate
from zbpipe.schedule.graph import CycleError, Graph
from zbpipe.schedule.ir import COMPUTATIONS, inputs
from zbpipe.simulator import lower_bound as bound
from zbpipe.simulator.actions import parse
from zbpipe.simulator.passes import add_messages, add_waits
from zbpipe.simulator.validation import validate_lowered
from zbpipe.testing import cost_models, placements

ops = st.builds(Op, st.integers(0, 200), st.sampled_from(COMPUTATIONS), st.integers(0, 999))


@given(ops)
def test_an_op_is_written_as_torch_writes_it(op: Op) -> None:
    assert Op.parse(str(op)) == op
    torchs = pytest.importorskip("torch.distributed.pipelining.schedules")
    assert repr(torchs._Action.from_str(str(op))) == str(op)


@pytest.mark.parametrize(
    "text", ["", "F0", "3F", "3X0", "3F0 1", "-1F0", "3SEND_F0", "\u0663F\u0660", "3F1.5", "3F" + 20 * "9"]
)
def test_what_is_no_op_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an op.*for example 3F0") as error:
        Op.parse(text)
    assert repr(text) in str(error.value)


@given(st.integers(1, 9), st.integers(1, 4))
def test_a_loop_goes_round_and_a_v_comes_back(ranks: int, stages_per_rank: int) -> None:
    loop = Placement.loop(ranks, stages_per_rank)
    assert [loop.rank_of[stage] for stage in range(loop.num_stages)] == [
        stage % ranks for stage in range(ranks * stages_per_rank)
    ]
    v = Placement.v(ranks, stages_per_rank)
    assert v.num_ranks == loop.num_ranks == ranks
    assert all(abs(a - b) <= 1 for a, b in zip(v.rank_of, v.rank_of[1:], strict=False))
    for placement in (loop, v):
        assert all(len(placement.stages_on(rank)) == stages_per_rank for rank in range(ranks))


def test_what_excel_adds_is_taken() -> None:
    table = generate("1F1B", 2, 2).to_csv()
    for ends in ("\r\n", "\r"):
        assert Schedule.from_csv("\ufeff" + table.replace("\n", ends), "1F1B") == generate("1F1B", 2, 2)


def test_a_checkout_that_is_not_installed_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "zbpipe").symlink_to(Path(zbpipe.__file__).parent)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import zbpipe; print(zbpipe.__version__)"
    result = process(sys.executable, "-I", "-S", "-c", program)
    assert result.stdout == "0+unknown\n"
    assert zbpipe.__version__ == metadata.version("zbpipe")


def test_a_broken_entry_point_leaves_the_other_schedules(tmp_path: Path) -> None:
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[zbpipe.algorithms]\nlost = no_such_module\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import zbpipe"
    program += "; zbpipe.schedule.registry.schedules(); print(zbpipe.generate('1F1B', 1, 1))"
    result = process(sys.executable, "-c", program)
    assert result.stdout == "rank 0: 0F0 0B0\n"
    assert "entry point lost = no_such_module in the group zbpipe.algorithms cannot be loaded" in result.stderr


def test_the_rule_in_words() -> None:
    def said(text: str) -> str:
        return " and ".join(" or ".join(map(str, group)) for group in inputs(Op.parse(text), num_stages=3))

    assert said("0F1") == ""
    assert said("2F1") == "1F1"
    assert said("1I1") == said("1B1") == "1F1 and 2I1 or 2B1"
    assert said("2I1") == said("2B1") == "2F1"
    assert said("1W1") == "1I1"


@given(st.data())
def test_the_bound_repeats_the_rule(data: st.DataObject) -> None:
    """One microbatch alone, with its W last, is as fast as the simulator lets it be."""
    placement = data.draw(placements(max_ranks=4))
    costs = data.draw(cost_models(placement))
    rows: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    for kind in (OpKind.F, OpKind.I, OpKind.W):
        stages = range(placement.num_stages)
        for stage in stages if kind is OpKind.F else reversed(stages):
            rows[placement.rank_of[stage]].append(Op(stage, kind, 0))
    timeline = simulate(Schedule("alone", placement, 1, tuple(map(tuple, rows))), costs)
    path = bound._alone(placement, bound._as_possible(placement, costs, None))
    for span in chain.from_iterable(timeline.spans):
        if span.op.kind is OpKind.F:
            assert (span.start, span.end) == (path.forward_start[span.op.stage], path.forward_end[span.op.stage])
        if span.op.kind is OpKind.I:
            assert (span.start, span.end) == (path.input_start[span.op.stage], path.input_end[span.op.stage])


@given(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=8, max_size=8))
def test_a_graph_has_an_order_or_a_cycle(before: list[list[int]]) -> None:
    graph = Graph(list(range(8)), before)
    try:
        order = graph.order
    except CycleError as error:
        for one, other in pairwise([*error.cycle, error.cycle[0]]):
            assert one in before[other]
    else:
        assert sorted(order) == list(range(8))
        assert all(order.index(each) < order.index(node) for node in order for each in before[node])


TORCHS = ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def torchs(name: str, ranks: int, microbatches: int) -> Any:
    """One of torch's schedules that can dump its tables, and not run."""
    pytest.importorskip("torch")
    from test_schedules import stub_stages
    from torch.distributed.pipelining import _schedule_visualizer, schedules

    ops = _schedule_visualizer.get_schedule_ops(schedules.get_schedule_class(name), ranks, microbatches)
    runtime: Any = object.__new__(schedules._PipelineScheduleRuntime)
    schedules._PipelineScheduleRuntime.__init__(runtime, stub_stages(ranks, 2), microbatches)
    runtime.pipeline_order = dict(enumerate(ops))
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime


def computations(row: list[Any]) -> Iterator[str]:
    for action in row:
        for part in (action.sub_actions or [action]) if action else []:
            if part.is_compute_op:
                yield str(part)


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (2, 6), (4, 8), (4, 12), (8, 16)])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_torch_dumps(name: str, ranks: int, microbatches: int, form: str, tmp_path: Path) -> None:
    runtime = torchs(name, ranks, microbatches)
    file = tmp_path / "torchs.csv"
    runtime._dump_csv(str(file), format=form)
    expected = [list(computations(runtime.pipeline_order[rank])) for rank in range(ranks)]
    schedule = Schedule.from_csv(file.read_text())
    assert [list(map(str, row)) for row in schedule] == expected
    assert generate(str(file), ranks, microbatches).ops == schedule.ops
    assert validate(schedule) == []
    if form == "compute_comms":
        assert validate_lowered(parse(file.read_text())) == []


@given(testing.runnable_schedules(), st.booleans(), st.booleans())
def test_what_zbpipe_writes(schedule: Schedule, messages: bool, waits: bool) -> None:
    assert Schedule.from_csv(schedule.to_csv(), schedule.name) == schedule
    if messages and not schedule.has_copies:
        rows = add_messages(schedule)
        table = "\n".join(",".join(map(str, row)) for row in (add_waits(rows) if waits else rows))
        assert Schedule.from_csv(table, schedule.name) == schedule
        assert validate_lowered(parse(table)) == []


@given(testing.runnable_schedules(), st.data())
def test_what_people_write(schedule: Schedule, data: st.DataObject) -> None:
    def written(op: Op) -> str:
        text = str(op).lower() if data.draw(st.booleans()) else str(op)
        return data.draw(st.sampled_from(["{}", " {}", "{}\t", ",{}", "{}, ", "None,{}", "{},none"])).format(text)

    table = "\n".join(",".join(map(written, row)) for row in schedule)
    assert Schedule.from_csv(table, schedule.name) == schedule


COMMUNICATION = (
    "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD,0WAIT_SEND_F0,0WAIT_REDUCE_GRAD\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1REDUCE_GRAD,1RESHARD,1WAIT_REDUCE_GRAD\n"
)


def test_all_commands_read_a_table_by_its_computations(here: Path) -> None:
    (here / "comms.csv").write_text(COMMUNICATION)
    (here / "plain.csv").write_text("0F0,0B0\n1F0,1B0\n")
    valid = "valid; 2 ranks, 2 stages, 1 microbatch, 4 ops\n"
    assert answer("validate comms.csv") == f"comms.csv: {valid}"
    assert answer("validate plain.csv") == f"plain.csv: {valid}"
    for command in ("show", "simulate"):
        assert answer(f"{command} comms.csv") == answer(f"{command} plain.csv").replace("plain.csv", "comms.csv")
    answer("export comms.csv -o again.csv")
    assert (here / "again.csv").read_text() == (here / "plain.csv").read_text()


def test_validate_checks_the_communication_that_others_leave_out(here: Path) -> None:
    (here / "bad.csv").write_text(COMMUNICATION.replace("1RECV_F0,", ""))
    finding, *_ = answer("validate bad.csv", code=1).splitlines()
    assert finding == "missing: rank 1, 1RECV_F0: the message is never received"
    answer("show bad.csv")


def test_overlapped_pairs_are_read_as_their_parts(here: Path) -> None:
    (here / "overlap.csv").write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert answer("validate overlap.csv").endswith("4 ops\n")
    assert str(generate("overlap.csv", 1, 2)) == "rank 0: 0F0 0F1 0B0 0B1"
