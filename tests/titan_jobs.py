"""Short TorchTitan jobs through `zbpipe.titan.train`, all from the same weights, by `titan_server.py`."""

import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from zbpipe.cli.demo.launch import METRICS, JobOutcome, demo_arguments, first_error
from zbpipe.frameworks.titan.versions import find_installed

LLAMA, DEEPSEEK = "llama3_python_stdlib", "deepseek_v3_python_stdlib"
STEPS = 2
JOB_TIMEOUT = 400.0
"""Seconds. A job that compiles everything for the first time takes 30 on two cores of its own, and other suites run."""


def short(data_ranks: int | None = None) -> tuple[str, ...]:
    steps = ("--training.steps", str(STEPS), "--lr_scheduler.warmup_steps", "0")
    tokens = 4 * 64 * (data_ranks or 1)
    accumulated = () if data_ranks is None else (each.format(tokens=tokens) for each in flavor().accumulated)
    return (*steps, *flavor().size, *accumulated)


def require_titan(*names: str) -> str:
    """Which of these TorchTitans is installed. If none is, the tests of the module that calls this are skipped."""
    try:
        found = find_installed().name
    except ImportError as error:
        pytest.skip(str(error), allow_module_level=True)
    if found not in names:
        pytest.skip(f"torchtitan {found} is installed, and this is for {' or '.join(names)}", allow_module_level=True)
    return found


def words(*options: str) -> tuple[str, ...]:
    return tuple(word for option in options for word in f"--{option}".split())


class Flavor(NamedTuple):
    """How the jobs of one version of TorchTitan differ from those of another."""

    applied: Mapping[str, str]
    """The names of the kinds of checkpointing in the log."""
    settings: tuple[str, ...]
    validation: tuple[str, ...]
    module: str
    has_mean_loss: bool
    """Whether a pipeline's gradients are those of the mean of the loss, not of its sum over all tokens of a step."""
    size: tuple[str, ...] = words("training.local_batch_size 4", "training.seq_len 64")
    """A step of four sequences with 64 tokens, each a microbatch of a pipeline."""
    accumulated: tuple[str, ...] = ()
    """Further arguments of a job without a pipeline, with {tokens} for the tokens per step."""


# Gradients of the sum are clipped to the same norm as those of the mean. By default 0.2 checkpoints every second block.
_FLAVORS = {
    "0.2.2": Flavor(
        {"selective": "selective", "full": "full"},
        words("training.max_norm 0.1", "activation_checkpoint.selective_ac_option op"),
        words(
            *("validation.enable", "validation.freq 1", "validation.steps 1", "validation.dataset python_stdlib"),
            *("validation.local_batch_size 4", "validation.seq_len 64"),
        ),
        "--experimental.custom_import",
        has_mean_loss=False,
    ),
    "0.3.0": Flavor(
        {"selective": "SelectiveAC", "full": "FullAC"},
        (),
        words(
            "validator.enable", "validator.freq 1", "validator.steps 1", "validator.dataloader.dataset python_stdlib"
        ),
        "--module",
        has_mean_loss=True,
    ),
}
_FLAVORS["main of August 2026"] = _FLAVORS["0.3.0"]._replace(
    validation=(),
    size=words(
        *("parallelism.num_pp_microbatches 4", "training.max_context_length 64"),
        "training.num_tokens_per_microbatch_per_dp_rank 64",
    ),
    accumulated=words("training.num_tokens_per_train_step {tokens}"),
)


def flavor() -> Flavor:
    return _FLAVORS[find_installed().name]


def pipeline(schedule: str, num_ranks: int = 2) -> tuple[str, ...]:
    return (_DEGREE, str(num_ranks), "--parallelism.pipeline_parallel_schedule", schedule)


_DEGREE = "--parallelism.pipeline_parallel_degree"
Steps = Sequence[Mapping[str, Any]]


def start_from(seed: Path) -> tuple[str, ...]:
    return ("--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", str(seed))


def start_or_resume(seed: Path, checkpoints: Path) -> tuple[str, ...]:
    """TorchTitan's arguments for a job that can be stopped: its own checkpoints go before the seed."""
    return (
        *("--checkpoint.enable", "--checkpoint.initial_load_path", str(seed)),
        *("--checkpoint.folder", str(checkpoints), "--checkpoint.interval", "2"),
    )


@dataclass(frozen=True)
class Job(JobOutcome):
    log: str
    exit_codes: tuple[int, ...]
    """Of the ranks; empty if the job was ended because it took too long."""
    errors: tuple[str, ...]

    @property
    def began(self) -> bool:
        return "Training starts at step" in self.log


class Titan:
    """Trains one job after the other, with one thread a rank. Call `close` at the end: then no process is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server: subprocess.Popen[str] | None = None
        self._num_jobs = 0
        self._kept: dict[tuple[Any, ...], Job] = {}
        self._seeds: dict[str, Path] = {}

    def train(
        self,
        *arguments: str,
        num_ranks: int,
        model: str = LLAMA,
        functorch: dict[str, Any] | None = None,
        checkpoints: Path | None = None,
    ) -> Job:
        """A job of a few small steps, from the model's seed checkpoint; `functorch` sets compiler options.

        A model that the demo lacks has the name of its module before its own, as in "rows_config:llama3_lora".
        With `checkpoints` it saves one there after every second step, and goes on from the last one if there is any.
        """
        seed = self.seed(model)
        start = start_from(seed) if checkpoints is None else start_or_resume(seed, checkpoints)
        degrees = dict(pairwise(arguments))
        data_ranks = num_ranks // int(degrees.get("--parallelism.tensor_parallel_degree", 1))
        size = short(None if _DEGREE in degrees else data_ranks)
        return self._run((*size, *flavor().settings, *start, *arguments), num_ranks, model, functorch or {})

    def without_pipeline(self, *arguments: str, num_ranks: int = 1, model: str = LLAMA) -> Job:
        key = (arguments, num_ranks, model)
        if key not in self._kept:
            self._kept[key] = self.train(*arguments, num_ranks=num_ranks, model=model)
        return self._kept[key]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns in a process that zbpipe is plugged into; importing TorchTitan takes seconds."""
        folder = self._new_folder()
        job = {"module": function.__module__, "arguments": pickle.dumps((function, arguments)).hex()}
        codes = self._ask(job | {"num_ranks": 1, "folder": str(folder)})
        assert codes == (0,), (folder / "output.log").read_text()
        return pickle.loads((folder / "result").read_bytes())

    def close(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None

    def seed(self, model: str = LLAMA) -> Path:
        if model not in self._seeds:
            job = self._run(("--checkpoint.enable", "--checkpoint.create_seed_checkpoint"), 1, model, {})
            assert job.error is None, job.log
            self._seeds[model] = self.folder / str(self._num_jobs) / "checkpoint" / "step-0"
        return self._seeds[model]

    def _run(self, arguments: tuple[str, ...], num_ranks: int, model: str, functorch: dict[str, Any]) -> Job:
        folder = self._new_folder()
        # As with torchrun, the store is held by none of the ranks.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        module, _, name = model.rpartition(":")
        job = {
            "module": "",
            "arguments": [*demo_arguments(folder, name), *([flavor().module, module] if module else []), *arguments],
            "num_ranks": num_ranks,
            "folder": str(folder),
            "port": store.port,
            "functorch": functorch,
        }
        return _job(folder, self._ask(job))

    def _new_folder(self) -> Path:
        self._num_jobs += 1
        folder = self.folder / str(self._num_jobs)
        folder.mkdir()
        return folder

    def _ask(self, job: dict[str, Any]) -> tuple[int, ...]:
        server = self._running()
        assert server.stdin is not None
        assert server.stdout is not None
        answer = None
        try:
            server.stdin.write(json.dumps(job) + "\n")
            server.stdin.flush()
            if select.select([server.stdout], [], [], JOB_TIMEOUT)[0]:
                answer = server.stdout.readline()
        finally:
            if not answer:  # also when the test's own time is up: the answer of this job is not the next one's
                self.close()
        assert answer != "", "titan_server.py died; standard error has its last words"
        return () if answer is None else tuple(json.loads(answer))

    def _running(self) -> subprocess.Popen[str]:
        settings = {
            "CUDA_VISIBLE_DEVICES": "",
            "HIP_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCH_LOGS": "graph_breaks,recompiles",
        }
        self._server = self._server or subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("titan_server.py")), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
            start_new_session=True,
        )
        return self._server


def _job(folder: Path, exit_codes: tuple[int, ...]) -> Job:
    log, metrics = folder / "output.log", folder / METRICS
    steps = tuple(json.loads(line) for line in metrics.read_text().splitlines()) if metrics.exists() else ()
    files = sorted((folder / "errors").glob("*/error.json"), key=lambda file: int(file.parent.name))
    error = first_error(folder) if any(exit_codes) else None
    return Job(
        steps,
        error if exit_codes else f"not finished after {JOB_TIMEOUT:.0f} seconds",
        log.read_text() if log.exists() else "",
        exit_codes,
        tuple(" ".join(json.loads(file.read_text())["message"]["message"].split()) for file in files),
    )


LOSS, VALIDATED = "loss_metrics/global_avg_loss", "validation_metrics/loss"


def config_of(**changes: dict[str, Any]) -> Any:
    """What zbpipe reads of a job's config before the launch: V of two ranks, with changes by section; `...` omits."""
    of_pipeline = {"degree": 2, "schedule": "ZBV", "schedule_csv": None, "microbatch_size": 1, "layers_per_stage": None}
    of_pipeline |= dict.fromkeys(("first_stage_less_layers", "last_stage_less_layers"), 1)
    degrees = [
        f"{name}_degree"
        for name in ("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel_replicate")
    ]
    sections: dict[str, dict[str, Any]] = {
        "parallelism": {f"pipeline_parallel_{name}": value for name, value in of_pipeline.items()}
        | {**dict.fromkeys(degrees, 1), "data_parallel_shard_degree": -1, "module_fqns_per_model_part": None},
        "training": {"local_batch_size": 4, "steps": 10, "seq_len": 8},
        "compile": {"enable": False},
        "comm": {"init_timeout_seconds": 300, "mode": "default"},
        "activation_checkpoint": {"mode": "none"},
        "loss": {"num_chunks": 0},
    }
    found = {name: values | changes.get(name, {}) for name, values in sections.items()}
    return SimpleNamespace(
        **{
            name: SimpleNamespace(**{key: value for key, value in values.items() if value is not ...})
            for name, values in found.items()
        }
    )


def assert_trains_alike(
    job: JobOutcome,
    expected: JobOutcome,
    losses: float = 1e-5,
    norms: float = 1e-4,
    learned: float = 0.3,
    steps: int = STEPS,
) -> None:
    """Alike within relative tolerances. The loss falls by more than `learned`, so equal losses mean something."""
    assert (job.error, expected.error) == (None, None), getattr(job, "log", "")
    found = [step[LOSS] for step in job.steps if LOSS in step]  # validations are steps of their own
    assert len(found) == steps
    assert_values(job.steps, expected.steps, losses, norms)
    assert found[-1] < found[0] - learned


def assert_values(found: Steps, expected: Steps, losses: float = 1e-5, norms: float = 1e-4) -> None:
    """Losses, also of validation, and norms of the gradients: the optimizer does not mind a wrong scale."""
    assert [step["step"] for step in found] == [step["step"] for step in expected]
    scale = 1 if flavor().has_mean_loss else found[0]["n_tokens_seen"]
    for name, unit, tolerance in ((LOSS, 1, losses), (VALIDATED, 1, losses), ("grad_norm", scale, norms)):
        wanted = [step[name] for step in expected if name in step]
        assert [step[name] / unit for step in found if name in step] == pytest.approx(wanted, rel=tolerance), name


@dataclass(frozen=True)
class Cell:
    """A job that has to train as it does without a pipeline."""

    feature: str = ""
    """In words for the page; those of the matrix have a table of their own."""
    schedule: str = "ZBV"
    checkpointing: str = "selective"
    compiled: bool = False
    settings: tuple[str, ...] = ()
    """Further ones, which the job without a pipeline has, too."""
    ranks_per_stage: int = 1
    alone: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    pipeline_ranks: int = 2
    microbatches: int = 4
    model: str = LLAMA
    tolerances: dict[str, float] = field(default_factory=dict)
    recompilations: int = 0
    steps: int = STEPS


def train_as_without_a_pipeline(titan: Titan, cell: Cell) -> Job:
    longer = () if cell.steps == STEPS else ("--training.steps", str(cell.steps))
    settings = (*longer, *cell.settings)
    expected = titan.without_pipeline(*settings, *cell.alone, num_ranks=cell.ranks_per_stage, model=cell.model)
    job = titan.train(
        *settings,
        *pipeline(cell.schedule, cell.pipeline_ranks),
        *cell.options,
        *(["--compile.enable"] if cell.compiled else []),
        *find_installed().checkpoint(cell.checkpointing),
        num_ranks=cell.pipeline_ranks * cell.ranks_per_stage,
        model=cell.model,
    )
    print(job.log)
    assert_trains_alike(job, expected, **cell.tolerances, steps=cell.steps)
    applied = flavor().applied.get(cell.checkpointing)
    name = rf"{re.escape(cell.schedule)}(Loop)?"
    assert re.search(rf"pipeline schedule {name} with {cell.microbatches} microbatches", job.log)
    assert ("Compiling each TransformerBlock" in job.log) == cell.compiled
    assert (f"Applied {applied} activation checkpointing" in job.log) == (applied is not None)
    assert ("activation checkpointing to the model" in job.log) == (applied is not None)
    # The blocks are compiled with fullgraph=True, so a graph break would have been an error.
    assert job.log.count("Recompiling function") == cell.recompilations
    assert "recompile_limit" not in job.log
    # All ranks have the loss, those without the last stage, too.
    assert "loss is not visible" not in job.log
    assert "loss: -" not in job.log
    assert "FLOPs to W; in I:" not in job.log
    for pattern in cell.says:
        assert re.search(pattern, job.log), pattern
    return job
