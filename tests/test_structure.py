"""The arrows between modules: no circle, and no torch above the runtime."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import zbpipe

ROOT = Path(zbpipe.__file__).parent
NEED_TORCH = ("runtime", "frameworks", "titan", "demo", "run")
"""What may import torch, and what imports these."""


def name_of(path: Path) -> str:
    return ".".join(("zbpipe", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


FILES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imports(tree: ast.AST) -> set[str]:
    """All that is imported, inside of functions, too, but for what only type checkers see."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return set()
    if isinstance(tree, ast.Import):
        return {each.name for each in tree.names}
    if isinstance(tree, ast.ImportFrom):
        names = {f"{tree.module}.{each.name}" for each in tree.names}
        return {name if name in FILES else str(tree.module) for name in names}
    return {name for child in ast.iter_child_nodes(tree) for name in imports(child)}


def graph() -> dict[str, set[str]]:
    """By module the modules of zbpipe that it imports. (What `zbpipe` loads late, it loads by name.)"""
    found = {name: imports(ast.parse(path.read_text())) for name, path in FILES.items()}
    found["zbpipe.algorithms"] |= {name for name in FILES if name.startswith("zbpipe.algorithms.")}
    return {name: (names & FILES.keys()) - {name} for name, names in found.items()}


def folder(name: str) -> str:
    """The folder right below `zbpipe` in which a module lies, or the module itself."""
    return ".".join(name.split(".")[:2])


def test_no_circle_of_modules() -> None:
    list(TopologicalSorter(graph()).static_order())


def test_no_circle_of_folders() -> None:
    folders: dict[str, set[str]] = {}
    for name, others in graph().items():
        folders.setdefault(folder(name), set()).update({folder(other) for other in others} - {folder(name)})
    list(TopologicalSorter(folders).static_order())


def test_no_torch_above_the_runtime() -> None:
    """Neither by itself nor by what it imports."""
    modules = graph()
    below = {name: name.split(".")[1:2] in [[each] for each in NEED_TORCH] for name in modules}
    for name, path in FILES.items():
        # The command runs the demo, which is a user of the runtime.
        if not below[name] and not name.startswith("zbpipe.cli"):
            wanted = {each.split(".")[0] for each in imports(ast.parse(path.read_text()))}
            assert "torch" not in wanted, name
            assert not [other for other in modules[name] if below[other]], name


@pytest.mark.parametrize("module", ["zbpipe", "zbpipe.cli", "zbpipe.planner.plan", "zbpipe.planner.partition"])
def test_importing_it_loads_no_torch(module: str) -> None:
    program = f"import sys, {module}; assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
