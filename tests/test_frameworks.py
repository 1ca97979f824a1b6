"""`zbpipe.install()` and `python -m zbpipe.run`, in a framework that knows no schedule but torch's."""

import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from data import assert_refused, refusals
from forks import run_script
from models import batch, build_stage, loss_fn, without_pipeline
from pipelines import assert_like, on_one_rank
from ranks import run_ranks
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
)

import zbpipe
from zbpipe import run
from zbpipe.frameworks.installation import uninstall
from zbpipe.runtime import adaptive
from zbpipe.runtime.device import Cpu
from zbpipe.schedule import registry

HERE = Path(__file__).parent
TORCHS = schedules.get_schedule_class
RANKS = 2
WAVE = zbpipe.Placement.v(RANKS, 4)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    yield
    uninstall()
    assert schedules.get_schedule_class is TORCHS


def test_every_name_in_any_case() -> None:
    zbpipe.install()
    ask = schedules.get_schedule_class
    for name, algorithm in registry.schedules().items():
        for written in (name, name.upper()):
            if algorithm.source == "torch":
                assert ask(written) is TORCHS(written)
            else:
                assert ask(written).__name__ == f"Schedule{algorithm.name}"
    assert ask("PipelineScheduleSingle") is PipelineScheduleSingle
    assert ask("auto") is ask("Auto")
    with pytest.raises(ValueError, match=r"unknown schedule 'ZBX'; did you mean 'ZB'\?"):
        ask("ZBX")


LOOKS = dict.fromkeys(("ZB", "ZBV", "VHalf", "VMin", "Auto", "v.csv"), "v")
LOOKS |= dict.fromkeys(("ZBH1", "ZBH2", "ZB1P", "ZB2P", "one.csv"), "one stage")
LOOKS |= dict.fromkeys(("loop.csv", "wave.csv"), "loop")


@pytest.mark.parametrize("name", LOOKS)
def test_schedules_look_as_torchs_classes_that_are_placed_alike(name: str, tmp_path: Path) -> None:
    zbpipe.install()
    shown, look = schedules.get_schedule_class(written(name, tmp_path)), LOOKS[name]
    assert issubclass(shown, PipelineScheduleMulti) == (look != "one stage")
    assert issubclass(shown, PipelineScheduleSingle) == (look == "one stage")
    assert (shown in (ScheduleDualPipeV, ScheduleZBVZeroBubble)) == (look == "v")
    assert (shown == ScheduleZBVZeroBubble) == (ScheduleZBVZeroBubble == shown) == (look == "v")
    assert {ScheduleZBVZeroBubble: "v"}.get(shown, "loop") == ("v" if look == "v" else "loop")
    assert shown not in (ScheduleDualPipeV, Schedule1F1B, PipelineScheduleSingle, PipelineScheduleMulti)
    assert ScheduleZBVZeroBubble is TORCHS("ZBVZeroBubble")
    assert shown != schedules.get_schedule_class("VHalf") or name == "VHalf"


def written(name: str, folder: Path) -> str:
    if not name.endswith(".csv"):
        return name
    # The wave: all forwards, then all backwards, down the ranks and up again twice.
    kinds = (zbpipe.OpKind.F,), (zbpipe.OpKind.I, zbpipe.OpKind.W)
    wave: list[list[zbpipe.Op]] = [[] for _ in range(RANKS)]
    for (of, way), rank in product(zip(kinds, (1, -1), strict=True), range(RANKS)):
        stages = WAVE.stages_on(rank)[::way]
        wave[rank] += [zbpipe.Op(stage, kind, n) for stage in stages for n in range(4) for kind in of]
    of_names = {"v.csv": "ZBV", "one.csv": "ZBH1", "loop.csv": "Interleaved1F1B"}
    table = zbpipe.generate(of_names[name], RANKS, 4) if name in of_names else zbpipe.Schedule.from_rows(wave, "wave")
    (folder / name).write_text(table.to_csv())
    return str(folder / name)


def test_modules_that_imported_it_before_get_the_new_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: Any = ModuleType("early")
    late: Any = ModuleType("late")
    early.get = TORCHS
    monkeypatch.setitem(sys.modules, "early", early)
    with caplog.at_level(logging.INFO, "zbpipe"):
        zbpipe.install()
    assert early.get is schedules.get_schedule_class
    assert early.get("zbv").__name__ == "ScheduleZBV"
    assert "torch.distributed.pipelining.schedules" in caplog.text
    assert "early" in caplog.text
    # What is imported later gets it from torch, and loses it again, too.
    late.get_schedule_class = schedules.get_schedule_class
    monkeypatch.setitem(sys.modules, "late", late)
    uninstall()
    assert early.get is late.get_schedule_class is TORCHS
    # Of two installations the second holds.
    zbpipe.install("ZBV", everywhere=True)
    zbpipe.install("ZBH1", everywhere=True)
    assert schedules.get_schedule_class("1F1B").__name__ == "ScheduleZBH1"
    uninstall()
    uninstall()
    assert schedules.get_schedule_class is TORCHS


def test_torchs_names_mean_torchs_classes_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    zbpipe.install("ZBV", split_backward="strict")
    assert schedules.get_schedule_class("1F1B") is Schedule1F1B
    assert "asks for torch's own schedule 1F1B and gets it; schedule='ZBV'" in caplog.text
    assert "everywhere=True" in caplog.text
    told = len(caplog.records)
    schedules.get_schedule_class("1F1B")
    assert len(caplog.records) == told


@pytest.mark.parametrize(("call", "words"), refusals("install"))
def test_what_cannot_be_is_refused_and_nothing_is_replaced(call: str, words: str) -> None:
    assert_refused(lambda: eval(call, {"install": zbpipe.install}), words)
    assert schedules.get_schedule_class is TORCHS


def trained(jobs: list[tuple[str, dict[str, Any], int | None]]) -> list[Any]:
    import toy_framework

    found: list[Any] = []
    for name, installed, stages_per_rank in jobs:
        zbpipe.install(**installed)
        try:
            found.append(toy_framework.train(name, stages_per_rank=stages_per_rank))
        except ValueError as error:
            found.append(str(error))
    return found


@cache
def all_trained() -> dict[str, list[Any]]:
    everywhere = {"schedule": "VMin", "everywhere": True, "split_backward": "strict"}
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, Any] = {name: (written(name, Path(folder)), {}, None) for name in TRAINED}
        jobs |= {"everywhere": ("1F1B", everywhere, None), "wave": (written("wave.csv", Path(folder)), {}, 4)}
        ranks = run_ranks(RANKS, trained, list(jobs.values()))
    return dict(zip(jobs, map(list, zip(*ranks, strict=True)), strict=True))


TRAINED: dict[str, tuple[str, tuple[int, ...]]] = {
    **{name: (f"Schedule{name}", (0, 3)) for name in ("ZBV", "VHalf", "ZBVZeroBubble")},
    **{name: (f"Schedule{name}", (0,)) for name in ("ZBH1", "1F1B")},
    "Auto": ("AutoSchedule", (0, 3)),
    **{
        "v.csv": ("ScheduleFromFile", (0, 3)),
        "one.csv": ("ScheduleFromFile", (0,)),
        "loop.csv": ("ScheduleFromFile", (0, 2)),
    },
    "everywhere": ("ScheduleVMin", (0, 3)),
}
"""The class that runs it, and the stages of rank 0. Everywhere it takes the place of what is asked for."""


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_as_without_a_pipeline(name: str) -> None:
    import toy_framework

    runs, on_first_rank = TRAINED[name]
    ranks = all_trained()[name]
    assert [each[0] for each in ranks] == [runs] * RANKS
    assert ranks[0][1] == on_first_rank
    num_stages = RANKS * len(on_first_rank)
    losses, of_mean = without_pipeline(num_stages, toy_framework.MICROBATCHES, *toy_framework.batch())
    expected = {name: toy_framework.MICROBATCHES * gradient for name, gradient in of_mean.items()}
    assert_like([(own_losses, gradients) for *_, gradients, own_losses in ranks], (losses, expected))


def test_a_wave_that_the_framework_cannot_place_is_refused() -> None:
    first, last = all_trained()["wave"]
    assert "rank 0 holds the stages [0, 3, 4, 7]; got the stages [0, 2, 4, 6]" in first
    assert "rank 1 holds the stages [1, 2, 5, 6]; got the stages [1, 3, 5, 7]" in last


def with_options(folder: str) -> str:
    import toy_framework

    zbpipe.install("ZBV", receives="late", trace=f"{folder}/trace.json", trace_step=1, check_gradients=1)
    schedule, stages = toy_framework.build("ZBV", scale_grads=True)
    tokens, targets = toy_framework.batch()
    is_end = stages[0].is_first
    schedule.step(*([tokens] if is_end else []), target=targets if is_end else None)
    return f"{schedule.receives} {schedule.scale_grads}"


def test_options_reach_the_schedule(tmp_path: Path) -> None:
    assert run_ranks(RANKS, with_options, str(tmp_path)) == ["late True"] * RANKS
    assert (tmp_path / "trace.json").exists()


def in_turn(**options: Any) -> tuple[list[str], list[float], list[str]]:
    """What eight steps ran, their losses, and the log."""
    import toy_framework

    said: list[str] = []
    logging.getLogger(adaptive.__name__).addFilter(lambda record: bool(said.append(record.getMessage())))
    zbpipe.install("ZBV", **options)
    schedule, stages = toy_framework.build("ZBV", scale_grads=True)
    optimizer = torch.optim.SGD([each for stage in stages for each in stage.submod.parameters()], lr=0.1)
    tokens, targets = toy_framework.batch()
    ran: list[str] = []
    losses: list[float] = []
    for _ in range(8):
        own: list[torch.Tensor] = []
        is_end = stages[0].is_first
        schedule.step(*([tokens] if is_end else []), target=targets if is_end else None, losses=own)
        ran.append(schedule.lists.running.schedule.name)
        losses += map(float, own)
        optimizer.step()
        optimizer.zero_grad()
    return ran, losses, said


def test_two_schedules_in_turn() -> None:
    usual = run_ranks(RANKS, in_turn)
    compared = run_ranks(RANKS, partial(in_turn, compare_with="VHalf", compare_steps=2))
    for rank, ((alone, losses, _), (ran, own, said)) in enumerate(zip(usual, compared, strict=True)):
        assert alone == 8 * ["ZBV"]
        assert ran == ["ZBV", "ZBV", "VHalf", "VHalf", "ZBV", "VHalf", "ZBV", "ZBV"]
        assert own == pytest.approx(losses, rel=1e-5)
        words = r"in turn, medians of 2 steps each, ZBV takes \S+ s .* and VHalf \S+ s: ZBV is \S+% (shorter|longer)"
        assert rank or re.fullmatch(words, *said)


@pytest.mark.parametrize(("given", "words"), refusals("compare_with"))
def test_schedules_that_cannot_be_compared(one_rank: None, given: str, words: str) -> None:
    stages = [PipelineStage(build_stage(n, 2), n, 2, torch.device("cpu")) for n in range(2)]
    (schedule,), options = eval(f"(lambda *names, **options: (names, options))({given})")

    def build() -> None:
        """It is refused where the option is read, or the schedule built."""
        zbpipe.install(schedule, **options)
        schedules.get_schedule_class(schedule)(stages, 2, loss_fn=loss_fn)

    assert_refused(build, words)


def test_a_script_that_cannot_be_changed() -> None:
    toy = str(HERE / "toy_framework.py")
    printed = run_script(HERE, RANKS, "zbpipe.run", "--schedule", "ZBV", "--", toy, "1F1B", "--its", "own")
    for rank, stages in enumerate([(0, 3), (1, 2)]):
        assert f"{rank} ('ScheduleZBV', {stages}) ['--its', 'own'] __main__" in printed


@pytest.mark.parametrize(("arguments", "words"), refusals("run"))
def test_run_refuses_before_the_script_starts(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(arguments.replace("FILE", __file__).split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert schedules.get_schedule_class is TORCHS


def test_frameworks_do_not_capture_steps(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an own loop it is the user who captures."""
    tokens, targets = batch(2)
    models = [build_stage(0, 2), build_stage(1, 2)]
    own = on_one_rank(models, 2)
    stages = [PipelineStage(build_stage(n, 2), n, 2, torch.device("cpu")) for n in range(2)]
    zbpipe.install()
    asked = schedules.get_schedule_class("ZBV")(stages, 2, loss_fn=loss_fn)
    for _ in range(3):
        own.step(tokens, target=targets)
        for model in models:
            model.zero_grad()
    with monkeypatch.context() as captured:
        captured.setattr(Cpu, "is_capturing", lambda self: True)
        own.step(tokens, target=targets)
        with pytest.raises(ValueError, match=r"cannot capture this step of ZBV: .* by --training\.disable_cuda_graphs"):
            asked.step(tokens, target=targets)
    asked.step(tokens, target=targets)


def test_run_says_when_the_schedule_was_not_used(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour; print('started', sys.argv[1:], __name__)")
    (tmp_path / "neighbour.py").touch()
    printed = run_script(tmp_path, 1, "zbpipe.run", "--schedule", "ZBV", str(script), "--mine")
    assert "started ['--mine'] __main__" in printed
    assert "the job never asked torch for a schedule by name, so it did not use ZBV" in printed


AUTOMODEL = "nemo_automodel.components.distributed.pipelining.functional"


@pytest.fixture
def automodel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, functional = ModuleType("nemo_automodel"), ModuleType(AUTOMODEL)
    package.__version__ = "0.9.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nemo_automodel", package)
    monkeypatch.setitem(sys.modules, AUTOMODEL, functional)
    return functional


def calculate_virtual_stages(num_layers: int, layers_per_stage: int | None, pp_size: int, single: bool) -> Any: ...
def stage_ids_this_rank(pp_rank: int, pp_size: int, num_stages: int, style: str = "loop") -> Any: ...
def renamed(rank: int, size: int, num_stages: int) -> Any: ...


@pytest.mark.parametrize(
    ("functions", "lacking"),
    [
        ({"calculate_virtual_stages": calculate_virtual_stages}, "stage_ids_this_rank"),
        ({"calculate_virtual_stages": calculate_virtual_stages, "stage_ids_this_rank": renamed}, "stage_ids_this_rank"),
        ({"stage_ids_this_rank": stage_ids_this_rank}, "calculate_virtual_stages"),
    ],
)
def test_an_automodel_that_is_not_known_is_named(automodel: Any, functions: Any, lacking: str) -> None:
    vars(automodel).update(functions)
    before = dict(vars(automodel))
    zbpipe.install()
    lacks = rf"ZBV in NeMo AutoModel 0\.9\.1, which has no {lacking}\(\w+, .*; it knows NeMo AutoModel 0.7.0."
    with pytest.raises(ValueError, match=f"{lacks} Install nemo-automodel==0.7.0, or use one of torch's schedules"):
        schedules.get_schedule_class("ZBV")
    assert schedules.get_schedule_class("1F1B") is Schedule1F1B
    assert vars(automodel) == before


def test_automodel_cuts_and_places_as_the_schedule_says(automodel: Any, tmp_path: Path) -> None:
    automodel.calculate_virtual_stages, automodel.stage_ids_this_rank = calculate_virtual_stages, stage_ids_this_rank
    zbpipe.install()
    schedules.get_schedule_class(written("wave.csv", tmp_path))
    assert automodel.calculate_virtual_stages(32, None, RANKS, False) == (8, 4)
    assert automodel.stage_ids_this_rank(0, RANKS, 8, style="loop") == (0, 3, 4, 7)
    with pytest.raises(ValueError, match=r"layers_per_stage=8 cuts the model's 32 layers into 4 stages, but .* has 8"):
        automodel.calculate_virtual_stages(32, 8, RANKS, False)
    with pytest.raises(ValueError, match=r"module_fqns_per_model_part lists 4 stages, but .* on 2 ranks has 8: change"):
        automodel.stage_ids_this_rank(0, RANKS, 4)
    schedules.get_schedule_class("InterleavedZeroBubbleSplit")
    assert automodel.calculate_virtual_stages(12, 2, RANKS, False) == (6, 3)
    assert automodel.stage_ids_this_rank(1, RANKS, 6) == (1, 3, 5)
    schedules.get_schedule_class("ZB")
    assert automodel.calculate_virtual_stages(16, 2, RANKS, False) == (8, 4)
    assert automodel.stage_ids_this_rank(0, RANKS, 8) == (0, 3, 4, 7)
    # An odd number is a loop. Without layers_per_stage, the number of layers decides.
    assert automodel.calculate_virtual_stages(12, 2, RANKS, False) == (6, 3)
    assert automodel.stage_ids_this_rank(0, RANKS, 6) == (0, 2, 4)
    found = [automodel.calculate_virtual_stages(layers, None, RANKS, False) for layers in (8, 6, 3)]
    assert found == [(8, 4), (4, 2), (2, 1)]
    with pytest.raises(ValueError, match=r"12 layers into 3 stages, but ZB on 2 ranks has a multiple of 2: change or"):
        automodel.calculate_virtual_stages(12, 4, RANKS, False)
    schedules.get_schedule_class("1F1B")
    assert automodel.calculate_virtual_stages is calculate_virtual_stages
    schedules.get_schedule_class("ZBH1")
    uninstall()
    assert automodel.stage_ids_this_rank is stage_ids_this_rank


def test_without_stages_or_microbatches_it_says_so(one_rank: None) -> None:
    import toy_framework

    zbpipe.install()
    _, stages = toy_framework.build("ZBV")
    shown = schedules.get_schedule_class("ZBV")
    with pytest.raises(ValueError, match="ZBV got no stages"):
        shown()
    with pytest.raises(ValueError, match="n_microbatches has to be a whole number from 1 on, got None"):
        shown(stages)
