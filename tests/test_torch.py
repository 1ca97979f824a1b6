"""What works together on torch alone, on four real ranks, for docs/compatibility.md."""

from functools import cache, partial
from itertools import groupby, product
from typing import Any, NamedTuple

import pytest
import torch
from compatibility import Section, Table, compare_when_all_ran, seen_with, words
from forks import compile_in_turn
from models import batch, build_stage, reference
from pipelines import Pipeline, shard
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from zbpipe.schedule import registry

pytestmark = [pytest.mark.long, pytest.mark.versions, pytest.mark.timeout(900)]

RANKS, MICROBATCHES = 4, 4
CHECKPOINTING = ("none", "selective", "full")
SCHEDULES = ("ZBV", "ZBH1", "VHalf")
NAMES = tuple(algorithm.name for algorithm in registry.schedules().values() if algorithm.source == "zbpipe")


class Cell(NamedTuple):
    schedule: str
    checkpointing: Any = "none"
    compiled: bool = False
    shards: int = 1

    @property
    def num_stages(self) -> int:
        return registry.resolve(self.schedule).place(RANKS // self.shards).num_stages


CELLS = [
    *(Cell(*each) for each in product(SCHEDULES, CHECKPOINTING, (False, True), (1, 2))),
    *(Cell(name, shards=shards) for name in NAMES if name not in SCHEDULES for shards in (1, 2)),
]

seen: set[Cell] = set()


class Run(NamedTuple):
    gradients: dict[str, Tensor]
    losses: list[float]


@cache
def all_runs() -> list[dict[Cell, Run]]:
    return run_ranks(RANKS, train_all, timeout=400)


def train_all() -> dict[Cell, Run]:
    """Schedules of the same stages one after the other: what is compiled for one, the next ones use."""
    compile_in_turn()

    def stages(cell: Cell) -> tuple[Any, ...]:
        return cell[1:]

    runs: dict[Cell, Run] = {}
    for _, cells in groupby(sorted(CELLS, key=stages), stages):
        torch.compiler.reset()
        runs |= {cell: train(cell) for cell in cells}
    return runs


def train(cell: Cell) -> Run:
    mesh = make_mesh(cell.shards)
    pipeline = Pipeline(
        cell.schedule,
        MICROBATCHES,
        lambda index, num_stages: prepared(build_stage(index, num_stages, cell.checkpointing), cell, mesh),
        group=mesh.get_group("pp"),
    )
    shard = mesh.get_local_rank("dp")
    tokens, targets = (each.chunk(cell.shards)[shard] for each in batch(cell.shards * MICROBATCHES))
    for _ in range(2):
        pipeline.zero_grad()
        losses = pipeline.run(tokens, target=targets)
    return Run(
        {
            name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            for name, gradient in pipeline.gradients().items()
        },
        losses,
    )


@cache
def make_mesh(shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS // shards, shards), mesh_dim_names=("pp", "dp"))


def prepared(stage: nn.Module, cell: Cell, mesh: Any) -> nn.Module:
    """Compiled and sharded as TorchTitan does it: block by block, then the stage as a whole."""
    blocks = [child for child in stage.children() if not isinstance(child, (nn.Embedding, nn.Linear))]
    if cell.compiled:
        for block in blocks:
            block.compile(fullgraph=True)
    if cell.shards > 1:
        for module in (*blocks, stage):
            shard(module, mesh["dp"])
    return stage


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_and_losses_are_those_of_the_model_in_one_piece(cell: Cell) -> None:
    losses, expected = reference(cell.num_stages, cell.shards * MICROBATCHES)
    runs = [ranks[cell] for ranks in all_runs()]
    found = {name: gradient for run in runs for name, gradient in run.gradients.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=partial("{}: {}".format, name))
    reported = [run.losses for run in runs if run.losses]
    assert len(reported) == cell.shards
    assert [loss for each in reported for loss in each] == pytest.approx(losses, rel=1e-5)
    seen.add(cell)


def test_the_page_says_what_was_seen(request: pytest.FixtureRequest) -> None:
    compare_when_all_ran(request, "cell", set(CELLS), seen, section)


def section() -> Section:
    columns = list(product(CHECKPOINTING, (False, True)))
    lines = [
        [
            f"{name}, {'pp=4' if shards == 1 else 'pp=2 x dp_shard=2'}",
            *("works" if Cell(name, *column, shards) in seen else "not tried" for column in columns),
        ]
        for name in NAMES
        for shards in (1, 2)
    ]
    names = [
        "schedule",
        *(f"{checkpointing}, {'compiled' if compiled else 'eager'}" for checkpointing, compiled in columns),
    ]
    release = ".".join(torch.__version__.split(".")[:2])
    own = _OWN.format(torch=seen_with("torch"), by=_BY.get(release, "`make test-torch`"))
    table = Table("Schedule, activation checkpointing, torch.compile, FSDP2", "", names, lines)
    return Section(f"torch {release} alone", own, words("torch"), [table])


_BY = {"2.13": "`make test-oldest`, which CI runs"}
_OWN = "Tested with {torch} by {by}."
