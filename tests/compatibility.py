"""docs/compatibility.md, put together from what tests saw: a section for each target, written by that target's tests.

A target is a framework on a version of torch, such as "torchtitan 0.3 with torch 2.15". Its test file runs what it
claims, makes a `Section`, and calls `compare`: with `--write-compatibility` its part of the page is written anew;
without, it has to be what the page says, but for the last number of a release. The page has full tables for the newest
versions of each framework, and of older versions the lines that differ from those. `read` completes these again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
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
    """A table with a heading of its own; the same heading has the same columns in all sections of a framework."""

    heading: str
    about: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]

    @property
    def outcomes(self) -> dict[Labels, Outcomes]:
        """By the labels of a line its outcomes."""
        labels = 2 if "tested how" in self.columns else 1
        return {tuple(line[:labels]): tuple(line[labels:]) for line in self.lines}


Labels = tuple[str, ...]
Outcomes = tuple[str, ...]


class Section(NamedTuple):
    """What is known of one target."""

    title: str
    """By which the page knows it; it must not change from run to run."""
    own: str
    """A paragraph that the page has for every version."""
    about: str
    """Paragraphs that it has for the newest versions only."""
    tables: Sequence[Table]

    @property
    def framework(self) -> str:
        return self.title.split()[0]

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.title)))


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
    recorded = read(page)
    if write:
        PAGE.write_text(render(recorded | {section.title: section}, by_hand(page)))
        return
    assert section.title in recorded, f"the page has no section {section.title!r}: {_WAY_OUT}"
    text = render(recorded | {section.title: _without_new(section, recorded[section.title])}, by_hand(page))
    assert without_patches(page) == without_patches(text), f"look at what changed in {section.title!r}; {_WAY_OUT}"


def _without_new(section: Section, recorded: Section) -> Section:
    """The section without what it has seen of lines that the page calls untried: which torch pip installs changes."""
    untried = {
        (table.heading, labels): found
        for table in recorded.tables
        for labels, found in table.outcomes.items()
        if set(found) == {_UNTRIED}
    }
    tables = [
        table._replace(
            lines=[[*labels, *untried.get((table.heading, labels), found)] for labels, found in table.outcomes.items()]
        )
        for table in section.tables
    ]
    return section._replace(tables=tables)


def by_hand(page: str) -> str:
    """The end of the page, which no test writes; empty if there is none."""
    return "".join(page.partition(_BY_HAND)[1:])


def without_patches(text: str) -> str:
    """With 2.14 in place of 2.14.1, and no line breaks: a patch release alone is no change."""
    return re.sub(r"\b(\d+\.\d+)\.\d+\b", r"\1", " ".join(text.split()))


def read(page: str) -> dict[str, Section]:
    """All sections by their titles, with full tables."""
    sections: dict[str, Section] = {}
    for framework in re.split(r"^## ", page.removesuffix(by_hand(page)), flags=re.MULTILINE)[1:]:
        newest: Section | None = None
        for part in re.split(r"^### ", framework, flags=re.MULTILINE)[1:]:
            section = _parse(part)
            same = re.search(f"{_SAME}(.+)\\.$", section.own)
            if same:
                section = section._replace(own=section.own[: same.start()].rstrip(), tables=sections[same[1]].tables)
            elif newest:
                section = section._replace(tables=_complete(section, newest))
            newest = newest or section
            sections[section.title] = section
    return sections


def _parse(part: str) -> Section:
    text, *tables = re.split(r"^#### ", part, flags=re.MULTILINE)
    title, own, *about = text.strip().split("\n\n")
    return Section(title, " ".join(own.split()), "\n\n".join(about), [_parse_table(table) for table in tables])


def _parse_table(text: str) -> Table:
    heading, *about, table = text.strip().split("\n\n")
    if table == _NOTHING_TRIED:
        return Table(heading, "", (), ())
    columns, _, *lines = [line[2:-2].split(" | ") for line in table.splitlines()]
    return Table(heading, "\n\n".join(about), columns, lines)


def _complete(section: Section, newest: Section) -> list[Table]:
    """The tables of the newest versions, with the lines of `section` in place of those that differ."""
    own = _outcomes(section)
    untried = {table.heading for table in section.tables if not table.lines}
    return [
        table._replace(lines=[[*labels, *found] for labels, found in outcomes.items() if set(found) != {_UNTRIED}])
        for table in newest.tables
        for outcomes in [{} if table.heading in untried else table.outcomes | own.get(table.heading, {})]
    ]


def render(sections: Mapping[str, Section], by_hand: str = "") -> str:
    """The page, with this end."""
    blocks = [_HEAD]
    for framework in dict.fromkeys(section.framework for section in sections.values()):
        ours = [section for section in sections.values() if section.framework == framework]
        newest, *older = sorted(ours, key=lambda section: section.versions, reverse=True)
        blocks += [f"## {framework}", *_full(newest)]
        for number, section in enumerate(older):
            same = [each.title for each in (newest, *older[:number]) if _outcomes(each) == _outcomes(section)]
            blocks += _as_another(section, same[0]) if same else _differences(section, newest)
    return "\n\n".join(filter(None, (block.strip() for block in blocks))) + "\n" + by_hand


def _outcomes(section: Section) -> dict[str, dict[Labels, Outcomes]]:
    return {table.heading: table.outcomes for table in section.tables if table.lines}


def _full(section: Section) -> Iterator[str]:
    yield from (f"### {section.title}", _filled(section.own), _filled(section.about))
    for table in section.tables:
        yield from (f"#### {table.heading}", _filled(table.about), _drawn(table))


def _as_another(section: Section, title: str) -> Iterator[str]:
    yield from (f"### {section.title}", _filled(f"{section.own} {_SAME}{title}."))


def _differences(section: Section, newest: Section) -> Iterator[str]:
    """The lines that differ from those of the newest versions."""
    yield from (f"### {section.title}", _filled(section.own))
    own = _outcomes(section)
    for table in newest.tables:
        before, now = table.outcomes, own.get(table.heading, {})
        if not now:
            yield from (f"#### {table.heading}", _NOTHING_TRIED)
            continue
        untried = {labels: (_UNTRIED,) * len(found) for labels, found in before.items()}
        lines = [[*labels, *found] for labels, found in (untried | now).items() if before.get(labels) != found]
        if lines:
            yield from (f"#### {table.heading}", _drawn(table._replace(lines=lines)))


def _drawn(table: Table) -> str:
    return "\n".join([_line(table.columns), "|---" * len(table.columns) + "|", *map(_line, table.lines)])


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


_BY_HAND = "\n## By hand"
_SAME = "Outcomes as with "
_UNTRIED = "not tried"
_NOTHING_TRIED = "Not tried."
_WAY_OUT = "the same tests with --write-compatibility write it anew"
_WIDTH = 120
_HEAD = """\
# What works together

Tests write this page, except its end. A test of CI fails if it sees another outcome. Each framework has full tables for
its newest versions. Sections of older versions have the lines that differ. Everything ran on the CPU over gloo, nothing
on a GPU.
"""

TITAN = """\
"Works" means: in each of two optimizer steps the loss (within 1e-5) and the norm of the gradients (within 1e-4) are
those of the same job without a pipeline and without a compiler. The job is TorchTitan's debug model, started by
`zbpipe.titan.train` from a seed checkpoint, on two pipeline ranks with four microbatches in float32. Nothing is
compiled a second time for a later microbatch, no graph breaks, and no weight gradient is computed in I instead of W.
Where a job differs, its row says so.
"""
"""What all sections of TorchTitan say."""
