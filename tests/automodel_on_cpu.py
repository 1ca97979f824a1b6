"""NeMo AutoModel's command line on a machine without a GPU, with one config after the other."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from nemo_automodel._transformers import auto_model
from nemo_automodel.cli.app import main
from nemo_automodel.components._peft.lora import LinearLoRA
from nemo_automodel.components.models.qwen3_moe import model as qwen3_moe


def on_cpu(build: Callable[..., Any], *args: Any, **given: Any) -> Any:
    return build(*args, **given | {"device": torch.device("cpu")})


def initialize_alike(initialize: Callable[..., None], *args: Any) -> None:
    """Ranks draw LoRA's first weights for their own layers only, so a pipeline would begin with others."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        initialize(*args)


def stand_in_for_a_gpu() -> None:
    qwen3_moe.RotaryEmbedding = partial(on_cpu, qwen3_moe.RotaryEmbedding)
    initialize = LinearLoRA.init_lora_weights
    LinearLoRA.init_lora_weights = lambda *args: initialize_alike(initialize, *args)
    torch.cuda.current_device = lambda: 0
    torch.cuda.reset_peak_memory_stats = lambda *device: None
    for name in ("instantiate_infrastructure", "apply_model_infrastructure"):
        setattr(auto_model, name, partial(on_cpu, getattr(auto_model, name)))


if __name__ == "__main__":
    stand_in_for_a_gpu()
    program, *configs = sys.argv
    for config in configs:
        sys.argv = [program, config]
        main()
