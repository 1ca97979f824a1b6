"""The code blocks of README and docs, and a program that runs those in Python: `python documents.py`.

A comment right above a block says how it runs, where that is not "as it stands":

    <!-- test: on one rank -->                  with a process group of one rank, parts of a model, data and a schedule
    <!-- test: on one rank, after training -->  the same, after some steps of that schedule
    <!-- test: compiled only, WHY -->           it is only compiled
"""

import json
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
_FOLDERS = ("", "docs/", "benchmarks/", "tests/", "examples/**/", "titan_integration/**/")
PAGES = sorted(page.relative_to(ROOT).as_posix() for folder in _FOLDERS for page in ROOT.glob(f"{folder}*.md"))
_MARK = re.compile(r"<!-- test: (.*) -->\s*$")
_STEPS = 6


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, *languages: str) -> list[Block]:
    return [block for block in _blocks(page) if not languages or block.language in languages]


def _blocks(page: str) -> Iterator[Block]:
    above = ""
    for token in MarkdownIt().parse((ROOT / page).read_text()):
        if token.type == "fence" and token.map:
            mark = _MARK.search(above)
            yield Block(page, token.map[0] + 2, token.info, token.content, mark[1] if mark else "")
        above = token.content if token.type == "html_block" else ""


def run_python(page: str) -> str:
    """The Python of a page, block by block with the same names; the traceback of what failed, or nothing."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks(page, "python"):
            code = compile("\n" * (block.line - 1) + block.code, page, "exec")
            if block.mark.startswith("compiled only, "):
                continue
            if block.mark.startswith("on one rank"):
                names = _on_one_rank() | names
            elif block.mark:
                raise ValueError(f"{block} has the unknown mark {block.mark!r}")
            if block.mark.endswith("after training"):
                for _ in range(_STEPS):
                    names["schedule"].step(names["batch"], target=names["target"])
            exec(code, names)
    except Exception:
        return traceback.format_exc()
    return ""


def _on_one_rank() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    import zbpipe

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    stages = [PipelineStage(nn.Linear(8, 8), index, 2, device) for index in range(2)]
    schedule = zbpipe.build_pipeline_schedule("ZBV", stages, 4, nn.functional.mse_loss)
    batch, target = torch.randn(16, 8), torch.randn(16, 8)
    return {
        **{"stages": stages, "data": [(batch, target)] * 2},
        **{"torch": torch, "zbpipe": zbpipe, "PipelineStage": PipelineStage, "device": device, "schedule": schedule},
        **{"rank": 0, "num_ranks": 1, "n_microbatches": 4, "batch": batch, "target": target},
        **{"loss_fn": nn.functional.mse_loss, "build_part": lambda index: nn.Linear(8, 8)},
    }


def main() -> None:
    from searching import searching_little

    from zbpipe.frameworks.installation import uninstall

    failures = {}
    with searching_little():
        for page in PAGES:
            failures[page] = run_python(page)
            uninstall()
    print(json.dumps(failures), file=sys.stderr)


if __name__ == "__main__":
    main()
