"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import zbpipe
from zbpipe.planner import stages
from zbpipe.schedule import registry

ROOT = Path(zbpipe.__file__).parent
MODULES = sorted(
    ".".join(("zbpipe", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text()
)
LONG = {"estimate", "install", "pipeline"}
"""Public names whose examples take a job: the pages have them."""


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("zbpipe"):
            raise
        pytest.skip(f"{error}")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(stages, "default_budget", lambda *_: 2e5)
    result = doctest.testmod(imported(name), extraglobs={"zbpipe": zbpipe}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("package", [zbpipe, zbpipe.costs, zbpipe.simulator], ids=lambda package: package.__name__)
def test_each_public_name_above_torch_has_an_example(package: ModuleType) -> None:
    public = [getattr(package, name) for name in package.__all__ if name not in LONG]
    above = [each for each in public if not each.__module__.startswith("zbpipe.runtime")]
    assert [each.__name__ for each in above if ">>> " not in each.__doc__] == []
