"""Trains TorchTitan's Llama 3 debug model on the lines of a text file, without padding.

    PYTHONPATH=examples/torchtitan torchrun --nproc-per-node 2 -m zbpipe.titan.train --module packed_lines \\
        --config llama3_packed --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZB \\
        --training.local_batch_size 8 --dataloader.dataset_path lines.txt

Only the dataloader differs from TorchTitan's own: it yields microbatches of different sizes. A step takes as many as
`local_batch_size` says, and divides the loss by their tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import zbpipe
from zbpipe.cli.demo.models03 import llama3_python_stdlib


class PackedDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Whole lines, packed for each step into microbatches of nearly equal time. All data-parallel ranks read all lines,
    and take their part of the pack."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        microbatches: int = 8
        """Number of microbatches that are packed together: those of a step."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, seq_len: int, **unused: Any
    ) -> None:
        self._microbatches, self._ranks, self._rank = config.microbatches, dp_world_size, dp_rank
        self._tokens = dp_world_size * config.microbatches * seq_len
        lines = Path(config.dataset_path or __file__).read_text().splitlines()
        samples = (torch.tensor(tokenizer.encode(line, add_bos=True, add_eos=True)) for line in lines)
        self._samples = [(each[:-1][:seq_len], each[1:][:seq_len]) for each in samples]
        self._next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            samples, room = list[tuple[Tensor, Tensor]](), self._tokens
            while (size := len((sample := self._samples[self._next % len(self._samples)])[0])) <= room:
                samples.append(sample)
                room -= size
                self._next += 1
            lengths = [len(tokens) for tokens, _ in samples]
            packs = zbpipe.pack(lengths, microbatches=self._microbatches, ranks=self._ranks)
            for each in packs[self._rank]:
                tokens, labels = zip(*(samples[number] for number in each.samples), strict=True)
                positions = torch.cat([torch.arange(len(sample)) for sample in tokens])
                yield {"input": torch.cat(tokens)[None], "positions": positions[None]}, torch.cat(labels)[None]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict.get("next", 0)


def llama3_packed() -> Trainer.Config:
    config = llama3_python_stdlib()
    config.model_spec = model_registry("debugmodel", attn_backend="varlen")  # on the CPU causal attention replaces it
    config.dataloader = PackedDataLoader.Config()
    config.loss = config.loss.loss_fn  # ChunkedLossWrapper takes multiples of its number of chunks
    return config
