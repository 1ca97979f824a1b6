"""Prints docs/options.md, whose tables are the fields of `zbpipe.frameworks.options.Options`:

python docs/_options.py > docs/options.md
"""

import re
from collections.abc import Iterator

from zbpipe.frameworks.options import IMPORT_HELP, help_of, list_options

_PREFIX = "--zbpipe."
_SECTIONS = {
    "split_backward": "The split and its check",
    "profile_steps": "Measuring",
    "costs_file": "Measured costs and offload",
    "receives": "Messages",
    "optimizer_step": "The optimizer step",
    "fsdp_mode": "FSDP",
    "fill_waits": "Waits for collectives",
    "plain": "In trouble",
    "import": "Schedules of your own",
}
"""By the first option of each."""
_BEFORE = """\
# Options of a job

Each option has one name and three ways to give it: `--zbpipe.NAME` for `zbpipe.titan.train` and Primus, `--NAME` for
`python -m zbpipe.run`, and `NAME=` with underscores for `zbpipe.install`. `zbpipe.build_pipeline_schedule` takes those
that concern the schedule itself."""
_AFTER = """
Options marked "torch's" need a torch that has them; otherwise zbpipe refuses them. An option that the schedule of the
job cannot use is also refused, before anything starts."""


def _lines() -> Iterator[str]:
    yield _BEFORE
    for each in list_options(steps_optimizer=True):
        how = each.metadata["how"]
        yield from _row(each.name, how.get("metavar") or _choices(how.get("choices", ())), help_of(each, _PREFIX))
    yield from _row("import", "MODULE", f"{IMPORT_HELP} On command lines only: in Python, import it.")
    yield _AFTER


def _choices(names: tuple[str, ...]) -> str:
    return f"{{{','.join(names)}}}" if names else ""


def _row(name: str, values: str, words: str) -> Iterator[str]:
    if name in _SECTIONS:
        yield f"\n## {_SECTIONS[name]}\n\n| option | meaning |\n|---|---|"
    option = f"{_PREFIX}{name.replace('_', '-')} {values}".strip()
    linked = re.sub(r"docs/([a-z-]+\.md)", r"[more](\1)", words)
    yield f"| `{option}` | {linked} |"


print("\n".join(_lines()))
