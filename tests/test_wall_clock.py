"""The benchmark of step times runs every schedule, and its stages sleep as often and as long as they should."""

from dataclasses import replace

import fsdp
import pytest
import sizes
import wall_clock
from ranks import run_ranks
from searching import searching_little
from sleeping import Ran, check
from wall_clock import Job, Result

from zbpipe import CostModel, Op, OpKind

JOB = Job(ranks=2, microbatches=4, unit=1e-3, rounds=1, times=((1, 1.2, 0.8),))


def on_this_rank(job: Job) -> list[Result]:
    with searching_little():
        return wall_clock.on_this_rank(job)


def measure(job: Job) -> list[Result]:
    return run_ranks(job.ranks, on_this_rank, job, timeout=240, backend=job.backend)[0]  # type: ignore[no-any-return]


@pytest.mark.long
def test_every_schedule_sleeps_what_the_simulator_counts() -> None:
    """In every measured step each rank calls `check` with what ran."""
    results = measure(JOB)
    assert [result.schedule for result in results] == [*wall_clock.NAMED, *wall_clock.PLANS]
    for result in results:
        # Sleeps are never too short, so no step is shorter than what a rank sleeps in it.
        assert len(result.measured) == JOB.rounds
        assert min(*result.measured, result.simulated) >= 3 * JOB.microbatches * JOB.unit
    lines = wall_clock.table(results).splitlines()
    assert len(lines) == 2 + len(results)
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.long
def test_fsdp_is_measured_with_and_without_overlap() -> None:
    job = fsdp.Job(2, ("plan", "1F1B"), ((1, 1, 1),), (1.0,), layers=2, unit=1e-2, rounds=1, modes=("reshard", "torch"))
    results = run_ranks(4, fsdp.on_this_rank, job)[0]
    for each in results:
        work = 3 * job.microbatches * job.unit
        assert min(*each.measured, *each.simulated) >= work
        # Nothing hides torch's first gather and its last reduction.
        assert each.measured[-1] >= work + job.unit
    assert len(fsdp.table(results, job.modes).splitlines()) == 2 + len(results)


@pytest.mark.long
def test_microbatches_sleep_by_their_sizes() -> None:
    """In every measured step each rank calls `check`, with the sizes in the order of their way."""
    job = sizes.Job(2, 6, samples=2, unit=1e-3, rounds=2, schedules=("ZB",), sigmas=(1.0,))
    (found,) = run_ranks(2, sizes.on_this_rank, job, timeout=240)[0]
    # No step is shorter than what a rank sleeps: 3 units on average, and as many for the longest one if padded.
    works = {way: min(found.measured[way]) / (3 * job.microbatches * job.unit) for way in sizes.WAYS}
    assert works["padded"] >= 1.3
    assert min(works.values()) >= 1
    assert len(sizes.table([found]).splitlines()) == 3


ONES = (1e-3, 1e-3)
COSTS = CostModel(ONES, ONES, ONES, ONES)


def ran(op: str, kinds: str, seconds: float = 1e-3) -> Ran:
    return Ran(Op.parse(op), 0.0, 0.0, tuple((OpKind(kind), seconds) for kind in kinds))


def ops(*names: str) -> list[Op]:
    return [Op.parse(name) for name in names]


def test_the_check_takes_each_backward() -> None:
    check([ran("1F0", "F"), ran("1B0", "WI")], ops("1F0", "1B0"), COSTS, torchs_split=True)
    for torchs_split in (False, True):
        check([ran("1I0", "I"), ran("1W0", "W")], ops("1I0", "1W0"), COSTS, torchs_split)
    check([ran("0I0", ""), ran("0W0", "IW")], ops("0I0", "0W0"), COSTS, torchs_split=True)


@pytest.mark.parametrize("slept", ["0F0", "0F0 FF", "0F0 f", "1B0 I", "1I0 IW", "1W0", "0I0"])
def test_the_check_refuses_what_did_not_sleep_as_it_should(slept: str) -> None:
    """A small letter is a sleep that was too short."""
    op, _, kinds = slept.partition(" ")
    with pytest.raises(AssertionError, match=f"{op} slept"):
        check([ran(op, kinds.upper(), 0.9e-3 if kinds.islower() else 1e-3)], ops(op), COSTS, torchs_split=False)


def test_the_check_refuses_another_order_than_the_simulated_one() -> None:
    with pytest.raises(AssertionError, match="ran 0F0 0B0 instead of 0F0 0F1"):
        check([ran("0F0", "F"), ran("0B0", "IW")], ops("0F0", "0F1"), COSTS, torchs_split=False)


def test_a_step_that_is_off_is_marked() -> None:
    right = Result(2, 4, (1, 1, 1), "1F1B", [1.02, 1.04, 9.0], 1.0, 1.03, 0.0, 0.0)
    wrong = Result(2, 4, (1, 1, 1), "ZBV", [0.9, 0.94, 0.95], 1.0, 1.03, 0.0, 0.0)
    assert [wall_clock.missed(right), wall_clock.missed(wrong)] == [False, True]
    rows = [[cell.strip() for cell in line.split("|")] for line in wall_clock.table([right, wrong]).splitlines()[2:]]
    assert [row[7] for row in rows] == ["1.040", "**0.940**"]
    assert [row[9] for row in rows] == ["+0.0 %", "+10.6 %"]


@pytest.mark.long
def test_messages_come_late() -> None:
    """Steps are longer by it, and are simulated to be; a plan runs."""
    names = ("1F1B", "plan, 2p")
    late = replace(JOB, schedules=names, late=50, backend="fifo_queue_per_edge")
    results = measure(late)
    assert [result.schedule for result in results] == list(names)
    for result in results:
        assert min(*result.measured, result.simulated) > 2 * 3 * (JOB.microbatches + 1) * JOB.unit
