"""Plans beside what the schedulers of PyTorch, Sea AI and Primus reach, and makespan against memory limit.

python benchmarks/planner.py                      # the grid, as a Markdown table
python benchmarks/planner.py --frontier plan.svg  # the frontier of one configuration
python benchmarks/planner.py --sizes              # the time of a search by size
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from zbpipe import CostModel, Placement, Plan, generate, plan, registry, simulate, validate
from zbpipe.planner.request import DEFAULT_PLACEMENTS, PLACEMENTS

PEERS = Path(__file__).parent / "peer_frontier.csv"


@dataclass(frozen=True)
class Cell:
    """One row of the peers' figures."""

    ranks: int
    microbatches: int
    times: tuple[float, float, float]
    comm: float
    limit_name: str
    limit: float
    peer: float
    peer_name: str

    def costs(self, placement: Placement) -> CostModel:
        return CostModel.uniform(placement, *self.times, comm=self.comm)

    @property
    def wanted(self) -> float:
        """What the plan should reach: the peer, or 5 % less where memory is tight and times differ."""
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
                row["peer"],
            )


def search(cell: Cell, placements: tuple[str, ...], budget: float | None) -> tuple[Plan, float]:
    """The plan and the seconds of one core that it took."""
    begin = time.process_time()
    found = plan(cell.ranks, cell.microbatches, cell.costs, cell.limit, placements=placements, budget=budget)
    seconds = time.process_time() - begin
    assert not validate(found.schedule, cell.limit)
    return found, seconds


def grid(budget: float | None) -> None:
    """A Markdown table: the peer, two stages a rank at most, and four."""
    plan(2, 2, (1, 1, 1), budget=1)  # loads the machine code
    print("| p, m | times | comm | limit | best peer | v <= 2 | bound | v <= 4 | bound | placement | to the peer | s |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---|---:|---:|")
    above = missed = 0
    for cell in cells():
        two, first = search(cell, DEFAULT_PLACEMENTS, budget)
        four, second = search(cell, tuple(PLACEMENTS), budget)
        best = min(two, four, key=lambda each: each.makespan)
        above += best.makespan > cell.peer + 1e-9
        missed += best.makespan > cell.wanted + 1e-9
        impossible = four.lower_bound > cell.wanted
        mark = "" if best.makespan <= cell.wanted + 1e-9 else " (bound)" if impossible else " (missed)"
        times = ", ".join(f"{each:g}" for each in cell.times)
        print(
            f"| {cell.ranks}, {cell.microbatches} | {times} | {cell.comm:g} | {cell.limit_name} | {cell.peer:g}"
            f" | {two.makespan:.2f} | {two.lower_bound:.2f} | {four.makespan:.2f} | {four.lower_bound:.2f}"
            f" | {best.placement} | {100 * (best.makespan / cell.peer - 1):+.1f} %{mark} | {first:.1f}, {second:.1f} |",
            flush=True,
        )
    print(f"\n{above} cells above the peers, {missed} short of what is wanted.")


def sizes() -> None:
    """How long a search takes with the usual budget."""
    plan(2, 2, (1, 1, 1), budget=1)
    print("| p, m | limit | makespan | bound | gap | found by | seconds |")
    print("|---|---:|---:|---:|---:|---|---:|")
    for ranks, microbatches in ((4, 8), (8, 32), (32, 128), (64, 512)):
        for limit in (ranks, ranks / 2 + 1.5):
            begin = time.process_time()
            found = plan(ranks, microbatches, (1, 1.2, 0.8), limit)
            seconds = time.process_time() - begin
            print(
                f"| {ranks}, {microbatches} | {limit:g} | {found.makespan:.2f} | {found.lower_bound:.2f}"
                f" | {100 * found.gap:.2f} % | {found.placement}: {found.found_by} | {seconds:.1f} |",
                flush=True,
            )


def frontier(path: Path, budget: float | None) -> None:
    """Makespan against memory limit for 8 ranks, 32 microbatches and times 1, 1.2, 0.8; named schedules as points."""
    ranks, microbatches, times = 8, 32, (1.0, 1.2, 0.8)
    costs = partial(CostModel.uniform, f=times[0], i=times[1], w=times[2])
    limits = [3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8, 9, 10, 12, 14, 16]
    curves: dict[str, list[tuple[float, float]]] = {
        "plans, two stages": [],
        "plans, four stages": [],
        "bound, four stages": [],
    }
    for limit in limits:
        two = plan(ranks, microbatches, costs, limit, budget=budget)
        four = plan(ranks, microbatches, costs, limit, placements=PLACEMENTS, budget=budget)
        curves["plans, two stages"].append((limit, two.makespan))
        curves["plans, four stages"].append((limit, four.makespan))
        curves["bound, four stages"].append((limit, four.lower_bound))
        print(f"{limit:g}: {two.makespan:.2f} {four.makespan:.2f} {four.lower_bound:.2f}", file=sys.stderr)
    # A schedule for less memory fits into more.
    for name in ("plans, two stages", "plans, four stages"):
        best = float("inf")
        curves[name] = [(limit, best := min(best, length)) for limit, length in curves[name]]
    points = {}
    for algorithm in registry.schedules().values():
        placed = costs(algorithm.place(ranks))
        timeline = simulate(generate(algorithm.name, ranks, microbatches, costs=placed), placed)
        points[algorithm.name] = (max(timeline.peak_activations), timeline.makespan)
    path.write_text(draw(curves, points))


def draw(curves: dict[str, list[tuple[float, float]]], points: dict[str, tuple[float, float]]) -> str:
    """An SVG picture of the curves and the points that lie within the axes."""
    left, top, width, height = 60, 30, 620, 380
    (low_x, high_x), (low_y, high_y) = (3.0, 16.0), (95.0, 150.0)

    def x(limit: float) -> float:
        return left + width * (limit - low_x) / (high_x - low_x)

    def y(length: float) -> float:
        return top + height * (high_y - length) / (high_y - low_y)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 40} {top + height + 50}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for tick in range(3, 17):
        out.append(f'<text x="{x(tick):.1f}" y="{top + height + 18}" text-anchor="middle">{tick}</text>')
    for tick in range(100, 151, 10):
        out.append(f'<path d="M{left} {y(tick):.1f}h{width}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    out.append(
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">memory limit per rank, in'
        " microbatches</text>"
    )
    out.append(f'<text x="{left}" y="{top - 12}">makespan; 8 ranks, 32 microbatches, F, I, W = 1, 1.2, 0.8</text>')
    looks = (("#1f6feb", ""), ("#b3261e", ""), ("#888", "5 4"))
    for number, ((name, curve), (colour, dashes)) in enumerate(zip(curves.items(), looks, strict=True)):
        inside = [(limit, min(length, high_y)) for limit, length in curve]
        line = " ".join(f"{x(limit):.1f},{y(length):.1f}" for limit, length in inside)
        out.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
        row = top + 20 + 18 * number
        out.append(
            f'<path d="M{left + width - 190} {row}h24" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
        out.append(f'<text x="{left + width - 160}" y="{row + 4}">{escape(name)}</text>')
    labels: dict[tuple[float, float], list[str]] = {}
    for name, (limit, length) in points.items():
        if low_x <= limit <= high_x and low_y <= length <= high_y:
            labels.setdefault((limit, round(length, 1)), []).append(name)
    beside, lowest = 0.0, 0.0
    for (limit, length), names in sorted(labels.items(), key=lambda label: -label[0][1]):
        out.append(f'<circle cx="{x(limit):.1f}" cy="{y(length):.1f}" r="4"/>')
        # Points that are close to each other have their labels one below the other.
        label_y = max(y(length) - 6, lowest + 13 if abs(limit - beside) < 3 else 0.0)
        beside, lowest = limit, label_y
        out.append(f'<text x="{x(limit) + 7:.1f}" y="{label_y:.1f}">{escape(", ".join(names))}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, help="ops that each search may time; default: the planner's")
    parser.add_argument("--frontier", type=Path, metavar="FILE", help="write the frontier plot")
    parser.add_argument("--sizes", action="store_true", help="time the search for larger and larger jobs")
    arguments = parser.parse_args()
    if arguments.frontier:
        frontier(arguments.frontier, arguments.budget)
    elif arguments.sizes:
        sizes()
    else:
        grid(arguments.budget)


if __name__ == "__main__":
    main()
