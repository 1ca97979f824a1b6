"""Private names of torch and TorchTitan stand in their own rooms, so that a new version means few files to read."""

import ast
import re
from collections.abc import Iterator
from inspect import get_annotations, getsource
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import schedules, stage

from zbpipe.runtime.schedules import RegisteredSchedule
from zbpipe.runtime.split.stage import SplitWork

ROOT = Path(__file__).parent.parent
SOURCES = sorted(each for folder in ("src/zbpipe", "titan_integration") for each in (ROOT / folder).rglob("*.py"))
ROOMS = ("runtime/_torch/", "frameworks/titan/plug.py", "frameworks/titan/models.py")
"""The files that may use private names."""
ALLOWED = {
    # What frameworks keep under private names of their own, and which frameworks/automodel.py lists.
    ("frameworks/automodel.py", "_dp_allreduce"),
    # os._exit, which the standard library documents.
    ("runtime/ranks/failures.py", "_exit"),
}
NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
TORCHS = frozenset(re.findall(r"self\.(_[a-z]\w*)", getsource(schedules) + getsource(stage))) | {
    name for kind in (torch.Tensor, torch.nn.Module) for name in dir(kind) if re.match(r"_[a-z]", name)
}
"""What torch's schedules, stages, tensors and modules call their private attributes and methods."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(tree: ast.Module) -> set[str]:
    """What this file defines or assigns itself."""
    return {
        name
        for node in ast.walk(tree)
        for name in (
            getattr(node, "name", None),
            node.attr if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else None,
            node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None,
            node.arg if isinstance(node, (ast.arg, ast.keyword)) else None,
        )
        if isinstance(name, str)
    }


def _private_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        for name in (f"{module}.{each}".strip(".") for each in names):
            first, *rest = name.split(".")
            if first in ("torch", "torchtitan") and any(map(_is_private, rest)):
                yield name


def private_names(code: str) -> list[str]:
    """Private names that this code takes from elsewhere, and those of its own that torch has, too."""
    tree = ast.parse(code)
    own = _own_names(tree)
    found = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in NAMED_TUPLES
        if not isinstance(node.value, ast.Name) or (node.value.id, node.attr) not in (("runtime", "_torch"),)
        if node.attr not in own
    ]
    return [*_private_imports(tree), *found]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_private_names_stay_in_their_rooms(file: Path) -> None:
    name = file.relative_to(ROOT).as_posix().removeprefix("src/zbpipe/")
    if name.startswith(ROOMS):
        return
    found = [each for each in private_names(file.read_text()) if (name, each) not in ALLOWED]
    assert not found, f"{name} uses the private names {found}: give them a function in runtime/_torch"


@pytest.mark.parametrize("kind", [RegisteredSchedule, SplitWork])
def test_what_zbpipe_adds_to_torchs_classes_hides_nothing_private(kind: type) -> None:
    """An attribute of ours with the name of one of torch's would replace it without a word."""
    ours = [each for each in kind.__mro__ if re.match(r"zbpipe\.(?!runtime\._torch)", each.__module__)]
    assert ours
    names = {name for each in ours for name in (*vars(each), *get_annotations(each))}
    assigned = {name for each in ours for name in re.findall(r"self\.(_\w+)(?:: [^=\n]+)? =", _source(each))}
    assert not (names | assigned) & TORCHS


def _source(kind: type) -> str:
    try:
        return getsource(kind)
    except (OSError, TypeError):  # made by `type`
        return ""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch.utils._pytree import tree_leaves", ["torch.utils._pytree.tree_leaves"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torchtitan.components.metrics import _rank", ["torchtitan.components.metrics._rank"]),
        ("schedule._stages[0]", ["_stages"]),
        ("torch._grouped_mm(x, w)", ["_grouped_mm"]),
        ("class A:\n    def __init__(self):\n        self._own = 1\n    def own(self):\n        return self._own", []),
        ("from zbpipe.runtime import _torch\n_torch.stages_of(schedule)", []),
        ("op._replace(stage=1)", []),
    ],
)
def test_the_rule_finds_what_it_is_for(code: str, found: list[str]) -> None:
    assert private_names(code) == found
