"""The configs in titan_integration/ for TorchTitan 0.2 and 0.3: built without weights, estimated, and one trained."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_docs
import torch
import torch.distributed as dist
from click.testing import CliRunner
from documents import blocks
from forks import on_forks
from searching import searching_little
from titan_jobs import require_titan

from zbpipe import cli, estimate, generate
from zbpipe.costs.transformer import Block
from zbpipe.estimation import devices
from zbpipe.estimation.estimate import JobMemory, memory_by_rank
from zbpipe.estimation.rows import Step
from zbpipe.estimation.workload import Workload
from zbpipe.frameworks.options import Options
from zbpipe.runtime._torch import hooks, pipelining
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.actions import parse
from zbpipe.simulator.message_checks import validate_lowered
from zbpipe.simulator.validation import validate

pytestmark = [pytest.mark.long, pytest.mark.versions]
IS_02 = require_titan("0.3.0", "0.2.2") == "0.2.2"
needs_03 = pytest.mark.skipif(IS_02, reason="of torchtitan 0.3")
ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "titan_integration" / "run_train.sh"
TOML_FILES = sorted((ROOT / "titan_integration" / "titan02").glob("*.toml"))
"""The configs for TorchTitan 0.2."""
CONFIGS = (
    "llama3_debug",
    "llama3_8b",
    "llama3_8b_no_downloads",
    "llama3_70b",
    "llama3_70b_80gb",
    "llama3_405b",
    "llama3_405b_288gb",
    "llama3_405b_80gb",
)


# What runs in a process of its own, which imports TorchTitan once. It forks for every rank, because meshes stay behind
# in caches when a process group is destroyed.


def import_titan() -> None:
    from zbpipe.frameworks.titan import cpu

    cpu.stand_in()
    from zbpipe.frameworks.titan import plug

    plug.plug_in(Options(), on_cpu=True)
    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    logging.disable(logging.WARNING)


@pytest.fixture(scope="module")
def with_titan() -> Iterator[Callable[..., Any]]:
    """Calls a function of this file in the process that has TorchTitan."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=import_titan) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def read_config(name: str, config: Any = None) -> Workload:
    """What `zbpipe estimate` reads of one of our configs."""
    from titan_integration import llama3
    from zbpipe.frameworks.titan import command_line, counting

    job = config or getattr(llama3, name)()
    return counting.workload_of(job, command_line.degrees_of(job, llama3.HARDWARE[name].gpus), name)


class Built(NamedTuple):
    """What a pipeline rank has when TorchTitan has cut the model."""

    modules: dict[int, tuple[str, ...]]
    """By stage."""
    parameters: int
    on_one_gpu: int
    """The same, of those that one GPU keeps after TP and FSDP."""
    lowered: str
    """A hash of the table with sends, receives and unshards."""


@dataclass(frozen=True)
class Job:
    """A config, and what becomes of it."""

    schedule: str
    pp: int
    tp: int
    gpus: int
    usable_bytes: float
    """Of the smallest GPU that the config is for."""
    doc: str
    num_layers: int
    estimated: JobMemory
    ranks: dict[int, Built]
    """By place in the pipeline."""


_config: Any = None
_model: Any = None


def build_job(name: str) -> Job:
    """Pipeline ranks at the full size of the job, from meta tensors: all of the small jobs, else those at both ends."""
    global _config, _model  # noqa: PLW0603 (the forks have no other way to it)
    from torchtitan.distributed import utils

    from titan_integration import llama3
    from zbpipe.frameworks.titan import check, cpu

    function, hardware = getattr(llama3, name), llama3.HARDWARE[name]
    _config = replace(function())  # TorchTitan's own checks, which the CPU's adaption would satisfy
    check.check(_config, resolve(_config.parallelism.pipeline_parallel_schedule), Options())
    estimated = memory_by_rank(read_config(name))
    cpu.adapt(_config)
    parallelism = _config.parallelism
    utils.set_spmd_backend(parallelism.spmd_backend)
    _config.model_spec.model.update_from_config(config=_config)
    with torch.device("meta"):
        _model = _config.model_spec.model.build()
    assert sum(estimated.parameters) == sum(parameter.numel() for parameter in _model.parameters())
    pp = parallelism.pipeline_parallel_degree
    places = range(pp) if name in ("llama3_debug", "llama3_8b") else (0, pp - 1)
    # The last of the ranks at each place of the pipeline, so that TP and FSDP are not at 0.
    ranks = [(hardware.gpus, (place + 1) * hardware.gpus // pp - 1) for place in places]
    return Job(
        parallelism.pipeline_parallel_schedule,
        pp,
        parallelism.tensor_parallel_degree,
        hardware.gpus,
        devices.DEVICES[hardware.kind].usable_bytes,
        function.__doc__,
        len(_config.model_spec.model.layers),
        estimated,
        dict(zip(places, on_forks(build_rank, ranks), strict=True)),
    )


def build_rank(job: tuple[int, int]) -> Built:
    """As `Trainer.__init__` does, up to where the weights would be made."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import ParallelDims

    from zbpipe.frameworks.titan import plug

    num_gpus, rank = job
    dist.init_process_group("fake", rank=rank, world_size=num_gpus)
    dims = ParallelDims.from_config(_config.parallelism, num_gpus)
    dims.build_mesh()
    spec = _config.model_spec
    schedule, parts, has_first, has_last = plug.make_pipelining(spec.pipelining_fn, Options())(
        _model,
        parallel_dims=dims,
        training=_config.training,
        parallelism=_config.parallelism,
        compile_config=_config.compile,
        ac_config=_config.activation_checkpoint,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=_config.loss.build(compile_config=_config.compile),
    )
    place, stages = dims.get_mesh("pp").get_local_rank(), [stage.stage_index for stage in hooks.stages_of(schedule)]
    assert rank // (num_gpus // dims.pp) == place
    assert tuple(stages) == resolve(_config.parallelism.pipeline_parallel_schedule).place(dims.pp).stages_on(place)
    assert (has_first, has_last) == (0 in stages, 2 * dims.pp - 1 in stages)
    assert schedule._n_microbatches == 4 * dims.pp
    table = pipelining.write_lowered(schedule)  # type: ignore[arg-type]
    if place == 0:
        assert validate_lowered(parse(table)) == []
    for block in (block for part in parts for block in part.layers.values()):
        assert isinstance(block, FSDPModule)
        assert not block._get_fsdp_state()._fsdp_param_group._reshard_after_forward, "FSDP gathers it once"
    parameters = [parameter for part in parts for parameter in part.parameters()]
    return Built(
        dict(zip(stages, map(modules_of, parts), strict=True)),
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.to_local().numel() for parameter in parameters),
        hashlib.sha256(table.encode()).hexdigest(),
    )


def modules_of(part: Any) -> tuple[str, ...]:
    ends = [name for name in ("tok_embeddings", "norm", "lm_head") if getattr(part, name) is not None]
    layers = [f"layers.{number}" for number in part.layers]
    return (*ends[: "tok_embeddings" in ends], *layers, *ends["tok_embeddings" in ends :])


@needs_03
@pytest.mark.parametrize("name", CONFIGS)
def test_a_job_at_its_full_size(with_titan: Callable[..., Any], name: str) -> None:
    """The estimated parameters are those of the modules that were built, and the docstring tells the sum."""
    job: Job = with_titan(build_job, name)
    by_stage = {stage: modules for built in job.ranks.values() for stage, modules in built.modules.items()}
    assert all(by_stage.values())
    if len(job.ranks) == job.pp:
        modules = [name for stage in sorted(by_stage) for name in by_stage[stage]]
        layers = [f"layers.{number}" for number in range(job.num_layers)]
        assert modules == ["tok_embeddings", *layers, "norm", "lm_head"]
    assert validate(generate(job.schedule, job.pp, 4 * job.pp)) == []
    assert len({built.lowered for built in job.ranks.values()}) == 1
    fsdp = job.gpus // (job.pp * job.tp)
    computed = 4 if name == "llama3_debug" else 2
    for place, built in job.ranks.items():
        count, memory = job.estimated.parameters[place], job.estimated.memories[place]
        assert count == built.parameters
        # TP does not cut the norms.
        assert built.on_one_gpu * fsdp * job.tp == pytest.approx(count, rel=1e-3)
        each = (computed + 4) * fsdp + 12
        assert memory.weights + memory.optimizer == pytest.approx(built.on_one_gpu * each, rel=1e-3)
    assert job.estimated.worst <= job.usable_bytes
    if name not in ("llama3_debug", "llama3_8b_no_downloads"):
        told = re.search(r"(\d+) GiB", job.doc)
        assert told is not None
        assert int(told[1]) == round(job.estimated.worst / 2**30)


def estimate_steps(name: str) -> tuple[str, dict[str, float]]:
    """The config's schedule, and by schedule that fits and runs the tokens per second and GPU."""
    from titan_integration import llama3

    work = read_config(name)
    steps = estimate(work, llama3.HARDWARE[name].kind, plans=False).steps

    def runs(step: Step) -> bool:
        """With the stages that a config gets by default; torch's own split does not work under checkpointing."""
        if step.timeline is None or step.has_torchs_split:
            return False
        return step.stages_per_rank == resolve(step.schedule).stages_per_rank

    return work.schedule, {step.schedule: step.tokens_per_second for step in steps if step.fits and runs(step)}


@needs_03
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("llama3_debug", "llama3_8b_no_downloads")])
def test_a_job_has_the_best_schedule_that_fits(with_titan: Callable[..., Any], name: str) -> None:
    schedule, speeds = with_titan(estimate_steps, name)
    assert speeds[schedule] >= 0.95 * max(speeds.values()), speeds  # the estimate is no more exact


def kept_by_a_block(how: tuple[int, str]) -> tuple[float, float, float, float]:
    """Elements for each token that a block of the debug model keeps from F to I and from I to W, counted and told."""
    from harness import meter

    from zbpipe.runtime.split.deferring_layers import defer_weights
    from zbpipe.runtime.split.weight_gradients import WeightGradients

    tp, checkpointing = how
    dist.init_process_group("fake", rank=0, world_size=tp)
    torch.set_default_dtype(torch.bfloat16)
    block, arguments, context, told = (block_of_02 if IS_02 else block_of_03)(tp, checkpointing)
    gradients = WeightGradients()
    defer_weights(block, gradients)
    x = torch.randn(1, TOKENS // tp, told.dim, requires_grad=True)
    with context:
        block(x, *arguments).sum().backward()  # all gradients are there
        with meter(torch.device("cpu")) as bytes_:
            y = block(x, *arguments)
            after_f = bytes_.live - y.nbytes + x.nbytes  # the next stage has y, and x was there before
            dy = torch.ones_like(y)
            with gradients.record() as pending:
                y.backward(dy)
            del y, dy
            after_i = bytes_.live
    assert len(pending) == (7 if IS_02 else 5)
    # The CPU's attention keeps other things than a GPU's, and was replaced: the result of a GPU's is added.
    attention = told.queries / tp if checkpointing == "selective" else 0
    scale = 2 * TOKENS
    return (
        after_f / scale + attention,
        told.kept_by_f(checkpointing, tp),
        after_i / scale,
        told.kept_by_i(tp),
    )


TOKENS = 256


def block_of_03(tp: int, checkpointing: str) -> tuple[Any, tuple[Any, ...], Any, Block]:
    """A block of Llama 3's debug model on one of `tp` ranks, its arguments, the context of its calls, its widths."""
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from titan_integration import llama3
    from zbpipe.frameworks.titan import cpu

    config = llama3._pipelined(llama3.llama3_debug(), "ZBV", pp=1, tp=tp, checkpointing=checkpointing)  # type: ignore[arg-type]
    cpu.adapt(config)
    ScaledDotProductAttention.forward = attend_to_nothing
    dims = ParallelDims.from_config(config.parallelism, tp)
    dims.build_mesh()
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    model = config.model_spec.model.build()
    model.parallelize(dims)
    config.activation_checkpoint.build(dump_folder="").apply(model)
    widths = config.model_spec.model.layers[0]
    queries, qkv = widths.attention.wo.in_features, widths.attention.qkv_linear.wqkv.out_features
    told = Block(widths.attention.dim, queries, qkv - queries, widths.feed_forward.w1.out_features)
    positions = torch.zeros(1, TOKENS, dtype=torch.long)
    return model.layers["0"], (None, positions), utils.get_spmd_context(parallel_dims=dims)(), told


def attend_to_nothing(self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **unused: Any) -> Any:  # noqa: N803 (TorchTitan's)
    return q_BLNH * 1


def block_of_02(tp: int, checkpointing: str) -> tuple[Any, tuple[Any, ...], Any, Block]:
    """See `block_of_03`."""
    from torch.utils._pytree import tree_leaves
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    from zbpipe.runtime._torch import on_meta

    # The tensors in DTensors and of pending collectives, which have storages of their own.
    on_meta.tree_leaves = lambda values: [inner(inner(leaf)) for leaf in tree_leaves(values)]  # type: ignore
    ScaledDotProductAttentionWrapper.forward = lambda self, q, k, v, **unused: q + (k.sum(1, True) + v.sum(1, True))
    arguments = ["--parallelism.tensor_parallel_degree", str(tp), "--activation_checkpoint.mode", checkpointing]
    config = ConfigManager().parse_args([*arguments, "--activation_checkpoint.selective_ac_option", "op"])
    config.training.seq_len = TOKENS
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=tp)
    dims.build_mesh()
    args = replace(llama3.llama3_args["debugmodel"], n_kv_heads=8)
    args.update_from_config(config)
    model = llama3.Transformer(args)
    attention, hidden = model.layers["0"].attention, model.layers["0"].feed_forward.w1.out_features
    told = Block(
        *(attention.wq.in_features, attention.wq.out_features, 2 * attention.wk.out_features, hidden),
        fused_qkv=False,
        keeps_scattered=True,
    )
    model = llama3.parallelize_llama(model, dims, config)
    return model.layers["0"], (model.freqs_cis[:TOKENS], None, None), nullcontext(), told


def inner(leaf: Any) -> Any:
    return getattr(leaf, "_local_tensor", getattr(leaf, "elem", leaf))


def test_what_a_block_keeps(with_titan: Callable[..., Any]) -> None:
    """The arithmetic of activations, against what TorchTitan's block under zbpipe's split leaves alive."""
    hows = [(tp, checkpointing) for tp in (1, 8) for checkpointing in ("selective", "full")]
    for counted_f, told_f, counted_i, told_i in with_titan(on_forks, kept_by_a_block, hows):
        assert counted_f == told_f
        assert counted_i == told_i


# The TOML files for TorchTitan 0.2.


def estimate_of(arguments: Sequence[str], gpus: int) -> JobMemory:
    from zbpipe.frameworks.titan import command_line

    return memory_by_rank(command_line.read_workload(arguments, gpus))


SAID = r"PP (\d+)(?: x TP (\d+))?(?: x FSDP (\d+))? on .*?(MI\d+X).*GiB on the worst GPU: (\d+)\."


@pytest.mark.skipif(not IS_02, reason="of torchtitan 0.2")
@pytest.mark.parametrize(
    "file", [file for file in TOML_FILES if file.stem != "llama3_debug"], ids=lambda file: file.stem
)
def test_a_file(with_titan: Callable[..., Any], file: Path) -> None:
    """Its first lines tell what the worst GPU needs, and the smallest GPU is large enough."""
    text = " ".join(line.removeprefix("# ") for line in file.read_text().split("\n\n")[0].splitlines())
    found = re.search(SAID, text)
    assert found is not None
    *degrees, smallest, gib = found.groups(default="1")
    pp, tp, fsdp = map(int, degrees)
    arguments = ["--job.config_file", str(file)]
    memory: JobMemory = with_titan(estimate_of, arguments, pp * tp * fsdp)
    assert (len(memory.memories), round(memory.worst / 2**30)) == (pp, int(gib))
    assert smallest in memory.fits
    if file.stem == "llama3_8b":  # float32 for want of FSDP
        arguments += ["--training.dtype", "float32"]
        assert with_titan(estimate_of, arguments, 16)
        with pytest.raises(
            ValueError, match=r"only with FSDP.* take twice as many GPUs, or --training.dtype bfloat16$"
        ):
            with_titan(estimate_of, arguments, 8)


def settings_of(name: str) -> dict[str, Any]:
    """What the TOML file for TorchTitan 0.2 has to say to mean the same."""
    from titan_integration import llama3

    config = getattr(llama3, name)()
    (parameters,) = config.optimizer.param_groups
    same = (
        (config.training, ("local_batch_size", "seq_len", "steps")),
        (config.parallelism, ("pipeline_parallel_degree", "pipeline_parallel_schedule", "tensor_parallel_degree")),
        (config.comm, ("init_timeout_seconds",)),
        (config.dataloader, ("dataset",)),
        (config.lr_scheduler, ("warmup_steps",)),
        (config.model_spec, ("flavor",)),
    )
    return {name: getattr(section, name) for section, names in same for name in names} | {
        "optimizer": {"lr": parameters.optimizer_kwargs["lr"]},
        "mode": "selective" if "Selective" in type(config.activation_checkpoint).__qualname__ else "full",
        "compile": config.compile.enable,
    }


@needs_03
@pytest.mark.parametrize("file", TOML_FILES, ids=lambda file: file.stem)
def test_the_same_job_for_torchtitan_02(with_titan: Callable[..., Any], file: Path) -> None:
    toml = tomllib.loads(file.read_text())
    found = {name: value for section in ("training", "parallelism", "comm") for name, value in toml[section].items()}
    found |= toml["lr_scheduler"] | toml["model"] | toml["activation_checkpoint"] | {"optimizer": toml["optimizer"]}
    found["compile"] = toml.get("compile", {}).get("enable", False)
    expected = with_titan(settings_of, file.stem)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.skipif(not IS_02, reason="of torchtitan 0.2")
def test_training_on_the_cpu(tmp_path: Path) -> None:
    """Two processes by the script, torchrun and TorchTitan's trainer; the platform is found, not given.

    For TorchTitan 0.3, tests/test_first_run.py trains by the script.
    """
    size = ("--training.steps", "4", "--training.local_batch_size", "4", "--training.seq_len", "64")
    # Which of the ranks fails is not known before.
    settings = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "LOG_RANK": "0,1"}
    command = [str(SCRIPT), "--job.dump_folder", str(tmp_path), *size]
    how: Any = {"cwd": tmp_path, "env": os.environ | settings, "timeout": 200}  # not the repository's folder
    result = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    assert "Using zbpipe's pipeline schedule ZBV with 4 microbatches" in result.stdout + result.stderr
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss_metrics/global_avg_loss"] for line in lines]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5  # and so none is NaN


README = ROOT / "titan_integration" / "README.md"


def test_the_readme_has_all_configs() -> None:
    text = README.read_text()
    assert [name for name in CONFIGS if f"`{name}`" not in text] == []
    variables = re.findall(r"^#   ([A-Z_]+) ", SCRIPT.read_text(), re.MULTILINE)
    assert len(variables) == 15
    assert [name for name in variables if f"`{name}`" not in text] == []


def commands(program: str) -> list[str]:
    """Those of the README with this program, each in one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"^srun (--\S+ )*", "", line.split("  #")[0]) for line in lines if program in line]


def model_of(arguments: list[str]) -> str:
    """The model of a job by TorchTitan's own reading of the command line, checked as before a launch."""
    import torchtitan.train

    from zbpipe.frameworks.titan import check, command_line

    chosen, rest = command_line.parse(arguments)
    config = torchtitan.train.ConfigManager().parse_args(rest)
    check.check(config, resolve(config.parallelism.pipeline_parallel_schedule), chosen)
    return f"{config.model_spec.name} {config.model_spec.flavor}"


@needs_03
def test_the_commands_of_the_readme(with_titan: Callable[..., Any]) -> None:
    """Up to where TorchTitan has read them; a plan that is still to be made cannot be read."""
    launches = commands("run_train.sh")
    assert len(launches) == 11
    models = set()
    for launch in launches:
        result = subprocess.run(
            ["bash", "-c", launch],
            cwd=ROOT,
            env=os.environ | {"PYTHON": sys.executable, "DRY_RUN": "1", "PLATFORM": "rocm"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        arguments = shlex.split(result.stdout.splitlines()[-1])
        arguments = arguments[arguments.index("zbpipe.titan.train") + 1 :]
        if not any(".csv" in argument for argument in arguments):
            models.add(with_titan(model_of, arguments))
    assert models == {"llama3 debugmodel", "llama3 8B", "llama3 70B"}


def table(arguments: list[str]) -> list[str]:
    """The lines of `zbpipe estimate --ranks`."""
    result = CliRunner().invoke(cli.main, ["estimate", "--ranks", *arguments])
    return str(result.output).splitlines()


LARGE = {
    True: ["--job.config_file", str(ROOT / "titan_integration" / "titan02" / "llama3_70b.toml")],
    False: ["--module", "titan_integration.llama3", "--config", "llama3_70b"],
}[IS_02]


def test_the_table_of_memory(with_titan: Callable[..., Any]) -> None:
    (command,) = commands("zbpipe estimate --ranks")
    arguments = shlex.split(command)[3:]
    assert arguments[2:6] == ["--module", "titan_integration.llama3", "--config", "llama3_70b"]
    lines = with_titan(table, ["--gpus", "64", *LARGE, *arguments[6:]])
    assert lines[0].split()[:2] == ["rank", "parameters"]
    assert [line.split()[0] for line in lines[1:-2]] == ["0", "1", "2", "3"]
    assert lines[1].split()[1] == "18.36B"
    assert lines[-2].startswith("1 microbatch in --zbpipe.memory-limit: ")
    assert re.fullmatch(r"worst rank: 5\d\.\d GiB, which with 15% left free fits: A100, H100, .*, MI355X", lines[-1])
    refused = with_titan(table, ["--gpus", "48", *LARGE])
    assert "48 GPUs are not a multiple of PP x TP x CP x replicas = 32: use 32 or 64" in refused[-1]


def test_memory_of_auto(with_titan: Callable[..., Any]) -> None:
    """What its plan may take, by its limit; where that is tight, what it starts with."""
    auto = (*LARGE, "--parallelism.pipeline_parallel_schedule", "Auto", "--zbpipe.memory-limit")

    def activations(limit: str) -> tuple[list[float], float]:
        found = json.loads("".join(with_titan(table, ["--json", "--gpus", "64", *auto, limit])))
        kept = [rank["total"] - rank["weights"] - rank["optimizer"] for rank in found["ranks"]]
        return kept, found["unit_of_memory_limit"]

    (tight, unit), (ample, _) = activations("2 microbatches"), activations("12 microbatches")
    assert ample == pytest.approx([12 * unit] * 4, rel=0.01)
    assert min(tight) > 2 * unit


# The pages of docs/.


def print_line(line: str) -> tuple[str, str]:
    """What `zbpipe` prints with these arguments, and its warnings."""
    result = CliRunner().invoke(cli.main, shlex.split(line))
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def alike(shown: str, printed: str) -> bool:
    """Whether the printed line begins with what is shown."""
    words, others = shown.split(), printed.split()
    return len(words) <= len(others) and all(map(nearly_equal, words, others))


def nearly_equal(one: str, other: str) -> bool:
    """Whether these are the same words, or numbers within 2 %."""
    try:
        first, second = (float(re.sub("[%,]", "", each)) for each in (one, other))
    except ValueError:
        return one == other
    return first == pytest.approx(second, rel=0.02)


@needs_03
def test_a_page_has_what_its_commands_print(with_titan: Callable[..., Any]) -> None:
    pairs = pairwise(blocks("docs/is-it-for-me.md"))
    shown = [(one.code.replace("\\\n", "").removeprefix("zbpipe "), two.code) for one, two in pairs if not two.language]
    assert len(shown) == 3
    for line, rows in shown:
        printed, warnings = with_titan(print_line, line)
        assert all(line.startswith("skipped ") for line in warnings.splitlines())
        for row in rows.splitlines():
            assert any(alike(row, line) for line in printed.splitlines()), row


def estimate_measured(file: str) -> Any:
    """`zbpipe measure` on the CPU, and an estimate with its file."""
    job = "--module titan_integration.llama3 --config llama3_debug"
    print_line(f"measure {job} --steps 1 -o {file}")
    with searching_little():
        return json.loads(print_line(f"estimate {job} --gpus 2 --costs-file {file} --json")[0])


@needs_03
def test_measured_stages_are_planned_with(with_titan: Callable[..., Any], tmp_path: Path) -> None:
    (found,) = with_titan(on_forks, estimate_measured, [str(tmp_path / "costs.toml")])
    rows = found["schedules"]
    assert {row["schedule"] for row in rows} >= {"ZBV", "1F1B", "plan"}
    assert all(row["seconds"] > 0 and row["memory"]["activations"] + row["memory"]["waiting"] > 0 for row in rows)


def parse_options(launches: Sequence[list[str]]) -> None:
    """TorchTitan reads a job's options, after zbpipe has taken its own."""
    from torchtitan.train import ConfigManager

    from zbpipe.frameworks.titan import command_line

    for words in launches:
        model = [] if "--module" in words else ["--module", "llama3", "--config", "llama3_debugmodel"]
        there = ["ZBV" if word.endswith(".csv") else word for word in words]  # a table is still to be made
        ConfigManager().parse_args([*model, *command_line.parse(there)[1]])


@needs_03
def test_titan_reads_the_options_of_the_pages(with_titan: Callable[..., Any]) -> None:
    scripts = [block for block in test_docs.ALL_BLOCKS if block.language == "sh"]
    launched = [words for block in scripts for words in test_docs.commands(block) if words[0] == "torchrun"]
    options = [found for words in launched for found in test_docs.launches(words, ROOT)]
    assert len(options) > 3
    with_titan(parse_options, options)
