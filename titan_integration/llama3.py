"""Llama 3 on zbpipe's schedules: `--module titan_integration.llama3 --config ...` for `zbpipe.titan.train`.

Everything that is not set here is as in TorchTitan's own config of the model. `zbpipe estimate --ranks` does the
arithmetic, also for any change of these figures. GiB are those of the worst rank on the fewest GPUs, with what an op
needs while it runs.

All large jobs have in common:

- Tensor parallelism stays within a node of 8 GPUs, and the pipeline crosses nodes, because its messages are small: one
  hidden state for each microbatch. GPUs beyond PP x TP become FSDP. TorchTitan's mesh has the pipeline outermost and TP
  innermost, so ranks that are numbered node by node are placed like this.
- 4 microbatches for each pipeline rank, of one sequence each: a pipeline needs at least 2, and more make its bubble
  smaller. This is `training.local_batch_size`; the loader reads one microbatch at a time.
- FSDP keeps the stages gathered between microbatches (`fsdp_reshard_after_forward` "default" means that for
  pipelines), because a gather for each microbatch would cost more than the schedule saves.
- Selective checkpointing if it fits. The inputs and output gradients of all linear layers wait for W, whatever is
  checkpointed. So full checkpointing saves memory with whole backwards alone, which most microbatches of ZB have.
- ZB, which `zbpipe estimate` keeps if the job is to have a pipeline: no other schedule that fits saves 2 %. The debug
  model shows ZBV.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torchtitan.components import optimizer
from torchtitan.config import CompileConfig
from torchtitan.distributed import activation_checkpoint
from torchtitan.models import llama3
from torchtitan.models.llama3 import config_registry as titan
from torchtitan.trainer import Trainer

from zbpipe.cli.demo import models03
from zbpipe.frameworks.titan import batches


class Hardware(NamedTuple):
    """The hardware for which a config's figures hold."""

    gpus: int
    """The fewest; with a multiple of it, FSDP shards the rest, and each GPU needs less memory."""
    kind: str
    """The smallest kind, one of `zbpipe.estimation.devices.DEVICES`."""


HARDWARE = {
    "llama3_debug": Hardware(2, "H100"),
    "llama3_8b": Hardware(8, "H100"),
    "llama3_8b_no_downloads": Hardware(8, "H100"),
    "llama3_70b": Hardware(32, "H100"),
    "llama3_70b_80gb": Hardware(64, "H100"),
    "llama3_405b": Hardware(128, "H200"),
    "llama3_405b_80gb": Hardware(512, "H100"),
}

_FIRST_STEP_SECONDS = 1800


def llama3_debug() -> Trainer.Config:
    """TorchTitan's debug model (6 layers) on the source of Python's standard library: no download, no GPU needed.

    2 processes: PP 2. With a multiple of 2, FSDP uses the rest. 8 microbatches of 256 tokens, float32.
    """
    config = models03.llama3_python_stdlib()
    return _pipelined(config, "ZBV", pp=2, tp=1, checkpointing="selective")


def llama3_8b() -> Trainer.Config:
    """One node of 8 GPUs, PP 8, for GPUs of 80 GB or more: 56 GiB.

    1.7 billion parameters on rank 0, which has the embedding, the head and 3 of the 32 layers: 18 bytes each (bf16 copy
    2, float32 gradient 4, parameter and AdamW's moments 12) are 29 GiB. The other ranks have 0.9 to
    1.1 billion. 32 microbatches of 8192 tokens: 0.5 GiB per layer and microbatch from F to I (selective), 1.06 GiB
    from I to W, at most 27 GiB, on rank 0, logits and their gradients included.
    """
    return _pipelined(titan.llama3_8b(), "ZB", pp=8, tp=1, checkpointing="selective")


def llama3_8b_no_downloads() -> Trainer.Config:
    """The same job on the source of Python's standard library, byte by byte: for a node without tokenizer and data."""
    config = llama3_8b()
    config.tokenizer = models03.ByteTokenizer.Config()
    config.hf_assets_path = "."
    config.dataloader = models03.make_dataloader_config()
    return config


def llama3_70b() -> Trainer.Config:
    """4 nodes, PP 4 x TP 8, for GPUs of 80 GB or more: 61 GiB (with twice the nodes, FSDP 2: 48 GiB).

    19.2 billion parameters on the worst rank, so 2.4 billion on a GPU, with 18 bytes each: 40 GiB. 16 microbatches:
    0.2 GiB per layer and microbatch from F to I, 0.7 GiB from I to W, at most 21 GiB, where ZBV would take 49. TP cuts
    only one side of each product, so x and dY, which wait for W, are not an eighth of what they are without it.
    """
    return _pipelined(titan.llama3_70b(), "ZB", pp=4, tp=8, checkpointing="selective")


def llama3_70b_80gb() -> Trainer.Config:
    """8 nodes, PP 8 x TP 8, for GPUs of 80 GB: 43 GiB.

    Twice the ranks of `llama3_70b` halve the weights (22 GiB), which leaves room for longer sequences. ZBV would take
    70 GiB. By the estimate ZB's step is 11 % shorter than V-Half's, which takes 37 GiB.
    """
    return _pipelined(titan.llama3_70b(), "ZB", pp=8, tp=8, checkpointing="selective")


def llama3_405b() -> Trainer.Config:
    """From 16 nodes on, PP 16 x TP 8, for GPUs of 141 GB or more: 113 GiB (64 nodes, FSDP 4: 86 GiB).

    126 layers, embedding and head are 128, which is 4 for each of the 32 stages. 25.5 billion parameters a rank, 3.2
    billion on a GPU, with 18 bytes each: 53 GiB (9 bytes with FSDP 4: 27 GiB). 64 microbatches: 0.5 GiB a layer and
    microbatch from F to I, 1.4 GiB from I to W. ZBV would let 31 stages of 4 layers wait for W, 170 GiB. ZB keeps
    to about 1F1B's memory. By the estimate its step is 13 % shorter than V-Half's, which takes 94 GiB.
    """
    return _pipelined(_bf16_405b(), "ZB", pp=16, tp=8, checkpointing="selective")


def llama3_405b_80gb() -> Trainer.Config:
    """64 nodes, PP 16 x TP 8 x FSDP 4, for GPUs of 80 GB: 36 GiB.

    As `llama3_405b`, but with full checkpointing. By the estimate ZB's step is 6 % shorter than that of Interleaved1F1B
    with 2 stages per rank, and 22 % shorter than V-Half's, where the inputs and output gradients that wait for W take
    22 GiB.
    """
    return _pipelined(_bf16_405b(), "ZB", pp=16, tp=8, checkpointing="full")


def _pipelined(
    config: Trainer.Config, schedule: str, *, pp: int, tp: int, checkpointing: Literal["selective", "full"]
) -> Trainer.Config:
    parallelism = config.parallelism
    parallelism.pipeline_parallel_schedule = schedule
    parallelism.pipeline_parallel_degree = pp
    parallelism.tensor_parallel_degree = tp
    if batches.counts_tokens(config):
        parallelism.num_pp_microbatches = 4 * pp
        config.training.num_tokens_per_microbatch_per_dp_rank = config.training.max_context_length
    else:
        config.training.local_batch_size = 4 * pp
    config.training.disable_cuda_graphs = True  # TorchTitan refuses them in a pipeline
    policy = activation_checkpoint.SelectiveAC if checkpointing == "selective" else activation_checkpoint.FullAC
    config.activation_checkpoint = policy.Config()
    # In the first step each stage compiles its attention after the stage before it, and all others wait.
    config.comm.init_timeout_seconds = _FIRST_STEP_SECONDS
    return config


def _bf16_405b() -> Trainer.Config:
    """TorchTitan's 405B without float8 and asynchronous TP.

    Weight gradients of float8 layers cannot wait for W, and asynchronous TP merges products with communication. So this
    starts from its 70B config, which has neither, and sets what TorchTitan's 405B sets. (Its own function cannot be
    called on a machine without float8.)
    """
    config = titan.llama3_70b()
    config.model_spec = llama3.model_registry("405B")
    config.hf_assets_path = "./assets/hf/Llama-3.1-405B"
    config.optimizer = optimizer.default_adamw(lr=8e-5)
    config.lr_scheduler.warmup_steps = 600
    config.training.steps = 3000
    config.compile = CompileConfig(enable=True)
    return config
