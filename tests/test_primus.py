"""titan_integration/primus/: the patch in a stand-in of Primus, and the example against torchtitan 0.2."""

import importlib
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import pytest
from commands import process

from zbpipe import titan
from zbpipe.frameworks.options import Options
from zbpipe.frameworks.titan import check
from zbpipe.schedule.registry import resolve

yaml = pytest.importorskip("yaml")
STAND_IN = Path(__file__).parent / "primus_stand_in"
FOLDER = Path(__file__).parent.parent / "titan_integration" / "primus"
PATCH = FOLDER / "zbpipe_patch.py"
EXAMPLE = FOLDER / "llama3.1_8B.yaml"


@pytest.fixture
def primus(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.syspath_prepend(FOLDER)
    patches = importlib.import_module("primus.core.patches")
    importlib.import_module("zbpipe_patch")
    patches.register_patch("theirs", backend="torchtitan", phase="setup")(lambda ctx: None)
    patches.register_patch("megatron", backend="megatron", phase="setup")(lambda ctx: None)
    yield patches
    for name in [name for name in sys.modules if name.split(".")[0] in ("primus", "zbpipe_patch")]:
        del sys.modules[name]


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    found: list[Options] = []
    monkeypatch.setattr(titan, "plug_in", found.append, raising=False)
    return found


def set_up(primus: ModuleType, **params: Any) -> None:
    primus.run_patches("torchtitan", "setup", SimpleNamespace(**params))


def test_the_patch_comes_last(primus: ModuleType, plugged: list[Options]) -> None:
    primus.run_patches("megatron", "setup", SimpleNamespace())
    primus.run_patches("torchtitan", "before_train", SimpleNamespace())
    assert plugged == []
    primus.log.clear()
    set_up(primus)
    assert primus.log == ["applied theirs", "applied torchtitan.zbpipe.schedules"]
    assert plugged == [Options()]


def test_options_of_the_experiment(primus: ModuleType, plugged: list[Options]) -> None:
    set_up(primus, zbpipe="--zbpipe.split-backward strict --zbpipe.trace 'a b.json' --zbpipe.trace-step 5")
    set_up(primus, zbpipe=None)
    (line,) = re.findall(r"^ *# (zbpipe: --.*)$", EXAMPLE.read_text(), re.MULTILINE)
    set_up(primus, **yaml.safe_load(line))
    first = Options(split_backward="strict", trace="a b.json", trace_step=5)
    assert plugged == [first, Options(), Options(profile_steps=5, costs_out="/shared/costs.json")]


LINE = "zbpipe: .*has to be a line such as --zbpipe.trace-step 5, got"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        *(("strict", LINE), ("--zbpipe.trace-step 5 --steps 3", LINE), (SimpleNamespace(trace_step=5), LINE)),
        *(("--zbpipe.split strict", "2"), (None, "zbpipe: torchtitan 0.4.0 is unknown")),
    ],
)
def test_what_ends_the_job(primus: ModuleType, monkeypatch: pytest.MonkeyPatch, said: object, words: str) -> None:
    """Primus would log errors and train without the patch."""

    def refuse(options: Options) -> None:
        raise ImportError("torchtitan 0.4.0 is unknown" if said is None else "it was plugged in")

    monkeypatch.setattr(titan, "plug_in", refuse, raising=False)
    with pytest.raises(SystemExit, match=words):
        set_up(primus, zbpipe=said)


def test_as_the_script_of_primus_cli(primus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    primus.registered.clear()
    seen: list[str] = []
    monkeypatch.setattr("primus.cli.main.main", lambda: seen.extend(patch.id for patch in primus.registered))
    runpy.run_path(str(PATCH), run_name="__main__")
    assert seen == ["torchtitan.zbpipe.schedules", "megatron.zbpipe.schedules"]


OF_PRIMUS = {("training", "mock_data"), ("primus_turbo",), ("zbpipe",)}


@pytest.fixture
def experiment(primus: ModuleType) -> ModuleType:
    return importlib.import_module("primus.core.experiment")


try:
    IS_02 = version("torchtitan").startswith("0.2.")
except PackageNotFoundError:
    IS_02 = False
needs_torchtitan_02 = pytest.mark.skipif(not IS_02, reason="needs torchtitan 0.2")


def test_the_format_of_the_example(experiment: ModuleType) -> None:
    written = yaml.safe_load(EXAMPLE.read_text())
    assert written.keys() == {"work_group", "user_name", "exp_name", "workspace", "modules"}
    assert written["modules"].keys() == {"pre_trainer"}
    module, sections = experiment.load(EXAMPLE)
    assert module.keys() == {"framework", "config", "model", "overrides"}
    assert module["framework"] == "torchtitan"
    assert sections["parallelism"] == {"pipeline_parallel_degree": 8, "pipeline_parallel_schedule": "ZB"}


def wrong_keys(kind: type, values: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    from typeguard import TypeCheckError, check_type

    types, wrong = get_type_hints(kind), []
    for name, value in values.items():
        here = (*path, name)
        if here in OF_PRIMUS:
            continue
        if is_dataclass(types.get(name)):
            wrong += wrong_keys(types[name], value, here)
            continue
        try:
            check_type(value, types[name])
        except (KeyError, TypeCheckError):
            wrong.append(".".join(here))
    return wrong


@needs_torchtitan_02
def test_torchtitan_takes_the_example(experiment: ModuleType) -> None:
    from torchtitan.config import JobConfig

    _, sections = experiment.load(EXAMPLE)
    assert wrong_keys(JobConfig, sections) == []
    misspelt = experiment.merged(sections, {"parallelism": {"pipeline_degree": 8}, "training": {"steps": "many"}})
    assert sorted(wrong_keys(JobConfig, misspelt)) == ["parallelism.pipeline_degree", "training.steps"]
    config = experiment.job_config(sections)
    check.check(config, resolve(config.parallelism.pipeline_parallel_schedule), Options())
    assert (config.parallelism.pipeline_parallel_schedule, config.model.flavor) == ("ZB", "8B")
    assert (config.primus_turbo, config.compile.enable) == ({"enable_primus_turbo": False}, False)
    config.parallelism.pipeline_parallel_schedule = "ZBW"
    with pytest.raises(ValueError, match="unknown schedule 'ZBW'"):
        check.check(config, resolve(config.parallelism.pipeline_parallel_schedule), Options())


ON_THE_CPU: dict[str, Any] = {
    "experimental": {"custom_import": "zbpipe.cli.demo.models02"},
    "lr_scheduler": {"warmup_steps": 2},
    "model": {"name": "llama3_python_stdlib", "flavor": "debugmodel", "converters": []}
    | {"hf_assets_path": str(Path(titan.__file__).parent)},
    "parallelism": {"pipeline_parallel_degree": 2},
    "training": {"dataset": "python_stdlib", "local_batch_size": 4, "seq_len": 64, "steps": 4, "dtype": "float32"},
}


@needs_torchtitan_02
def test_training_as_primus_does(experiment: ModuleType, tmp_path: Path) -> None:
    written = yaml.safe_load(EXAMPLE.read_text())
    module = written["modules"]["pre_trainer"]
    trace = tmp_path / "trace.json"
    more = {"zbpipe": f"--zbpipe.trace {trace} --zbpipe.trace-step 2", "job": {"dump_folder": str(tmp_path)}}
    module["overrides"] = experiment.merged(experiment.merged(module["overrides"], ON_THE_CPU), more)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(written))
    path = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PATCH)
    arguments = ("train", "pretrain", "--config", tmp_path / "experiment.yaml")
    process(*torchrun, *arguments, folder=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="1")
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss_metrics/global_avg_loss"] for step in steps]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert [step.get("zbpipe/schedule/ZB", step.get("zbpipe/schedule/ZBLoop")) for step in steps] == [1] * 4
    assert trace.exists()
