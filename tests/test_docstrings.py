"""The examples in docstrings give what they say, and each public name has one."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import zbpipe
import zbpipe.titan
from zbpipe.frameworks.installation import uninstall
from zbpipe.planner import stages
from zbpipe.runtime.adaptive import AutoSchedule
from zbpipe.runtime.verify import GradientReport
from zbpipe.schedule import registry

ROOT = Path(zbpipe.__file__).parent
MODULES = sorted(
    ".".join(("zbpipe", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text()
)
LONG = {"estimate", "pipeline"}
"""Public names whose examples take a job: the pages have them."""
PUBLIC = [
    *(getattr(each, name) for each in (zbpipe, zbpipe.costs, zbpipe.simulator) for name in each.__all__),
    *(AutoSchedule, GradientReport, zbpipe.titan.plug_in, uninstall),
]


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("zbpipe"):
            raise
        pytest.skip(f"{error}")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those below constants, which doctest does not find."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(stages, "default_budget", lambda *_: 2e5)
    module = imported(name)
    result = doctest.testmod(module, extraglobs={"zbpipe": zbpipe}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    runner = doctest.DocTestRunner()
    for each in ast.parse(inspect.getsource(module)).body[1:]:
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            text = str(each.value.value)
            runner.run(doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, module.__file__, 0))
    assert runner.failures == 0
    assert result.attempted + runner.tries > 0


def test_each_public_name_has_an_example() -> None:
    """Above torch one that runs; below, where stages would have to be made first, some lines of code."""
    without = []
    for public in PUBLIC:
        words, *_ = re.split(r"^(?:Args|Raises):", inspect.getdoc(public) or "", flags=re.MULTILINE)
        above_torch = not re.match(r"zbpipe\.(runtime|frameworks|titan)", public.__module__)
        if not re.search(r">>> " if above_torch else r"^(>>> |    )", words, re.MULTILINE):
            without.append(public.__name__)
    assert set(without) <= LONG
