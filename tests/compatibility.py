"""docs/compatibility.md, put together from what tests saw: a section for each target, written by that target's tests.

A target is a framework on a version of torch, such as "torchtitan 0.3 with torch 2.15". Its test file runs what it
claims, makes a `Section`, and calls `compare`: with `--write-compatibility` its part of the page is written anew;
without, it has to be what the page says, but for the last number of a release.
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
    own: str
    """Its first paragraph."""
    about: str
    """Paragraphs on its framework, which all of its sections share."""
    tables: Sequence[Table]


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
    if write:
        PAGE.write_text(put(section, page))
        return
    about, sections = read(page).get(section.title.split()[0], ("", {}))
    assert section.title in sections, f"the page has no section {section.title!r}: {_WAY_OUT}"
    recorded = _lines(f"{about}\n\n{sections[section.title]}")
    seen = _lines(f"{_filled(section.about)}\n\n{_drawn(section)}")
    changed = find_changes(recorded, seen)
    assert not changed, f"look at what changed in {section.title!r}; {_WAY_OUT}: {changed}"


def find_changes(recorded: set[str], seen: set[str]) -> set[str]:
    """Lines of the page that were not seen, and the reverse.

    Of cells that the page calls untried any outcome may be seen: which torch pip installs changes.
    """
    untried = {each for each in recorded if each.endswith(_UNTRIED)}
    known = tuple(re.sub(f"({re.escape(_UNTRIED[:-2])})+ \\|$", " |", each) for each in untried)
    return set(recorded - seen - untried) | {each for each in seen - recorded if not each.startswith(known)}


def read(page: str) -> dict[str, tuple[str, dict[str, str]]]:
    """By framework what all of its sections share, and its sections by their titles."""
    frameworks = {}
    for framework in re.split(r"^## ", page.removesuffix(_by_hand(page)), flags=re.MULTILINE)[1:]:
        first, *parts = (each.partition("\n") for each in re.split(r"^### ", framework, flags=re.MULTILINE))
        frameworks[first[0]] = first[2].strip(), {title: text.strip() for title, _, text in parts}
    return frameworks


def put(section: Section, page: str) -> str:
    """The page with this section, newer versions first."""
    frameworks, name = read(page), section.title.split()[0]
    _, sections = frameworks.get(name, ("", {}))
    frameworks[name] = _filled(section.about), sections | {section.title: _drawn(section)}
    blocks = [_HEAD.strip()]
    for framework, (about, of_framework) in frameworks.items():
        blocks += [f"## {framework}", about]
        for title in sorted(of_framework, key=lambda each: [*map(int, re.findall(r"\d+", each))], reverse=True):
            blocks += [f"### {title}", of_framework[title]]
    return "\n\n".join(blocks) + "\n" + _by_hand(page)


def _by_hand(page: str) -> str:
    """The end of the page, which no test writes; empty if there is none."""
    return "".join(page.partition("\n## By hand")[1:])


def _lines(text: str) -> set[str]:
    """Paragraphs and lines of tables, with 2.14 in place of 2.14.1: a patch release alone is no change."""
    text = re.sub(r"\b(\d+\.\d+)\.\d+\b", r"\1", text)
    blocks = (each.splitlines() if each.startswith("|") else [" ".join(each.split())] for each in text.split("\n\n"))
    return {line for block in blocks for line in block}


def _drawn(section: Section) -> str:
    blocks = [_filled(section.own)]
    for table in section.tables:
        lines = [_line(table.columns), "|---" * len(table.columns) + "|", *map(_line, table.lines)]
        blocks += [f"#### {table.heading}", _filled(table.about), "\n".join(lines)]
    return "\n\n".join(filter(None, blocks))


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


_UNTRIED = " | not tried |"
_WAY_OUT = "the same tests with --write-compatibility write it anew"
_WIDTH = 120
_HEAD = """\
# What works together

Tests write this page, except its end. A test of CI fails if it sees another outcome. Everything ran on the CPU over
gloo, nothing on a GPU.
"""

TITAN = """\
"Works" means: in each of two optimizer steps the loss (within 1e-5) and the norm of the gradients (within 1e-4) are
those of the same job without a pipeline and without a compiler. The job is TorchTitan's debug model, started by
`zbpipe.titan.train` from a seed checkpoint, on two pipeline ranks with four microbatches in float32. Nothing is
compiled a second time for a later microbatch, no graph breaks, and no weight gradient is computed in I instead of W.
Where a job differs, its row says so.
"""
"""What all sections of TorchTitan say."""
