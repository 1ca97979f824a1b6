"""Best schedules of PyTorch's, Sea AI's and Primus' schedulers, by size, times and memory limit; needs no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zbpipe import CostModel, Placement

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
    """Shortest makespan of any peer within the limit."""

    def costs(self, placement: Placement) -> CostModel:
        return CostModel.uniform(placement, *self.times, comm=self.comm)

    @property
    def wanted(self) -> float:
        """The target: the peer, or 5 % less where memory is tight and times differ."""
        tight = self.limit_name not in ("p", "2p") and len(set(self.times)) > 1
        return self.peer * (0.95 if tight else 1)


def cells() -> Iterator[Cell]:
    """All rows of peer_frontier.csv."""
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
