"""Each public name that needs torch has an example; those of constants, which doctest does not find, run here."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from pathlib import Path

import pytest

import zbpipe
import zbpipe.titan
from zbpipe.frameworks.installation import uninstall
from zbpipe.runtime.adaptive import AutoSchedule
from zbpipe.runtime.verify import GradientReport

PUBLIC = [
    AutoSchedule,
    zbpipe.GradientCheck,
    GradientReport,
    zbpipe.PipelineError,
    zbpipe.Profiler,
    *(getattr(zbpipe, name) for name in zbpipe.__all__ if name.startswith("Schedule") and name != "Schedule"),
    zbpipe.build_pipeline_schedule,
    zbpipe.check_gradients,
    zbpipe.install,
    zbpipe.titan.plug_in,
    uninstall,
]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda each: each.__name__)
def test_each_public_name_has_an_example(public: object) -> None:
    words, *_ = re.split(r"^(?:Args|Raises):", inspect.getdoc(public) or "", flags=re.MULTILINE)
    assert re.search(r"^(>>> |    )", words, re.MULTILINE)


def test_examples_of_constants() -> None:
    from zbpipe.runtime.split import products

    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    tree = ast.parse(Path(products.__file__).read_text())
    texts = [
        each.value.value for each in tree.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
    ]
    for text in texts:
        runner.run(parser.get_doctest(str(text), dict(vars(products)), "products", products.__file__, 0))
    assert runner.tries >= 4
    assert runner.failures == 0
