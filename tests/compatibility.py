"""docs/compatibility.md, put together from what tests saw: a section for each target, written by that target's tests.

A target is a framework on a version of torch, such as "torchtitan 0.3 with torch 2.15". Its test file runs what it
claims, makes a `Section`, and calls `compare`: with `--write-compatibility` its part of the page is written anew, and
the others stay as they are; without, it has to be what the page says, but for the last number of a release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"


class Row(NamedTuple):
    """A line of a table of features."""

    feature: str
    how: str
    outcome: str


class Table(NamedTuple):
    """A table with a heading of its own."""

    heading: str
    about: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]


class Section(NamedTuple):
    """What is known of one target."""

    title: str
    """By which the page knows it; it must not change from run to run."""
    about: str
    tables: Sequence[Table]
    untried: str = ""


def target(framework: str) -> str:
    """The title for what is installed, as in "torchtitan 0.3 with torch 2.15"."""
    return f"{framework} {_minor(framework)} with torch {_minor('torch')}"


def seen_with(*packages: str) -> str:
    """Exact versions, as in "torch 2.15.0 and torchtitan 0.3.0"."""
    return " and ".join(f"{package} {_release(package)}" for package in packages)


def features(heading: str, about: str, rows: Iterable[Row]) -> Table:
    """A table of features, how each was tested, and the outcome."""
    return Table(heading, about, ("feature", "tested how", "outcome"), list(rows))


def by_checkpointing(
    heading: str, about: str, outcomes: Mapping[tuple[str, str, str], str], schedules: Sequence[str]
) -> Table:
    """A line for each schedule; the outcomes are by schedule, checkpointing, and "eager" or "compiled"."""
    columns = list(dict.fromkeys((checkpointing, compiled) for _, checkpointing, compiled in outcomes))
    lines = [[schedule, *(outcomes[schedule, *column] for column in columns)] for schedule in schedules]
    return Table(heading, about, ["schedule", *map(", ".join, columns)], lines)


def compare_when_all_ran(
    request: pytest.FixtureRequest, parameter: str, everything: Set[Any], seen: Set[Any], section: Callable[[], Section]
) -> None:
    """At the end of a run: compare, unless only some of the cells were selected.

    Args:
        request: of the test that calls this.
        parameter: the name of the parameter by which pytest knows the cells.
        everything: all cells.
        seen: those that did what they should.
        section: makes this target's part of the page from them.
    """
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    if not everything <= {params[parameter] for params in calls if parameter in params}:
        pytest.skip("not all cells were selected")
    assert everything - seen == set(), "these failed"
    compare(section(), request.config.getoption("--write-compatibility"))


def compare(section: Section, write: bool) -> None:
    """Hold the page against `section`, or write that part of it."""
    page = PAGE.read_text()
    text = _text(section)
    if write:
        PAGE.write_text(_HEAD + "".join(f"\n{each}" for each in (_sections(page) | {section.title: text}).values()))
        return
    found = _sections(page).get(section.title)
    assert found is not None, f"the page has no section {section.title!r}: {_WAY_OUT}"
    assert without_patches(found) == without_patches(text), f"look at what changed in {section.title!r}; {_WAY_OUT}"


def without_patches(text: str) -> str:
    """With 2.14 in place of 2.14.1, and no line breaks: a patch release alone is no change."""
    return re.sub(r"\b(\d+\.\d+)\.\d+\b", r"\1", " ".join(text.split()))


def _sections(page: str) -> dict[str, str]:
    """By their titles."""
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in parts}


def _text(section: Section) -> str:
    blocks = [f"## {section.title}", _filled(section.about)]
    for table in section.tables:
        rules = "|---" * len(table.columns) + "|"
        lines = [_line(table.columns), rules, *map(_line, table.lines)]
        blocks += [f"### {table.heading}", _filled(table.about), "\n".join(lines)]
    return "\n\n".join(filter(None, (*blocks, _filled(section.untried)))) + "\n"


def _filled(text: str) -> str:
    """Paragraph by paragraph in lines of the width of this page."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(
        fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False) for paragraph in paragraphs
    )


def _line(fields: Iterable[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _minor(package: str) -> str:
    return ".".join(version(package).split(".")[:2])


def _release(package: str) -> str:
    return version(package).partition("+")[0]


_WAY_OUT = "the same tests with --write-compatibility write it anew"
_WIDTH = 120
_HEAD = """\
# What works together

Tests write this page: each section says what the tests of its target saw. Those that CI runs fail when they see
something else. Everything ran on the CPU over gloo, nothing on a GPU.
"""

TITAN = """\
"Works" means: in each of three optimizer steps the loss (within 1e-5) and the norm of the gradients (within 1e-4) are
those of the same job without a pipeline and without a compiler. The job is TorchTitan's debug model, started by
`zbpipe.titan.train` from a seed checkpoint, on two pipeline ranks with four microbatches in float32. Nothing is
compiled a second time for a later microbatch, no graph breaks, and no weight gradient is computed in I instead of W.
Where a job differs, its row says so.
"""
"""What all sections of TorchTitan say."""
