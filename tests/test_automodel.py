"""NeMo AutoModel's own pipelines with zbpipe installed, against the model without a pipeline."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from commands import process
from compatibility import Section, Table, compare, seen_with, target, words
from ranks import fork_from, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import zbpipe
from zbpipe.frameworks.installation import uninstall

pytest.importorskip("nemo_automodel")
yaml = pytest.importorskip("yaml")

fork_from("nemo_automodel._transformers.infrastructure", "nemo_automodel.components.models.qwen3_moe.model")

Sharding = Literal["plain", "FSDP2", "MoE", "MoE, parts"]
"""Nothing, AutoModel's dense strategy, or its one for mixtures of experts, over the whole stage or its parts alone."""
Gradients = dict[str, Tensor]

VOCABULARY, WIDTH, MICROBATCHES = 64, 32, 8
EXACT = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=torch.float32)


class Training(NamedTuple):
    schedule: str
    sharding: Sharding = "plain"
    pipeline: int = 2
    """Ranks of one model; the others are data-parallel."""
    layers: int = 8
    lengths: tuple[int, ...] = (12,)
    """Of the sequences, one number for each batch; gradients add up over the batches."""
    says_lengths: bool = False
    """Whether AutoModel is told each length before the step, as its recipes do."""
    own_backward: bool = False
    """Whether stages run AutoModel's backward in the place of torch's, as they do with `enable_fsdp_optimizations`."""
    defer_fsdp_grad_sync: bool = True
    in_mean: bool = False


class Run(NamedTuple):
    runs: str
    stages: tuple[int, ...]
    gradients: Gradients
    losses: list[list[float]]


def build_model(training: Training) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": training.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return _mixture_of_experts(sizes) if training.sharding.startswith("MoE") else _llama(sizes)


def _llama(sizes: dict[str, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes))


def _mixture_of_experts(sizes: dict[str, int]) -> nn.Module:
    """AutoModel's own class, which is a `MoEFSDPSyncMixin`."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.qwen3_moe import model as qwen3_moe
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **sizes,
        head_dim=8,
        moe_intermediate_size=WIDTH,
        num_experts=4,
        router_aux_loss_coef=0.0,
        num_experts_per_tok=2,
        dtype="float32",
    )
    backend = BackendConfig(
        attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False, experts="torch", dispatcher="torch"
    )
    rotary = qwen3_moe.RotaryEmbedding
    with (  # it puts the angles on a GPU
        patch.object(torch.cuda, "current_device", return_value=0),
        patch.object(qwen3_moe, "RotaryEmbedding", lambda **given: rotary(**given | {"device": torch.device("cpu")})),
    ):
        model = qwen3_moe.Qwen3MoeForCausalLM(config, backend=backend)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batches(training: Training, replica: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(replica)
    return [
        tuple(torch.randint(VOCABULARY, (MICROBATCHES, length), generator=generator) for _ in range(2))  # type: ignore[misc]
        for length in training.lengths
    ]


def without_a_pipeline(training: Training, replicas: int) -> tuple[Gradients, list[list[list[float]]]]:
    """Gradients added up over batches and microbatches, mean over replicas; the losses by replica and batch."""
    model = build_model(training)
    losses: list[list[list[float]]] = []
    for replica in range(replicas):
        losses.append([])
        for tokens, targets in batches(training, replica):
            each = [
                loss_fn(model(x).logits, target) for x, target in zip(tokens.split(1), targets.split(1), strict=True)
            ]
            (torch.stack(each).sum() / (replicas * (MICROBATCHES if training.in_mean else 1))).backward()
            losses[-1].append([loss.item() for loss in each])
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, losses


def train_all(trainings: Sequence[Training]) -> list[Run]:
    zbpipe.install()
    return [train(training) for training in trainings]


def train(training: Training) -> Run:
    from nemo_automodel.components.training.utils import prepare_for_final_backward, prepare_for_grad_accumulation

    pp, replica = build(training)
    info = pp.info
    prepare_for_grad_accumulation(pp.parts, pp_enabled=True)
    losses = []
    for number, (tokens, targets) in enumerate(batches(training, replica)):
        if number == len(training.lengths) - 1:
            prepare_for_final_backward(pp.parts, pp_enabled=True)
        if training.says_lengths:
            pp.update_seq_len(tokens.shape[1])
        kept: list[Tensor] = []
        inputs = (tokens,) if info.has_first_stage else ()
        last = {"target": targets, "losses": kept} if info.has_last_stage else {}
        info.schedule.step(*inputs, **last)
        losses.append([loss.item() for loss in kept])
    stages = tuple(stage.stage_index for stage in info.stages)
    named = ((name, p.grad) for part in pp.parts for name, p in part.named_parameters() if p.grad is not None)
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in named}
    return Run(type(info.schedule).__name__, stages, whole, losses)


def build(training: Training) -> tuple[Any, int]:
    from nemo_automodel._transformers.infrastructure import instantiate_infrastructure
    from nemo_automodel.recipes._dist_utils import create_distributed_setup_from_config

    setup = create_distributed_setup_from_config(
        {
            "strategy": "fsdp2",
            "pp_size": training.pipeline,
            "dp_size": dist.get_world_size() // training.pipeline,
            "mp_policy": EXACT,
            "defer_fsdp_grad_sync": training.defer_fsdp_grad_sync,
            "pipeline": {
                "pp_schedule": training.schedule,
                "pp_microbatch_size": 1,
                "pp_batch_size": MICROBATCHES,
                "scale_grads_in_schedule": training.in_mean,
                "patch_stage_backward_maybe_with_nosync": training.own_backward,
            },
        },
        world_size=dist.get_world_size(),
    )
    _, pp, shard_dense, _ = instantiate_infrastructure(
        distributed_config=setup.strategy_config,
        pipeline_config=setup.pipeline_config,
        device=torch.device("cpu"),
        mesh=setup.mesh_context,
    )
    pp.build(build_model(training), loss_fn=loss_fn, parallelize_fn=_shard(training.sharding, shard_dense))
    for module in (module for part in pp.parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales
    return pp, _data_mesh(setup.mesh_context.device_mesh).get_local_rank()


def _data_mesh(mesh: Any) -> Any:
    from nemo_automodel.components.distributed.mesh_utils import get_flat_mesh

    return get_flat_mesh(mesh, "dp")


def _shard(sharding: Sharding, shard_dense: Any) -> Callable[..., Any] | None:
    if sharding == "plain":
        return None
    return shard_dense if sharding == "FSDP2" else partial(_shard_experts, sharding == "MoE")


def _shard_experts(whole: bool, part: nn.Module, *, world_mesh: Any, **unused: Any) -> None:
    """What AutoModel does with expert parallelism, `wrap_outer_model` being a field of its config."""
    from nemo_automodel.components.moe.parallelizer import apply_fsdp

    mesh = _data_mesh(world_mesh)
    apply_fsdp(part, mesh, ep_enabled=False, ep_shard_enabled=False, mp_policy=EXACT, wrap_outer_model=whole)


# Both add the same float32 numbers in another order.
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}


STAGES = {"1f1b": 1, "zbh1": 1, "wave.csv": 4}
"""Per rank, by schedule; others have two."""
LENGTHS: dict[str, Any] = {"lengths": (12, 20, 8), "says_lengths": True}
ON_TWO = {
    "ZBV, mean of microbatches": Training("ZBV", in_mean=True),
    **{name: Training(name) for name in ("ZBV", "VMin", "ZBH1", "Auto", "plan.csv", "wave.csv", "Interleaved1F1B")},
    **{"VHalf": Training("vhalf"), "1F1B": Training("1f1b")},
    # As many stages as the layers allow: 4 of 8 layers in a wave, one of 3 layers.
    **{"ZB": Training("ZB"), "ZB, 3 layers": Training("ZB", layers=3)},
    # As the recipes do, which tell AutoModel the length of each batch; all others have torch find it out.
    **{f"{name}, lengths that change": Training(name, **LENGTHS) for name in ("ZBV", "ZBH1", "1f1b")},
}
ON_FOUR = {
    **{f"{name}, p=4": Training(name, pipeline=4) for name in ("ZBV", "ZBH1", "Auto")},
    "wave.csv, p=4": Training("wave.csv", pipeline=4, layers=16),
    **{f"{name}, FSDP2": Training(name, "FSDP2") for name in ("ZBV", "VHalf", "ZBH1", "Auto", "wave.csv", "1F1B")},
    **{
        f"{name}, {how}": Training(name, own_backward=True, **more)  # type: ignore[arg-type]
        for how, more in {
            "FSDP2 by AutoModel's backward": {"sharding": "FSDP2"},
            "FSDP2 that reduces every microbatch": {"sharding": "FSDP2", "defer_fsdp_grad_sync": False},
            "experts": {"sharding": "MoE", "layers": 4},
            "experts, parts": {"sharding": "MoE, parts", "layers": 4},
            # The gradients of the first batch wait, unreduced, for those of the second one.
            "experts, parts, two batches": {"sharding": "MoE, parts", "layers": 4, "lengths": (12, 12)},
            "experts, parts, lengths that change": {"sharding": "MoE, parts", "layers": 4, **LENGTHS},
        }.items()
        for name in ("ZBV", "ZBH1")
    },
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for ranks in (2, 4):
        (folder / str(ranks)).mkdir()
        for name, stages_per_rank in (("plan.csv", 2), ("wave.csv", 4)):
            placement = zbpipe.Placement.v(ranks, stages_per_rank)
            plan = zbpipe.plan(ranks, MICROBATCHES, (1.0, 1.0, 1.0), placements=[placement])
            (folder / str(ranks) / name).write_text(plan.schedule.to_csv())
    return folder


@pytest.fixture(scope="module")
def runs(tables: Path) -> dict[str, list[Run]]:
    """By training, what each rank saw. One start of the processes serves all of a number of ranks."""
    return run_all(2, ON_TWO, tables) | run_all(4, ON_FOUR, tables)


def run_all(ranks: int, named: dict[str, Training], tables: Path) -> dict[str, list[Run]]:
    for each in named.values():  # before the ranks: what one process has compiled, they all find
        expected(model_of(each), ranks // each.pipeline)
    trainings = [
        each._replace(schedule=str(tables / str(each.pipeline) / each.schedule)) if ".csv" in each.schedule else each
        for each in named.values()
    ]
    by_rank = run_ranks(ranks, train_all, trainings, timeout=500)
    return dict(zip(named, map(list, zip(*by_rank, strict=True)), strict=True))


@cache
def expected(training: Training, replicas: int) -> tuple[Gradients, list[list[list[float]]]]:
    found: tuple[Gradients, list[list[list[float]]]] = run_ranks(1, without_a_pipeline, training, replicas)[0]
    return found


def model_of(training: Training) -> Training:
    sharding: Any = training.sharding[:3]
    return Training("", sharding, 0, training.layers, training.lengths, in_mean=training.in_mean)


def assert_as_without_a_pipeline(training: Training, runs: list[Run]) -> None:
    name, count = training.schedule.lower(), STAGES.get(training.schedule.lower(), 2)
    count = max(training.layers // (2 * training.pipeline) * 2, 1) if name in ("zb", "auto") else count
    classes = {"auto": "autoschedule", "plan.csv": "schedulefromfile", "wave.csv": "schedulefromfile"}
    assert {run.runs.lower() for run in runs} == {classes.get(name, f"schedule{name}")}
    place = zbpipe.Placement.loop if name.startswith("interleaved") else zbpipe.Placement.v
    assert runs[0].stages == place(training.pipeline, count).stages_on(0)
    gradients, losses = expected(model_of(training), len(runs) // training.pipeline)
    found = {name: gradient for run in runs for name, gradient in run.gradients.items()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]
    # Ranks of a pipeline that hold its last stage, replica by replica.
    reported = [run.losses for run in runs if any(run.losses)]
    assert reported == [[pytest.approx(batch, rel=1e-5) for batch in replica] for replica in losses]


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_ranks_train_as_without_a_pipeline(name: str, runs: dict[str, list[Run]]) -> None:
    assert_as_without_a_pipeline((ON_TWO | ON_FOUR)[name], runs[name])


COLUMNS = {
    "2 ranks": "",
    "4 ranks": ", p=4",
    "FSDP2": ", FSDP2",
    "FSDP2, AutoModel's backward": ", FSDP2 by AutoModel's backward",
    "the same, reducing every microbatch": ", FSDP2 that reduces every microbatch",
    "experts": ", experts",
    "experts, FSDP2 on parts": ", experts, parts, two batches",
}
SCHEDULES = ("ZBV", "VHalf", "VMin", "ZBH1", "Auto", "plan.csv", "wave.csv", "1F1B")
OWN = """\
Tested with {versions}. Not tried: context parallelism. With torch 2.15 AutoModel 0.7.0 fails also without zbpipe.
"""


def test_the_page_says_what_works(runs: dict[str, list[Run]], request: pytest.FixtureRequest) -> None:
    trainings = ON_TWO | ON_FOUR

    def outcome(name: str) -> str:
        if name not in trainings:
            return "not tried"
        assert_as_without_a_pipeline(trainings[name], runs[name])
        return "works"

    lines = [[schedule, *(outcome(schedule + suffix) for suffix in COLUMNS.values())] for schedule in SCHEDULES]
    table = Table("Schedule and sharding", "", ["schedule", *COLUMNS], lines)
    own = OWN.format(versions=seen_with("torch", "nemo-automodel"))
    section = Section(target("nemo-automodel"), own, words("nemo-automodel"), [table])
    compare(section, request.config.getoption("--write-compatibility"))


CPU_ONLY = {
    "distributed": {"mp_policy": {"param_dtype": "float32", "reduce_dtype": "float32", "output_dtype": "float32"}},
    "model": {"torch_dtype": "float32"},
    "dist_env": {"backend": "gloo"},
}
EXAMPLE = Path(__file__).parents[1] / "examples" / "automodel" / "llama3_8b.yaml"
SMALL_STEPS = {
    "local_batch_size": 4,
    "global_batch_size": 8,  # two steps of the schedule for one of the optimizer
    "max_steps": 3,
    "num_epochs": 1,
    "val_every_steps": 3,
    "ckpt_every_steps": 100,
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


Written = dict[str, list[dict[str, Any]]]


def write_job(pipeline: int, model: Path, folder: Path, more: dict[str, dict[str, Any]]) -> Path:
    """The config of the example's job, cut down to three steps of a small model, with `more` by section."""
    job = yaml.safe_load(EXAMPLE.read_text())
    for section, values in [*CPU_ONLY.items(), *more.items()]:
        job.setdefault(section, {}).update(values)
    job["distributed"]["pp_size"] = pipeline
    job["distributed"]["pipeline"].update(job.pop("pipeline", {}))
    job["step_scheduler"] = SMALL_STEPS
    job["model"]["pretrained_model_name_or_path"] = str(model)
    sentences = "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset"
    job["dataset"] = {"_target_": sentences, "num_sentences": 24, "tokenizer": None}
    job["dataloader"]["shuffle"] = False
    job["validation_dataset"] = job["dataset"] | {"num_sentences": 8, "seed": 1}
    job["validation_dataloader"] = dict(job["dataloader"])
    job["checkpoint"] = {"enabled": False, "checkpoint_dir": str(folder)}
    config = folder / "job.yaml"
    config.write_text(yaml.safe_dump(job))
    return config


def run_recipes(pipeline: int, model: Path, folder: Path) -> dict[str, Written]:
    configs = []
    for name, more in SETTINGS.items():
        (folder / name).mkdir()
        configs.append(write_job(pipeline, model, folder / name, more))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pipeline))
    job: list[str | Path] = ["-m", "zbpipe.run", "--", "-m", "automodel_on_cpu", *configs]
    ended = process(*torchrun, *job, folder=Path(__file__).parent, timeout=400, OMP_NUM_THREADS="1")
    assert ("the schedule ZB and gets zbpipe's ZB" in ended.stdout + ended.stderr) == (pipeline > 1)
    return {
        job: {
            name: [json.loads(line) for line in (folder / job / f"{name}.jsonl").read_text().splitlines()]
            for name in ("training", "validation")
        }
        for job in SETTINGS
    }


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    # One stage per rank, so the last rank has the loss. A wave would have it on the first one.
    "all weights": {"pipeline": {"pp_schedule": "ZB", "layers_per_stage": 4}},
    "LoRA, compiled": {
        "peft": {
            "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
            "match_all_linear": True,
            "dim": 8,
            "alpha": 16,
            "use_triton": False,
        },
        "compile": {"enabled": True, "mode": "default", "fullgraph": False, "dynamic": False},
    },
}


@pytest.fixture(scope="module")
def jobs(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Written]]:
    return [run_recipes(ranks, small_model, tmp_path_factory.mktemp("jobs")) for ranks in (2, 1)]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_example_trains_as_without_a_pipeline(jobs: list[dict[str, Written]], name: str) -> None:
    """AutoModel's whole recipe: losses that it reports, of validation, too, and norms of the gradients."""
    found, whole = (each[name] for each in jobs)
    assert len(whole["training"]) == 3
    assert len(whole["validation"]) == 1
    for kind, keys in {"training": ("loss", "grad_norm"), "validation": ("val_loss",)}.items():
        for key in keys:
            values = [step[key] for step in whole[kind]]
            assert [step[key] for step in found[kind]] == pytest.approx(values, rel=1e-4)
            assert min(values) > 0.1


def test_automodel_takes_the_example() -> None:
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    section = parse_distributed_section(load_yaml_config(EXAMPLE).distributed.to_dict())
    assert (section["pp_size"], section["pipeline_config"].pp_schedule) == (8, "ZB")


def test_a_pool_of_receive_buffers_made_for_1f1b_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be there if the config names 1F1B, and ZBV takes its place."""
    from nemo_automodel.components.distributed.pipelining import functional, recv_buffer_pool

    zbpipe.install("ZBV", everywhere=True)
    try:
        assert functional.get_schedule_class("1f1b").__name__ == "ScheduleZBV"
        monkeypatch.setattr(recv_buffer_pool, "_INSTALLED", True)
        with pytest.raises(
            ValueError, match=r"pp_recv_buffer_pool .* too few for ZBV: omit it from distributed\.pipeline"
        ):
            functional.get_schedule_class("1f1b")
    finally:
        uninstall()
