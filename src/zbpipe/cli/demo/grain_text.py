"""The text of `zbpipe.cli.demo.python_text` for TorchTitan's main branch, which loads data by grain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    GrainDataLoader,
    SingleDatasetConfig,
)
from torchtitan.config import Configurable
from torchtitan.hf_datasets.text_datasets import TextProcessor

from zbpipe.cli.demo.python_text import FOLDER, list_files, read


class PythonFiles(Configurable):  # type: ignore[misc]
    """One file a sample."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        folder: str = FOLDER

    def __init__(self, config: Config, **unused: Any) -> None:
        self._files = list_files(config.folder)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, str]:
        return read(self._files[index])


def make_dataloader_config() -> GrainDataLoader.Config:
    """Of a loader that reads the files in their order, cut into sequences without padding."""
    files = SingleDatasetConfig(
        source=PythonFiles.Config(), processor=TextProcessor.Config(), post_filters=(_has_text,)
    )
    return GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=files), shuffle=False)


def _has_text(sample: Any) -> bool:
    return sample is not None
