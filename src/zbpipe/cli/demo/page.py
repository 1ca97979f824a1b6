"""The demo's page: a schedule as planned, and below it as measured."""

from __future__ import annotations

from html import escape

from zbpipe.simulator.timeline import Timeline
from zbpipe.views.html import html

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name}: planned and measured</title>
<style>
  html, body {{ margin: 0; height: 100%; }}
  iframe {{ border: 0; display: block; height: 50%; width: 100%; }}
</style>
{frames}
</html>
"""


def join_pages(planned: Timeline, measured: Timeline) -> str:
    """One file, with both pages of `zbpipe.views.html` in it, one above the other."""
    pages = {"planned": html(planned, "as planned"), "measured": html(measured, "as measured")}
    frames = (f'<iframe title="{what}" srcdoc="{escape(page)}"></iframe>' for what, page in pages.items())
    return _PAGE.format(name=escape(planned.schedule.name), frames="\n".join(frames))
