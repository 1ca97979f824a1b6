"""The text of `zbpipe.cli.demo.python_text` as a data set of TorchTitan 0.2 and 0.3.

Like TorchTitan's other data sets it is streamed, split by data-parallel rank, and resumed from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from datasets import IterableDataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from zbpipe.cli.demo.python_text import FOLDER, NAME, list_files, read


def register() -> None:
    """Add the data set "python_stdlib" to TorchTitan's data sets."""
    DATASETS[NAME] = DatasetConfig(path=FOLDER, loader=_load, sample_processor=lambda sample: str(sample["text"]))


def _load(path: str) -> IterableDataset:
    return IterableDataset.from_generator(_read, gen_kwargs={"files": list(list_files(path))})


def _read(files: list[str]) -> Iterator[dict[str, str]]:
    yield from map(read, files)
