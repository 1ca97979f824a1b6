"""The configs that `zbpipe demo` and the tests train: TorchTitan's debug models on the text of the standard library.

For `--module` of torchtitan 0.3 and its main branch. Data, tokenizer and batch size differ from TorchTitan's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from zbpipe.cli.demo import python_text
from zbpipe.cli.demo.launch import write_steps
from zbpipe.frameworks.titan import batches


class JsonLinesMetrics(MetricsProcessor):  # type: ignore[misc]
    """TorchTitan's metrics. Rank 0 also writes them to a file, one JSON object per step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        json_lines: str = ""
        """The file to append to; empty for none."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.logger: BaseLogger
        super().__init__(config, **kwargs)
        if config.json_lines and dist.get_rank() == 0:
            write_steps(self.logger, Path(config.json_lines))


class ByteTokenizer(python_text.ByteTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass


def llama3_python_stdlib() -> Trainer.Config:
    return _on_python_stdlib(llama3_debugmodel())


def deepseek_v3_python_stdlib() -> Trainer.Config:
    """DeepSeek V3's debug model: latent attention, and experts in all layers but the first."""
    return _on_python_stdlib(deepseek_v3_debugmodel())


def _on_python_stdlib(config: Trainer.Config) -> Trainer.Config:
    """The config in float32, so that only rounding makes the losses of two schedules differ."""
    config.tokenizer = ByteTokenizer.Config()
    config.hf_assets_path = str(Path(__file__).parent)
    config.dataloader = make_dataloader_config()
    config.metrics = JsonLinesMetrics.Config(
        **{field.name: getattr(config.metrics, field.name) for field in fields(config.metrics)}
    )
    if batches.counts_tokens(config):
        config.training.max_context_length = config.training.num_tokens_per_microbatch_per_dp_rank = _LENGTH
        config.parallelism.num_pp_microbatches = 8
        config.validator.dataloader = make_dataloader_config()  # its command line names no data set
    else:
        config.training.seq_len = _LENGTH
    config.training.mixed_precision_param = "float32"
    config.debug.seed = 0
    return config


_LENGTH = 256
"""Tokens per sequence."""


def make_dataloader_config() -> Any:
    if find_spec("torchtitan.components.data") is None:
        from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

        python_text.register()
        return HuggingFaceTextDataLoader.Config(dataset=python_text.NAME)
    # The main branch.
    from torchtitan.components import data
    from torchtitan.hf_datasets.text_datasets import TextProcessor

    source = data.HuggingFaceStreamingSource.Config(path="text", split="train", load_dataset_kwargs=python_text.READER)
    files = data.SingleDatasetConfig(source=source, processor=TextProcessor.Config())
    return data.GrainDataLoader.Config(dataset=data.ConcatThenSplitPackingConfig(dataset=files), shuffle=False)
