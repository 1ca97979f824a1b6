"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

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
SHOWN = (
    "schedule.ir",
    "simulator.actions",
    "simulator.passes",
    "simulator.simulation",
    "simulator.timeline",
    "costs.transport",
    "simulator.message_times",
    "schedule.event_loop",
    "simulator.message_queues",
    "simulator.validation",
    "simulator.lower_bound",
    "schedule.registry",
)
"""Modules in which each public name has an example."""


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


def public(module: ModuleType) -> list[Any]:
    return [
        each
        for name, each in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(each) or inspect.isclass(each))
        and each.__module__ == module.__name__
    ]


@pytest.mark.parametrize("name", SHOWN)
def test_each_public_name_has_an_example(name: str) -> None:
    lacking = [
        each.__name__ for each in public(importlib.import_module(f"zbpipe.{name}")) if ">>> " not in each.__doc__
    ]
    assert lacking == []
