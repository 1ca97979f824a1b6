"""A text that every machine has: the source code of Python's standard library, byte by byte.

`register()` adds it to TorchTitan's data sets as "python_stdlib". Like TorchTitan's other data sets it is streamed,
split by data-parallel rank, and resumed from a checkpoint.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

NAME = "python_stdlib"
_BYTES = 256


def register() -> None:
    """Add the data set "python_stdlib" to TorchTitan's."""
    DATASETS[NAME] = DatasetConfig(
        path=sysconfig.get_path("stdlib"), loader=_load, sample_processor=lambda sample: str(sample["text"])
    )


def _load(path: str) -> IterableDataset:
    files = sorted(
        str(file) for part in Path(path).iterdir() if part.name != "site-packages" for file in _find_sources(part)
    )
    if not files:
        raise ValueError(f"no Python sources below {path}: set dataloader.dataset_path to a folder that has some")
    return IterableDataset.from_generator(_read, gen_kwargs={"files": files})


def _find_sources(part: Path) -> Iterator[Path]:
    for file in part.rglob("*.py") if part.is_dir() else [part]:
        if file.suffix == ".py" and file.stat().st_size:
            yield file


def _read(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        yield {"text": Path(file).read_text(encoding="utf-8", errors="replace")}


class ByteTokenizer(BaseTokenizer):  # type: ignore[misc]
    """The bytes of UTF-8 as tokens, and two more tokens for the beginning and the end of a document."""

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
