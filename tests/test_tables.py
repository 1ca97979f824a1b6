"""The reader of CSV tables: what torch and others write is read by its computations, and what is omitted is said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import answer
from hypothesis import given
from hypothesis import strategies as st
from test_schedules import stub_stages
from torch.distributed.pipelining import _schedule_visualizer, schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from zbpipe import Op, Schedule, generate, testing, validate
from zbpipe.simulator.message_checks import check_table
from zbpipe.simulator.passes import add_messages, add_waits

TORCHS = ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def torchs(name: str, ranks: int, microbatches: int) -> Any:
    """One of torch's schedules that can dump its tables, and not run."""
    ops = _schedule_visualizer.get_schedule_ops(schedules.get_schedule_class(name), ranks, microbatches)
    runtime: Any = object.__new__(_PipelineScheduleRuntime)
    _PipelineScheduleRuntime.__init__(runtime, stub_stages(ranks, 2), microbatches)
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
    checked, findings, how = check_table(file.read_text(), "torchs")
    assert (checked.ops, findings) == (schedule.ops, [])
    assert ("omitted" in how) == (form == "compute_comms")


@given(testing.runnable_schedules(), st.booleans(), st.booleans())
def test_what_zbpipe_writes(schedule: Schedule, messages: bool, waits: bool) -> None:
    assert Schedule.from_csv(schedule.to_csv(), schedule.name) == schedule
    if messages and not schedule.has_copies:
        rows = add_messages(schedule)
        table = "\n".join(",".join(map(str, row)) for row in (add_waits(rows) if waits else rows))
        assert Schedule.from_csv(table, schedule.name) == schedule
        assert check_table(table, schedule.name)[1] == []


@given(testing.runnable_schedules(), st.data())
def test_what_people_write(schedule: Schedule, data: st.DataObject) -> None:
    """Bubbles anywhere, spaces, and lower case."""

    def written(op: Op) -> str:
        text = str(op).lower() if data.draw(st.booleans()) else str(op)
        return data.draw(st.sampled_from(["{}", " {}", "{}\t", ",{}", "{}, ", "None,{}", "{},none"])).format(text)

    table = "\n".join(",".join(map(written, row)) for row in schedule)
    assert Schedule.from_csv(table, schedule.name) == schedule


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "ZBH1", "ZBH2", "ZB1P"])
def test_tables_without_stages(name: str) -> None:
    """As in the papers: B is the input's gradient if a W follows, else the whole backward."""
    schedule = generate(name, 3, 5)
    table = "\n".join(",".join(f"{op.kind}{op.microbatch}".replace("I", "B") for op in row) for row in schedule)
    assert Schedule.from_csv(table, name) == schedule
    assert Schedule.from_csv(table.lower(), name) == schedule


def test_with_a_stage_b_is_what_torch_means_by_it() -> None:
    (finding,) = validate(Schedule.from_csv("0F0,0B0,0W0"))
    assert (finding.rule, str(finding.op)) == ("foreign", "0W0")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("0F0,F1", "row 1 (rank 0), column 2: 'F1' has no stage, unlike the cells before it: write the stage in all"),
        ("F0,B0\nF0,1B0", "row 2 (rank 1), column 2: '1B0' has a stage, unlike the cells before it"),
        ("0F0,(0F1;0X0)OVERLAP_F_B", "row 1 (rank 0), column 2: '0X0' is not an op"),
        ("0F0,,0F1 0B0", "row 1 (rank 0), column 3: '0F1 0B0' is not an op"),
        ("0F0,(0F1;0B0)", "row 1 (rank 0), column 2: '(0F1;0B0)' is not an op"),
        ("0F0,(F|0|0)", "row 1 (rank 0), column 2: '(F|0|0)' is not an op"),
        ("0F0,0BW0", "row 1 (rank 0), column 2: '0BW0' is not an op"),
        ("0F0,0B0\n0UNSHARD", "rank 1 has no ops: omit its row"),
        ("0SEND_F0", "rank 0 has no ops"),
        (",\nNone", "rank 0 has no ops"),
    ],
)
def test_what_is_no_table(table: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Schedule.from_csv(table)
    with pytest.raises(ValueError, match=re.escape(words)):
        check_table(table, "csv")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMUNICATION = (
    "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD,0WAIT_SEND_F0,0WAIT_REDUCE_GRAD\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1REDUCE_GRAD,1RESHARD,1WAIT_REDUCE_GRAD\n"
)


def test_all_commands_read_a_table_by_its_computations(here: Path) -> None:
    (here / "comms.csv").write_text(COMMUNICATION)
    (here / "plain.csv").write_text("0F0,0B0\n1F0,1B0\n")
    first, second = answer("validate comms.csv").splitlines()
    assert first == "comms.csv: valid; 2 ranks, 2 stages, 1 microbatch, 4 ops"
    assert second == (
        "read: 2 F, 2 B; omitted: 4 sends and receives, 2 waits for sends, 2 unshards, 2 reshards, 2 reductions of"
        " gradients, 2 waits for reductions; jobs place their own"
    )
    for command in ("show", "simulate"):
        assert answer(f"{command} comms.csv") == answer(f"{command} plain.csv").replace("plain.csv", "comms.csv")
    answer("export comms.csv -o again.csv")
    assert (here / "again.csv").read_text() == (here / "plain.csv").read_text()
    assert answer("validate plain.csv").count("\n") == 1


def test_validate_checks_the_communication_that_others_leave_out(here: Path) -> None:
    (here / "bad.csv").write_text(COMMUNICATION.replace("1RECV_F0,", ""))
    finding, *_, how = answer("validate bad.csv", code=1).splitlines()
    assert finding == "missing: rank 1, 1RECV_F0: the message is never received"
    assert how.startswith("read: 2 F, 2 B; omitted: 3 sends and receives")
    answer("show bad.csv")


def test_overlapped_pairs_are_read_as_their_parts(here: Path) -> None:
    (here / "overlap.csv").write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert answer("validate overlap.csv").endswith("4 ops\nread: 2 F, 2 B\n")
    assert str(generate("overlap.csv", 1, 2)) == "rank 0: 0F0 0F1 0B0 0B1"
