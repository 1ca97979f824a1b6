"""The options of a real job, from which `estimate`, `plan` and `compare` take its costs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zbpipe.cli.base import COUNT, EXISTING, in_one_line, options_of, parse_with
from zbpipe.costs.transformer import Checkpointing
from zbpipe.schedule.garbage import importing
from zbpipe.schedule.registry import resolve

if TYPE_CHECKING:
    from zbpipe.estimation.workload import Workload

titan_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF THE JOB]")


@dataclass(frozen=True)
class JobOptions:
    layers: Path | None
    hf: Path | None
    gpus: int | None
    device: str | None
    tflops: float | None
    link: tuple[float, ...] | None
    arguments: tuple[str, ...]

    @property
    def rates(self) -> dict[str, Any]:
        return {"tflops": self.tflops, "link": self.link}

    def workload(self) -> Workload:
        if self.gpus is None:
            raise click.UsageError("Missing option '--gpus'", click.get_current_context())
        if self.device is not None:
            from zbpipe.estimation.devices import find

            find(self.device)  # before the import of TorchTitan, which takes seconds
        if self.layers and self.hf:
            raise click.UsageError("--layers and --hf exclude each other: omit one", click.get_current_context())
        if self.hf is not None:
            return _of_transformers(self.hf, self.gpus, self.arguments)
        if self.layers is not None:
            from zbpipe.estimation.layers_file import load_layers

            self.require_no_arguments("; --layers takes no options of TorchTitan")
            return load_layers(self.layers, self.gpus)
        require_job(self.arguments)
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)  # TorchTitan's warnings concern a running job
        try:
            with in_one_line(ImportError), importing():
                from zbpipe.frameworks.titan.command_line import read_workload

                return read_workload(self.arguments, self.gpus)
        finally:
            logging.disable(disabled)

    def require_no_arguments(self, why: str = "") -> None:
        if self.arguments:
            words = f"unknown options: {' '.join(self.arguments)}{why}"
            raise click.UsageError(words, click.get_current_context())


def require_job(arguments: Sequence[str]) -> None:
    if not arguments:
        ways = "--module and --config, --job.config_file for TorchTitan 0.2, --hf config.json, or a file of --layers"
        raise click.UsageError(f"name the job: {ways}", click.get_current_context())


_OF_TRANSFORMERS = click.Command(
    "",
    params=[
        *(click.Option([f"--{name}"], type=COUNT, default=1) for name in ("pp", "tp", "cp", "ep")),
        click.Option(["--batch"], type=COUNT),
        click.Option(["--seq-len"], type=COUNT, default=8192),
        click.Option(
            ["--gradient-checkpointing", "checkpointing"], default="full", callback=parse_with(Checkpointing.parse)
        ),
        click.Option(["--dtype"], type=click.Choice(["float32", "bfloat16"]), default="float32"),
        click.Option(["--compile", "compiled"], is_flag=True),
        click.Option(["--now", "schedule"], default="1F1B", callback=parse_with(lambda name: resolve(name).name)),
    ],
)
"""Options of a job with a model of transformers, written among TorchTitan's."""


def _of_transformers(config: Path, gpus: int, arguments: Sequence[str]) -> Workload:
    try:
        given = _OF_TRANSFORMERS.make_context("", list(arguments)).params
    except click.UsageError as error:
        raise click.UsageError(f"--hf: {error.format_message()}", click.get_current_context()) from None
    with in_one_line(ImportError), importing():
        from zbpipe.frameworks.whole_model.counting import Job, read_workload

        return read_workload(config, Job(gpus=gpus, **given))


def numbers(text: str, what: str) -> tuple[float, ...]:
    """Numbers with commas between them. ValueError: the text is not `what`."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(f"{text!r} is not {what}") from None


job_options = options_of(
    "job",
    JobOptions,
    click.option(
        "--layers", type=EXISTING, metavar="FILE", help="A model that is not TorchTitan's: docs/costs-file.md."
    ),
    click.option(
        "--hf",
        type=EXISTING,
        metavar="CONFIG.json",
        help="A causal model of transformers. Its job has the options --pp, --tp, --cp, --ep, --batch, --seq-len,"
        " --gradient-checkpointing, --dtype, --compile and --now: docs/models.md.",
    ),
    click.option("--gpus", type=COUNT, metavar="N", help="Number of GPUs of the whole job."),
    click.option(
        "--device",
        metavar="NAME",
        help="A100 (80 GB), H100, H200, B200, GB200, L40S, MI250X (one die), MI300X, MI325X or MI355X.",
    ),
    click.option("--tflops", type=float, metavar="X", help="TFLOP/s that a GPU sustains, in place of the table's."),
    click.option(
        "--link",
        callback=parse_with(lambda text: numbers(text, "a bandwidth in GB/s; write for example 50, or 450,50")),
        metavar="GB/S",
        help="Bandwidth of a GPU to other nodes, in one direction; or two numbers: inside a node, between nodes.",
    ),
    titan_arguments,
)
