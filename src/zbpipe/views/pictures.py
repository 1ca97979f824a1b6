"""Drawings for the methods of timelines: in the terminal and in notebooks."""

from __future__ import annotations

from html import escape

from rich.console import Console

from zbpipe.schedule.ir import Schedule
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.views.grid import grid
from zbpipe.views.svg import svg

_MOST_OPS = 20_000
"""Largest number of ops of a picture in a notebook, which stores it in its file."""


def show(timeline: Timeline) -> None:
    """Draw it in the terminal, as wide and high as the terminal is."""
    console = Console(highlight=False)
    console.print(grid(timeline, console.width, console.height, colours=console.color_system is not None))


def draw_in_notebook(thing: Schedule | Timeline) -> str:
    """The `repr` and the picture below it. For a schedule, F, I and W take a second each."""
    text = f"<code>{escape(repr(thing))}</code>"
    schedule = thing if isinstance(thing, Schedule) else thing.schedule
    if sum(map(len, schedule)) > _MOST_OPS:
        return text
    try:
        return text + svg(simulate(thing) if isinstance(thing, Schedule) else thing)
    except ValueError:  # a schedule that cannot run is still data
        return text
