"""Prints docs/options.md, whose tables are the fields of `zbpipe.runtime.options.Options`:

python docs/_options.py > docs/options.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field
from itertools import groupby
from typing import Any

from zbpipe.runtime.options import IMPORT_HELP, help_of, known

_PREFIX = "--zbpipe."
_HEAD = "\n| option | meaning |\n|---|---|"
_BEFORE = """\
# Options of a job

Each option has one name and three ways to give it: `--zbpipe.NAME` for `zbpipe.titan.train` and Primus, `--NAME` for
`python -m zbpipe.run`, and `NAME=` with underscores for `zbpipe.install`. `zbpipe.build_pipeline_schedule` takes those
that concern the schedule itself."""
_AFTER = """
Options marked "torch's" need a torch that has them; otherwise zbpipe refuses them. An option that the schedule of the
job cannot use is refused, too, before anything starts."""


def _row(name: str, values: str, words: str, page: str = "") -> str:
    more = f" [More]({page})." if page else ""
    cells = f"`{_PREFIX}{name.replace('_', '-')}{values and ' '}{values}`", words + more
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _row_of(option: Field[Any]) -> str:
    how = option.metadata["how"]
    values = how.get("metavar") or "|".join(how.get("choices", ()))
    return _row(option.name, values, help_of(option, _PREFIX), option.metadata["page"])


def page() -> Iterator[str]:
    """Its lines."""
    yield _BEFORE
    for section, options in groupby(known(steps_optimizer=True), key=lambda each: each.metadata["section"]):
        yield f"\n## {section}"
        yield _HEAD
        yield from map(_row_of, options)
    yield "\n## Schedules of your own"
    yield _HEAD
    yield _row("import", "MODULE", f"{IMPORT_HELP} On command lines only: in Python, import it.")
    yield _AFTER


if __name__ == "__main__":
    print("\n".join(page()))
