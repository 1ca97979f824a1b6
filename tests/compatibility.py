"""docs/compatibility.md has a section for each framework and version, of what its tests saw."""

import re
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import pytest
from data import text_of

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"


class Row(NamedTuple):
    feature: str
    how: str
    outcome: str


class Table(NamedTuple):
    heading: str
    about: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]


class Section(NamedTuple):
    title: str
    """By which the page knows it; it must not change from run to run."""
    own: str
    about: str
    tables: Sequence[Table]


words = partial(text_of, "compatibility.txt")
"""Those under a heading."""


def target(framework: str) -> str:
    return f"{framework} {_minor(framework)} with torch {_minor('torch')}"


def seen_with(*packages: str) -> str:
    return " and ".join(f"{package} {version(package).partition('+')[0]}" for package in packages)


def features(heading: str, about: str, rows: Iterable[Row]) -> Table:
    return Table(heading, about, ("feature", "tested how", "outcome"), list(rows))


def compare_when_all_ran(
    request: pytest.FixtureRequest, parameter: str, everything: Set[Any], seen: Set[Any], section: Callable[[], Section]
) -> None:
    """At the end of a run: compare, unless only some of the cells of `parameter` were selected."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    if not everything <= {params[parameter] for params in calls if parameter in params}:
        pytest.skip("not all cells were selected")
    assert everything - seen == set(), "these failed"
    compare(section(), request.config.getoption("--write-compatibility"))


def compare(section: Section, write: bool) -> None:
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
    """Lines of the page that were not seen, and the reverse. Of cells that it calls untried any outcome may be seen."""
    untried = {each for each in recorded if each.endswith(_UNTRIED)}
    known = tuple(re.sub(f"({re.escape(_UNTRIED[:-2])})+ \\|$", " |", each) for each in untried)
    return set(recorded - seen - untried) | {each for each in seen - recorded if not each.startswith(known)}


def read(page: str) -> dict[str, tuple[str, dict[str, str]]]:
    frameworks = {}
    for framework in re.split(r"^## ", page.removesuffix(_by_hand(page)), flags=re.MULTILINE)[1:]:
        first, *parts = (each.partition("\n") for each in re.split(r"^### ", framework, flags=re.MULTILINE))
        frameworks[first[0]] = first[2].strip(), {title: text.strip() for title, _, text in parts}
    return frameworks


def put(section: Section, page: str) -> str:
    frameworks, name = read(page), section.title.split()[0]
    _, sections = frameworks.get(name, ("", {}))
    frameworks[name] = _filled(section.about), sections | {section.title: _drawn(section)}
    blocks = [words("head")]
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
    how: dict[str, Any] = {"width": 120, "break_long_words": False, "break_on_hyphens": False}
    return "\n\n".join(fill(" ".join(paragraph.split()), **how) for paragraph in text.split("\n\n"))


def _line(fields: Iterable[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _minor(package: str) -> str:
    return ".".join(version(package).split(".")[:2])


_UNTRIED = " | not tried |"
_WAY_OUT = "the same tests with --write-compatibility write it anew"
