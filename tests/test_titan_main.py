"""What TorchTitan's releases and its main branch name in other ways, and what is refused before the ranks meet."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from commands import process
from titan_jobs import config_of

from zbpipe import cli
from zbpipe.cli.demo.command import find_fault
from zbpipe.cli.demo.launch import JobOutcome
from zbpipe.frameworks.installation import find_algorithm
from zbpipe.frameworks.options import Options
from zbpipe.frameworks.titan import batches, versions
from zbpipe.frameworks.titan.check import check, require_processes
from zbpipe.titan import train as train_script


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, part = ModuleType("torchtitan"), ModuleType("torchtitan.part")
    package.__path__ = []
    package.part = part  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchtitan", package)
    monkeypatch.setitem(sys.modules, "torchtitan.part", part)
    monkeypatch.setattr(versions, "describe_installed", lambda: "torchtitan 0.4.0 in /clone")
    return part


class SmallEngine:
    def __init__(self) -> None:
        self.pp_schedule = None


class SmallTrainer:
    def __init__(self) -> None:
        self.step, self.engine = 0, SmallEngine()


def test_names_that_are_missing_are_all_told(titan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    titan.moved = lambda first, new_name: None  # type: ignore[attr-defined]
    needed = (
        ("part:old|part:moved", "first old_name|new_name"),
        ("part:moved", "second"),
        ("part:gone|other:gone", ""),
        ("part:Trainer", "step pp_schedule optimizers"),
    )
    titan.Trainer = SmallTrainer  # type: ignore[attr-defined]
    monkeypatch.setattr(versions, "NEEDED", dict(needed[:1]))
    versions.require_names()
    monkeypatch.setattr(versions, "NEEDED", dict(needed))
    said = (
        "torchtitan 0.4.0 in /clone lacks second of part.moved, part.gone or other.gone, optimizers of part.Trainer,"
        " which zbpipe needs; it knows 0.2.2, 0.3.0, main of August 2026: use zbpipe.install()"
    )
    with pytest.raises(ImportError, match=re.escape(said)):
        versions.require_names()


def test_the_main_branch_needs_no_fields_of_03(titan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts tokens. Jobs with its fields: test_titan."""
    of_03 = {"pipeline_parallel_microbatch_size", "local_batch_size", "seq_len"}
    config: Any = ModuleType("torchtitan.config")
    monkeypatch.setitem(sys.modules, "torchtitan.config", config)
    needed = {f"config:{name}": versions.NEEDED[f"config:{name}|config.job_config:{name[:-6]}"] for name in FIELDS}
    monkeypatch.setattr(versions, "NEEDED", needed)
    for name, fields in FIELDS.items():
        known = {each for either in needed[f"config:{name}"].split() for each in either.split("|")}
        assert known & of_03
        setattr(config, name, make_dataclass(name, sorted(known - of_03 | {*fields})))
    versions.require_names()


FIELDS = {
    "ParallelismConfig": ["num_pp_microbatches"],
    "TrainingConfig": ["max_context_length", "num_tokens_per_microbatch_per_dp_rank"],
}


def test_a_package_that_a_clone_needs_is_told(titan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_grain(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'grain'", name="grain")

    monkeypatch.setattr(versions, "resolve_name", find_no_grain)
    said = "torchtitan 0.4.0 in /clone cannot be imported: No module named 'grain': install its dependencies"
    with pytest.raises(ImportError, match=re.escape(said)):
        versions.require_names()


IN_ROW: dict[str, Any] = {
    "parallelism": {"num_pp_microbatches": 3, "pipeline_parallel_microbatch_size": ...},
    "training": {
        **{"num_tokens_per_microbatch_per_dp_rank": 96, "max_context_length": 32, "local_batch_size": ...},
        **{"num_tokens_per_train_step": 96 * 3 * 4, "seq_len": ...},
    },
}
IN_SEQUENCES: dict[str, Any] = {
    "parallelism": {"pipeline_parallel_microbatch_size": 3},
    "training": {"local_batch_size": 9, "seq_len": 32, "global_batch_size": 36},
}


@pytest.mark.parametrize(
    ("given", "shape", "asked"),
    [(IN_SEQUENCES, (3, 32), "--training.local_batch_size 12"), (IN_ROW, (96,), "--parallelism.num_pp_microbatches 4")],
)
def test_the_sizes_of_a_step(given: Any, shape: tuple[int, ...], asked: str, caplog: pytest.LogCaptureFixture) -> None:
    job = config_of(**given)
    assert batches.microbatches(job) == 3
    assert batches.length(job.training) == 32
    assert batches.shape(job) == shape
    assert [batches.rounds(job, data) for data in (1, 2, 3, 4)] == [4, 2, 1, 1]
    check(job, find_algorithm(job.parallelism.pipeline_parallel_schedule), Options())
    assert f"set {asked} or more" in caplog.text


def test_an_unknown_schedule_is_refused_before_torchtitan_is_imported() -> None:
    """Unless modules of the user may register it, or it is an abstract class of torch."""
    field = "--parallelism.pipeline_parallel_schedule"
    for arguments in ([field, "ZVB"], [f"{field}=ZVB", "--module", "llama3"]):
        with pytest.raises(ValueError, match=r"^unknown schedule 'ZVB'; did you mean 'ZB'\?"):
            train_script._require_known_schedule(arguments)
    for more in (
        ["ZVB", "--module", "own.models"],
        ["ZVB", "--zbpipe.import", "own"],
        ["PipelineScheduleSingle"],
        ["zbv"],
    ):
        train_script._require_known_schedule([field, *more])
    train_script._require_known_schedule(["--training.steps", "3"])


@pytest.mark.parametrize(
    "command", [("zbpipe.titan.train", "--parallelism.pipeline_parallel_schedule"), ("zbpipe.run", "--schedule")]
)
def test_a_wrong_name_is_refused_before_torch_is_imported(command: tuple[str, str]) -> None:
    name, option = command
    code = f"""import runpy, sys
sys.modules["torch"] = None
sys.argv = ["", {option!r}, "ZVB", "script.py"]
runpy.run_module({name!r}, run_name="__main__")"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "unknown schedule 'ZVB'; did you mean 'ZB'?" in ended.stderr.splitlines()[-1]


def test_zbpipes_schedules_are_not_captured_in_cuda_graphs() -> None:
    """TorchTitan's main branch refuses this only for classes with several stages per rank."""
    captured, eager = (config_of(training={"disable_cuda_graphs": each}) for each in (False, True))
    check(captured, find_algorithm("1F1B"), Options())
    check(eager, find_algorithm("ZBH1"), Options())
    with pytest.raises(ValueError, match=r"would capture ZBH1 in a CUDA graph, .*: set --training.dis"):
        check(captured, find_algorithm("ZBH1"), Options())


def test_torchs_schedules_with_too_few_microbatches() -> None:
    """They would build the model first. The only microbatch is a singular."""
    job = config_of(parallelism={"pipeline_parallel_schedule": "1F1B"}, training={"local_batch_size": 1})
    said = "torch refuses 1 microbatch for 2 stages: set --training.local_batch_size 2, or use a schedule of zbpipe"
    with pytest.raises(ValueError, match=said):
        check(job, find_algorithm("1F1B"), Options())


@pytest.mark.parametrize(
    ("number", "name", "degree", "said"),
    [
        (2, "pipeline", 3, "pipeline_parallel_degree=3 needs a multiple of 3 processes, and this job"),
        (6, "tensor", 2, "=2 x tensor_parallel_degree=2 needs a multiple of 4 processes, and this job "),
        (8, "data_parallel_shard", 2, "=2 x data_parallel_shard_degree=2 needs 4 processes, and this job has 8"),
    ],
)
def test_degrees_that_do_not_fit_the_processes(number: int, name: str, degree: int, said: str) -> None:
    changed = {f"{name}_degree" if "shard" in name else f"{name}_parallel_degree": degree}
    with pytest.raises(ValueError, match=re.escape(said)):
        require_processes(config_of(parallelism=changed), number)
    require_processes(config_of(), 8)
    require_processes(config_of(parallelism={"pipeline_parallel_degree": 3}, comm={"mode": "fake_backend"}), 8)


def test_options_without_a_pipeline_name_no_schedule() -> None:
    names = {"pipeline_parallel_degree": 1, "pipeline_parallel_schedule": "Interleaved1F1B"}
    job = config_of(parallelism=names)
    with pytest.raises(ValueError, match=r"^zbpipe's options have no effect without a pipeline: omit them, or set"):
        check(job, find_algorithm("Interleaved1F1B"), Options(check_gradients=1))
    check(job, find_algorithm("Interleaved1F1B"), Options())


def test_the_check_of_a_clone_compares_losses_and_norms() -> None:
    def outcome(loss: float, norm: float, steps: int = 1) -> JobOutcome:
        return JobOutcome(({"step": 1, "loss_metrics/global_avg_loss": loss, "grad_norm": norm},) * steps, None)

    assert find_fault(outcome(2, 3), "ZBV", outcome(2 * (1 + 1e-6), 3 * (1 + 1e-5))) is None
    assert find_fault(outcome(2, 3), "ZBV", outcome(2.001, 3)) == (
        "in step 1 loss_metrics/global_avg_loss is 2 with 1F1B and 2.001 with ZBV"
    )
    assert "grad_norm is 3 with 1F1B and 6" in str(find_fault(outcome(2, 3), "ZB", outcome(2, 6)))
    assert find_fault(outcome(2, 3), "ZBV", outcome(2, 3, steps=2)) == "ZBV has 2 steps and 1F1B 1"


# Which TorchTitan zbpipe takes, and what it says of the others. None has to be installed.


SOURCES = {
    "0.2.2": ("config/job_config.py", "@dataclass\nclass JobConfig:\n    pass\n"),
    "0.3.0": ("config/configs.py", "class ParallelismConfig:\n    pipeline_parallel_microbatch_size: int = 1\n"),
    "main of August 2026": ("config/configs.py", "class ParallelismConfig:\n    num_pp_microbatches: int = 1\n"),
    "another": ("config/configs.py", "class ParallelismConfig:\n    num_pp_microbatches_or_so: int = 1\n"),
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    def set_up(like: str, clone: str | None, torch: str, pip: str | None = None) -> None:
        known = {"torch": torch} | ({"torchtitan": pip} if pip else {})
        spec = ModuleSpec("torchtitan", None, is_package=True)
        spec.submodule_search_locations = [str(source_tree(tmp_path, like, clone) / "torchtitan")]
        monkeypatch.setattr(versions, "find_spec", lambda name: spec)
        monkeypatch.setattr(versions, "version", partial(version, known))

    return set_up


def version(known: dict[str, str], package: str) -> str:
    if package not in known:
        raise PackageNotFoundError(package)
    return known[package]


def source_tree(folder: Path, like: str, release: str | None = None) -> Path:
    """A folder for Python's path, as a clone has it if it has a `release`; to import it is an error."""
    file, content = SOURCES[like]
    source = folder / "torchtitan" / file
    source.parent.mkdir(parents=True)
    source.write_text(content)
    (folder / "torchtitan" / "__init__.py").write_text("raise RuntimeError('it was imported')")
    if release is not None:
        (folder / "assets").mkdir()
        (folder / "assets" / "version.txt").write_text(release + "\n")
    return folder


@pytest.mark.parametrize(
    ("like", "clone", "pip", "torch"),
    [
        ("0.2.2", None, "0.2.2", "2.12.0+rocm7.15"),
        ("0.2.2", "0.2.2", "0.3.0", "2.11.0a0+git1234"),
        ("0.3.0", None, "0.3.0", "2.14.0"),
        ("0.3.0", None, "0.4.0.dev20261101", "2.15.0"),
        ("main of August 2026", "0.2.2", None, "2.14.0"),
    ],
)
def test_names_show_the_version_and_numbers_do_not(
    install: Any, tmp_path: Path, like: str, clone: str | None, pip: str | None, torch: str
) -> None:
    install(like, clone, torch, pip)
    assert versions.find_installed().name == like
    assert versions.describe_installed() == f"torchtitan {clone or pip} in {tmp_path / 'torchtitan'}"


NO_NAMES = (
    "has none of the names by which zbpipe recognizes TorchTitan, `class JobConfig` in config/job_config.py (0.2.2),"
    " `pipeline_parallel_microbatch_size` in config/configs.py (0.3.0), `num_pp_microbatches` in config/configs.py"
    " (main of August 2026): pip install torchtitan==0.3.0, or use zbpipe.install() in your program, or start it by"
    " `python -m zbpipe.run`: they need no private names of TorchTitan"
)


TOO_OLD = (
    "needs torch 2.14 or newer, and this is torch 2.12.0+rocm7.15: pip install torchtitan==0.2.2, or install torch 2.14"
)


@pytest.mark.parametrize(
    ("like", "release", "torch", "said"),
    [
        ("another", "0.4.0", "2.15.0", NO_NAMES),
        ("0.3.0", None, "2.12.0+rocm7.15", TOO_OLD),
        ("0.2.2", None, "2.10.0", "needs torch 2.11 or newer, and this is torch 2.10.0: install torch 2.11 or newer"),
        ("another", None, "2.15.0", "torchtitan of an unknown version in "),
    ],
)
def test_others_are_refused(install: Any, like: str, release: str | None, torch: str, said: str) -> None:
    install(like, release, torch)
    with pytest.raises(ImportError, match=re.escape(said)):
        versions.find_installed()


def test_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"torchtitan is not installed: pip install torchtitan==0\."):
        versions.find_installed()
    result = CliRunner().invoke(cli.main, ["demo"])
    assert result.exit_code == 1
    assert "the demo trains with TorchTitan: torchtitan is not installed: pip install torchtitan==0." in result.output


@pytest.mark.long
def test_the_trainer_says_it_and_imports_nothing(tmp_path: Path) -> None:
    path = os.pathsep.join([str(source_tree(tmp_path, "another", "0.4.0")), *sys.path])
    done = process(sys.executable, "-m", "zbpipe.titan.train", "--training.steps", "3", code=1, PYTHONPATH=path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: torchtitan 0.4.0 in {tmp_path / 'torchtitan'} has none of the names")
    assert "it was imported" not in done.stderr
