"""The arrows between modules: no cycle, few floors, and no torch above the runtime."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import zbpipe

ROOT = Path(zbpipe.__file__).parent
NEED_TORCH = ("runtime", "frameworks", "titan", "run")
"""What may import torch, and what imports these."""
FORMALITIES = {"zbpipe", "zbpipe.__main__"}
"""Every package has these, and what `zbpipe` names it loads late."""


BUDGETS = {
    "src/zbpipe": 294,
    "src/zbpipe/algorithms": 760,
    "src/zbpipe/cli": 1550,
    "src/zbpipe/costs": 982,
    "src/zbpipe/estimation": 1492,
    "src/zbpipe/frameworks": 3542,
    "src/zbpipe/planner": 1812,
    "src/zbpipe/runtime": 8383,
    "src/zbpipe/schedule": 703,
    "src/zbpipe/simulator": 1528,
    "src/zbpipe/titan": 62,
    "src/zbpipe/views": 1016,
    "tests": 22745,
    "benchmarks": 3969,
}
"""Lines of code by folder, without docstrings, comments and blank lines. Who needs more in one lowers another."""
NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def name_of(path: Path) -> str:
    return ".".join(("zbpipe", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


FILES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imports(tree: ast.AST) -> set[str]:
    """All imports, also those inside functions and those that only type checkers see."""
    if isinstance(tree, ast.Import):
        return {each.name for each in tree.names}
    if isinstance(tree, ast.ImportFrom):
        names = {f"{tree.module}.{each.name}" for each in tree.names}
        return {name if name in FILES else str(tree.module) for name in names}
    return {name for child in ast.iter_child_nodes(tree) for name in imports(child)}


@cache
def graph() -> dict[str, set[str]]:
    """By module the modules of zbpipe that it imports. (What `zbpipe` loads late, it loads by name.)"""
    trees = {name: ast.parse(path.read_text()) for name, path in FILES.items() if name not in FORMALITIES}
    found = {name: imports(tree) for name, tree in trees.items()}
    found["zbpipe.algorithms"] |= {name for name in FILES if name.startswith("zbpipe.algorithms.")}
    return {name: (names & found.keys()) - {name} for name, names in found.items()}


def entries(parent: str = "zbpipe") -> dict[str, set[str]]:
    """By entry right below `parent`, a folder or a module, the other entries that it imports."""
    depth = parent.count(".") + 2
    found: dict[str, set[str]] = {}
    for name, others in graph().items():
        if name.startswith(f"{parent}."):
            own, *below = (".".join(each.split(".")[:depth]) for each in (name, *others))
            found.setdefault(own, set()).update({each for each in below if each.startswith(f"{parent}.")} - {own})
    return found


def floors(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """By entry how many entries are on the longest way down from it, itself included."""
    found: dict[str, int] = {}
    for name in TopologicalSorter(arrows).static_order():
        found[name] = 1 + max((found[other] for other in arrows[name]), default=0)
    return found


def test_no_cycle_of_modules() -> None:
    list(TopologicalSorter(graph()).static_order())


def test_few_entries_on_few_floors_without_a_cycle() -> None:
    assert max(floors(entries()).values()) <= 9
    assert len(entries()) <= 13


def test_few_entries_on_few_floors_within_the_runtime() -> None:
    assert max(floors(entries("zbpipe.runtime")).values()) <= 9
    assert len(entries("zbpipe.runtime")) <= 14


def test_no_torch_above_the_runtime() -> None:
    """Neither by itself nor by its imports."""
    modules = graph()
    below = {name: name.split(".")[1:2] in [[each] for each in NEED_TORCH] for name in modules}
    for name, path in FILES.items():
        # The command runs the demo, which is a user of the runtime.
        if name in modules and not below[name] and not name.startswith("zbpipe.cli"):
            wanted = {each.split(".")[0] for each in imports(ast.parse(path.read_text()))}
            assert "torch" not in wanted, name
            assert not [other for other in modules[name] if below[other]], name


def test_one_module_knows_accelerators() -> None:
    """By torch's interface for all of them, not CUDA's."""
    names = re.compile(r"torch\.(cuda|xpu)\b|get_device_module")
    users = {name for name, path in FILES.items() if names.search(path.read_text())}
    assert users <= {"zbpipe.runtime.device", "zbpipe.cli.doctor"}
    assert "torch.cuda." not in FILES["zbpipe.runtime.device"].read_text()


def test_nothing_imports_transformers() -> None:
    for name, path in FILES.items():
        assert "transformers" not in {each.split(".")[0] for each in imports(ast.parse(path.read_text()))}, name


def test_few_public_names_besides_the_classes() -> None:
    functions = [name for name in zbpipe.__all__ if not name.startswith("Schedule") or name == "Schedule"]
    assert len(functions) <= 24
    assert zbpipe.__all__ == sorted(zbpipe.__all__, key=lambda name: (not name[0].isupper(), name))
    assert all(hasattr(zbpipe, name) for name in zbpipe.__all__)


def count_code(path: Path) -> int:
    """Lines of code in a file."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for each in tokens if each.type not in NO_CODE for line in range(each.start[0], each.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_budgets() -> None:
    found = Counter[str]()
    for folder in ("src/zbpipe", "tests", "benchmarks"):
        for path in (ROOT.parent.parent / folder).rglob("*.py"):
            inner = path.relative_to(ROOT.parent.parent).parts[:-1]
            found["/".join(inner[:3] if folder.startswith("src") else inner[:1])] += count_code(path)
    over = {folder: lines for folder, lines in found.items() if lines > BUDGETS[folder]}
    assert not over, f"more lines of code than the budgets: {over}"
