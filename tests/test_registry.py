"""Names, placements, and errors that help."""
# mypy: disable-error-code="arg-type, dict-item, return-value"
# Wrong arguments are what it tries.

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import zbpipe
from zbpipe.schedule import registry


def test_an_unknown_name_gets_the_list_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown schedule 'ZBW'; did you mean 'ZBV'\?") as error:
        registry.resolve("ZBW")
    for name in ("ZBV", "1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "rank", "more", "stages"),
    [
        ("ZBV", 0, {}, (0, 7)),
        ("zbv", 3, {}, (3, 4)),
        ("1F1B", 2, {}, (2,)),
        ("LoopedBFS", 1, {}, (1, 5)),
        ("Interleaved1F1B", 1, {"stages_per_rank": 3}, (1, 5, 9)),
    ],
)
def test_stages_to_build(name: str, rank: int, more: dict[str, int], stages: tuple[int, ...]) -> None:
    assert zbpipe.stage_indices(name, rank=rank, num_ranks=4, **more) == stages


def test_a_function_of_other_arguments_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match=r"as 'Mine', too many positional .*: a schedule is a function \(ranks, micro"):
        zbpipe.register("Mine")(lambda ranks: None)
    with pytest.raises(TypeError, match="as 'Mine', missing a required argument: 'more'"):
        zbpipe.register("Mine")(lambda ranks, microbatches, more: None)


def test_a_schedule_can_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @zbpipe.register("Mine", placement="v", stages_per_rank=2, summary="a test")
    def mine(ranks: int, microbatches: int) -> zbpipe.Schedule:
        return zbpipe.generate("ZBV", ranks, microbatches)

    assert zbpipe.generate("MINE", 2, 3).num_microbatches == 3
    assert zbpipe.stage_indices("mine", rank=0, num_ranks=2) == (0, 3)
    with pytest.raises(ValueError, match="'Mine' is already registered"):
        zbpipe.register("mine")(registry.resolve("1F1B").generate)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zbpipe.generate("ZBV", 2, 0), "microbatches has to be a whole number from 1 on, got 0"),
        (lambda: zbpipe.generate("ZBV", 0, 2), "ranks has to be a whole number from 1 on, got 0"),
        (
            lambda: zbpipe.stage_indices("ZBV", rank=4, num_ranks=4),
            "rank 4 is outside a placement on 4 ranks: use 0 to",
        ),
        (
            lambda: zbpipe.stage_indices("ZBV", rank=0, num_ranks=0),
            "num_ranks has to be a whole number from 1 on, got 0",
        ),
        (
            lambda: zbpipe.stage_indices("ZBV", rank=0, num_ranks=2, stages_per_rank=3),
            r"ZBV runs 2 stage\(s\) per rank, got stages_per_rank=3",
        ),
        (
            lambda: zbpipe.stage_indices("Interleaved1F1B", rank=0, num_ranks=2, stages_per_rank=0),
            "stages_per_rank has to be a whole number from 1 on, got 0",
        ),
        (lambda: zbpipe.generate("ZB1P", 4, 2, costs=(1, -1, 1)), "uniform costs cannot have i = -1"),
        (lambda: zbpipe.generate(3, 4, 2), "for example 'ZBV', or is a zbpipe.Schedule or zbpipe.Plan, got 3"),
        (lambda: zbpipe.register("x.csv"), "names ending in .csv are files"),
        (lambda: zbpipe.register("X.CSV"), "names ending in .csv are files"),
        (lambda: zbpipe.register(""), "'' cannot be the name of a schedule"),
        (lambda: zbpipe.register("  "), "'  ' cannot be the name"),
        (lambda: zbpipe.register("Mine "), "'Mine ' cannot be the name"),
        (lambda: zbpipe.register("My\nown"), r"'My\\nown' cannot be the name"),
        (lambda: zbpipe.register("-p"), "'-p' cannot be the name"),
        (lambda: zbpipe.generate("1F1B", 10**20, 2), r"10{20} ranks .* at most 1024 are possible"),
        (lambda: zbpipe.generate("1F1B", 2, 10**20), r"1F1B on 2 ranks has 2 .*, and 10{20} microbatches are too many"),
        (lambda: zbpipe.stage_indices("ZBV", rank=0, num_ranks=10**20), "at most 1024 are possible"),
        (lambda: zbpipe.register("X", placement="ring"), "placement='ring'"),
        (lambda: zbpipe.register("X", stages_per_rank=0), "stages_per_rank has to be a whole number from 1 on, got 0"),
    ],
)
def test_values_of_the_wrong_kind_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("placed", "make", "message"),
    [
        ({}, lambda ranks, microbatches: [[]], r"'Odd' has to return a zbpipe.Schedule, got <class 'list'>"),
        (
            {},
            lambda ranks, microbatches: zbpipe.generate("1F1B", ranks, microbatches + 1),
            "'Odd' has to return a schedule for 3 microbatches, got one for 4",
        ),
        (
            {"placement": "v", "stages_per_rank": 2},
            lambda ranks, microbatches: zbpipe.generate("LoopedBFS", ranks, microbatches),
            r"on the ranks \(0, 1, 1, 0\), but its function .* on \(0, 1, 0, 1\)",
        ),
    ],
)
def test_a_function_that_makes_something_else(
    placed: dict[str, Any], make: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    zbpipe.register("Odd", **placed)(make)
    with pytest.raises(ValueError, match=message):
        zbpipe.generate("Odd", 2, 3)


def test_a_large_job_is_no_mistake() -> None:
    assert zbpipe.generate("Interleaved1F1B", 64, 512, stages_per_rank=4).num_microbatches == 512


def test_a_checkout_that_is_not_installed_can_be_imported(tmp_path: Path) -> None:
    """With nothing but the standard library and the sources."""
    (tmp_path / "zbpipe").symlink_to(Path(zbpipe.__file__).parent)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import zbpipe; print(zbpipe.__version__)"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "0+unknown\n"
    assert zbpipe.__version__ == metadata.version("zbpipe")


def test_a_broken_entry_point_leaves_the_other_schedules(tmp_path: Path) -> None:
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[zbpipe.algorithms]\nlost = no_such_module\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import zbpipe"
    program += "; zbpipe.schedule.registry.schedules(); print(zbpipe.generate('1F1B', 1, 1))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert result.stdout == "rank 0: 0F0 0B0\n"
    assert "entry point lost = no_such_module in the group zbpipe.algorithms cannot be loaded" in result.stderr
