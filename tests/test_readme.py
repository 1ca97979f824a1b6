"""The README's first table is what the simulator says, with searches as long as its readers'."""

from __future__ import annotations

import re

from commands import json_of
from documents import ROOT


def rows_of_the_table() -> dict[str, tuple[str, ...]]:
    """The cells of the README's first table, by what the row is about."""
    rows = re.findall(r"^\| (.*?) \|(.*)\|$", (ROOT / "README.md").read_text().split("```")[0], re.MULTILINE)
    return {name.strip("*"): tuple(each.strip(" *") for each in cells.split("|")) for name, cells in rows[1:]}


def simulated_row(line: str) -> tuple[str, ...]:
    """What the README has to say of a command's schedule: its step relative to two others, and its memory."""
    found, *others = (json_of(f"{each} -p 8 -m 32") for each in (line, "simulate 1F1B", "simulate Interleaved1F1B"))
    shorter = [f"{1 - found['makespan'] / other['makespan']:.1%}".replace("%", " % shorter") for other in others]
    return *shorter, f"{max(found['peak_memory']) / max(others[0]['peak_memory']):.2f}x"


def test_the_readme_compares_as_the_simulator_does() -> None:
    rows = rows_of_the_table()
    assert len(rows) == 5
    for name, cells in rows.items():
        expected = simulated_row(f"simulate {name.replace(' (torch)', '').replace(', `', ' ').rstrip('`')}")
        assert cells == tuple("" if each.startswith("0.0 %") else each for each in expected), name
