"""The models that `zbpipe demo` and the tests train: TorchTitan's debug models on the text of the standard library.

For `--experimental.custom_import` of torchtitan 0.2, which then knows these names as `--model.name`. Data, tokenizer
and metrics differ from TorchTitan's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.models import deepseek_v3, llama3
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from zbpipe.cli.demo import python_text
from zbpipe.cli.demo.launch import METRICS, write_steps


def _json_lines_metrics(job_config: JobConfig, parallel_dims: Any, *args: Any, **kwargs: Any) -> MetricsProcessor:
    """TorchTitan's metrics. Rank 0 also writes them to a file, one JSON object per step."""
    processor = MetricsProcessor(job_config, parallel_dims)
    if dist.get_rank() == 0:
        write_steps(processor.logger, Path(job_config.job.dump_folder) / METRICS)
    return processor


def on_python_stdlib(spec: TrainSpec) -> TrainSpec:
    return replace(
        spec,
        build_tokenizer_fn=lambda job_config: python_text.ByteTokenizer(),
        build_metrics_processor_fn=_json_lines_metrics,
    )


python_text.register()
register_train_spec("llama3_python_stdlib", on_python_stdlib(llama3.get_train_spec()))
register_train_spec("deepseek_v3_python_stdlib", on_python_stdlib(deepseek_v3.get_train_spec()))
