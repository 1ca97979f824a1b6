"""Plans against the best schedules of PyTorch's, Sea AI's and Primus' schedulers, in the simulator.

python benchmarks/planner.py          # each cell of peer_frontier.csv
python benchmarks/planner.py --sizes  # seconds of a search by size
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zbpipe import CostModel, Placement, Plan, plan, validate
from zbpipe.planner.request import PLACEMENTS

PEERS = Path(__file__).parent / "peer_frontier.csv"


@dataclass(frozen=True)
class Cell:
    ranks: int
    microbatches: int
    times: tuple[float, float, float]
    comm: float
    limit_name: str
    limit: float
    peer: float
    """Shortest makespan of any peer within the limit."""

    def costs(self, placement: Placement) -> CostModel:
        return CostModel.uniform(placement, *self.times, comm=self.comm)

    @property
    def wanted(self) -> float:
        """The target: the peer, or 5 % less where memory is tight and times differ."""
        tight = self.limit_name not in ("p", "2p") and len(set(self.times)) > 1
        return self.peer * (0.95 if tight else 1)


def cells() -> Iterator[Cell]:
    with PEERS.open() as file:
        for row in csv.DictReader(file):
            yield Cell(
                int(row["ranks"]),
                int(row["microbatches"]),
                (float(row["t_F"]), float(row["t_I"]), float(row["t_W"])),
                float(row["t_comm"]),
                row["limit"],
                float(row["memory_limit"]),
                float(row["best_peer_makespan"]),
            )


def search(cell: Cell, placements: tuple[str, ...], budget: float | None) -> tuple[Plan, float]:
    """The plan and the seconds of one core that the search took."""
    begin = time.process_time()
    found = plan(cell.ranks, cell.microbatches, cell.costs, cell.limit, placements=placements, budget=budget)
    seconds = time.process_time() - begin
    assert not validate(found.schedule, cell.limit)
    return found, seconds


def grid(budget: float | None) -> str:
    """Markdown: a row for each cell: the peer, plans with at most two stages per rank, and with four."""
    from harness import markdown

    rows, above, missed = [], 0, 0
    for cell in cells():
        of_two = tuple(name for name, place in PLACEMENTS.items() if place(1).num_stages <= 2)
        two, first = search(cell, of_two, budget)
        four, second = search(cell, tuple(PLACEMENTS), budget)
        best = min(two, four, key=lambda each: each.makespan)
        reached = best.makespan <= cell.wanted + 1e-9
        above += best.makespan > cell.peer + 1e-9
        missed += not reached
        mark = "" if reached else " (bound)" if four.lower_bound > cell.wanted else " (missed)"
        rows.append(
            [
                f"{cell.ranks}, {cell.microbatches}",
                ", ".join(f"{each:g}" for each in cell.times),
                f"{cell.comm:g}",
                cell.limit_name,
                f"{cell.peer:g}",
                *(f"{each:.2f}" for found in (two, four) for each in (found.makespan, found.lower_bound)),
                best.placement,
                f"{100 * (best.makespan / cell.peer - 1):+.1f} %{mark}",
                f"{first:.1f}, {second:.1f}",
            ]
        )
    heads = ["p, m", "times", "comm", "limit", "best peer", "v <= 2", "bound", "v <= 4", "bound", "placement"]
    table = markdown([*heads, "to the peer", "s"], rows, left=4)
    return f"{table}\n\n{above} cells above the peers, {missed} short of the target."


def sizes(budget: float | None) -> str:
    """Seconds of a search, for larger and larger jobs."""
    from harness import markdown

    rows = []
    for ranks, microbatches in ((4, 8), (8, 32), (32, 128), (64, 512)):
        for limit in (ranks, ranks / 2 + 1.5):
            begin = time.process_time()
            found = plan(ranks, microbatches, (1, 1.2, 0.8), limit, budget=budget)
            figures = [f"{limit:g}", f"{found.makespan:.2f}", f"{found.lower_bound:.2f}", f"{100 * found.gap:.2f} %"]
            origin = f"{found.placement}: {found.found_by}"
            rows.append([f"{ranks}, {microbatches}", *figures, origin, f"{time.process_time() - begin:.1f}"])
    return markdown(["p, m", "limit", "makespan", "bound", "gap", "found by", "seconds"], rows)


def main() -> None:
    from harness import parser  # which needs torch, unlike the cells

    arguments = parser(__doc__)
    arguments.add_argument("--budget", type=float, help="ops that each search may time; the planner's without it")
    arguments.add_argument("--sizes", action="store_true", help="time the search for larger and larger jobs")
    chosen = arguments.parse_args()
    plan(2, 2, (1, 1, 1), budget=1)  # loads the machine code
    print(sizes(chosen.budget) if chosen.sizes else grid(chosen.budget))


if __name__ == "__main__":
    main()
