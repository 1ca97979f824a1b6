"""Would W be faster as one product over several microbatches? Paired against one product for each, which zbpipe runs.

The two give the same sum: dW of microbatches 1 and 2 is the product of both x and both dY, put one under the other. To
put them so takes a copy of each. Run it from anywhere: `python benchmarks/merged_w.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

# (rows of a microbatch, in, out): the first layer of the feed-forward in the sizes of split_backward.py
SHAPES = {
    "cpu": {
        "tiny": (8, 32, 112),
        "small": (128, 128, 448),
        "medium": (512, 256, 896),
        "large": (1024, 512, 1792),
    },
    "cuda": {
        "tiny": (16, 64, 224),
        "small": (2048, 1024, 3584),
        "medium": (4096, 2048, 7168),
        "large": (4096, 4096, 14336),
    },
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def ratios(shape: tuple[int, int, int], microbatches: int, rounds: int, device: str) -> list[float]:
    """Seconds of the merged product over seconds of the separate ones, once a round."""
    rows, in_features, out_features = shape
    options: dict[str, Any] = {"device": device, "dtype": DTYPES[device]}
    grad = torch.zeros(out_features, in_features, **options)
    xs = [torch.randn(rows, in_features, **options) for _ in range(microbatches)]
    dys = [torch.randn(rows, out_features, **options) for _ in range(microbatches)]

    def separate() -> None:
        for x, dy in zip(xs, dys, strict=True):
            grad.addmm_(dy.t(), x)

    def merged() -> None:
        grad.addmm_(torch.cat(dys).t(), torch.cat(xs))

    for function in (separate, merged, separate, merged):
        function()
    return [seconds(merged, device) / seconds(separate, device) for _ in range(rounds)]


def seconds(function: Callable[[], None], device: str) -> float:
    """From the call to the end of the device's work."""
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=51, help="at least 2 (default: %(default)s)")
    parser.add_argument("--device", choices=list(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, shape in SHAPES[arguments.device].items():
        for microbatches in (2, 4):
            first, median, third = statistics.quantiles(
                ratios(shape, microbatches, arguments.rounds, arguments.device), n=4
            )
            print(f"{name:6} {microbatches} microbatches: merged / separate {median:.2f} ({first:.2f} to {third:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
