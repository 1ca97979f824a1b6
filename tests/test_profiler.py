"""What a running job is measured to take: recorded steps, costs that all ranks agree on, and traces."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, batch, build_stage
from pipelines import Pipeline, on_one_rank
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import CostModel, simulate
from zbpipe.algorithms.zb import find_shortest
from zbpipe.costs import JobCosts, dump_costs
from zbpipe.costs.model import Receives, Transport
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime._torch.pipelining import stages_of
from zbpipe.runtime._torch.stage_work import find_work
from zbpipe.runtime.measure import profiler
from zbpipe.runtime.measure.profiler import find_overhead, measure_links, write_trace
from zbpipe.runtime.measure.recording import StepRecord, Wanted, collect
from zbpipe.schedule.ir import Op, OpKind
from zbpipe.simulator import passes
from zbpipe.simulator.timeline import Span

CPU = torch.device("cpu")
MICROBATCHES = 4
NAP = 0.002
"""Seconds."""


class NapInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, naps: int) -> Tensor:
        ctx.naps = naps
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.naps * NAP)
        return dy, None


class Sleepy(nn.Module):
    """A product that takes its time: one nap in F, two in I, three in W, times the number of its stage and one."""

    def __init__(self, naps: int) -> None:
        super().__init__()
        self.naps = naps
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.weight_products = {torch.matmul: self.weight_gradient}

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.naps * NAP)
        return torch.matmul(NapInBackward.apply(x, 2 * self.naps), self.weight)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        time.sleep(3 * self.naps * NAP)
        return x.flatten(0, -2).mT @ dy.flatten(0, -2)


def mean_loss(y: Tensor, target: Tensor) -> Tensor:
    return y.square().mean()


class Job(Pipeline):
    """A schedule of stages that sleep, or of others by their number from 1 on."""

    def __init__(self, name: str, model: Callable[[int], nn.Module] = Sleepy, **options: Any) -> None:
        super().__init__(name, MICROBATCHES, lambda index, _: model(index + 1), mean_loss, **options)

    def step(self, how: str = "step") -> None:
        x = torch.randn(2 * MICROBATCHES, WIDTH)
        self.run(x, target=x, how=how)


def recorded(name: str) -> tuple[StepRecord, list[str]]:
    """The second of three steps, and what was left on the schedule and its stages after it."""
    job = Job(name)
    seen: list[StepRecord] = []
    collect(job.schedule, [Wanted.NOTHING, Wanted.TIMES], seen.extend)
    job.step()
    assert seen == []
    job.step()
    works = [work for stage in stages_of(job.schedule) if (work := find_work(stage)) is not None]
    left = [key for key in vars(job.schedule) if "compute" in key]
    left += [str(hook) for work in works for hook in work.hooks]
    job.step()
    (record,) = seen
    return record, left


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    """What each of two ranks found, by function and schedule. One start of the processes serves all tests."""
    return run_ranks(2, run_all, tmp_path_factory.mktemp("traces"), timeout=300)


def run_all(folder: Path) -> dict[tuple[str, str], Any]:
    jobs = {recorded: ("ZBV", "1F1B", "Interleaved1F1B"), profiled: ("ZBV", "ZBH1"), kept: ("ZBV", "Auto")}
    found = {(function.__name__, name): function(name) for function, names in jobs.items() for name in names}
    found |= {("traced", name): traced(name, folder / f"{name}.json") for name in ("ZBV", "1F1B")}
    found |= {("Auto", stages): measured_by_auto(int(stages)) for stages in "23"}
    return found | {("links", ""): links_of_uneven_messages(), ("offload", ""): offloading()}


@pytest.mark.parametrize("name", ["ZBV", "1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_is_recorded_op_by_op(by_rank: Any, name: str, rank: int) -> None:
    record, left = by_rank[rank]["recorded", name]
    expected = zbpipe.generate(name, 2, MICROBATCHES)
    assert [span.op for span in record.spans] == list(expected.ops[rank])
    assert record.schedule == name
    # Rank 1 has nothing but the last stage in 1F1B.
    assert record.message_bytes == (0 if (name, rank) == ("1F1B", 1) else 2 * WIDTH * 4)
    assert not [key for key in left if not key.startswith("_should")]
    end = 0.0
    for span in record.spans:
        assert end <= span.start < span.end <= record.seconds
        assert span.end - span.start >= naps(span.op) * NAP
        end = span.end


def naps(op: Op) -> int:
    """How often it must have napped. The first stage has no dI; autograd, in B, knows nothing of I's and W's naps."""
    times = {OpKind.F: 1, OpKind.I: 2 if op.stage else 0, OpKind.W: 3, OpKind.B: 0}
    return times[op.kind] * (op.stage + 1)


class Logits(nn.Module):
    """A head whose logits exceed the largest message with which links are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).repeat(1, 2**21 // WIDTH)


def profiled(name: str, steps: int = 2) -> tuple[bool, Any, int]:
    last = zbpipe.schedule.registry.resolve(name).place(dist.get_world_size()).num_stages
    job = Job(name, lambda number: nn.Sequential(Sleepy(number), *([Logits()] if number == last else [])))
    told: list[JobCosts] = []
    profiler = zbpipe.Profiler(job.schedule, steps, done=told.append)
    for _ in range(steps + 1):
        job.step()
    early = profiler.costs is not None
    job.step()
    assert profiler.costs is not None
    return early, profiler.costs, len(told)


class LinkToHost:
    """A copier and its clock: 10 microseconds a copy, and a second for 2 GB out or for 1 GB back."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def copy_out(self, storages: list[torch.UntypedStorage]) -> int:
        (size,) = map(len, storages)
        self.now += 1e-5 + size / 2e9
        return size

    def copy_back(self, size: int) -> None:
        self.now += 1e-5 + size / 1e9

    def release(self, size: int) -> None:
        pass

    wait = release


def test_the_link_to_the_host_is_that_of_the_slower_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    link = LinkToHost()
    monkeypatch.setattr(profiler, "time", link)
    monkeypatch.setattr(profiler, "make_copier", lambda device: link)
    found = profiler.measure_host(torch.device("cpu"))
    assert found is not None
    assert found.bandwidth == pytest.approx(1e9)
    assert found.latency == pytest.approx(1e-5 + profiler._SMALL_COPY / 1e9)


@pytest.mark.parametrize("name", ["ZBV", "ZBH1"])
def test_all_ranks_end_with_the_same_costs(by_rank: Any, name: str, tmp_path: Path) -> None:
    results = [found["profiled", name] for found in by_rank]
    assert [(early, told) for early, _, told in results] == [(False, 1)] * 2
    assert results[0] == results[1]
    first = results[0][1]
    placement = zbpipe.generate(name, 2, 1).placement
    assert first.placement == placement
    model = first.costs
    assert isinstance(model, CostModel)
    for kind in (OpKind.F, OpKind.I, OpKind.W):
        for stage in range(model.num_stages):
            assert model.of(stage, kind).seconds >= naps(Op(stage, kind, 0)) * NAP
    assert set(model.links) == {(0, 1), (1, 0)}
    assert all(link.latency > 0 and link.bandwidth > 0 for link in model.links.values())
    assert model.message_bytes == 2 * WIDTH * 4, "logits are no message"
    assert model.host is not None
    assert model.host.latency > 0
    file = tmp_path / "costs.toml"
    dump_costs(first, file)
    assert zbpipe.load_costs(file) == first
    planned = zbpipe.plan(2, 4, first, budget=1e4)
    assert (planned.schedule.placement, planned.timeline.transport) == (placement, first.transport)
    assert planned.timeline.costs == model


def test_the_overhead_is_the_time_between_ops_that_wait_for_no_message() -> None:
    starts = {"0F0": 0.0, "0F1": 2.0, "1F0": 9.0, "1I0": 11.0, "1W0": 15.0, "0I0": 25.0}  # each op takes 1
    spans = tuple(Span(Op.parse(op), start, start + 1) for op, start in starts.items())
    record = StepRecord("", 30.0, spans, {}, {}, 0)
    assert find_overhead([record], num_stages=2) == 1.0  # of 0F1, 1I0 and 1W0: 1, 1 and 3
    assert find_overhead([record], num_stages=9) == 2.0
    assert find_overhead([], num_stages=2) == 0.0


def links_of_uneven_messages() -> list[tuple[int, int]]:
    rank = dist.get_rank()
    stage: Any = PipelineStage(Sleepy(1), rank, 2, CPU)
    return sorted(measure_links([stage], message_bytes=rank << 21))


def test_ranks_with_messages_of_different_sizes_measure_their_link(by_rank: Any) -> None:
    assert [found["links", ""] for found in by_rank] == [[(0, 1), (1, 0)]] * 2


def kept(name: str) -> Any:
    pipeline = Pipeline(name, MICROBATCHES, lambda index, of: build_stage(index, of, "full", num_blocks=2))
    profiler = zbpipe.Profiler(pipeline.schedule, 1)
    tokens, targets = batch(MICROBATCHES)
    for _ in range(3):
        pipeline.run(tokens, target=targets)
    assert profiler.costs is not None
    return profiler.costs


def test_bytes_of_activations(by_rank: Any) -> None:
    """Two sequences of 6 tokens, 16 wide, in float32, through two checkpointed blocks."""
    costs, of_auto = (by_rank[0]["kept", name].costs for name in ("ZBV", "Auto"))
    assert isinstance(costs, CostModel)
    message = 2 * 6 * WIDTH * 4
    # A middle stage keeps the input of the second block, and its output until it is sent.
    for stage in (1, 2):
        checkpoints = costs.activations[stage]
        assert 2 * message <= checkpoints <= 3 * message + 256
        # x and dY of three products 16 to 32 wide and one of them twice, in two blocks.
        assert costs.of(stage, OpKind.W).frees > checkpoints
        # F makes each of the widest layer's two results only for a while, I recomputes a block.
        assert costs.of(stage, OpKind.F).needs >= checkpoints + 2 * message
        assert costs.of(stage, OpKind.I).needs > costs.of(stage, OpKind.I).adds + 2 * message
    # It measures I and W of a few microbatches only, and B, which takes less.
    for stage in range(4):
        assert of_auto.activations[stage] == costs.activations[stage]
        assert of_auto.of(stage, OpKind.W).frees == pytest.approx(costs.of(stage, OpKind.W).frees, abs=message)
        assert of_auto.of(stage, OpKind.I).needs == pytest.approx(costs.of(stage, OpKind.I).needs, abs=message)
        of_b, of_i = (of_auto.of(stage, kind).needs for kind in (OpKind.B, OpKind.I))
        assert costs.of(stage, OpKind.B).needs == 0 < of_b < of_i
        assert min(of_auto.f[stage], of_auto.i[stage], of_auto.w[stage]) > 0


class Renewing(nn.Module):
    """Each forward replaces what the one before it has left, as FSDP does with what it gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.left = torch.empty(2**20)
        return self.product(x)


def test_what_an_op_frees_for_another_counts(one_rank: None) -> None:
    schedule = on_one_rank([Renewing(), Renewing()], 4, loss=mean_loss)
    records: list[StepRecord] = []
    collect(schedule, [Wanted.MEMORY], records.extend)
    schedule.step(torch.zeros(4, WIDTH), target=torch.zeros(4, WIDTH))
    (record,) = records
    assert {op.stage for op in record.kept} == {0, 1}
    for op, kept in record.kept.items():
        assert abs(kept) < 2**16
        assert record.most[op] >= (4 * 2**20 if op.kind is OpKind.F else 0)


def test_who_has_seen_enough_leaves(one_rank: None) -> None:
    by_name: Any = "cpu"
    stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), index, 2, by_name) for index in range(2)]
    schedule: Any = zbpipe.build_pipeline_schedule("ZBV", stages, MICROBATCHES, mean_loss)
    profiler, check = zbpipe.Profiler(schedule, steps=1), zbpipe.GradientCheck(schedule, steps=2)
    left = []
    for _ in range(4):
        schedule.step(x := torch.randn(2 * MICROBATCHES, WIDTH), target=x)
        left.append([type(each).__name__ for each in schedule._watchers])
    both, collector = ["Collector", "GradientCheck"], ["Collector"]
    assert left == [both, both, collector, []]
    assert profiler.costs is not None
    assert check.report is not None


def test_validation_is_not_measured(one_rank: None) -> None:
    """A watcher sees two steps out of a step, an eval, and a step, when the last has ended."""
    job = Job("ZBV")
    seen: list[StepRecord] = []
    collect(job.schedule, [Wanted.TIMES, Wanted.TIMES], seen.extend)
    job.step()
    job.step("eval")
    assert not seen
    job.step()
    assert len(seen) == 2


def traced(name: str, file: Path) -> tuple[list[str], Path]:
    job = Job(name)
    told: list[str] = []
    write_trace(job.schedule, file, 2, done=told.append)
    job.step()
    assert not file.exists()
    job.step()
    return told, file


@pytest.mark.parametrize("name", ["ZBV", "1F1B"])
def test_a_trace_has_the_planned_and_the_measured_step(by_rank: Any, name: str) -> None:
    (told, file), (silent, _) = (found["traced", name] for found in by_rank)
    assert silent == []
    assert f"shows {name}: " in told[0]
    data = json.loads(file.read_text())
    rows = {event["args"]["name"]: event["pid"] for event in data["traceEvents"] if event["name"] == "process_name"}
    assert rows == {"rank 0": 0, "rank 0 measured": 1, "rank 1": 2, "rank 1 measured": 3}
    ops = {pid: [e["name"] for e in data["traceEvents"] if e["ph"] == "X" and e["pid"] == pid] for pid in range(4)}
    for rank, row in enumerate(zbpipe.generate(name, 2, MICROBATCHES)):
        assert ops[2 * rank] == ops[2 * rank + 1] == list(map(str, row))


def test_a_trace_that_cannot_be_written(one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused when it is asked for; later, the job goes on."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"trace.json' cannot be written: .*name another file"):
        write_trace(Job("ZBV").schedule, tmp_path / "file" / "trace.json")
    told: list[str] = []
    for file in (tmp_path / "folder" / "trace.json", Path("/dev/full")):
        job = Job("ZBV")
        write_trace(job.schedule, file, 1, done=told.append)
        shutil.rmtree(tmp_path / "folder", ignore_errors=True)
        job.step()
    assert told == []
    assert "the trace of this step cannot be written: [Errno 2] No such file" in caplog.text
    assert "cannot be written: [Errno 28] No space left" in caplog.text


def measured_by_auto(stages_per_rank: int) -> tuple[Any, ...]:
    """In a wave or a loop."""
    job = Job("Auto", stages_per_rank=stages_per_rank, profile_steps=1, transport="one queue")
    names = [job.schedule.schedule.name]
    for _ in range(5):
        job.step()
        names.append(job.schedule.schedule.name)
    profile: Any = job.schedule._profiler
    found, costs = job.schedule.schedule, profile.costs.costs
    assert str(profile.costs.transport) == "one queue"
    rows = passes.place_receives(passes.add_messages(found), Receives.TIMED, simulate(found, costs))
    placed, expected = (
        [each for row in rows for each in row if each.kind.startswith(("SEND", "RECV"))]
        for rows in (pipelining.rows_of(job.schedule), rows)
    )
    assert placed == expected
    timeline = find_shortest("ZB", found.placement, MICROBATCHES, costs, transport=Transport.ONE_QUEUE)
    assert found == timeline.schedule
    assert job.schedule.costs == profile.costs
    return names, str(found)


@pytest.mark.parametrize("stages", ["2", "3"])
def test_auto_makes_zb_by_what_it_measured_for_the_transport(by_rank: Any, stages: str) -> None:
    first, second = (found["Auto", stages] for found in by_rank)
    assert first == second
    names, rows = first
    assert names == ["Auto-ZB"] * 3 + ["ZB"] * 3
    assert rows.startswith("rank 0: 0F0")


def with_activations(naps: int) -> nn.Module:
    """One keeps something that is neither its input nor its output, which others hold.

    It keeps it for so long that it can be copied on a busy machine.
    """
    return nn.Sequential(Sleepy(4 * naps), nn.Tanh(), nn.Tanh())


def offloading() -> tuple[bool, bool, int]:
    """Whether there are copies before `Auto` has measured, and after, and what they copied."""
    job = Job("Auto", model=with_activations, profile_steps=1, offload="all")
    seen = {job.schedule.schedule.name: job.schedule.schedule.has_copies}
    for _ in range(5):
        job.step()
        seen[job.schedule.schedule.name] = job.schedule.schedule.has_copies
    return seen["Auto-ZB"], seen["ZB"], job.schedule._copies.copier.copied


def test_auto_offloads_by_what_it_measured(by_rank: Any) -> None:
    results = [found["offload", ""] for found in by_rank]
    assert [copies for *copies, _ in results] == [[False, True]] * 2
    assert sum(copied for *_, copied in results) > 0
