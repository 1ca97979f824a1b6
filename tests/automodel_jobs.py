"""Steps of NeMo AutoModel's own pipelines on the CPU, with models made from small configs: nothing is downloaded.

AutoModel is imported where a job runs, so that this module can be imported without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import zbpipe

Sharding = Literal["plain", "FSDP2", "MoE", "MoE, parts"]
"""Nothing, AutoModel's dense strategy, or its one for mixtures of experts, over the whole stage or its parts alone."""
Gradients = dict[str, Tensor]

VOCABULARY, WIDTH, MICROBATCHES = 64, 32, 8
EXACT = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=torch.float32)


class Training(NamedTuple):
    """What one pipeline trains."""

    schedule: str
    """As it stands in AutoModel's config."""
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
    """Whether the schedule divides the gradients by the number of microbatches."""


class Run(NamedTuple):
    """What one rank saw."""

    runs: str
    """The class of the schedule."""
    stages: tuple[int, ...]
    gradients: Gradients
    """Of this rank's stages, whole, after the last batch."""
    losses: list[list[float]]
    """By batch: those of the microbatches, on the rank that has them."""


def build_model(training: Training) -> nn.Module:
    """The same weights wherever it is built."""
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
    """Mean over one microbatch."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batches(training: Training, replica: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of one data-parallel rank, (MICROBATCHES, length) each."""
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
    """Each training on all ranks of this job."""
    zbpipe.install()
    return [train(training) for training in trainings]


def train(training: Training) -> Run:
    """The gradients of one optimizer step, as AutoModel's recipes compute them."""
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
    return Run(type(info.schedule).__name__, stages, _whole_gradients(pp.parts), losses)


def build(training: Training) -> tuple[Any, int]:
    """AutoModel's pipeline, made as its recipes make it, and the number of this rank's replica."""
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


def _whole_gradients(parts: Sequence[nn.Module]) -> Gradients:
    named = ((name, p.grad) for part in parts for name, p in part.named_parameters() if p.grad is not None)
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in named}
