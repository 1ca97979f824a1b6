"""A text that every machine has: the source code of Python's standard library, byte by byte.

`zbpipe.cli.demo.hugging_face_text` and `zbpipe.cli.demo.grain_text` pass it to TorchTitan.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

NAME = "python_stdlib"
FOLDER = sysconfig.get_path("stdlib")
_BYTES = 256


@cache
def list_files(folder: str) -> tuple[str, ...]:
    """All source files below a folder like the standard library's; ValueError if there are none."""
    parts = [part for part in Path(folder).iterdir() if part.name != "site-packages"]
    files = tuple(sorted(str(file) for part in parts for file in _find_sources(part)))
    if not files:
        raise ValueError(f"no Python sources below {folder}: set dataloader.dataset_path to a folder that has some")
    return files


def read(file: str) -> dict[str, str]:
    """A sample in the format of TorchTitan's data sets."""
    return {"text": Path(file).read_text(encoding="utf-8", errors="replace")}


def _find_sources(part: Path) -> Iterator[Path]:
    for file in part.rglob("*.py") if part.is_dir() else [part]:
        if file.suffix == ".py" and file.stat().st_size:
            yield file


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
