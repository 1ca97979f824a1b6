"""Tries the installed wheel, with its own interpreter and from an empty folder: `make wheel` runs it."""

import importlib.metadata
import importlib.resources
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

import zbpipe

VERSION = importlib.metadata.version("zbpipe")


def command(*arguments: str) -> str:
    """What the `zbpipe` command prints."""
    zbpipe_command = str(Path(sys.executable).with_name("zbpipe"))
    return subprocess.run([zbpipe_command, *arguments], check=True, capture_output=True, text=True, timeout=240).stdout


def check_files() -> None:
    """It is the wheel's package and not a clone's, and type checkers see its types."""
    assert Path(zbpipe.__file__).is_relative_to(sys.prefix), zbpipe.__file__
    assert zbpipe.__version__ == VERSION
    assert importlib.resources.files("zbpipe").joinpath("py.typed").is_file()


def check_command() -> None:
    assert VERSION in command("--version")
    assert "ZBV" in command("show", "ZBV", "-p", "4", "-m", "8")
    command("show", "ZBV", "-p", "4", "-m", "8", "--html", "zbv.html")  # needs a file of the package
    assert Path("zbv.html").stat().st_size > 0


def check_step() -> None:
    """One step of ZBV on one rank gives the gradients of an ordinary backward."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    stages = [PipelineStage(layer, i, 2, torch.device("cpu")) for i, layer in enumerate(layers)]
    x = torch.randn(8, 4)
    schedule = zbpipe.build_pipeline_schedule("ZBV", stages, 4, torch.nn.functional.mse_loss)
    schedule.step(x, target=x)
    found = [layer.weight.grad for layer in layers]
    for layer in layers:
        layer.zero_grad()
    torch.nn.functional.mse_loss(layers[1](layers[0](x)), x).backward()
    torch.testing.assert_close(found, [layer.weight.grad for layer in layers])
    dist.destroy_process_group()


if __name__ == "__main__":
    assert not os.listdir(), "start it from an empty folder"
    assert zbpipe.validate(zbpipe.generate("ZBV", 4, 8)) == []
    check_files()
    check_command()
    check_step()
    print(f"the wheel of zbpipe {VERSION} works")
