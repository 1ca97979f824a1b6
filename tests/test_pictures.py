"""Schedules, timelines and plans show themselves: in notebooks, in the terminal, and as files."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import zbpipe
from zbpipe.simulator import Timeline
from zbpipe.views.html import html
from zbpipe.views.svg import svg

SCHEDULE = zbpipe.generate("ZBV", 2, 4)
TIMELINE = zbpipe.simulate(SCHEDULE)


def test_without_costs_each_op_takes_a_second_of_its_rank() -> None:
    assert TIMELINE.makespan == zbpipe.simulate(SCHEDULE, (1, 1, 1)).makespan == 12.5


def test_files(tmp_path: Path) -> None:
    TIMELINE.svg(tmp_path / "a.svg")
    TIMELINE.html(str(tmp_path / "a.html"))
    assert (tmp_path / "a.svg").read_text() == svg(TIMELINE)
    assert (tmp_path / "a.html").read_text() == html(TIMELINE)


def test_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    TIMELINE.show()
    assert capsys.readouterr().out.startswith("rank 0 F0F1")


@pytest.mark.parametrize("thing", [SCHEDULE, TIMELINE, zbpipe.plan(2, 4, (1, 1, 1), placements=["v"], budget=1e3)])
def test_in_notebooks(thing: zbpipe.Schedule | Timeline | zbpipe.Plan) -> None:
    text, _, picture = thing._repr_html_().partition("</code>")
    assert text.startswith("<code>")
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_what_cannot_run_or_is_very_long_has_no_picture() -> None:
    backward_first = zbpipe.Schedule.from_csv("0B0,0F0")
    assert backward_first._repr_html_().endswith("</code>")
    assert zbpipe.generate("1F1B", 8, 2000)._repr_html_().endswith("</code>")


def test_a_plan_is_a_line() -> None:
    plan = zbpipe.plan(2, 4, (1, 1, 1), placements=["single"], budget=1e3)
    assert repr(plan).startswith("Plan('")
    assert repr(plan).count("\n") == 0
    assert len(repr(plan)) < 200
