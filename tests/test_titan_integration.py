"""The configs in titan_integration/ for TorchTitan 0.2 and 0.3: built without weights, estimated, and one trained."""

import hashlib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_docs
import torch
import torch.distributed as dist
from click.testing import CliRunner
from commands import process
from documents import blocks
from forks import on_forks
from searching import searching_little
from titan_jobs import Titan, require_titan

from zbpipe import OpKind, cli, estimate, generate
from zbpipe.costs.transformer import Block
from zbpipe.estimation import devices
from zbpipe.estimation.cut import WorkloadCut
from zbpipe.estimation.estimate import choose_own, memory_by_rank
from zbpipe.estimation.workload import Degrees, LayerWork, Workload
from zbpipe.frameworks.options import Options
from zbpipe.runtime._torch import pipelining
from zbpipe.schedule.registry import resolve
from zbpipe.simulator.actions import parse
from zbpipe.simulator.validation import validate, validate_lowered

pytestmark = [pytest.mark.long, pytest.mark.versions]
IS_02 = require_titan("0.3.0", "0.2.2") == "0.2.2"
needs_03 = pytest.mark.skipif(IS_02, reason="of torchtitan 0.3")
ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "titan_integration" / "run_train.sh"
TOML = ROOT / "titan_integration" / "titan02"
TOML_FILES = sorted(TOML.glob("*.toml"))
CONFIGS = [
    *("llama3_debug", "llama3_8b", "llama3_8b_no_downloads", "llama3_70b", "llama3_70b_80gb"),
    *("llama3_405b", "llama3_405b_80gb"),
]


def read_config(name: str, config: Any = None) -> Workload:
    from titan_integration import llama3
    from zbpipe.frameworks.titan import command_line, models

    job = config or getattr(llama3, name)()
    return models.workload_of(job, command_line.degrees_of(job, llama3.HARDWARE[name].gpus), name)


class Built(NamedTuple):
    modules: dict[int, tuple[str, ...]]
    parameters: int
    on_one_gpu: int
    lowered: str


_config: Any = None
_model: Any = None


def check_full_size(name: str) -> None:
    """Ranks from meta tensors: all of the small jobs, else both ends. The estimated parameters are those of the modules
    that were built, and the docstring tells the sum."""
    global _config, _model  # noqa: PLW0603 (the forks have no other way to it)
    from torchtitan.distributed import utils

    from titan_integration import llama3
    from zbpipe.frameworks.titan import check, cpu

    function, hardware = getattr(llama3, name), llama3.HARDWARE[name]
    _config = replace(function())  # TorchTitan's own checks, which the CPU's adaption would satisfy
    parallelism, layers = _config.parallelism, _config.model_spec.model.layers
    schedule, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    tp = parallelism.tensor_parallel_degree
    check.check(_config, resolve(schedule), Options())
    estimated = memory_by_rank(read_config(name))
    cpu.adapt(_config)
    utils.set_spmd_backend(_config.parallelism.spmd_backend)
    _config.model_spec.model.update_from_config(config=_config)
    with torch.device("meta"):
        _model = _config.model_spec.model.build()
    assert sum(estimated.parameters) == sum(parameter.numel() for parameter in _model.parameters())
    places = range(pp) if name in ("llama3_debug", "llama3_8b") else (0, pp - 1)
    # The last of the ranks at each place of the pipeline, so that TP and FSDP are not at 0.
    ranks = [(hardware.gpus, (place + 1) * hardware.gpus // pp - 1) for place in places]
    built: list[Built] = on_forks(build_rank, ranks)
    by_stage = {stage: modules for each in built for stage, modules in each.modules.items()}
    assert all(by_stage.values())
    if len(built) == pp:
        modules = [name for stage in sorted(by_stage) for name in by_stage[stage]]
        assert modules == ["tok_embeddings", *(f"layers.{n}" for n in range(len(layers))), "norm", "lm_head"]
    assert validate(generate(schedule, pp, 4 * pp)) == []
    assert len({each.lowered for each in built}) == 1
    fsdp, computed = hardware.gpus // (pp * tp), 4 if name == "llama3_debug" else 2
    for place, each in zip(places, built, strict=True):
        count, memory = estimated.parameters[place], estimated.memories[place]
        assert count == each.parameters
        # TP does not cut the norms.
        assert each.on_one_gpu * fsdp * tp == pytest.approx(count, rel=1e-3)
        expected = each.on_one_gpu * ((computed + 4) * fsdp + 12)
        assert memory.weights + memory.optimizer == pytest.approx(expected, rel=1e-3)
    assert estimated.worst <= devices.DEVICES[hardware.kind].usable_bytes
    if name not in ("llama3_debug", "llama3_8b_no_downloads"):
        gib = round(estimated.worst / 2**30)
        assert f"{gib} GiB" in function.__doc__
        row = next(line for line in README.read_text().splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {schedule} |" in row
        assert row.endswith(f"| {gib} |")


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
    schedule, parts, has_first, has_last = plug.make_pipelining(spec.pipelining_fn, Options(), _config)(
        _model,
        **{"parallel_dims": dims, "training": _config.training, "parallelism": _config.parallelism, "dump_folder": ""},
        **{
            "compile_config": _config.compile,
            "ac_config": _config.activation_checkpoint,
            "device": torch.device("cpu"),
        },
        **{"model_config": spec.model, "parallelize_fn": spec.parallelize_fn},
        loss_fn=_config.loss.build(compile_config=_config.compile),
    )
    place = dims.get_mesh("pp").get_local_rank()
    stages = [stage.stage_index for stage in pipelining.stages_of(schedule)]
    assert rank // (num_gpus // dims.pp) == place
    algorithm = resolve(_config.parallelism.pipeline_parallel_schedule)
    # ZB chooses its stages.
    placement = schedule.schedule.placement if algorithm.chooses_stages else algorithm.place(dims.pp)
    assert tuple(stages) == placement.stages_on(place)
    assert (has_first, has_last) == (0 in stages, placement.num_stages - 1 in stages)
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


def check_choice(name: str) -> None:
    from titan_integration import llama3

    work = read_config(name)
    speeds = {
        step.schedule: step.tokens_per_second
        for step in estimate(work, llama3.HARDWARE[name].kind, plans=False).steps
        # torch's own split does not work under checkpointing.
        if step.fits and step.timeline is not None and not step.has_torchs_split
        if step.stages_per_rank == resolve(step.schedule).stages_per_rank
    }
    assert speeds[work.schedule] >= 0.95 * max(speeds.values()), speeds  # the estimate is no more exact


def check_kept(how: tuple[int, str]) -> None:
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
    assert after_f / (2 * TOKENS) + attention == told.kept_by_f(checkpointing, tp)
    assert after_i / (2 * TOKENS) == told.kept_by_i(tp)


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


def test_what_a_block_keeps(titan: Titan) -> None:
    hows = [(tp, checkpointing) for tp in (1, 8) for checkpointing in ("selective", "full")]
    titan.call(on_forks, check_kept, hows)


SAID = r"PP (\d+)(?: x TP (\d+))?(?: x FSDP (\d+))? on .*?(MI\d+X).*GiB on the worst GPU: (\d+)\."


def check_file(name: str) -> None:
    """Its first lines tell what the worst GPU needs, and the smallest GPU is large enough."""
    from zbpipe.frameworks.titan.command_line import read_workload

    file = TOML / f"{name}.toml"
    text = " ".join(line.removeprefix("# ") for line in file.read_text().split("\n\n")[0].splitlines())
    ((*degrees, smallest, gib),) = re.findall(SAID, text)
    pp, tp, fsdp = (int(each or 1) for each in degrees)
    arguments = ["--job.config_file", str(file)]
    memory = memory_by_rank(read_workload(arguments, pp * tp * fsdp))
    assert (len(memory.memories), round(memory.worst / 2**30)) == (pp, int(gib))
    assert smallest in memory.fits
    if name == "llama3_8b":  # float32 for want of FSDP
        arguments += ["--training.dtype", "float32"]
        assert memory_by_rank(read_workload(arguments, 16))
        with pytest.raises(ValueError, match=r"only with FSDP.* use twice as many GPUs, or --training.dtype bfloat16$"):
            memory_by_rank(read_workload(arguments, 8))


def check_same_job(name: str) -> None:
    from titan_integration import llama3

    config, toml = getattr(llama3, name)(), tomllib.loads((TOML / f"{name}.toml").read_text())
    (parameters,) = config.optimizer.param_groups
    same = (
        (config.training, ("local_batch_size", "seq_len", "steps")),
        (config.parallelism, ("pipeline_parallel_degree", "pipeline_parallel_schedule", "tensor_parallel_degree")),
        (config.comm, ("init_timeout_seconds",)),
        (config.dataloader, ("dataset",)),
        (config.lr_scheduler, ("warmup_steps",)),
        (config.model_spec, ("flavor",)),
    )
    expected = {name: getattr(section, name) for section, names in same for name in names} | {
        "optimizer": {"lr": parameters.optimizer_kwargs["lr"]},
        "mode": "selective" if "Selective" in type(config.activation_checkpoint).__qualname__ else "full",
        "compile": config.compile.enable,
    }
    sections = ("training", "parallelism", "comm", "lr_scheduler", "model", "activation_checkpoint")
    found = {name: value for section in sections for name, value in toml[section].items()}
    found |= {"optimizer": toml["optimizer"], "compile": toml.get("compile", {}).get("enable", False)}
    assert {name: found[name] for name in expected} == expected


def read(*arguments: str, gpus: int = 64) -> Workload:
    from zbpipe.frameworks.titan import command_line

    named = () if "--module" in arguments else ("--module", "titan_integration.llama3", "--config", "llama3_70b")
    return command_line.read_workload([*named, *arguments], gpus)


def check_operations() -> None:
    """Two for each weight and token, and half of the attention's two products; I repeats every second product."""
    block = read().layers[1]
    tokens, dim, hidden, kv = 8192, 8192, 28672, 1024
    products = 2 * tokens * (2 * dim * dim + 2 * dim * kv + 3 * dim * hidden)
    attention = 2 * tokens * tokens * dim
    assert (block.f, block.w) == (products + attention, products)
    again = 2 * tokens * (dim * dim + dim * hidden)  # out and up
    assert block.i == products + 2.5 * attention + again
    assert block.parameters == products / (2 * tokens) + 2 * dim


_ZB = ("--parallelism.pipeline_parallel_schedule", "ZB")
_LAYERS = ("--parallelism.pipeline_parallel_layers_per_stage",)


def check_degrees() -> None:
    job, placement = read("--parallelism.pipeline_parallel_schedule", "ZBV"), resolve("ZBV").place(4)
    found = (str(job.degrees), job.microbatches, job.schedule, str(job.checkpointing))
    assert found == ("PP 4 x TP 8 x FSDP 2", 16, "ZBV", "selective")
    assert job.parameters == pytest.approx(70.6e9, rel=0.01)
    other = job.on(Degrees(8, 4, 2))
    assert (other.microbatches, other.global_tokens) == (16, job.global_tokens)
    assert other.layers[1].f == job.layers[1].f
    # Hidden states of 8192 tokens, 8192 wide, in two bytes, of which each GPU sends its share to one other.
    shared = (job.on(Degrees(4, tensor, 16 // tensor // context, 1, context)) for tensor, context in ((4, 2), (2, 1)))
    messages = [(each.message_bytes, each.degrees.sharing) for each in (job, *shared)]
    assert messages == [(2 * 8192 * 8192 / sharing, sharing) for sharing in (8, 8, 2)]
    ends = (job, read("--parallelism.pipeline_parallel_first_stage_less_layers", "3"))
    by_work, weighted = (list(map(len, WorkloadCut(each).split(placement, resolve("ZBV")))) for each in ends)
    assert weighted == [9, 11, 11, 11, 10, 10, 10, 10] != by_work  # 82 layers, of which the embedding counts as 3
    chosen = [choose_own(read(*_ZB, *given))[1].num_stages for given in ((), (*_LAYERS, "11"))]
    assert chosen == [16, 8]
    with pytest.raises(ValueError, match="makes 10 stages, but ZB on 4 ranks has a multiple of 4"):
        choose_own(read(*_ZB, *_LAYERS, "9"))
    # The table has the memory of the worst rank.
    (row,) = (each for each in estimate(job, "MI300X", only=["ZBV"], plans=False).steps if each.schedule == "ZBV")
    assert row.memory.total == pytest.approx(memory_by_rank(job).worst, rel=1e-6)


def bytes_of(layer: LayerWork) -> list[float]:
    return [layer.activations, layer.waits, *(dict(layer.working)[kind] for kind in (OpKind.F, OpKind.I, OpKind.B))]


def check_formulas() -> None:
    """A layer that meta tensors cannot run counts as a Llama block, which it is here. Both ways agree."""
    from zbpipe.frameworks import layer_work

    alone = ("--parallelism.tensor_parallel_degree", "1")
    counted = read(*alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_work, "count_on_meta", lambda block, x, *args: None)
        guessed = read(*alone)
    assert bytes_of(guessed.layers[1]) == pytest.approx(bytes_of(counted.layers[1]), rel=0.01)
    assert guessed.layers[1].f == counted.layers[1].f
    assert "do not run on meta tensors" in guessed.words


def check_other_models() -> None:
    """TorchTitan's own configs, without what its trainer wants to be said about a pipeline."""
    from zbpipe.frameworks.titan import models

    in_two = ("--parallelism.pipeline_parallel_degree", "2")
    moe = read("--module", "qwen3", "--config", "qwen3_moe_debug", *in_two, gpus=4)
    assert "do not run on meta tensors" in moe.words
    assert all(layer.activations > 0 for layer in moe.layers[1:-1])
    in_four = (*in_two, "--parallelism.expert_parallel_degree", "2")
    sends = [
        read("--module", "deepseek_v3", "--config", f"deepseek_v3_debugmodel{kind}", *in_four, gpus=8)
        for kind in ("", "_hybridep")
    ]
    assert [each.sends_once for each in sends] == [False, True]
    # TorchTitan asks for a device with float8 when it makes the config, and meta tensors show no float8 products.
    kinds = [read("--module", "llama3", "--config", f"llama3_debugmodel{kind}", gpus=8) for kind in ("", "_float8")]
    assert [each.float8 for each in kinds] == [False, True]
    assert kinds[0].layers == kinds[1].layers
    # Encoders of images count on the first stage, with two operations for each weight and token in each of F, I and W.
    seeing = read("--module", "rows_config", "--config", "muse_glimmer_images", *in_two, gpus=2)
    first, embedding = seeing.layers[0], 2048 * 256
    assert first.modules == ("tok_embeddings", "vision_projection", "vision_encoder", "vision_adapter")
    of_weights = 2 * (first.parameters - embedding)
    assert first.f / seeing.tokens == pytest.approx(of_weights, rel=0.1), "but for biases and norms"
    assert first.i == first.w == first.f
    assert "vision_projection, vision_encoder, vision_adapter from the weights, with one patch per" in seeing.words
    with pytest.raises(ValueError, match="Linear has no tok_embeddings, layers, norm, lm_head: only TorchTitan's"):
        models.require_decoder(torch.nn.Linear(1, 1))


REFUSED = {
    ("--config", "llama3_7b"): "titan_integration.llama3 has no config 'llama3_7b'; it has llama3_debug, ",
    ("--gpus", "16", "--config", "llama3_70b"): "PP x TP x CP x replicas = 32: use 32",
    ("--module", "qwen3", "--config", "qwen3_0_6b", "--parallelism.pipeline_parallel_degree", "2"): (
        "TorchTitan refuses this job: Weight tying is not supported with Pipeline Parallel."
    ),
}


def check_refusals() -> None:
    """As with the installed command, the current folder is not on Python's path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(ROOT))])
        for name in [name for name in sys.modules if name.startswith("titan_integration")]:
            patch.delitem(sys.modules, name)
        for arguments, words in REFUSED.items():
            command = ["estimate", "--module", "titan_integration.llama3", "--gpus", "64", "--device", "H100"]
            result = CliRunner().invoke(cli.main, [*command, *arguments])
            assert result.exit_code == 2
            assert words in result.stderr.splitlines()[-1]


FILES = [file.stem for file in TOML_FILES]
CHECKS: list[tuple[Any, ...]] = [(check_full_size, name) for name in CONFIGS]
CHECKS += [(check_choice, name) for name in CONFIGS if name not in ("llama3_debug", "llama3_8b_no_downloads")]
CHECKS += [(check_same_job, name) for name in FILES]
CHECKS += [(each,) for each in (check_operations, check_degrees, check_formulas, check_other_models, check_refusals)]
if IS_02:
    CHECKS = [(check_file, name) for name in FILES if name != "llama3_debug"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: "-".join((check[0].__name__, *check[1:])))
def test_what_is_said_of_a_job(titan: Titan, check: tuple[Any, ...]) -> None:
    titan.call(*check)


README = ROOT / "titan_integration" / "README.md"


def test_the_readme_has_all_configs() -> None:
    text = README.read_text()
    assert [name for name in CONFIGS if f"`{name}`" not in text] == []
    variables = re.findall(r"^#   ([A-Z_]+) ", SCRIPT.read_text(), re.MULTILINE)
    assert len(variables) == 15
    assert [name for name in variables if f"`{name}`" not in text] == []


def commands(program: str) -> list[str]:
    lines = (
        "".join(block.code for block in blocks("titan_integration/README.md", "sh")).replace("\\\n", " ").splitlines()
    )
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
def test_the_commands_of_the_readme(titan: Titan) -> None:
    """Up to where TorchTitan has read them; a plan that is still to be made cannot be read."""
    launches = commands("run_train.sh")
    assert len(launches) == 11
    models = set()
    for launch in launches:
        result = process("bash", "-c", launch, folder=ROOT, PYTHON=sys.executable, DRY_RUN="1", PLATFORM="rocm")
        arguments = shlex.split(result.stdout.splitlines()[-1])
        arguments = arguments[arguments.index("zbpipe.titan.train") + 1 :]
        if not any(".csv" in argument for argument in arguments):
            models.add(titan.call(model_of, arguments))
    assert models == {"llama3 debugmodel", "llama3 8B", "llama3 70B"}


def table(arguments: list[str]) -> list[str]:
    result = CliRunner().invoke(cli.main, ["estimate", "--ranks", *arguments])
    return str(result.output).splitlines()


LARGE = {
    True: ["--job.config_file", str(ROOT / "titan_integration" / "titan02" / "llama3_70b.toml")],
    False: ["--module", "titan_integration.llama3", "--config", "llama3_70b"],
}[IS_02]


def test_the_table_of_memory(titan: Titan) -> None:
    (command,) = commands("zbpipe estimate --ranks")
    arguments = shlex.split(command)[3:]
    assert arguments[2:6] == ["--module", "titan_integration.llama3", "--config", "llama3_70b"]
    lines = titan.call(table, ["--gpus", "64", *LARGE, *arguments[6:]])
    assert lines[0].split()[:2] == ["rank", "parameters"]
    assert [line.split()[0] for line in lines[1:-2]] == ["0", "1", "2", "3"]
    assert lines[1].split()[1] == "18.36B"
    assert lines[-2].startswith("1 microbatch in --zbpipe.memory-limit: ")
    assert re.fullmatch(r"worst rank: 5\d\.\d GiB, which with 15% left free fits: A100, H100, .*, MI355X", lines[-1])
    refused = titan.call(table, ["--gpus", "48", *LARGE])
    assert "48 GPUs are not a multiple of PP x TP x CP x replicas = 32: use 32 or 64" in refused[-1]


def test_memory_of_auto(titan: Titan) -> None:
    """What ZB takes within its limit; where that is tight, what it starts with."""
    auto = (*LARGE, "--parallelism.pipeline_parallel_schedule", "Auto", "--zbpipe.memory-limit")

    def activations(limit: str) -> tuple[list[float], float]:
        found = json.loads("".join(titan.call(table, ["--json", "--gpus", "64", *auto, limit])))
        kept = [rank["total"] - rank["weights"] - rank["optimizer"] for rank in found["ranks"]]
        return kept, found["unit_of_memory_limit"]

    (tight, unit), (ample, _) = activations("2 microbatches"), activations("12 microbatches")
    assert 10 * unit < max(ample) < 12 * unit
    assert 2 * unit < min(tight) < max(tight) < 6 * unit


def print_line(line: str) -> tuple[str, str]:
    result = CliRunner().invoke(cli.main, shlex.split(line))
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def alike(shown: str, printed: str) -> bool:
    words, others = shown.split(), printed.split()
    return len(words) <= len(others) and all(map(nearly_equal, words, others))


def nearly_equal(one: str, other: str) -> bool:
    try:
        first, second = (float(re.sub("[%,]", "", each)) for each in (one, other))
    except ValueError:
        return one == other
    return first == pytest.approx(second, rel=0.02)


@needs_03
def test_a_page_has_what_its_commands_print(titan: Titan) -> None:
    pairs = pairwise(blocks("docs/is-it-for-me.md"))
    shown = [(one.code.replace("\\\n", "").removeprefix("zbpipe "), two.code) for one, two in pairs if not two.language]
    assert len(shown) == 3
    for line, rows in shown:
        printed, warnings = titan.call(print_line, line)
        assert all(line.startswith("skipped ") for line in warnings.splitlines())
        for row in rows.splitlines():
            assert any(alike(row, line) for line in printed.splitlines()), row


def estimate_measured(file: str) -> Any:
    job = "--module titan_integration.llama3 --config llama3_debug"
    print_line(f"measure {job} --steps 1 -o {file}")
    with searching_little():
        return json.loads(print_line(f"estimate {job} --gpus 2 --costs-file {file} --json")[0])


@needs_03
def test_measured_stages_are_planned_with(titan: Titan, tmp_path: Path) -> None:
    (found,) = titan.call(on_forks, estimate_measured, [str(tmp_path / "costs.toml")])
    rows = found["schedules"]
    assert {row["schedule"] for row in rows} >= {"ZBV", "1F1B", "plan"}
    assert all(row["seconds"] > 0 and row["memory"]["activations"] + row["memory"]["waiting"] > 0 for row in rows)


def parse_options(launches: Sequence[list[str]]) -> None:
    from torchtitan.train import ConfigManager

    from zbpipe.frameworks.titan import command_line

    for words in launches:
        model = [] if "--module" in words else ["--module", "llama3", "--config", "llama3_debugmodel"]
        there = ["ZBV" if word.endswith(".csv") else word for word in words]  # a table is still to be made
        ConfigManager().parse_args([*model, *command_line.parse(there)[1]])


@needs_03
def test_titan_reads_the_options_of_the_pages(titan: Titan) -> None:
    scripts = [block for block in test_docs.ALL_BLOCKS if block.language == "sh"]
    launched = [words for block in scripts for words in test_docs.commands(block) if words[0] == "torchrun"]
    options = [found for words in launched for found in test_docs.launches(words, ROOT)]
    assert len(options) > 3
    titan.call(parse_options, options)
