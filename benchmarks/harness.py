"""What the benchmarks share: the command line, tables, files of figures, clocks, and meters of memory."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # defines the backend "fake" before torch 2.15
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from zbpipe.runtime._torch.on_meta import StorageMeter


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the module's docstring and all defaults."""
    return argparse.ArgumentParser(description=doc, formatter_class=_Formatter)


JSON: Any = {"type": Path, "metavar": "FILE", "help": "write all figures, in seconds and bytes"}
"""How benchmarks add their option `--json`."""


def write_json(path: Path | None, device: torch.device | str, results: object) -> None:
    """Write the results, which may contain dataclasses, with `about(device)`; nothing without a path."""
    if path:
        path.write_text(json.dumps({**about(device), "results": results}, indent=2, default=asdict) + "\n")


def about(device: torch.device | str) -> dict[str, str]:
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "python": platform.python_version(),
    }


def choose_device(asked: str | None, num_ranks: int = 1) -> torch.device:
    """The device that was asked for; else the first GPU if there is one for each rank (or a ROCm one), else the CPU."""
    kind = asked or ("cuda" if torch.cuda.device_count() >= num_ranks else "cpu")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned to the left."""
    rules = ["---" if column < left else "---:" for column in range(len(heads))]
    return "\n".join([_row(heads), f"|{'|'.join(rules)}|", *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@contextmanager
def single_rank(rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """A process group whose other ranks are fake. It sends nothing; gloo would look for a network."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Seconds from the call to the end of the device's work."""
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def distance(found: Tensor, expected: Tensor) -> float:
    """Of two gradients, as a share of the expected one's norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


class Meter(Protocol):
    """Counts bytes from 0 at its entry; tensors that existed before do not count."""

    @property
    def live(self) -> int:
        """Bytes alive now."""

    @property
    def peak(self) -> int:
        """Most bytes alive since entry, or since `forget_peak`."""


def meter(device: torch.device) -> AbstractContextManager[Meter]:
    return _CudaMeter(device) if device.type == "cuda" else StorageMeter()


def forget_peak(bytes_: Meter, device: torch.device) -> None:
    """Restart `bytes_.peak` from the bytes alive now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        bytes_.peak = bytes_.live  # type: ignore[misc]


class _CudaMeter:
    """Asks the allocator, so it also counts workspaces of kernels, and rounds every tensor up to 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> _CudaMeter:
        gc.collect()  # cycles of earlier runs would be freed meanwhile
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class StageOfKnownShapes(PipelineStage):
    """A stage with `input_args` and `output_args` in a fake process group. It receives zeros."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _fill_with_zeros(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _fill_with_zeros(super().get_bwd_recv_ops(bwd_chunk_id))

    def _vote(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ones(1)

    # torch 2.13 asks all ranks whether their shapes are known. Later versions ask no fake ones.
    _warmup_forward_vote = _warmup_backward_result = _vote


def _fill_with_zeros(receives: list[dist.P2POp]) -> list[dist.P2POp]:
    for each in receives:
        each.tensor.detach().zero_()
    return receives
