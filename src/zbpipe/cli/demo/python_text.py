"""A text that every machine has: the source code of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from operator import itemgetter
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

NAME = "python_stdlib"
READER: dict[str, Any] = {
    "data_files": sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py"))),
    "sample_by": "document",
    "encoding_errors": "replace",
}
"""Arguments of the "text" reader of Hugging Face's datasets: one file per sample, no download."""
_BYTES = 256


def register() -> None:
    """Add the data set "python_stdlib" to those of TorchTitan 0.2 and 0.3."""
    from datasets import load_dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    DATASETS[NAME] = DatasetConfig(
        path="text",
        loader=lambda path: load_dataset(path, split="train", streaming=True, **READER),
        sample_processor=itemgetter("text"),
    )


class ByteTokenizer(BaseTokenizer):  # type: ignore[misc]
    """UTF-8 bytes as tokens, and two more tokens for the beginning and the end of a document."""

    def __init__(self, *unused: Any, **also_unused: Any) -> None:
        super().__init__()
        self.bos_id = _BYTES
        self.eos_id = _BYTES + 1

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [self.bos_id] * add_bos + list(text.encode()) + [self.eos_id] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < _BYTES).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return _BYTES + 2
