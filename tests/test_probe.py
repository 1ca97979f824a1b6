"""What is known of a job's messages from versions and variables, and the probe of computations that wait for them."""

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from data import expectations
from fifo import BACKENDS
from interleavings import Case, Pipelines, fail
from interleavings import _require_ends as require_ends
from models import batch, reference
from pipelines import Pipeline, Result, assert_like
from ranks import run_ranks
from turns import Choices

from zbpipe.costs.model import Transport
from zbpipe.runtime import schedules
from zbpipe.runtime._torch import pipelining
from zbpipe.runtime.device import Cpu
from zbpipe.runtime.measure import transport
from zbpipe.runtime.measure.transport import Known, find_known, find_known_of
from zbpipe.runtime.ranks.step_board import StepBoard
from zbpipe.simulator.actions import Rows

ONE, PER_PEER, SHARED = Transport.ONE_QUEUE, Transport.QUEUE_PER_PEER, Transport.SHARED
ASSUMED = Known(ONE, False, "")
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(("given", "expected"), expectations("transports by version and settings"))
def test_what_versions_and_settings_tell(given: str, expected: str) -> None:
    version, *words = given.split()
    environment = dict(each.split("=") for each in words if "=" in each)
    settings: Any = {each: True for each in words if "=" not in each}
    assert find_known(version, environment, **settings).transport is Transport(expected)


def test_a_stage_tells_what_holds_for_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A setting that costs is told once."""
    transport._warn_once.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)

    def find(device: str = "cuda", *, bound_to: object = None, **attributes: bool) -> Transport:
        group = type("Group", (), {"bound_device_id": bound_to})()
        stage: Any = SimpleNamespace(device=torch.device(device), group=group, **attributes)
        return find_known_of(stage).transport

    assert [find("cpu"), find(), find(bound_to=torch.device("cuda", 0))] == [Transport.IDEAL, PER_PEER, ONE]
    assert find(bound_to=torch.device("cuda", 0), p2p_per_edge=True) is PER_PEER
    assert find(p2p_per_direction=True) is ONE
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not caplog.messages
    assert [find("cpu"), find(), find()] == [Transport.IDEAL, SHARED, SHARED]
    assert find_known("2.14.1", ONE_CONNECTION).queues is PER_PEER
    assert len([each for each in caplog.messages if each.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 ")]) == 1
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert find() is PER_PEER


class SharedEvent:
    """An event in the queue of this rank's messages."""

    def record(self) -> None:
        group: Any = dist.group.WORLD
        self._places = [queue.add(lambda: 0.0) for queue in group._queues.values()]

    def query(self) -> bool:
        return all(each.done() for each in self._places)


class Shared(Cpu):
    """A device whose computations and messages share a queue."""

    def new_event(self, *, timed: bool = False) -> Any:
        return SharedEvent()


class Found(NamedTuple):
    """What a rank's two steps did."""

    result: Result
    """Of the second step."""
    transport: str
    is_like_before: bool
    """Whether the second step had the lists of the first one."""
    messages: list[str]
    """The log."""
    asked: list[str]


def train(name: str, sharing: Sequence[int], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Found:
    """Two steps on this rank, on devices of which those of some ranks share a queue."""
    device = (Shared if dist.get_rank() in sharing else Cpu)(torch.device("cpu"))
    monkeypatch.setattr(transport, "find_device", lambda of: device)
    measured = dict[Any, Known]()
    monkeypatch.setattr(transport, "_measured", measured)
    monkeypatch.setattr(schedules, "find_known_of", lambda stage: find_known_of(stage) if measured else ASSUMED)
    logged, asked, lists = list[str](), list[str](), list[Rows]()
    monkeypatch.setattr(schedules.logger, "info", lambda words, *values: logged.append(words % values))
    gather = StepBoard.gather
    monkeypatch.setattr(StepBoard, "gather", lambda self, name, value: asked.append(name) or gather(self, name, value))
    pipeline = Pipeline(name, MICROBATCHES, **options)
    tokens, targets = batch(MICROBATCHES)
    for _ in range(2):
        pipeline.zero_grad()
        lists.append(pipelining.rows_of(pipeline.schedule))
        losses = pipeline.run(tokens, target=targets)
    assert lists[1] == pipelining.rows_of(pipeline.schedule)
    assert all(work.messages.routes is None for work in pipeline.schedule.works)
    messages = [each for each in logged if each.startswith("Messages: ")]
    result = losses, pipeline.gradients()
    other = Pipeline("ZBH1", MICROBATCHES).schedule  # which asks as the first one does, if that has not
    assert (other.transport, other._probe is None) == (pipeline.schedule.transport, bool(asked))
    return Found(result, str(pipeline.schedule.transport), lists[0] == lists[1], messages, asked)


def train_all() -> list[Found]:
    found = []
    for name, sharing, options in CASES:
        with pytest.MonkeyPatch.context() as patch:
            found.append(train(name, sharing, patch, **options))
    return found


MICROBATCHES = 4
CASES: list[tuple[str, Sequence[int], dict[str, Any]]] = [
    ("ZB", (), {}),
    ("ZB", (0, 1), {}),
    ("ZBH1", (0,), {}),
    ("ZBLoop", (1,), {}),
    ("ZB", (0, 1), {"transport": "one queue"}),
    ("ZBH1", (0, 1), {"receives": "early"}),
    ("ZBH1", (0, 1), {"plain": True}),
]


def test_a_schedule_is_remade_for_the_measured_transport() -> None:
    """On ranks of which none, one or all let computations wait; only where it makes a difference, and once."""
    by_rank = run_ranks(2, train_all, backend="fifo_one_queue")
    for number, (name, sharing, options) in enumerate(CASES):
        found: list[Found] = [each[number] for each in by_rank]
        assert_like([each.result for each in found], reference(2 if name == "ZBH1" else 4, MICROBATCHES), name)
        is_probed = not options
        expected = SHARED if is_probed and sharing else ONE
        how = "computations wait" if sharing else "no computation waits"
        for each in found:
            assert each.transport == str(expected)
            assert each.is_like_before == (expected is ONE)
            assert each.asked == ["free/1", "free/0"] * is_probed
            assert len(each.messages) == is_probed
            for words in each.messages:
                assert words.endswith(f" receives, for the transport '{expected}': {how} for messages")


def probe_over_gloo() -> Found:
    with pytest.MonkeyPatch.context() as patch:
        found = train("ZBH1", (), patch)
    schedule = Pipeline("ZBH1", MICROBATCHES).schedule
    assert (schedule.transport, schedule._probe) == (Transport.IDEAL, None)
    return found


def test_over_gloo_no_computation_waits() -> None:
    """A job on the CPU does not ask."""
    for found in run_ranks(2, probe_over_gloo):
        assert (found.transport, found.asked, found.is_like_before) == (str(ONE), ["free/1", "free/0"], True)


def test_one_rank_asks_nobody(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "find_known_of", lambda stage: ASSUMED)
    assert Pipeline("ZB", MICROBATCHES).schedule._probe is None


# In any order of the ranks' turns.


class EventOfTurns:
    """Over once no message that its rank has posted is left."""

    def __init__(self, pipelines: Pipelines, is_shared: bool) -> None:
        self._turns, self._is_shared = pipelines.turns, is_shared

    def record(self) -> None:
        self._rank = dist.get_rank()

    def query(self) -> bool:
        self._turns.wait()
        queues = self._turns.network._queues.items()
        return not (self._is_shared and any(queue for (rank, _), queue in queues if rank == self._rank))


@pytest.fixture
def probing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pipelines that probe, with a random rank whose computations wait, or none."""
    monkeypatch.setattr(schedules, "find_known_of", lambda stage: ASSUMED)

    def make(case: Case, random: Random) -> tuple[Pipelines, Transport]:
        pipelines, waits = Pipelines(case, transport=None), random.randrange(case.ranks + 1)
        device = Cpu(torch.device("cpu"))
        monkeypatch.setattr(device, "new_event", lambda: EventOfTurns(pipelines, dist.get_rank() == waits))
        monkeypatch.setattr(transport, "find_device", lambda of: device)
        return pipelines, SHARED if waits < case.ranks else ONE

    return make


@pytest.mark.parametrize("queues", BACKENDS)
@pytest.mark.parametrize(
    ("name", "ranks"), [("ZBH1", 2), ("ZBV", 3), pytest.param("ZBLoop", 4, marks=pytest.mark.long)]
)
def test_all_ranks_come_to_the_worst_answer(probing: Any, name: str, ranks: int, queues: str) -> None:
    for seed in range(5):
        pipelines, expected = probing(Case(name, ranks, 2, queues), Random(seed))
        with pipelines.running():
            for _ in range(2):
                pipelines.train(Choices(random=Random(seed)))
            assert {each.transport for each in pipelines.schedules} == {expected}, seed


def test_a_failure_in_the_first_step_ends_all_ranks(probing: Any) -> None:
    for seed in range(12):
        random = Random(seed)
        pipelines, _ = probing(Case("ZBV", 3, 3, [*BACKENDS][seed % 3], interrupts=seed % 2 == 0), random)
        with pipelines.running():
            # Its last op: the other ranks may be over with the step, and wait for its answer.
            fail((random.randrange(6), "W", 2))(pipelines, Choices(random=random))


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_dies_in_the_probe_ends_all_ranks(probing: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, gather = Random(seed), StepBoard.gather
    pipelines, _ = probing(Case("ZBH1", 3, 2, [*BACKENDS][seed % 3]), random)

    def die(board: StepBoard, name: str, value: bool) -> list[bool]:
        if name == f"free/{seed % 2}" and dist.get_rank() == 1:
            pipelines.turns.kill = 1, pipelines.turns.taken[1] + random.randrange(1, 4)
        return gather(board, name, value)

    monkeypatch.setattr(StepBoard, "gather", die)
    with pipelines.running():
        ends = pipelines.run(pipelines.step_twice, Choices(random=random))
    lost = "PipelineError: .*(rank 1 has not reached the end of this step|Connection closed by peer)"
    require_ends(ends, lost, "", lost)
