"""Batch sizes and checkpointing in TorchTitan's config, which counts sequences or tokens. Imports no torchtitan.

If it counts tokens, a microbatch is one row of tokens, with as many sequences as fit.
"""

from __future__ import annotations

from typing import Any

from zbpipe.costs.transformer import Checkpointing


def counts_tokens(config: Any) -> bool:
    """Whether a microbatch is a number of tokens, not of sequences."""
    return hasattr(config.parallelism, "num_pp_microbatches")


def microbatches(config: Any) -> int:
    if counts_tokens(config):
        return int(config.parallelism.num_pp_microbatches)
    return int(config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size)


def require_whole_microbatches(config: Any) -> None:
    if counts_tokens(config):
        return
    batch, microbatch = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if batch % microbatch:
        raise ValueError(
            f"training.local_batch_size={batch} is not a multiple of"
            f" parallelism.pipeline_parallel_microbatch_size={microbatch}: change one of them"
        )


def batch_option(config: Any) -> tuple[str, int]:
    """TorchTitan's option for the batch of a pipeline's step, and a microbatch's share of its value."""
    if counts_tokens(config):
        return "--parallelism.num_pp_microbatches", 1
    return "--training.local_batch_size", config.parallelism.pipeline_parallel_microbatch_size


def length(training: Any) -> int:
    return int(training.max_context_length if hasattr(training, "max_context_length") else training.seq_len)


def shape(config: Any) -> tuple[int, ...]:
    """Shape of a microbatch's token ids: (sequences, length), or (tokens,)."""
    if counts_tokens(config):
        return (int(config.training.num_tokens_per_microbatch_per_dp_rank),)
    return (int(config.parallelism.pipeline_parallel_microbatch_size), length(config.training))


def rounds(config: Any, data_degree: int) -> int:
    """Number of pipeline steps before each step of the optimizer."""
    training = config.training
    if counts_tokens(config):
        tokens = training.num_tokens_per_microbatch_per_dp_rank * microbatches(config)
        return max(int(training.num_tokens_per_train_step // (tokens * data_degree)), 1)
    return max(int(training.global_batch_size // (training.local_batch_size * data_degree)), 1)


def chunks_of_loss(config: Any) -> int:
    """Number of chunks in which the loss runs the head's backward in F; 0 if the head runs like any other layer."""
    return getattr(getattr(config, "loss", None), "num_chunks", 0)  # 0.2 has no `loss`


def checkpointing_of(config: Any) -> Checkpointing:
    """Checkpointing in a job's config. A budget or a custom policy counts as selective."""
    if config is None:
        return Checkpointing.NONE
    mode = getattr(config, "mode", None)  # in 0.2; in 0.3 each kind has a class
    if mode in list(Checkpointing):
        return Checkpointing(mode)
    is_full = any(kind.__qualname__ == "FullAC.Config" for kind in type(config).__mro__)
    return Checkpointing.FULL if is_full else Checkpointing.SELECTIVE


def compiles_blocks(config: Any) -> bool:
    return bool(config.compile and config.compile.enable and "model" in config.compile.components)


def has_async_tensor(config: Any) -> bool:
    """Whether TP's collectives overlap products. In 0.2 parallelism has the option."""
    return any(getattr(each, "enable_async_tensor_parallel", False) for each in (config.parallelism, config.compile))
