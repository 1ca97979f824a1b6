"""The options of commands that vary times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from zbpipe.cli.base import COUNT, parse_with
from zbpipe.simulator.timeline import Timeline

if TYPE_CHECKING:
    from zbpipe.simulator.jitter import Jitter
    from zbpipe.views.report import Vary


def _parse(text: str) -> Jitter:
    from zbpipe.simulator.jitter import Jitter

    return Jitter.parse(text)


_jitter_option = click.option(
    "--jitter",
    callback=parse_with(_parse),
    metavar="WORDS",
    help="Varying times, separated by commas: ops=0.1 (standard deviation of an op's time, as a share), links=0.5 (of a"
    " message's), delay=0.2 (seconds that a message is late on average), burst=0.01 (the chance that a rank or a link"
    " is slow for a step) with burst-factor=2 and burst-delay=1, slow-rank=3:1.2, slow-link=0-1:0.5"
    " (docs/messages.md).",
)
_samples_option = click.option(
    "--samples",
    type=COUNT,
    default=1000,
    show_default=True,
    metavar="N",
    help="How many steps to simulate with --jitter.",
)


def jitter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--jitter and --samples."""
    return _jitter_option(_samples_option(command))


def vary(jitter: Jitter, samples: int) -> Vary:
    """A function that returns the step times of a timeline's schedule."""

    def varied(timeline: Timeline) -> dict[str, float]:
        from zbpipe.simulator.jitter import step_times

        return step_times(timeline.schedule, timeline.costs, jitter, samples=samples).record()

    return varied
