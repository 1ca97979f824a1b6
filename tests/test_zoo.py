"""Every model of the zoo gets the losses, gradients and buffers of plain autograd from the deferred split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranks import RankError, run_ranks
from zoo import CASES
from zoo.case import Case
from zoo.runner import SETTINGS, run_all

pytestmark = pytest.mark.timeout(900)
_LIMIT = 600.0
"""Seconds for all models on one number of ranks."""


class Results(Mapping[tuple[str, str], list[str | None]]):
    """By model and setting what each rank found wrong, None where nothing is."""


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda ranks: f"p{ranks}")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All models that were asked for, on so many ranks."""
    num_ranks = request.param
    chosen = {item.callspec.params["case"].name for item in request.session.items if item.fspath == request.node.fspath}
    names = [case.name for case in CASES if case.name in chosen]
    # One process has one core: of pipelines of one rank, two run at a time.
    parts = [names[0::2], names[1::2]] if num_ranks == 1 else [names]
    folders = [tmp_path_factory.mktemp(f"p{num_ranks}") for _ in parts]

    def run(part: list[str], folder: Path) -> str:
        try:
            run_ranks(num_ranks, run_all, part, folder, timeout=_LIMIT)
        except RankError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        endings = list(pool.map(run, parts, folders))
    return num_ranks, _read(folders), "".join(endings)


def _read(folders):
    found = {}
    for file in (file for folder in folders for file in sorted(folder.glob("*.jsonl"))):
        for line in file.read_text().splitlines():
            name, setting, error = json.loads(line)
            found.setdefault((name, setting), []).append(error)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_like_plain_autograd(results, case: Case) -> None:
    num_ranks, found, ending = results
    wrong = []
    for setting in SETTINGS[num_ranks]:
        if setting.suits(case):
            per_rank = found.get((case.name, str(setting)), [])
            if len(per_rank) < num_ranks:
                wrong.append(f"{setting}: no result. {ending}")
            wrong += [f"{setting}, rank {rank}: {error}" for rank, error in enumerate(per_rank) if error]
    assert not wrong, "\n".join(wrong)
