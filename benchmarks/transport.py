"""What queues of messages cost, by where receives are posted: in one queue, per peer, or shared with computations.

    python benchmarks/transport.py [--ranks 8] [--microbatches 32] [--costs 1,1.2,0.8] [--comm 0.05]

The longest path through the lists that run, in percent over the ideal transport as `zbpipe simulate` has it. The second
table places the receives by times that are not those of the job. Nothing is run but the simulator.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from zbpipe import CostModel, Schedule, generate, simulate
from zbpipe.actions import Rows
from zbpipe.passes import default_costs, place_receives, with_messages
from zbpipe.transport import Receives, Transport, run
from zbpipe.views.report import table

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf", "VMin", "DualPipeV")
QUEUES = [transport for transport in Transport if transport is not Transport.IDEAL]
TRUE_TIMES = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.6), (1.0, 1.6, 0.6), (1.0, 2.0, 1.0))
TRUE_COMM = (0.0, 0.01, 0.05, 0.15)

Times = tuple[float, float, float]


def percent_over(longer: float, than: float) -> str:
    return f"{100 * (longer / than - 1):+.1f}"


def known(ranks: int, microbatches: int, times: Times, comm: float) -> Iterator[tuple[str, ...]]:
    """A row a schedule: for each transport the four ways to receive, placed by the true times, and the one chosen."""
    for name in SCHEDULES:
        schedule = generate(name, ranks, microbatches)
        costs = CostModel.uniform(schedule.placement, *times, comm=comm)
        ideal = simulate(schedule, costs).makespan
        cells = []
        for transport in QUEUES:
            ways = [simulate(schedule, costs, transport=transport, receives=receives) for receives in Receives]
            cells += [percent_over(each.makespan, ideal) for each in ways]
            cells.append(str(simulate(schedule, costs, transport=transport).receives))
        yield name, *cells


def unknown(ranks: int, microbatches: int) -> Iterator[tuple[str, ...]]:
    """A row a schedule: the worst over the true times, in one queue, if receives are placed as for unknown ones."""
    for name in SCHEDULES:
        schedule = generate(name, ranks, microbatches)
        placed = place_receives(
            with_messages(schedule), Receives.TIMED, simulate(schedule, default_costs(schedule.placement))
        )
        early = with_messages(schedule)
        yield name, *(worst(schedule, rows, comm) for comm in TRUE_COMM for rows in (early, placed))


def worst(schedule: Schedule, rows: Rows, comm: float) -> str:
    def loss(times: Times) -> float:
        costs = CostModel.uniform(schedule.placement, *times, comm=comm)
        end = run(rows, schedule.placement, costs, Transport.ONE_QUEUE).end
        return max(end.values()) / simulate(schedule, costs).makespan

    return percent_over(max(map(loss, TRUE_TIMES)), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--costs", default="1,1.2,0.8")
    parser.add_argument("--comm", type=float, default=0.05)
    given = parser.parse_args()
    f, i, w = map(float, given.costs.split(","))
    print(f"{given.ranks} ranks, {given.microbatches} microbatches, F, I, W {f:g}, {i:g}, {w:g}, comm {given.comm:g}")
    head = [f"{receives}" for _ in QUEUES for receives in (*Receives, "chosen")]
    print("; ".join(QUEUES))
    rows = list(known(given.ranks, given.microbatches, (f, i, w), given.comm))
    print("\n".join(table(("schedule", *head), rows)))
    print()
    print(f"one queue, the worst of F, I, W = {'; '.join(','.join(map('{:g}'.format, each)) for each in TRUE_TIMES)}:")
    print("receives early | timed by equal times and messages of a hundredth, for messages of", *TRUE_COMM)
    head = [each for _ in TRUE_COMM for each in ("early", "timed")]
    print("\n".join(table(("schedule", *head), list(unknown(given.ranks, given.microbatches)))))


if __name__ == "__main__":
    main()
